"""The gated delta rule and the convolution before it: :mod:`mmkv.engine.model.delta` on a GPU.

Steps skip idle batch slots, whose ``slot`` is -1: what is returned of them is not defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.model import delta


def causal_conv_reference(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`mmkv.engine.model.delta.causal_conv`; in Triton the state is copied after."""
    return delta.causal_conv(x, weight, state)


def conv_step_reference(x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """Compute :func:`mmkv.engine.model.delta.conv_step` of the batch slots that are not idle."""
    live, out = slot >= 0, torch.zeros_like(x)
    out[live] = delta.conv_step(x[live], weight, states, slot[live])
    return out


def delta_step_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: Tensor
) -> Tensor:
    """Compute :func:`mmkv.engine.model.delta.delta_step` of the batch slots that are not idle."""
    live, out = slot >= 0, torch.zeros_like(v)
    q, k, v, g, beta = (part[live] for part in (q, k, v, g, beta))
    out[live] = delta.delta_step(q, k, v, g, beta, states, slot[live])
    return out


def delta_chunk_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute :func:`mmkv.engine.model.delta.delta_chunk`."""
    return delta.delta_chunk(q, k, v, g, beta, state)


causal_conv = in_triton(causal_conv_reference, "x", learns=True)
conv_step = in_triton(conv_step_reference, "x", learns=True)
delta_step = in_triton(delta_step_reference, "v", learns=True)
delta_chunk = in_triton(delta_chunk_reference, "v", learns=True)
