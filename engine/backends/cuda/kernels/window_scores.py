"""Attention that the last queries pay to every retained entry, for the heuristic policies."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton


def empty_shares(keys: Tensor, table: Tensor, seqs: Tensor) -> Tensor:
    """Return zeros for :func:`window_scores`: ``[B, L, H, W P]`` float32."""
    shape = (seqs.shape[0], *table.shape[1:3], table.shape[3] * keys.shape[1])
    return torch.zeros(shape, device=keys.device)


def window_scores_reference(
    query: Tensor,
    query_position: Tensor,
    keys: Tensor,
    position: Tensor,
    length: Tensor,
    table: Tensor,
    seqs: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Window attention as :func:`mmkv.engine.scorer_state.window_attention` defines it.

    For every row: softmax over its entries in float32 (causal by position), averaged over the
    window's known queries and the group's heads. A query that may see no entry counts as zeros.

    Args:
        query: ``[S, L, Hq, w, D]`` in the model's dtype, contiguous, in any order along w.
        query_position: ``[S, w]`` int64 token indices, -1 for queries not seen yet.
        keys: ``[pages, P, D]``; position: ``[pages, P]`` int32, the pool's.
        length: ``[S, L, H]`` int64; table: ``[S, L, H, W]`` int64 page ids.
        seqs: ``[B]`` int64 sequences of the batch slots; -1: the batch slot's part of ``out`` is
            left alone.
        scale: factor on the logits.
        out: ``[B, L, H, W P]`` float32, contiguous, to be filled; None: a new one.

    Returns:
        ``out``: the probability of the entry at each storage offset, 0 past the row's length.
    """
    if out is None:
        out = empty_shares(keys, table, seqs)
    size, (layers, heads) = keys.shape[1], length.shape[1:]
    group = query.shape[2] // heads
    for batch_slot, seq in enumerate(seqs.tolist()):
        if seq < 0:
            continue
        known = query_position[seq] >= 0
        at = query_position[seq, known].repeat(group)[:, None]
        out[batch_slot] = 0
        for layer in range(layers):
            for head in range(heads):
                count = int(length[seq, layer, head])
                offset = torch.arange(count, device=keys.device)
                page = table[seq, layer, head, offset // size]
                slot = page * size + offset % size
                mine = query[seq, layer, head * group : (head + 1) * group, known].flatten(0, 1)
                scores = mine.float() @ keys.flatten(0, 1)[slot].float().T * scale
                allowed = position.view(-1)[slot] <= at
                share = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
                out[batch_slot, layer, head, :count] = share.sum(0) / max(at.numel(), 1)
    return out


window_scores = in_triton(window_scores_reference, "keys")
