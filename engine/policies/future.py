"""Policies that foresee attention from queries before RoPE: Expected Attention, TriAttention.

Both take the queries to come to be as the newest ones were, and turn these on to where others will
be asked. The papers count over a whole prompt, or over texts beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv.engine.policies.allocation import HeadAllocation, LayerAllocation
from mmkv.engine.policies.base import CacheView, Needs, Policy
from mmkv.engine.policies.preset import FLOOR, INTERVAL, Parameter, Preset

# Elements of one block of logits: temporaries stay near 16 MiB however long rows are.
_BLOCK_ELEMENTS = 4 * 2**20


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


def _expected(
    window: int, ahead: int, sinks: int, epsilon: float, floor: float, interval: int
) -> Policy:
    scoring = ExpectedAttention(window, ahead, sinks, epsilon)
    sharing = LayerAllocation(floor)
    return Policy("expected-attention", scoring, sharing, protect_first=sinks, interval=interval)


def _triattention(window: int, ahead: int, interval: int) -> Policy:
    scoring = TrigonometricSeries(window, ahead)
    return Policy("triattention", scoring, HeadAllocation(), interval=interval)


FUTURE_PRESETS: dict[str, Preset] = {
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
