"""Synthetic scenes with exact answers: pictures, questions, dialogues.

A scene is a grid of cells (emoji or coloured shapes), a line of rendered letters or digits, or a
free layout. It is a function of its seed. ``heldout`` scenes hold combinations of object and place
(and strings) that no ``train`` scene shows.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from mmkv.resources import asset

Split = Literal["train", "heldout"]
CELL = 32  # pixels; one visual token of the bundled model
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 30),
    "purple": (140, 60, 170),
    "orange": (240, 130, 30),
}
SHAPES = ("circle", "square", "triangle")
EMPTY = "nothing"
_HELDOUT_SHARE = 8  # one in so many combinations is held out


@dataclass(frozen=True)
class Item:
    """One drawn thing: ``name`` as answers call it, top left corner in pixels."""

    name: str
    x: int
    y: int

    @property
    def cell(self) -> tuple[int, int]:
        """Find row and column of a thing in a grid, from 1."""
        return self.y // CELL + 1, self.x // CELL + 1


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn.

    Attributes:
        kind: ``grid``, ``text`` (letters or digits, one per cell) or ``free``.
        rows, columns: cells; the picture is ``columns * 32`` by ``rows * 32`` pixels.
        text: what a ``text`` scene spells.
    """

    kind: Literal["grid", "text", "free"]
    rows: int
    columns: int
    items: tuple[Item, ...]
    text: str = ""

    def at(self, row: int, column: int) -> str:
        """Name of what stands in the cell (1-based), or ``nothing``."""
        for item in self.items:
            if (item.x, item.y) == ((column - 1) * CELL, (row - 1) * CELL):
                return item.name
        return EMPTY


@dataclass(frozen=True)
class Question:
    """A question with its one right answer.

    Attributes:
        kind: ``cell``, ``locate``, ``colour``, ``count``, ``exists``, ``read``, ``list``,
            ``compare``, or one of those of :mod:`mmkv.training.data.dialogues`.
        about: ``latest`` picture of the dialogue, or an ``earlier`` one.
    """

    kind: str
    text: str
    answer: str
    about: Literal["latest", "earlier"] = "latest"


@dataclass(frozen=True)
class SceneClip:
    """A short video before it is drawn: equal-sized frames, one temporal patch each."""

    frames: tuple[Scene, ...]


@dataclass(frozen=True)
class SceneTurn:
    """One user turn: the pictures new in it, the question, the answer.

    Attributes:
        captions: the words right before each picture; empty for none at all.
    """

    pictures: tuple[Scene | SceneClip, ...]
    question: Question
    captions: tuple[str, ...] = ()

    def scenes(self) -> list[Scene]:
        """Return the still pictures that are new in this turn."""
        return [picture for picture in self.pictures if isinstance(picture, Scene)]

    def parts(self) -> list[str | Scene | SceneClip]:
        """Return captions and pictures in reading order, then the question."""
        found: list[str | Scene | SceneClip] = []
        for index, picture in enumerate(self.pictures):
            found += [*self.captions[index : index + 1], picture]
        return [*found, self.question.text]


def place(row: int, column: int) -> str:
    """Return the name of a cell (1-based) in questions and answers."""
    return f"row {row}, column {column}"


@cache
def sprites() -> dict[str, Image.Image]:
    """Return the emoji by name, 32 x 32 RGBA."""
    names = json.loads(asset("sprites.json").read_text())
    sheet = Image.open(asset("sprites.png")).convert("RGBA")
    columns = sheet.width // CELL
    found = {}
    for index, name in enumerate(names):
        x, y = index % columns * CELL, index // columns * CELL
        found[name] = sheet.crop((x, y, x + CELL, y + CELL))
    return found


@cache
def object_names() -> tuple[str, ...]:
    """Return all emoji names and coloured shapes."""
    shapes = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
    return (*sprites(), *shapes)


