"""Eviction in C against the policies in torch: the same victims, and what a policy may ask for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv.engine.backends.base import Batch, Counts
from mmkv.engine.backends.cpu import NativeEvictor, levels
from mmkv.engine.backends.cpu.kernels import native_window_attention
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.errors import PolicyError
from mmkv.engine.policies import (
    CacheView,
    HeadAllocation,
    Needs,
    NewTokens,
    Policy,
    Scores,
    Shares,
    compiled,
    make_policy,
)
from mmkv.engine.policies.allocation import GlobalAllocation
from mmkv.engine.policies.base import GROUPS, WindowReduction
from mmkv.engine.policies.scoring import Retention, WindowAttention
from mmkv.engine.policies.selection import lowest
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import QUERIES, window_attention
from tests.engine.policies.test_policies import make_view
from tests.support.native import POLICIES, content, needs_native
from tests.support.sessions import LATER, PICTURES, load, text_ids
from tests.support.tiers import long_but, one_in, slow_but

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

    test_native has each level in the fast tier.
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
@pytest.mark.parametrize(("level", "examples"), drawn(10, 25, 500))
def test_victims_and_pages_are_those_of_torch(level: str, examples: int) -> None:
    policies, budgets = st.sampled_from(POLICIES[1:]), st.integers(0, 130)
    drawn_from = given(st.just(level), LENGTHS, LEVELS, policies, AGES, ENDS, budgets)
    with mock.patch("mmkv.engine.backends.cpu.evictor._MOST_SHARES", 2):
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
    assert held.entries == sum(lengths) - held.evicted and len(evictor._shares) <= 2


@needs_native
@pytest.mark.parametrize(("level", "examples"), drawn(5, 10, 200))
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


# What a policy may ask for, in C beside torch: queries, attention mass, taps, floors, states.


@compiled("state")
@dataclass(frozen=True)
class Mass:
    """Attention added up by the engine; C reads it by itself."""

    group: Literal["mean", "max", "sum"]

    @property
    def needs(self) -> Needs:
        return Needs(state=1, mass=self.group)

    def score(self, view: CacheView) -> Tensor:
        return view.state()[:, 0]


@dataclass(frozen=True)
class Decayed:
    """A score that is remembered: each eviction halves it and adds the newest attention.

    Every fifth token has none.
    """

    needs: ClassVar[Needs] = Needs(state=1, queries=4, keys=True)

    def score(self, view: CacheView) -> Scores:
        value = view.state()[:, 0] / 2 + view.attention("sum")
        shown = value + view.keys()[:, 0] / 100
        return Scores(shown.where(view.position % 5 > 0, torch.nan), value[:, None])


@compiled("state")
@dataclass(frozen=True)
class Change:
    """How far the residual stream moves from token to token, minus its size elsewhere."""

    needs: ClassVar[Needs] = Needs(state=2, taps=(0.0, 0.99))

    def memory(
        self, layers: int, kv_heads: int, head_dim: int, hidden_size: int
    ) -> dict[str, tuple[int, ...]]:
        return {"last": (hidden_size,)}

    def on_append(self, new: NewTokens) -> Tensor:
        before = torch.cat([new.memory["last"][:, None], new.taps[0][:, :-1]], 1)
        new.memory["last"] = new.taps[0][:, -1]
        moved = (new.taps[0] - before).norm(dim=-1) - new.taps[1].norm(dim=-1)
        kept = torch.full_like(moved, torch.inf) if new.prompt else moved
        return torch.stack([kept, new.position.float()], -1)[:, :, None, None]

    def score(self, view: CacheView) -> Tensor:
        return view.state()[:, 0]


@dataclass(frozen=True)
class Floors:
    """Each layer, or all rows, for one share; half of an equal share is sure in each row."""

    layered: bool

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        groups = layers if self.layered else 1
        row, group = torch.arange(layers * kv_heads), torch.arange(groups)
        return Shares(
            row // kv_heads if self.layered else torch.zeros_like(row),
            budget // groups + (group < budget % groups),
            torch.full_like(row, budget // row.numel() // 2),
        )


ASKING = {
    "queries": Policy("p", WindowAttention(8, 5), HeadAllocation(), protect_recent=8),
    "queries and floors": Policy("p", WindowAttention(4, 3), Floors(True), protect_recent=4),
    "mass": Policy("p", Mass("mean"), HeadAllocation(), recent_share=0.5),
    "greatest mass": Policy("p", Mass("max"), GlobalAllocation(), protect_recent=2),
    "mass and floors": Policy("p", Mass("sum"), Floors(False), protect_first=2),
    "decayed": Policy("p", Decayed(), Floors(False), protect_recent=2),
    "change, prompts kept": Policy("p", Change(), Floors(True), 0, 128, "", 0.25, True),
}


def pair(folder: Path, policy: Policy, **options: Any) -> list[Runtime]:
    """Return the same engine twice: steps in C, and in torch alone."""
    engines = [load(folder, policy=policy, **options) for _ in range(2)]
    engines[1].backends.cpu.switch_off()
    assert engines[0].decode_path == "native" and engines[0].evict_path.startswith("native")
    return engines


def test_only_state_can_be_compiled_by_others() -> None:
    with pytest.raises(PolicyError, match='C computes "state" alone'):
        compiled("retention")(Decayed)
    with pytest.raises(PolicyError, match="is compiled as 'State'"):
        compiled("State")(Decayed)  # type: ignore[arg-type]


@one_in(2)
@pytest.mark.parametrize("evict_every", long_but([1], [1, 3], "the same, evicting less often"))
@pytest.mark.parametrize("name", ASKING)
def test_c_and_torch_keep_the_same(name: str, evict_every: int, folders: dict[str, Path]) -> None:
    """Turns with pictures, batches of three with budgets of their own, and a fork."""
    policy = ASKING[name]
    engines, lives = pair(folders["vl"], policy, evict_every=evict_every), []
    assert (engines[0].evict_path == "native") == ("mass" in name or "change" in name)
    if name == "decayed":  # has room for no victim: torch selects among the scores that it made
        engines[0].backends.cpu.evictor._policy.most = 0
    for engine in engines:
        sessions = [engine.session(budget) for budget in (10, 14, 19)]
        found: list[Any] = []
        for turn in (PICTURES, LATER):
            for session in sessions:
                found.append(session.prefill(turn))
            for token in text_ids(8, 5).tolist():
                found.append(engine.decode(sessions, [token, 5, token]))
        fork = sessions[2].fork()
        sessions[2].set_budget(9)
        sessions.append(fork)
        for token in text_ids(6, 6).tolist():
            found.append(engine.decode(sessions, [token, token, 6, 7]))
        engine.cache.check()
        kept = [row for session in sessions for layer in session.retained() for row in layer]
        states = [
            engine.cache.pool.state.flatten(0, 1)[engine.cache.entries(session.seq).slot].sum(0)
            for session in sessions
        ]
        assert all(
            session.entries <= session.allowed_entries + (evict_every - 1) * engine.spec.rows
            for session in sessions
        )
        counts = [(session.evicted, session.evicted_nan) for session in sessions]
        lives.append((counts, found, kept, states, engine.cache.memory))
    (counts, ours, kept, states, memory), (counted, theirs, wanted, *want) = lives
    want_states, want_memory = want
    assert counts == counted and all(nan for _, nan in counts) == (name == "decayed")
    for got, want in zip(kept, wanted, strict=True):
        assert torch.equal(got, want)
    for got, want in zip([*ours, *states], [*theirs, *want_states], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for key, value in memory.items():
        torch.testing.assert_close(value, want_memory[key], rtol=1e-4, atol=1e-4)


REDUCTIONS = [
    WindowReduction(group, of, queries)
    for group in GROUPS
    for of in ("shares", "logits")
    for queries in ("mean", "max")
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [2, 5, 40])
def test_window_attention_in_c(tokens: int, threads: int, folders: dict[str, Path]) -> None:
    """Rows of unequal length, fewer tokens than the window has slots, and evicted queries."""
    before = torch.get_num_threads()
    policy = Policy("p", WindowAttention(6, 5), GlobalAllocation())
    engine = load(folders["vl"], policy=policy, budget=10)
    session = engine.session()
    session.prefill({"input_ids": text_ids(tokens, 3)[None]})
    for token in text_ids(3, 4).tolist():
        session.decode(token)
    entries = engine.cache.entries(session.seq)
    view, ring = session.view(entries), engine.cache.memory[QUERIES]
    for reduction in REDUCTIONS:
        want = window_attention(engine.cache, session.seq, entries, view, reduction)
        try:
            torch.set_num_threads(threads)
            got = native_window_attention(
                engine.cache, session.seq, ring[session.seq], session.seen, reduction
            )
        finally:
            torch.set_num_threads(before)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(0, 20),
    st.sampled_from(["one group", "a group a layer"]),
    st.integers(0, 10**6),
)
def test_floors_against_brute_force(
    lengths: list[int], floors: list[int], spare: int, groups: str, seed: int
) -> None:
    """Take the lowest of the group that is not among its row's best, again and again."""
    view = make_view([lengths[:2], lengths[2:]], seen=12, seed=seed)
    source = torch.Generator().manual_seed(seed)
    scores = torch.randint(5, (view.position.numel(),), generator=source).float()
    group = torch.zeros(4, dtype=torch.int64) if groups == "one group" else torch.arange(4) // 2
    floor = torch.tensor(floors)
    least = torch.zeros(int(group.max()) + 1, dtype=torch.int64).index_add_(0, group, floor)
    shares = Shares(group, least + spare // 2, floor)
    kept = set(range(view.position.numel()))
    for number, share in enumerate(shares.share.tolist()):
        mine = [row for row in range(4) if int(group[row]) == number]
        while len([i for i in kept if int(view.row[i]) in mine]) > share:
            free = []
            for row in mine:
                order = sorted(
                    (i for i in kept if int(view.row[i]) == row),
                    key=lambda i: (float(scores[i]), int(view.position[i])),
                )
                free += order[: max(len(order) - floors[row], 0)]
            kept.remove(
                min(free, key=lambda i: (float(scores[i]), int(view.position[i]), int(view.row[i])))
            )
    gone = set(lowest(scores, view, shares).tolist())
    assert gone == set(range(view.position.numel())) - kept
