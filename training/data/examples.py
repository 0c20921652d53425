"""Make training tensors of ``--data``: files, scenes and text tasks, in a weighted mixture.

The order of a mixture depends on its seed only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmkv.engine.errors import InputError, plain
from mmkv.prompt.loading import load_processor
from mmkv.prompt.processing import Processor
from mmkv.prompt.template import Message, take_media
from mmkv.training.data.conversations import (
    Conversation,
    ConversationDocument,
    DataError,
    DataSource,
    Report,
    Row,
    RowFile,
)
from mmkv.training.data.dialogues import KINDS, scene_example, scene_turns
from mmkv.training.data.labels import IGNORED, AssistantTurn, TurnFinder
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.data.scenes import Split
from mmkv.training.data.text_tasks import KINDS as TASKS
from mmkv.training.data.text_tasks import text_task

Item = TypeVar("Item")

_BLOCK = 4096  # draws made at once
_DRAWS, _ORDER, _SPARE = range(3)  # keeps the random streams of different purposes apart


class Mixture(Generic[Item]):
    """An endless sequence of rows; element n is a function of (seed, n) alone.

    Each element's source is drawn by weight. A source is walked in a shuffled order that is new in
    every epoch, so none of its rows comes a second time before all came once.

    Args:
        sources: rows of each source; their order is part of what the mixture is.
        weights: one for each source, above 0, need not sum to 1.
        seed: at least 0.

    Raises:
        DataError: no sources, an empty one, or weights that do not fit.
    """

    def __init__(
        self, sources: Sequence[Sequence[Item]], weights: Sequence[float], seed: int = 0
    ) -> None:
        if not sources or not all(len(source) for source in sources):
            raise DataError("a mixture needs at least one source and a row in each")
        if len(weights) != len(sources) or not all(0 < w < float("inf") for w in weights):
            raise DataError(f"{len(sources)} sources need as many weights above 0, not {weights}")
        if seed < 0:
            raise DataError(f"the seed is {seed}; give 0 or more")
        self.sources, self.seed = sources, seed
        self._edges = np.cumsum(np.asarray(weights, np.float64) / np.sum(weights))[:-1]
        # Per block, how often each source was drawn before it. Only reading is slow: counting
        # draws to reach element 10**6 takes a few milliseconds.
        self._before = [np.zeros(len(sources), np.int64)]
        self._drawn: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def locate(self, n: int) -> tuple[int, int, int]:
        """Find source, epoch of that source, and row in it, of element ``n``.

        Raises:
            IndexError: below 0.
        """
        if n < 0:
            raise IndexError(f"element {n} of a mixture that starts at 0")
        block, within = divmod(n, _BLOCK)
        while len(self._before) <= block:
            last = len(self._before) - 1
            counts = np.bincount(self._block(last), minlength=len(self.sources))
            self._before.append(self._before[last] + counts)
        drawn = self._block(block)
        source = int(drawn[within])
        earlier = int(self._before[block][source]) + int((drawn[:within] == source).sum())
        epoch, place = divmod(earlier, len(self.sources[source]))
        return source, epoch, int(self._order(source, epoch)[place])

    def __getitem__(self, n: int) -> Item:
        source, _, row = self.locate(n)
        return self.sources[source][row]

    def replacement(self, n: int, attempt: int) -> Item:
        """Return the replacement number ``attempt`` for an element ``n`` that cannot be used."""
        pick = _uniform(self.seed, 2, _SPARE, n, attempt)
        rows = self.sources[int(np.searchsorted(self._edges, pick[0], side="right"))]
        return rows[int(pick[1] * len(rows))]

    def walk(self, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[tuple[int, Item]]:
        """Yield elements from ``start`` on with their numbers; nothing before is read.

        The processes 0 .. ``world`` - 1 take turns: together they see the order of a single one.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} processes")
        n = start + (rank - start) % world
        while True:
            yield n, self[n]
            n += world

    def _block(self, block: int) -> np.ndarray:
        if self._drawn[0] != block:
            draws = _uniform(self.seed, _BLOCK, _DRAWS, block)
            self._drawn = (block, np.searchsorted(self._edges, draws, side="right"))
        return self._drawn[1]

    def _order(self, source: int, epoch: int) -> np.ndarray:
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            keys = _uniform(self.seed, len(self.sources[source]), _ORDER, source, epoch)
            known = self._orders[source] = (epoch, np.argsort(keys, kind="stable"))
        return known[1]


