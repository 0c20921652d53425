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
