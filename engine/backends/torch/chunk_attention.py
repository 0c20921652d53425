"""Causal attention inside a prefill chunk, with its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute :func:`chunk_attention` the slow way: the whole score matrix in float32."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query.float() @ key.float().transpose(1, 2) * scale
    asked, count = scores.shape[-2:]
    future = torch.ones(asked, count, dtype=torch.bool, device=query.device)
    scores = scores.masked_fill(future.triu(1 + count - asked), -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def chunk_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of a chunk to itself.

    Args:
        query: ``[Hq, C, D]``, or ``[Hq, 1, D]`` of the chunk's last token alone; key, value:
            ``[H, C, D]``; Hq is a multiple of H.
        scale: factor on the logits.

    Returns:
        output in the query's shape and dtype, log-sum-exp ``[Hq, C]`` or ``[Hq, 1]`` float32.
    """
    causal = query.shape[1] > 1  # the last token sees the whole chunk
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0)[None], value.repeat_interleave(group, 0)[None]
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(query[None], key, value, 0.0, causal, scale=scale)
    elif query.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = kernel(query[None], key, value, 0.0, causal, False, scale=scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(query[None], key, value, None, True, 0.0, causal, scale=scale)
        lse = lse[..., : query.shape[1]]  # the kernel pads its length to a multiple of 32
    return out[0], lse[0].float()
