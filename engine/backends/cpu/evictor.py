"""NativeEvictor: eviction in C, of a batch at once, for the policies a decode loop runs on."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import Eviction, library
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import RaggedCache
from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import Policy, kernel_of
from mmkv.engine.policies.scoring import Retention

if TYPE_CHECKING:
    from mmkv.engine.sequence import CachedSequence

_SCORERS = {"retention": 0, "recency": 1, "state": 2, "torch": 3}
_ALLOCATIONS: dict[type, int] = {GlobalAllocation: 0, HeadAllocation: 1}
_GROUPS = 2  # any other allocation, whose shares are handed over as numbers

# The C code keeps the victims in a heap: right for the few of a decode step, while torch's
# selection is as fast for the many of a prefill chunk.
_MOST_VICTIMS = 1024
# What C can count with; no cache holds as many entries.
_MOST_ENTRIES = 2**61
_MOST_SHARES = 64  # budgets whose shares are remembered


class NativeEvictor:
    """Scores, selects and drops like :meth:`mmkv.engine.policies.Policy.victims` and ``drop``.

    Both leave the same pages in the same request, so the two paths can take turns on one session.

    Attributes:
        given: whether the scores have to be computed in torch first.
    """

    def __init__(self, policy: Policy, layers: int, kv_heads: int) -> None:
        loaded = library()
        if isinstance(loaded, str):
            raise RuntimeError(loaded)
        self._library = loaded
        scoring = policy.scoring
        self.given = kernel_of(scoring) == "torch"
        self._policy = Eviction(
            scorer=_SCORERS[kernel_of(scoring)],
            allocation=_ALLOCATIONS.get(type(policy.allocation), _GROUPS),
            protect_first=policy.protect_first,
            protect_recent=policy.protect_recent,
            age_shift=scoring.age_shift if isinstance(scoring, Retention) else 0,
            lookahead=scoring.lookahead if isinstance(scoring, Retention) else 1,
            guess=math.inf,
            margin=0.01,
            most=_MOST_VICTIMS,
        )
        self._rows = layers * kv_heads
        self._shape, self._method = (layers, kv_heads), policy
        self._shares: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._kept: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._views = CacheViews()
        self._requests = (Eviction * 0)()
        self._each: list[Eviction] = []  # to take one out of the array anew is slow
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def request(
        self, sessions: Sequence[CachedSequence], tokens: int, rows: int, slack: int
    ) -> ctypes.Array[Eviction]:
        """What C shall do after ``tokens`` more tokens in ``rows`` rows each.

        Args:
            slack: entries above a session's budget that are let be.
        """
        if len(sessions) > len(self._each):
            self._make_requests(len(sessions))
        kept = []
        for request, session in zip(self._each, sessions, strict=False):
            request.seen = seen = session.seen + tokens
            request.entries, request.slack = (
                session.entries + tokens * rows,
                min(slack, _MOST_ENTRIES),
            )
            request.budget = min(session.allowed_at(seen), _MOST_ENTRIES)
            if self._policy.allocation == _GROUPS:
                kept.append(self._set_shares(request))
            if self._method.recent_share is not None:
                request.protect_recent = self._method.recent(session.budget_at(seen) // self._rows)
            recorder = session.recorder
            if recorder is not None or request.trace:
                request.trace = None if recorder is None else recorder.room(_MOST_VICTIMS)
        self._kept = kept  # C reads them where they lie
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
                if session.recorder is not None:
                    session.recorder.filled(found)
                    if not self.given and session.recorder.samples_next:
                        view = session.view()
                        budget = session.allowed_entries
                        session.recorder.sample(view, self._method.scores(view, budget).value)
        return left

    def evict(
        self,
        cache: RaggedCache,
        sessions: Sequence[CachedSequence],
        scores: Sequence[Tensor] | None = None,
    ) -> list[CachedSequence]:
        """Cut different sessions back to their budgets; those are left that C refuses.

        Args:
            scores: float32 ``[N]`` of each session's entries, row after row, where :attr:`given`.
        """
        requests = self.request(sessions, tokens=0, rows=0, slack=0)
        for request in self._each:
            request.found = 0
        for request, given in zip(self._each, scores or (), strict=False):
            request.given = given.data_ptr()
        try:
            with self._views.of(cache, [session.seq for session in sessions]) as views:
                self._library.mmkv_evict(views, requests, len(sessions), torch.get_num_threads())
        finally:  # Ctrl-C may land the moment C returns
            left = self.commit(sessions)
        return left

    def takes(self, session: CachedSequence) -> bool:
        """Whether C may cut this session: it does not when there are too many victims."""
        return session.entries - session.allowed_entries <= _MOST_VICTIMS

    def _set_shares(self, request: Eviction) -> tuple[Tensor, Tensor, Tensor | None]:
        budget = request.budget
        known = self._shares.get(budget)
        if known is None:
            shares = self._method.shares(budget, *self._shape)
            first = torch.nn.functional.pad(shares.group.bincount().cumsum(0), (1, 0))
            floor = None if shares.floor is None else shares.floor.contiguous()
            known = (first, shares.share.contiguous(), floor)
            if len(self._shares) >= _MOST_SHARES:
                self._shares = {}
            self._shares[budget] = known
        first, share, floor = known
        request.groups, request.first_row = share.numel(), first.data_ptr()
        request.share = share.data_ptr()
        request.floor = None if floor is None else floor.data_ptr()
        return known

    def _make_requests(self, batch_slots: int) -> None:
        each = self._library.mmkv_evict_scratch(_MOST_VICTIMS, self._rows)
        scratch = torch.empty(batch_slots, each, dtype=torch.uint8)
        requests = (Eviction * batch_slots)(*([self._policy] * batch_slots))
        made = list(requests)
        for request, room in zip(made, scratch, strict=True):
            request.scratch = room.data_ptr()
        # All at once, and last: Ctrl-C may come between any two lines.
        self._scratch, self._requests, self._each = scratch, requests, made
