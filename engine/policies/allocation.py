"""Allocations: which entries compete for the budget, and what each group of them may keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv.engine.policies.selection import Shares


@dataclass(frozen=True)
class GlobalAllocation:
    """All layers, heads and modalities compete for one budget (DBTrimKV, arXiv 2605.09649)."""

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group of all rows, which keeps the whole budget."""
        return Shares(torch.zeros(layers * kv_heads, dtype=torch.int64), torch.tensor([budget]))


@dataclass(frozen=True)
class FlooredAllocation:
    """One budget for all rows, with a floor for each row's best entries.

    Where all compete, some rows can be left with nearly nothing (on long documents at mild budgets
    the first layers take most); a floor bounds that.

    Attributes:
        floor: the part of an equal share above ``free`` that each row keeps, in [0, 1].
        free: entries of an equal share that always compete.
    """

    floor: float
    free: int = 0

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group of all rows; each keeps at least ``floor * (budget / rows - free)``."""
        rows = layers * kv_heads
        least = torch.full((rows,), int(self.floor * max(budget // rows - self.free, 0)))
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


@dataclass(frozen=True)
class PyramidAllocation:
    """Shares of rows fall evenly from the bottom layer to the top one (PyramidKV, 2406.02069).

    Section 4.2.1, equation 1: every row keeps the ``window`` newest tokens, and of the rest ``P`` a
    row of the bottom layer ``(2 - 1 / beta) P / R``, one of the top layer ``P / (beta R)``. What
    rounding leaves over goes to the first rows, one entry each.
    """

    window: int = 16
    beta: int = 20

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group per row."""
        rows, beta = layers * kv_heads, self.beta
        window = min(self.window, budget // rows)
        rest, steps = budget - rows * window, layers - 1
        of_layer = [budget // rows]
        if steps:
            parts = [(2 * beta - 1) * steps - 2 * (beta - 1) * layer for layer in range(layers)]
            of_layer = [window + rest * part // (rows * beta * steps) for part in parts]
        row = torch.arange(rows)
        share = torch.tensor(of_layer).repeat_interleave(kv_heads)
        return Shares(row, share + (row < budget - int(share.sum())))


@dataclass(frozen=True)
class LayerAllocation:
    """Heads of a layer compete for its share, and each keeps a part (Ada-KV, 2407.11550).

    Attributes:
        floor: that part, of an equal share in the layer.
        rows: what each layer keeps: the sum of its rows' shares here. None: layers share equally,
            and what the division leaves over goes to the first, one entry each.
    """

    floor: float = 0.2
    rows: PyramidAllocation | None = None

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        """One group per layer, with a floor for each row."""
        layer = torch.arange(layers)
        if self.rows is None:
            share = budget // layers + (layer < budget % layers)
        else:
            share = self.rows.shares(budget, layers, kv_heads).share.view(layers, kv_heads).sum(-1)
        floor = (self.floor * (share // kv_heads).double()).long()
        group = layer.repeat_interleave(kv_heads)
        return Shares(group, share, floor.repeat_interleave(kv_heads))
