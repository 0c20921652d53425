"""``prefill_attention`` as one Triton kernel. Import only where Triton is.

A program owns a block of one KV head's queries (its G heads x C tokens in one row of queries) and
walks over that head's entries tile by tile, page ids a tile ahead of keys and values.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.forms_triton import load_codes, load_scale, load_zero, parts
from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.cache import EncodedKV

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def sizes(
    dtype: torch.dtype, head_dim: int, queries: int, bits: tuple[int, int] = (0, 0)
) -> dict[str, int]:
    """Return the queries of a program, entries of a tile, warps, and tiles on their way.

    They fit the shared memory of every card. Half precision takes 64 queries per warpgroup where
    it can, what Hopper's matrix unit multiplies at once; float32 runs on the plain arithmetic
    units, where small tiles keep the registers. Codes take more of these: half as many queries.

    Args:
        bits: of a key's codes and of a value's; 0: as they are.
    """
    if dtype == torch.float32:
        block, tile, stages = 64 if head_dim <= 64 else 32, 16 if head_dim > 128 else 32, 2
    elif head_dim > 128:
        block, tile, stages = 64, 32, 2
    else:
        block, tile, stages = 128, 64, 3
    warps = 8
    if any(bits):
        block //= 2
    elif block == 128 and queries <= 64:
        block, warps = 64, 4
    return {"BLOCK": block, "TILE": tile, "num_warps": warps, "num_stages": stages}


def prefill_attention(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    length: Tensor,
    table: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See ``prefill_attention`` in ``prefill_attention.py``; one launch."""
    query_heads, count, head_dim = query.shape
    heads = length.shape[0]
    key_codes, key_scales, key_bits = parts(keys)
    value_codes, value_scales, value_bits = parts(values)
    group = query_heads // heads
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    constants = sizes(query.dtype, head_dim, group * count, (key_bits, value_bits))
    prefill_kernel[(triton.cdiv(group * count, constants["BLOCK"]), heads)](
        query,
        key_codes,
        value_codes,
        key_scales,
        value_scales,
        length,
        table,
        out,
        lse,
        count,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        length.stride(0),
        table.stride(0),
        scale,
        G=group,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        P=key_codes.shape[1],
        STRIDE=key_codes.stride(1),
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        **constants,
        enable_fp_fusion=True,
    )
    return out, lse


@jit
def prefill_kernel(
    query,
    keys,
    values,
    key_scale,
    value_scale,
    length,
    table,
    out,
    lse,
    count,
    query_head,
    query_token,
    out_head,
    out_token,
    length_head,
    table_head,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    STRIDE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute a block of queries of one KV head; grid (blocks of G x C queries, H)."""
    head = tl.program_id(1)
    entries = tl.load(length + head * length_head).to(tl.int32)
    mine = table + head.to(tl.int64) * table_head
    batch_slot, d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    in_head = (d < D)[None, :]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < G * count
    # Wide: a token's place in the queries passes 2**31 in chunks of 524,288 tokens.
    row, token = (head * G + index // count).to(tl.int64), (index % count).to(tl.int64)
    live = inside[:, None] & in_head
    q = tl.load(
        query + (row * query_head + token * query_token)[:, None] + d[None, :],
        mask=live,
        other=0.0,
    )
    factor = scale * LOG2_E
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    pages = tl.load(mine + batch_slot // P, mask=batch_slot < entries, other=0).to(tl.int32)
    for at in range(0, entries, TILE):
        there = at + batch_slot < entries
        mask = there[:, None] & in_head
        slot = pages.to(tl.int64) * (P * STRIDE) + (at + batch_slot) % P * STRIDE
        entry = pages.to(tl.int64) * P + (at + batch_slot) % P
        if KEY_BITS == 0:
            key = tl.load(keys + slot[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            key = load_codes(keys, entry, d, mask, q.dtype, D, KEY_BITS)
        if VALUE_BITS == 0:
            value = tl.load(values + slot[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            value = load_codes(values, entry, d, mask, q.dtype, D, VALUE_BITS)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if (KEY_BITS == 8) | (KEY_BITS == 4):
            scores *= load_scale(key_scale, entry, there, KEY_BITS)[None, :]
        if KEY_BITS == 4:
            summed_query = tl.sum(q.to(tl.float32), 1)
            scores += summed_query[:, None] * load_zero(key_scale, entry, there)[None, :]
        scores = tl.where(there[None, :], scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1) * factor)  # above -inf: a tile has an entry
        shrink = tl.exp2(peak - high)
        weight = tl.exp2(scores * factor - high[:, None])
        total = total * shrink + tl.sum(weight, 1)
        share = weight
        if (VALUE_BITS == 8) | (VALUE_BITS == 4):
            value_step = load_scale(value_scale, entry, there, VALUE_BITS)
            if value.dtype == tl.float16:  # which has no room for a small weight times a scale
                value *= value_step.to(tl.float16)[:, None]
            else:
                share = weight * value_step[None, :]
        acc = tl.dot(share.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        if VALUE_BITS == 4:
            zero = load_zero(value_scale, entry, there)
            acc += tl.sum(weight * zero[None, :], 1)[:, None]
        peak = high
        ahead = at + TILE + batch_slot
        pages = tl.load(mine + ahead // P, mask=ahead < entries, other=0).to(tl.int32)

    mean = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(
        out + (row * out_head + token * out_token)[:, None] + d[None, :],
        mean.to(out.dtype.element_ty),
        mask=live,
    )
    tl.store(lse + row * count + token, (peak + tl.log2(total)) * LN_2, mask=inside)
