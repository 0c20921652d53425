"""The attention that the queries of one pass pay to each entry, added up over the queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.engine.cache import Stored
from mmkv.engine.policies.base import Group
from mmkv.engine.scorer_state import join

# Elements of one block of scores: temporaries stay near 16 MiB however long rows and chunks are.
_BLOCK_ELEMENTS = 4 * 2**20


@dataclass(frozen=True)
class Rows:
    """The entries of R rows, padded to the longest.

    Attributes:
        slot: ``[R, N]`` int64 flat slots of the pool; live: ``[R, N]`` bool.
    """

    slot: Tensor
    live: Tensor

    @classmethod
    def of(cls, length: Tensor, table: Tensor, page_size: int) -> Rows:
        """Gather the slots of ``length [R]`` and ``table [R, W]``."""
        column = torch.arange(int(length.max()), device=length.device)
        slot = table[:, column // page_size] * page_size + column % page_size
        live = column < length[:, None]
        return cls(slot.masked_fill(~live, 0), live)


def attention_mass(
    query: Tensor,
    query_position: Tensor,
    keys: Tensor | Stored,
    position: Tensor,
    rows: Rows,
    scale: float,
    group: Group,
    window: int = 0,
) -> Tensor:
    """Add up the attention of every query to each entry of its row.

    Args:
        query: ``[R, G, Q, D]``, the G query heads of each row's KV head.
        query_position: ``[R, Q]`` token indices: a query sees entries at or before its own.
        keys: ``[slots, D]``, position: ``[slots]``, the pool's, the pass's own entries included.
        group: how the G heads are joined, query by query.
        window: tokens that a query sees back, 0 for all (sliding-window layers).

    Returns:
        float32 ``[R, N]``, 0 where there is no entry.
    """
    key = keys[rows.slot].float().transpose(1, 2)[:, None]
    at = position[rows.slot].long()[:, None]
    block = max(1, _BLOCK_ELEMENTS // max(rows.slot.numel() * query.shape[1], 1))
    total = torch.zeros(rows.slot.shape, device=query.device)
    for part, where in zip(query.split(block, 2), query_position.split(block, 1), strict=True):
        back = where[..., None] - at
        seen = rows.live[:, None] & (back >= 0) & (back < (window or math.inf))
        scores = (part.float() * scale) @ key
        shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        total += join(shares, group, 1).sum(1)
    return total
