"""Products with weights that are held in bfloat16 or 8 bits, in C: the form that a step reads."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import Library, byref, library
from mmkv.engine.backends.cpu.matrices import PER_THREAD, linear
from mmkv.engine.model import product as reference
from mmkv.engine.model.bf16 import Bf16Matrix
from mmkv.engine.model.int8 import Int8Matrix
from mmkv.engine.model.product import Matrix, Product


def native_product(form: str = "auto") -> Product | None:
    """Return the product in C for weights in a form; None where there is none.

    Apple's clang compiles it for one thread only: there, torch's product of float32 is the faster,
    and ``auto`` takes it.
    """
    if isinstance(library(), str) or (sys.platform == "darwin" and form == "auto"):
        return None
    return multiply


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight x + bias`` like :func:`mmkv.engine.model.product.multiply`.

    It runs in C for float32 ``x`` and weights in panels, of bfloat16 or of 8 bits, summed in
    float32 in vectors of the CPU's width; a row of the result does not depend on the others of
    ``x``.
    Gradients reach ``x`` alone; the rounding of states to 8 bits passes them as they are.
    """
    found = library()
    if isinstance(weight, Tensor) or isinstance(found, str) or x.dtype != torch.float32:
        return reference.multiply(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        made: Tensor = _Frozen.apply(x, weight, bias)
        return made
    return _multiply(found, x, weight, bias)


class _Frozen(torch.autograd.Function):
    """The product with weights that are not trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Bf16Matrix | Int8Matrix, bias: Tensor | None
    ) -> Tensor:
        ctx.weight, found = weight, library()
        assert not isinstance(found, str)
        return _multiply(found, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.weight.wide(), None, None


def _multiply(
    found: Library, x: Tensor, weight: Bf16Matrix | Int8Matrix, bias: Tensor | None
) -> Tensor:
    rows, width = weight.shape
    x = x.contiguous()
    made = x.new_empty(*x.shape[:-1], rows)
    tokens = x.numel() // width
    map_, threads = byref(linear(weight, bias)), torch.get_num_threads()
    threads = min(threads, 1 + tokens * weight.numel() // PER_THREAD)
    scratch = torch.empty(found.mmkv_product_scratch(map_, tokens))
    found.mmkv_product(map_, x.data_ptr(), made.data_ptr(), tokens, threads, scratch.data_ptr())
    return made
