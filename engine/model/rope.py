"""Rotary position embedding: one axis, or M-RoPE (t, h, w)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmkv.engine.model.spec import RopeSpec


class Rope:
    """cos/sin of a checkpoint's rotary embedding.

    ``sin`` comes signed (first half negated), so that rotating is
    ``x * cos + roll(x, rot/2) * sin``: no negation and no concatenation per layer.

    Args:
        local: the embedding of the layers that have their own, or None. Its angles then stand
            behind the others': cos and sin are ``[T, 2 rot]``.
        local_layers: of each layer with entries, whether it has that one; empty: none has.
    """

    def __init__(
        self,
        spec: RopeSpec,
        device: torch.device,
        dtype: torch.dtype,
        local: RopeSpec | None = None,
        local_layers: Sequence[bool] = (),
    ) -> None:
        self.spec, self._local, self._local_layers = spec, local, local_layers
        self._local_freq = None if local is None else local.inv_freq.to(device)
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
        return self._both(freqs[0], positions[0])

    def text(self, positions: Tensor, long: bool = False) -> tuple[Tensor, Tensor]:
        """As :meth:`at` for text tokens at ``positions [T]``, whose axes are all equal.

        Nothing is tabulated: a table would grow with the sequence, and bounded memory with it.
        """
        return self._both(positions[:, None].float() * self._inv_freq[long], positions)

    def ahead(
        self,
        positions: Tensor,
        known: Tensor,
        count: int,
        layers: int,
        long: bool = False,
        doubling: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute how a vector rotated at its position turns to the ``count`` positions to come.

        These follow the largest of the known positions, on all axes alike, as text does. The turn
        is the mean of the turns to each of them, and so shortens what it turns.

        Args:
            positions: ``[A, w]`` int64; known: bool ``[w]``, which of them count.
            doubling: of the positions to come, the 1st, 2nd, 4th and so on alone.

        Returns:
            of each of ``layers`` layers with entries, cos and signed sin ``[w, rot]`` float32.
        """
        last = positions.masked_fill(~known, -1).amax()
        back = (last - positions).double()
        if doubling:
            steps = 2 ** torch.arange(count.bit_length(), device=positions.device).double()
        else:
            steps = torch.arange(1, count + 1, device=positions.device).double()
        made = {}
        for local in {False, *self._local_layers}:
            freq = self._local_freq if local else self._inv_freq[long]
            assert freq is not None
            freq = freq.double()
            own = back[:1].expand(freq.numel(), -1)
            if self.spec.mrope_axes and len(back) == 3 and not local:
                own = back[self._axes]
            angle, each = own.T * freq, steps[:, None] * freq
            cos, sin = angle.cos(), angle.sin()
            mean_cos, mean_sin = each.cos().mean(0), each.sin().mean(0)
            cos, sin = cos * mean_cos - sin * mean_sin, sin * mean_cos + cos * mean_sin
            cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
            made[local] = cos.float(), sin.float()
        return [made[local] for local in self._local_layers or (False,) * layers]

    def bands(self, vectors: Tensor) -> Tensor:
        """Compute :meth:`mmkv.engine.policies.base.CacheView.bands`."""
        half = self._inv_freq[False].numel()
        pairs = torch.hypot(vectors[..., :half], vectors[..., half : 2 * half])
        return torch.cat([pairs, vectors[..., 2 * half :].abs()], -1)

    def _both(self, angle: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        made = self._finish(angle)
        if self._local is None or self._local_freq is None:
            return made
        own = self._finish(positions[:, None].float() * self._local_freq, self._local.scale)
        return torch.cat([made[0], own[0]], -1), torch.cat([made[1], own[1]], -1)

    def _finish(self, angle: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        scale = self.spec.scale if scale is None else scale
        cos, sin = angle.cos() * scale, angle.sin() * scale
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
