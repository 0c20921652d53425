"""What evaluation programs read, by name: held-out dialogues of every world.

A name says all that decides its dialogues, and dialogue n never depends on how many are read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from eval.forced import spans
from eval.scenes import Turn
from mmkv.processing import Processor, load_processor
from training.examples import IGNORED, Examples
from training.sources import examples

ENDLESS = 2**31  # the length of a source

# Worlds made for one program; all others are those of training.sources.
_WORLDS = {"needle": "eval.needle_tasks", "sessions": "eval.dialogue_tasks"}


@dataclass(frozen=True)
class Made:
    """One dialogue.

    Attributes:
        example: what the processor returns for it, ``labels [1, T]``, and ``cuts``: token indices
            at which memory is brought down to the budget before what follows is known.
        notes: about each answer, in order; what they are is the world's affair.
    """

    example: dict[str, Any]
    notes: list[Any]


@dataclass
class Pieces:
    """A dialogue of plain text that grows piece by piece.

    Attributes:
        ids: its tokens; labels: the same where an answer stands, -100 elsewhere; cuts: as in
            :class:`Made`.
    """

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)

    def tokens(self, text: str) -> list[int]:
        """The ids of ``text`` alone."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def say(self, text: str) -> None:
        """Append what is not asked for."""
        added = self.tokens(text)
        self.ids += added
        self.labels += [IGNORED] * len(added)

    def answer(self, text: str) -> range:
        """Append what is; where it stands."""
        added = self.tokens(text)
        self.ids += added
        self.labels += added
        return range(len(self.ids) - len(added), len(self.ids))

    def cut(self) -> None:
        """Memory is brought down to the budget here."""
        self.cuts.append(len(self.ids))

    def example(self) -> dict[str, Any]:
        """For :class:`Made`."""
        return {
            "input_ids": torch.tensor([self.ids]),
            "labels": torch.tensor([self.labels]),
            "cuts": self.cuts,
        }


class MadeUp(Sequence[dict[str, Any]]):
    """The dialogues that ``make`` makes of their indices."""

    def __init__(self, make: Callable[[int], Made]) -> None:
        self.make = make

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self.make(index).example


def scene_cuts(
    example: dict[str, Any], turns: Sequence[Turn], tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    """For :class:`Made`: where in scene dialogues the question begins, of turns with pictures."""

    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    marks = size("<|im_end|>\n<|im_start|>assistant\n")
    answers = spans(example["labels"][0].tolist())
    return [
        start - marks - size(turn.question.text)
        for turn, (start, _) in zip(turns, answers, strict=True)
        if turn.pictures
    ]


def maker(model: str, name: str) -> Callable[[int], Made] | None:
    """What makes the dialogues of ``name``; None for those of :mod:`training.sources`.

    Raises:
        InputError: a name that cannot be understood, or that the model cannot read.
    """
    world = name.partition(":")[0]
    if world not in _WORLDS:
        return None
    open_: Callable[[str, str, Processor], Callable[[int], Made]] = importlib.import_module(
        _WORLDS[world]
    ).maker
    return open_(name, model, load_processor(model))


def held_out(model: str, name: str, max_length: int) -> MadeUp | Examples:
    """Dialogues as the processor returns them, with ``labels [1, T]`` and maybe ``cuts``.

    Raises:
        InputError: as :func:`maker`, or an unknown source.
    """
    make = maker(model, name)
    if make is not None:
        return MadeUp(make)
    return examples(model, [name], ENDLESS, seed=0, max_length=max_length, split="heldout")
