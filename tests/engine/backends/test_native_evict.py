"""Eviction in C against the policies in torch: the same victims, the same pages afterwards."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv.engine.backends.base import Batch, Counts
from mmkv.engine.backends.cpu import NativeEvictor, levels
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.policies import CacheView, Policy, make_policy
from mmkv.engine.policies.allocation import GlobalAllocation
from mmkv.engine.policies.scoring import Retention
from tests.support.native import POLICIES, content, needs_native
from tests.support.tiers import slow_but

# Rows of 2 layers and 2 heads. Few values, and the same positions in most rows: many ties.
SEEN = 40
ALL = ("position", "log_beta", "modality", "keys", "values")
LENGTHS = st.lists(st.sampled_from([0, 1, 7, 8, 9, 30, 33]), min_size=4, max_size=4).filter(any)
BETAS = st.sampled_from(
    [0.0, -0.0, -1e-9, -1.5e-8, -1e-3, -0.6931472, -2.0, -50.0, -1e30, -math.inf, math.nan]
)
LEVELS = st.lists(BETAS, min_size=1, max_size=4)
AGES = st.sampled_from([0, 1, 2, 3])


def drawn(few: int, more: int, most: int) -> list[Any]:
    """(level of the instruction set, examples) for each tier; each run draws others.

    test_native_levels has each level in the fast tier.
    """
    quick = [(level, few) for level in levels()[:1]]
    every = quick + [(level, more) for level in levels()]
    mark = pytest.mark.drawn(reason="hundreds of examples at each level")
    return [
        *slow_but(quick, every, "many examples at each level"),
        *(pytest.param(level, most, marks=mark) for level in levels()),
    ]


ENDS = st.sampled_from([(0, 0), (4, 0), (0, 10), (4, 10), (SEEN, 0), (0, SEEN)])


def cache_of(lengths: list[int], levels: list[float], seed: int, seen: int = SEEN) -> RaggedCache:
    """Sequence 1 with such rows, positions in random storage order; sequence 0 is a bystander."""
    source = torch.Generator().manual_seed(seed)
    pool, total = PagePool(8, 4, num_pages=400), sum(lengths)
    pool._stack.copy_(torch.randperm(400, generator=source))
    cache = RaggedCache(pool, 2, 2)
    for _ in range(2):
        positions = [torch.randperm(seen, generator=source)[:count] for count in lengths]
        chosen = torch.randint(len(levels), (total,), generator=source)
        rows = {"length": torch.tensor(lengths).view(2, 2), "position": torch.cat(positions)}
        rows |= {name: torch.randn(total, 4, generator=source) for name in ("keys", "values")}
        rows |= {"log_beta": torch.tensor(levels)[chosen], "modality": chosen % 3}
        cache.import_(rows)
    return cache


def evict_in_torch(
    cache: RaggedCache, policy: Policy, budget: int, seen: int = SEEN
) -> tuple[int, int]:
    """The reference: how many went, and how many of them had a score that is NaN."""
    entries, pool = cache.entries(1), cache.pool
    columns = (getattr(pool, name).view(-1)[entries.slot] for name in ALL[:3])
    view = CacheView(seen, 2, 2, entries.row, cache.length[1].flatten(), *columns)
    victims = policy.victims(view, budget)
    cache.drop(1, victims, entries)
    return victims.numel(), int(policy.scores(view, budget).value[victims].isnan().sum())


def aged(policy: Policy, newest: int) -> Policy:
    """The policy with another age of the newest entry, if it has ages."""
    if not isinstance(policy.scoring, Retention):
        return policy
    return replace(policy, scoring=replace(policy.scoring, newest_age=newest))


def needs_eviction(cache: RaggedCache, policy: Policy, budget: int, slack: int = 0) -> bool:
    """Whether all rows together, or one that has a budget of its own, stand above it."""
    length = cache.length[1].flatten().tolist()
    if isinstance(policy.allocation, GlobalAllocation):
        return sum(length) > budget + slack
    return any(n > (budget + 3 - row) // 4 + slack // 4 for row, n in enumerate(length))


@dataclass
class Held:
    """What eviction wants to know of a sequence, and changes."""

    seen: int
    entries: int
    budget: int
    seq: int = 1
    evicted: int = 0
    evicted_nan: int = 0

    def cut_by(self, evictor: NativeEvictor, cache: RaggedCache) -> bool:
        """Whether C has not refused."""
        columns = [self.seq], [self.seen], [0], [False], [self.entries], [self.budget], [0]
        counts = Counts()
        evictor.evict(cache, Batch(*columns), counts)
        self.entries -= sum(counts.dropped)
        self.evicted += sum(counts.dropped)
        self.evicted_nan += sum(counts.nan)
        return not counts.uncut


def evictor_at(level: str, policy: Policy) -> NativeEvictor:
    """An evictor of one level's library."""
    with mock.patch.dict(os.environ, MMKV_NATIVE=level):
        return NativeEvictor(policy, 2, 2)


