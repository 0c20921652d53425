"""Every policy in the oracle's own words, named as in docs/reference/policies.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.oracle.simulation import (
    Group,
    Simulation,
    equal,
    equal_in_layers,
    pyramid,
    rows_of,
)


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


# The presets that need no attention: retention gates, recency, and none at all.


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


# Methods that rank entries by the attention they get.


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
class CriticalKV(SnapKV):
    """CriticalKV (arXiv 2502.03805), algorithm 1, over SnapKV.

    Of a row's budget a part ``alpha`` goes to the entries with the most attention A; the rest to
    those with the greatest ``(A + epsilon) |V W_O|_1``. Choices: the budget is what the window
    leaves; the norm's mean over the group (kvpress); A pooled as SnapKV's.
    """

    alpha: float = 0.5
    epsilon: float = 1e-4

    def score(self, sim: Simulation) -> Tensor:
        paid = super().score(sim)
        size = [sim.contributions(layer).abs().sum(-1) for layer in range(sim.layers)]
        size = [x.view(sim.heads, sim.group, -1).mean(1) for x in size]
        score = (paid + self.epsilon) * torch.stack(size)
        for group in self.groups(sim, sim.total):
            ((layer, head),) = group.rows
            prefix = prefix_of(sim, layer, head, self.window).tolist()
            first = int(self.alpha * max(group.share - self.window, 0))
            by_attention = sorted(prefix, key=lambda t: (float(paid[layer, head, t]), t))
            for t in by_attention[len(prefix) - min(first, len(prefix)) :]:
                score[layer, head, t] = torch.inf
        return score


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
        return layer_groups(sim, equal(total, sim.layers), self.floor)


def layer_groups(sim: Simulation, shares: list[int], floor: float) -> list[Group]:
    """A group for each layer, whose rows are each sure of a part of their equal share."""
    groups = []
    for layer, share in enumerate(shares):
        rows = [(layer, head) for head in range(sim.heads)]
        groups.append(Group(rows, share, int(floor * (share // sim.heads))))
    return groups


@dataclass
class AdaPyramidKV(AdaKV):
    """Ada-KV within the layers, PyramidKV between them (arXiv 2407.11550, section 4)."""

    beta: int = 20

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        shares = pyramid(total, sim.layers, sim.heads, self.window, self.beta)
        sums = [sum(shares[i : i + sim.heads]) for i in range(0, len(shares), sim.heads)]
        return layer_groups(sim, sums, self.floor)


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


@dataclass
class Expected(Method):
    """Expected Attention (arXiv 2510.00636) as the authors' released code has it, head-adaptive.

    Queries before rope have mean ``m`` and covariance ``C`` (divided by their number); ``R`` is the
    mean of the rotations at the next ``ahead`` positions. Of each query head, the softmax over the
    row's entries but the sinks of ``k.(R m) / sqrt(D) + k.(R C R') k / 2 D``; its mean over the
    group, plus ``epsilon``, times the value's norm. Choices: statistics of the newest ``window``
    tokens but the sinks (all known ones where there are no others), not of the whole prompt; the
    positions to come follow the largest of the window's.
    """

    window: int = 256
    ahead: int = 512
    sinks: int = 4
    epsilon: float = 0.01
    floor: float = 0.2
    interval: int = 512

    def score(self, sim: Simulation) -> Tensor:
        score = torch.zeros(sim.keep.shape, dtype=torch.float64)
        first = max(sim.seen - self.window, 0)
        chosen = torch.arange(first, sim.seen)
        chosen = chosen[chosen >= self.sinks] if sim.seen > self.sinks else chosen
        begin = int(sim.rope_position[:, first:].max()) + 1
        for layer in range(sim.layers):
            turn = sim.mean_rotation(layer, range(begin, begin + self.ahead))
            for head in range(sim.heads * sim.group):
                row = head // sim.group
                kept = sim.kept(layer, row)
                kept = kept[kept >= self.sinks]
                asked = sim.unrotated[layer][head, chosen].double()
                mean = turn @ asked.mean(0)
                covariance = turn @ torch.cov(asked.T, correction=0) @ turn.T
                key = sim.key[layer][row, kept].double() * sim.scale
                spread = torch.einsum("nd,de,ne->n", key, covariance, key)
                share = (key @ mean + spread / 2).softmax(0)
                score[layer, row, kept] += share / sim.group
        values = torch.stack(sim.value).double().norm(dim=-1)
        return (score + self.epsilon) * values

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return torch.arange(sim.seen) < self.sinks

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        return layer_groups(sim, equal(total, sim.layers), self.floor)


@dataclass
class TriAttention(Method):
    """TriAttention (arXiv 2604.04921), section 4, of each KV head of each layer by itself.

    With ``q_f`` the part of a query, before rope, that one frequency turns: ``S_trig`` is the
    logit of a query at the center ``E[q]``, its mean over the distances 1, 2, 4, ... from the
    newest token; ``S_norm`` the sum over f of ``(E|q_f| - |E q_f|) |k_f|``. Of each query head, the
    z-score of their sum over the row; the greatest of the group. Choices: ``E`` over the newest
    ``window`` tokens, not over a calibration set; prompts go, too.
    """

    scale: ClassVar[float] = 10.0
    window: int = 256
    ahead: int = 65536
    interval: int = 128

    def score(self, sim: Simulation) -> Tensor:
        score = torch.full(sim.keep.shape, -torch.inf, dtype=torch.float64)
        newest_at = int(sim.rope_position[:, -self.window :].max())
        distances = [2**n for n in range(64) if 2**n <= self.ahead]
        for layer in range(sim.layers):
            turn = sim.mean_rotation(layer, [newest_at + distance for distance in distances])
            once = sim.mean_rotation(layer, [1])
            bands = once.ne(0).unique(dim=0).double()  # [F, D]: what a single turn mixes

            def norms(x: Tensor, bands: Tensor = bands) -> Tensor:
                return (x.square() @ bands.T).sqrt()

            for head in range(sim.heads * sim.group):
                row = head // sim.group
                kept = sim.kept(layer, row)
                asked = sim.unrotated[layer][head, -self.window :].double()
                key = sim.key[layer][row, kept].double()
                found = key @ (turn @ asked.mean(0))
                left = norms(asked).mean(0) - norms(asked.mean(0))
                found = found + norms(key) @ left * once[0].norm()
                found = (found - found.mean()) / found.std(correction=0).clamp_min(1e-6)
                score[layer, row, kept] = torch.maximum(score[layer, row, kept], found)
        return score


# R-KV and G-KV: attention against redundancy of keys, and attention remembered.


def redundancy(keys: Tensor, threshold: float, *, cut: bool) -> Tensor:
    """How much each key of a row repeats others: a softmax ``[N]`` over keys ``[N, D]``.

    R-KV (arXiv 2505.24133), with one recent similar key spared (its released code).
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
    """R-KV (arXiv 2505.24133): ``lambda I - (1 - lambda) R``.

    Choices: ``kernel`` and ``threshold`` are those of the released code; the softmax of ``I``
    covers the window's keys too.
    """

    scale: ClassVar[float] = 0.1
    window: int = 8
    lambda_: float = 0.1
    kernel: int = 7
    threshold: float = 0.5
    interval: int = 128

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
    interval: int = 128
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


