"""Policies that read attention, or foresee it: H2O, SnapKV and its kin, R-KV, Expected Attention.

What they score by is the mass of all passes, what the newest queries pay, or attention weighed
against redundancy: entries whose keys resemble others' go first. Expected Attention and
TriAttention take the queries to come to be as the newest ones were before RoPE, and turn these on
to where others will be asked; the papers count over a whole prompt, or over texts beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmkv.engine.policies.allocation import (
    EvenLayerAllocation,
    GlobalAllocation,
    HeadAllocation,
    LayerAllocation,
    PyramidAllocation,
)
from mmkv.engine.policies.base import CacheView, Group, Needs, NewTokens, Policy, Scores, compiled
from mmkv.engine.policies.preset import (
    FLOOR,
    INTERVAL,
    KERNEL,
    POOL,
    WINDOW,
    Parameter,
    Preset,
    group,
)
from mmkv.engine.policies.scoring import WindowAttention, check_pooling, pooled

# Elements of one block of logits or cosines: temporaries stay near 16 MiB however long rows are.
_BLOCK_ELEMENTS = 4 * 2**20


@compiled("state")
@dataclass(frozen=True)
class AttentionMass:
    """Attention that an entry got from all queries so far (H2O, arXiv 2306.14048, algorithm 1)."""

    group: Group = "mean"

    @property
    def needs(self) -> Needs:
        """State 0, to which every pass adds."""
        return Needs(state=1, mass=self.group)

    def score(self, view: CacheView) -> Tensor:
        """The accumulated mass."""
        return view.state()[:, 0]


@dataclass(frozen=True)
class NewestAttention:
    """The newest query's attention, averaged over a layer's heads (TOVA, arXiv 2401.06104)."""

    needs: ClassVar[Needs] = Needs(queries=1)

    def score(self, view: CacheView) -> Tensor:
        """Window attention of one query; entries of a layer at one position have one score."""
        position = view.to_rows(view.position, torch.iinfo(torch.int64).max)
        at, order = position.unflatten(0, (view.layers, -1)).sort(-1)  # [L, H, longest]
        paid = view.to_rows(view.attention(), 0.0).view_as(order).gather(-1, order)
        # Of each cell of a layer, what each head pays to the token there, 0 where it is gone.
        wanted = position.view(view.layers, 1, -1).expand(-1, view.kv_heads, -1).contiguous()
        place = torch.searchsorted(at, wanted).clamp(max=at.shape[-1] - 1)
        paid = paid.gather(-1, place).masked_fill(at.gather(-1, place) != wanted, 0.0)
        paid = paid.movedim(1, -1).contiguous()  # so that each sum is made in one order
        return view.from_rows(paid.mean(-1).view_as(position))


@dataclass(frozen=True)
class FusedAttention:
    """Attention of the last ``window`` queries, added up or the greatest (MorphKV, 2503.00979)."""

    window: int = 32
    fusion: Literal["sum", "max"] = "sum"
    group: Group = "mean"

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries."""
        return Needs(queries=self.window)

    def score(self, view: CacheView) -> Tensor:
        """Sum or maximum over the window's queries; the policy protects the window itself."""
        if self.fusion == "max":
            return view.attention(self.group, queries="max")
        known = torch.as_tensor(view.seen, device=view.row.device).clamp(max=self.window)
        return view.attention(self.group) * known