@needs_native
@pytest.mark.parametrize(("level", "examples"), drawn(20, 80, 500))
def test_victims_and_pages_are_those_of_torch(level: str, examples: int) -> None:
    policies, budgets = st.sampled_from(POLICIES[1:]), st.integers(0, 130)
    drawn_from = given(st.just(level), LENGTHS, LEVELS, policies, AGES, ENDS, budgets)
    settings(max_examples=examples, deadline=None)(drawn_from(assert_evicts_as_torch))()


def assert_evicts_as_torch(
    level: str,
    lengths: list[int],
    betas: list[float],
    named: Any,
    newest: int,
    ends: tuple[int, int],
    budget: int,
) -> None:
    policy = aged(make_policy(*named), newest)
    policy = replace(policy, protect_first=ends[0], protect_recent=ends[1])
    ours, reference = (cache_of(lengths, betas, seed=budget) for _ in range(2))
    evictor, held = evictor_at(level, policy), Held(SEEN, sum(lengths), budget)
    gone = nan = 0
    for now in (SEEN, SEEN + 1, SEEN + 2, SEEN + 900):  # what one call learns guides the next
        held.seen = now
        due = needs_eviction(reference, policy, held.budget)
        assert held.cut_by(evictor, ours)
        if due:
            dropped, without = evict_in_torch(reference, policy, held.budget, now)
            gone, nan = gone + dropped, nan + without
        assert (held.evicted, held.evicted_nan) == (gone, nan)
        assert content(ours, ALL) == content(reference, ALL)
        held.budget = max(held.budget - 9, 0)
    assert held.entries == sum(lengths) - held.evicted


@needs_native
@pytest.mark.parametrize(("level", "examples"), drawn(8, 30, 200))
def test_scores_that_differ_by_one_rounding(level: str, examples: int) -> None:
    """Steps of a decode loop, whose search is in single precision where nothing hangs on it."""
    drawn_from = given(
        st.just(level),
        st.floats(-7.5, 0.5),
        st.integers(1, 40),
        st.sampled_from([2, 2, 2, 1, 5, math.inf]),
        AGES,
        st.sampled_from([(0, 0), (4, 0), (0, 4)]),
        st.integers(0, 2**31),
    )
    settings(max_examples=examples, deadline=None)(drawn_from(assert_close_scores_evict_alike))()


def assert_close_scores_evict_alike(
    level: str,
    exponent: float,
    apart: int,
    lookahead: float,
    newest: int,
    ends: tuple[int, int],
    seed: int,
) -> None:
    betas = [-(10**exponent)]
    for _ in range(12 * apart):
        betas.append(float(np.nextafter(np.float32(betas[-1]), np.float32(-9))))
    policy = aged(make_policy("dbtrimkv", lookahead), newest)
    policy = replace(policy, protect_first=ends[0], protect_recent=ends[1])
    lengths = [40] * 4
    ours, reference = (cache_of(lengths, betas[::apart], seed) for _ in range(2))
    evictor, held = evictor_at(level, policy), Held(SEEN, 160, 150)
    for _ in range(12):
        assert held.cut_by(evictor, ours)
        evict_in_torch(reference, policy, held.budget, held.seen)
        assert content(ours, ALL) == content(reference, ALL)
        held.seen, held.budget = held.seen + 1, held.budget - 4
    assert content(ours, ALL) == content(reference, ALL)
    ours.check()


@needs_native
@pytest.mark.parametrize(
    ("policy", "entries", "budget", "done"),
    [
        ("dbtrimkv", 1400, 1400 - 1024, True),
        ("dbtrimkv", 1400, 1400 - 1025, False),
        # Shares of two rows: 2 * 512 victims, then 2 * 513 though only 652 entries are too many.
        ("trimkv", 1400, 188 * 4, True),
        ("trimkv", 1400, 187 * 4, False),
        ("dbtrimkv", 1399, 1380, False),  # counted wrongly
    ],
)
def test_eviction_is_whole_or_none(policy: str, entries: int, budget: int, done: bool) -> None:
    ours, reference = (cache_of([700, 700, 0, 0], [-0.1, -0.2], 3, seen=700) for _ in range(2))
    evictor, held = NativeEvictor(make_policy(policy), 2, 2), Held(700, entries, budget)
    assert held.cut_by(evictor, ours) == done
    dropped = evict_in_torch(reference, make_policy(policy), budget, 700)[0] if done else 0
    assert held.evicted == dropped == (1024 if done else 0)
    assert content(ours, ALL) == content(reference, ALL)
