"""Training pictures and questions of the adapter: one thing, four of them, easy-VQA's shapes.

A talk is a function of its split and seed. Held-out talks ask about combinations that no training
picture shows: of a thing and its coloured background, or of a thing and its cell of a grid; and
about easy-VQA's own test pictures.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageOps

from mmkv.engine.errors import InputError
from mmkv.training.data.scenes import (
    EMPTY,
    SHAPES,
    Question,
    Split,
    is_heldout,
    object_names,
    tile,
)

SIDE = 4  # patches along an edge of a picture, a token each
PIXELS = 128
PLACES = ("first", "second", "third", "fourth")  # cells of a grid, row by row
# Light, so that no shape has the colour of what it lies on.
_WHITE = "white"
BACKGROUNDS = {
    _WHITE: (255, 255, 255),
    "grey": (232, 232, 232),
    "cream": (250, 243, 222),
    "pink": (252, 228, 232),
    "sky": (222, 238, 252),
    "mint": (224, 246, 228),
}
_SMALLEST = 64  # pixels along the edge of a thing that is alone
_EASY_COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
_EASY_SHAPES = ("circle", "rectangle", "triangle")
_FETCH = "pip install --no-deps easy-vqa==1.0 (3 MB, MIT)"


@dataclass(frozen=True)
class Shown:
    """A picture and what it shows.

    Attributes:
        names: of the one thing, or of the four in the cells of a 2 x 2 grid, row by row.
        box: left, top and edge of a thing that is alone, in pixels.
        background: one of BACKGROUNDS.
        file: of a picture that is not drawn here. mirrored: left and right of it change places.
    """

    names: tuple[str, ...]
    box: tuple[int, int, int] = (0, 0, PIXELS)
    background: str = _WHITE
    file: Path | None = None
    mirrored: bool = False

    def picture(self) -> Image.Image:
        """Draw or read the picture, RGB."""
        if self.file is not None:
            with Image.open(self.file) as opened:
                read = opened.convert("RGB")
            return ImageOps.mirror(read) if self.mirrored else read
        made = Image.new("RGB", (PIXELS, PIXELS), BACKGROUNDS[self.background])
        half = PIXELS // 2
        cells = [(index % 2 * half, index // 2 * half, half) for index in range(4)]
        for name, (left, top, edge) in zip(
            self.names, cells if len(self.names) > 1 else [self.box], strict=True
        ):
            if name != EMPTY:
                sprite = tile(name).resize((edge, edge), Image.Resampling.BICUBIC)
                made.paste(sprite, (left, top), sprite)
        return made


@dataclass(frozen=True)
class PictureTurn:
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
        # Yes and no can be guessed from most of the questions with these answers.
        openly = {n: tuple(q for q in asked[n] if q.answer not in ("yes", "no")) for n in asked}
        found = {n: _seen(questions) for n, questions in sorted(asked.items()) if openly[n]}
        whole = [number for number, name in found.items() if name]
        shown = (Shown((found[n],), file=part / "images" / f"{n}.png") for n in whole)
        return cls(tuple(shown), tuple(openly[n] for n in whole))


def easy_vqa_folder() -> Path:
    """Return the data of the installed package ``easy-vqa``. Raises InputError: it is missing."""
    package = importlib.util.find_spec("easy_vqa")
    if package is None or package.origin is None:
        raise InputError(f"easy-VQA's pictures are missing: {_FETCH}, or name a folder")
    return Path(package.origin).parent / "data"


def _kind(answer: str) -> str:
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


def talk(seed: int, split: Split, easy: EasyVQA, turns: int = 4) -> list[PictureTurn]:
    """Make a talk of so many questions: pictures come as they are asked about.

    Args:
        easy: easy-VQA's pictures, of the same split.
    """
    rng = random.Random(f"llava-{split}-{seed}")
    made: list[PictureTurn] = []
    while len(made) < turns:
        shown, questions = picture(rng, split, easy)
        made += [PictureTurn(q, None if index else shown) for index, q in enumerate(questions)]
    return made[:turns]


def picture(rng: random.Random, split: Split, easy: EasyVQA) -> tuple[Shown, list[Question]]:
    """Draw a picture with one or two questions."""
    kind = rng.random()
    if kind < 0.25:
        index = rng.randrange(len(easy.pictures))
        mirrored = split == "train" and rng.random() < 0.5
        shown = replace(easy.pictures[index], mirrored=mirrored)
        return shown, [rng.choice(easy.asked[index])]
    return one(rng, split) if kind < 0.55 else grid(rng, split)


def one(rng: random.Random, split: Split) -> tuple[Shown, list[Question]]:
    """Draw one thing at any size and place on a background."""
    while True:
        name, background = rng.choice((*object_names(), EMPTY)), rng.choice(list(BACKGROUNDS))
        out = is_heldout("llava", name, background)
        # On white every thing is known: training's grids are white.
        if out and background != _WHITE if split == "heldout" else not out:
            break
    edge = rng.randint(_SMALLEST, PIXELS)
    left, top = (rng.randint(0, PIXELS - edge) for _ in range(2))
    shown = Shown((name,), (left, top, edge), background)
    colour, _, shape = name.rpartition(" ")
    if shape in SHAPES and rng.random() < 0.5:
        return shown, [
            Question("colour", "what color is the shape?", colour),
            Question("shape", "what shape is in the image?", shape),
        ]
    return shown, [Question("one thing", "what is this?", name)]


def grid(rng: random.Random, split: Split) -> tuple[Shown, list[Question]]:
    """Draw four things, some of them left out, and ask about two cells."""
    names: Sequence[str] = object_names()
    while True:
        filled = rng.choice((1.0, 1.0, 0.8, 0.6))
        cells = [rng.choice(names) if rng.random() < filled else EMPTY for _ in PLACES]
        held = [
            name != EMPTY and is_heldout("llava", name, where)
            for name, where in zip(cells, PLACES, strict=True)
        ]
        if split == "train":
            cells = [EMPTY if out else name for name, out in zip(cells, held, strict=True)]
        if split == "train" or any(held):
            break
    asked = [at for at in range(len(PLACES)) if split == "train" or held[at]]
    rng.shuffle(asked)
    made = [Question("grid", f"what is in the {PLACES[at]} cell?", cells[at]) for at in asked[:2]]
    return Shown(tuple(cells)), made
