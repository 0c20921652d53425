"""``write_gated_attention`` as one Triton kernel. Import only where Triton is.

A program owns a block of tokens with the G heads of one KV head. It walks over the admitted entries
that all of its tokens may see, and then over the window's; nothing else is loaded.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.backends.cuda.kernels.write_gated_attention import GatedRows, Ranges

LOG2_E = tl.constexpr(1.4426950408889634)


def sizes(group: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's constants: queries of a program, entries of a tile, warps, stages.

    As in ``prefill_attention_triton``, they are so small that float32 and heads of more than 128
    fit every card.
    """
    heads = triton.next_power_of_2(group)
    whole, wide = dtype == torch.float32, head_dim > 128
    return {
        "G": group,
        "GROUP": heads,
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "TOKENS": max((32 if whole else 64) // heads, 1),
        "TILE": (32 if whole else 64) // (2 if wide else 1),
        "num_warps": 8 if whole or wide else 4,
        "num_stages": 2 if whole or wide else 3,
    }


def write_gated_attention(
    query: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: GatedRows,
    window: int,
    threshold: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``write_gated_attention`` in ``write_gated_attention.py``; one launch and the ranges."""
    heads, group, count, head_dim = query.shape
    constants = sizes(group, head_dim, query.dtype)
    tokens, tile = constants["TOKENS"], constants["TILE"]
    ranges = Ranges.of(rows, position, window, threshold, tokens)
    blocks = ranges.far.shape[1]
    out = torch.empty_like(query)
    computed = torch.zeros_like(ranges.far)
    write_gated_kernel[(blocks, heads)](
        query,
        position,
        keys,
        values,
        torch.stack([rows.slot, ranges.slot]),
        torch.stack([rows.position, ranges.position]).int(),
        ranges.far,
        ranges.begin,
        ranges.end,
        out,
        computed,
        count,
        rows.slot.shape[1],
        *query.stride()[:3],
        *out.stride()[:3],
        window,
        scale,
        **constants,
        enable_fp_fusion=True,
    )
    return out, computed, ranges.tiles(tile)[1]


@jit
def write_gated_kernel(
    query,
    position,
    keys,
    values,
    slots,
    places,
    far,
    begin,
    end,
    out,
    computed,
    count,
    entries,
    query_head,
    query_group,
    query_token,
    out_head,
    out_group,
    out_token,
    window,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute TOKENS tokens of one KV head; grid (n, H)."""
    block, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, GROUP * TOKENS)
    group, token = index // TOKENS, block * TOKENS + index % TOKENS
    d = tl.arange(0, BLOCK_D)
    in_head = (d < D)[None, :]
    inside = (group < G) & (token < count)
    live = inside[:, None] & in_head
    wide_head, wide_token = head.to(tl.int64), token.to(tl.int64)
    from_query = wide_head * query_head + group * query_group + wide_token * query_token
    q = tl.load(query + from_query[:, None] + d[None, :], mask=live, other=0.0)
    now = tl.load(position + token, mask=token < count, other=0).to(tl.int32)
    factor = scale * LOG2_E
    peak = tl.full([GROUP * TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP * TOKENS], tl.float32)
    acc = tl.zeros([GROUP * TOKENS, BLOCK_D], tl.float32)
    row = wide_head * entries
    cell = head * tl.num_programs(0) + block
    offset = tl.arange(0, TILE)
    lists = tl.num_programs(1).to(tl.int64) * entries

    # One loop for both: the second one would take the registers again.
    verticals = tl.load(far + cell)
    start, stop = tl.load(begin + cell), tl.load(end + cell)
    first = tl.cdiv(verticals, TILE)
    tiles = first + tl.cdiv(stop - start, TILE)
    for tile in range(0, tiles):
        near = tile >= first
        at = tl.where(near, start + (tile - first) * TILE, tile * TILE) + offset
        there = at < tl.where(near, stop, verticals)
        listed = row + tl.where(near, 0, lists) + at
        slot = tl.load(slots + listed, mask=there, other=0)
        place = tl.load(places + listed, mask=there, other=0)
        age = now[:, None] - place[None, :]
        seen = there[None, :] & tl.where(near, (age >= 0) & (age < window), age >= window)
        mask = there[:, None] & in_head
        key = tl.load(keys + slot[:, None] * D + d[None, :], mask=mask, other=0.0)
        value = tl.load(values + slot[:, None] * D + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * factor
        scores = tl.where(seen, scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(high == float("-inf"), 0.0, high)  # a query may see nothing of a tile
        shrink = tl.exp2(peak - base)
        weight = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        peak = high

    tl.store(computed + cell, tiles)
    mean = acc / tl.where(total == 0, 1.0, total)[:, None]
    to_out = wide_head * out_head + group * out_group + wide_token * out_token
    tl.store(out + to_out[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=live)