def _uniform(seed: int, count: int, *stream: int) -> np.ndarray:
    """Draw float64 ``[count]`` in [0, 1), a function of the arguments alone.

    Uses raw Philox words, which numpy keeps stable over versions, unlike its distributions.
    """
    key = np.random.SeedSequence([seed, *stream]).generate_state(2, np.uint64)
    return (np.random.Philox(key=key).random_raw(count) >> np.uint64(11)) * 2.0**-53


LONG_CHATS = ("drop", "cut")
SHORTEST = 16  # least max_length: shorter pieces of a text teach nothing
_REPORTED = 5  # rows per reason that are reported one by one
_ATTEMPTS = 100


@dataclass
class Example:
    """One document of T tokens.

    Attributes:
        input_ids: int64 ``[T]``.
        labels: int64 ``[T]``, the id where the token is a target, else -100; not shifted.
        media: pixels, grids, sizes of its pictures and videos, as the processor returns them.
        token_types: int64 ``[T]``, 0 text, 1 picture, 2 video, where the processor gives them.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, Tensor] = field(default_factory=dict)
    token_types: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.numel()

    def inputs(self) -> dict[str, Tensor]:
        """Return what the processor returns for it (one row, ``[1, T]``), and ``labels [1, T]``."""
        made = {"input_ids": self.input_ids[None], "labels": self.labels[None], **self.media}
        if self.token_types is not None:
            made["mm_token_type_ids"] = self.token_types[None]
        return made


class Encoder:
    """Makes examples from rows with a model's processor.

    Args:
        max_length: longest example in tokens. Documents are cut into pieces of nearly equal
            length, chats are treated as ``long_chats`` says; no picture is ever cut.
        long_chats: ``drop`` leaves chats that are too long out, ``cut`` ends them after the last
            reply that fits.
        report: gets the first few rows that are cut or left out, each with the reason; None: the
            log of this module, as warnings.

    Attributes:
        tally: rows that were ``broken`` (a damaged picture, messages the template refuses),
            ``dropped`` or ``cut`` for their length, or ``split`` into pieces; ``rows`` in all.
        last_note: the last note on a row.

    Raises:
        DataError: settings outside their range.
    """

    def __init__(
        self,
        processor: Processor,
        max_length: int,
        long_chats: str = "drop",
        report: Report | None = None,
    ) -> None:
        if max_length < SHORTEST:
            raise DataError(f"--max-length is {max_length}; give at least {SHORTEST}")
        if long_chats not in LONG_CHATS:
            raise DataError(f"long chats are {long_chats!r}; choose {' or '.join(LONG_CHATS)}")
        self.processor, self.max_length, self.long_chats = processor, max_length, long_chats
        self.tally: Counter[str] = Counter()
        self.last_note = ""
        self._report = report or logging.getLogger(__name__).warning
        self._turns = TurnFinder(processor.tokenizer)

    def __call__(self, row: Row) -> list[Example]:
        """Return the examples of a row in order: one of a chat, one or more of a text, none if left
        out.
        """
        self.tally["rows"] += 1
        try:
            return self._document(row) if isinstance(row, ConversationDocument) else self._chat(row)
        except InputError as error:
            self._note(row, "broken", f"skipped: {error}")
            return []

    def summary(self) -> str:
        """Return one line about what was left out or cut, empty when nothing was."""
        kinds = ("broken", "incomplete", "dropped", "cut", "split")
        counts = [f"{self.tally[kind]} {kind}" for kind in kinds if self.tally[kind]]
        return f"of {self.tally['rows']} rows {', '.join(counts)}" if counts else ""

    def _document(self, row: ConversationDocument) -> list[Example]:
        ids = self.processor.encode(row.text)["input_ids"][0]
        if ids.numel() < 2:
            raise InputError("the text is a single token, which leaves nothing to predict")
        count = -(-ids.numel() // self.max_length)
        if count > 1:
            self._note(row, "split", f"{ids.numel()} tokens cut into {count} pieces")
        return [Example(piece.clone(), piece.clone()) for piece in ids.tensor_split(count)]

    def _chat(self, row: Conversation) -> list[Example]:
        example, turns = self._encode(row.messages, row)
        if len(example) <= self.max_length:
            return [example]
        length = len(example)
        if self.long_chats == "cut":
            fitting = [turn.message for turn in turns[:-1] if turn.close <= self.max_length]
            for last in reversed(fitting):
                example, _ = self._encode(row.messages[: last + 1])
                # A template can end a dialogue with more tokens than a turn inside it.
                if len(example) <= self.max_length:
                    kept = f"{last + 1} of {len(row.messages)} messages"
                    self._note(row, "cut", f"{length} tokens cut to {len(example)} ({kept})")
                    return [example]
        return self._too_long(row, length)

    def _encode(
        self, messages: list[Message], row: Row | None = None
    ) -> tuple[Example, list[AssistantTurn]]:
        processor = self.processor
        plain, images, videos = take_media(messages)
        clips = [processor.load_clip(video) for video in videos]
        for note in [clip.note for clip in clips if clip.note and row is not None]:
            self._note(row, "incomplete", note)
        inputs = processor.encode(
            processor.template.render(plain, opening=False),
            [processor.load_picture(image) for image in images],
            clips,
        )
        fills = processor.video_texts(clips, inputs)
        framed = processor.image_token.join(processor.image_frame)

        def render(some: list[Message], opening: bool) -> str:
            text = processor.template.render(some, opening)
            if processor.sees:
                text = text.replace(processor.image_token, framed)
            return _fill(text, processor.video_token, fills)

        short, turns = self._turns.find(plain, render)
        ids = inputs.pop("input_ids")[0]
        turns = self._placed(short, turns, ids)
        labels = torch.full_like(ids, IGNORED)
        for turn in turns:
            labels[turn.start : turn.stop] = ids[turn.start : turn.stop]
        types = inputs.pop("mm_token_type_ids", None)
        for name in ("attention_mask", "token_type_ids"):  # one row without padding needs neither
            inputs.pop(name, None)
        return Example(ids, labels, inputs, None if types is None else types[0].long()), turns

    def _placed(
        self, short: list[int], turns: list[AssistantTurn], ids: Tensor
    ) -> list[AssistantTurn]:
        """Return the replies in the model's ids, where each picture takes many tokens instead of
        one.

        All other tokens are the same in the same order, but for a start marker that the processor
        may add: they carry the indices over.
        """
        token = -1
        if self.processor.sees:
            token = self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token)
        before = torch.tensor(short)
        others, theirs = before != token, torch.nonzero(ids != token).flatten()
        kept = before[others]
        extra = theirs.numel() - kept.numel()
        if extra not in (0, 1) or not torch.equal(ids[theirs[extra:]], kept):
            raise DataError(
                "the model's processor makes other tokens of a chat than its tokenizer, so that "
                "what the assistant says cannot be told apart"
            )
        rank = others.long().cumsum(0) - 1

        def place(at: int) -> int:
            return int(theirs[extra + int(rank[at])])

        return [
            AssistantTurn(s.message, place(s.start), place(s.stop - 1) + 1, place(s.close - 1) + 1)
            for s in turns
        ]

    def _too_long(self, row: Any, length: int) -> list[Example]:
        self._note(row, "dropped", f"left out: {length} tokens, --max-length is {self.max_length}")
        return []

    def _note(self, row: Any, kind: str, text: str) -> None:
        self.tally[kind] += 1
        self.last_note = f"{row.file}:{row.row}: {text}"
        if self.tally[kind] <= _REPORTED:
            self._report(plain(self.last_note))


class Examples(Dataset[dict[str, Tensor]]):
    """A mixture as a dataset of ``length`` unpacked examples; example n depends on (seed, n) alone.

    For an element that gives no example another row is drawn, again by (seed, n). Of a document
    cut into pieces, every visit takes one.
    """

    def __init__(self, mixture: Mixture[Row], encoder: Encoder, length: int) -> None:
        self.mixture, self.encoder, self.length = mixture, encoder, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return what :meth:`Example.inputs` returns.

        Raises DataError when 100 rows in turn fail.
        """
        if not 0 <= index < self.length:
            raise IndexError(f"example {index} of {self.length}")
        made = self.encoder(self.mixture[index])
        for attempt in range(_ATTEMPTS):
            if made:
                # Fibonacci hashing: pieces come evenly, whatever the stride of the visits is.
                return made[index * 0x9E3779B1 % 2**32 * len(made) >> 32].inputs()
            made = self.encoder(self.mixture.replacement(index, attempt))
        raise DataError(
            f"no usable row in {_ATTEMPTS} draws ({self.encoder.summary()}); the last was "
            f"{self.encoder.last_note}"
        )