@dataclass(frozen=True)
class LayerPreferences:
    """Each layer gets what it prefers (CAKE, arXiv 2503.12491, section 4).

    An entry's indicator is the mean of its shares of the window's attention, and
    ``gamma`` times their variance, pooled. A layer's preference is ``H^(1 / tau1) V^(1 / tau2)``:
    the entropy of the window's attention to the prefix, and the sum of its variance over queries.
    """

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.6
    tau2: float = 0.6

    def __post_init__(self) -> None:
        check_pooling(self.window, self.kernel)

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries."""
        return Needs(queries=self.window)

    def score(self, view: CacheView) -> Tensor:
        """``-(rank + 1) / preference``: under one budget for all rows each layer keeps its part.

        The best of a row's prefix has rank 0; of equal ones the newer is better.
        """
        prefix = view.position < view.seen - self.window
        varied = view.attention(queries="variance")
        indicator = (view.attention() + self.gamma * varied).masked_fill(~prefix, 0.0)
        indicator = pooled(indicator, view, self.kernel, "avg").masked_fill(~prefix, -1.0)
        rank = _ranks(indicator, view)
        # Means over a group's heads: what they lack of sums is one factor for all layers.
        dispersion = self._of_layers(view.attention(queries="entropy"), prefix, view)
        shift = self._of_layers(varied, prefix, view)
        preference = dispersion ** (1 / self.tau1) * shift ** (1 / self.tau2)
        # Where no layer prefers anything (a single query, or none in the window) all are alike.
        preference = preference.view(view.sequences, -1)
        some = preference.amax(1, keepdim=True) > 0
        preference = torch.where(some, preference, torch.ones_like(preference)).flatten()
        own = preference.repeat_interleave(view.kv_heads)[view.row]
        return -(rank + 1) / own

    def _of_layers(self, values: Tensor, prefix: Tensor, view: CacheView) -> Tensor:
        """Add up ``values [N]`` of the prefix, ``[layers]``."""
        by_row = view.to_rows(values.masked_fill(~prefix, 0.0), 0.0).sum(1)
        return by_row.view(view.layers, -1).sum(1)


@dataclass(frozen=True)
class CriticalAttention(WindowAttention):
    """Window attention times what an entry adds to the stream (CriticalKV, arXiv 2502.03805).

    State 0 is that size: the L1 norm of the value behind a head's part of the output matrix, the
    mean over the group's heads. ``alpha`` of a row's share, without the window, goes by attention
    alone, so that what is kept has most of it (assumption of the paper's bound).
    """

    alpha: float = 0.5
    epsilon: float = 1e-4

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries, output matrices for state 0, and what a row may keep."""
        return Needs(queries=self.window, state=1, outputs=True, shares=True)

    def on_append(self, new: NewTokens) -> Tensor:
        """The size of what each entry adds, ``[B, T, L, H, 1]``."""
        values = new.values()
        batch, layers, heads, count, _ = values.shape
        sizes = []
        for layer, value in enumerate(values.permute(1, 2, 0, 3, 4).flatten(2, 3)):  # [H, B T, D]
            output = new.outputs(layer).unflatten(0, (heads, -1))  # [H, G, D, d]
            block = max(1, _BLOCK_ELEMENTS // output[:, :, 0].numel())
            added = (part[:, None] @ output for part in value.split(block, 1))
            sizes.append(torch.cat([one.abs().sum(-1).mean(1) for one in added], -1))
        return torch.stack(sizes).view(layers, heads, batch, count).permute(2, 3, 0, 1)[..., None]

    def score(self, view: CacheView) -> Tensor:
        """``(attention + epsilon)`` times state 0; infinity for the best by attention alone."""
        observing = view.position >= view.seen - self.window
        paid = super().score(view)
        rank = _ranks(paid.masked_fill(observing, -1.0), view)
        assert view.share is not None
        free = (view.share - self.window).clamp(min=0)
        first = rank < (self.alpha * free.double()).long()[view.row]
        weighed = (paid + self.epsilon) * view.state()[:, 0]
        return weighed.masked_fill(first | observing, torch.inf)


@compiled("state")
@dataclass(frozen=True)
class Milestones:
    """Keeps what was attended to the latest (RaaS, arXiv 2502.11147).

    State 0 is a timestamp: the token index of the last query that paid an entry at least ``alpha``
    of its attention, the entry's own at first. Tokens of prompts have infinity: they stay.
    """

    alpha: float = 0.0001
    group: Group = "max"
    needs: ClassVar[Needs] = Needs(queries=1, state=1)

    def on_append(self, new: NewTokens) -> Tensor:
        """The token's index, or infinity, ``[B, T, 1, 1, 1]``."""
        stamp = new.position.float()
        stamp = torch.full_like(stamp, torch.inf) if new.prompt else stamp
        return stamp[:, :, None, None, None]

    def on_step(self, view: CacheView, memory: dict[str, Tensor]) -> Tensor:
        """Stamp what the newest query attends to."""
        stamp = view.state()
        attended = view.attention(self.group) >= self.alpha
        newest = stamp[:, 0].clamp(min=view.seen - 1)
        return torch.where(attended, newest, stamp[:, 0])[:, None]

    def score(self, view: CacheView) -> Tensor:
        """The timestamp."""
        return view.state()[:, 0]


@dataclass(frozen=True)
class AttentionAndRedundancy:
    """Window attention minus redundancy (R-KV, arXiv 2505.24133)."""

    window: int = 8
    weight: float = 0.1
    kernel: int = 7
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_pooling(self.window, self.kernel)

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries, and keys."""
        return Needs(queries=self.window, keys=True)

    def score(self, view: CacheView) -> Tensor:
        """``weight I - (1 - weight) R``; the policy protects the window."""
        prefix = view.position < view.seen - self.window
        paid = view.attention("max", of="logits").masked_fill(~prefix, 0.0)
        importance = pooled(paid, view, self.kernel, "max")
        return self.weight * importance - (1 - self.weight) * redundancy(view, self.threshold)


@dataclass(frozen=True)
class GlobalAttention:
    """Window attention that decays from eviction to eviction (G-KV, arXiv 2512.00504, eq. 1-5).

    State 0 is this score F, -1 while an entry has none: nothing in the window has one.
    """

    window: int = 16
    alpha: float = 0.8
    form: Literal["max", "mean", "sum"] = "max"
    redundancy: bool = True
    weight: float = 0.7
    threshold: float = 0.5
    group: Group = "max"

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries, one state, and keys where redundancy counts."""
        return Needs(queries=self.window, keys=self.redundancy, state=1)

    def on_append(self, new: NewTokens) -> Tensor:
        """No score yet."""
        return torch.full((*new.position.shape, 1, 1, 1), -1.0, device=new.position.device)

    def score(self, view: CacheView) -> Scores:
        """F, and less redundancy if that counts; the policy protects the window."""
        prefix = view.position < view.seen - self.window
        now = _over_greatest(view.attention(self.group), prefix, view)
        before = view.state()[:, 0]
        if self.form == "max":
            joined = torch.maximum(self.alpha * before, now)
        elif self.form == "mean":
            joined = self.alpha * before + (1 - self.alpha) * now
        else:
            joined = self.alpha * before + now
        score = torch.where(before < 0, now, joined)
        state = torch.where(prefix, score, before)[:, None]
        if self.redundancy:
            alike = redundancy(view, self.threshold, only_similar=True)
            alike = _over_greatest(alike, prefix, view)
            score = self.weight * score - (1 - self.weight) * alike
        return Scores(score, state)


@dataclass(frozen=True)
class ExpectedAttention:
    """Attention that queries to come will pay on average (Expected Attention, arXiv 2510.00636).

    Queries are taken to be normally distributed before RoPE, as the last ``window`` were; the first
    ``sinks`` tokens count neither among them nor among what is attended to.
    """

    window: int = 256
    ahead: int = 512
    sinks: int = 4
    epsilon: float = 0.01

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries and where they were asked; keys and values."""
        return Needs(queries=self.window, positions=True, keys=True, values=True)

    def score(self, view: CacheView) -> Tensor:
        """``(epsilon + E) |v|``, with E the mean over the group of the expected shares.

        Of a normal query, the mean of ``exp(q.k)`` is ``exp(m + s / 2)``, with m and s the mean
        and the variance of ``q.k``: no covariance matrix of queries is needed.
        """
        queries, at = view.future_queries(self.ahead)  # [L, Hq, w, D]
        counts = at >= self.sinks
        counts = torch.where(counts.any(), counts, at >= 0).float()[:, None]  # [w, 1]
        total = counts.sum().clamp(min=1)
        keys = view.to_rows(view.keys().float(), 0.0).unflatten(0, (view.layers, -1))
        attended = view.live() & (view.to_rows(view.position, -1) >= self.sinks)
        attended = attended.view(view.layers, view.kv_heads, 1, -1)
        block = max(1, _BLOCK_ELEMENTS // queries[0, ..., 0].numel())  # keys, each by itself
        shares = []
        for asked, key, there in zip(queries, keys, attended, strict=True):
            grouped = asked.unflatten(0, (view.kv_heads, -1)) * asked.shape[-1] ** -0.5
            parts = []
            for some in key.split(block, 1):
                logits = grouped @ some[:, None].transpose(-1, -2)  # [H, G, w, block]
                mean = (logits * counts).sum(2, keepdim=True) / total
                variance = ((logits - mean).square() * counts).sum(2) / total
                parts.append(mean[:, :, 0] + variance / 2)
            expected = torch.cat(parts, -1).masked_fill(~there, -torch.inf)
            shares.append(expected.softmax(-1).nan_to_num(0.0).mean(1))
        share = view.from_rows(torch.cat(shares))
        return (share + self.epsilon) * view.values().float().norm(dim=-1)


@dataclass(frozen=True)
class TrigonometricSeries:
    """Attention by distance, from the centers of queries before RoPE (TriAttention, 2604.04921).

    The centers are means over the last ``window`` queries; the paper's are calibrated beforehand.
    Distances grow by powers of 2, up to ``ahead`` tokens from the newest.
    """

    window: int = 256
    ahead: int = 65536

    @property
    def needs(self) -> Needs:
        """The last ``window`` queries and where they were asked; keys."""
        return Needs(queries=self.window, positions=True, keys=True)

    def score(self, view: CacheView) -> Tensor:
        """The greatest z-score among the group's heads of the series, and what it leaves out.

        The series ``sum |E q_f| |k_f| cos(w_f distance + phase)`` is the product of the key and the
        center turned on; of queries around the center ``(E |q_f| - |E q_f|) |k_f|`` are left out.
        """
        turned, at = view.future_queries(self.ahead, doubling=True)  # [L, Hq, w, D]
        asked, _ = view.future_queries(1)  # one rotation, not the mean of several, keeps norms
        known = (at >= 0).float()[:, None]
        total = known.sum().clamp(min=1)
        center = (turned * known).sum(2) / total
        norm = (view.bands(asked) * known).sum(2) / total
        spread = norm - view.bands((asked * known).sum(2) / total)
        keys = view.to_rows(view.keys().float(), 0.0)  # [rows, longest, D]
        center, spread = (x.reshape(len(keys), -1, x.shape[-1]) for x in (center, spread))
        series = center @ keys.transpose(1, 2) + spread @ view.bands(keys).transpose(1, 2)
        live, count = view.live()[:, None], view.length.clamp(min=1)[:, None, None]
        apart = series - series.masked_fill(~live, 0.0).sum(-1, keepdim=True) / count
        deviation = (apart.square().masked_fill(~live, 0.0).sum(-1, keepdim=True) / count).sqrt()
        return view.from_rows((apart / deviation.clamp(min=1e-6)).amax(1))


def redundancy(view: CacheView, threshold: float, only_similar: bool = False) -> Tensor:
    """How much each key resembles the other keys of its row, ``[N]``; adds up to 1 in a row.

    Softmax over the row of the mean cosine to all its keys, of which the newest similar one of each
    key counts as 0, and so does its own.

    Args:
        threshold: cosine from 0 above which two keys are similar.
        only_similar: cosines that are not above ``threshold`` count as 0.
    """
    key = view.keys().float()
    key = view.to_rows(key / (key.norm(dim=-1, keepdim=True) + 1e-8), 0.0)
    order = view.to_rows(view.position.float(), float("inf")).argsort(-1)
    key = key.gather(1, order[..., None].expand_as(key))
    live = view.live()  # padding is last in order, too
    rows, longest = live.shape
    column = torch.arange(longest, device=live.device)
    total = key.new_zeros(rows, longest)
    some_rows = max(1, _BLOCK_ELEMENTS // longest**2)
    some_keys = max(1, _BLOCK_ELEMENTS // longest)
    for start in range(0, rows, some_rows):
        part = slice(start, start + some_rows)
        for at in column.split(some_keys):
            cosine = key[part, at] @ key[part].transpose(1, 2)
            cosine = cosine.masked_fill(column == at[:, None], 0.0)
            similar = (cosine > threshold) & live[part, None]
            newest = torch.where(similar, column, -1).amax(-1, keepdim=True)
            if only_similar:
                cosine = cosine.masked_fill(~similar, 0.0)
            total[part] += cosine.masked_fill(column == newest, 0.0).sum(1)
    mean = total / view.length.clamp(min=1)[:, None]
    share = mean.masked_fill(~live, -torch.inf).softmax(-1)
    return view.from_rows(share.scatter(-1, order, share))


def _ranks(values: Tensor, view: CacheView) -> Tensor:
    """Rank each entry in its row by ``values [N]``: int64, 0 the best; of equal ones the newer."""
    newest_first = view.to_rows(view.position, -1).argsort(-1, descending=True)
    rows = view.to_rows(values, -torch.inf).gather(1, newest_first)
    best_first = newest_first.gather(1, rows.argsort(dim=-1, descending=True, stable=True))
    column = torch.arange(best_first.shape[1], device=best_first.device)
    return view.from_rows(best_first.scatter(1, best_first, column.expand_as(best_first)))


def _over_greatest(values: Tensor, prefix: Tensor, view: CacheView) -> Tensor:
    """Divide ``values [N]``, from 0, by the greatest of the row's prefix; 0 outside it."""
    values = values.masked_fill(~prefix, 0.0)
    greatest = view.to_rows(values, 0.0).amax(-1)[view.row]
    return torch.where(greatest > 0, values / greatest, 0.0)


def _h2o(recent: float, group: Group) -> Policy:
    return Policy("h2o", AttentionMass(group), HeadAllocation(), recent_share=recent)


def _tova() -> Policy:
    return Policy("tova", NewestAttention(), EvenLayerAllocation())


def _snapkv(window: int, kernel: int, pool: Literal["avg", "max"], group: Group) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    return Policy("snapkv", scoring, HeadAllocation(), protect_recent=window)


def _criticalkv(
    alpha: float,
    epsilon: float,
    window: int,
    kernel: int,
    pool: Literal["avg", "max"],
    group: Group,
) -> Policy:
    scoring = CriticalAttention(window, kernel, pool, group, alpha, epsilon)
    return Policy("criticalkv", scoring, HeadAllocation(), protect_recent=window)


def _morphkv(window: int, fusion: Literal["sum", "max"], group: Group) -> Policy:
    scoring = FusedAttention(window, fusion, group)
    return Policy("morphkv", scoring, HeadAllocation(), protect_recent=window)


def _rkv(window: int, lambda_: float, kernel: int, threshold: float, interval: int) -> Policy:
    scoring = AttentionAndRedundancy(window, lambda_, kernel, threshold)
    return Policy("rkv", scoring, HeadAllocation(), protect_recent=window, interval=interval)


def _gkv(
    window: int,
    alpha: float,
    form: Literal["max", "mean", "sum"],
    redundancy: bool,
    lambda_: float,
    threshold: float,
    group: Group,
    interval: int,
) -> Policy:
    scoring = GlobalAttention(window, alpha, form, redundancy, lambda_, threshold, group)
    return Policy("gkv", scoring, HeadAllocation(), protect_recent=window, interval=interval)


def _cake(window: int, kernel: int, gamma: float, tau1: float, tau2: float) -> Policy:
    scoring = LayerPreferences(window, kernel, gamma, tau1, tau2)
    return Policy("cake", scoring, GlobalAllocation(), protect_recent=window)


def _raas(alpha: float, group: Group) -> Policy:
    return Policy("raas", Milestones(alpha, group), HeadAllocation(), keeps_prompt=True)


def _pyramidkv(
    beta: int, window: int, kernel: int, pool: Literal["avg", "max"], group: Group
) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    return Policy("pyramidkv", scoring, PyramidAllocation(window, beta), protect_recent=window)


def _adakv(
    floor: float, window: int, kernel: int, pool: Literal["avg", "max"], group: Group
) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    return Policy("adakv", scoring, LayerAllocation(floor), protect_recent=window)


def _ada_pyramidkv(
    beta: int, floor: float, window: int, kernel: int, pool: Literal["avg", "max"], group: Group
) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    allocation = LayerAllocation(floor, PyramidAllocation(window, beta))
    return Policy("ada-pyramidkv", scoring, allocation, protect_recent=window)


def _expected(
    window: int, ahead: int, sinks: int, epsilon: float, floor: float, interval: int
) -> Policy:
    scoring = ExpectedAttention(window, ahead, sinks, epsilon)
    sharing = LayerAllocation(floor)
    return Policy("expected-attention", scoring, sharing, protect_first=sinks, interval=interval)


def _triattention(window: int, ahead: int, interval: int) -> Policy:
    scoring = TrigonometricSeries(window, ahead)
    return Policy("triattention", scoring, HeadAllocation(), interval=interval)


_BETA = Parameter(
    20, "steepness: the top layer's share is 1 / beta of the mean; 1: level", "section 5", least=1
)
_WINDOW_ATTENTION = {"window": WINDOW, "kernel": KERNEL, "pool": POOL, "group": group()}
_OBSERVERS = "newest queries, which observe and always stay"
_QWEN = "as DBTrimKV's authors run it"
_ALIKE = "cosine above which two keys are similar"

ATTENTION_PRESETS: dict[str, Preset] = {
    "snapkv": Preset(
        _snapkv,
        "arXiv 2404.14469",
        "SnapKV: LLM Knows What You are Looking for Before Generation",
        _WINDOW_ATTENTION,
    ),
    "criticalkv": Preset(
        _criticalkv,
        "arXiv 2502.03805",
        "CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective",
        {
            "alpha": Parameter(
                0.5,
                "part of the budget that goes by attention alone",
                "experiments",
                least=0,
                most=1,
            ),
            "epsilon": Parameter(1e-4, "what attention is raised by", "released code", least=0),
            **_WINDOW_ATTENTION,
        },
    ),
    "h2o": Preset(
        _h2o,
        "arXiv 2306.14048",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        {
            "recent": Parameter(
                0.5, "share of the budget for the newest tokens", "section 5", least=0, most=1
            ),
            "group": group(),
        },
    ),
    "tova": Preset(_tova, "arXiv 2401.06104", "Transformers are Multi-State RNNs"),
    "pyramidkv": Preset(
        _pyramidkv,
        "arXiv 2406.02069",
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        {"beta": _BETA, **_WINDOW_ATTENTION},
    ),
    "adakv": Preset(
        _adakv,
        "arXiv 2407.11550",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM "
        "Inference",
        {"floor": FLOOR, **_WINDOW_ATTENTION},
    ),
    "ada-pyramidkv": Preset(
        _ada_pyramidkv,
        "arXiv 2407.11550",
        "Ada-KV over PyramidKV (arXiv 2406.02069)",
        {"beta": _BETA, "floor": FLOOR, **_WINDOW_ATTENTION},
    ),
    "morphkv": Preset(
        _morphkv,
        "arXiv 2503.00979",
        "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
        {
            "window": Parameter(
                32,
                _OBSERVERS,
                "runs of LongWriter and LongBench",
                least=1,
            ),
            "fusion": Parameter("sum", "fusion of the window's queries", choices=("sum", "max")),
            "group": group(),
        },
    ),
    "rkv": Preset(
        _rkv,
        "arXiv 2505.24133",
        "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
        {
            "window": Parameter(8, _OBSERVERS, "section 4.1", least=1),
            "lambda": Parameter(
                0.1, "weight of attention; redundancy has the rest", "section 4.1", least=0, most=1
            ),
            "kernel": Parameter(
                7, "positions that are pooled together, an odd number", "released code", least=1
            ),
            "threshold": Parameter(0.5, _ALIKE, "released code", least=0, most=1),
            "interval": replace(INTERVAL, default=128, place="section 3.1: B_buffer"),
        },
    ),
    "gkv": Preset(
        _gkv,
        "arXiv 2512.00504",
        "G-KV: Decoding-Time KV Cache Eviction with Global Attention",
        {
            "window": Parameter(16, _OBSERVERS, "section 7.2", least=1),
            "alpha": Parameter(
                0.8,
                "what is left of the score at the next eviction",
                "section 7.3",
                least=0,
                most=1,
            ),
            "form": Parameter(
                "max",
                "how old and new scores are joined",
                "equation 3; mean: 4, sum: 5",
                choices=("max", "mean", "sum"),
            ),
            "redundancy": Parameter(True, "whether redundancy lowers scores", "appendix D"),
            "lambda": Parameter(
                0.7, "weight of attention; redundancy has the rest", "section 7.3", least=0, most=1
            ),
            "threshold": Parameter(0.5, _ALIKE, "code of R-KV", least=0, most=1),
            "group": group("max", "section 3"),
            "interval": replace(INTERVAL, default=128, place="section 7.2"),
        },
    ),
    "cake": Preset(
        _cake,
        "arXiv 2503.12491",
        "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences",
        {
            "window": Parameter(32, _OBSERVERS, "released code", least=1),
            "kernel": KERNEL,
            "gamma": Parameter(
                200.0, "weight of the variance of attention", "released code", least=0.0
            ),
            "tau1": Parameter(1.6, "how little the entropy counts", _QWEN, least=0.01),
            "tau2": Parameter(0.6, "how little the variance counts", _QWEN, least=0.01),
        },
    ),
    "raas": Preset(
        _raas,
        "arXiv 2502.11147",
        "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning",
        {
            "alpha": Parameter(
                0.0001, "attention from which an entry is used", "experiments", least=0, most=1
            ),
            "group": group("max"),
        },
    ),
    "expected-attention": Preset(
        _expected,
        "arXiv 2510.00636",
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries "
        "Distribution",
        {
            "window": Parameter(
                256, "newest queries, whose statistics count", "released code, decoding", least=1
            ),
            "ahead": Parameter(512, "positions to come", "released code", least=1),
            "sinks": Parameter(4, "first tokens, which always stay", "released code", least=0),
            "epsilon": Parameter(
                0.01, "what each expected share is raised by", "kvpress's evaluation", least=0
            ),
            "floor": FLOOR,
            "interval": replace(INTERVAL, default=512, place="released code, decoding"),
        },
    ),
    "triattention": Preset(
        _triattention,
        "arXiv 2604.04921",
        "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
        {
            "window": Parameter(256, "newest queries, whose centers count", least=1),
            "ahead": Parameter(65536, "the farthest distance to come", "section 4", least=1),
            "interval": replace(INTERVAL, default=128, place="section 4: beta"),
        },
    ),
}
