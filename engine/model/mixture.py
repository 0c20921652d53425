"""Mixture of experts: each token goes through a few of many SwiGLU MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.spec import Routing

# On a GPU, tokens of a step up to which the chosen matrices are gathered. More tokens share
# experts: there, reading each matrix once is worth the sorting.
_GATHERED = 16
# The same, where torch's grouped product would wait for the GPU: more is a prompt, not a step.
_STEP = 256


def route(x: Tensor, router: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        x: ``[T, d]``. router: ``[E, d]``.

    Returns:
        ids ``[T, k]`` and their weights ``[T, k]`` in the dtype of ``x``.
    """
    share = F.linear(x, router).softmax(-1, dtype=torch.float32)
    weight, ids = share.topk(routing.chosen)
    if routing.normalized:
        weight = weight / weight.sum(-1, keepdim=True)
    return ids, weight.to(x.dtype)


def mixture(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    captured: bool = False,
) -> Tensor:
    """Compute the output ``[T, d]`` of a sparse MLP.

    Args:
        x: ``[T, d]``, behind the norm.
        router: ``[E, d]``. gate_up: ``[E, 2 f, d]``, gate first. down: ``[E, d, f]``.
        captured: nothing may be read back to the host, whatever T, dtype and GPU: torch's grouped
            product does for some. Otherwise, on a GPU, nothing is for T up to 256.

    Where nothing is read back, matrices of the chosen experts are copied, of 16 tokens at a time:
    up to 16 k of them lie in memory twice (1.1 GiB for Qwen3-30B-A3B in bfloat16).
    """
    ids, weight = route(x, router, routing)
    many = _STEP if _reads_back(x, gate_up, down) else _GATHERED
    if captured or (x.device.type != "cpu" and x.shape[0] <= many):
        parts = zip(x.split(_GATHERED), ids.split(_GATHERED), strict=True)
        made = torch.cat([gathered(*part, gate_up, down) for part in parts])
    else:
        made = grouped(x, ids, gate_up, down)
    return (made * weight[..., None]).sum(1)


def gathered(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the outputs ``[T, k, d]`` of the experts ``ids [T, k]`` by copies of their matrices.

    For few tokens on a GPU: the same few kernels, whatever the number of experts.
    """
    flat = ids.flatten()
    twice = x[:, None].expand(-1, ids.shape[1], -1).reshape(len(flat), x.shape[1], 1)
    gate, up = torch.bmm(gate_up[flat], twice).chunk(2, 1)
    return torch.bmm(down[flat], F.silu(gate) * up).view(*ids.shape, x.shape[1])


def grouped(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the same with the tokens of each expert side by side, so that matrices are not
    copied.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    experts = torch.arange(gate_up.shape[0], device=ids.device)
    ends = torch.searchsorted(flat[order], experts, right=True).int()
    wide = _grouped_product(x[order // ids.shape[1]], gate_up, ends)
    gate, up = wide.chunk(2, -1)
    narrow = _grouped_product(F.silu(gate) * up, down, ends)
    return narrow[order.argsort()].view(*ids.shape, x.shape[1])


def _reads_back(x: Tensor, *weights: Tensor) -> bool:
    """Return whether :func:`grouped` may read sizes back to the host.

    torch's CUDA kernel, which does not, is for bfloat16 on compute capability 9 and 10.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return True
    major, _ = torch.cuda.get_device_capability(x.device)
    return major not in (9, 10) or not all(map(_whole_rows, weights))


def _whole_rows(weights: Tensor) -> bool:
    """Return whether all rows have whole 16 bytes, which torch's grouped product asks for."""
    return not any(width * weights.element_size() % 16 for width in weights.shape[1:])


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute ``x [S, i]`` by ``weights [E, o, i]``; expert e has the rows up to ``ends[e]``."""
    if _whole_rows(weights):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    # Real models have whole rows.
    rows = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(row, weight) for row, weight in zip(rows, weights, strict=True)])
