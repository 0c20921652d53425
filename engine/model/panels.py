"""Weight matrices packed into panels, as the products in C read them."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class Panels(ABC):
    """A matrix ``[out, in]`` that is held in another form than one row after the other.

    Subclasses are dataclasses of tensors, ``shape``, and plain numbers: so a file can keep them.

    Attributes:
        shape: ``(out, in)``.
        layout: version of how numbers lie and are rounded; raise it with every change of that, for
            files on users' disks hold the older one.
        kinds: all classes by name.
    """

    shape: tuple[int, int]
    layout: ClassVar[int] = 1
    kinds: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        Panels.kinds[cls.__name__] = cls

    @abstractmethod
    def held(self) -> tuple[Tensor, ...]:
        """Return what holds the numbers; the last of them is finite exactly where all are."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids [...]`` as ``[..., in]``."""

    @abstractmethod
    def sample(self, count: int) -> Tensor:
        """Return some of what is held, at least ``count`` numbers, at places of equal distance."""

    @abstractmethod
    def fills_its_shape(self) -> bool:
        """Whether all of the matrix is held: C reads so much without asking."""

    @property
    def device(self) -> torch.device:
        """Where the numbers lie."""
        return self.held()[0].device

    @property
    def nbytes(self) -> int:
        """Count the bytes of all that is held."""
        return sum(part.nbytes for part in self.held())

    def to(self, device: torch.device) -> Self:
        """Return the matrix on a device: this one where it lies there already."""
        parts = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        moved = {name: part.to(device) for name, part in parts.items()}
        if all(moved[name] is part for name, part in parts.items()):
            return self
        return replace(self, **moved)  # type: ignore[type-var]  # every class is a dataclass

    def numel(self) -> int:
        """Count the numbers of the matrix, what fills panels left out."""
        return self.shape[0] * self.shape[1]

    def data_ptr(self) -> int:
        """Return the address of what is held: it tells matrices apart."""
        return self.held()[0].data_ptr()

    def is_contiguous(self) -> bool:
        """Whether it lies as C reads it: always."""
        return True

    def wide(self) -> Tensor:
        """Return the matrix in float32."""
        return self.rows(torch.arange(self.shape[0], device=self.device)).float()


def sampled(flat: Tensor, count: int) -> Tensor:
    """Return ``flat`` at places of equal distance, at least ``count`` of them if it has so many."""
    return flat[:: max(1, flat.numel() // count)]


class _Workspace(threading.local):
    """Memory of a thread that is used for one matrix after the other."""

    memory: Tensor | None = None
    taken = 0


_workspace = _Workspace()
_WORKSPACE_BYTES = 2**27


@contextmanager
def reused_memory() -> Iterator[Callable[[], None]]:
    """Have :func:`room` give this thread the same memory again and again, where it suffices.

    The system clears fresh memory first, which takes as long as packing into it.

    Yields:
        a function that begins again: what was made in that memory is gone then.
    """

    def again() -> None:
        _workspace.taken = 0

    _workspace.memory = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8)
    again()
    try:
        yield again
    finally:
        _workspace.memory = None


def room(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of any numbers: room for panels, or for what they are packed of."""
    size, begin = math.prod(shape) * dtype.itemsize, -(-_workspace.taken // 64) * 64
    if _workspace.memory is None or begin + size > _WORKSPACE_BYTES:
        return torch.empty(*shape, dtype=dtype)
    _workspace.taken = begin + size
    return _workspace.memory[begin : begin + size].view(dtype).view(*shape)


PANEL = 32  # BF16_PANEL of native.h


@dataclass(frozen=True, eq=False)
class Bf16Matrix(Panels):
    """A matrix ``[out, in]`` in bfloat16 in panels of 32 rows.

    Two columns of every row of a panel lie together: one load gives a vector of rows, and memory is
    read in one stream. What is missing to whole panels and pairs is zeros.

    Attributes:
        panels: bfloat16 ``[panels, pairs of columns, 32, 2]``.
        shape: ``(out, in)``.
    """

    panels: Tensor
    shape: tuple[int, int]

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Bf16Matrix:
        """Lay out bfloat16 ``weight [out, in]``; no number changes."""
        rows, width = weight.shape
        padded = F.pad(weight, (0, width % 2, 0, -rows % PANEL))
        pairs = padded.contiguous().view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2)
        panels = pairs.contiguous().view(torch.bfloat16).unflatten(-1, (PANEL, 2))
        return cls(panels, (rows, width))

    @staticmethod
    def empty(rows: int, width: int) -> Tensor:
        """Return room for the panels of a matrix ``[rows, width]``."""
        return room(*_held_shape(rows, width), dtype=torch.bfloat16)

    def fills_its_shape(self) -> bool:
        """See :class:`Panels`."""
        fits = self.panels.shape == _held_shape(*self.shape)
        return fits and self.panels.dtype == torch.bfloat16

    def held(self) -> tuple[Tensor, ...]:
        """Return the panels."""
        return (self.panels,)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids [...]``, bfloat16 ``[..., in]``."""
        made = self.panels[ids // PANEL, :, ids % PANEL]
        return made.flatten(-2)[..., : self.shape[1]]

    def sample(self, count: int) -> Tensor:
        """Return what :func:`sampled` gives of the rows one after the other."""
        at = torch.arange(0, self.numel(), max(1, self.numel() // count))
        row, column = at // self.shape[1], at % self.shape[1]
        return self.panels[row // PANEL, column // 2, row % PANEL, column % 2]

    def in_rows(self) -> Tensor:
        """Return a copy one row after the other, bfloat16 ``[out, in]``."""
        pairs = self.panels.view(torch.int32).squeeze(-1).transpose(1, 2).flatten(0, 1)
        return (
            pairs.contiguous().view(torch.bfloat16)[: self.shape[0], : self.shape[1]].contiguous()
        )

    def wide(self) -> Tensor:
        """Return the matrix in float32."""
        return self.in_rows().float()


def _held_shape(rows: int, width: int) -> tuple[int, ...]:
    return -(-rows // PANEL), -(-width // 2), PANEL, 2
