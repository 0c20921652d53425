"""NativeEvictor: eviction in C, of a batch at once, for the policies a decode loop runs on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.cache import RaggedCache
from engine.native.binding import Eviction, library
from engine.native.cache_view import Lender
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import Policy
from engine.policies.scoring import Recency, Retention

_SCORERS: dict[type, int] = {Retention: 0, Recency: 1}
_ALLOCATIONS: dict[type, int] = {GlobalAllocation: 0, HeadAllocation: 1}

# The C code keeps the victims in a heap: right for the few of a decode step, while torch's
# selection is as fast for the many of a prefill chunk.
_MOST_VICTIMS = 1024
# Waking a second thread takes as long as looking through some thousand entries.
_ENTRIES_PER_THREAD = 2**14


class NativeEvictor:
    """Scores, selects and drops like :meth:`engine.policies.Policy.victims` and ``drop``.

    Both leave the same pages in the same order, so the two paths can take turns on one session.
    """

    def __init__(self, policy: Policy) -> None:
        loaded = library()
        if isinstance(loaded, str) or not self.supports(policy):
            raise RuntimeError(f"no native eviction for policy {policy.name!r}")
        self._library = loaded
        scoring = policy.scoring
        self._policy = Eviction(
            scorer=_SCORERS[type(scoring)],
            allocation=_ALLOCATIONS[type(policy.allocation)],
            protect_first=policy.protect_first,
            protect_recent=policy.protect_recent,
            lookahead=scoring.lookahead if isinstance(scoring, Retention) else 1,
            guess=math.inf,
            most=_MOST_VICTIMS,
        )
        self._lender = Lender()
        self._orders = (Eviction * 0)()
        self._each: list[Eviction] = []  # to take one out of the array anew is slow
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def supports(policy: Policy) -> bool:
        """Whether C knows this scoring, allocation and admission."""
        return (
            type(policy.scoring) in _SCORERS
            and type(policy.allocation) in _ALLOCATIONS
            and not policy.admission.selective
        )

    def dropped(self, lanes: int) -> list[int]:
        """Per lane, how many entries all calls of :meth:`evict` so far have dropped."""
        if lanes > len(self._each):
            self._make_orders(lanes)
        return [order.dropped for order in self._each[:lanes]]

    def evict(self, cache: RaggedCache, lanes: Sequence[tuple[int, int, int, int]]) -> list[bool]:
        """Drop the lowest entries of different sequences until their budgets hold.

        Args:
            lanes: per sequence its slot, tokens seen, entries held and entries that may stay.

        Returns:
            per sequence whether it was done; if not (too many victims for this way of selecting),
            nothing of it has changed.
        """
        count, total = len(lanes), 0
        if count > len(self._each):
            self._make_orders(count)
        for order, (_, seen, entries, budget) in zip(self._each, lanes, strict=False):
            order.seen, order.budget, order.entries = seen, budget, entries
            total += entries
        threads = max(1, min(torch.get_num_threads(), count, total // _ENTRIES_PER_THREAD))
        with self._lender.lend(cache, [lane[0] for lane in lanes]) as views:
            self._library.mmkv_evict(views, self._orders, count, threads)
        return [order.found >= 0 for order in self._each[:count]]

    def _make_orders(self, lanes: int) -> None:
        each = self._library.mmkv_evict_scratch(_MOST_VICTIMS)
        before = self.dropped(len(self._each))
        self._scratch = torch.empty(lanes, each, dtype=torch.uint8)
        self._orders = (Eviction * lanes)(*([self._policy] * lanes))
        self._each = list(self._orders)
        for lane, order in enumerate(self._each):
            order.scratch = self._scratch[lane].data_ptr()
            order.dropped = before[lane] if lane < len(before) else 0
