"""Rotary position embedding: one axis, or M-RoPE (t, h, w)."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.model.spec import RopeSpec


class Rope:
    """cos/sin of a checkpoint's rotary embedding.

    ``sin`` comes signed (first half negated), so that rotating is
    ``x * cos + roll(x, rot/2) * sin``: no negation and no concatenation per layer.
    """

    def __init__(self, spec: RopeSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.device, self.dtype = device, dtype
        self._inv_freq = {False: spec.inv_freq.to(device)}
        if spec.long_inv_freq is not None:
            self._inv_freq[True] = spec.long_inv_freq.to(device)
        self._axes = torch.tensor(spec.mrope_axes or (), device=device)

    def at(self, positions: Tensor, long: bool = False) -> tuple[Tensor, Tensor]:
        """Compute cos and signed sin at the rope positions ``[A, T]`` (A = 1 or 3), each ``[T,
        rot]``.
        """
        freqs = positions[..., None].float() * self._inv_freq[long]
        if self.spec.mrope_axes and positions.shape[0] == 3:
            return self._finish(freqs.gather(0, self._axes.expand(1, *freqs.shape[1:]))[0])
        return self._finish(freqs[0])

    def text(self, positions: Tensor, long: bool = False) -> tuple[Tensor, Tensor]:
        """As :meth:`at` for text tokens at ``positions [T]``, whose axes are all equal.

        Nothing is tabulated: a table would grow with the sequence, and bounded memory with it.
        """
        return self._finish(positions[:, None].float() * self._inv_freq[long])

    def _finish(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = angle.cos() * self.spec.scale, angle.sin() * self.spec.scale
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return cos.to(self.dtype), sin.to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [T, heads, D]`` by ``cos, sin [T, rot]``; features past ``rot`` pass through."""
    cos, sin = cos[:, None], sin[:, None]
    rot = cos.shape[-1]
    if rot == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rot // 2, -1), sin)
    turned = x[..., :rot]
    turned = torch.addcmul(turned * cos, turned.roll(rot // 2, -1), sin)
    return torch.cat([turned, x[..., rot:]], -1)
