"""Held-out documents of the evaluation programs, by name.

A name decides its documents completely, and document n does not depend on how many are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.documents import Document
from eval.needle import tasks as needle_tasks
from eval.sessions import tasks as dialogue_tasks
from mmkv.data.examples import Examples
from mmkv.data.sources import examples
from mmkv.prompt.processing import Processor, load_processor

ENDLESS = 2**31  # the length of a source

# Domains made for one program; all others are those of mmkv.data.sources.
_DOMAINS: dict[str, Callable[[str, str, Processor], Callable[[int], Document]]] = {
    "needle": needle_tasks.maker,
    "sessions": dialogue_tasks.maker,
}


class GeneratedDocuments(Sequence[dict[str, Any]]):
    """The sequence of the documents that ``make`` returns for an index."""

    def __init__(self, make: Callable[[int], Document]) -> None:
        self.make = make

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self.make(index).example


def maker(model: str, name: str) -> Callable[[int], Document] | None:
    """Return the function that makes dialogue n of ``name``; None for :mod:`mmkv.data.sources`.

    Raises:
        InputError: a name that cannot be understood, or that the model cannot read.
    """
    open_ = _DOMAINS.get(name.partition(":")[0])
    return None if open_ is None else open_(name, model, load_processor(model))


def held_out(model: str, name: str, max_length: int) -> GeneratedDocuments | Examples:
    """Make dialogues as processor outputs with ``labels [1, T]``, some with ``cuts``.

    Raises:
        InputError: as :func:`maker`, or an unknown source.
    """
    make = maker(model, name)
    if make is not None:
        return GeneratedDocuments(make)
    return examples(model, [name], ENDLESS, seed=0, max_length=max_length, split="heldout")
