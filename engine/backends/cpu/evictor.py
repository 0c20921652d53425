"""NativeEvictor: eviction in C, of a batch at once, for the policies a decode loop runs on."""

from __future__ import annotations

import ctypes
import math
from itertools import repeat

import torch
from torch import Tensor

from mmkv.engine.backends.base import Batch, Counts
from mmkv.engine.backends.cpu.binding import Eviction, library
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import RaggedCache
from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import Policy, kernel_of
from mmkv.engine.policies.scoring import Retention

_SCORERS = {"retention": 0, "recency": 1, "state": 2, "torch": 3}
_ALLOCATIONS: dict[type, int] = {GlobalAllocation: 0, HeadAllocation: 1}
_GROUPS = 2  # any other allocation, whose shares are handed over as numbers

# The C code keeps the victims in a heap: right for the few of a decode step, while torch's
# selection is as fast for the many of a prefill chunk.
MOST_VICTIMS = 1024
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
            most=MOST_VICTIMS,
        )
        self._rows = layers * kv_heads
        self._shape, self._method = (layers, kv_heads), policy
        self._shares: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._kept: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._views = CacheViews()
        self._requests = (Eviction * 0)()
        self._each: list[Eviction] = []  # to take one out of the array anew is slow
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def request(self, batch: Batch) -> ctypes.Array[Eviction]:
        """What C shall do to each sequence, once the batch's tokens are appended."""
        count = len(batch.seqs)
        if count > len(self._each):
            self._make_requests(count)
        tokens = 1 if batch.tokens else 0
        rows, interval, kept = self._rows, batch.interval, []
        deaths = batch.deaths or repeat(0)
        for request, seen, entries, allowed, room in zip(
            self._each, batch.seen, batch.entries, batch.allowed, deaths, strict=False
        ):
            request.seen, request.entries = seen + tokens, entries + tokens * rows
            request.slack = min(interval.slack(allowed, rows), _MOST_ENTRIES)
            request.budget = min(allowed, _MOST_ENTRIES)
            if room or request.trace:
                request.trace = room or None
        if self._policy.allocation == _GROUPS:
            kept = [self._set_shares(request) for request in self._each[:count]]
        if self._method.recent_share is not None:
            self._set_recent(batch)
        self._kept = kept  # C reads them where they lie
        return self._requests

    def commit(self, batch: Batch, counts: Counts) -> None:
        """Say what C dropped, and which sequences it refused.

        Those have more victims than it is meant for, and nothing of them has changed.
        """
        dropped, nan, uncut = list[int](), list[int](), list[int]()
        for index, request in enumerate(self._each[: len(batch.seqs)]):
            found = request.found
            if found < 0:
                uncut.append(index)
            dropped.append(found if found > 0 else 0)
            nan.append(request.nan if found > 0 else 0)
        counts.dropped, counts.nan, counts.uncut = dropped, nan, uncut

    def evict(
        self, cache: RaggedCache, batch: Batch, counts: Counts, scores: Tensor | None = None
    ) -> None:
        """Cut sequences back to what is allowed; ``counts.uncut`` names those that C refuses.

        Args:
            scores: float32 ``[N]`` of the one sequence's entries, row after row, where
                :attr:`given`.
        """
        requests = self.request(batch)
        for request in self._each:
            request.found = 0
        if scores is not None:
            self._each[0].given = scores.data_ptr()
        try:
            views = self._views.of(cache, batch.seqs)
            try:
                self._library.mmkv_evict(views, requests, len(batch.seqs), torch.get_num_threads())
            finally:  # Ctrl-C may land the moment C returns
                cache.pool.free_pages = views[0].free
        finally:
            self.commit(batch, counts)

    @staticmethod
    def takes(entries: int, allowed: int) -> bool:
        """Whether C may cut such a sequence: it does not when there are too many victims."""
        return entries - allowed <= MOST_VICTIMS

    def _set_recent(self, batch: Batch) -> None:
        """Protect as many of the newest tokens as the budget's share of them says."""
        policy, prompts = self._method, batch.prompt_tokens
        for request, allowed, prompt in zip(self._each, batch.allowed, prompts, strict=False):
            per_row = allowed // self._rows - prompt * policy.keeps_prompt
            request.protect_recent = policy.recent(per_row)

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
        each = self._library.mmkv_evict_scratch(MOST_VICTIMS, self._rows)
        scratch = torch.empty(batch_slots, each, dtype=torch.uint8)
        requests = (Eviction * batch_slots)(*([self._policy] * batch_slots))
        made = list(requests)
        for request, room in zip(made, scratch, strict=True):
            request.scratch = room.data_ptr()
        # All at once, and last: Ctrl-C may come between any two lines.
        self._scratch, self._requests, self._each = scratch, requests, made
