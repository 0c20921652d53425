"""What a method of the oracle says: scores, what is protected, who competes with whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tests.support.oracle.shares import Group, equal, rows_of
from tests.support.oracle.simulation import Simulation


@dataclass
class Method:
    """A policy; its fields are its parameters. Rows compete alone for equal shares.

    Attributes:
        scale: the size of the terms of which a score is a difference; scores nearer than float32
            resolves at this size are as good as equal.
    """

    scale: ClassVar[float] = 0.0

    def passed(self, sim: Simulation) -> None:
        """Write state after a pass, before eviction."""

    def score(self, sim: Simulation) -> Tensor:
        """Float64 ``[L, H, T]`` at an eviction; numbers of absent entries mean nothing."""
        raise NotImplementedError

    def nearness(self, score: Tensor) -> Tensor:
        """Numbers ``[L, H, T]`` that tell near-ties: the scores, unless these are ranks."""
        return score

    def protected(self, sim: Simulation, total: int) -> Tensor:
        """Bool, to be broadcast to ``[L, H, T]``."""
        return torch.zeros(sim.seen, dtype=torch.bool)

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        """Which rows share what, of a budget of ``total`` entries."""
        rows = rows_of(sim.layers, sim.heads)
        return [Group([row], n) for row, n in zip(rows, equal(total, len(rows)), strict=True)]


def newest(sim: Simulation, count: int) -> Tensor:
    """Bool ``[T]``: the newest tokens."""
    return torch.arange(sim.seen) >= sim.seen - count


def reduce(values: Tensor, how: str, dim: int) -> Tensor:
    """Mean, maximum or sum over a dimension."""
    if how == "max":
        return values.amax(dim)
    return values.mean(dim) if how == "mean" else values.sum(dim)


def grown(state: Tensor, sim: Simulation, fill: float) -> Tensor:
    """``[L, H, T]``: the state of older entries (at first ``[0, 0, 0]``), ``fill`` for new ones."""
    whole = torch.full((sim.layers, sim.heads, sim.seen), fill, dtype=torch.float64)
    if state.numel():
        whole[..., : state.shape[-1]] = state
    return whole
