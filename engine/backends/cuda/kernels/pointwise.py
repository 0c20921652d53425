"""What lies between products and attention: norms, RoPE, the MLP's activation, parts merged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.model.elementwise import TorchElementwise, normed_heads
from mmkv.engine.model.rope import rotate


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


rms_norm = in_triton(rms_norm_reference, "x", learns=True)


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


gated = in_triton(gated_reference, "gate_up", learns=True)


def turned_reference(
    heads: Tensor, gain: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """Compute :meth:`mmkv.engine.model.elementwise.Elementwise.turned`, rounded where torch does.

    Args:
        heads: ``[T, R, D]`` in the model's dtype, a token's heads side by side.
        gain: ``[R, D]`` in the same dtype or float32, or None; rope: in the same dtype.

    Returns:
        ``[T, R, D]``, contiguous in Triton.
    """
    return rotate(normed_heads(heads, gain, eps), *rope)


turned = in_triton(turned_reference, "heads", learns=True)


def merged_reference(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> Tensor:
    """Combine attention over two disjoint sets of keys.

    At least one side must be non-empty (lse above -inf) for every query.

    Args:
        left, right: outputs ``[Hq, C, D]`` of one dtype, a head's features side by side.
        left_lse, right_lse: log-sum-exp ``[Hq, C]`` float32.

    Returns:
        outputs ``[Hq, C, D]``; in Triton the heads of a query lie together.
    """
    lse = torch.logaddexp(left_lse, right_lse)
    a, b = (left_lse - lse).exp()[..., None], (right_lse - lse).exp()[..., None]
    return (left.float() * a).add_(right.float() * b).to(left.dtype)


merged = in_triton(merged_reference, "left")


class TritonElementwise(TorchElementwise):
    """Computes in Triton on a GPU, where no gradient is asked for."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, gain, eps)[0]

    def turned(
        self, heads: Tensor, gain: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        return turned(heads, gain, eps, rope)

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        return gated(gate_up, activation)
