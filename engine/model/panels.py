"""Weight matrices packed into panels, as the products in C read them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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


class Rows:
    """Matrices ``[n, in]`` one below the other, put together where some rows are asked for.

    It is to packing what a tensor of all of them is.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts, self.dtype, self.device = parts, parts[0].dtype, parts[0].device
        self.shape = sum(map(len, parts)), parts[0].shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        first, after, _ = rows.indices(self.shape[0])
        found = []
        for part in self._parts:
            found.append(part[max(first, 0) : max(after, 0)])
            first, after = first - len(part), after - len(part)
        there = [part for part in found if len(part)]
        return there[0] if len(there) == 1 else torch.cat(found)

    def cpu(self) -> Rows:
        """Return it on the CPU, where it is."""
        return self


Room = tuple[tuple[int, ...], torch.dtype]  # shape [panels, ...] and dtype of a tensor to fill
Fill = Callable[..., None]


class _Filler(threading.local):
    fill: Callable[[Fill, Sequence[Room]], Sequence[Tensor]] | None = None


_filler = _Filler()


@contextmanager
def filled_by(fill: Callable[[Fill, Sequence[Room]], Sequence[Tensor]]) -> Iterator[None]:
    """Have :func:`filled` of this thread do as ``fill``, which may keep what it fills elsewhere."""
    _filler.fill = fill
    try:
        yield
    finally:
        _filler.fill = None


def filled(fill: Fill, *rooms: Room) -> Sequence[Tensor]:
    """Return tensors that ``fill`` has packed into: those of every matrix in panels come from here.

    Args:
        fill: called with the number of a panel, and with tensors for it and some that follow. All
            of these, and no others, it fills.
    """
    if _filler.fill is not None:
        return _filler.fill(fill, rooms)
    made = [torch.empty(*shape, dtype=dtype) for shape, dtype in rooms]
    fill(0, *made)
    return made


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
    def of(cls, weight: Tensor | Rows) -> Bf16Matrix:
        """Lay out bfloat16 ``weight [out, in]``; no number changes."""

        def fill(first: int, panels: Tensor) -> None:
            own = weight[first * PANEL : (first + len(panels)) * PANEL]
            padded = F.pad(own, (0, own.shape[1] % 2, 0, -len(own) % PANEL))
            pairs = padded.contiguous().view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2)
            panels.copy_(pairs.contiguous().view(torch.bfloat16).unflatten(-1, (PANEL, 2)))

        rows, width = weight.shape
        return cls.filled(rows, width, fill)

    @classmethod
    def filled(cls, rows: int, width: int, fill: Fill) -> Bf16Matrix:
        """Return the matrix ``[rows, width]`` whose panels ``fill`` packs: see :func:`filled`."""
        (panels,) = filled(fill, (_held_shape(rows, width), torch.bfloat16))
        return cls(panels, (rows, width))

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
