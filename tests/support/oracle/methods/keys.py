"""Methods that look at keys and values alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.oracle.methods.base import Method, newest
from tests.support.oracle.simulation import Simulation


@dataclass
class KeyDiff(Method):
    """KeyDiff (arXiv 2504.15364), section 3: keys least like the mean direction of the row stay."""

    recent: int = 0

    def score(self, sim: Simulation) -> Tensor:
        score = torch.zeros(sim.keep.shape, dtype=torch.float64)
        for layer in range(sim.layers):
            for head in range(sim.heads):
                kept = sim.kept(layer, head)
                keys = sim.key[layer][head, kept].double()
                unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-12)
                mean = unit.mean(0)
                score[layer, head, kept] = -(unit @ mean) / mean.norm().clamp_min(1e-12)
        return score

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.recent)


@dataclass
class KNorm(Method):
    """arXiv 2406.11430, section 3: keys with the smallest L2 norm stay."""

    recent: int = 0

    def score(self, sim: Simulation) -> Tensor:
        return -torch.stack(sim.key).double().norm(dim=-1)

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.recent)


@dataclass
class LagKV(Method):
    """LagKV (arXiv 2504.04704), section 3, as in kvpress: spread against the next chunk's range.

    Chunks are made of the entries that the row holds now, after the sinks; the last whole chunk and
    what follows it have no next one, and score 1, above all ranks. Choices: with fewer than two
    whole chunks the newest stay; ranges are at least 1e-6; equal values: the older ranks lower.
    """

    sinks: int = 4
    lag: int = 128

    def nearness(self, score: Tensor) -> Tensor:
        """Where entries have ranks, what they are ranked by, apart from other chunks'."""
        return self.ranked_by.where(self.ranked_by >= 0, 1e9 * (1 + score))

    def score(self, sim: Simulation) -> Tensor:
        score = torch.ones(sim.keep.shape, dtype=torch.float64)
        self.ranked_by = torch.full_like(score, -1.0)
        for layer in range(sim.layers):
            for head in range(sim.heads):
                kept = sim.kept(layer, head)
                kept = kept[kept >= self.sinks]
                whole = len(kept) // self.lag
                if whole < 2:
                    score[layer, head, kept] = kept.double()
                    continue
                for chunk in range(whole - 1):
                    own = kept[chunk * self.lag : (chunk + 1) * self.lag]
                    next_ = kept[(chunk + 1) * self.lag : (chunk + 2) * self.lag]
                    spread = torch.zeros(self.lag, dtype=torch.float64)
                    for states in (sim.key[layer][head], sim.value[layer][head]):
                        spread += self._spread(states[own], states[next_]) / 2
                    self.ranked_by[layer, head, own] = 2 * chunk + spread
                    order = sorted(range(self.lag), key=lambda i: (float(spread[i]), i))
                    for rank, i in enumerate(order):
                        score[layer, head, own[i]] = rank / self.lag
        return score

    def _spread(self, own: Tensor, reference: Tensor) -> Tensor:
        """Softmax over a chunk of the deviation over channels, in the reference's ranges."""
        low, high = reference.double().amin(0), reference.double().amax(0)
        scaled = (own.double() - low) / (high - low).clamp_min(1e-6)
        return scaled.std(-1).softmax(0)

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return torch.arange(sim.seen) < self.sinks
