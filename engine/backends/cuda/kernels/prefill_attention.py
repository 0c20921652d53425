"""Attention of a prefill chunk's queries to what one sequence retained before the chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.cache import EncodedKV


def prefill_attention_reference(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    length: Tensor,
    table: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend from every query of a chunk to all retained entries of its KV head, no causality.

    Reads the pool through the table, without a dense copy and without a host sync. Merge the result
    with the causal attention inside the chunk by ``merge``.

    Args:
        query: ``[Hq, C, D]`` float16, bfloat16 or float32, contiguous along D (a transposed
            ``[C, Hq, D]`` will do).
        keys, values: ``[pages, P, D]``, the pool as attention reads it; P a power of two. Plain
            ones may have the same gap behind every entry of both.
        length: ``[H]`` int64 entries per KV head of one sequence and layer, from before the
            chunk was appended; table: ``[H, W]`` int64 page ids, contiguous along W.
        scale: factor on the logits, above 0.

    Returns:
        output ``[Hq, C, D]`` in the query's dtype and strides, zeros where a KV head has no
        entries; log-sum-exp ``[Hq, C]`` float32, -inf there.
    """
    group = query.shape[0] // length.shape[0]
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], device=query.device)
    for head, entries in enumerate(length.tolist()):
        pages = table[head, : -(-entries // keys.shape[1])]
        key = keys[pages].flatten(0, 1)[:entries].float()
        value = values[pages].flatten(0, 1)[:entries].float()
        mine = slice(head * group, (head + 1) * group)
        scores = query[mine].float() @ key.T * scale
        out[mine] = (scores.softmax(-1) @ value).to(out.dtype)  # of no entries: 0
        lse[mine] = scores.logsumexp(-1)  # of no entries: -inf
    return out, lse


prefill_attention = in_triton(prefill_attention_reference, "query")
