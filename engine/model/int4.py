"""Weights in 4 bits: codes -8 to 7 in blocks of 32 along a row, a step for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.model.int8 import IntegerMatrix

# What a block's greatest number may become, before it is cut off at -8: its step is the best of so
# many.
DIVISORS = tuple(6.5 + 0.1875 * number for number in range(16))
_LEAST_STEP = 1e-30  # LEAST_CODED of native.h: below it all codes are 0


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
            inverse = torch.where(step.abs() >= _LEAST_STEP, torch.ones_like(step) / step, 0.0)
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
