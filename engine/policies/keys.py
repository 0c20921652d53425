"""Scorers that read nothing but keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.policies.base import CacheView, Needs


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
