"""Allocations: which entries compete for the budget, and what each group of them may keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.policies.selection import Shares


@dataclass(frozen=True)
class GlobalAllocation:
    """All layers, heads and modalities compete for one budget (DBTrimKV, arXiv 2605.09649)."""

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group of all rows, which keeps the whole budget."""
        return Shares(torch.zeros(layers * kv_heads, dtype=torch.int64), torch.tensor([budget]))


@dataclass(frozen=True)
class FlooredAllocation:
    """One budget for all rows, of which each row's best entries are sure.

    Where all compete, some rows can be left with nearly nothing (on long documents at mild budgets
    the first layers take most); a floor bounds that.

    Attributes:
        floor: the share of an equal share that is sure to each row, in [0, 1].
    """

    floor: float

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group of all rows; each keeps at least ``floor`` of the budget per row."""
        rows = layers * kv_heads
        least = torch.full((rows,), int(self.floor * (budget // rows)))
        return Shares(torch.zeros(rows, dtype=torch.int64), torch.tensor([budget]), least)


@dataclass(frozen=True)
class HeadAllocation:
    """Each (layer, KV head) row keeps an equal share of the budget.

    What the division leaves over goes to the first rows, one entry each, so that the shares add up
    to the budget.
    """

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group per row."""
        row = torch.arange(layers * kv_heads)
        return Shares(row, budget // row.numel() + (row < budget % row.numel()))


@dataclass(frozen=True)
class EvenLayerAllocation:
    """Each row keeps an equal share, and rows of one layer keep the same (TOVA, arXiv 2401.06104).

    What the division leaves over goes to the rows of the first layers, one entry each, where all
    rows of a layer can have one; fewer than ``kv_heads`` entries stay unused.
    """

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group per row."""
        row = torch.arange(layers * kv_heads)
        share, left = divmod(budget, row.numel())
        return Shares(row, share + (row // kv_heads < left // kv_heads).long())
