"""Forms of the cache: in how many bits keys and values lie in their pages.

Each entry is rounded by itself when it is stored, its key and its value apart, with a scale of its
own: entries are evicted and moved one at a time, so no two of them can share one. Every query
reads an entry as it is stored, also in the pass that brings it.

In a rotated form keys and values lie in the cache multiplied with a Hadamard matrix over head_dim,
which spreads outliers over all features; so do the recent queries that scorers read. Attention is
computed there, and its output is turned back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv.engine.config import KV_FORMS
from mmkv.engine.errors import PolicyError


@dataclass(frozen=True)
class Codec:
    """How the D features of one key or value become codes and back.

    Attributes:
        bits: of a code. 0: the model's dtype; 16: bfloat16; 8: whole numbers times a scale,
            -127 to 127; 4: 0 to 15 times a scale, above a zero point.
    """

    bits: int

    @property
    def scales(self) -> int:
        """Count the float16 numbers beside the codes: a scale, and a zero point for 4 bits."""
        return {8: 1, 4: 2}.get(self.bits, 0)

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Return the dtype of the codes, for a model of dtype ``model``."""
        return {0: model, 16: torch.bfloat16, 8: torch.int8, 4: torch.uint8}[self.bits]

    def width(self, head_dim: int) -> int:
        """Count the numbers that hold ``head_dim`` codes: two codes of 4 bits share a byte."""
        return head_dim // 2 if self.bits == 4 else head_dim

    def head_dim(self, width: int) -> int:
        """Return what :meth:`width` makes ``width`` of."""
        return width * 2 if self.bits == 4 else width

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round vectors ``x [..., D]`` to codes ``[..., width]`` and scales float16 ``[..., n]``.

        Scale and zero point are rounded to the side on which the codes reach over all of the
        vector, so no feature is off by more than half a step. Of a vector with a number that is not
        finite, or too large for float16 to hold scale or zero point, nothing finite comes back.
        """
        if not self.scales:
            return x.bfloat16() if self.bits else x, x.new_zeros((*x.shape[:-1], 0)).half()
        x = x.float()
        low, high = x.aminmax(dim=-1, keepdim=True)
        if self.bits == 8:
            scale = _at_least(torch.maximum(-low, high) / 127)
            return _steps(x, scale).clamp(-127, 127).to(torch.int8), scale
        zero = -_at_least(-(low + 0.0))  # not -0
        scale = _at_least((high - zero.float()) / 15)
        steps = _steps(x - zero.float(), scale).clamp(0, 15).to(torch.uint8)
        first, second = steps.chunk(2, -1)  # feature i beside feature i + D / 2
        return first | second << 4, torch.cat([scale, zero], -1)

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors ``[..., D]`` that codes and scales stand for."""
        if not self.scales:
            return codes.to(dtype)
        scale = scales[..., :1].float()
        if self.bits == 8:
            return (codes.float() * scale).to(dtype)
        steps = torch.cat([codes & 15, codes >> 4], -1)
        return (scales[..., 1:].float() + steps.float() * scale).to(dtype)


def _at_least(x: Tensor) -> Tensor:
    """Return the smallest float16 that is not below ``x``, infinity among them."""
    near = x.half()
    bits = near.view(torch.int16)
    up = torch.where(bits < 0, bits - 1, bits + 1)  # of a negative number: towards zero
    return torch.where(near.float() < x, up.view(torch.float16), near)


