"""Admission: which entries may enter the long-term cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.policies.base import CacheView


@dataclass(frozen=True)
class AdmitAll:
    """Every entry enters; the budget alone decides."""

    selective: ClassVar[bool] = False

    def refused(self, view: CacheView) -> Tensor:
        """Nothing is refused."""
        return view.row.new_empty(0)
