"""What the adapter learns to read: grids of emoji and shapes, and easy-VQA's pictures.

A talk is a function of its split and seed. Held-out talks ask about combinations of object and
cell that no training picture shows, and about easy-VQA's own test pictures.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from engine.errors import InputError
from mmkv.data.scenes import (
    CELL,
    EMPTY,
    SHAPES,
    Item,
    Question,
    Scene,
    Split,
    is_heldout,
    object_names,
    place,
    render,
)

SIDE = 4  # patches along an edge of a picture; a grid has 1 or 2 cells there
_SIDES, _WEIGHTS = (1, 2), (1, 2)
_EASY_COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
_EASY_SHAPES = ("circle", "rectangle", "triangle")
_FETCH = "pip install --no-deps easy-vqa==1.0 (3 MB, MIT)"


@dataclass(frozen=True)
class Shown:
    """A picture and what it shows.

    Attributes:
        names: of the things in its cells, row by row; 1 or 4 of them.
        file: of a picture that is not drawn here.
    """

    names: tuple[str, ...]
    file: Path | None = None

    @property
    def side(self) -> int:
        """Return the cells along an edge."""
        return int(len(self.names) ** 0.5)

    def at(self, row: int, column: int) -> str:
        """Name of what stands in a cell (1-based), or ``nothing``."""
        return self.names[(row - 1) * self.side + column - 1]

    def picture(self) -> Image.Image:
        """Draw or read the picture, RGB."""
        if self.file is not None:
            with Image.open(self.file) as opened:
                return opened.convert("RGB")
        items = tuple(
            Item(name, index % self.side * CELL, index // self.side * CELL)
            for index, name in enumerate(self.names)
            if name != EMPTY
        )
        return render(Scene("grid", self.side, self.side, items))

    def patches(self) -> list[tuple[str, int, int]]:
        """Return what each of the SIDE x SIDE patches shows: name, row and column of its cell."""
        cells = [index * self.side // SIDE + 1 for index in range(SIDE)]
        return [(self.at(row, column), row, column) for row in cells for column in cells]


@dataclass(frozen=True)
class Turn:
    """A question, and the picture that is new with it."""

    question: Question
    shown: Shown | None = None


def all_names() -> tuple[str, ...]:
    """Return the name of everything that a picture may hold."""
    easy = (f"{colour} {shape}" for colour in _EASY_COLOURS for shape in _EASY_SHAPES)
    return tuple(dict.fromkeys((*object_names(), *easy, EMPTY)))


@dataclass(frozen=True)
class EasyVQA:
    """Pictures of one coloured shape with questions (easy-VQA, Victor Zhou, MIT).

    Attributes:
        pictures: those whose colour and shape the questions tell; asked: questions on each.
    """

    pictures: tuple[Shown, ...]
    asked: tuple[tuple[Question, ...], ...]

    @classmethod
    def of(cls, folder: Path, split: Split) -> EasyVQA:
        """Read the package's folder ``data``.

        Raises:
            InputError: it is not there or holds something else.
        """
        part = folder / ("train" if split == "train" else "test")
        try:
            rows = json.loads((part / "questions.json").read_text())
            asked: dict[int, list[Question]] = defaultdict(list)
            for text, answer, number in rows:
                asked[int(number)].append(Question(_kind(answer), str(text), str(answer)))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{part} does not hold easy-VQA ({error}); {_FETCH}") from error
        found = {number: _seen(questions) for number, questions in sorted(asked.items())}
        whole = [number for number, name in found.items() if name]
        shown = (Shown((found[n],), part / "images" / f"{n}.png") for n in whole)
        return cls(tuple(shown), tuple(tuple(asked[number]) for number in whole))


def easy_vqa_folder() -> Path:
    """Return the data of the installed package ``easy-vqa``. Raises InputError: it is missing."""
    package = importlib.util.find_spec("easy_vqa")
    if package is None or package.origin is None:
        raise InputError(f"easy-VQA's pictures are missing: {_FETCH}, or name a folder")
    return Path(package.origin).parent / "data"


def _kind(answer: str) -> str:
    if answer in ("yes", "no"):
        return "easy-VQA yes/no"
    return "easy-VQA shape" if answer in _EASY_SHAPES else "easy-VQA colour"


def _seen(questions: Iterable[Question]) -> str:
    """Return colour and shape as questions and answers tell them; empty where one is left open."""
    found: dict[str, str] = {}
    for question in questions:
        words = set(re.findall(r"\w+", question.text))
        negated = bool(words & {"not", "no"})
        if question.answer in ("yes", "no") and (question.answer == "yes") == negated:
            continue
        told = {*words, question.answer}
        for kind, names in (("colour", _EASY_COLOURS), ("shape", _EASY_SHAPES)):
            found.update((kind, name) for name in names if name in told)
    return f"{found['colour']} {found['shape']}" if len(found) == 2 else ""


def talk(seed: int, split: Split, easy: EasyVQA, turns: int = 4) -> list[Turn]:
    """Make a talk of so many questions, or a few more: pictures come as they are asked about.

    Args:
        easy: easy-VQA's pictures, of the same split.
    """
    rng = random.Random(f"llava-{split}-{seed}")
    made: list[Turn] = []
    while len(made) < turns:
        shown, questions = _picture(rng, split, easy)
        made += [Turn(q, None if index else shown) for index, q in enumerate(questions)]
    return made


def _picture(rng: random.Random, split: Split, easy: EasyVQA) -> tuple[Shown, list[Question]]:
    """Draw a picture with questions; of held-out ones none gives another's answer away."""
    if rng.random() < 0.3:
        index = rng.randrange(len(easy.pictures))
        # One of each kind; three in four of all are yes or no, and few of these need the picture.
        asked = list(easy.asked[index])
        rng.shuffle(asked)
        by_kind = {each.kind: each for each in asked}
        return easy.pictures[index], rng.sample(list(by_kind.values()), min(2, len(by_kind)))
    side = rng.choices(_SIDES, _WEIGHTS)[0]
    shown = grid(rng, split, side)
    cells = [
        index
        for index, name in enumerate(shown.names)
        if split == "train" or _held(name, side, index)
    ]
    rng.shuffle(cells)
    made = [(cell // side, ask(rng, shown, cell)) for cell in cells[:3]]
    if split == "heldout":  # a row that was named gives its cells away, and itself
        rows = {row for row, question in made if question.kind.startswith("row")}
        made = [each for each in made if each[1].kind.startswith("row") or each[0] not in rows]
        made = list({question.text: (row, question) for row, question in made}.values())
    return shown, [question for _, question in made]


def grid(rng: random.Random, split: Split, side: int) -> Shown:
    """Draw a grid of ``side`` x ``side`` cells; held-out ones hold held-out combinations."""
    names: Sequence[str] = object_names()
    while True:
        filled = 1.0 if side == 1 else rng.choice((1.0, 1.0, 0.8, 0.6))
        cells = [rng.choice(names) if rng.random() < filled else EMPTY for _ in range(side**2)]
        held = [_held(name, side, index) for index, name in enumerate(cells)]
        if split == "heldout" and any(held):
            return Shown(tuple(cells))
        if split == "train" and not (side == 1 and held[0]):
            return Shown(tuple(EMPTY if out else n for n, out in zip(cells, held, strict=True)))


def ask(rng: random.Random, shown: Shown, cell: int) -> Question:
    """Ask about a cell of a grid, or about its row."""
    side, name, kind = shown.side, shown.names[cell], rng.random()
    row, column = _cell(cell, side)
    if name.split()[-1] in SHAPES and kind < 0.2:
        text = f"what colour is the shape at {place(row, column)}?"
        return Question(f"colour, {side} x {side}", text, name.split()[0])
    if side > 1 and kind > 0.8:
        line = ", ".join(shown.at(row, each) for each in range(1, side + 1))
        return Question(f"row, {side} x {side}", f"name row {row}.", line)
    text = "what is this?" if side == 1 else f"what is at {place(row, column)}?"
    return Question(f"cell, {side} x {side}", text, name)


def _cell(index: int, side: int) -> tuple[int, int]:
    return index // side + 1, index % side + 1


def _held(name: str, side: int, index: int) -> bool:
    return name != EMPTY and is_heldout("llava", name, side, index)
