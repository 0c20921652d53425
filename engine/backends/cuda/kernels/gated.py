"""The gated activation between the two matrix products of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.device import on_device


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Compute ``activation(gate) * up``, ``[T, f]``.

    As in the eager decoder the activation is rounded to the dtype before it is multiplied, and
    the product again.

    Args:
        gate_up: ``[T, 2 f]``, the gate first, rows contiguous.
        activation: ``silu`` or ``gelu_tanh``.
    """
    if on_triton(gate_up):
        from mmkv.engine.backends.cuda.kernels import gated_triton

        with on_device(gate_up.device):
            return gated_triton.gated(gate_up, activation)
    return gated_reference(gate_up, activation)


def gated_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Compute :func:`gated` in torch, as the reference."""
    gate, up = gate_up.chunk(2, -1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up
