"""RMSNorm with the residual sum before it, and the gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton


def rms_norm_reference(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``residual`` and normalise over the features.

    Rounding is the eager decoder's: the sum is rounded to the dtype before anything reads it,
    the normed value once, after the gain. The kernel's sum therefore agrees to the
    last bit, and the normed value to one rounding (the squares are summed in another order).

    Args:
        x: ``[T, d]`` in the model's dtype, rows contiguous.
        residual: ``[T, d]`` in the same dtype, rows contiguous, or None.
        gain: ``[d]`` in the same dtype or float32; eps: added to the mean square.

    Returns:
        normed ``[T, d]`` and the sum ``[T, d]`` (``x`` itself without a residual).
    """
    total = x if residual is None else residual + x
    if gain.dtype != total.dtype:
        return F.rms_norm(total.float(), gain.shape, gain, eps).to(total.dtype), total
    return F.rms_norm(total, gain.shape, gain, eps), total


rms_norm = in_triton(rms_norm_reference, "x")


def gated_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Compute ``activation(gate) * up``, ``[T, f]``.

    As in the eager decoder the activation is rounded to the dtype before it is multiplied, and
    the product again.

    Args:
        gate_up: ``[T, 2 f]``, the gate first, rows contiguous.
        activation: ``silu`` or ``gelu_tanh``.
    """
    gate, up = gate_up.chunk(2, -1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


gated = in_triton(gated_reference, "gate_up")
