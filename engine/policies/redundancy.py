"""Scorers that weigh attention against redundancy: entries whose keys resemble others' go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmkv.engine.policies.base import CacheView, Group, Needs, NewTokens, Scores
from mmkv.engine.policies.scoring import check_pooling, pooled

# Elements of one block of cosines: temporaries stay near 16 MiB however long rows are.
_BLOCK_ELEMENTS = 4 * 2**20


@dataclass(frozen=True)
class AttentionAndRedundancy:
    """Window attention minus redundancy (R-KV, arXiv 2505.24133, sections 3.2 to 3.4)."""

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

    def born(self, new: NewTokens) -> Tensor:
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
    return share.scatter(-1, order, share)[live]


def _over_greatest(values: Tensor, prefix: Tensor, view: CacheView) -> Tensor:
    """Divide ``values [N]``, from 0, by the greatest of the row's prefix; 0 outside it."""
    values = values.masked_fill(~prefix, 0.0)
    greatest = view.to_rows(values, 0.0).amax(-1)[view.row]
    return torch.where(greatest > 0, values / greatest, 0.0)
