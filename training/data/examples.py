"""Convert conversations and documents to training tensors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmkv.engine.errors import InputError, plain
from mmkv.prompt.messages import take_media
from mmkv.prompt.processing import Processor
from mmkv.prompt.template import Message
from mmkv.training.data.conversations import Conversation, DataError, Document, Row
from mmkv.training.data.labels import IGNORED, AssistantTurn, TurnFinder
from mmkv.training.data.mixture import Mixture
from mmkv.training.data.readers import Report

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
            return self._document(row) if isinstance(row, Document) else self._chat(row)
        except InputError as error:
            self._note(row, "broken", f"skipped: {error}")
            return []

    def summary(self) -> str:
        """Return one line about what was left out or cut, empty when nothing was."""
        kinds = ("broken", "incomplete", "dropped", "cut", "split")
        counts = [f"{self.tally[kind]} {kind}" for kind in kinds if self.tally[kind]]
        return f"of {self.tally['rows']} rows {', '.join(counts)}" if counts else ""

    def _document(self, row: Document) -> list[Example]:
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
