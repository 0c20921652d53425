"""The gated delta rule and the convolution before it: :mod:`mmkv.engine.model.delta` on a GPU.

Steps skip idle batch slots, whose ``slot`` is -1: what is returned of them is not defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.model import delta
from mmkv.engine.system import on_device


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`mmkv.engine.model.delta.causal_conv`; in Triton the state is copied after."""
    if _runs(x):
        from mmkv.engine.backends.cuda.kernels import delta_triton

        with on_device(x.device):
            return delta_triton.causal_conv(x, weight, state)
    return causal_conv_reference(x, weight, state)


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """Compute :func:`mmkv.engine.model.delta.conv_step` of the batch slots that are not idle."""
    if _runs(x):
        from mmkv.engine.backends.cuda.kernels import delta_triton

        with on_device(x.device):
            return delta_triton.conv_step(x, weight, states, slot)
    return conv_step_reference(x, weight, states, slot)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: Tensor
) -> Tensor:
    """Compute :func:`mmkv.engine.model.delta.delta_step` of the batch slots that are not idle."""
    if _runs(v):
        from mmkv.engine.backends.cuda.kernels import delta_triton

        with on_device(v.device):
            return delta_triton.delta_step(q, k, v, g, beta, states, slot)
    return delta_step_reference(q, k, v, g, beta, states, slot)


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute :func:`mmkv.engine.model.delta.delta_chunk`, in Triton token after token."""
    if _runs(v):
        from mmkv.engine.backends.cuda.kernels import delta_triton

        with on_device(v.device):
            return delta_triton.delta_chunk(q, k, v, g, beta, state)
    return delta_chunk_reference(q, k, v, g, beta, state)


def _runs(x: Tensor) -> bool:
    """Return whether Triton computes this: nobody asks for gradients, of which it has none."""
    return on_triton(x) and not x.requires_grad


causal_conv_reference = delta.causal_conv
delta_chunk_reference = delta.delta_chunk


def conv_step_reference(x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """Compute :func:`conv_step` in torch, as the reference."""
    live, out = slot >= 0, torch.zeros_like(x)
    out[live] = delta.conv_step(x[live], weight, states, slot[live])
    return out


def delta_step_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: Tensor
) -> Tensor:
    """Compute :func:`delta_step` in torch, as the reference."""
    live, out = slot >= 0, torch.zeros_like(v)
    q, k, v, g, beta = (part[live] for part in (q, k, v, g, beta))
    out[live] = delta.delta_step(q, k, v, g, beta, states, slot[live])
    return out
