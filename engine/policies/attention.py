"""Scorers that read attention: the mass of all passes, or what recent queries pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmkv.engine.policies.base import CacheView, Group, Needs, compiled


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
        place = view.row // view.kv_heads * view.seen + view.position
        held = torch.zeros(view.layers * view.seen, dtype=torch.int64, device=place.device)
        held[place] = 1
        number = held.cumsum(0)[place] - 1
        # One cell a head and then a sum: adding up in place has no fixed order on a GPU.
        paid = torch.zeros(place.numel(), view.kv_heads, device=place.device)
        paid[number, view.row % view.kv_heads] = view.attention()
        return paid.mean(-1)[number]


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
        return view.attention(self.group) * min(self.window, view.seen)
