"""Entries in fewer bits: the rounding of keys and values, written anew, and its check.

``docs/reference/kv-forms.md`` has the definition. A number halfway between two steps may go to
either side,
and a scale between two numbers of float16, too: keys of two programs differ in their last bits. So
:class:`Quantiser` takes over what the engine stored once it has found it to be right, feature by
feature, for some input within 1e-5 of its own.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

# Form -> bits of keys, bits of values, whether they are rotated.
FORMS = {
    "bf16": (16, 16, False),
    "int8": (8, 8, False),
    "k8v4": (8, 4, True),
    "int4": (4, 4, True),
}
NEAR = 1e-5  # relative: what keys of two programs may differ by
HALF = 0.502  # of a step, and what NEAR makes of 127 steps


def hadamard(size: int) -> np.ndarray:
    """Orthonormal, in blocks of the largest power of two that divides ``size``."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.kron([[1, 1], [1, -1]], block)
    return np.kron(np.eye(size // len(block)), block) / np.sqrt(len(block))


def half_from(x: np.ndarray, upwards: bool) -> np.ndarray:
    """The nearest float16 on one side of ``x``, or ``x`` itself."""
    near = x.astype(np.float16)
    wrong = near.astype(np.float64) < x if upwards else near.astype(np.float64) > x
    beside = np.nextafter(near, np.float16(np.inf if upwards else -np.inf))
    return np.where(wrong, beside, near).astype(np.float64)


def grid(low: np.ndarray, high: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Step and lowest number ``[...]`` for vectors between ``low`` and ``high``."""
    if bits == 8:
        step = half_from(np.maximum(abs(low), abs(high)) / 127, upwards=True)
        return step, -127 * step
    zero = half_from(low, upwards=False)
    return half_from((high - zero) / 15, upwards=True), zero


def is_rounded(x: np.ndarray, stored: np.ndarray, bits: int) -> np.ndarray:
    """Whether ``stored [..., D]`` is a rounding of ``x [..., D]``, per vector."""
    if bits == 16:
        return is_bfloat16(x, stored)
    low, high = x.min(-1), x.max(-1)
    found = np.zeros(low.shape, dtype=bool)
    for a, b in itertools.product((0, NEAR, -NEAR), repeat=2):
        step, zero = grid(low * (1 + a), high * (1 + b), bits)
        size = np.where(step > 0, step, 1)[..., None]
        code = (stored - zero[..., None]) / size
        whole = abs(code - code.round()) < 1e-2
        inside = (code > -0.01) & (code < 2**bits - 0.99)
        found |= (whole & inside & (abs(stored - x) <= HALF * size)).all(-1)
    return found


def is_bfloat16(x: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Whether ``stored`` holds numbers of 8 significant bits, each the nearest to its ``x``."""
    fraction, exponent = np.frexp(stored)
    short = fraction * 2**8 == np.round(fraction * 2**8)
    unit = np.ldexp(1.0, exponent - 8)
    apart = NEAR * abs(x).max(-1, keepdims=True)
    return (short & (abs(stored - x) <= 0.5 * unit + apart)).all(-1)


class Quantiser:
    """Rounds what a simulation stores, as the engine has just done.

    Attributes:
        theirs: keys and values ``[H, T, D]`` of each layer in turn, as the engine holds them.
        rounded: vectors that were found right.
    """

    def __init__(self, form: str) -> None:
        self.key_bits, self.value_bits, self.rotated = FORMS[form]
        self.theirs: list[tuple[Tensor, Tensor]] = []
        self.rounded = 0

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Round keys and values ``[H, T, D]`` of one layer's new entries."""
        keys, values = self.theirs.pop(0)
        return self._take(key, keys, self.key_bits), self._take(value, values, self.value_bits)

    def _take(self, own: Tensor, theirs: Tensor, bits: int) -> Tensor:
        turn = hadamard(own.shape[-1]) if self.rotated else np.eye(own.shape[-1])
        x, stored = own.double().numpy() @ turn, theirs.double().numpy()
        assert x.shape == stored.shape
        right = is_rounded(x, stored, bits)
        assert right.all(), (
            f"{(~right).sum()} of {right.size} vectors are not rounded to {bits} bits"
        )
        self.rounded += right.size
        return torch.from_numpy(stored @ turn.T).to(own.dtype)
