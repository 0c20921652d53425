"""Allocations: which entries compete for the budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.policies.base import CacheView

_LATE = 2**31 - 1


@dataclass(frozen=True)
class GlobalAllocation:
    """All layers, heads and modalities compete for one budget (DBTrimKV, arXiv 2605.09649)."""

    def victims(self, scores: Tensor, view: CacheView, budget: int) -> Tensor:
        """The lowest ``N - budget`` of all entries."""
        excess = scores.numel() - budget
        if excess <= 0:
            return torch.empty(0, dtype=torch.int64, device=scores.device)
        threshold = scores.kthvalue(excess).values
        below = (scores < threshold).nonzero().flatten()
        tied = (scores == threshold).nonzero().flatten()
        missing = excess - below.numel()
        if tied.numel() > missing:
            rank = view.position[tied] * view.rows + view.row[tied]
            tied = tied[rank.topk(missing, largest=False).indices]
        return torch.cat([below, tied])


@dataclass(frozen=True)
class HeadAllocation:
    """Each (layer, KV head) row keeps an equal share of the budget."""

    def victims(self, scores: Tensor, view: CacheView, budget: int) -> Tensor:
        """The lowest of each row, as many as it holds above its share."""
        share = budget // view.rows
        # Two stable sorts give the order (score, position); padding sorts last.
        position = view.to_rows(view.position, _LATE)
        by_position = position.argsort(dim=-1, stable=True)
        padded = view.to_rows(scores, torch.nan).gather(-1, by_position)
        by_score = padded.argsort(dim=-1, stable=True)
        order = by_position.gather(-1, by_score)
        rank = torch.arange(order.shape[1], device=order.device)
        lowest = rank < (view.length - share)[:, None]
        start = view.length.cumsum(0) - view.length
        return (order + start[:, None])[lowest]
