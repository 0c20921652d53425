"""Draw held-out pictures as PNG: ``python tools/draw_scene.py assets/scene.png --seed 7``."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mmkv.training.data.scenes import make_scene, questions, render


def main() -> None:
    """Run the program: write the picture, print what may be asked about it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(f"drawn-{args.seed}")
    scene = make_scene(rng, "heldout")
    while scene.kind != "grid" or (scene.rows, scene.columns) != (4, 4) or len(scene.items) < 14:
        scene = make_scene(rng, "heldout")
    render(scene).save(args.output)
    for question in questions(scene, rng):
        print(f"{question.text}  {question.answer}")


if __name__ == "__main__":
    main()
