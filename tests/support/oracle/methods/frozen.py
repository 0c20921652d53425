"""EpiKV and its controls (arXiv 2606.26472): one number per token, from its own step.

Every score here looks at a token and those before it, all of them, kept or not. So it is the same
whenever it is computed: what the paper freezes at creation is computed here when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tests.support.oracle.methods.attention import H2O
from tests.support.oracle.methods.base import Method, newest
from tests.support.oracle.shares import Group
from tests.support.oracle.simulation import Simulation


def change(sim: Simulation, layer: int) -> Tensor:
    """``g_l(t)`` (equation 1), float64 ``[T]``. Choice: 0 for the first token."""
    hidden = sim.residual[layer].double()
    steps = (hidden[1:] - hidden[:-1]).norm(dim=-1)
    return torch.cat([steps.new_zeros(1), steps])


def trailing(values: Tensor, window: int) -> list[Tensor]:
    """For each token, the values of it and of up to ``window - 1`` tokens before it."""
    return [values[max(t - window + 1, 0) : t + 1] for t in range(len(values))]


def rolling_mean(values: Tensor, window: int) -> Tensor:
    """The mean of each trailing window."""
    return torch.stack([span.mean() for span in trailing(values, window)])


def z_score(values: Tensor, window: int, eps: float) -> Tensor:
    """Equation 3: each value against its trailing window. Choice: std divides by the count."""
    spans = trailing(values, window)
    z = [(s[-1] - s.mean()) / (s.std(correction=0) + eps) for s in spans]
    return torch.stack(z)


@dataclass
class PromptKept(Method):
    """Section 3.3 and appendix D: prompts stay, the budget is for the rest, the newest stay.

    Choices: prompts of all turns; the newest ``min(128, K // 4)`` are within the budget K.
    """

    scale: ClassVar[float] = 10.0

    def token_score(self, sim: Simulation) -> Tensor:
        """Float64 ``[T]``."""
        raise NotImplementedError

    def score(self, sim: Simulation) -> Tensor:
        return self.token_score(sim).expand(sim.keep.shape).clone()

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return sim.prompt | newest(sim, min(128, total // sim.rows // 4))

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        prompt = int(sim.prompt.sum())
        return [Group(g.rows, g.share + prompt) for g in super().groups(sim, total)]


@dataclass
class HiddenVariance(PromptKept):
    """Equation 2: rolling mean of the change at a middle layer minus that at an upper one."""

    a: float = 10 / 32
    b: float = 21 / 32
    window: int = 64

    def token_score(self, sim: Simulation) -> Tensor:
        lower, upper = (change(sim, int(share * sim.layers)) for share in (self.a, self.b))
        return rolling_mean(lower, self.window) - rolling_mean(upper, self.window)


@dataclass
class EpiKV(PromptKept):
    """Equation 3: the same of rolling z-scores. Choice: ``eps``."""

    a: float = 10 / 32
    b: float = 21 / 32
    window: int = 64
    eps: float = 1e-6

    def token_score(self, sim: Simulation) -> Tensor:
        lower, upper = (change(sim, int(share * sim.layers)) for share in (self.a, self.b))
        return z_score(lower, self.window, self.eps) - z_score(upper, self.window, self.eps)


@dataclass
class BandAdaptive(PromptKept):
    """Named only in the paper (table 1). Choice: mean z-score of band A minus that of band B."""

    window: int = 64
    eps: float = 1e-6

    def token_score(self, sim: Simulation) -> Tensor:
        return self._band(sim, 7, 13) - self._band(sim, 18, 25)

    def _band(self, sim: Simulation, first: int, last: int) -> Tensor:
        layers = range(first * sim.layers // 32, last * sim.layers // 32 + 1)
        z = [z_score(change(sim, layer), self.window, self.eps) for layer in layers]
        return torch.stack(z).mean(0)


@dataclass
class StateVariance(PromptKept):
    """KV-key and KV-val: rolling mean of the variance of a token's keys (values) over channels.

    Choices: mean over all rows; high values stay.
    """

    scale: ClassVar[float] = 0.0
    window: int = 64
    of_values: ClassVar[bool] = False

    def token_score(self, sim: Simulation) -> Tensor:
        states = torch.stack(sim.value if self.of_values else sim.key).double()
        variance = states.var(-1, correction=0).mean((0, 1))
        return rolling_mean(variance, self.window)


@dataclass
class ValueVariance(StateVariance):
    """KV-val."""

    of_values: ClassVar[bool] = True


@dataclass
class CausalLag(PromptKept):
    """Lag-KV: variance over channels in units of the previous chunk's range, key plus value.

    Choices: chunks by token index; mean over all rows; no range for the first chunk; its length.
    """

    scale: ClassVar[float] = 0.0
    lag: int = 128

    def token_score(self, sim: Simulation) -> Tensor:
        total = torch.zeros(sim.seen, dtype=torch.float64)
        for states in (torch.stack(sim.key).double(), torch.stack(sim.value).double()):
            for start in range(0, sim.seen, self.lag):
                own = states[:, :, start : start + self.lag]
                if start:
                    before = states[:, :, start - self.lag : start]
                    low, high = before.amin(2, keepdim=True), before.amax(2, keepdim=True)
                    own = (own - low) / (high - low).clamp_min(1e-6)
                total[start : start + self.lag] += own.var(-1, correction=0).mean((0, 1))
        return total


@dataclass
class AttentionHidden(PromptKept):
    """Attn x HS (table 1): cumulative attention of the row plus ``z_a``, added as they are."""

    a: float = 10 / 32
    window: int = 64
    eps: float = 1e-6
    group: str = "mean"

    def __post_init__(self) -> None:
        self.attention = H2O(group=self.group)

    def passed(self, sim: Simulation) -> None:
        self.attention.passed(sim)

    def score(self, sim: Simulation) -> Tensor:
        z = z_score(change(sim, int(self.a * sim.layers)), self.window, self.eps)
        return self.attention.score(sim) + z


@dataclass
class SegmentHidden(EpiKV):
    """Segment-HS (table 1): the best of each segment by EpiKV's score, more of some kinds.

    ThinKV's kinds need thresholds that neither paper gives. Choice: by the mean normalised entropy
    of attention in a segment, against the mean and the deviation of all complete segments so far.
    """

    scale: ClassVar[float] = 64.0
    segment: int = 128
    r: int = 64
    e: int = 32
    t: int = 8
    entropies: list[float] = field(default_factory=list, init=False)
    kinds: list[str] = field(default_factory=list, init=False)

    def passed(self, sim: Simulation) -> None:
        if bool(sim.prompt[-1]):
            return
        self.entropies.append(newest_entropy(sim))
        if len(self.entropies) % self.segment == 0:
            means = torch.tensor(self.entropies).double().view(-1, self.segment).mean(1)
            mean, spread = means.mean(), means.std(correction=0)
            high, low = means[-1] >= mean + spread / 2, means[-1] < mean - spread / 2
            self.kinds.append("r" if high else "t" if low else "e")

    def token_score(self, sim: Simulation) -> Tensor:
        score = super().token_score(sim)
        raised = score + 64
        generated = (~sim.prompt).nonzero().flatten()
        for number, kind in enumerate(self.kinds):
            own = generated[number * self.segment : (number + 1) * self.segment].tolist()
            count = {"r": self.r, "e": self.e, "t": self.t}[kind]
            order = sorted(own, key=lambda t: (float(score[t]), t))
            gone = order[: max(len(own) - count, 0)]
            raised[gone] = score[gone]
        return raised


def newest_entropy(sim: Simulation) -> float:
    """Entropy of the newest query over what each row holds, in units of the most it could be."""
    values = []
    for layer in range(sim.layers):
        attention = sim.window_attention(layer, 1)[:, :, 0]
        for head in range(sim.heads):
            kept = sim.kept(layer, head)
            for p in attention[head][:, kept]:
                most = torch.tensor(float(len(kept))).log()
                entropy = -(p * p.clamp_min(1e-300).log()).sum()
                values.append(float(entropy / most) if len(kept) > 1 else 0.0)
    return sum(values) / len(values)