def _fill(text: str, token: str, fills: Sequence[str]) -> str:
    """Return ``text`` with its first placeholders replaced by ``fills``, in order."""
    if not fills:
        return text
    pieces = text.split(token)
    filled = [piece + fill for piece, fill in zip(pieces[:-1], fills, strict=False)]
    return "".join(filled) + pieces[-1]


_SYNTHETIC: dict[str, tuple[str, ...]] = {"scenes": tuple(KINDS), "tasks": tuple(TASKS)}
_ROWS = 2**17  # of each kind, before they come again


@dataclass(frozen=True)
class SyntheticRow:
    """The index of one synthetic dialogue.

    Attributes:
        domain: ``scenes`` (:mod:`mmkv.training.data.dialogues`) or ``tasks``
            (:mod:`mmkv.training.data.text_tasks`).
    """

    domain: str
    kind: str
    seed: int
    split: Split

    @property
    def file(self) -> str:
        """Return the row's place in its file, for messages."""
        return f"{self.domain}:{self.kind}"

    @property
    def row(self) -> int:
        """Return the row's number in its file."""
        return self.seed


class SyntheticRows(Sequence[SyntheticRow]):
    """The synthetic dialogues of one kind as rows of a mixture."""

    def __init__(self, domain: str, kind: str, split: Split) -> None:
        if kind not in _SYNTHETIC[domain]:
            raise DataError(
                f"no {domain} of kind {kind!r}; choose one of {', '.join(_SYNTHETIC[domain])}"
            )
        self.domain, self.kind, self.split = domain, kind, split

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, index: int) -> SyntheticRow:  # type: ignore[override]
        return SyntheticRow(self.domain, self.kind, index, self.split)


