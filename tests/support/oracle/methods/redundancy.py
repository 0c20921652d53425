"""R-KV and G-KV: attention against redundancy of keys, and attention remembered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tests.support.oracle.methods.attention import pooled, prefix_of
from tests.support.oracle.methods.base import Method, grown, newest, reduce
from tests.support.oracle.simulation import Simulation


def redundancy(keys: Tensor, threshold: float, *, cut: bool) -> Tensor:
    """How much each key of a row repeats others: a softmax ``[N]`` over keys ``[N, D]``.

    R-KV (arXiv 2505.24133), section 3.3, with one recent similar key spared (its released code).
    ``cut``: similarities at or below the threshold count nothing (G-KV, appendix D).
    """
    keys = keys.double()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    similar = unit @ unit.T
    similar.fill_diagonal_(0.0)
    for row in similar:
        near = (row > threshold).nonzero().flatten()
        if cut:
            row[row <= threshold] = 0.0
        if len(near):
            row[near[-1]] = 0.0
    return similar.mean(0).softmax(0)


@dataclass
class RKV(Method):
    """R-KV (arXiv 2505.24133), sections 3.2 to 3.4: ``lambda I - (1 - lambda) R``.

    Choices: ``kernel`` and ``threshold`` are those of the released code; the softmax of ``I``
    covers the window's keys too.
    """

    scale: ClassVar[float] = 0.1
    window: int = 8
    lambda_: float = 0.1
    kernel: int = 7
    threshold: float = 0.5

    def score(self, sim: Simulation) -> Tensor:
        score = torch.zeros(sim.keep.shape, dtype=torch.float64)
        for layer in range(sim.layers):
            logits, visible = sim.window_logits(layer, self.window)
            highest = logits.amax(1).masked_fill(~visible[:, 0], -torch.inf)
            voted = highest.softmax(-1).nan_to_num(0.0).mean(1)
            for head in range(sim.heads):
                kept = sim.kept(layer, head)
                prefix = prefix_of(sim, layer, head, self.window)
                repeats = redundancy(sim.key[layer][head, kept], self.threshold, cut=False)
                importance = pooled(voted[head, prefix], self.kernel, "max")
                score[layer, head, prefix] = (
                    self.lambda_ * importance - (1 - self.lambda_) * repeats[: len(prefix)]
                )
        return score

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.window)


@dataclass
class GKV(Method):
    """G-KV, equations 1 to 5 and appendix D: window attention, remembered with decay.

    F changes at evictions alone, and is kept as it is before redundancy is taken off. Choices: the
    similarity to others is a mean (the text; the formula sums); F is set for the prefix only.
    """

    scale: ClassVar[float] = 1.0
    window: int = 16
    alpha: float = 0.8
    form: str = "max"
    redundancy: bool = True
    lambda_: float = 0.7
    threshold: float = 0.5
    group: str = "max"
    history: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0), init=False)

    def passed(self, sim: Simulation) -> None:
        self.history = grown(self.history, sim, torch.nan)

    def score(self, sim: Simulation) -> Tensor:
        score = torch.zeros(sim.keep.shape, dtype=torch.float64)
        for layer in range(sim.layers):
            local = reduce(sim.window_attention(layer, self.window), self.group, 1).mean(1)
            for head in range(sim.heads):
                kept = sim.kept(layer, head)
                prefix = prefix_of(sim, layer, head, self.window)
                if not len(prefix):
                    continue
                now = local[head, prefix]
                now = now / now.max() if now.max() > 0 else now
                before = self.history[layer, head, prefix]
                mixed = self._mix(before, now)
                self.history[layer, head, prefix] = mixed
                if self.redundancy:
                    repeats = redundancy(sim.key[layer][head, kept], self.threshold, cut=True)
                    repeats = repeats[: len(prefix)]
                    mixed = self.lambda_ * mixed - (1 - self.lambda_) * repeats / repeats.max()
                score[layer, head, prefix] = mixed
        return score

    def _mix(self, before: Tensor, now: Tensor) -> Tensor:
        """F of this step; ``before`` is NaN where there is none."""
        forms = {
            "max": torch.maximum(self.alpha * before, now),
            "mean": self.alpha * before + (1 - self.alpha) * now,
            "sum": self.alpha * before + now,
        }
        return torch.where(before.isnan(), now, forms[self.form])

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.window)
