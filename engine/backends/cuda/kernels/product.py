"""Products of states with matrices in fewer bits, as the GPU holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.model import product as reference
from mmkv.engine.model.product import Matrix, Product
from mmkv.engine.model.rounded import IntegerMatrix
from mmkv.engine.system import on_device


def product_for(form: str) -> Product:
    """Return the product with matrices in a form, as ``--weights`` takes it."""
    return multiply_rounded if form == "bf16" else multiply


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`mmkv.engine.model.product.multiply`.

    Whole numbers in Triton give the reference's bits: sums within a block are exact, and blocks are
    added up in float32 in the same order, whatever the other rows of ``x``. Gradients pass there no
    more than in the reference. All other matrices are torch's.

    Args:
        x: ``[..., in]`` in any float.
        weight: ``[out, in]`` on the device of ``x``. bias: ``[out]`` in any float.

    Returns:
        ``[..., out]`` in the dtype of ``x``, rounded once, after the bias.
    """
    if isinstance(weight, IntegerMatrix) and on_triton(x):
        from mmkv.engine.backends.cuda.kernels import product_triton

        with on_device(x.device):
            return product_triton.multiply(x, weight, bias)
    return reference.multiply(x, weight, bias)


multiply_reference = reference.multiply


def multiply_rounded(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`mmkv.engine.model.product.multiply_rounded`.

    For float32 ``x`` and bfloat16 rows Triton sums in float32, in an order of its own.
    """
    asked = torch.is_grad_enabled() and x.requires_grad
    wide = x.dtype == torch.float32 and not asked
    if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and wide and on_triton(x):
        from mmkv.engine.backends.cuda.kernels import product_triton

        with on_device(x.device):
            return product_triton.multiply_rounded(x, weight, bias)
    if isinstance(weight, IntegerMatrix):
        return multiply(x, weight, bias)
    return reference.multiply_rounded(x, weight, bias)


multiply_rounded_reference = reference.multiply_rounded
