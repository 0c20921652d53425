"""The products of a mixture's chosen experts, with nothing read back to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.model.mixture import grouped, whole_rows
from mmkv.engine.system import on_device

# Tokens of a step, in which reading matrices is all that takes time. More are a prompt.
_STEP = 256

experts_reference = grouped


def experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute :func:`mmkv.engine.model.mixture.grouped`.

    In Triton each chosen expert's matrices are read once for 16 of its tokens (or 64). Prompts are
    torch's where its grouped product waits for nothing, and all that asks for gradients is.
    """
    asked = torch.is_grad_enabled() and x.requires_grad
    if not on_triton(x) or asked or (len(x) > _STEP and _waits_for_nothing(x, gate_up, down)):
        return grouped(x, ids, gate_up, down)
    from mmkv.engine.backends.cuda.kernels import experts_triton

    with on_device(x.device):
        return experts_triton.experts(x, ids, gate_up, down)


def _waits_for_nothing(x: Tensor, *weights: Tensor) -> bool:
    """Return whether torch's grouped product reads no sizes back: bfloat16, of capability 9, 10."""
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    return x.dtype == torch.bfloat16 and major in (9, 10) and all(map(whole_rows, weights))
