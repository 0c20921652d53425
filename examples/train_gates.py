"""Train retention gates for a frozen model, and use them: a run of seconds on bundled data.

Needs the train extra. Run: python examples/train_gates.py [STEPS]    (default 6)
`mmkv distill --help` lists every setting; docs/how-to/train-gates.md tells what real runs took.
"""

import sys
import tempfile
from pathlib import Path

import mmkv
from mmkv.resources import asset
from mmkv.training.distill import main as distill
from mmkv.training.folder import history


def main() -> None:
    """Train on scenes with few objects, then answer with the gates under a small budget."""
    steps = sys.argv[1] if len(sys.argv) > 1 else "6"
    with tempfile.TemporaryDirectory() as folder:
        options = (
            "--data scenes:sparse --budget 24 --d-gate 32 --bias 8 --lr 4e-3 --log-every 1 "
            f"--device cpu --steps {steps}"
        )
        model, output = ["--model", str(mmkv.bundled_model())], ["--output", folder]
        code = distill([*model, *output, *options.split()])
        if code:
            sys.exit(code)
        losses = [row["loss"] for row in history(Path(folder)) if "loss" in row]
        print(f"loss {losses[0]:.3f} at the first of {steps} steps, {losses[-1]:.3f} at the last")
        engine = mmkv.Engine.from_pretrained(mmkv.bundled_model(), gates=folder, budget=24)
        with engine.session() as session:
            question = "what is at row 2, column 3?"
            answer = "".join(session.send(question, images=[asset("scene.png")]))
        print(f"{engine.policy.name} with the new gates: {answer}")


if __name__ == "__main__":
    main()