@cache
def tile(name: str) -> Image.Image:
    """Return the 32 x 32 RGBA tile of an object name or of a single letter or digit."""
    if name in sprites():
        return sprites()[name]
    picture = Image.new("RGBA", (CELL, CELL))
    draw = ImageDraw.Draw(picture)
    if len(name) == 1:
        font = ImageFont.load_default(size=28)
        draw.text((CELL / 2, CELL / 2), name, fill="black", font=font, anchor="mm")
        return picture
    colour, shape = name.split()
    fill = COLOURS[colour]
    if shape == "circle":
        draw.ellipse((3, 3, 28, 28), fill=fill)
    elif shape == "square":
        draw.rectangle((4, 4, 27, 27), fill=fill)
    else:
        draw.polygon([(16, 3), (29, 28), (2, 28)], fill=fill)
    return picture


def render(scene: Scene) -> Image.Image:
    """Draw the scene on white, RGB."""
    picture = Image.new("RGB", (scene.columns * CELL, scene.rows * CELL), "white")
    for item in scene.items:
        sprite = tile(item.name)
        picture.paste(sprite, (item.x, item.y), sprite)
    return picture


def is_heldout(*combination: object) -> bool:
    """Return whether a combination (object and place, or a string) is kept out of training."""
    return zlib.crc32(repr(combination).encode()) % _HELDOUT_SHARE == 0


def make_scene(rng: random.Random, split: Split, largest: int = 4) -> Scene:
    """Draw a random scene of the split; ``largest`` bounds the rows and columns of a grid.

    Train scenes hold no held-out combination; every held-out scene holds at least one.
    """
    kind = rng.choices(["grid", "text", "free"], [0.72, 0.18, 0.10])[0]
    while True:
        if kind == "grid":
            scene = _grid(rng, rng.randint(1, largest), rng.randint(1, largest))
        elif kind == "text":
            scene = _text(rng)
        else:
            scene = _free(rng)
        hits = sum(_combinations(scene))
        if (hits > 0) == (split == "heldout"):
            return scene
        if split == "train" and kind == "grid":
            kept = [i for i, hit in zip(scene.items, _combinations(scene), strict=True) if not hit]
            return Scene("grid", scene.rows, scene.columns, tuple(kept))


