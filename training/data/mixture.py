"""A weighted mixture of data sources whose order depends on a seed only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from mmkv.training.data.conversations import DataError

Item = TypeVar("Item")

_BLOCK = 4096  # draws made at once
_DRAWS, _ORDER, _SPARE = range(3)  # keeps the random streams of different purposes apart


class Mixture(Generic[Item]):
    """An endless sequence of rows; element n is a function of (seed, n) alone.

    Each element's source is drawn by weight. A source is walked in a shuffled order that is new in
    every epoch, so none of its rows comes a second time before all came once.

    Args:
        sources: rows of each source; their order is part of what the mixture is.
        weights: one for each source, above 0, need not sum to 1.
        seed: at least 0.

    Raises:
        DataError: no sources, an empty one, or weights that do not fit.
    """

    def __init__(
        self, sources: Sequence[Sequence[Item]], weights: Sequence[float], seed: int = 0
    ) -> None:
        if not sources or not all(len(source) for source in sources):
            raise DataError("a mixture needs at least one source and a row in each")
        if len(weights) != len(sources) or not all(0 < w < float("inf") for w in weights):
            raise DataError(f"{len(sources)} sources need as many weights above 0, not {weights}")
        if seed < 0:
            raise DataError(f"the seed is {seed}; give 0 or more")
        self.sources, self.seed = sources, seed
        self._edges = np.cumsum(np.asarray(weights, np.float64) / np.sum(weights))[:-1]
        # Per block, how often each source was drawn before it. Only reading is slow: counting
        # draws to reach element 10**6 takes a few milliseconds.
        self._before = [np.zeros(len(sources), np.int64)]
        self._drawn: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def locate(self, n: int) -> tuple[int, int, int]:
        """Find source, epoch of that source, and row in it, of element ``n``.

        Raises:
            IndexError: below 0.
        """
        if n < 0:
            raise IndexError(f"element {n} of a mixture that starts at 0")
        block, within = divmod(n, _BLOCK)
        while len(self._before) <= block:
            last = len(self._before) - 1
            counts = np.bincount(self._block(last), minlength=len(self.sources))
            self._before.append(self._before[last] + counts)
        drawn = self._block(block)
        source = int(drawn[within])
        earlier = int(self._before[block][source]) + int((drawn[:within] == source).sum())
        epoch, place = divmod(earlier, len(self.sources[source]))
        return source, epoch, int(self._order(source, epoch)[place])

    def __getitem__(self, n: int) -> Item:
        source, _, row = self.locate(n)
        return self.sources[source][row]

    def replacement(self, n: int, attempt: int) -> Item:
        """Return the replacement number ``attempt`` for an element ``n`` that cannot be used."""
        pick = _uniform(self.seed, 2, _SPARE, n, attempt)
        rows = self.sources[int(np.searchsorted(self._edges, pick[0], side="right"))]
        return rows[int(pick[1] * len(rows))]

    def walk(self, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[tuple[int, Item]]:
        """Yield elements from ``start`` on with their numbers; nothing before is read.

        The processes 0 .. ``world`` - 1 take turns: together they see the order of a single one.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} processes")
        n = start + (rank - start) % world
        while True:
            yield n, self[n]
            n += world

    def _block(self, block: int) -> np.ndarray:
        if self._drawn[0] != block:
            draws = _uniform(self.seed, _BLOCK, _DRAWS, block)
            self._drawn = (block, np.searchsorted(self._edges, draws, side="right"))
        return self._drawn[1]

    def _order(self, source: int, epoch: int) -> np.ndarray:
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            keys = _uniform(self.seed, len(self.sources[source]), _ORDER, source, epoch)
            known = self._orders[source] = (epoch, np.argsort(keys, kind="stable"))
        return known[1]


def _uniform(seed: int, count: int, *stream: int) -> np.ndarray:
    """Draw float64 ``[count]`` in [0, 1), a function of the arguments alone.

    Uses raw Philox words, which numpy keeps stable over versions, unlike its distributions.
    """
    key = np.random.SeedSequence([seed, *stream]).generate_state(2, np.uint64)
    return (np.random.Philox(key=key).random_raw(count) >> np.uint64(11)) * 2.0**-53
