"""Mixture of experts: each token goes through a few of many SwiGLU MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.spec import Routing

# Computes the outputs ``[T, k, d]`` of experts ``ids [T, k]``: of x, ids, gate_up and down, as
# :func:`mixture` has them.
Experts = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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


def grouped(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the experts with the tokens of each side by side: the reference."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    experts = torch.arange(gate_up.shape[0], device=ids.device)
    ends = torch.searchsorted(flat[order], experts, right=True).int()
    wide = _grouped_product(x[order // ids.shape[1]], gate_up, ends)
    gate, up = wide.chunk(2, -1)
    narrow = _grouped_product(F.silu(gate) * up, down, ends)
    return narrow[order.argsort()].view(*ids.shape, x.shape[1])


def mixture(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    experts: Experts = grouped,
) -> Tensor:
    """Compute the output ``[T, d]`` of a sparse MLP.

    Args:
        x: ``[T, d]``, behind the norm.
        router: ``[E, d]``. gate_up: ``[E, 2 f, d]``, gate first. down: ``[E, d, f]``.
        experts: computes the chosen ones.
    """
    ids, weight = route(x, router, routing)
    return (experts(x, ids, gate_up, down) * weight[..., None]).sum(1)


def whole_rows(weights: Tensor) -> bool:
    """Return whether all rows have whole 16 bytes, which torch's grouped product asks for."""
    return not any(width * weights.element_size() % 16 for width in weights.shape[1:])


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute ``x [S, i]`` by ``weights [E, o, i]``; expert e has the rows up to ``ends[e]``."""
    if whole_rows(weights):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    # Real models have whole rows.
    rows = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(row, weight) for row, weight in zip(rows, weights, strict=True)])