# Methods that look at keys and values alone.


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


# EpiKV and its controls (arXiv 2606.26472): one number per token, from its own step.
#
# Every score here looks at a token and those before it, all of them, kept or not. So it is the
# same whenever it is computed: what the paper freezes at creation is computed here when it is
# needed.


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
class CAKE(Method):
    """CAKE (arXiv 2503.12491), section 4: rows share one budget by their layers' preferences.

    Choices: shares are proportional at each eviction, over what the layers hold then; a row keeps
    its r best where the r-th of every row, divided by its layer's preference, is as near to the
    others' as whole entries allow.
    """

    scale: ClassVar[float] = 1.0
    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.6
    tau2: float = 0.6

    def groups(self, sim: Simulation, total: int) -> list[Group]:
        return [Group(rows_of(sim.layers, sim.heads), total)]

    def score(self, sim: Simulation) -> Tensor:
        score = torch.zeros(sim.keep.shape, dtype=torch.float64)
        preference = []
        for layer in range(sim.layers):
            paid = sim.window_attention(layer, self.window)
            several = paid.shape[2] > 1
            varied = paid.var(2) if several else torch.zeros_like(paid[:, :, 0])
            entropy = variance = 0.0
            for head in range(sim.heads):
                prefix = prefix_of(sim, layer, head, self.window)
                shares = paid[head][..., prefix]
                entropy += float(-(shares * shares.clamp(min=1e-300).log()).sum())
                variance += float(varied[head][..., prefix].sum())
                each = paid[head].mean(1) + self.gamma * varied[head]
                found = pooled(each.mean(0)[prefix], self.kernel, "avg").tolist()
                best = sorted(zip(found, prefix.tolist(), strict=True), reverse=True)
                for rank, (_, position) in enumerate(best):
                    score[layer, head, position] = -(rank + 1)
            preference.append(entropy ** (1 / self.tau1) * variance ** (1 / self.tau2))
        if max(preference) == 0:
            return score
        return score / torch.tensor(preference, dtype=torch.float64)[:, None, None]

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return newest(sim, self.window)


