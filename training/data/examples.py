"""Make training tensors of ``--data``: files, published sets, scenes and text tasks, in a mixture.

The order of a mixture depends on its seed only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmkv.engine.errors import InputError
from mmkv.prompt.loading import load_processor
from mmkv.prompt.messages import Message, take_media
from mmkv.prompt.processing import Processor
from mmkv.training.data.conversations import (
    Conversation,
    ConversationDocument,
    DataError,
    DataSource,
    Reasons,
    Report,
    Row,
    RowFile,
    UnusableRow,
)
from mmkv.training.data.dialogues import KINDS, scene_example, scene_turns
from mmkv.training.data.labels import IGNORED, AssistantTurn, TurnFinder
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.data.scenes import Split
from mmkv.training.data.sources import PUBLISHED, MixtureSource, find_published, read_mixture
from mmkv.training.data.text_tasks import KINDS as TASKS
from mmkv.training.data.text_tasks import NEEDLE_ROWS, NEEDLE_TOKENS, needle_chat, text_task

Item = TypeVar("Item")

_BLOCK = 4096  # draws made at once
# Keeps the random streams of different purposes apart.
_DRAWS, _ORDER, _SPARE, _SHARE = range(4)
_TOGETHER = 4  # groups of rows that are mixed; as many as a file keeps in memory


class Mixture(Generic[Item]):
    """An endless sequence of rows; element n is a function of (seed, n) alone.

    Each element's source is drawn by weight. A source is walked in a shuffled order that is new in
    every epoch, so none of its rows comes a second time before all came once. A source with
    ``groups`` (:class:`~mmkv.training.data.conversations.RowFile`) is shuffled within a few groups
    at a time, so that each is read once an epoch.

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
            order = np.argsort(keys, kind="stable")
            if (groups := getattr(self.sources[source], "groups", None)) is not None:
                # A group stands where its first row does in the order, a few groups together.
                place = np.empty(len(groups), np.int64)
                place[np.argsort(keys[groups], kind="stable")] = np.arange(len(groups))
                of_row = np.searchsorted(groups, order, side="right") - 1
                order = order[np.argsort(place[of_row] // _TOGETHER, kind="stable")]
            known = self._orders[source] = (epoch, order)
        return known[1]


def _uniform(seed: int, count: int, *stream: int) -> np.ndarray:
    """Draw float64 ``[count]`` in [0, 1), a function of the arguments alone.

    Uses raw Philox words, which numpy keeps stable over versions, unlike its distributions.
    """
    key = np.random.SeedSequence([seed, *stream]).generate_state(2, np.uint64)
    return (np.random.Philox(key=key).random_raw(count) >> np.uint64(11)) * 2.0**-53


LONG_CHATS = ("drop", "cut")
SHORTEST = 16  # least max_length: shorter pieces of a text teach nothing
_ATTEMPTS = 1000  # of FineWeb-Edu's texts a few in a hundred have 4,096 tokens


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
        report: gets the first row that is cut or left out for each reason; None: the log of this
            module, as warnings.

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
        self._reasons = Reasons(report or logging.getLogger(__name__).warning)
        self._limit = max_length
        self._turns = TurnFinder(processor.tokenizer)

    def __call__(self, row: Row | UnusableRow) -> list[Example]:
        """Return the examples of a row in order: one of a chat, one or more of a text, none if left
        out.
        """
        self.tally["rows"] += 1
        if isinstance(row, UnusableRow):
            self._note(row, "broken", f"skipped: {row.reason}")
            return []
        try:
            return self._document(row) if isinstance(row, ConversationDocument) else self._chat(row)
        except InputError as error:
            self._note(row, "broken", f"skipped: {error}")
            return []

    def summary(self) -> str:
        """Return one line about what was left out or cut, empty when nothing was."""
        kinds = ("broken", "incomplete", "dropped", "short", "cut", "split")
        counts = [f"{self.tally[kind]} {kind}" for kind in kinds if self.tally[kind]]
        return f"of {self.tally['rows']} rows {', '.join(counts)}" if counts else ""

    def _document(self, row: ConversationDocument) -> list[Example]:
        ids = self.processor.encode(row.text)["input_ids"][0]
        if ids.numel() < 2:
            raise InputError("the text is a single token, which leaves nothing to predict")
        count = -(-ids.numel() // self._limit)
        if count > 1:
            self._note(row, "split", f"{ids.numel()} tokens cut into {count} pieces")
        return [Example(piece.clone(), piece.clone()) for piece in ids.tensor_split(count)]

    def _chat(self, row: Conversation) -> list[Example]:
        example, turns = self._encode(row.messages, row)
        if len(example) <= self._limit:
            return [example]
        length = len(example)
        if self.long_chats == "cut":
            fitting = [turn.message for turn in turns[:-1] if turn.close <= self._limit]
            for last in reversed(fitting):
                example, _ = self._encode(row.messages[: last + 1])
                # A template can end a dialogue with more tokens than a turn inside it.
                if len(example) <= self._limit:
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
        self._note(row, "dropped", f"left out: {length} tokens, --max-length is {self._limit}")
        return []

    def _note(self, row: Any, kind: str, text: str) -> None:
        self.tally[kind] += 1
        self.last_note = f"{row.file}:{row.row}: {text}"
        self._reasons.add(text, self.last_note)


class Examples(Dataset[dict[str, Tensor]]):
    """A mixture as a dataset of ``length`` unpacked examples; example n depends on (seed, n) alone.

    For an element that gives no example another row is drawn, again by (seed, n). Of a document
    cut into pieces, every visit takes one.

    Args:
        pack: tokens that an element is filled up to with further rows, drawn by (seed, n); the
            documents stay apart, each with ages of its own. 0: one document an element.
    """

    def __init__(self, mixture: Mixture[Row], encoder: Encoder, length: int, pack: int = 0) -> None:
        self.mixture, self.encoder, self.length, self.pack = mixture, encoder, length, pack

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return what :meth:`Example.inputs` returns for the element's first document.

        Raises DataError when 1,000 rows in turn fail.
        """
        return self._first(index)[0].inputs()

    def packed(self, index: int) -> list[dict[str, Tensor]]:
        """Return all documents of an element, each as :meth:`Example.inputs` returns it."""
        made, attempt = self._first(index)
        documents, left = [made], self.pack - len(made)
        while left > 0 and attempt < _ATTEMPTS:
            more = self.encoder(self.mixture.replacement(index, attempt))
            attempt += 1
            if more:
                one = self._one(more, index)
                left -= len(one)
                if left >= 0:
                    documents.append(one)
        return [document.inputs() for document in documents]

    def _first(self, index: int) -> tuple[Example, int]:
        """Return the element's first document, and how many further rows that took."""
        if not 0 <= index < self.length:
            raise IndexError(f"example {index} of {self.length}")
        made = self.encoder(self.mixture[index])
        for attempt in range(_ATTEMPTS):
            if made:
                return self._one(made, index), attempt
            made = self.encoder(self.mixture.replacement(index, attempt))
        raise DataError(
            f"no usable row in {_ATTEMPTS} draws ({self.encoder.summary()}); the last was "
            f"{self.encoder.last_note}"
        )

    @staticmethod
    def _one(made: list[Example], index: int) -> Example:
        # Fibonacci hashing: pieces come evenly, whatever the stride of the visits is.
        return made[index * 0x9E3779B1 % 2**32 * len(made) >> 32]


class PackedExamples(Dataset[list[dict[str, Tensor]]]):
    """The elements of :class:`Examples` with all their documents."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.encoder = examples, examples.encoder

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> list[dict[str, Tensor]]:
        """Return the documents of an element."""
        return self.examples.packed(index)


def _fill(text: str, token: str, fills: Sequence[str]) -> str:
    """Return ``text`` with its first placeholders replaced by ``fills``, in order."""
    if not fills:
        return text
    pieces = text.split(token)
    filled = [piece + fill for piece, fill in zip(pieces[:-1], fills, strict=False)]
    return "".join(filled) + pieces[-1]


_SYNTHETIC: dict[str, tuple[str, ...]] = {"scenes": tuple(KINDS), "tasks": tuple(TASKS)}
_ROWS = 2**17  # of each kind, before they come again
_NEEDLES = "niah"


@dataclass(frozen=True)
class SyntheticRow:
    """The index of one synthetic dialogue.

    Attributes:
        domain: ``scenes`` (:mod:`mmkv.training.data.dialogues`), ``tasks`` or ``niah``
            (:mod:`mmkv.training.data.text_tasks`).
        tokens: of ``niah``: shortest and longest text.
    """

    domain: str
    kind: str
    seed: int
    split: Split
    tokens: tuple[int, int] = NEEDLE_TOKENS

    @property
    def file(self) -> str:
        """Return the row's place in its file, for messages."""
        return f"{self.domain}:{self.kind}" if self.kind else self.domain

    @property
    def row(self) -> int:
        """Return the row's number in its file."""
        return self.seed


class SyntheticRows(Sequence[SyntheticRow]):
    """The synthetic dialogues of one kind as rows of a mixture.

    Args:
        kind: of scenes or tasks; of ``niah`` the range of lengths, ``4000-200000`` when empty.
        longest: tokens that a text of ``niah`` has at most.
    """

    def __init__(self, domain: str, kind: str, split: Split, longest: int = 2**31) -> None:
        self.domain, self.kind, self.split = domain, kind, split
        self.tokens = NEEDLE_TOKENS
        if domain == _NEEDLES:
            low, high = self._range(kind)
            if low > longest:
                raise DataError(
                    f"niah makes texts of {low} tokens and more, --max-length is {longest}; raise "
                    f"it, or give niah:LOW-HIGH"
                )
            self.tokens = (low, min(high, longest))
        elif kind not in _SYNTHETIC[domain]:
            raise DataError(
                f"no {domain} of kind {kind!r}; choose one of {', '.join(_SYNTHETIC[domain])}"
            )

    @staticmethod
    def _range(kind: str) -> tuple[int, int]:
        if not kind:
            return NEEDLE_TOKENS
        low, _, high = kind.partition("-")
        if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
            raise DataError(f"niah:{kind} is no range of tokens; write niah:4000-200000")
        return int(low), int(high)

    def __len__(self) -> int:
        return NEEDLE_ROWS[self.split] if self.domain == _NEEDLES else _ROWS

    def __getitem__(self, index: int) -> SyntheticRow:  # type: ignore[override]
        return SyntheticRow(self.domain, self.kind, index, self.split, self.tokens)


@dataclass(frozen=True)
class LimitedRow:
    """A row whose documents have ``shortest`` to ``longest`` tokens; ``prefix``: of texts."""

    row: Any
    shortest: int = 0
    longest: int | None = None
    prefix: str = ""


class Limited(Sequence[Any]):
    """Some rows of a source, with limits.

    Args:
        chosen: indices of the rows that are used, ascending; None: all.
        limits: a row with the limits of all.
    """

    def __init__(
        self, rows: Sequence[Any], limits: LimitedRow, chosen: np.ndarray | None = None
    ) -> None:
        self._rows, self._limits, self._chosen = rows, limits, chosen
        self.groups = getattr(rows, "groups", None)
        if self.groups is not None and chosen is not None:
            self.groups = np.unique(np.searchsorted(chosen, self.groups))
            self.groups = self.groups[self.groups < len(chosen)]

    def __len__(self) -> int:
        return len(self._rows) if self._chosen is None else len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        at = index if self._chosen is None else int(self._chosen[index])
        return replace(self._limits, row=self._rows[at])


class SyntheticEncoder(Encoder):
    """An :class:`Encoder` that also encodes synthetic dialogues and rows with limits."""

    def __call__(self, row: Row | UnusableRow | SyntheticRow | LimitedRow) -> list[Example]:
        """Return the examples of a row.

        Synthetic documents are never cut: long ones are left out.
        """
        if isinstance(row, LimitedRow):
            return self._limited(row)
        if not isinstance(row, SyntheticRow):
            return super().__call__(row)
        if row.domain == _NEEDLES:
            return super().__call__(self._needles(row))
        self.tally["rows"] += 1
        made = self._scene(row) if row.domain == "scenes" else self._task(row)
        return [made] if len(made) <= self._limit else self._too_long(row, len(made))

    def _limited(self, limited: LimitedRow) -> list[Example]:
        row = limited.row
        if limited.prefix and isinstance(row, ConversationDocument):
            row = replace(row, text=limited.prefix + row.text)
        self._limit = min(self.max_length, limited.longest or self.max_length)
        try:
            made = self(row)
        finally:
            self._limit = self.max_length
        kept = [example for example in made if len(example) >= limited.shortest]
        if made and not kept:
            self._note(row, "short", f"left out: {len(made[0])} tokens, of {limited.shortest}")
        return kept

    def _needles(self, row: SyntheticRow) -> Row | UnusableRow:
        def count(texts: list[str]) -> list[int]:
            ids = self.processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return [len(one) for one in ids]

        try:
            said = needle_chat(row.seed, row.split, row.tokens, count)
        except ValueError as error:
            return UnusableRow(str(error), row.file, row.row)
        roles = ("user", "assistant")
        messages: list[Message] = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in zip(roles, said, strict=True)
        ]
        return Conversation(messages, row.file, row.row)

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
    pack: bool = False,
) -> Examples:
    """Return the first ``length`` examples of a mixture of files and scenes.

    Args:
        model: whose processor and chat template make the tokens.
        data: ``[WEIGHT*][KIND:]PATH``, ``[WEIGHT*]scenes:KIND``, ``[WEIGHT*]tasks:KIND``,
            ``[WEIGHT*]niah[:LOW-HIGH]``, ``[WEIGHT*]NAME[:FOLDER]`` of a published set, each, or
            ``mixture:FILE``.
        split: of scenes, tasks and needles.
        report: gets one line per broken, cut or dropped row, up to a few reasons.
        pack: fill every element up to ``max_length`` tokens with further documents.

    Raises:
        DataError: a source that cannot be read.
    """
    encoder = SyntheticEncoder(load_processor(model), max_length, long_chats, report)
    sources: list[Sequence[Any]] = []
    weights = []
    for asked, folder in _asked(data):
        weight, text = _split_weight(asked.data)
        if weight is not None and asked.weight != 1.0:
            raise DataError(f"mixture: {asked.data!r} has a weight of its own; give one weight")
        rows = _rows(text, folder, encoder, model, media_root, split, report)
        known = PUBLISHED.get(text.partition(":")[0])
        limits = LimitedRow(None, asked.shortest, asked.longest)
        if known:
            least = min(known.shortest, asked.longest or max_length, max_length)
            limits = replace(limits, prefix=known.prefix, shortest=max(asked.shortest, least))
        chosen = _chosen(rows, asked, limits, encoder, seed, len(sources))
        if chosen is not None or limits != LimitedRow(None):
            rows = Limited(rows, limits, chosen)
        sources.append(rows)
        given = asked.weight if weight is None else weight
        weights.append(len(rows) if given == "rows" else given)
    return Examples(Mixture(sources, weights, seed), encoder, length, max_length if pack else 0)


def _asked(data: Sequence[str]) -> Iterator[tuple[MixtureSource, Path | None]]:
    """Yield the sources of ``--data`` and its mixture files, with the folder of the latter."""
    for text in data:
        path = text.removeprefix("mixture:")
        if path != text or path.endswith(".toml"):
            sources, folder = read_mixture(path)
            for source in sources:
                yield source, folder
        else:
            yield MixtureSource.model_construct(data=text), None


def _rows(
    text: str,
    folder: Path | None,
    encoder: SyntheticEncoder,
    model: str,
    media_root: str | None,
    split: Split,
    report: Report | None,
) -> Sequence[Any]:
    """Open one source; relative paths start from ``folder``."""
    domain, _, kind = text.partition(":")
    if domain == _NEEDLES:
        return SyntheticRows(domain, kind, split, encoder.max_length)
    if domain in _SYNTHETIC:
        if domain == "scenes":
            require_scene_tokens(encoder.processor, model)
        return SyntheticRows(domain, kind, split)
    if domain in PUBLISHED:
        where = str(folder / kind) if kind and folder else kind
        files, form = find_published(domain, where), PUBLISHED[domain].kind
        return RowFile(files, form, media_root, report=report)
    source = DataSource.parse(text)
    path = folder / source.path if folder else source.path
    return RowFile(path, source.kind, media_root, report=report)


def _chosen(
    rows: Sequence[Any],
    asked: MixtureSource,
    limits: LimitedRow,
    encoder: SyntheticEncoder,
    seed: int,
    source: int,
) -> np.ndarray | None:
    """Return the rows that a source's share and cap of tokens leave, ascending; None: all."""
    if asked.share == 1 and asked.tokens is None:
        return None
    order = np.argsort(_uniform(seed, len(rows), _SHARE, source), kind="stable")
    order = order[: max(1, round(asked.share * len(rows)))]
    if asked.tokens is not None:
        counting = SyntheticEncoder(
            encoder.processor, encoder.max_length, encoder.long_chats, lambda _: None
        )
        left, used = asked.tokens, 0
        while left > 0 and used < len(order):
            made = counting(replace(limits, row=rows[int(order[used])]))
            left -= sum(map(len, made))
            used += 1
        order = order[:used]
    return np.sort(order)


def _split_weight(text: str) -> tuple[float | None, str]:
    """Split ``[WEIGHT*]SOURCE``; a path may hold a ``*`` too."""
    before, star, rest = text.partition("*")
    try:
        weight = float(before)
    except ValueError:
        if star and rest.partition(":")[0] in (*_SYNTHETIC, *PUBLISHED, _NEEDLES):
            weight = 0.0
        else:
            return None, text
    if not star:
        return None, text
    if not 0 < weight < float("inf"):
        raise DataError(f"--data {text!r}: {before!r} is no weight above 0")
    return weight, rest


def require_scene_tokens(processor: Processor, model: str) -> None:
    """Raise DataError unless the processor has the tokens that scenes are written in."""
    if build_tokenizer().get_vocab() != processor.tokenizer.get_vocab():
        raise DataError(
            f"scenes are written in the bundled model's tokens, which {model} does not use; give "
            "it files or text"
        )
