"""Products of states with a matrix of weights in float, bfloat16, 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.elementwise import Elementwise, TorchElementwise
from mmkv.engine.model.mixture import Experts, grouped
from mmkv.engine.model.panels import Bf16Matrix, Panels, Rows
from mmkv.engine.model.rounded import Int4Matrix, Int8Matrix, IntegerMatrix

# Numbers that are looked at first: those of most float32 checkpoints show at once.
_FIRST = 2**16
_CPU = torch.device("cpu")

Matrix = Tensor | Bf16Matrix | IntegerMatrix
# What holds weights in so many bits.
INTEGERS: dict[int, type[IntegerMatrix]] = {8: Int8Matrix, 4: Int4Matrix}


class Product(Protocol):
    """Multiplies states by weights, as :func:`multiply` does."""

    def __call__(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Compute ``weight x + bias``."""
        ...


class PatchAttention(Protocol):
    """Attention between the patches of pictures, without a mask."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Sequence[int]
    ) -> Tensor:
        """Attend from the patches of each part to all of that part.

        Args:
            query: float32 ``[n, H, T, D]``; key and value likewise.
            scale: on the products of queries and keys.
            starts: where each part of the T patches begins, 0 first, and T.

        Returns:
            float32 ``[n, T, H, D]``.
        """
        ...


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute ``weight x + bias``: the reference.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]`` in the dtype of ``x``, or in bfloat16, which is then widened, or in 8
            or 4 bits: then states are rounded, too (:meth:`IntegerMatrix.multiply`).
        bias: ``[out]`` in the dtype of ``x``.

    Returns:
        ``[..., out]`` in the dtype of ``x``.
    """
    if isinstance(weight, IntegerMatrix):
        return weight.multiply(x, bias).to(x.dtype)
    rows = weight.in_rows() if isinstance(weight, Bf16Matrix) else weight
    return F.linear(x, rows.to(x.dtype), bias)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Sequence[int]
) -> Tensor:
    """Compute :class:`PatchAttention`: the reference."""
    parts = (slice(first, after) for first, after in pairwise(starts))
    made = [
        F.scaled_dot_product_attention(
            query[:, :, own], key[:, :, own], value[:, :, own], scale=scale
        )
        for own in parts
    ]
    return torch.cat(made, 2).transpose(1, 2).contiguous()


def attend_rounded(
    query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Sequence[int]
) -> Tensor:
    """Compute :func:`attend` of numbers in bfloat16, with float32 sums: the reference."""
    q, k, v = (x.bfloat16().to(x.dtype) for x in (query, key, value))
    return attend(q, k, v, scale, starts)


