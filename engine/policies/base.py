"""What a policy is made of: scoring and allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.errors import PolicyError
from engine.policies.selection import MOST_ENTRIES, Shares, lowest


@dataclass(frozen=True)
class Needs:
    """What a scorer reads beside positions and modality; the engine keeps nothing else for it.

    Attributes:
        gates: ``"retention"``: retention gates, whose ``log_beta`` is stored with each entry.
        queries: recent queries to keep per layer, for :attr:`CacheView.attention`.
        keys: whether :meth:`CacheView.keys` is read.
    """

    gates: Literal["", "retention"] = ""
    queries: int = 0
    keys: bool = False

    def __post_init__(self) -> None:
        if self.gates not in ("", "retention") or self.queries < 0:
            raise PolicyError(
                f"{self} cannot be: gates is '' or 'retention', queries a number from 0, keys a "
                "bool"
            )


def _no_keys() -> Tensor:
    raise PolicyError("the scorer reads keys and does not say so; give it needs = Needs(keys=True)")


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
            ``needs.queries``.
        gather_keys: reads the keys where they lie; see :meth:`keys`.
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
    gather_keys: Callable[[], Tensor] = _no_keys

    def keys(self) -> Tensor:
        """Gather the keys after RoPE, ``[N, D]`` in the cache's dtype; a copy at each call.

        Raises:
            PolicyError: the scorer does not declare ``needs.keys``.
        """
        return self.gather_keys()

    @property
    def rows(self) -> int:
        """Number of rows of the sequence."""
        return self.layers * self.kv_heads

    def to_rows(self, values: Tensor, fill: float) -> Tensor:
        """Spread ``values [N, ...]`` to ``[rows, longest row, ...]``, the rest being ``fill``."""
        padded = values.new_full((self.rows, int(self.length.max()), *values.shape[1:]), fill)
        padded[self.live()] = values
        return padded

    def live(self) -> Tensor:
        """Bool ``[rows, longest row]``: which cells of :meth:`to_rows` hold an entry."""
        column = torch.arange(int(self.length.max()), device=self.length.device)
        return column < self.length[:, None]


class Scorer(Protocol):
    """A score per entry at the present step; the lowest are evicted."""

    @property
    def needs(self) -> Needs:
        """What it reads; often a class variable."""
        ...

    def score(self, view: CacheView) -> Tensor:
        """Float32 ``[N]``."""
        ...


class Allocation(Protocol):
    """Which entries compete with which for the budget."""

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """Groups of rows and what each may keep.

        As soon as one group stands above its share (and the slack of ``evict_every``), all are cut
        down to theirs.
        """
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

    def identity(self) -> str:
        """Name every part and setting that decides what is evicted; ``source`` does not."""
        return (
            f"{self.name}: {self.scoring!r}, {self.allocation!r}, "
            f"first {self.protect_first} and recent {self.protect_recent} protected"
        )

    def victims(self, view: CacheView, budget: int) -> Tensor:
        """Indices ``[K]`` of the entries to drop, lowest protected score first.

        NaN is the lowest score; ties fall on the smaller position, then layer, then head.

        Raises:
            PolicyError: the scorer does not return one number an entry.
        """
        return self.lowest(self.scores(view), view, budget)

    def scores(self, view: CacheView) -> Tensor:
        """Float32 ``[N]``: the scorer's, infinite where protected."""
        scores = self.scoring.score(view)
        if scores.shape != view.position.shape:
            raise PolicyError(
                f"the scorer {type(self.scoring).__name__} of policy {self.name!r} returned shape "
                f"{list(scores.shape)} for {view.position.numel()} entries; return one number an "
                "entry, in the view's order"
            )
        scores = scores.float()
        if self.protect_first:
            scores = scores.masked_fill(view.position < self.protect_first, torch.inf)
        if self.protect_recent:
            recent = view.position >= view.seen - self.protect_recent
            scores = scores.masked_fill(recent, torch.inf)
        return scores

    def lowest(self, scores: Tensor, view: CacheView, budget: int) -> Tensor:
        """:meth:`victims`, from ``scores [N]`` already computed."""
        return lowest(scores, view, self.shares(budget, view.layers, view.kv_heads))

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """Groups of rows and what each may keep.

        Raises:
            PolicyError: the allocation gives its groups more than the budget.
        """
        assert self.allocation is not None
        budget = min(budget, MOST_ENTRIES)
        shares = self.allocation.shares(budget, layers, kv_heads)
        given = int(shares.share.sum())
        if given > budget:
            raise PolicyError(
                f"policy {self.name!r}: its allocation shares out {given:,} entries of a budget of "
                f"{budget:,}; shares must add up to the budget"
            )
        return shares
