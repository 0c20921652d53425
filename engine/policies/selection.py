"""Selection: the lowest entries of each group of rows, as many as it holds above its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmkv.engine.policies.base import CacheView

# What int64 can count with; no cache holds as many.
MOST_ENTRIES = 2**61
_HIGHEST = 2**31 - 1
_GUARDED = 2**32  # above every key
_LAST = 2**63 - 1


@dataclass(frozen=True)
class Shares:
    """Groups of rows whose entries compete, and how many entries each group may keep.

    Attributes:
        group: ``[rows]`` int64 on the CPU, each row's group: 0, 1, ... in ascending order.
        share: ``[groups]`` int64 on the CPU; they add up to the budget.
        floor: ``[rows]`` int64 on the CPU: each row's best entries, so many of them, go last in
            their group. None: no row is guarded.
    """

    group: Tensor
    share: Tensor
    floor: Tensor | None = None

    def exceeded(self, length: Tensor, slack: int) -> bool:
        """Whether a group holds more than its share and ``slack`` entries per row beside it.

        Args:
            length: ``[rows]`` int64, entries of each row.
        """
        slack = min(slack, MOST_ENTRIES // self.group.numel())  # the product fits int64
        allowed = self.share + slack * self.group.bincount(minlength=self.share.numel())
        held = torch.zeros_like(allowed).index_add_(0, self.group, length.to(allowed.device))
        return bool((held > allowed).any())

    def of_rows(self) -> Tensor:
        """Return what each row may keep, an even part of its group's share: int64 ``[rows]``."""
        return (self.share // self.group.bincount(minlength=self.share.numel()))[self.group]


def lowest(scores: Tensor, view: CacheView, shares: Shares) -> Tensor:
    """Indices ``[K]`` of the entries to drop, so that each group keeps at most its share.

    The lowest of float32 ``scores [N]`` go first, NaN before all; ties fall on the smaller
    position, then layer, then head.
    """
    key = sort_key(scores)
    if shares.floor is not None:
        key = key.long() + _GUARDED * _guarded(key, view, shares.floor.to(key.device))
    if shares.share.numel() == 1:
        return _lowest(key, view, int(shares.share))
    group, share = shares.group.to(key.device), shares.share.to(key.device)
    held = torch.zeros_like(share).index_add_(0, group, view.length)
    column = torch.arange(int(held.max()), device=key.device)
    live = column < held[:, None]

    def spread(values: Tensor, fill: int) -> Tensor:
        padded = values.new_full(live.shape, fill)
        padded[live] = values  # rows of a group are neighbours: its entries lie together
        return padded

    # Two stable sorts give the order (score, position, row); padding sorts last.
    by_tie = spread(_tie(view), _LAST).argsort(dim=-1, stable=True)
    by_score = (
        spread(key, torch.iinfo(key.dtype).max).gather(-1, by_tie).argsort(dim=-1, stable=True)
    )
    order = by_tie.gather(-1, by_score)
    start = held.cumsum(0) - held
    return (order + start[:, None])[column < (held - share)[:, None]]


def sort_key(scores: Tensor) -> Tensor:
    """Int32 ``[N]`` that order as float32 ``scores`` do, NaN below all."""
    bits = (scores.float() + 0.0).view(torch.int32)  # -0 and 0 are one score
    key = torch.where(bits < 0, bits ^ _HIGHEST, bits)
    return key.masked_fill(scores.isnan(), -(2**31))


def _guarded(key: Tensor, view: CacheView, floor: Tensor) -> Tensor:
    """Bool ``[N]``: whether an entry is among the best ``floor`` of its row."""
    by_tie = view.to_rows(view.position, -1).argsort(dim=-1, descending=True, stable=True)
    keys = view.to_rows(key.long(), -_GUARDED).gather(-1, by_tie)
    order = by_tie.gather(-1, keys.argsort(dim=-1, descending=True, stable=True))
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return view.from_rows(rank < floor[:, None])


def _lowest(key: Tensor, view: CacheView, share: int) -> Tensor:
    """:func:`lowest` of a single group, without a full sort."""
    excess = key.numel() - share
    if excess <= 0:
        return torch.empty(0, dtype=torch.int64, device=key.device)
    threshold = key.kthvalue(excess).values
    below = (key < threshold).nonzero().flatten()
    tied = (key == threshold).nonzero().flatten()
    missing = excess - below.numel()
    if tied.numel() > missing:
        tied = tied[_tie(view)[tied].topk(missing, largest=False).indices]
    return torch.cat([below, tied])


def _tie(view: CacheView) -> Tensor:
    """Int64 ``[N]`` in the order of position, layer, head."""
    return view.position * view.rows + view.row
