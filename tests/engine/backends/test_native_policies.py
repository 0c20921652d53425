"""What a policy may ask for, in C beside torch: queries, attention mass, taps, floors, states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv.engine.backends.cpu.kernels import native_window_attention
from mmkv.engine.errors import PolicyError
from mmkv.engine.policies import (
    CacheView,
    GlobalAllocation,
    HeadAllocation,
    Needs,
    NewTokens,
    Policy,
    Scores,
    Shares,
    compiled,
)
from mmkv.engine.policies.base import GROUPS, WindowReduction
from mmkv.engine.policies.scoring import WindowAttention
from mmkv.engine.policies.selection import lowest
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import QUERIES, window_attention
from tests.engine.policies.test_policies import make_view
from tests.support.sessions import LATER, PICTURES, load, text_ids
from tests.support.tiers import slow_but


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
    """A score that is remembered: each eviction halves it and adds the newest attention."""

    needs: ClassVar[Needs] = Needs(state=1, queries=4, keys=True)

    def score(self, view: CacheView) -> Scores:
        value = view.state()[:, 0] / 2 + view.attention("sum")
        return Scores(value + view.keys()[:, 0] / 100, value[:, None])


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


POLICIES = {
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


@pytest.mark.parametrize(
    "name", ["mass", "greatest mass", "mass and floors", "change, prompts kept"]
)
def test_c_scores_what_is_compiled_as_state(name: str, folders: dict[str, Path]) -> None:
    assert pair(folders["vl"], POLICIES[name])[0].evict_path == "native"


def test_only_state_can_be_compiled_by_others() -> None:
    with pytest.raises(PolicyError, match='C computes "state" alone'):
        compiled("retention")(Decayed)
    with pytest.raises(PolicyError, match="is compiled as 'State'"):
        compiled("State")(Decayed)  # type: ignore[arg-type]


@pytest.mark.parametrize("evict_every", slow_but([1], [1, 3], "the same, evicting less often"))
@pytest.mark.parametrize("name", POLICIES)
def test_c_and_torch_keep_the_same(name: str, evict_every: int, folders: dict[str, Path]) -> None:
    """Turns with pictures, batches of three with budgets of their own, and a fork."""
    policy = POLICIES[name]
    lives = []
    for engine in pair(folders["vl"], policy, evict_every=evict_every):
        sessions = [engine.session(budget) for budget in (10, 14, 19)]
        found: list[Any] = []
        for turn in (PICTURES, LATER):
            for session in sessions:
                found.append(session.prefill(turn))
            for token in text_ids(12, 5).tolist():
                found.append(engine.decode(sessions, [token, 5, token]))
        fork = sessions[2].fork()
        sessions[2].set_budget(9)
        sessions.append(fork)
        for token in text_ids(9, 6).tolist():
            found.append(engine.decode(sessions, [token, token, 6, 7]))
        engine.cache.check()
        kept = [row for session in sessions for layer in session.retained() for row in layer]
        states = [
            engine.cache.pool.state.flatten(0, 1)[engine.cache.entries(session.seq).slot].sum(0)
            for session in sessions
        ]
        assert all(
            session.entries <= session.allowed_entries + engine.slack for session in sessions
        )
        lives.append((found, kept, states, engine.cache.memory))
    (ours, kept, states, memory), (theirs, wanted, want_states, want_memory) = lives
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
