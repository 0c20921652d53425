"""Weights in 8 bits: whole numbers in blocks of 32 along a row, a step for each block.

States are rounded likewise before they are multiplied, so that a block's product is a sum of whole
numbers. That is what llama.cpp's Q8_0 does; steps are bfloat16 here, so that no weight is too small
or too large for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.panels import Panels, sampled

BLOCK, PANEL = 32, 16  # CODE_BLOCK and INT8_PANEL of native.h
_LARGEST = 127
_LEAST_CODED = 1e-30  # LEAST_CODED of native.h
_ROWS_AT_ONCE = 256  # so that what rounding makes stays in the cache


@dataclass(frozen=True, eq=False)
class Int8Matrix(Panels):
    """A matrix ``[out, in]`` whose weights are codes, -127 to 127, times the step of their block.

    Panels of 16 rows lie together, and in them four columns of each row: a vector instruction then
    multiplies 16 rows by the same states. What is missing to whole panels and blocks is zeros.

    Attributes:
        codes: int8 ``[panels, blocks, 8, 16, 4]``: row in the panel before column in the group.
        scales: bfloat16 ``[panels, blocks, 16]``, the steps.
        shape: ``(out, in)``.
        error: root mean square of what rounding changed, over that of the weights.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    error: float

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Int8Matrix:
        """Round ``weight [out, in]``, no number by more than half a step of its block.

        A step is the smallest bfloat16 that is not below the block's greatest number over 127. It
        is not a number where a weight is not one.
        """
        rows, width = weight.shape
        codes, scales = cls.empty(rows, width)
        panels, blocks = codes.shape[:2]
        wrong = whole = 0.0
        for first in range(0, panels, _ROWS_AT_ONCE // PANEL):
            after = min(first + _ROWS_AT_ONCE // PANEL, panels)
            part = weight[first * PANEL : after * PANEL].float()
            missing = (after - first) * PANEL - part.shape[0]
            part = F.pad(part, (0, blocks * BLOCK - width, 0, missing)).unflatten(-1, (-1, BLOCK))
            scale = _at_least(part.abs().amax(-1) / _LARGEST)
            steps = scale.float().unsqueeze(-1)
            code = (part / torch.where(steps == 0, 1.0, steps)).round_()
            whole += float(part.square().sum(-1).double().sum())
            wrong += float(part.addcmul_(code, steps, value=-1).square_().sum(-1).double().sum())
            grouped = code.to(torch.int8).unflatten(-1, (-1, 4)).unflatten(0, (-1, PANEL))
            codes[first:after] = grouped.permute(0, 2, 3, 1, 4)
            scales[first:after] = scale.unflatten(0, (-1, PANEL)).transpose(1, 2)
        return cls(codes, scales, (rows, width), (wrong / whole) ** 0.5 if whole else 0.0)

    @staticmethod
    def empty(rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Return room for the codes and steps of a matrix ``[rows, width]``."""
        panels, blocks = -(-rows // PANEL), -(-width // BLOCK)
        codes = torch.empty(panels, blocks, BLOCK // 4, PANEL, 4, dtype=torch.int8)
        return codes, torch.empty(panels, blocks, PANEL, dtype=torch.bfloat16)

    def held(self) -> tuple[Tensor, ...]:
        """Return codes and steps."""
        return self.codes, self.scales

    def sample(self, count: int) -> Tensor:
        """Return some codes."""
        return sampled(self.codes.reshape(-1), count)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield float32 codes ``[out, 32]`` and steps ``[out]`` of each block of columns."""
        for block in range(self.codes.shape[1]):
            codes = self.codes[:, block].transpose(1, 2).flatten(2).flatten(0, 1)
            scales = self.scales[:, block].flatten()
            yield codes[: self.shape[0]].float(), scales[: self.shape[0]].float()

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids [...]`` as float32 ``[..., in]``."""
        panel, row = ids // PANEL, ids % PANEL
        steps = self.scales[panel, :, row].float()
        made = self.codes[panel, :, :, row].flatten(-2).float() * steps.unsqueeze(-1)
        return made.flatten(-2)[..., : self.shape[1]]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``weight x + bias``, float32 ``[..., out]`` of ``x [..., in]``: the reference."""
        codes, steps = code_states(x.float())
        made = x.new_zeros(*x.shape[:-1], self.shape[0], dtype=torch.float32)
        for block, (weight, scale) in enumerate(self.blocks()):
            # Sums of 32 products of two codes are whole numbers below 2^24: exact in float32.
            made += (codes[..., block, :] @ weight.T) * (scale * steps[..., block, None])
        return made if bias is None else made + bias


def code_states(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round states float32 ``[..., in]``: codes ``[..., blocks, 32]``, steps ``[..., blocks]``.

    Both are float32. A block with a number that is not finite has no codes, and a step that is not
    a number.
    """
    x = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    most = x.abs().amax(-1, keepdim=True)
    # Tensors divided: torch makes a number / most of a reciprocal, which C does not.
    inverse = torch.where(most >= _LEAST_CODED, torch.full_like(most, _LARGEST) / most, 0.0)
    codes = torch.where(most.isfinite(), (x * inverse).round(), 0.0)
    return codes, torch.where(most.isfinite(), most / _LARGEST, torch.nan).squeeze(-1)


def _at_least(x: Tensor) -> Tensor:
    """Return the smallest bfloat16 that is not below ``x >= 0``."""
    near = x.bfloat16()
    up = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, up, near)
