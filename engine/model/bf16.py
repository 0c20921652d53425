"""Weight matrices in bfloat16, packed into panels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.panels import Panels, room

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
