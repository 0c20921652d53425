"""``kernels.norm`` in Triton: one program per token, the row held in registers."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`mmkv.engine.backends.cuda.kernels.norm.rms_norm`."""
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


@triton.jit
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
