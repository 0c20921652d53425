"""Attention of one decode step's queries to the ragged paged rows of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.backends.cuda.kernels.buffers import NewestTokens, Partials, WorkList
from mmkv.engine.cache import EncodedKV


def empty_partials(work: WorkList, group: int, head_dim: int) -> Partials:
    """Return the scratch for ``group`` query heads per KV head.

    Allocate once, outside a CUDA graph.
    """
    pieces, device = 2 * work.runs.shape[1], work.runs.device
    return Partials(
        torch.zeros(pieces, group, head_dim, device=device),
        torch.zeros(pieces, group, device=device),
        torch.zeros(pieces, group, device=device),
        torch.zeros(work.rows.shape[1], dtype=torch.int32, device=device),
    )


def decode_attention_reference(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    table: Tensor,
    work: WorkList,
    layer: int,
    partials: Partials,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    window: NewestTokens | None = None,
) -> None:
    """Attend from one query per sequence and head to all entries of its rows in ``layer``.

    Reads the pool through the table; the G = Hq / H query heads of a KV head share one read.
    No host sync and no allocation, so it may stand in a CUDA graph.

    Args:
        query: ``[B, Hq, D]`` float16, bfloat16 or float32, contiguous along D.
        keys, values: ``[pages, P, D]``, the pool as attention reads it; P a power of two. Plain
            ones may have the same gap behind every entry of both.
        table: ``[S, L, H, W]`` int64 page ids.
        work: what ``build_worklist`` made of this step's lengths.
        layer: its index in ``work`` and ``table``.
        partials: scratch; layers run one after the other, so one is enough.
        scale: factor on the logits, above 0.
        out: ``[B, Hq, D]`` contiguous, written in its dtype. Rows without entries and idle batch
            slots get zeros.
        lse: ``[B, Hq]`` float32 contiguous or None, written: natural log-sum-exp of the logits,
            -inf without entries.
        window: which entries are near enough to be seen; None: all.
    """
    grouped = query.reshape(query.shape[0] * work.heads, -1, query.shape[2])
    result = out.view(grouped.shape)
    logs = None if lse is None else lse.view(grouped.shape[:2])
    for row, (entries, source, _, _) in enumerate(work.rows[layer].tolist()):
        held = -(-entries // keys.shape[1])
        pages = table.view(-1, table.shape[-1])[source, :held]
        key = keys[pages].flatten(0, 1)[:entries].float()
        value = values[pages].flatten(0, 1)[:entries].float()
        scores = grouped[row].float() @ key.T * scale
        if window is not None:
            back = window.now[row // work.heads] - window.position[pages].flatten()[:entries]
            scores = scores.masked_fill(back >= window.tokens, -torch.inf)
        result[row] = (scores.softmax(-1) @ value).to(out.dtype)  # of no entries: 0
        if logs is not None:
            logs[row] = scores.logsumexp(-1)  # of no entries: -inf


decode_attention = in_triton(decode_attention_reference, "query")
