"""The product of states with a matrix of weights, and the form in which the matrix is held."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers that are looked at first: those of most float32 checkpoints show at once.
_FIRST = 2**16


class Product(Protocol):
    """Multiplies states by weights, as :func:`multiply` does."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``weight x + bias``."""
        ...


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight x + bias``: the reference.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]`` in the dtype of ``x``, or in bfloat16, which is then widened.
        bias: ``[out]`` in the dtype of ``x``.

    Returns:
        ``[..., out]`` in the dtype of ``x``.
    """
    return F.linear(x, weight.to(x.dtype), bias)


def narrowed(weight: Tensor) -> Tensor:
    """Return float32 weights in bfloat16 if that changes no number, else as they are."""
    for part in (weight.flatten()[:_FIRST], weight):
        narrow = part.to(torch.bfloat16)
        if weight.dtype != torch.float32 or not torch.equal(narrow.float(), part):
            return weight
    return narrow
