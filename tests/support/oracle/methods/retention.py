"""The presets that need no attention: retention gates, recency, and none at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.oracle.methods.base import Method, newest
from tests.support.oracle.shares import Group, rows_of
from tests.support.oracle.simulation import Simulation


def log_score(log_beta: Tensor, age: Tensor, lookahead: float) -> Tensor:
    """``log(beta^a + ... + beta^(a+n-1))`` in float64."""
    x = log_beta.double()
    decayed = age.double() * x
    if lookahead == 1:
        return decayed
    if math.isinf(lookahead):
        return decayed - torch.log(-torch.expm1(x))
    ratio = torch.expm1(lookahead * x) / torch.expm1(x)
    return decayed + torch.where(x == 0, float(lookahead), ratio).log()


@dataclass
class Full(Method):
    """Nothing goes."""

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        return []


@dataclass
class Retention(Method):
    """TRIM-KV (arXiv 2512.03324): rows alone, lookahead 1."""

    recent: int = 0

    def score(self, sim: Simulation) -> Tensor:
        return log_score(sim.log_beta, sim.seen - torch.arange(sim.seen), 1)

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.recent)


@dataclass
class GlobalRetention(Retention):
    """DBTrimKV (arXiv 2605.09649), equation 9: one group of all rows."""

    lookahead: float = 2

    def score(self, sim: Simulation) -> Tensor:
        return log_score(sim.log_beta, sim.seen - torch.arange(sim.seen), self.lookahead)

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        return [Group(rows_of(sim.layers, sim.heads), total)]


@dataclass
class Streaming(Method):
    """StreamingLLM (arXiv 2309.17453): the first tokens and the newest."""

    sinks: int = 4

    def score(self, sim: Simulation) -> Tensor:
        return torch.arange(sim.seen).double().expand(sim.keep.shape).clone()

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return torch.arange(sim.seen) < self.sinks
