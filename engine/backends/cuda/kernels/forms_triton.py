"""Keys and values in fewer bits, in Triton: codes to tiles, vectors to codes.

A tile is read as whole numbers, which every dtype holds exactly: scales stay outside of the matrix
products, ``q.k = scale (q.codes) + zero sum(q)``, and those of values go into the weights; float16,
which has no room for such weights, takes values times their scales instead.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.cache import EncodedKV
from mmkv.engine.cache.forms import Codec


def parts(stored: Tensor | EncodedKV) -> tuple[Tensor, Tensor, int]:
    """Return codes, scales and bits of what attention reads; 0 bits: the numbers themselves."""
    if isinstance(stored, EncodedKV):
        return stored.codes, stored.scales, stored.codec.bits
    return stored, stored, 0


def encode(x: Tensor, slots: Tensor, codes: Tensor, scales: Tensor, codec: Codec) -> None:
    """Round vectors ``x [B, H, D]`` into ``slots [B, H]`` of a column; -1 stores nothing.

    Args:
        codes: ``[pages, P, width]``; scales: ``[pages, P, n]``, of the pool.
    """
    batch_slots, heads, dim = x.shape
    encode_kernel[(batch_slots, heads)](
        x.contiguous(),
        slots,
        codes,
        scales,
        slots.stride(0),
        HEADS=heads,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BITS=codec.bits,
        num_warps=1,
    )


@triton.jit
def load_codes(codes, entry, d, mask, dtype: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Load the codes ``[TILE, BLOCK_D]`` of slots ``entry [TILE]``, as numbers of ``dtype``."""
    if BITS == 4:
        at = entry[:, None] * (D // 2) + (d % (D // 2))[None, :]
        pair = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
        tile = ((pair >> (d // (D // 2) * 4)[None, :]) & 15).to(dtype)
    else:
        tile = tl.load(codes + entry[:, None] * D + d[None, :], mask=mask, other=0).to(dtype)
    return tile


@triton.jit
def load_scale(scales, entry, there, BITS: tl.constexpr):
    """Load the scales ``[TILE]`` of slots, in float32."""
    number: tl.constexpr = 2 if BITS == 4 else 1
    return tl.load(scales + entry * number, mask=there, other=0.0).to(tl.float32)


@triton.jit
def load_zero(scales, entry, there):
    """Load the zero points ``[TILE]`` of slots with codes of 4 bits, in float32."""
    return tl.load(scales + entry * 2 + 1, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _at_least(x):
    """The smallest float16 that is not below ``x``."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    up = tl.where(bits < 0, bits - 1, bits + 1).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(near.to(tl.float32) < x, up, near)


@triton.jit
def _steps(x, scale, least, most):
    """``x / scale`` in whole steps, even where two are as near; 0 for a scale of 0."""
    exact = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
    exact = tl.minimum(tl.maximum(tl.where(exact == exact, exact, 0.0), least), most)
    return ((exact + 12582912.0) - 12582912.0).to(tl.int32)


@jit
def encode_kernel(
    x,
    slots,
    codes,
    scales,
    slots_row,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
):
    """Round one vector; grid (B, H)."""
    batch_slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + batch_slot * slots_row + head)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)
    mine = x + (batch_slot * HEADS + head) * D
    inside = d < D
    all_of = tl.load(mine + d, mask=inside, other=0.0).to(tl.float32)
    if BITS == 16:
        tl.store(codes + slot * D + d, all_of.to(tl.bfloat16), mask=inside)
    else:
        # 0, unless something is not finite, which the largest and smallest would not tell.
        wrong = tl.sum(all_of - all_of, 0)
        high = tl.max(tl.where(inside, all_of, float("-inf")), 0)
        low = tl.min(tl.where(inside, all_of, float("inf")), 0)
        if BITS == 8:
            scale = _at_least(tl.div_rn(tl.maximum(-low, high), 127.0) + wrong)
            code = _steps(all_of, scale.to(tl.float32), -127.0, 127.0)
            tl.store(codes + slot * D + d, code.to(tl.int8), mask=inside)
            tl.store(scales + slot, scale)
        else:
            zero = -_at_least(-(low + 0.0))
            base = zero.to(tl.float32)
            scale = _at_least(tl.div_rn(high - base, 15.0) + wrong)
            step = scale.to(tl.float32)
            h = tl.arange(0, BLOCK_D // 2)  # feature i lies beside feature i + D / 2
            half = h < D // 2
            first = tl.load(mine + h, mask=half, other=0.0).to(tl.float32)
            second = tl.load(mine + D // 2 + h, mask=half, other=0.0).to(tl.float32)
            pair = _steps(first - base, step, 0.0, 15.0)
            pair = pair | (_steps(second - base, step, 0.0, 15.0) << 4)
            tl.store(codes + slot * (D // 2) + h, pair.to(tl.uint8), mask=half)
            tl.store(scales + slot * 2, scale)
            tl.store(scales + slot * 2 + 1, zero)
