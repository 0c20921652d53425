"""``retained_counts`` as two Triton kernels, for CUDA tensors. Import only where Triton is.

The sum and its source are in ``training.capacity``. Both kernels give every output to one
program, so that there are no atomics and two runs agree bit for bit.

- Forward: a program owns BLOCK steps of a row and walks over the entries before them; one
  ``exp2`` per pair.
- Backward: a program owns BLOCK entries and walks over the later blocks of steps. It forms
  ``exp(u lb)`` for u < BLOCK once and keeps it in registers; a block at t0 then costs one ``exp2``
  per entry, because ``exp((t - i) lb) = exp((t0 - i) lb) * exp(u lb)``.

Both pass over blocks where every term is below exp(-80) or where the documents do not meet.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmkv.engine.system import on_device

BLOCK = 64
WARPS = 8
LOG2_E = tl.constexpr(1.4426950408889634)
NEGLIGIBLE = tl.constexpr(-80.0)


def retained_counts(log_beta: Tensor, document_start: Tensor | None = None) -> Tensor:
    """Return S of ``training.capacity``: ``[R, T]`` float32 -> ``[R, T]`` float32.

    Args:
        log_beta: ``[R, T]`` float32 on CUDA (or on the CPU under ``TRITON_INTERPRET=1``).
        document_start: ``[T]`` int64 or None, as there.
    """
    return _Retained.apply(log_beta.contiguous(), document_start)


class _Retained(torch.autograd.Function):
    """Runs both kernels; saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, log_beta: Tensor, document_start: Tensor | None) -> Tensor:
        ctx.save_for_backward(log_beta, document_start)
        out = torch.empty_like(log_beta)
        _launch(forward_kernel, log_beta, document_start, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_beta, document_start = ctx.saved_tensors
        out = torch.empty_like(log_beta)
        _launch(backward_kernel, log_beta, document_start, out, grad.contiguous())
        return out, None


def _launch(
    kernel: Any, log_beta: Tensor, document_start: Tensor | None, out: Tensor, *extra: Tensor
) -> None:
    rows, steps = log_beta.shape
    packed = document_start is not None
    # Never read if not packed.
    starts = log_beta if document_start is None else document_start.contiguous()
    grid = rows, triton.cdiv(steps, BLOCK)
    with on_device(log_beta.device):
        kernel[grid](
            log_beta, starts, *extra, out, steps, PACKED=packed, BLOCK=BLOCK, num_warps=WARPS
        )


@triton.jit
def forward_kernel(log_beta, starts, out, steps, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a block of steps of one row: ``out [R, T]``; grid (R, T / BLOCK)."""
    row = tl.program_id(0).to(tl.int64) * steps
    # The last steps have most entries before them: they begin first.
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK
    batch_slot = tl.arange(0, BLOCK)
    t = begin + batch_slot
    inside = t < steps
    start = tl.zeros([BLOCK], tl.int32)
    first = 0
    if PACKED:
        start = tl.load(starts + t, mask=inside, other=0).to(tl.int32)
        first = tl.load(starts + begin).to(tl.int32) // BLOCK * BLOCK
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for base in range(first, begin + 1, BLOCK):
        i = base + batch_slot
        lb = tl.load(log_beta + row + i, mask=i < steps, other=-1.0)
        slowest = (begin - base - BLOCK + 1) * tl.max(lb, 0)
        if slowest >= NEGLIGIBLE:
            age = t[:, None] - i[None, :]
            seen = age >= 0
            if PACKED:
                seen = seen & (i[None, :] >= start[:, None])
            exponent = age.to(tl.float32) * (lb * LOG2_E)[None, :]
            total += tl.exp2(tl.where(seen, exponent, float("-inf")))
    tl.store(out + row + t, tl.sum(total, 1), mask=inside)


@triton.jit
def backward_kernel(log_beta, starts, grad, out, steps, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a block of entries of one row: ``out [R, T]`` = sum_t ``grad dS/dlog_beta``."""
    row = tl.program_id(0).to(tl.int64) * steps
    base = tl.program_id(1) * BLOCK
    batch_slot = tl.arange(0, BLOCK)
    i = base + batch_slot
    inside = i < steps
    lb = tl.load(log_beta + row + i, mask=inside, other=-1.0)
    lb2 = lb * LOG2_E
    lag = batch_slot.to(tl.float32)

    # Steps of the entries' own block.
    age = i[None, :] - i[:, None]
    g = tl.load(grad + row + i, mask=inside, other=0.0)
    met = age >= 0
    if PACKED:
        met = met & (tl.load(starts + i, mask=inside, other=steps)[None, :] <= i[:, None])
    weight = tl.exp2(tl.where(met, age.to(tl.float32) * lb2[:, None], float("-inf")))
    total = weight * age.to(tl.float32) * g[None, :]

    # Later blocks, up to the age at which the slowest of these entries is negligible.
    ahead = tl.exp2(lag[None, :] * lb2[:, None])
    reach = tl.minimum(NEGLIGIBLE / tl.minimum(tl.max(lb, 0), -1e-20), 1e9).to(tl.int32)
    end = tl.minimum(steps, base + BLOCK + reach)
    for begin in range(base + BLOCK, end, BLOCK):
        t = begin + batch_slot
        meets = True
        if PACKED:
            head = tl.load(starts + begin).to(tl.int32)
            meets = head < base + BLOCK
        if meets:
            g = tl.load(grad + row + t, mask=t < steps, other=0.0)
            distance = (begin - i).to(tl.float32)
            far = tl.exp2(distance * lb2)
            if PACKED:
                # Only the document of the block's first step began before the block.
                same = tl.load(starts + t, mask=t < steps, other=steps).to(tl.int32) == head
                g = tl.where(same, g, 0.0)
                far = tl.where(i >= head, far, 0.0)
            pull = (far * distance)[:, None] * g[None, :] + far[:, None] * (g * lag)[None, :]
            total += ahead * pull
    tl.store(out + row + i, tl.sum(total, 1), mask=inside)
