"""Mixture of experts: each token goes through a few of many SwiGLU MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.spec import Routing

# On a GPU, tokens of a step up to which the chosen matrices are gathered. More tokens share
# experts: there, reading each matrix once is worth the sorting.
_GATHERED = 16


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
        captured: nothing may be read back to the host, whatever dtype and GPU: torch's grouped
            product does for some.
    """
    ids, weight = route(x, router, routing)
    if captured:
        parts = zip(x.split(_GATHERED), ids.split(_GATHERED), strict=True)
        made = torch.cat([gathered(*part, gate_up, down) for part in parts])
    elif x.device.type != "cpu" and x.shape[0] <= _GATHERED:
        made = gathered(x, ids, gate_up, down)
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


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute ``x [S, i]`` by ``weights [E, o, i]``; expert e has the rows up to ``ends[e]``."""
    if not any(width * x.element_size() % 16 for width in weights.shape[1:]):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    # torch's takes rows of whole 16 bytes only; those of real models are.
    rows = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(row, weight) for row, weight in zip(rows, weights, strict=True)])
