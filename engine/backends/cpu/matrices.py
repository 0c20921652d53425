"""Matrices as C reads them: rounded to 8 bits, laid out in panels, described by their addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import Linear, library
from mmkv.engine.model.bf16 import Bf16Matrix
from mmkv.engine.model.int8 import Int8Matrix
from mmkv.engine.model.product import Matrix, narrowed

# Multiplications that a further thread is worth: some 10 microseconds of one.
PER_THREAD = 2**20
# Copies in bfloat16 come on top of weights that a transformers model holds in float32.
_MOST_BF16_BYTES = 2**31


def rounded(weight: Tensor) -> Int8Matrix:
    """Round a matrix to 8 bits like :meth:`Int8Matrix.of`, to the same codes, in C.

    It runs there for float32 and bfloat16 weights on the CPU.
    """
    found, half = library(), weight.dtype == torch.bfloat16
    if isinstance(found, str) or not (half or weight.dtype == torch.float32):
        return Int8Matrix.of(weight)
    weight, (rows, width) = weight.contiguous(), weight.shape
    codes, scales = Int8Matrix.empty(rows, width)
    sums, threads = torch.empty(len(codes), 2, dtype=torch.float64), torch.get_num_threads()
    places = (each.data_ptr() for each in (codes, scales, sums))
    threads = min(threads, 1 + weight.numel() // PER_THREAD)
    found.mmkv_round(weight.data_ptr(), half, rows, width, *places, threads)
    wrong, whole = sums.sum(0).tolist()
    return Int8Matrix(codes, scales, (rows, width), (wrong / whole) ** 0.5 if whole else 0.0)


def packed(weight: Tensor) -> Bf16Matrix:
    """Lay out a bfloat16 matrix like :meth:`Bf16Matrix.of`, in C where there is a library."""
    found = library()
    if isinstance(found, str):
        return Bf16Matrix.of(weight)
    weight, (rows, width) = weight.contiguous(), weight.shape
    panels = Bf16Matrix.empty(rows, width)
    threads = min(torch.get_num_threads(), 1 + weight.numel() // PER_THREAD)
    found.mmkv_pack(weight.data_ptr(), rows, width, panels.data_ptr(), threads)
    return Bf16Matrix(panels, (rows, width))


class Bf16Copies:
    """Copies of matrices in bfloat16, as long as nothing is lost and they stay small together."""

    def __init__(self) -> None:
        self.kept: list[Bf16Matrix] = []
        self._room = _MOST_BF16_BYTES

    def of(self, weight: Tensor) -> Bf16Matrix | None:
        """Return the copy; None where there is none."""
        if weight.numel() * 2 > self._room:
            return None
        short = narrowed(weight)
        if short is weight:
            return None
        copied = packed(short)
        self._room -= copied.nbytes
        self.kept.append(copied)
        return copied


def linear(weight: Matrix, bias: Tensor | None = None, bf16: Bf16Copies | None = None) -> Linear:
    """Describe a matrix and its bias to C, which reads them where they lie."""
    of_bias = None if bias is None else bias.data_ptr()
    if isinstance(weight, Int8Matrix):
        pointers = weight.codes.data_ptr(), weight.scales.data_ptr()
        return Linear(None, of_bias, None, *pointers, *weight.shape)
    short = weight if isinstance(weight, Bf16Matrix) else None if bf16 is None else bf16.of(weight)
    if short is not None:
        return Linear(None, of_bias, short.panels.data_ptr(), None, None, *weight.shape)
    return Linear(weight.data_ptr(), of_bias, None, None, None, *weight.shape)
