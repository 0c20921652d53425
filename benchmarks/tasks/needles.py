"""Make haystacks with several keys, values and queries at known depths.

*text*: sentences of small talk hide one sentence per key, with all its values; a query repeats the
sentence up to its values. *pictures*: pictures under ``ignore:`` hide numbered ones (keys), whose
cells (values) are asked. *video*: pictures under ``ignore:`` hide one clip, whose cells are asked
as they were at its start and its end.

The keys are spread over the depths, one in each of as many equal parts, and every part is asked
about as often as any other. No question is known when the haystack is read: memory is brought down
to the budget before the first one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.tasks.documents import Document, TextBuilder, scene_document
from mmkv.engine.errors import InputError
from mmkv.prompt.processing import Processor
from mmkv.training.data.dialogues import (
    IGNORE,
    caption,
    cell_question,
    changing_clip,
    clip_question,
    exchanged,
    grid,
)
from mmkv.training.data.examples import require_scene_tokens
from mmkv.training.data.scene_encoding import timestamp
from mmkv.training.data.scenes import Question, Scene, SceneClip, SceneTurn
from mmkv.training.data.text_tasks import NAMES, opening, small_talk
from mmkv.training.measure.teacher_forced import spans

T = TypeVar("T")
# Default keys, values and queries of each domain. The bundled model has learned
# dialogues with up to four pictures that matter, and with one video.
SIZES = {"text": (8, 4, 4), "pictures": (4, 4, 4), "video": (1, 4, 1)}
_VIDEO_PARTS = 4  # parts of the depth; the clip's part changes from document to document


@dataclass(frozen=True)
class Needle:
    """One answer and where its fact stands.

    Attributes:
        depth: share of the haystack before the needle. values: (start, stop) of each value among
            the answer's tokens. where: the needle's own tokens; haystack: all of its haystack's,
            both (start, stop) in the document.
    """

    depth: float
    values: tuple[tuple[int, int], ...]
    where: tuple[int, int] = (0, 0)
    haystack: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Haystack:
    """A kind of document, after DBTrimKV (arXiv 2605.09649, appendix B.3).

    Attributes:
        length: tokens of the haystack, needles included; the questions come on top.
    """

    domain: str
    length: int
    keys: int
    values: int
    queries: int

    @property
    def name(self) -> str:
        """Return the name of the kind, as ``--data`` has it."""
        return f"needle:{self.domain}:{self.length}:{self.keys}:{self.values}:{self.queries}"

    @property
    def parts(self) -> int:
        """Return the number of equal parts that the depth is cut into."""
        return self.keys if self.keys > 1 else _VIDEO_PARTS

    @classmethod
    def parse(cls, name: str) -> Haystack:
        """Parse the kind of document from ``name``.

        Raises:
            InputError: not such a name, or sizes that do not go together.
        """
        try:
            _, domain, *numbers = name.split(":")
            made = cls(domain, *map(int, numbers))
        except (ValueError, TypeError):
            raise InputError(
                f"no needles {name!r}; write needle:DOMAIN:LENGTH:KEYS:VALUES:QUERIES"
            ) from None
        if made.domain not in SIZES:
            raise InputError(f"no needles in {domain!r}; choose one of {', '.join(SIZES)}")
        if min(made.length, made.keys, made.values, made.queries) < 1 or made.queries > made.keys:
            raise InputError(f"{name}: sizes are at least 1, and no more queries than keys")
        if made.keys > len(NAMES):
            raise InputError(f"{made.keys} keys, but there are {len(NAMES)} names for them")
        if made.domain == "video" and made.keys > 1:
            raise InputError("a document holds one video; give --keys 1 --queries 1")
        return made


def maker(name: str, model: str, processor: Processor) -> Callable[[int], Document]:
    """Return what makes document n of :attr:`Haystack.name`."""
    kind = Haystack.parse(name)
    if kind.domain == "text":
        return lambda index: _text(kind, index, processor.tokenizer)
    require_scene_tokens(processor, model)
    made = _pictures if kind.domain == "pictures" else _video
    return lambda index: made(kind, index, processor.tokenizer)


def _text(kind: Haystack, index: int, tokenizer: Any) -> Document:
    rng = random.Random(f"{kind.name}-{index}")
    text = TextBuilder(tokenizer)

    def sized(line: str) -> tuple[str, int]:
        return line, len(text.tokens(line))

    # Every value stands once in the document, so none is right by chance.
    numbers = iter(rng.sample(range(1000, 10000), kind.keys * kind.values))
    known = {
        name: [str(next(numbers)) for _ in range(kind.values)]
        for name in rng.sample(NAMES, kind.keys)
    }
    stated = [sized(f"{opening(name, kind.values)} {', '.join(known[name])}.\n") for name in known]
    filler = (sized(small_talk(rng)) for _ in iter(int, 1))
    depths = _depths(kind, index, rng)
    lines, places = place_needles(stated, filler, kind.length, depths)
    for line in lines:
        text.add(line)
    haystack = (0, len(text.ids))
    notes = []
    for key in _asked(kind, index):
        name = list(known)[key]
        text.add_cut()
        text.add(f"\n{opening(name, kind.values)}")
        values = []
        begin = len(text.ids)
        for number, value in enumerate(known[name]):
            if number:
                text.add_answer(",")
            where = text.add_answer(f" {value}")
            values.append((where.start - begin, where.stop - begin))
        text.add(".\n")
        notes.append(Needle(depths[key], tuple(values), places[key], haystack))
    return Document(text.example(), notes)


def _pictures(kind: Haystack, index: int, tokenizer: Any) -> Document:
    rng = random.Random(f"{kind.name}-{index}")
    kept = [_grid_of(rng, kind.values) for _ in range(kind.keys)]
    depths = _depths(kind, index, rng)
    needles = [_captioned(caption(n), scene, tokenizer) for n, scene in enumerate(kept, 1)]
    shown, places = place_needles(needles, _ignored(rng, tokenizer), kind.length, depths)
    asked = []
    for key in _asked(kind, index):
        for item in rng.sample(kept[key].items, kind.values):
            question = cell_question(key + 1, item.cell, item.name)
            asked.append((question, depths[key], places[key]))
    rng.shuffle(asked)
    return _dialogue(shown, asked, tokenizer)


def _video(kind: Haystack, index: int, tokenizer: Any) -> Document:
    rng = random.Random(f"{kind.name}-{index}")
    first = _grid_of(rng, kind.values)
    last, changed = exchanged(first, rng, "heldout")
    clip = changing_clip(first, last, rng)
    depths = _depths(kind, index, rng)
    needle: list[tuple[tuple[str, Scene | SceneClip], int]] = [_captioned("", clip, tokenizer)]
    shown, places = place_needles(needle, _ignored(rng, tokenizer), kind.length, depths)
    # The cell that changed is always asked: only there do start and end differ.
    others = [item for item in first.items if item is not changed]
    asked = []
    for item in [changed, *rng.sample(others, kind.values - 1)]:
        question = clip_question(clip, item.cell, rng.choice(["start", "end"]))
        asked.append((question, depths[0], places[0]))
    rng.shuffle(asked)
    return _dialogue(shown, asked, tokenizer)


def _dialogue(
    shown: Sequence[tuple[str, Scene | SceneClip]],
    asked: list[tuple[Question, float, tuple[int, int]]],
    tokenizer: Any,
) -> Document:
    """Make a dialogue: everything shown at once, then the questions turn by turn."""
    captions, pictures = zip(*shown, strict=True)
    turns = [SceneTurn(pictures, asked[0][0], captions)]
    turns += [SceneTurn((), question) for question, _, _ in asked[1:]]
    example = scene_document(turns, tokenizer)
    # The haystack ends where the first question begins; the turn's marks come before it.
    begin = len(tokenizer.encode("<|im_start|>user\n", add_special_tokens=False))
    notes = [
        Needle(
            depth,
            ((0, stop - start),),
            (begin + place[0], begin + place[1]),
            (begin, example["cuts"][0]),
        )
        for (_, depth, place), (start, stop) in zip(
            asked, spans(example["labels"][0].tolist()), strict=True
        )
    ]
    return Document(example, notes)


def place_needles(
    needles: Sequence[tuple[T, int]],
    filler: Iterator[tuple[T, int]],
    length: int,
    depths: list[float],
) -> tuple[list[T], list[tuple[int, int]]]:
    """Place needles among filler so that the whole has ``length`` tokens.

    Args:
        needles, filler: things and their tokens. depths: ascending, share of the filler that
            comes before each needle.

    Returns:
        everything in order, and (start, stop) of each needle in tokens.

    Raises:
        InputError: the needles alone are longer.
    """
    room = length - sum(size for _, size in needles)
    if room < 0:
        raise InputError(
            f"the needles alone take {length - room} tokens; give --lengths of more, or fewer "
            "keys or values"
        )
    found: list[T] = []
    places: list[tuple[int, int]] = []
    waiting = list(zip(needles, depths, strict=True))
    used = 0  # tokens of filler so far

    def place() -> None:
        (thing, size), _ = waiting.pop(0)
        start = used + sum(stop - start for start, stop in places)
        found.append(thing)
        places.append((start, start + size))

    while used < room:
        while waiting and waiting[0][1] * room <= used:
            place()
        thing, size = next(filler)
        found.append(thing)
        used += size
    while waiting:
        place()
    return found, places


def _depths(kind: Haystack, index: int, rng: random.Random) -> list[float]:
    first = 0 if kind.keys > 1 else index
    return [((first + key) % kind.parts + rng.random()) / kind.parts for key in range(kind.keys)]


def _asked(kind: Haystack, index: int) -> list[int]:
    """Choose the keys asked about: over keys / queries documents in a row, each once."""
    turns = max(1, kind.keys // kind.queries)
    order = list(range(kind.keys))
    random.Random(f"{kind.name}-{index // turns}-order").shuffle(order)
    first = index % turns * kind.queries
    return order[first : first + kind.queries]


def _grid_of(rng: random.Random, cells: int) -> Scene:
    """Draw a held-out grid with at least ``cells`` things in it."""
    if cells > 16:
        raise InputError(f"{cells} values, but a picture has at most 16 cells")
    return grid(rng, "heldout", least=cells)


def _ignored(rng: random.Random, tokenizer: Any) -> Iterator[tuple[tuple[str, Scene], int]]:
    while True:
        yield _captioned(IGNORE, grid(rng, "heldout"), tokenizer)


S = TypeVar("S", Scene, SceneClip)


def _captioned(words: str, shown: S, tokenizer: Any) -> tuple[tuple[str, S], int]:
    """Put a picture under its caption, and count the tokens of both."""
    frames = shown.frames if isinstance(shown, SceneClip) else (shown,)
    size = sum(frame.rows * frame.columns + 2 for frame in frames)
    texts = [words]
    if isinstance(shown, SceneClip):
        texts += [timestamp(index) for index in range(len(frames))]
    size += sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return (words, shown), size
