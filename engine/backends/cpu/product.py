"""Products with weights that are held in bfloat16, in C: the form that a decode step reads."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from engine.backends.cpu.binding import Linear, byref, library
from engine.model import product as reference
from engine.model.product import Product

# Multiplications that a further thread is worth: some 10 microseconds of one.
_PER_THREAD = 2**20


def native_product() -> Product | None:
    """Return the product in C, so that weights may be held in bfloat16; None where there is none.

    Apple's clang compiles it for one thread only: there, torch's product of float32 is the faster.
    """
    if isinstance(library(), str) or sys.platform == "darwin":
        return None
    return multiply


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight x + bias`` like :func:`engine.model.product.multiply`.

    It runs in C for float32 ``x`` and bfloat16 weights on the CPU, summed in float32 in vectors of
    the CPU's width; a row of the result does not depend on the other rows of ``x``. Gradients reach
    ``x`` alone.
    """
    mixed = weight.dtype == torch.bfloat16 and x.dtype == torch.float32
    if not mixed or not x.device.type == weight.device.type == "cpu":
        return reference.multiply(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        made: Tensor = _Frozen.apply(x, weight, bias)
        return made
    return _multiply(x, weight, bias)


class _Frozen(torch.autograd.Function):
    """The product with weights that are not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.weight.to(grads[0].dtype), None, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found = library()
    if isinstance(found, str) or not weight.is_contiguous():
        return reference.multiply(x, weight, bias)
    rows, width = weight.shape
    x = x.contiguous()
    made = x.new_empty(*x.shape[:-1], rows)
    tokens = x.numel() // width
    linear = Linear(None, None if bias is None else bias.data_ptr(), weight.data_ptr(), rows, width)
    threads = min(torch.get_num_threads(), 1 + tokens * weight.numel() // _PER_THREAD)
    found.mmkv_product(byref(linear), x.data_ptr(), made.data_ptr(), tokens, threads)
    return made
