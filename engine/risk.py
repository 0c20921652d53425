"""Stand-in for the meter of what has been forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mmkv.engine.sequence import CachedSequence


@dataclass(frozen=True)
class Risk:
    """Shares of predicted attention weight that are gone, and the weights."""

    total: float
    by_modality: dict[str, float] = field(default_factory=dict)
    forgotten: float = 0.0
    held: float = 0.0


def stand_in(session: CachedSequence) -> Risk | None:
    """Sum what a record says died."""
    if not session.engine.model.needs.gates:
        return None
    record = session.record().read(session)
    dead, seen = record.deaths, session.seen
    real = np.isfinite(dead["log_beta"])
    lost = np.exp(dead["log_beta"][real].astype(np.float64) * (seen - dead["position"][real])).sum()
    held = np.exp(record.log_beta.astype(np.float64) * (seen - record.position)).sum()
    return Risk(float(lost / max(lost + held, 1e-300)), {}, float(lost), float(held))
