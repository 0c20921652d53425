"""Every policy in the static step: the entries of the eager step, and nothing read by the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda import policy_step
from mmkv.engine.backends.cuda.kernels.evict import unsupported_reason
from mmkv.engine.model.gates import make_random_write_gates
from mmkv.engine.policies import Budget, CacheView, Needs, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import POSITIONS
from mmkv.engine.sequence import CachedSequence
from tests.support.bursts import Bursts, eager, opened, same
from tests.support.dialogues import engine_of, folder_of, prompt
from tests.support.host_reads import HostReads, host_reads
from tests.support.native import loaded
from tests.support.policies import EVICTING
from tests.support.sessions import assert_same_rows
from tests.support.tiers import one_in

__all__ = ["host_reads"]
WRITING = ("wgkv:window=9", "wgkv+dbtrimkv:window=5", "wgkv+snapkv:window=5,observed=3")
IN_TORCH = [name for name in EVICTING if unsupported_reason(make_policy(name))]
# Prompts stay under these: their budget is what generated tokens may take.
SMALL = {name: 4 for name in IN_TORCH if make_policy(name).keeps_prompt}
QUICK = {
    "balanced": "balanced:floor=0.5,free=2",
    "criticalkv": "criticalkv:window=2,kernel=1,alpha=1",
    "segments-hs": "segments-hs:segment=4,r=3,e=2,t=1",
    "lagkv": "lagkv:sinks=1,lag=3",
}


def engine(name: str, model: str = "odd", **options: Any) -> Runtime:
    """An engine of the smallest model; write gates are random ones."""
    policy, disk = make_policy(QUICK.get(name, name)), loaded(model)
    options = {"budget": SMALL.get(name, 7), "prefill_chunk": 16, "page_size": 8} | options
    gates: Any = disk._gates
    if policy.gates == "write":
        gates = make_random_write_gates(disk.spec)
    elif policy.admission is not None:
        policy = replace(policy, admission=replace(policy.admission, gates="random"))
    return Runtime(disk.family, disk.spec, disk.decoder.weights, gates, policy, **options)


@one_in(3)
@pytest.mark.parametrize("name", [*IN_TORCH, "balanced"])
def test_a_policy_steps_without_the_host(name: str, host_reads: HostReads) -> None:
    """Tokens differ from each other: keys of one token have one norm but for its last bit."""
    every = 1 + 2 * (name in ("gkv", "snapkv", "balanced"))
    ours, reference = (engine(name, evict_every=every) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    before, runner = [session.evicted for session in one], Bursts(ours)
    for step in range(2):
        tokens, steps = [20 + step, 40 + step], 3 if name != "knorm" else 1
        assert runner.decode(one, tokens, steps) == eager(reference, two, tokens, steps)
        same(one, two)
    assert host_reads.found == []
    assert all(now.evicted > then for now, then in zip(one, before, strict=True)) or name == "knorm"


@pytest.mark.parametrize(
    ("name", "paged"),
    [
        ("cake:window=4", False),
        ("gkv:window=3", False),
        ("criticalkv:window=2,kernel=1,alpha=1", False),
        ("adakv:window=14,group=sum", True),
    ],
)
def test_heads_of_several_sequences_are_told_apart(
    name: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two KV heads, three lengths shorter and longer than the window, and an idle batch slot.

    With ``paged``, attention is asked of ``window_scores``, whose Triton form a GPU has.
    """
    if paged:
        monkeypatch.setattr(policy_step, "on_triton", lambda tensor: True)
    ours, reference = (engine(name, "qwen3_vl", evict_every=1) for _ in range(2))
    one, two = opened(ours, 3), opened(reference, 3)
    before, tokens = [session.evicted for session in one], [20, 40, 60]
    assert Bursts(ours).decode(one, tokens, 4) == eager(reference, two, tokens, 4)
    same(one, two)
    for left, right in zip(one, two, strict=True):
        assert_same_rows(left, right)
    assert all(now.evicted > then for now, then in zip(one, before, strict=True))


def test_positions_of_queries_stay_where_a_step_is_idle(host_reads: HostReads) -> None:
    """On three axes, which differ in pictures: what the next query takes the place of, among them.

    Batch slots of a burst are idle where there are fewer sequences, and once a reply has ended.
    """
    text = "expected-attention:window=12,sinks=1,ahead=2,epsilon=0"
    folder, options = folder_of("qwen2_5_vl"), {"prefill_chunk": 16, "page_size": 8}
    ours, reference = (engine_of(folder, text, 9, evict_every=1, **options) for _ in range(2))
    sessions: list[list[CachedSequence]] = []
    for one in (ours, reference):
        one.cache.pool.grow(200)
        sessions.append([one.session() for _ in range(3)])
        for seed, session in enumerate(sessions[-1]):
            session.prefill(prompt("qwen2_5_vl", 3, ("image", 24, 32), 4 + seed, seed=seed))
    first, runner = eager(reference, sessions[1], [20, 40, 60], 1), Bursts(ours)
    stop = [token for row in first for token in row]
    assert runner.decode(sessions[0], [20, 40, 60], 3, stop) == first
    same(*sessions)
    positions = ours.cache.memory[POSITIONS][sessions[0][0].seq]
    oldest = positions[:, sessions[0][0].seen % 12]
    assert len(oldest.unique()) > 1, "the next query takes no picture's place"
    assert torch.equal(positions, reference.cache.memory[POSITIONS][sessions[1][0].seq])