@dataclass
class RaaS(PromptKept):
    """RaaS (arXiv 2502.11147): the entry that was used the longest ago goes; prompts stay."""

    alpha: float = 0.0001
    group: str = "max"
    stamp: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0), init=False)

    def passed(self, sim: Simulation) -> None:
        before = self.stamp.shape[-1]
        self.stamp = grown(self.stamp, sim, 0.0)
        self.stamp[..., before:] = torch.arange(before, sim.seen)
        if sim.prompt[-1]:
            return
        for layer in range(sim.layers):
            used = reduce(sim.window_attention(layer, 1), self.group, 1)[:, 0] >= self.alpha
            self.stamp[layer][used & sim.keep[layer]] = sim.seen - 1

    def score(self, sim: Simulation) -> Tensor:
        return self.stamp.clone()

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return sim.prompt


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


# Methods under write gates; :class:`tests.support.oracle.eviction.Admitted` runs them.


PAPER_WINDOW = 256  # appendix E; the window where neither a parameter nor the gates say one


@dataclass
class WriteGated(Full):
    """WG-KV (arXiv 2512.17452): a budget binds nothing."""

    window: int = 0
    threshold: float = 0.1


@dataclass
class WriteGatedRetention(GlobalRetention):
    """DBTrimKV among what is admitted."""

    window: int = 0
    threshold: float = 0.1
    write_gates: str = ""


@dataclass
class WriteGatedSnapKV(Method):
    """SnapKV among what is admitted, as in appendix K.1. Choice: the lowest go, not 10 %."""

    window: int = 0
    threshold: float = 0.1
    observed: int = 0
    kernel: int = 5
    pool: str = "max"
    group: str = "max"

    def __post_init__(self) -> None:
        observed = self.observed or self.window or PAPER_WINDOW
        self.attention = SnapKV(observed, self.kernel, self.pool, self.group)

    def score(self, sim: Simulation) -> Tensor:
        return self.attention.score(sim)

    def protected(self, sim: Simulation, total: int) -> Tensor:
        return self.attention.protected(sim, total)


# Every policy in the oracle's own words, named as in docs/reference/policies.md.


METHODS: dict[str, Callable[..., Method]] = {
    "full": Full,
    "dbtrimkv": GlobalRetention,
    "trimkv": Retention,
    "balanced": FlooredRetention,
    "streamingllm": Streaming,
    "snapkv": SnapKV,
    "criticalkv": CriticalKV,
    "h2o": H2O,
    "tova": Tova,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "ada-pyramidkv": AdaPyramidKV,
    "morphkv": MorphKV,
    "rkv": RKV,
    "gkv": GKV,
    "cake": CAKE,
    "expected-attention": Expected,
    "triattention": TriAttention,
    "raas": RaaS,
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "lagkv": LagKV,
    "epikv": EpiKV,
    "hs-variance": HiddenVariance,
    "band-adaptive": BandAdaptive,
    "kv-key": StateVariance,
    "kv-val": ValueVariance,
    "lag-kv": CausalLag,
    "attention-hs": AttentionHidden,
    "segments-hs": SegmentHidden,
    "wgkv": WriteGated,
    "wgkv+dbtrimkv": WriteGatedRetention,
    "wgkv+snapkv": WriteGatedSnapKV,
}


def make_method(name: str, lookahead: float, parameters: Mapping[str, Any]) -> Method:
    """The method ``name``; ``lookahead`` is that of dbtrimkv and balanced."""
    named = {key + "_" * (key == "lambda"): value for key, value in parameters.items()}
    if name in ("dbtrimkv", "balanced", "wgkv+dbtrimkv"):
        named.setdefault("lookahead", lookahead)
    return METHODS[name](**named)


__all__ = ["METHODS", "Method", "log_score", "make_method"]
