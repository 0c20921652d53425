"""NativeEvictor: eviction in C, of a batch at once, for the policies a decode loop runs on."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.backends.cpu.binding import Eviction, library
from engine.backends.cpu.cache_views import CacheViews
from engine.cache import RaggedCache
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import Policy
from engine.policies.scoring import Recency, Retention

if TYPE_CHECKING:
    from engine.sequence import CachedSequence

_SCORERS: dict[type, int] = {Retention: 0, Recency: 1}
_ALLOCATIONS: dict[type, int] = {GlobalAllocation: 0, HeadAllocation: 1}

# The C code keeps the victims in a heap: right for the few of a decode step, while torch's
# selection is as fast for the many of a prefill chunk.
_MOST_VICTIMS = 1024
# What C can count with; no cache holds as many entries.
_MOST_ENTRIES = 2**61


class NativeEvictor:
    """Scores, selects and drops like :meth:`engine.policies.Policy.victims` and ``drop``.

    Both leave the same pages in the same request, so the two paths can take turns on one session.
    """

    def __init__(self, policy: Policy) -> None:
        loaded, reason = library(), self.unsupported_reason(policy)
        if isinstance(loaded, str) or reason:
            raise RuntimeError(reason)
        self._library = loaded
        scoring = policy.scoring
        self._policy = Eviction(
            scorer=_SCORERS[type(scoring)],
            allocation=_ALLOCATIONS[type(policy.allocation)],
            protect_first=policy.protect_first,
            protect_recent=policy.protect_recent,
            age_shift=scoring.age_shift if isinstance(scoring, Retention) else 0,
            lookahead=scoring.lookahead if isinstance(scoring, Retention) else 1,
            guess=math.inf,
            margin=0.01,
            most=_MOST_VICTIMS,
        )
        self._views = CacheViews()
        self._requests = (Eviction * 0)()
        self._each: list[Eviction] = []  # to take one out of the array anew is slow
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def unsupported_reason(policy: Policy) -> str:
        """Say why C cannot evict for this policy; empty when it can."""
        loaded = library()
        if isinstance(loaded, str):
            return loaded
        known = type(policy.scoring) in _SCORERS and type(policy.allocation) in _ALLOCATIONS
        return "" if known else f"policy {policy.name!r}"

    def request(
        self, sessions: Sequence[CachedSequence], tokens: int, rows: int, slack: int
    ) -> ctypes.Array[Eviction]:
        """What C shall do after ``tokens`` more tokens in ``rows`` rows each.

        Args:
            slack: entries above a session's budget that are let be.
        """
        if len(sessions) > len(self._each):
            self._make_requests(len(sessions))
        for request, session in zip(self._each, sessions, strict=False):
            request.seen = seen = session.seen + tokens
            request.entries, request.slack = (
                session.entries + tokens * rows,
                min(slack, _MOST_ENTRIES),
            )
            request.budget = min(session.allowed_at(seen), _MOST_ENTRIES)
        return self._requests

    def commit(self, sessions: Sequence[CachedSequence]) -> list[CachedSequence]:
        """Count what C dropped; the sessions where it refused: more victims than it is meant for.

        Of those nothing has changed.
        """
        left = []
        for request, session in zip(self._each, sessions, strict=False):
            found = request.found
            if found < 0:
                left.append(session)
            elif found:
                session.count_evicted(found, request.nan)
        return left

    def evict(self, cache: RaggedCache, sessions: Sequence[CachedSequence]) -> list[CachedSequence]:
        """Cut different sessions back to their budgets; those are left that C refuses."""
        requests = self.request(sessions, tokens=0, rows=0, slack=0)
        for request in self._each:
            request.found = 0
        try:
            with self._views.of(cache, [session.seq for session in sessions]) as views:
                self._library.mmkv_evict(views, requests, len(sessions), torch.get_num_threads())
        finally:  # Ctrl-C may land the moment C returns
            left = self.commit(sessions)
        return left

    def _make_requests(self, batch_slots: int) -> None:
        each = self._library.mmkv_evict_scratch(_MOST_VICTIMS)
        scratch = torch.empty(batch_slots, each, dtype=torch.uint8)
        requests = (Eviction * batch_slots)(*([self._policy] * batch_slots))
        made = list(requests)
        for request, room in zip(made, scratch, strict=True):
            request.scratch = room.data_ptr()
        # All at once, and last: Ctrl-C may come between any two lines.
        self._scratch, self._requests, self._each = scratch, requests, made
