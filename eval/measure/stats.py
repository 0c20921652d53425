"""Intervals and paired tests over dialogues.

Questions of one dialogue share a memory and are not independent. So the dialogue is the unit that
is resampled (cluster bootstrap) and whose sign is flipped (paired permutation test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mean:
    """A weighted mean over dialogues with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A paired difference of means, its 95 % bootstrap interval and two-sided p."""

    value: float
    low: float
    high: float
    p: float


def mean(sums: Sequence[float], counts: Sequence[float], draws: int = 4000, seed: int = 0) -> Mean:
    """Estimate the mean per item with a bootstrap over dialogues.

    Args:
        sums, counts: per dialogue the sum over its items and their number.
    """
    total, weight = np.asarray(sums, float), np.asarray(counts, float)
    picks = _picks(len(total), draws, seed)
    drawn = total[picks].sum(1) / weight[picks].sum(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Mean(float(total.sum() / weight.sum()), float(low), float(high))


def paired(
    first: Sequence[float],
    second: Sequence[float],
    counts: Sequence[float],
    draws: int = 10000,
    seed: int = 0,
) -> Difference:
    """Estimate ``first - second`` per item, over the same dialogues.

    The p-value is that of a sign-flip permutation test on the dialogues' differences, with the
    observed arrangement counted among the draws (so it is never 0).
    """
    gap, weight = np.asarray(first, float) - np.asarray(second, float), np.asarray(counts, float)
    picks = _picks(len(gap), min(draws, 4000), seed)
    drawn = gap[picks].sum(1) / weight[picks].sum(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    generator = np.random.default_rng(seed + 1)
    signs = generator.integers(0, 2, (draws, len(gap))) * 2 - 1
    extreme = np.abs(signs @ gap) >= abs(gap.sum()) - 1e-12
    p = (1 + int(extreme.sum())) / (draws + 1)
    return Difference(float(gap.sum() / weight.sum()), float(low), float(high), p)


def _picks(size: int, draws: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, size, (draws, size))
