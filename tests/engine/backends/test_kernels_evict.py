"""Eviction on the device against the eager cache, its policies and its order of pages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmkv.engine.backends.cuda.kernels.buffers import BLOCK, MOST_TIES, EvictionBuffers, PageTables
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction
from mmkv.engine.cache import RaggedCache
from mmkv.engine.policies import Policy, make_policy
from tests.support.kernels import (
    LEVELS,
    ROWS,
    Machine,
    assert_same,
    eager_cache,
    eager_evict,
    forms,
    is_triton,
    on_device,
    snapshot,
    to_device,
    unchanged,
)

FORMS = forms("evict", "evict")
METHODS = [
    ("dbtrimkv", 1),
    ("dbtrimkv", 2),
    ("dbtrimkv", 5),
    ("dbtrimkv", math.inf),
    ("trimkv", 1),
    ("trimkv:age=released", 1),
    ("dbtrimkv:age=released", 2),
    ("streamingllm", 1),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("name", "ahead"), METHODS)
def test_rounds_of_append_and_evict(form: Any, name: str, ahead: float, levels: str) -> None:
    seeds, rounds = (1, 3) if is_triton(form) else (4, 12)
    for seed in range(seeds):
        machine = Machine(make_policy(name, ahead), levels, seed)
        dropped = [sum(machine.step(form)) for _ in range(rounds)]
        assert sum(dropped) > 0
        if levels == "not a number" and name != "streamingllm":
            assert 0 < sum(machine.nan) < sum(dropped)
        machine.cache.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dbtrimkv", "streamingllm"])
@pytest.mark.parametrize("ends", [(4, 0), (0, 10), (4, 10), (1000, 0), (0, 1000)], ids=str)
def test_protected_first_and_recent_tokens(form: Any, name: str, ends: tuple[int, int]) -> None:
    """Also where everything is protected: the budget holds, and the smallest positions go."""
    policy = replace(make_policy(name), protect_first=ends[0], protect_recent=ends[1])
    machine = Machine(policy, "ties", seed=1)
    assert machine.evict(form, [2, 0, -1], [37, 30, 0], 0)[0] > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_tie_is_cut_between_two_rows_of_one_position(form: Any) -> None:
    """All scores equal: victims go position after position, and inside one row after row."""
    machine = Machine(make_policy("dbtrimkv"), "one score", seed=3)
    sequence = int(machine.cache.length[2].sum())
    for budget in range(sequence - 1, sequence - (4 if is_triton(form) else 30), -1):
        assert machine.evict(form, [-1, 2, -1], [0, budget, 0], 0) == [0, 1, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slack", [0, 8])
def test_a_row_above_its_share_is_cut_below_the_budget(form: Any, slack: int) -> None:
    """Sequences 0 and 2 hold rows of 0, 1, 33, 8 and 16, 16, 40, 7 entries."""
    machine = Machine(make_policy("trimkv"), "ties", seed=4)
    gone = machine.evict(form, [0, 2, -1], [130, 150, 0], slack)  # shares of row 2: 32 and 37
    assert gone == [0 if slack else 1, 3, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dbtrimkv", "trimkv"])
def test_slack_and_budgets_at_their_edges(form: Any, name: str) -> None:
    """One entry within the slack nothing goes; one above it, all down to the budget."""
    machine = Machine(make_policy(name), "all different", seed=5)
    held = [int(machine.cache.length[seq].sum()) for seq in range(3)]
    if name == "trimkv":  # a row alone may use up no more than its own slack
        held = [ROWS * int(machine.cache.length[seq].max()) for seq in range(3)]
    before = snapshot(machine.rows, machine.columns)
    machine.work.dropped.fill_(99)
    assert machine.evict(form, [0, 1, 2], [n - 4 for n in held], 4) == [0, 0, 0]
    assert unchanged(before, machine.rows, machine.columns)
    everything = int(machine.cache.length[2].sum())
    allowed = [held[0] - 7, held[1] - 4, 0]  # and nothing at all may stay of sequence 2
    gone = machine.evict(form, [0, 1, 2], allowed, 4)
    assert gone == [2 if name == "trimkv" else 7, 0, everything]
    machine.cache.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv", ["int8", "k8v4", "int4"])
def test_codes_and_scales_move_with_their_entries(form: Any, kv: str) -> None:
    machine = Machine(make_policy("dbtrimkv"), "all different", seed=5, kv=kv)
    held = [int(machine.cache.length[seq].sum()) for seq in range(3)]
    gone = machine.evict(form, [0, 1, 2], [n - n // 3 for n in held], 0)
    assert gone == [n // 3 for n in held]


@pytest.mark.parametrize("form", FORMS)
def test_an_idle_batch_changes_nothing(form: Any) -> None:
    machine = Machine(make_policy("dbtrimkv"), "ties", seed=0)
    before = snapshot(machine.rows, machine.columns)
    assert machine.evict(form, [-1, -1, -1], [0, 0, 0], 0) == [0, 0, 0]
    assert unchanged(before, machine.rows, machine.columns)


def long_machine(
    policy: Policy, page: int = 16
) -> tuple[RaggedCache, PageTables, Any, EvictionBuffers]:
    """One sequence of two long rows: several blocks and chunks, pages of a real size."""
    lengths = torch.tensor([[[1500, 900]], [[3, 2]]])
    cache = eager_cache(lengths, page, pages=170, width=100, dim=6, seed=2)
    rows, columns = to_device(cache)
    return cache, rows, columns, empty_eviction(2, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "budget"), [("dbtrimkv", 2340), ("trimkv", 2 * 885)])
def test_rows_longer_than_a_block(form: Any, name: str, budget: int) -> None:
    policy = make_policy(name)
    cache, rows, columns, work = long_machine(policy)
    assert work.chunks > 1 and cache.length[0].sum() > BLOCK
    if name == "trimkv" and is_triton(form):
        cache.drop(0, torch.arange(600))  # else 615 victims are paired 4 at a time, interpreted
        rows, columns = to_device(cache)
    dropped = form(
        work,
        policy,
        rows,
        columns,
        on_device([0, 1]),
        on_device([1500, 3]),
        on_device([budget, 5]),
        0,
    )
    assert dropped.tolist() == [eager_evict(cache, policy, 0, 1500, budget), 0]
    assert_same(cache, rows, columns)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("why", ["entries", "positions"])
def test_a_sequence_too_large_for_the_buffers_is_skipped_and_reported(form: Any, why: str) -> None:
    """The batch slot after it evicts all the same, and its pages lie where they should."""
    machine = Machine(make_policy("dbtrimkv"), "all different", seed=7)
    held = machine.cache.length.sum((1, 2)).tolist()
    seen = list(machine.seen)
    if why == "entries":
        machine.work = empty_eviction(3, machine.rows, most_entries=held[2] - 1)
    else:
        seen[2] = MOST_TIES // ROWS + 1
    dropped = form(
        machine.work,
        machine.policy,
        machine.rows,
        machine.columns,
        on_device([2, 0, 1]),
        on_device([seen[2], seen[0], seen[1]]),
        on_device([20, 20, 5]),
        0,
    )
    assert dropped.tolist() == [-1, held[0] - 20, held[1] - 5]
    for seq, budget in ((0, 20), (1, 5)):
        eager_evict(machine.cache, machine.policy, seq, seen[seq], budget)
    assert_same(machine.cache, machine.rows, machine.columns)
