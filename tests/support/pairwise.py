"""Rows of a table in which any two values of two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Return few rows in which any two values meet that meet in an allowed row (greedy)."""
    product = (
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    )
    pairs = {
        tuple(row.items()): set(itertools.combinations(row.items(), 2))
        for row in product
        if allowed(row)
    }
    left, rows = set().union(*pairs.values()), []
    while left:
        best = max(pairs, key=lambda row: len(pairs[row] & left))
        rows.append(dict(best))
        left -= pairs[best]
    return rows