def _steps(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale`` in whole steps, 0 where the scale is 0 or that is not a number."""
    return (x / scale.float().masked_fill(scale == 0, torch.inf)).round().nan_to_num(0.0)


@dataclass(frozen=True)
class KVForm:
    """How the cache holds keys and values.

    Attributes:
        name: as ``--kv`` takes it; key, value: their codecs; rotated: see above.
    """

    name: str
    key: Codec
    value: Codec
    rotated: bool = False

    @property
    def plain(self) -> bool:
        """Whether keys and values lie there in the model's dtype."""
        return not (self.key.bits or self.value.bits)

    @property
    def most_moves(self) -> int | None:
        """Return how often a key may move (:mod:`mmkv.engine.compaction`) and stay about as near
        as one that is rounded once; None: as often as a session will see.

        It is rounded again each time. After 16 times keys of 4 bits are off by 4 times as much as
        one that is rounded once, after 64 by all they are; those of 8 bits and bfloat16 by a
        tenth and a hundredth (tests/engine/test_compaction.py).
        """
        return 16 if self.key.bits == 4 else None

    @property
    def settles(self) -> int | None:
        """Return after how many moves a key stays as long as the rest fits behind it; None: never.

        After 4 times keys of 4 bits are off by twice as much as one that is rounded once.
        """
        return 4 if self.key.bits == 4 else None

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, head_dim: int) -> KVForm:
        """Return the form of that name for a model of ``dtype`` and ``head_dim``.

        Raises:
            PolicyError: codes of 4 bits come in pairs, and ``head_dim`` is odd.
        """
        form = FORMS[name]
        if head_dim % 2 and 4 in (form.key.bits, form.value.bits):
            raise PolicyError(
                f"kv {name!r} packs features in pairs, and this model's head_dim is {head_dim}; "
                "choose int8"
            )
        if name == "bf16" and dtype == torch.bfloat16:
            return replace(form, key=Codec(0), value=Codec(0))
        return form

    def rotate(self, x: Tensor) -> Tensor:
        """Turn vectors ``[..., D]`` of the model to those of the cache, or back, in their dtype."""
        return hadamard(x).to(x.dtype) if self.rotated else x


def hadamard(x: Tensor) -> Tensor:
    """Multiply ``x [..., D]`` with an orthonormal Hadamard matrix, its own inverse, in float32.

    Where D is no power of two, features are turned in blocks of the largest that divides it. Sums
    are made by butterflies from neighbours outwards on a CPU: C makes the same, bit for bit.
    """
    size = x.shape[-1] & -x.shape[-1]
    if x.is_cuda:  # one launch instead of dozens
        return (x.float().unflatten(-1, (-1, size)) @ _matrix(size, x.device)).flatten(-2)
    y, step = x.float().unflatten(-1, (-1, size)), 1
    while step < size:
        first, second = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        step *= 2
    return (y * size**-0.5).flatten(-2)


@functools.cache
def _matrix(size: int, device: torch.device) -> Tensor:
    return hadamard(torch.eye(size, device="cpu")).to(device)


class EncodedKV:
    """Keys or values where they lie; indexed like their tensor, it gives them in ``dtype``.

    In a rotated form they come rotated, as attention wants them.
    """

    def __init__(self, codes: Tensor, scales: Tensor, codec: Codec, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.codec, self.dtype = codes, scales, codec, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., D]``, as of what it gives."""
        return (*self.codes.shape[:-1], self.codec.head_dim(self.codes.shape[-1]))

    def __getitem__(self, index: Tensor) -> Tensor:
        return self.codec.decode(self.codes[index], self.scales[index], self.dtype)

    def flatten(self, start: int, end: int) -> EncodedKV:
        """Flatten leading dimensions, as of ``[pages, P, D]`` to ``[slots, D]``."""
        codes, scales = (x.flatten(start, end) for x in (self.codes, self.scales))
        return EncodedKV(codes, scales, self.codec, self.dtype)


AUTO = KVForm("auto", Codec(0), Codec(0))
FORMS: dict[str, KVForm] = {
    form.name: form
    for form in (
        AUTO,
        KVForm("bf16", Codec(16), Codec(16)),
        KVForm("int8", Codec(8), Codec(8)),
        KVForm("k8v4", Codec(8), Codec(4), rotated=True),
        KVForm("int4", Codec(4), Codec(4), rotated=True),
    )
}
assert tuple(FORMS) == KV_FORMS
