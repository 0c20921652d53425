"""Make long dialogues about scenes: dense, sparse, clips and streams.

*Dense*: every picture has a number, and any cell of any picture may be asked later. *Sparse*: most
pictures come under ``ignore:`` and are never asked about; the others have numbers. A dialogue is a
function of its seed, and held-out dialogues show held-out scenes only.

:func:`scene_turns` makes them as examples for the bundled model's gates. There questions name their
cells (``search=False``), because the bundled model never learned to search all cells. A question
that the full cache cannot answer measures nothing about eviction.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmkv.training.data.scene_encoding import collate, encode
from mmkv.training.data.scenes import (
    CELL,
    SHAPES,
    Item,
    Question,
    Scene,
    SceneClip,
    SceneTurn,
    Split,
    is_heldout,
    make_scene,
    object_names,
    place,
    questions,
)

IGNORE = "ignore:"
# Kinds of question that need a look at every cell.
SEARCH = ("locate", "count", "exists")


def grid(rng: random.Random, split: Split, largest: int = 4, least: int = 1) -> Scene:
    """Draw a grid scene of the split with at least ``least`` objects."""
    while True:
        scene = make_scene(rng, split, largest)
        if scene.kind == "grid" and len(scene.items) >= least:
            return scene


def picture_name(number: int) -> str:
    """Return the name, in questions, of a picture that may be asked about later."""
    return f"picture {number}"


def caption(number: int) -> str:
    """Write the caption of such a picture."""
    return f"{picture_name(number)}:"


def cell_question(number: int, cell: tuple[int, int], answer: str, kind: str = "cell") -> Question:
    """Ask what was in a cell of picture ``number``."""
    return _earlier(kind, f"what was at {place(*cell)} of {picture_name(number)}?", answer)


def clip_question(video: SceneClip, cell: tuple[int, int], when: str) -> Question:
    """Ask what was in a cell at the ``start`` or the ``end`` of a clip."""
    scene = video.frames[0 if when == "start" else -1]
    return Question(when, f"what was at {place(*cell)} at the {when}?", scene.at(*cell))


def changing_clip(first: Scene, last: Scene, rng: random.Random, frames: int = 3) -> SceneClip:
    """Make a clip of one scene, from some frame on of the other."""
    change = rng.randint(1, frames - 1)
    return SceneClip(tuple(first if index < change else last for index in range(frames)))


def exchanged(scene: Scene, rng: random.Random, split: Split) -> tuple[Scene, Item]:
    """Exchange one thing of a scene; return the new scene and the thing that is gone."""
    gone = rng.choice(scene.items)
    x, y = gone.x // CELL, gone.y // CELL
    names = [n for n in object_names() if n != gone.name]
    if split == "train":
        names = [n for n in names if not is_heldout(n, x, y)]
    name = rng.choice(names)
    items = (replace(item, name=name) if item is gone else item for item in scene.items)
    return replace(scene, items=tuple(items)), gone


def dense(
    seed: int,
    split: Split,
    pictures: int,
    turns: int,
    largest: int = 4,
    earlier: float = 0.6,
    search: bool = True,
) -> list[SceneTurn]:
    """Make a dialogue in which any cell of any of its pictures may be asked later.

    Args:
        earlier: share of the questions that are about an earlier picture, once there is one.
        search: also ask what needs a look at all cells (where, how many, is there); without, every
            question names its cells, or asks for a written word or number.

    Raises:
        ValueError: with fewer turns than pictures.
    """
    if turns < pictures:
        raise ValueError(f"{pictures} pictures need at least as many turns, not {turns}")
    rng = random.Random(f"dense-{split}-{seed}")
    # The later turns bring no picture, so their answers must come from memory.
    span = pictures if turns < 2 * pictures else turns * 3 // 4
    starts = {index * span // pictures for index in range(pictures)}
    shown: list[Scene] = []
    waiting: list[Question] = []
    made: list[SceneTurn] = []
    for index in range(turns):
        new: tuple[Scene, ...] = ()
        if index in starts:
            new = (_scene(rng, split, largest, len(shown), search),)
            shown += new
            waiting = []
        if len(shown) > 1 and rng.random() < earlier:
            asked = about(shown, rng, rng.randint(1, len(shown) - 1), search)
        else:
            while not waiting:
                waiting = [
                    q
                    for q in latest(shown[-1], rng)
                    if q.kind != "list" and (search or q.kind not in SEARCH)
                ]
            asked = waiting.pop()
        captions = (caption(len(shown)),) if new else ()
        made.append(SceneTurn(new, asked, captions))
    return made


def sparse(
    seed: int,
    split: Split,
    pictures: int,
    kept: int,
    turns: int,
    loads: int = 3,
    search: bool = True,
) -> list[SceneTurn]:
    """Make a dialogue whose pictures are mostly under ``ignore:``; only the kept ones are asked
    about.

    The pictures come with the first ``loads`` turns, the first of which holds a kept one.
    """
    rng = random.Random(f"sparse-{split}-{seed}")
    per_load = pictures // loads
    first = rng.randrange(per_load)
    chosen = {first, *rng.sample([i for i in range(pictures) if i != first], kept - 1)}
    shown: list[Scene] = []
    made: list[SceneTurn] = []
    for load in range(turns):
        last = pictures if load == loads - 1 else (load + 1) * per_load
        new: list[Scene] = []
        captions: list[str] = []
        for index in range(load * per_load, last) if load < loads else ():
            scene = grid(rng, split)
            if index in chosen:
                shown.append(scene)
                captions.append(caption(len(shown)))
            else:
                captions.append(IGNORE)
            new.append(scene)
        asked = about(shown, rng, rng.randint(1, len(shown)), search)
        made.append(SceneTurn(tuple(new), asked, tuple(captions)))
    return made


def latest(scene: Scene, rng: random.Random) -> list[Question]:
    """Ask about the latest picture: the usual questions, and what lies beside a cell."""
    made = questions(scene, rng)
    if scene.kind == "grid":
        made.append(beside(scene, rng))
        rng.shuffle(made)
    return made


def beside(scene: Scene, rng: random.Random) -> Question:
    """Ask for a neighbour of a cell, for which the answer works out the place first."""
    row, column = rng.randint(1, scene.rows), rng.randint(1, scene.columns)
    steps = {"below": (1, 0), "above": (-1, 0), "right of": (0, 1), "left of": (0, -1)}
    word, (down, right) = rng.choice(list(steps.items()))
    text = f"what is {word} {place(row, column)}?"
    row, column = row + down, column + right
    inside = 1 <= row <= scene.rows and 1 <= column <= scene.columns
    found = scene.at(row, column) if inside else "no cell"
    return Question("beside", text, f"{place(row, column)}: {found}")


def about(shown: list[Scene], rng: random.Random, number: int, search: bool = True) -> Question:
    """Ask about picture ``number`` (1-based) of those shown, mostly about one cell."""
    scene, where = shown[number - 1], picture_name(number)
    if scene.kind == "text":
        return _earlier("read", f"what was written in {where}?", scene.text)
    if scene.kind == "grid":
        weights = [12, 3, 2, 2, 1] if search else [12, 3, 2, 0, 0]
        kind = rng.choices(["cell", "same", "colour", "locate", "count"], weights)[0]
        if kind != "count":
            return _about_cells(kind, shown, rng, number)
    return _earlier("count", f"how many objects were in {where}?", str(len(scene.items)))


def _about_cells(kind: str, shown: list[Scene], rng: random.Random, number: int) -> Question:
    """Ask about some of a picture's cells; about one where it has nothing for this kind."""
    scene, where = shown[number - 1], picture_name(number)
    others = [n for n, s in enumerate(shown, 1) if s.kind == "grid" and n != number]
    if kind == "same" and others:
        return _same(scene, where, shown, rng.choice(others), rng)
    names = [item.name for item in scene.items]
    single = [item for item in scene.items if names.count(item.name) == 1]
    if kind == "locate" and single:
        item = rng.choice(single)
        return _earlier("locate", f"where was the {item.name} in {where}?", place(*item.cell))
    shapes = [item for item in scene.items if item.name.split()[-1] in SHAPES]
    if kind == "colour" and shapes:
        item = rng.choice(shapes)
        text = f"which colour was at {place(*item.cell)} of {where}?"
        return _earlier("colour", text, item.name.split()[0])
    cell = _cell(scene, rng)
    return cell_question(number, cell, scene.at(*cell))


