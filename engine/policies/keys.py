"""Policies whose scores come from keys, and from values: KeyDiff, K-norm, LagKV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policies.base import CacheView, Needs, Policy
from mmkv.engine.policies.frozen import scaled
from mmkv.engine.policies.preset import RECENT, Parameter, Preset


@dataclass(frozen=True)
class KeyDifference:
    """Distance from the row's mean direction of keys (KeyDiff, arXiv 2504.15364, section 3)."""

    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: CacheView) -> Tensor:
        """Minus the cosine between a key and the mean of its row's normalised keys."""
        keys = F.normalize(view.keys().float(), dim=-1, eps=1e-12)
        mean = view.to_rows(keys, 0.0).sum(1) / view.length.clamp(min=1)[:, None]
        return -(keys * F.normalize(mean, dim=-1, eps=1e-12)[view.row]).sum(-1)


@dataclass(frozen=True)
class KeyNorm:
    """Keys of a small L2 norm stay (arXiv 2406.11430, section 3)."""

    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: CacheView) -> Tensor:
        """Minus the norm."""
        return -view.keys().float().norm(dim=-1)


@dataclass(frozen=True)
class NextChunk:
    """Spread of keys and values against the next chunk's range (LagKV, arXiv 2504.04704).

    Section 3, as kvpress computes it. The first ``sinks`` tokens are in no chunk; with less than
    two whole chunks the newest stay.
    """

    sinks: int = 4
    lag: int = 128
    needs: ClassVar[Needs] = Needs(keys=True, values=True)

    def score(self, view: CacheView) -> Tensor:
        """Rank in the chunk, from 0 to below 1; 1 where no whole chunk comes after."""
        place = view.position.masked_fill(view.position < self.sinks, -1).float()
        order = view.to_rows(place, float("inf")).argsort(dim=-1, stable=True)
        sinks = view.to_rows((place < 0).long(), 0).sum(-1)
        rows, longest = order.shape
        chunks = longest // self.lag
        if chunks < 2:
            return view.position.float()
        # The column of each entry of each chunk: sinks come first, then the chunks.
        column = torch.arange(chunks * self.lag, device=order.device) + sinks[:, None]
        source = order.gather(-1, column.clamp(max=longest - 1))
        ranks = self._ranks(view, source.unflatten(1, (chunks, self.lag)))
        whole = (view.length - sinks) // self.lag
        chunk = torch.arange(chunks, device=order.device).repeat_interleave(self.lag)
        ranked = chunk < whole[:, None] - 1
        score = torch.ones((rows, longest + 1), device=order.device)
        # What is not ranked goes to a column of its own: rows are ranked to different lengths.
        score.scatter_(-1, source.masked_fill(~ranked, longest), ranks.flatten(1))
        score = view.from_rows(score[:, :longest])
        return torch.where(whole[view.row] < 2, view.position.float(), score)

    def _ranks(self, view: CacheView, source: Tensor) -> Tensor:
        """Rank each entry in its chunk, divided by ``lag``.

        Args:
            source: ``[R, chunks, lag]``, columns of :meth:`CacheView.to_rows` of a chunk's entries.
        """
        # In float64: shares of a wide spread round to 0 and 1 in float32, and their sums tie.
        total = torch.zeros(source.shape, dtype=torch.float64, device=source.device)
        for entries in (view.keys(), view.values()):
            x = view.to_rows(entries.float(), 0.0)
            chunk = x.gather(1, source.flatten(1)[..., None].expand(-1, -1, x.shape[-1]))
            chunk = chunk.unflatten(1, source.shape[1:])
            # The next chunk's range, by feature; the last one, which is not ranked, gets another.
            least, most = (m.roll(-1, 1) for m in (chunk.amin(2), chunk.amax(2)))
            spread = scaled(chunk, least[:, :, None], most[:, :, None]).std(-1)
            total += spread.double().softmax(-1)
        return total.argsort(dim=-1, stable=True).argsort(-1).float() / self.lag


def _keydiff(recent: int) -> Policy:
    return Policy("keydiff", KeyDifference(), HeadAllocation(), protect_recent=recent)


def _knorm(recent: int) -> Policy:
    return Policy("knorm", KeyNorm(), HeadAllocation(), protect_recent=recent)


def _lagkv(sinks: int, lag: int) -> Policy:
    return Policy("lagkv", NextChunk(sinks, lag), HeadAllocation(), protect_first=sinks)


KEY_PRESETS: dict[str, Preset] = {
    "keydiff": Preset(
        _keydiff,
        "arXiv 2504.15364",
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference",
        {"recent": RECENT},
    ),
    "knorm": Preset(
        _knorm,
        "arXiv 2406.11430",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        {"recent": RECENT},
    ),
    "lagkv": Preset(
        _lagkv,
        "arXiv 2504.04704",
        "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        {
            "sinks": Parameter(4, "first tokens, which always stay", "kvpress", least=0),
            "lag": Parameter(128, "tokens of a chunk", "kvpress", least=1),
        },
    ),
}
