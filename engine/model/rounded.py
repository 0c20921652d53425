"""Weights as whole numbers in blocks of 32 along a row, a step for each block.

States are rounded to 8 bits before they are multiplied, so that a block's product is a sum of whole
numbers. That is what llama.cpp's Q8_0 and Q4_0 do; steps are bfloat16 here, so that no weight is
too small or too large for them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.panels import Fill, Panels, Rows, filled, sampled

BLOCK, PANEL = 32, 16  # CODE_BLOCK and INT8_PANEL of native.h
_LARGEST = 127
_LEAST_CODED = 1e-30  # LEAST_CODED of native.h
_PANELS_AT_ONCE = 16  # so that what rounding makes stays in the cache


@dataclass(frozen=True, eq=False)
class IntegerMatrix(Panels):
    """A matrix ``[out, in]`` whose weights are codes, whole numbers, times the step of their block.

    Panels of 16 rows lie together, and in them four columns of each row: a vector instruction then
    multiplies 16 rows by the same states. What is missing to whole panels and blocks is zeros.

    Attributes:
        codes: ``[panels, blocks, n, 16, 4]`` of n bytes for each four columns of a row's block: row
            in the panel before column in the group.
        scales: bfloat16 ``[panels, blocks, 16]``, the steps.
        shape: ``(out, in)``.
        error: root mean square of what rounding changed, over that of the weights.
    """

    bits: ClassVar[int]
    _stored_as: ClassVar[torch.dtype]

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    error: float

    @staticmethod
    @abstractmethod
    def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round float32 blocks ``[..., 32]``: float32 codes alike, bfloat16 steps ``[...]``.

        The step of a block with a number that is not finite is not a number.
        """

    @staticmethod
    @abstractmethod
    def stored(codes: Tensor) -> Tensor:
        """Return codes of blocks ``[..., 32]`` as they are held, ``[..., n, 4]``."""

    @staticmethod
    @abstractmethod
    def whole(stored: Tensor) -> Tensor:
        """Return float32 codes ``[..., 32]`` of what is held, ``[..., n, 4]``."""

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor | Rows) -> Self:
        """Round ``weight [out, in]``, floats, block by block."""
        width = -(-weight.shape[1] // BLOCK) * BLOCK

        def rounded(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            missing = 0, width - part.shape[1], 0, -len(part) % PANEL
            part = F.pad(part.float(), missing).unflatten(-1, (-1, BLOCK))
            return (*cls.rounded(part), part)

        rows, columns = weight.shape
        return cls._made(rows, columns, lambda own: rounded(weight[own]))

    @classmethod
    @torch.no_grad()
    def kept(cls, codes: Tensor, steps: Tensor) -> Self:
        """Hold codes ``[out, blocks, 32]`` as they are; their steps are rounded to bfloat16.

        Args:
            codes: whole numbers that the form has.
            steps: float32 ``[out, blocks]``.
        """

        def made(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            missing = -len(steps[rows]) % PANEL
            code = F.pad(codes[rows].float(), (0, 0, 0, 0, 0, missing))
            step = F.pad(steps[rows], (0, 0, 0, missing))
            return code, step.bfloat16(), code * step.unsqueeze(-1)

        return cls._made(codes.shape[0], codes.shape[1] * BLOCK, made)

    @classmethod
    def _made(
        cls, rows: int, width: int, made: Callable[[slice], tuple[Tensor, Tensor, Tensor]]
    ) -> Self:
        """Lay out what ``made`` gives of some rows, whole panels: codes, steps, weights."""
        wrong = whole = 0.0

        def fill(first: int, codes: Tensor, scales: Tensor) -> None:
            nonlocal wrong, whole
            for at in range(0, len(codes), _PANELS_AT_ONCE):
                own = slice(at, min(at + _PANELS_AT_ONCE, len(codes)))
                code, scale, weight = made(slice((first + at) * PANEL, (first + own.stop) * PANEL))
                whole += float(weight.square().sum(-1).double().sum())
                off = weight - code * scale.float().unsqueeze(-1)
                wrong += float(off.square_().sum(-1).double().sum())
                codes[own] = cls.stored(code).unflatten(0, (-1, PANEL)).permute(0, 2, 3, 1, 4)
                scales[own] = scale.unflatten(0, (-1, PANEL)).transpose(1, 2)

        codes, scales = cls.filled(rows, width, fill)
        return cls(codes, scales, (rows, width), (wrong / whole) ** 0.5 if whole else 0.0)

    @classmethod
    def filled(cls, rows: int, width: int, fill: Fill) -> Sequence[Tensor]:
        """Return codes and steps of a matrix ``[rows, width]`` as :func:`filled` does."""
        codes, scales = cls._held_shapes(rows, width)
        return filled(fill, (codes, cls._stored_as), (scales, torch.bfloat16))

    @classmethod
    def _held_shapes(cls, rows: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        panels, blocks = -(-rows // PANEL), -(-width // BLOCK)
        groups = BLOCK // 4 * cls.bits // 8
        return (panels, blocks, groups, PANEL, 4), (panels, blocks, PANEL)

    def fills_its_shape(self) -> bool:
        """See :class:`Panels`."""
        fits = (self.codes.shape, self.scales.shape) == self._held_shapes(*self.shape)
        kinds = self.codes.dtype, self.scales.dtype
        return fits and kinds == (self._stored_as, torch.bfloat16)

    def held(self) -> tuple[Tensor, ...]:
        """Return codes and steps."""
        return self.codes, self.scales

    def sample(self, count: int) -> Tensor:
        """Return some codes as they are held."""
        return sampled(self.codes.reshape(-1), count)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield float32 codes ``[out, 32]`` and steps ``[out]`` of each block of columns."""
        for block in range(self.codes.shape[1]):
            codes = self.whole(self.codes[:, block].transpose(1, 2)).flatten(0, 1)
            scales = self.scales[:, block].flatten()
            yield codes[: self.shape[0]], scales[: self.shape[0]].float()

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids [...]`` as float32 ``[..., in]``."""
        panel, row = ids // PANEL, ids % PANEL
        steps = self.scales[panel, :, row].float()
        made = self.whole(self.codes[panel, :, :, row]).mul_(steps.unsqueeze(-1))
        return made.flatten(-2)[..., : self.shape[1]]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``weight x + bias``, float32 ``[..., out]`` of ``x [..., in]``: the reference."""
        codes, steps = code_states(x.float())
        made = x.new_zeros(*x.shape[:-1], self.shape[0], dtype=torch.float32)
        for block, (weight, scale) in enumerate(self.blocks()):
            # Sums of 32 products of two codes are whole numbers below 2^24: exact in float32.
            made += (codes[..., block, :] @ weight.T) * (scale * steps[..., block, None])
        return made if bias is None else made + bias


class Int8Matrix(IntegerMatrix):
    """Weights in 8 bits: codes -127 to 127, int8 as they are."""

    bits, _stored_as = 8, torch.int8

    @staticmethod
    def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round no number by more than half a step of its block.

        A step is the smallest bfloat16 that is not below the block's greatest number over 127.
        """
        most = weight.abs().amax(-1)
        scale = _at_least(most / _LARGEST)
        steps = scale.float().unsqueeze(-1)
        codes = (weight / torch.where(steps == 0, 1.0, steps)).round_()
        finite = most.isfinite()
        return codes.where(finite[..., None], 0.0), scale.where(finite, torch.nan)

    @staticmethod
    def stored(codes: Tensor) -> Tensor:
        """See :class:`IntegerMatrix`: n is 8."""
        return codes.to(torch.int8).unflatten(-1, (-1, 4))

    @staticmethod
    def whole(stored: Tensor) -> Tensor:
        """See :class:`IntegerMatrix`."""
        return stored.flatten(-2).float()


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


# What a block's greatest number may become, before it is cut off at -8: its step is the best of so
# many.
DIVISORS = tuple(6.5 + 0.1875 * number for number in range(16))


class Int4Matrix(IntegerMatrix):
    """Weights in 4 bits, two codes a byte, each 8 too large: the lower half holds a group of four
    columns, the upper half the next one.
    """

    bits, _stored_as = 4, torch.uint8

    @staticmethod
    def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round by the step, of a few, with the least squared error over the block's weights.

        The number of the greatest size becomes a negative code, whatever its sign: there is one
        more of them. A step is a bfloat16, and negative where that number is positive.
        """
        columns = weight.movedim(-1, 0).contiguous()
        low, high = columns.amin(0), columns.amax(0)
        greatest = torch.where(high >= -low, high, low)
        least, scales = torch.full_like(low, torch.inf), torch.zeros_like(low)
        inverses = torch.zeros_like(low)
        for divisor in DIVISORS:
            # Tensors divided, as in code_states.
            step = (greatest / torch.full_like(low, -divisor)).bfloat16().float()
            inverse = torch.where(step.abs() >= _LEAST_CODED, torch.ones_like(step) / step, 0.0)
            error = _squares(columns - _codes(columns, inverse) * step)
            better = (error < least) | (divisor == DIVISORS[0])
            scales, inverses = step.where(better, scales), inverse.where(better, inverses)
            least = error.where(better, least)
        finite = low.isfinite() & high.isfinite()
        codes = _codes(columns, inverses).where(finite, 0.0).movedim(0, -1)
        return codes, scales.where(finite, torch.nan).bfloat16()

    @staticmethod
    def stored(codes: Tensor) -> Tensor:
        """See :class:`IntegerMatrix`: n is 4."""
        low, high = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2, 4)).unbind(-2)
        return low | high << 4

    @staticmethod
    def whole(stored: Tensor) -> Tensor:
        """See :class:`IntegerMatrix`."""
        return torch.stack((stored & 15, stored >> 4), -2).flatten(-3).float() - 8


def _codes(columns: Tensor, inverse: Tensor) -> Tensor:
    return (columns * inverse).round_().clamp_(-8, 7)


def _squares(off: Tensor) -> Tensor:
    """Sum the squares of float32 ``[32, ...]`` one by one, as C does, bit for bit.

    Of each number the first 12 bits count, so that its square is exact, fused with a sum or not.
    """
    squares = (off.view(torch.int32) & ~0xFFF).view(torch.float32).square_()
    made = squares[0]
    for one in squares[1:]:
        made += one
    return made
