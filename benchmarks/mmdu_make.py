"""Make mmkv's small dialogue set in MMDU's format, with exact answers.

``python -m benchmarks.mmdu_make`` puts held-out scenes into dialogues, some with a page that shows
a word or a number. Seeds are used in order, except those of dialogues with a repeated question; no
model's answers decide the selection. ``assets/mmdu`` is the output of this program, with the
pictures in one archive (:func:`mmkv.resources.bundled_dialogues`). Rows have one key more than
MMDU's: ``exact``, the kind of each question.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from mmkv.training.data.dialogues import about, caption, dense, grid, sparse
from mmkv.training.data.scenes import Scene, SceneTurn, make_scene, questions, render

PLACEHOLDER = "<ImageHere>"
FOLDER = Path("assets/mmdu")
# Enough for sprites of 32 pixels; with all colours the set would be three times as large.
COLOURS = 128


def page(seed: int, pictures: int, turns: int) -> list[SceneTurn]:
    """Make a dialogue whose second picture is a written page, asked for again at the very end.

    One page a dialogue: the bundled model reads a page well and mixes up several.
    """
    rng = random.Random(f"page-{seed}")
    starts = {index * turns * 3 // 4 // pictures for index in range(pictures)}
    shown: list[Scene] = []
    made: list[SceneTurn] = []
    for index in range(turns):
        new: tuple[Scene, ...] = ()
        if index in starts:
            new = (_page(rng) if len(shown) == 1 else grid(rng, "heldout"),)
            shown += new
        if len(shown) < 3 and new:
            kinds = ("read", "cell")
            asked = next(q for q in questions(shown[-1], rng) if q.kind in kinds)
        else:
            others = [number for number in range(1, len(shown) + 1) if number != 2]
            number = 2 if index == turns - 1 else rng.choice(others)
            asked = about(shown, rng, number, search=False)
        made.append(SceneTurn(new, asked, (caption(len(shown)),) if new else ()))
    return made


def _page(rng: random.Random) -> Scene:
    while True:
        scene = make_scene(rng, "heldout")
        if scene.kind == "text" and len(scene.text) > 1:
            return scene


# Name, number of dialogues, and the function from a seed to a dialogue.
_SORTS: tuple[tuple[str, int, Callable[[int], list[SceneTurn]]], ...] = (
    ("dense-4", 4, lambda seed: dense(seed, "heldout", 4, 8, search=False)),
    ("dense-8", 2, lambda seed: dense(seed, "heldout", 8, 12, search=False)),
    ("sparse-12", 2, lambda seed: sparse(seed, "heldout", 12, 2, 8, search=False)),
    ("sparse-20", 1, lambda seed: sparse(seed, "heldout", 20, 3, 10, search=False)),
    ("page-6", 3, lambda seed: page(seed, 6, 8)),
)


def dialogues() -> Iterator[tuple[str, list[SceneTurn]]]:
    """Yield ids and turns of the set: 12 dialogues of 8 to 12 turns over 4 to 20 pictures."""
    for name, count, make in _SORTS:
        seeds = (seed for seed in range(1000) if not _repeats(make(seed)))
        for seed in islice(seeds, count):
            yield f"{name}-{seed}", make(seed)


def _repeats(turns: list[SceneTurn]) -> bool:
    """Return whether a question comes twice; the second can be answered from the first answer."""
    return len({turn.question.text for turn in turns}) < len(turns)


def row(name: str, turns: list[SceneTurn]) -> tuple[dict[str, Any], dict[str, Image.Image]]:
    """Make one row of ``benchmark.json`` and its pictures by path."""
    pictures: dict[str, Image.Image] = {}
    conversations: list[dict[str, str]] = []
    for turn in turns:
        text = ""
        for part in turn.parts():
            if isinstance(part, str):
                text += part
            elif isinstance(part, Scene):
                path = f"pictures/{name}-{len(pictures) + 1:02}.png"
                pictures[path] = render(part).quantize(COLOURS, dither=Image.Dither.NONE)
                text += PLACEHOLDER
            else:
                raise ValueError("MMDU has pictures only; a clip cannot be written")
        conversations.append({"from": "user", "value": text})
        conversations.append({"from": "assistant", "value": turn.question.answer})
    made = {
        "id": name,
        "image": list(pictures),
        "conversations": conversations,
        "exact": [turn.question.kind for turn in turns],
    }
    return made, pictures


def write(folder: Path) -> int:
    """Write the set and return its size in bytes."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows, size = [], 0
    for name, turns in dialogues():
        made, pictures = row(name, turns)
        rows.append(made)
        for path, picture in pictures.items():
            picture.save(folder / path, "PNG", optimize=True)
            size += (folder / path).stat().st_size
    text = json.dumps(rows, indent=1) + "\n"
    (folder / "benchmark.json").write_text(text)
    return size + len(text)


def pack(folder: Path) -> int:
    """Write the set with its pictures in ``pictures.zip``, and return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as draft:
        size = write(Path(draft))
        shutil.copy(Path(draft) / "benchmark.json", folder)
        with zipfile.ZipFile(folder / "pictures.zip", "w") as archive:
            for picture in sorted(Path(draft).glob("pictures/*.png")):
                # A fixed date: the same pictures give the same archive.
                archive.writestr(zipfile.ZipInfo(picture.name), picture.read_bytes())
    return size


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()
    size = pack(args.output)
    print(f"{args.output}: {len(list(dialogues()))} dialogues, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
