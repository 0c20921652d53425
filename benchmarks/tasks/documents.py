"""Documents of the evaluation programs: inputs, labels, and where memory is cut to the budget.

Memory is brought down to the budget at every cut, before the question that follows is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from mmkv.engine.errors import InputError
from mmkv.training.data.dialogues import scene_example
from mmkv.training.data.examples import Examples
from mmkv.training.data.labels import IGNORED
from mmkv.training.data.scenes import SceneTurn
from mmkv.training.measure.teacher_forced import spans

ENDLESS = 2**31  # the length of a source


@dataclass(frozen=True)
class Document:
    """One dialogue.

    Attributes:
        example: what the processor returns for it, ``labels [1, T]``, and ``cuts``: token indices
            at which memory is brought down to the budget before what follows is known.
        notes: one per answer, in order; their type depends on the domain.
    """

    example: dict[str, Any]
    notes: list[Any]


@dataclass
class TextBuilder:
    """A dialogue of plain text that grows piece by piece.

    Attributes:
        ids: its tokens; labels: the same where an answer stands, -100 elsewhere; cuts: as in
            :class:`Document`.
    """

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)

    def tokens(self, text: str) -> list[int]:
        """Tokenize ``text`` alone."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def add(self, text: str) -> None:
        """Append text that is not asked for."""
        added = self.tokens(text)
        self.ids += added
        self.labels += [IGNORED] * len(added)

    def add_answer(self, text: str) -> range:
        """Append text that is asked for; return its token range."""
        added = self.tokens(text)
        self.ids += added
        self.labels += added
        return range(len(self.ids) - len(added), len(self.ids))

    def add_cut(self) -> None:
        """Mark a cut: memory is brought down to the budget here."""
        self.cuts.append(len(self.ids))

    def example(self) -> dict[str, Any]:
        """Return the example of a :class:`Document`."""
        return {
            "input_ids": torch.tensor([self.ids]),
            "labels": torch.tensor([self.labels]),
            "cuts": self.cuts,
        }


def scene_document(turns: list[SceneTurn], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Make a scene dialogue for :class:`Document`."""
    made: dict[str, Any] = dict(scene_example(turns, tokenizer))
    made["cuts"] = _scene_cuts(made, turns, tokenizer)
    return made


def _scene_cuts(
    example: dict[str, Any], turns: Sequence[SceneTurn], tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    """Return where the question begins in turns with pictures: memory is brought down before it."""

    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    marks = size("<|im_end|>\n<|im_start|>assistant\n")
    answers = spans(example["labels"][0].tolist())
    return [
        start - marks - size(turn.question.text)
        for turn, (start, _) in zip(turns, answers, strict=True)
        if turn.pictures
    ]


class GeneratedDocuments(Sequence[dict[str, Any]]):
    """The sequence of the documents that ``make`` returns for an index."""

    def __init__(self, make: Callable[[int], Document]) -> None:
        self.make = make

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self.make(index).example


class DistinctDocuments(Sequence[dict[str, Any]]):
    """The different documents among those of a file, which come again and again, in order.

    A long text is cut into pieces and every visit takes one, so a piece may come twice: counted
    twice it would make intervals too narrow.
    """

    _PATIENCE = 200  # visits without a new document after which there is none

    def __init__(self, name: str, visits: Examples) -> None:
        self.name, self.visits = name, visits
        self._visited = 0
        self._found: dict[bytes, int] = {}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        last = self._visited
        while len(self._found) <= index:
            if self._visited - last >= self._PATIENCE:
                raise InputError(
                    f"{self.name} holds {len(self._found)} different documents or pieces of "
                    "documents; give at most as many --dialogues"
                )
            key = self.visits[self._visited]["input_ids"].numpy().tobytes()
            if key not in self._found:
                self._found[key] = last = self._visited
            self._visited += 1
        return self.visits[list(self._found.values())[index]]
