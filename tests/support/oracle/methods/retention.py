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
    decayed = torch.where(age == 0, 0.0, age * x)  # beta^0 = 1, of beta = 0 as well
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
    """TRIM-KV (arXiv 2512.03324): rows alone, lookahead 1; the newest has age 0 (algorithm 1).

    ``age="released"``: ages are ``seen + 1 - position``, as in the authors' released code.
    """

    recent: int = 0
    age: str = "paper"

    def score(self, sim: Simulation) -> Tensor:
        more = 1 if self.age == "released" else -1
        return log_score(sim.log_beta, sim.seen + more - torch.arange(sim.seen), 1)

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.recent)


@dataclass
class GlobalRetention(Retention):
    """DBTrimKV (arXiv 2605.09649), equation 9: one group of all rows; the newest has age 1.

    ``age="released"``: ages are ``seen + 1 - position``, and with a lookahead one more.
    """

    lookahead: float = 2

    def score(self, sim: Simulation) -> Tensor:
        more = 0
        if self.age == "released":
            more = 1 if self.lookahead == 1 else 2
        return log_score(sim.log_beta, sim.seen + more - torch.arange(sim.seen), self.lookahead)

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        return [Group(rows_of(sim.layers, sim.heads), total)]


@dataclass
class FlooredRetention(GlobalRetention):
    """As DBTrimKV, but each row is sure of a part of what an equal share has above ``free``."""

    floor: float = 1.0
    free: int = 32

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        above = max(total // sim.rows - self.free, 0)
        return [Group(rows_of(sim.layers, sim.heads), total, int(self.floor * above))]


@dataclass
class Streaming(Method):
    """StreamingLLM (arXiv 2309.17453): the first tokens and the newest."""

    sinks: int = 4

    def score(self, sim: Simulation) -> Tensor:
        return torch.arange(sim.seen).double().expand(sim.keep.shape).clone()

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return torch.arange(sim.seen) < self.sinks
