"""The product of states with a matrix of weights, and the form in which the matrix is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ModelError
from engine.model.int8 import Int8Matrix

# Numbers that are looked at first: those of most float32 checkpoints show at once.
_FIRST = 2**16

Matrix = Tensor | Int8Matrix


class Product(Protocol):
    """Multiplies states by weights, as :func:`multiply` does."""

    def __call__(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Compute ``weight x + bias``."""
        ...


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight x + bias``: the reference.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]`` in the dtype of ``x``, or in bfloat16, which is then widened, or in 8
            bits: then states are rounded, too (:meth:`Int8Matrix.multiply`).
        bias: ``[out]`` in the dtype of ``x``.

    Returns:
        ``[..., out]`` in the dtype of ``x``.
    """
    if isinstance(weight, Int8Matrix):
        return weight.multiply(x, bias).to(x.dtype)
    return F.linear(x, weight.to(x.dtype), bias)


def embedded(token_ids: Tensor, weight: Matrix) -> Tensor:
    """Return the rows ``token_ids [T]`` of an embedding, ``[T, in]``."""
    if isinstance(weight, Int8Matrix):
        return weight.rows(token_ids)
    return F.embedding(token_ids, weight)


def plain(weight: Matrix) -> Tensor:
    """Return a matrix that is held as numbers.

    Raises:
        ModelError: it is held in 8 bits.
    """
    if isinstance(weight, Int8Matrix):
        raise ModelError("this cannot read weights in 8 bits; load the model with weights='auto'")
    return weight


def equal(one: Matrix, other: Matrix) -> bool:
    """Whether two matrices hold the same numbers in the same form."""
    if isinstance(one, Int8Matrix) and isinstance(other, Int8Matrix):
        return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def narrowed(weight: Tensor) -> Tensor:
    """Return float32 weights in bfloat16 if that changes no number, else as they are."""
    for part in (weight.flatten()[:_FIRST], weight):
        narrow = part.to(torch.bfloat16)
        if weight.dtype != torch.float32 or not torch.equal(narrow.float(), part):
            return weight
    return narrow


@dataclass(frozen=True)
class Holding:
    """How float32 matrices are held on a CPU.

    Attributes:
        name: ``auto``, ``bf16`` or ``int8``, as ``--weights`` takes it.
        product: multiplies float32 states by matrices in that form.
        rounded: rounds a matrix to 8 bits.
    """

    name: str
    product: Product
    rounded: Callable[[Tensor], Int8Matrix] = Int8Matrix.of

    def hold(self, weight: Tensor) -> Matrix:
        """Return a matrix as it is held; ``auto`` changes no number."""
        if self.name == "int8":
            return self.rounded(weight)
        return weight.bfloat16() if self.name == "bf16" else narrowed(weight)

    @classmethod
    def of(
        cls,
        name: str,
        product: Product | None,
        rounded: Callable[[Tensor], Int8Matrix],
        dtype: torch.dtype,
        device: torch.device,
        experts: bool,
    ) -> Holding | None:
        """Return the holding of that name; None: matrices stay in the dtype of states.

        Args:
            product: multiplies by matrices in any form in C; None: there is none.
            rounded: rounds a matrix to 8 bits.
            dtype: of states.

        Raises:
            ModelError: this form is not for such a model, dtype or device.
        """
        here = dtype == torch.float32 and device.type == "cpu"
        if name == "auto" or (name == "bf16" and dtype == torch.bfloat16):
            return cls(name, product) if here and product is not None else None
        reason = remedy = ""
        if device.type != "cpu":
            reason, remedy = f"not on {device.type}", "leave --weights at auto, or take device cpu"
        elif not here:
            short = str(dtype).removeprefix("torch.")
            reason, remedy = f"not beside {short} states", "take dtype float32 (auto, on a CPU)"
        elif experts:
            reason, remedy = "not for a mixture of experts", "leave --weights at auto"
        if reason:
            raise ModelError(f"weights {name!r} are {reason}; {remedy}")
        return cls(name, product or multiply, rounded)