def _same(scene: Scene, where: str, shown: list[Scene], other: int, rng: random.Random) -> Question:
    """Make a question that compares a cell of two pictures.

    The answer names both, then yes or no.
    """
    second = shown[other - 1]
    row = rng.randint(1, min(scene.rows, second.rows))
    column = rng.randint(1, min(scene.columns, second.columns))
    names = scene.at(row, column), second.at(row, column)
    text = f"is {place(row, column)} the same in {where} and {picture_name(other)}?"
    verdict = "yes" if names[0] == names[1] else "no"
    return _earlier("same", text, f"{names[0]} and {names[1]}: {verdict}")


def clip(seed: int, split: Split, turns: int = 4) -> list[SceneTurn]:
    """Make a dialogue about a video in which one cell changes."""
    rng = random.Random(f"clip-{split}-{seed}")
    first = grid(rng, split)
    row, column = _cell(first, rng)
    before = first.at(row, column)
    corner = ((column - 1) * CELL, (row - 1) * CELL)
    new = rng.choice(
        [n for n in object_names() if n != before and not is_heldout(n, column - 1, row - 1)]
    )
    kept = tuple(item for item in first.items if (item.x, item.y) != corner)
    last = replace(first, items=(*kept, Item(new, *corner)))
    video = changing_clip(first, last, rng, rng.randint(2, 4))
    made: list[SceneTurn] = []
    for index in range(turns):
        kind = rng.choice(["start", "end", "change"])
        if kind == "change":
            answer = f"{place(row, column)}: {before} to {new}"
            asked = Question("change", "what changed in the video?", answer)
        else:
            cell = (row, column) if rng.random() < 0.4 else _cell(first, rng)
            asked = clip_question(video, cell, kind)
        made.append(SceneTurn((video,) if index == 0 else (), asked))
    return made


