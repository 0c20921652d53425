"""Products with weights that are held in bfloat16 or 8 bits, in C: the form that a step reads."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from engine.backends.cpu.binding import Library, byref, library
from engine.backends.cpu.decoder import linear
from engine.model import product as reference
from engine.model.int8 import Int8Matrix
from engine.model.product import Matrix, Product

# Multiplications that a further thread is worth: some 10 microseconds of one.
_PER_THREAD = 2**20


def native_product(form: str = "auto") -> Product | None:
    """Return the product in C for weights in a form; None where there is none.

    Apple's clang compiles it for one thread only: there, torch's product of float32 is the faster,
    and ``auto`` takes it.
    """
    if isinstance(library(), str) or (sys.platform == "darwin" and form == "auto"):
        return None
    return multiply


def rounded(weight: Tensor) -> Int8Matrix:
    """Round a matrix to 8 bits like :meth:`Int8Matrix.of`, to the same codes, in C.

    It runs there for float32 and bfloat16 weights on the CPU.
    """
    found, half = library(), weight.dtype == torch.bfloat16
    if isinstance(found, str) or not (half or weight.dtype == torch.float32):
        return Int8Matrix.of(weight)
    weight, (rows, width) = weight.contiguous(), weight.shape
    codes, scales = Int8Matrix.empty(rows, width)
    sums, threads = torch.empty(len(codes), 2, dtype=torch.float64), torch.get_num_threads()
    places = (each.data_ptr() for each in (codes, scales, sums))
    threads = min(threads, 1 + weight.numel() // _PER_THREAD)
    found.mmkv_round(weight.data_ptr(), half, rows, width, *places, threads)
    wrong, whole = sums.sum(0).tolist()
    return Int8Matrix(codes, scales, (rows, width), (wrong / whole) ** 0.5 if whole else 0.0)


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight x + bias`` like :func:`engine.model.product.multiply`.

    It runs in C for float32 ``x`` and weights in bfloat16 or 8 bits on the CPU, summed in float32
    in vectors of the CPU's width; a row of the result does not depend on the other rows of ``x``.
    Gradients reach ``x`` alone; the rounding of states to 8 bits passes them as they are.
    """
    if isinstance(weight, Tensor):
        mixed = weight.dtype == torch.bfloat16 and weight.is_contiguous()
        if not mixed or not x.device.type == weight.device.type == "cpu":
            return reference.multiply(x, weight, bias)
    found = library()
    if isinstance(found, str) or x.dtype != torch.float32:
        return reference.multiply(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        made: Tensor = _Frozen.apply(x, weight, bias)
        return made
    return _multiply(found, x, weight, bias)


class _Frozen(torch.autograd.Function):
    """The product with weights that are not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        ctx.weight, found = weight, library()
        assert not isinstance(found, str)
        return _multiply(found, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.weight
        wide = weight.wide() if isinstance(weight, Int8Matrix) else weight.to(grads[0].dtype)
        return grads[0] @ wide, None, None


def _multiply(found: Library, x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    rows, width = weight.shape
    x = x.contiguous()
    made = x.new_empty(*x.shape[:-1], rows)
    tokens = x.numel() // width
    map_, threads = byref(linear(weight, bias)), torch.get_num_threads()
    threads = min(threads, 1 + tokens * weight.numel() // _PER_THREAD)
    scratch = torch.empty(found.mmkv_product_scratch(map_, tokens))
    found.mmkv_product(map_, x.data_ptr(), made.data_ptr(), tokens, threads, scratch.data_ptr())
    return made
