"""SwiGLU: the gated activation between the two matrix products of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.device import on_device


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of ``gate_up [T, 2 f]`` (gate first, rows contiguous): ``[T,
    f]``.

    As in the eager decoder the activation is rounded to the dtype before it is multiplied, and
    the product again.
    """
    if on_triton(gate_up):
        from mmkv.engine.backends.cuda.kernels import swiglu_triton

        with on_device(gate_up.device):
            return swiglu_triton.swiglu(gate_up)
    return swiglu_reference(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute :func:`swiglu` in torch, as the reference."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
