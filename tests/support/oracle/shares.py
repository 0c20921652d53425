"""What each group of rows may keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Row = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """Rows (layer, KV head) that compete, what they keep together and what each is sure of."""

    rows: list[Row]
    share: int
    floor: int = 0


def rows_of(layers: int, heads: int) -> list[Row]:
    """All rows, in order."""
    return [(layer, head) for layer in range(layers) for head in range(heads)]


def equal(total: int, parts: int) -> list[int]:
    """Equal shares; the first get one more, so that they add up to ``total``."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def equal_in_layers(total: int, layers: int, heads: int) -> list[int]:
    """Shares of rows, the same in all rows of a layer; the first layers get one more a row."""
    each, left = divmod(total, layers * heads)
    return [each + (layer < left // heads) for layer, _ in rows_of(layers, heads)]


def pyramid(total: int, layers: int, heads: int, window: int, beta: int) -> list[int]:
    """Shares of rows by PyramidKV (arXiv 2406.02069), section 4.2.1 and equation 1.

    ``k_total`` is what the windows of all rows leave; the top layer gets ``k_total / (beta m)``,
    the bottom ``2 k_total / m`` minus that, layers between them an arithmetic sequence. Here all
    is for one row, in exact fractions; what rounding down leaves goes to the first rows.
    """
    rows = layers * heads
    window = min(window, total // rows)
    mean = Fraction(total - rows * window, rows)
    top = mean / beta
    bottom = 2 * mean - top
    shares = []
    for layer, _ in rows_of(layers, heads):
        share = bottom - (bottom - top) / (layers - 1) * layer if layers > 1 else mean
        shares.append(window + math.floor(share))
    for number in range(total - sum(shares)):
        shares[number] += 1
    return shares
