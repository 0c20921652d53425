"""NativeEvictor: eviction of one sequence in C, for the policies a decode loop runs on."""

from __future__ import annotations

import torch

from engine.cache import RaggedCache
from engine.native.binding import Eviction, byref, library
from engine.native.cache_view import Lender
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import Policy
from engine.policies.scoring import Recency, Retention

_SCORERS: dict[type, int] = {Retention: 0, Recency: 1}
_ALLOCATIONS: dict[type, int] = {GlobalAllocation: 0, HeadAllocation: 1}

# The C code keeps the victims in a heap: right for the few of a decode step, while torch's
# selection is as fast for the many of a prefill chunk.
_MOST_VICTIMS = 1024


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
        self._order = Eviction(
            scorer=_SCORERS[type(scoring)],
            allocation=_ALLOCATIONS[type(policy.allocation)],
            protect_first=policy.protect_first,
            protect_recent=policy.protect_recent,
            lookahead=scoring.lookahead if isinstance(scoring, Retention) else 1,
        )
        self._lender = Lender()
        self._scratch = torch.empty(loaded.mmkv_evict_scratch(_MOST_VICTIMS), dtype=torch.uint8)
        self._order.most, self._order.scratch = _MOST_VICTIMS, self._scratch.data_ptr()

    @staticmethod
    def supports(policy: Policy) -> bool:
        """Whether C knows this scoring, allocation and admission."""
        return (
            type(policy.scoring) in _SCORERS
            and type(policy.allocation) in _ALLOCATIONS
            and not policy.admission.selective
        )

    @property
    def dropped(self) -> int:
        """How many entries :meth:`evict` has dropped so far, in all calls."""
        return self._order.dropped

    def evict(self, cache: RaggedCache, seq: int, seen: int, entries: int, budget: int) -> bool:
        """Drop the lowest of the ``entries`` of sequence ``seq`` until ``budget`` holds.

        Returns:
            whether it was done; if not (too many victims for this way of selecting), nothing
            has changed.
        """
        order = self._order
        if entries - budget > _MOST_VICTIMS:
            return False
        order.seen, order.budget, order.entries = seen, budget, entries
        with self._lender.lend(cache, [seq]) as views:
            return bool(self._library.mmkv_evict(views, byref(order)))
