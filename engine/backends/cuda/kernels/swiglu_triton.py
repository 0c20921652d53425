"""``kernels.swiglu`` in Triton: one program per token and block of features."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 8 features per thread of 4 warps: one 16-byte access for gate and one for up in half precision.
BLOCK = 1024
WARPS = 4


def swiglu(gate_up: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.swiglu.swiglu`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    # Tokens lie along the first axis of the grid: the other two end at 65,535.
    swiglu_kernel[(tokens, triton.cdiv(width, BLOCK))](
        gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK, num_warps=WARPS
    )
    return out


@triton.jit
def swiglu_kernel(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK features of one token; grid (T, f / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (active * up).to(dtype), mask=inside)
