"""What a policy is made of: scoring and allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheView:
    """What scorers and allocations may look at: all entries of one sequence, row-major.

    Attributes:
        seen: tokens of the sequence so far, text and visual alike.
        row: ``[N]`` int64, ``layer * kv_heads + head``; ascending.
        length: ``[layers * kv_heads]`` int64, entries per row.
        position: ``[N]`` int64 token index; log_beta: ``[N]`` float32; modality: ``[N]`` uint8.
        attention: given this view, computes ``[N]`` float32 window-attention probabilities,
            averaged over the window's queries and the KV group; only for scorers with
            ``window > 0``.
    """

    seen: int
    layers: int
    kv_heads: int
    row: Tensor
    length: Tensor
    position: Tensor
    log_beta: Tensor
    modality: Tensor
    attention: Callable[[CacheView], Tensor]

    @property
    def rows(self) -> int:
        """Number of rows of the sequence."""
        return self.layers * self.kv_heads

    def to_rows(self, values: Tensor, fill: float) -> Tensor:
        """Spread ``values [N]`` to ``[rows, longest row]``, short rows padded with ``fill``."""
        padded = values.new_full((self.rows, int(self.length.max())), fill)
        padded[self.live()] = values
        return padded

    def live(self) -> Tensor:
        """Bool ``[rows, longest row]``: which cells of :meth:`to_rows` hold an entry."""
        column = torch.arange(int(self.length.max()), device=self.length.device)
        return column < self.length[:, None]


class Scorer(Protocol):
    """A score per entry at the present step; the lowest are evicted."""

    @property
    def window(self) -> int:
        """Recent queries per layer the scorer needs (0: none are kept)."""
        ...

    @property
    def needs_gates(self) -> bool:
        """Whether the scorer reads ``log_beta``."""
        ...

    def score(self, view: CacheView) -> Tensor:
        """Float32 ``[N]``."""
        ...


class Allocation(Protocol):
    """Which entries compete with which for the budget."""

    def victims(self, scores: Tensor, view: CacheView, budget: int) -> Tensor:
        """Indices ``[K]`` of the entries to drop so that at most ``budget`` stay in all."""
        ...


@dataclass(frozen=True)
class Policy:
    """One published method: a scorer and an allocation, by name.

    Attributes:
        allocation: None for methods that never evict.
        protect_first, protect_recent: tokens at either end that outrank every score.
        source: the paper the combination comes from.
    """

    name: str
    scoring: Scorer
    allocation: Allocation | None
    protect_first: int = 0
    protect_recent: int = 0
    source: str = ""

    @property
    def evicts(self) -> bool:
        """Whether a budget binds this policy."""
        return self.allocation is not None

    def victims(self, view: CacheView, budget: int) -> Tensor:
        """Indices of the entries to drop, lowest protected score first.

        Ties fall on the smaller position, then layer, then head.
        """
        assert self.allocation is not None
        scores = self.scoring.score(view)
        if self.protect_first:
            scores = scores.masked_fill(view.position < self.protect_first, torch.inf)
        if self.protect_recent:
            recent = view.position >= view.seen - self.protect_recent
            scores = scores.masked_fill(recent, torch.inf)
        return self.allocation.victims(scores, view, budget)