def multiply_rounded(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`multiply` of float32 states that are rounded to bfloat16 first: the reference.

    Sums stay float32, and gradients pass the rounding as they are. Whole numbers are
    multiplied as there.
    """
    if isinstance(weight, IntegerMatrix):
        return multiply(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        return multiply(_Rounded.apply(x), weight, bias)
    return multiply(x.bfloat16().to(x.dtype), weight, bias)


class _Rounded(torch.autograd.Function):
    """States in bfloat16, held in their own dtype; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def embedded(token_ids: Tensor, weight: Matrix) -> Tensor:
    """Return the rows ``token_ids [T]`` of an embedding, ``[T, in]``."""
    if isinstance(weight, Panels):
        return weight.rows(token_ids)
    return F.embedding(token_ids, weight)


def plain(weight: Matrix) -> Tensor:
    """Return a matrix as rows of numbers: itself, or a copy where it lies in bfloat16 panels.

    Raises:
        ModelError: it is held in 8 or 4 bits.
    """
    if isinstance(weight, IntegerMatrix):
        raise ModelError(
            f"this cannot read weights in {weight.bits} bits; load the model with weights='auto'"
        )
    return weight.in_rows() if isinstance(weight, Bf16Matrix) else weight


def equal(one: Matrix, other: Matrix) -> bool:
    """Whether two matrices hold the same numbers in the same form."""
    if type(one) is not type(other):
        return False
    pairs = zip(*(m.held() if isinstance(m, Panels) else (m,) for m in (one, other)), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def narrowed(weight: Tensor) -> Tensor:
    """Return float32 weights in bfloat16 if that changes no number, else as they are."""
    for part in (weight.flatten()[:_FIRST], weight):
        narrow = part.to(torch.bfloat16)
        if weight.dtype != torch.float32 or not torch.equal(narrow.float(), part):
            return weight
    return narrow


@dataclass(frozen=True)
class Kernels:
    """The functions that a decoder computes with; torch's own, unless a backend has others.

    Attributes:
        product: multiplies float32 states by matrices in any form; None: none but the reference
            does, so that ``auto`` leaves matrices in the dtype.
        rounded: rounds a matrix to so many bits, 8 or 4.
        packed: lays out a bfloat16 matrix as ``product`` reads it fastest; None: it stays.
        elementwise: computes what is between the products; experts: those of a mixture.
        attention: computes the attention of vision towers; None: torch does.
    """

    product: Product | None = None
    rounded: Callable[[Tensor | Rows, int], IntegerMatrix] = lambda weight, bits: INTEGERS[bits].of(
        weight
    )
    packed: Callable[[Tensor | Rows], Matrix] | None = None
    elementwise: Elementwise = field(default_factory=TorchElementwise)
    experts: Experts = grouped
    attention: PatchAttention | None = None


@dataclass(frozen=True)
class WeightForm:
    """How matrices are held that are not in the dtype of states.

    Attributes:
        name: ``auto``, ``bf16``, ``int8`` or ``int4``, as ``--weights`` takes it.
        kernels: what lays them out, and multiplies by them.
        dtype: of states: float32 on a CPU.
        device: where the model runs. Matrices are laid out on the CPU, to the same codes.
    """

    name: str
    kernels: Kernels = field(default_factory=Kernels)
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU

    @property
    def product(self) -> Product:
        """Multiplies states by matrices in that form."""
        reference = multiply_rounded if self.name == "bf16" else multiply
        return self.kernels.product or reference

    @property
    def packs(self) -> bool:
        """Whether every matrix that is stored in bfloat16 is held in panels."""
        kernels = self.kernels
        packed = kernels.packed is not None and kernels.product is not None
        return packed or self.name not in ("auto", "bf16")

    @property
    def attention(self) -> PatchAttention | None:
        """Attends in vision towers; None: transformers does, in float32 as C under ``auto``.

        The other forms round states to bfloat16 there, as their products round them. On a GPU it is
        always transformers, in the dtype of states.
        """
        if self.device.type != "cpu":
            return None
        return self.kernels.attention or (None if self.name == "auto" else attend_rounded)

    def bits(self, part: str = "") -> int | None:
        """Return the bits of a matrix that is rounded to whole numbers; None: none is.

        Under ``int4`` those of the decoder's layers alone take 4 bits: embedding, head and what
        sees, which are few, take 8.

        Args:
            part: its name; in the decoder's layers it begins with ``layers.``.
        """
        if self.name == "int4" and part.startswith("layers."):
            return 4
        return 8 if self.name in ("int8", "int4") else None

    def bytes_of(self, numbers: int, part: str = "") -> int:
        """Return the bytes of so many numbers in panels, without what fills these up.

        Args:
            part: as :meth:`bits` takes it.
        """
        bits = self.bits(part)
        return 2 * numbers if bits is None else numbers // 32 * (4 * bits + 2)

    def hold(self, weight: Tensor | Rows, part: str = "") -> Matrix:
        """Return a matrix as it is held; ``auto`` changes no number.

        Args:
            weight: rows of several only if it is bfloat16 and the form packs it.
            part: as :meth:`bits` takes it.
        """
        if (bits := self.bits(part)) is not None:
            return self.kernels.rounded(weight, bits)
        packed = self.kernels.packed if self.packs else None
        if isinstance(weight, Tensor):
            weight = weight.bfloat16() if self.name == "bf16" else narrowed(weight)
            if packed is None or weight.dtype != torch.bfloat16:
                return weight
        assert packed is not None
        return packed(weight)

    @classmethod
    def of(
        cls, name: str, kernels: Kernels, dtype: torch.dtype, device: torch.device, experts: bool
    ) -> WeightForm | None:
        """Return the holding of that name; None: matrices stay in the dtype of states.

        Args:
            dtype: of states; experts: whether the model is a mixture of them.

        Raises:
            ModelError: this form is not for such a model, dtype or device.
        """
        on_cpu, wide = device.type == "cpu", dtype == torch.float32
        if name == "auto" or (name == "bf16" and dtype == torch.bfloat16):
            return cls(name, kernels) if on_cpu and wide and kernels.product is not None else None
        reason = remedy = ""
        if not wide and (on_cpu or name == "bf16"):
            reason = f"not beside {str(dtype).removeprefix('torch.')} states"
            remedy = "take dtype float32 (auto, on a CPU)" if on_cpu else "take dtype bfloat16"
        elif experts:
            reason, remedy = "not for a mixture of experts", "leave --weights at auto"
        if reason:
            raise ModelError(f"weights {name!r} are {reason}; {remedy}")
        return cls(name, kernels, dtype, device)