class SyntheticEncoder(Encoder):
    """An :class:`Encoder` that also encodes synthetic dialogues."""

    def __call__(self, row: Row | SyntheticRow) -> list[Example]:
        """Return the examples of a row.

        Synthetic documents are never cut: long ones are left out.
        """
        if not isinstance(row, SyntheticRow):
            return super().__call__(row)
        self.tally["rows"] += 1
        made = self._scene(row) if row.domain == "scenes" else self._task(row)
        return [made] if len(made) <= self.max_length else self._too_long(row, len(made))

    def _scene(self, row: SyntheticRow) -> Example:
        made = scene_example(scene_turns(row.kind, row.seed, row.split), self.processor.tokenizer)
        ids, labels, types = (
            made.pop(name)[0] for name in ("input_ids", "labels", "mm_token_type_ids")
        )
        return Example(ids, labels, made, types)

    def _task(self, row: SyntheticRow) -> Example:
        ids: list[int] = []
        labels: list[int] = []
        for piece in text_task(row.kind, row.seed, row.split):
            tokens = self.processor.tokenizer(piece.text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if piece.answer else [IGNORED] * len(tokens)
        return Example(torch.tensor(ids), torch.tensor(labels))


def examples(
    model: str,
    data: Sequence[str],
    length: int,
    seed: int,
    *,
    max_length: int = 4096,
    long_chats: str = "cut",
    media_root: str | None = None,
    split: Split = "train",
    report: Report | None = None,
) -> Examples:
    """Return the first ``length`` examples of a mixture of files and scenes.

    Args:
        model: whose processor and chat template make the tokens.
        data: ``[WEIGHT*][KIND:]PATH``, ``[WEIGHT*]scenes:KIND`` or ``[WEIGHT*]tasks:KIND``, each.
        split: of scenes and tasks.
        report: gets one line per broken, cut or dropped row, up to a few per reason.

    Raises:
        DataError: a source that cannot be read.
    """
    encoder = SyntheticEncoder(load_processor(model), max_length, long_chats, report)
    sources: list[Sequence[Any]] = []
    weights = []
    for text in data:
        weight, _, rest = text.rpartition("*")
        domain, _, kind = rest.partition(":")
        if domain in _SYNTHETIC:
            if domain == "scenes":
                require_scene_tokens(encoder.processor, model)
            sources.append(SyntheticRows(domain, kind, split))
            weights.append(_weight(weight, text))
        else:
            source = DataSource.parse(text)
            sources.append(RowFile(source.path, source.kind, media_root, report=report))
            weights.append(source.weight)
    return Examples(Mixture(sources, weights, seed), encoder, length)


def _weight(text: str, source: str) -> float:
    try:
        weight = float(text or 1)
    except ValueError:
        weight = 0.0
    if weight <= 0:
        raise DataError(f"--data {source!r}: {text!r} is no weight above 0")
    return weight


def require_scene_tokens(processor: Processor, model: str) -> None:
    """Raise DataError unless the processor has the tokens that scenes are written in."""
    if build_tokenizer().get_vocab() != processor.tokenizer.get_vocab():
        raise DataError(
            f"scenes are written in the bundled model's tokens, which {model} does not use; give "
            "it files or text"
        )
