"""``kernels.pointwise`` in Triton: a row in registers, or one program per block of features."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit


def rms_norm(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`mmkv.engine.backends.cuda.kernels.pointwise.rms_norm`."""
    tokens, width = x.shape
    normed = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    beside = x if residual is None else residual  # never read without a residual
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(tokens,)](
        x,
        beside,
        gain,
        normed,
        total,
        x.stride(0),
        beside.stride(0),
        eps,
        ADD=residual is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps(block),
    )
    return normed, total


def warps(block: int) -> int:
    """Return the warps per program: 8 or 16 features per thread, 16-byte accesses in half
    precision.
    """
    return min(max(block // 256, 1), 16)


@jit
def rms_norm_kernel(
    x,
    residual,
    gain,
    normed,
    total,
    x_row,
    residual_row,
    eps,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one token; grid (T,). ``total`` is written only if there is something to add."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual + row * residual_row + column, mask=inside, other=0.0)
        rounded = (other.to(tl.float32) + value).to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    out = value * scale * factor
    tl.store(normed + row * WIDTH + column, out.to(normed.dtype.element_ty), mask=inside)


# 8 features per thread of 4 warps: one 16-byte access for gate and one for up in half precision.
BLOCK = 1024
WARPS = 4


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.pointwise.gated`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    # Tokens lie along the first axis of the grid: the other two end at 65,535.
    gated_kernel[(tokens, triton.cdiv(width, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        WIDTH=width,
        GELU=activation == "gelu_tanh",
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


@jit
def gated_kernel(
    gate_up, out, row_stride, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute BLOCK features of one token; grid (T, f / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    inner = gate
    if GELU:  # 0.5 (1 + tanh(u)) is sigmoid(2 u), here with u = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (active * up).to(dtype), mask=inside)


def turned(heads: Tensor, gain: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.pointwise.turned`."""
    tokens, rows, dim = heads.shape
    if heads.stride()[1:] != (dim, 1):
        heads = heads.contiguous()
    cos, sin = (x.contiguous() for x in rope)
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    features = triton.next_power_of_2(dim)
    together = max(min(triton.next_power_of_2(rows), BLOCK // features), 1)
    turned_kernel[(tokens, triton.cdiv(rows, together))](
        heads,
        cos if gain is None else gain.contiguous(),
        cos,
        sin,
        out,
        heads.stride(0),
        eps,
        HEADS=rows,
        DIM=dim,
        ROT=cos.shape[1],
        NORM=gain is not None,
        APART=gain is not None and gain.dtype != heads.dtype,
        ROWS=together,
        DIM_BLOCK=features,
        num_warps=WARPS,
    )
    return out


@jit
def turned_kernel(
    heads,
    gain,
    cos,
    sin,
    out,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORM: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Norm and rotate ROWS heads of one token; grid (T, R / ROWS)."""
    token = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    feature = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (row < HEADS) & (feature < DIM)
    made = turn(
        heads + token * token_stride + row * DIM,
        gain + row * DIM,
        cos + token * ROT,
        sin + token * ROT,
        feature,
        inside,
        inside,
        eps,
        out.dtype.element_ty,
        DIM,
        ROT,
        NORM,
        APART,
    )
    tl.store(out + (token * HEADS + row) * DIM + feature, made[0], mask=inside)


@triton.jit
def turn(
    source,
    gain,
    cos,
    sin,
    feature,
    inside,
    turns,
    eps,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORM: tl.constexpr,
    APART: tl.constexpr,
):
    """Norm and rotate heads ``[rows, DIM]``, rounded where the eager decoder rounds.

    The rotation's partner features come from a second load (of lines already in L1), which costs
    less than a shuffle between threads.

    Args:
        source, gain: pointers to each row, ``[rows, 1]``; feature: ``[1, block]``.
        inside: of the tile, what there is; turns: what of it is normed and rotated.
        APART: the gain is float32 and the model is not.

    Returns:
        the tile in ``dtype``, and what was read, float32.
    """
    half: tl.constexpr = ROT // 2
    partner = tl.where(feature < half, feature + half, feature - half)
    partner = tl.where(feature < ROT, partner, feature)
    plain = tl.load(source + feature, mask=inside, other=0.0).to(tl.float32)
    x, y = plain, tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x_gain = tl.load(gain + feature, mask=turns, other=0.0).to(tl.float32)
        y_gain = tl.load(gain + partner, mask=turns, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x, y = x * scale, y * scale
        if not APART:  # gains of the model's dtype multiply what is rounded to it
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        x, y = (x * x_gain).to(dtype).to(tl.float32), (y * y_gain).to(dtype).to(tl.float32)
    # One angle for all rows, but read by each: a broadcast would go through shared memory.
    angle = tl.broadcast_to(feature, inside.shape)
    rotates = turns & (feature < ROT)
    c = tl.load(cos + angle, mask=rotates, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=rotates, other=0.0).to(tl.float32)
    # Fused by name, as torch's addcmul is: what compilers fuse by themselves differs.
    return tl.fma(y, s, (x * c).to(dtype).to(tl.float32)).to(dtype), plain


def merged(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.pointwise.merged`."""
    heads, count, dim = left.shape
    out = torch.empty(count, heads, dim, dtype=left.dtype, device=left.device)
    parts = left, left_lse, right, right_lse
    merged_kernel[(count, heads)](
        *parts,
        out,
        *(stride for part in parts for stride in part.stride()[:2]),
        HEADS=heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return out.transpose(0, 1)


# A chunk's length is a stride of sums: it would be compiled anew.
@jit
def merged_kernel(
    left,
    left_lse,
    right,
    right_lse,
    out,
    left_head,
    left_row,
    left_lse_head,
    left_lse_row,
    right_head,
    right_row,
    right_lse_head,
    right_lse_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge one head of one query; grid (C, Hq)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    one = tl.load(left_lse + head * left_lse_head + row * left_lse_row)
    two = tl.load(right_lse + head * right_lse_head + row * right_lse_row)
    highest = tl.maximum(one, two)
    one, two = tl.exp(one - highest), tl.exp(two - highest)
    feature = tl.arange(0, BLOCK)
    inside = feature < DIM
    x = tl.load(left + head * left_head + row * left_row + feature, mask=inside, other=0.0)
    y = tl.load(right + head * right_head + row * right_row + feature, mask=inside, other=0.0)
    made = (x.to(tl.float32) * one + y.to(tl.float32) * two) / (one + two)
    to = out + (row * HEADS + head) * DIM + feature
    tl.store(to, made.to(out.dtype.element_ty), mask=inside)
