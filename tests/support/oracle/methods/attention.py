"""Methods that rank entries by the attention they get."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.oracle.methods.base import Method, grown, newest, reduce
from tests.support.oracle.shares import (
    Group,
    equal,
    equal_in_layers,
    pyramid,
    rows_of,
)
from tests.support.oracle.simulation import Simulation


def mass(sim: Simulation, group: str) -> Tensor:
    """Attention ``[L, H, T]`` that each entry got in the last pass, summed over its queries."""
    masses = []
    for weights in sim.weights:
        shares = weights.double().view(sim.heads, sim.group, sim.new, sim.seen)
        masses.append(reduce(shares, group, 1).sum(1))
    return torch.stack(masses)


@dataclass
class H2O(Method):
    """H2O (arXiv 2306.14048), section 4: accumulated attention, and the newest of the budget.

    Choices: ``group`` (the paper's models have no groups); with prefill in chunks, sums begin with
    what each chunk's queries saw. ``recent``: half of the budget, as in the paper's experiments.
    """

    recent: float = 0.5
    group: str = "mean"
    accumulated: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0), init=False)

    def passed(self, sim: Simulation) -> None:
        self.accumulated = grown(self.accumulated, sim, 0.0) + mass(sim, self.group)

    def score(self, sim: Simulation) -> Tensor:
        return self.accumulated.clone()

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, int(self.recent * (total // sim.rows)))


@dataclass
class Tova(Method):
    """TOVA (arXiv 2401.06104), section 4.2: attention of the newest token, mean over heads.

    All rows of a layer keep the same tokens. Choice: what equal shares leave goes to whole layers.
    """

    def score(self, sim: Simulation) -> Tensor:
        scores = []
        for layer in range(sim.layers):
            attention = sim.window_attention(layer, 1)[:, :, 0].flatten(0, 1)  # [Hq, T]
            scores.append(attention.mean(0).expand(sim.heads, -1))
        return torch.stack(scores)

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        shares = equal_in_layers(total, sim.layers, sim.heads)
        return [Group([r], n) for r, n in zip(rows_of(sim.layers, sim.heads), shares, strict=True)]


@dataclass
class SnapKV(Method):
    """SnapKV (arXiv 2404.14469), section 4 and its listing, at every eviction (a choice).

    The observation window is the last ``L_obs`` tokens, the prefix what is kept before it.
    ``W_obs``: softmax over all kept keys of the window's queries, of which the prefix's columns
    count. ``C = mean_obs W_obs``, then 1-D pooling of C over the prefix alone, padded by zeros. The
    window's own entries always stay. Choice: ``group``.
    """

    window: int = 16
    kernel: int = 5
    pool: str = "avg"
    group: str = "mean"

    def score(self, sim: Simulation) -> Tensor:
        score = torch.zeros(sim.keep.shape, dtype=torch.float64)
        for layer in range(sim.layers):
            voted = reduce(sim.window_attention(layer, self.window), self.group, 1).mean(1)
            for head in range(sim.heads):
                prefix = prefix_of(sim, layer, head, self.window)
                score[layer, head, prefix] = pooled(voted[head, prefix], self.kernel, self.pool)
        return score

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.window)


def prefix_of(sim: Simulation, layer: int, head: int, window: int) -> Tensor:
    """Positions of the row's entries before the window, ascending."""
    kept = sim.kept(layer, head)
    return kept[kept < sim.seen - window]


def pooled(values: Tensor, kernel: int, how: str) -> Tensor:
    """1-D pooling of ``[N]``, zeros beyond the ends; means of the same values are exactly equal."""
    zeros = [0.0] * (kernel // 2)
    padded = zeros + values.tolist() + zeros
    spans = [padded[i : i + kernel] for i in range(len(values))]
    if how == "max":
        return torch.tensor([max(span) for span in spans], dtype=torch.float64)
    return torch.tensor([math.fsum(span) / kernel for span in spans], dtype=torch.float64)


@dataclass
class PyramidKV(SnapKV):
    """PyramidKV (arXiv 2406.02069), section 4.2: SnapKV's score, fewer entries in higher layers.

    Choices: rounding; SnapKV's window and kernel; what a layer cannot fill is not handed on.
    """

    beta: int = 20

    def shares(self, sim: Simulation, total: int) -> list[int]:
        return pyramid(total, sim.layers, sim.heads, self.window, self.beta)

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        rows = rows_of(sim.layers, sim.heads)
        return [Group([r], n) for r, n in zip(rows, self.shares(sim, total), strict=True)]


@dataclass
class AdaKV(SnapKV):
    """Ada-KV (arXiv 2407.11550), algorithm 1: heads of a layer compete, each sure of a part.

    Choices: ``floor`` is a part of the equal share (as kvpress has it), rounded down.
    """

    floor: float = 0.2

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        return self.layer_groups(sim, equal(total, sim.layers))

    def layer_groups(self, sim: Simulation, shares: list[int]) -> list[Group]:
        groups = []
        for layer, share in enumerate(shares):
            rows = [(layer, head) for head in range(sim.heads)]
            groups.append(Group(rows, share, int(self.floor * (share // sim.heads))))
        return groups


@dataclass
class AdaPyramidKV(AdaKV):
    """Ada-KV within the layers, PyramidKV between them (arXiv 2407.11550, section 4)."""

    beta: int = 20

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        shares = pyramid(total, sim.layers, sim.heads, self.window, self.beta)
        sums = [sum(shares[i : i + sim.heads]) for i in range(0, len(shares), sim.heads)]
        return self.layer_groups(sim, sums)


@dataclass
class MorphKV(Method):
    """MorphKV (arXiv 2503.00979), section 3: attention of the recent tokens, fused over them.

    Choices: ``group``; attention anew over what is kept, not the weights of each token's own step.
    """

    window: int = 32
    fusion: str = "sum"
    group: str = "mean"

    def score(self, sim: Simulation) -> Tensor:
        layers = range(sim.layers)
        grouped = [reduce(sim.window_attention(x, self.window), self.group, 1) for x in layers]
        return torch.stack([reduce(attention, self.fusion, 1) for attention in grouped])

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.window)
