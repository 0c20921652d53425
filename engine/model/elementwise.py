"""RMSNorm, RoPE and the gate of the MLP: what a decoder does between its products."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.rope import rotate


class Elementwise(Protocol):
    """Computes what is between the products; a token's numbers do not depend on other tokens."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Compute the RMSNorm of ``x [T, d]`` with ``gain [d]``."""
        ...

    def turned(
        self, heads: Tensor, gain: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Norm each head of ``heads [T, R, D]`` if there is ``gain [R, D]``, then rotate it.

        The result may lie in the memory of ``heads``.

        Args:
            rope: cos and signed sin ``[T, rot]`` (:class:`mmkv.engine.model.rope.Rope`).
        """
        ...

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        """Compute ``activation(gate) * up`` ``[T, f]`` of ``gate_up [T, 2 f]``, the gate first.

        Args:
            activation: ``silu`` or ``gelu_tanh``.
        """
        ...


class TorchElementwise:
    """Computes in torch: the reference."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        if gain.dtype != x.dtype:
            return F.rms_norm(x.float(), gain.shape, gain, eps).to(x.dtype)
        return F.rms_norm(x, gain.shape, gain, eps)

    def turned(
        self, heads: Tensor, gain: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        return rotate(normed_heads(heads, gain, eps), *rope)

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        return F.silu(gate) * up


def normed_heads(heads: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Compute the RMSNorm of each head of ``heads [T, R, D]`` with ``gain [R, D]``, None: none."""
    if gain is None:
        return heads
    if gain.dtype != heads.dtype:
        return (F.rms_norm(heads.float(), heads.shape[-1:], eps=eps) * gain).to(heads.dtype)
    return F.rms_norm(heads, heads.shape[-1:], eps=eps) * gain