@pytest.mark.parametrize("name", WRITING)
def test_write_gates_step_without_the_host(name: str, host_reads: HostReads) -> None:
    """Their gates are random: about half of what leaves the window goes, whatever the budget."""
    ours, reference = (engine(name) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    generated = Bursts(ours).decode(one, [3, 4], 12)
    assert generated == eager(reference, two, [3, 4], 12)
    same(one, two)
    assert host_reads.found == [] and all(session.evicted > 0 for session in one)


@pytest.mark.parametrize(
    ("name", "every"),
    [("adakv", 2), ("epikv", 2), ("gkv", None), ("balanced", 2), ("criticalkv", 1)],
)
def test_budgets_that_grow_with_the_tokens(
    name: str, every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares and protected tokens are counted anew for each step, and prompts stay on top.

    So is the policy's own interval, a quarter of what a row may keep. Sequences that are scored one
    by one, as where their keys take too much memory together, are what they are in one view.
    """
    if name == "gkv":
        monkeypatch.setattr(policy_step, "_MOST_NUMBERS", 1)
    budget = Budget.fraction(0.6)
    ours, reference = (engine(name, budget=budget, evict_every=every) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    runner = Bursts(ours)
    for steps in (1, 15):
        assert runner.decode(one, [3, 4], steps) == eager(reference, two, [3, 4], steps)
        same(one, two)


def test_the_longest_interval_lets_all_be() -> None:
    """Of the largest number that ``evict_every`` takes, entries of all rows can be counted."""
    ours, reference = (engine("adakv", evict_every=2**63 - 1) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    before = [session.evicted for session in one]
    assert Bursts(ours).decode(one, [3, 4], 2) == eager(reference, two, [3, 4], 2)
    same(one, two)
    assert [session.evicted for session in one] == before


def test_a_sequence_that_stops_keeps_what_its_policy_noted() -> None:
    """Rings, states and memories of idle batch slots, and of sequences that are in no batch."""
    for name in ("segments-hs", "attention-hs", "gkv"):
        ours, reference = (engine(name) for _ in range(2))
        one, two = opened(ours, 3), opened(reference, 3)
        generated = eager(reference, two[:2], [3, 4], 3)
        stop = generated[0][2]
        assert stop not in generated[0][:2] + generated[1], "both go on to the third token"
        ours_said = Bursts(ours).decode(one[:2], [3, 4], 6, stop=[stop])
        more = eager(reference, two[1:2], [generated[1][-1]], 3)
        assert ours_said == [generated[0], generated[1] + more[0]]
        same(one, two)
        for name, kept in reference.cache.memory.items():
            torch.testing.assert_close(ours.cache.memory[name], kept)


@dataclass(frozen=True)
class CountsSteps:
    """Notes how many steps a sequence has made."""

    needs: ClassVar[Needs] = Needs()

    def memory(self, *_: int) -> dict[str, tuple[int, ...]]:
        return {"steps": (1,)}

    def score(self, view: CacheView) -> Tensor:
        return view.position.float()

    def on_step(self, view: CacheView, memory: dict[str, Tensor]) -> None:
        memory["steps"] = memory["steps"] + 1


def test_an_idle_batch_slot_makes_no_step() -> None:
    plain = engine("snapkv")
    policy = replace(make_policy("tova"), name="mine", scoring=CountsSteps())
    parts = (plain.family, plain.spec, plain.decoder.weights, None, policy)
    ours = Runtime(*parts, budget=12, evict_every=1)
    sessions = opened(ours, 3)
    first = eager(ours, [sessions[0].fork()], [3], 3)[0]
    before = ours.cache.memory["steps"].clone()
    said = Bursts(ours).decode(sessions[:2], [3, 4], 6, stop=first[2:])
    steps = ours.cache.memory["steps"] - before
    made = [len(row) for row in said]
    assert [int(steps[one.seq]) for one in sessions] == [*made, 0] and made[0] < made[1]


def test_sessions_that_come_and_go_find_their_graph_again() -> None:
    """The graph has the address of the policy's memory: it grows as tables do."""
    ours = engine("snapkv")
    runner = Bursts(ours)
    runner.decode(opened(ours, 1), [3], 2)
    for _ in range(2):
        with ours.session() as session:
            session.prefill({"input_ids": torch.arange(5)[None]})
            runner.decode([session], [4], 2)
    assert runner.captures == 1


@dataclass(frozen=True)
class Reading:
    """Somebody's scorer that asks a tensor for a number."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: CacheView) -> Tensor:
        newest = int(view.position.max())
        return (view.position == newest).float()


def test_code_of_others_stays_out_and_would_be_seen(host_reads: HostReads) -> None:
    ours = engine("snapkv")
    policy = replace(make_policy("snapkv"), name="mine", scoring=Reading())
    assert ours.backends.cuda.policy_reason(policy) == "policy 'mine' has code of its own"
    parts = (ours.family, ours.spec, ours.decoder.weights, None, policy)
    own = Runtime(*parts, budget=12, evict_every=1)
    Bursts(own).decode(opened(own, 1), [3], 1)
    assert host_reads.found == ["aten._local_scalar_dense.default"]