def clip_of_stream(rng: random.Random, split: Split) -> tuple[SceneClip, Question]:
    """Make a clip in which one thing is exchanged, and a question about its start or its end."""
    first = grid(rng, split)
    last, changed = exchanged(first, rng, split)
    video = changing_clip(first, last, rng)
    when = rng.choice(["start", "end"])
    item = changed if rng.random() < 0.4 else rng.choice(first.items)
    return video, clip_question(video, item.cell, when)


def stream(seed: int, split: Split, clips: int, remember: int = 8) -> list[SceneTurn]:
    """Make a numbered picture, then clip after clip, each asked about once; now and then the
    picture.

    Args:
        remember: clips between two questions about the picture.
    """
    rng = random.Random(f"stream-{split}-{seed}")
    picture = grid(rng, split, least=4)
    made: list[SceneTurn] = []
    for index in range(clips):
        video, asked = clip_of_stream(rng, split)
        shown = (picture, video) if index == 0 else (video,)
        made.append(SceneTurn(shown, asked, (caption(1), "") if index == 0 else ()))
        if index % remember == remember - 1:
            item = rng.choice(picture.items)
            made.append(SceneTurn((), cell_question(1, item.cell, item.name)))
    return made


def _cell(scene: Scene, rng: random.Random) -> tuple[int, int]:
    return rng.randint(1, scene.rows), rng.randint(1, scene.columns)


def _earlier(kind: str, text: str, answer: str) -> Question:
    return Question(kind, text, answer, "earlier")


def _scene(rng: random.Random, split: Split, largest: int, shown: int, search: bool) -> Scene:
    # The first is a grid, and later ones are mostly: a line of letters allows few questions.
    if shown and rng.random() < 0.3:
        scene = make_scene(rng, split, largest)
        if search or scene.kind != "free":  # a free layout has no cells to name
            return scene
    return grid(rng, split, largest)


_SPARSE_PICTURES = (16, 24, 32)
_MOST_PICTURES = (160, 192, 256)
_STREAM_CLIPS = (8, 16, 32)


def _dense(seed: int, split: Split) -> list[SceneTurn]:
    rng = random.Random(f"size-{seed}")
    pictures = rng.randint(4, 8)
    return dense(seed, split, pictures, rng.randint(pictures, 12), search=False)


def _sparse(seed: int, split: Split) -> list[SceneTurn]:
    rng = random.Random(f"size-{seed}")
    return sparse(seed, split, rng.choice(_SPARSE_PICTURES), rng.randint(1, 2), 8, search=False)


def _distractors_96(seed: int, split: Split) -> list[SceneTurn]:
    # Three times as many pictures as any training dialogue: attention has much to be diluted by.
    return sparse(seed, split, 96, 2, 8, search=False)


def _distractors_256(seed: int, split: Split) -> list[SceneTurn]:
    return sparse(
        seed, split, random.Random(f"size-{seed}").choice(_MOST_PICTURES), 2, 16, search=False
    )


def _pictures_40(seed: int, split: Split) -> list[SceneTurn]:
    pictures = random.Random(f"size-{seed}").randint(30, 40)
    return dense(seed, split, pictures, 2 * pictures, search=False)


def _clip(seed: int, split: Split) -> list[SceneTurn]:
    return clip(seed, split, 6)


def _stream(seed: int, split: Split) -> list[SceneTurn]:
    return stream(seed, split, random.Random(f"size-{seed}").choice(_STREAM_CLIPS))


KINDS: dict[str, Callable[[int, Split], list[SceneTurn]]] = {
    "dense": _dense,
    "sparse": _sparse,
    "clip": _clip,
    "stream": _stream,
    "40-pictures": _pictures_40,
    "96-distractors": _distractors_96,
    "256-distractors": _distractors_256,
}


def scene_turns(kind: str, seed: int, split: Split) -> list[SceneTurn]:
    """Make the dialogue ``seed`` of a kind.

    Raises:
        ValueError: for an unknown kind, naming those there are.
    """
    if kind not in KINDS:
        raise ValueError(f"no scenes of kind {kind!r}; choose one of {', '.join(KINDS)}")
    return KINDS[kind](seed, split)


def scene_example(turns: list[SceneTurn], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Return what the processor returns for the dialogue (one row), and ``labels [1, t]``."""
    made = collate([encode(turns, tokenizer)], tokenizer)
    return {name: tensor for name, tensor in made.items() if name != "attention_mask"}