def _combinations(scene: Scene) -> list[bool]:
    if scene.kind == "text":
        return [is_heldout(scene.text)]
    if scene.kind == "free":
        return [
            is_heldout("free", item.name, item.x // CELL, item.y // CELL) for item in scene.items
        ]
    return [is_heldout(item.name, item.x // CELL, item.y // CELL) for item in scene.items]


def _grid(rng: random.Random, rows: int, columns: int) -> Scene:
    names, items = object_names(), []
    filled = rng.choice([1.0, 1.0, 0.8, 0.6])
    for row in range(rows):
        for column in range(columns):
            if rng.random() < filled:
                items.append(Item(rng.choice(names), column * CELL, row * CELL))
    return Scene("grid", rows, columns, tuple(items))


def _text(rng: random.Random) -> Scene:
    alphabet = string.digits if rng.random() < 0.4 else string.ascii_uppercase
    text = "".join(rng.choices(alphabet, k=rng.randint(1, 4)))
    items = tuple(Item(letter, index * CELL, 0) for index, letter in enumerate(text))
    return Scene("text", 1, len(text), items, text)


def _free(rng: random.Random) -> Scene:
    items: list[Item] = []
    while len(items) < rng.choice([1, 2, 2, 3]):
        x, y = rng.randrange(0, 3 * CELL + 1, 4), rng.randrange(0, 3 * CELL + 1, 4)
        if all(abs(x - i.x) >= CELL or abs(y - i.y) >= CELL for i in items):
            items.append(Item(rng.choice(object_names()), x, y))
    return Scene("free", 4, 4, tuple(items))


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """Ask every kind of question that this scene allows, one of each, in random order."""
    made: list[Question] = []
    if scene.kind == "text":
        kind = "number" if scene.text.isdigit() else "word"
        ask = rng.choice([f"read the {kind}.", f"what {kind} is this?", f"what is the {kind}?"])
        return [Question("read", ask, scene.text)]
    names = [item.name for item in scene.items]
    if scene.kind == "grid":
        row, column = rng.randint(1, scene.rows), rng.randint(1, scene.columns)
        ask = rng.choice(["what is at row {}, column {}?", "what is in row {}, column {}?"])
        made.append(Question("cell", ask.format(row, column), scene.at(row, column)))
        listed = "; ".join(
            ", ".join(scene.at(r, c) for c in range(1, scene.columns + 1))
            for r in range(1, scene.rows + 1)
        )
        ask = rng.choice(["name every cell.", "list all cells."])
        made.append(Question("list", ask, listed))
        single = [item for item in scene.items if names.count(item.name) == 1]
        if single:
            item = rng.choice(single)
            ask = rng.choice(["where is the {}?", "in which cell is the {}?"]).format(item.name)
            made.append(Question("locate", ask, place(*item.cell)))
        shapes = [item for item in scene.items if item.name.split()[-1] in SHAPES]
        if shapes:
            item = rng.choice(shapes)
            ask = rng.choice(["what colour is the shape at", "which colour is at"])
            text = f"{ask} {place(*item.cell)}?"
            made.append(Question("colour", text, item.name.split()[0]))
    ask = rng.choice(["how many objects are there?", "how many objects do you see?"])
    made.append(Question("count", ask, str(len(names))))
    if names and rng.random() < 0.5:
        name = rng.choice(names)
    else:
        name = rng.choice([n for n in object_names() if n not in names])
    ask = rng.choice(["is there a {}?", "do you see a {}?"]).format(name)
    made.append(Question("exists", ask, "yes" if name in names else "no"))
    rng.shuffle(made)
    return made


def compare(shown: list[Scene], rng: random.Random) -> Question:
    """Make a question about the first two pictures, which must be grids.

    With two pictures it may ask which of them holds an object, otherwise what the first one
    showed in some cell.
    """
    first, second = shown[:2]
    if len(shown) == 2 and first.items and second.items and rng.random() < 0.5:
        name = rng.choice([item.name for item in rng.choice([first, second]).items])
        inside = [name in {item.name for item in scene.items} for scene in (first, second)]
        answer = "both" if all(inside) else "the first" if inside[0] else "the second"
        return Question("compare", f"which picture has the {name}?", answer)
    row, column = rng.randint(1, first.rows), rng.randint(1, first.columns)
    ask = f"what was at {place(row, column)} of the first picture?"
    return Question("compare", ask, first.at(row, column))


def dialogue(
    seed: int, split: Split = "train", pictures: int = 1, turns: int = 4, largest: int = 4
) -> list[SceneTurn]:
    """Make a dialogue of ``turns`` questions over ``pictures`` pictures, exactly answerable.

    The pictures come spread over the turns, the first with the first turn. Once two grids have
    been shown, some questions compare them.

    Raises:
        ValueError: with fewer turns than pictures.
    """
    if turns < pictures:
        raise ValueError(f"{pictures} pictures need at least as many turns, not {turns}")
    rng = random.Random(f"{split}-{seed}")
    starts = {index * turns // pictures for index in range(pictures)}
    shown: list[Scene] = []
    waiting: list[Question] = []
    made: list[SceneTurn] = []
    for index in range(turns):
        new: tuple[Scene, ...] = ()
        if index in starts:
            new = (make_scene(rng, split, largest),)
            shown += new
            waiting = questions(shown[-1], rng)
        if not waiting:
            waiting = questions(shown[-1], rng)
        comparable = len(shown) > 1 and shown[0].kind == shown[1].kind == "grid"
        if comparable and rng.random() < 0.4:
            made.append(SceneTurn(new, compare(shown, rng)))
        else:
            made.append(SceneTurn(new, waiting.pop()))
    return made
