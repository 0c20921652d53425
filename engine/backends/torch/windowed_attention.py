"""Sliding-window attention (Mistral, Phi-3): keys further back than the window are masked.

Only used once a sequence is longer than its window; until then the window changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.torch.ragged_attention import amax_by_row
from mmkv.engine.backends.torch.worklist import LayerWork
from mmkv.engine.cache import Stored


def windowed_attention(
    query: Tensor,
    query_position: Tensor,
    keys: Tensor | Stored,
    values: Tensor | Stored,
    position: Tensor,
    work: LayerWork,
    scale: float,
    window: int,
) -> Tensor:
    """Causal attention to the entries at most ``window - 1`` tokens back, the query's own included.

    Args:
        query: ``[R, Q, D]``; query_position: ``[R, Q]`` token index.
        keys, values: ``[pages, P, D]``; position: ``[pages, P]`` int32.
        work: pieces of the layer; all new entries must be in the cache already.
        window: tokens a query may see.

    Returns:
        ``[R, Q, D]`` in the query's dtype.
    """
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    total = torch.zeros(query.shape[:2], device=query.device)
    key, value = keys[work.pages].flatten(1, 2), values[work.pages].flatten(1, 2)
    back = query_position[work.row][..., None] - position[work.pages].flatten(1, 2)[:, None]
    allowed = work.valid[:, None] & (back >= 0) & (back < window)
    scores = (query[work.row].float() * scale) @ key.float().transpose(1, 2)
    scores = scores.masked_fill(~allowed, -torch.inf)
    highest = amax_by_row(scores.amax(-1), work.row, work.rows)
    weights = (scores - highest[work.row][..., None]).exp().nan_to_num(0.0)
    total = total.index_add(0, work.row, weights.sum(-1))
    out = out.index_add(0, work.row, weights @ value.float())
    return (out / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).to(query.dtype)
