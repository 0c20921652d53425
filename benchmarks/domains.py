"""Held-out documents of the evaluation programs, by name.

A name decides its documents completely, and document n does not depend on how many are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import needle_tasks
from benchmarks import session_tasks as dialogue_tasks
from benchmarks.documents import Document
from mmkv.engine.errors import InputError
from mmkv.prompt.loading import load_processor
from mmkv.prompt.processing import Processor
from mmkv.training.data.examples import Examples, examples

ENDLESS = 2**31  # the length of a source

# Domains made for one program; all others are those of mmkv.training.data.examples.
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


def maker(model: str, name: str) -> Callable[[int], Document] | None:
    """Return what makes dialogue n of ``name``; None for :mod:`mmkv.training.data.examples`.

    Raises:
        InputError: a name that cannot be understood, or that the model cannot read.
    """
    open_ = _DOMAINS.get(name.partition(":")[0])
    return None if open_ is None else open_(name, model, load_processor(model))


def held_out(
    model: str, name: str, max_length: int
) -> GeneratedDocuments | DistinctDocuments | Examples:
    """Make dialogues as processor outputs with ``labels [1, T]``, some with ``cuts``.

    Those of a file are all different.

    Raises:
        InputError: as :func:`maker`, or an unknown source.
    """
    make = maker(model, name)
    if make is not None:
        return GeneratedDocuments(make)
    data = examples(model, [name], ENDLESS, seed=0, max_length=max_length, split="heldout")
    # Generated ones differ by their seed.
    generated = name.rpartition("*")[2].startswith(("scenes:", "tasks:"))
    return data if generated else DistinctDocuments(name, data)
