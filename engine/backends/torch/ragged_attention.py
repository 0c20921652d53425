"""Attention of new queries to the retained entries of ragged rows: the reference and the fast form.

Both return the output together with its log-sum-exp, so that results over disjoint sets of
keys merge exactly. Rows without entries give output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.torch.worklist import LayerWork
from mmkv.engine.cache import Stored

# Elements of one score block; longer query blocks are cut so that temporaries stay near 32 MiB.
_BLOCK_ELEMENTS = 8 * 2**20
# Elements of the queries of all pieces together, on a CPU: several tensors have as many.
_QUERY_ELEMENTS = 2**19


def ragged_attention_reference(
    query: Tensor, keys: Tensor | Stored, values: Tensor | Stored, work: LayerWork, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute :func:`ragged_attention` the slow way: one row after the other, in float32."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
    for row in range(work.rows):
        mine = work.row == row
        live = work.valid[mine].flatten()
        if not live.any():
            continue
        key = keys[work.pages[mine]].flatten(0, 2)[live].float()
        value = values[work.pages[mine]].flatten(0, 2)[live].float()
        scores = query[row].float() @ key.T * scale
        out[row] = scores.softmax(-1) @ value
        lse[row] = scores.logsumexp(-1)
    return out.to(query.dtype), lse


def ragged_attention(
    query: Tensor, keys: Tensor | Stored, values: Tensor | Stored, work: LayerWork, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from ``query`` to every live entry of each row, without causality.

    Args:
        query: ``[R, Q, D]``: all queries that share a KV head stand in its row.
        keys, values: ``[pages, P, D]``, the pool.
        work: the pieces of this layer.
        scale: factor on the logits.

    Returns:
        output ``[R, Q, D]`` in the query's dtype, log-sum-exp ``[R, Q]`` float32.
    """
    key = keys[work.pages].flatten(1, 2)
    value = values[work.pages].flatten(1, 2)
    if query.device.type == "cpu" and not work.whole:
        block = max(1, _QUERY_ELEMENTS // max(len(work.row) * query.shape[-1], 1))
        parts = [_of_rows(part, key, value, work, scale) for part in query.split(block, 1)]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(sums, 1)
    return _of_rows(query, key, value, work, scale)


def _of_rows(
    query: Tensor, key: Tensor, value: Tensor, work: LayerWork, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from ``query [R, Q, D]`` to the pieces' ``key, value [W, N, D]``, row by row."""
    piece = query if work.whole else query[work.row]
    out, lse = _attend(piece, key, value, work.bias, scale)
    if work.whole and not work.empty:
        return out, lse
    if work.whole:
        empty = ~work.valid[:, :1]
        return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    highest = amax_by_row(lse, work.row, work.rows)
    share = (lse - highest[work.row]).exp()
    summed = share.new_zeros(query.shape[:2]).index_add_(0, work.row, share)
    mixed = share.new_zeros(query.shape).index_add_(0, work.row, out.float() * share[..., None])
    mixed /= summed.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return mixed.to(query.dtype), highest + summed.log()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of ``query [W, Q, D]`` to ``key, value [W, N, D]`` under ``bias [W,
    N]``.
    """
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = bias[:, None, None].expand(-1, 1, query.shape[1], -1)
        out, lse = kernel(
            query[:, None], key[:, None], value[:, None], 0.0, False, attn_mask=mask, scale=scale
        )
        return out[:, 0], lse.reshape(query.shape[:2]).float()
    block = max(1, _BLOCK_ELEMENTS // max(key.shape[0] * key.shape[1], 1))
    outs, sums = [], []
    for part in query.split(block, 1):
        scores = (part.float() * scale) @ key.float().transpose(1, 2) + bias[:, None].float()
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1).to(value.dtype) @ value)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys: outputs ``[..., D]``, lse ``[...]``.

    At least one side must be non-empty (lse above -inf) for every query.
    """
    lse = torch.logaddexp(left[1], right[1])
    a, b = (left[1] - lse).exp()[..., None], (right[1] - lse).exp()[..., None]
    return (left[0].float() * a).add_(right[0].float() * b).to(left[0].dtype), lse


def amax_by_row(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the largest of ``values [W, Q]`` per row, ``[rows, Q]``.

    -inf for rows without pieces.
    """
    highest = values.new_full((rows, values.shape[1]), -torch.inf)
    return highest.scatter_reduce_(0, row[:, None].expand_as(values), values, "amax")
