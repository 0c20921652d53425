"""Eviction on the device against the eager cache: policies, scores bit by bit, pages in order."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmkv.engine.backends.cuda.kernels.append import empty_room, make_room
from mmkv.engine.backends.cuda.kernels.buffers import (
    BLOCK,
    MOST_TIES,
    EvictionBuffers,
    EvictionLimits,
    PageTables,
)
from mmkv.engine.backends.cuda.kernels.evict import (
    empty_eviction,
    scores_in_torch,
    unsupported_reason,
)
from mmkv.engine.cache import RaggedCache
from mmkv.engine.policies import Policy, make_policy
from mmkv.engine.policies.allocation import FlooredAllocation
from mmkv.engine.policies.base import kernel_of
from mmkv.engine.policies.scoring import lookahead_log_score
from mmkv.engine.policies.selection import Shares, lowest
from mmkv.engine.scorer_state import view_of
from tests.support.kernels import (
    COLUMNS,
    DEVICE,
    LENGTHS,
    LEVELS,
    ONE_SPILL,
    ROWS,
    Machine,
    assert_same,
    compiled,
    eager_cache,
    eager_counts,
    eager_evict,
    forms,
    is_triton,
    needs_compiler,
    on_device,
    snapshot,
    to_device,
    unchanged,
)
from tests.support.tiers import long_but

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
# A part of the budget is sure to each row.
FLOORED = ("balanced:floor=0.7,free=2", 2, "not a number")
# All methods where scores tie or are missing; one where they are alike or apart.
ROUNDS = [
    (*method, levels)
    for levels in LEVELS
    for method in (METHODS if levels in ("ties", "not a number") else METHODS[1:2])
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "ahead", "levels"),
    long_but([*ROUNDS[::2], FLOORED], [*ROUNDS, FLOORED], "one after the other"),
)
def test_rounds_of_append_and_evict(form: Any, name: str, ahead: float, levels: str) -> None:
    seeds, rounds = (1, 2) if is_triton(form) else (2, 9)
    for seed in range(seeds):
        machine = Machine(make_policy(name, ahead), levels, seed)
        dropped = [sum(machine.step(form)) for _ in range(rounds)]
        assert sum(dropped) > 0
        if levels == "not a number" and name != "streamingllm":
            assert 0 < sum(machine.nan) < sum(dropped)
        machine.cache.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dbtrimkv", "streamingllm"])
@pytest.mark.parametrize("ends", [(4, 10), (1000, 0), (0, 1000)], ids=str)
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
    )
    assert dropped.tolist() == [-1, held[0] - 20, held[1] - 5]
    for seq, budget in ((0, 20), (1, 5)):
        eager_evict(machine.cache, machine.policy, seq, seen[seq], budget)
    assert_same(machine.cache, machine.rows, machine.columns)


SHARES = forms("evict", "evict_to_shares")
# How scores come: given, with ties, NaN and infinities; or computed by the kernel.
SCORED = {
    "torch": "snapkv",
    "state": "h2o",
    "retention": "dbtrimkv:recent=2",
    "recency": "streamingllm",
}


def drawn_limits(
    cache: RaggedCache, seqs: list[int], groups: int, floors: bool, source: torch.Generator
) -> EvictionLimits:
    """Shares between nothing and all that a group holds, of which floors take half or more."""

    def draw(most: int) -> int:
        return int(torch.randint(most + 1, (), generator=source))

    share, floor, above, recent = [], [], [], []
    for seq in seqs:
        held = cache.length[max(seq, 0)].view(groups, -1).sum(1).tolist()
        share.append([draw(n + 3) for n in held])
        each = ROWS // groups
        floor.append([n // each - draw(n // each // 2) for n in share[-1] for _ in range(each)])
        above.append(draw(2) * draw(1))
        recent.append(draw(5))
    made = (on_device(one) for one in (share, floor, above, recent))
    share_, floor_, above_, recent_ = made
    return EvictionLimits(share_, floor_ if floors else None, above_, recent_)


@pytest.mark.parametrize("form", SHARES)
@pytest.mark.parametrize(
    ("scored", "groups", "floors"),
    [
        ("torch", 1, False),
        ("torch", 2, True),
        ("torch", ROWS, True),
        ("state", 1, True),
        ("state", ROWS, False),
        ("retention", 2, False),
        ("recency", 2, True),
    ],
)
def test_shares_and_floors_take_the_victims_of_the_selection(
    form: Any, scored: str, groups: int, floors: bool
) -> None:
    """Beside ``policies.selection``, for shares, floors, scores and batches that are drawn."""
    policy = replace(make_policy(SCORED[scored]), protect_first=1)
    assert kernel_of(policy.scoring) == scored
    gone, guarded = 0, 0
    for seed in range(1 if is_triton(form) else 6):
        source = torch.Generator().manual_seed(seed + 10 * groups + 1)
        cache = eager_cache(LENGTHS, 8, pages=160, width=12, seed=seed, states=2)
        levels = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, -1.5, 2.0, 1e-9])
        pool = cache.pool
        drawn = levels[torch.randint(8, (pool.state.numel(),), generator=source)]
        pool.state.copy_(drawn.view_as(pool.state))
        seqs = [[2, -1, 0], [1, 2, 0]][seed % 2]
        limits = drawn_limits(cache, seqs, groups, floors, source)
        rows, columns = to_device(cache)
        cells, scores = 40, None
        if scored == "torch":
            scores = levels[torch.randint(8, (3, ROWS, cells), generator=source)].to(DEVICE)
        work = empty_eviction(3, rows, groups=groups)
        work.nan.copy_(on_device([1, 2, 3]))  # of steps before, to which these are added
        seen = [40, 33, 40]
        now = on_device([seen[max(seq, 0)] for seq in seqs])
        form(work, policy, rows, columns, on_device(seqs), now, limits, scores)
        dropped, nan = [0, 0, 0], [1, 2, 3]
        for slot, seq in enumerate(seqs):
            if seq < 0:
                continue
            given = None if scores is None else scores[slot].cpu()
            counts = eager_cut(cache, policy, seq, now[slot], limits, slot, given)
            dropped[slot], nan[slot] = counts[0], nan[slot] + counts[1]
            guarded += counts[2]
        assert (work.dropped.tolist(), work.nan.tolist()) == (dropped, nan)
        assert_same(cache, rows, columns)
        gone += sum(dropped)
    assert gone > 0 and (guarded > 0) == (floors and groups < ROWS)


def eager_cut(
    cache: RaggedCache,
    policy: Policy,
    seq: int,
    seen: torch.Tensor,
    limits: EvictionLimits,
    slot: int,
    given: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Cut one sequence as sessions do.

    Returns:
        how many went, how many of them had no number, and how many stayed for a floor alone.
    """
    entries, length = cache.entries(seq), cache.length[seq].flatten()
    groups = limits.share.shape[1]
    group = torch.arange(groups).repeat_interleave(ROWS // groups)
    floor = None if limits.floor is None else limits.floor[slot].cpu()
    shares = Shares(group, limits.share[slot].cpu(), floor)
    if not shares.exceeded(length, int(limits.above[slot])):
        return 0, 0, 0
    view = view_of(cache, seq, entries, int(seen), 0, policy.scoring.needs)
    made = policy.scoring.score(view) if given is None else given[entries.row, entries.offset]
    made = policy.protected(made, view, int(limits.recent[slot]))
    victims = lowest(made, view, shares)
    free = set(lowest(made, view, replace(shares, floor=None)).tolist())
    cache.drop(seq, victims, entries)
    return len(victims), int(made[victims].isnan().sum()), len(free - set(victims.tolist()))


@pytest.mark.parametrize("form", SHARES)
@pytest.mark.parametrize("why", ["entries", "a row", "positions"])
def test_what_shares_cannot_cut_is_reported(form: Any, why: str) -> None:
    """Scores for 39 cells, of which a row of sequence 2 needs 40; sequence 1 is cut."""
    cache = eager_cache(LENGTHS, 8, pages=160, width=12)
    rows, columns = to_device(cache)
    most = 78 if why == "entries" else None
    work = empty_eviction(2, rows, most, groups=2)
    limits = EvictionLimits(on_device([[9, 9]] * 2), None, on_device([0, 0]), on_device([0, 0]))
    scores = torch.zeros(2, ROWS, 39 if why == "a row" else 40, device=DEVICE)
    seen = on_device([MOST_TIES // ROWS + 1 if why == "positions" else 40, 5])
    policy = make_policy("snapkv")
    form(work, policy, rows, columns, on_device([2, 1]), seen, limits, scores)
    assert work.dropped.tolist() == [-1, 2]
    assert rows.length[2].tolist() == [[16, 16], [40, 7]]
    assert rows.length[1].flatten().tolist() == [4, 5, 4, 5], "the older of the first row goes"


# Scores of the eviction kernels, bit by bit, and the policies that they know.


def test_which_policies_are_supported() -> None:
    assert not any(unsupported_reason(make_policy(*method)) for method in [*METHODS, FLOORED[:2]])
    assert unsupported_reason(make_policy("full")) == "policy 'full'"  # never evicts
    assert unsupported_reason(make_policy("snapkv")) == "policy 'snapkv'"  # reads attention
    assert unsupported_reason(make_policy("h2o")) and not scores_in_torch(make_policy("h2o"))
    assert scores_in_torch(make_policy("adakv")) and not scores_in_torch(make_policy("raas"))


@pytest.mark.parametrize("form", FORMS[1:])  # the reference asks the allocation itself
@pytest.mark.parametrize("floor", [0.7])
def test_floors_follow_from_the_budget_as_on_the_host(form: Any, floor: float) -> None:
    """To the last entry, at budgets where the product is near a whole number."""
    policy = replace(make_policy("balanced"), allocation=FlooredAllocation(floor, 3))
    rows, columns = to_device(eager_cache(LENGTHS, 8, pages=160, width=12))
    budgets = [ROWS * (3 + at) for at in (0, 10, 30, 70, 90, 1001, 2**52 + 1)] + [0, 7]
    count = len(budgets)
    work = empty_eviction(count, rows)
    seqs = on_device([-1] * count)
    form(work, policy, rows, columns, seqs, on_device([0] * count), on_device(budgets))
    wanted = [policy.shares(budget, 2, 2).floor.tolist() for budget in budgets]
    assert work.floor.tolist() == wanted


def rounded_scores(rate: np.ndarray, age: np.ndarray, ahead: float) -> np.ndarray:
    """The definition of ``lookahead_log_score`` in long double: three roundings to float32."""
    x = rate.astype(np.longdouble)
    decayed = age.astype(np.float32) * rate
    if ahead == 1:
        return decayed
    if math.isinf(ahead):
        near, far = np.log(-np.expm1(x)), np.log1p(-np.exp(x))
        return decayed - np.where(x > -math.log(2), near, far).astype(np.float32)
    ratio = np.expm1(ahead * x) / np.expm1(x)
    return decayed + np.log(np.where(x == 0, ahead, ratio)).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ahead", [1, 2, 5, 64, math.inf])
@np.errstate(all="ignore")
def test_scores_are_the_formula_correctly_rounded(form: Any, ahead: float) -> None:
    """So they, and the order of entries, do not depend on the machine."""
    count, now = 1024, 70_000
    cache = eager_cache(torch.tensor([[[count]]]), 16, pages=64, width=64, seed=4)
    powers = torch.rand(count, generator=torch.Generator().manual_seed(6)) * 10.7 - 9
    special = torch.tensor([0.0, -0.0, -1e-9, -1.5e-8, -0.6931472, -0.6931471, -0.03125, -50.0])
    cache.pool.log_beta.copy_(torch.cat([-(10**powers)[:-8], special]).view(-1, 16))
    slot = cache.entries(0).slot
    rate, position = (getattr(cache.pool, n).view(-1)[slot] for n in ("log_beta", "position"))
    want = rounded_scores(rate.numpy(), (now - position).numpy(), ahead)
    if is_triton(form):
        rows, columns = to_device(cache)
        work = empty_eviction(1, rows)
        form(
            work,
            make_policy("dbtrimkv", ahead),
            rows,
            columns,
            on_device([0]),
            on_device([now]),
            on_device([count - 1]),
        )
        key = work.keys[0, :count].cpu().numpy().view(np.uint32)
        got = np.where(key >> 31, key ^ np.uint32(1 << 31), ~key).view(np.float32)
        assert work.ties[0, :count].tolist() == position.tolist()
    else:
        got = lookahead_log_score(rate.to(DEVICE), (now - position).to(DEVICE), ahead).cpu().numpy()
    assert np.array_equal(got, want), np.flatnonzero(got != want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ahead", [1, 2, 5, math.inf])
def test_an_entry_of_age_0_has_the_score_of_torch(form: Any, ahead: float) -> None:
    """Six rows of two entries; log_beta of the newest is -inf, 0, no number, and others."""
    lengths, now = torch.tensor([[[2, 2], [2, 2], [2, 2]]]), 2
    cache = eager_cache(lengths, 8, pages=12, width=2, seed=4)
    pool, entries = cache.pool, cache.entries(0)
    newest = torch.tensor([-math.inf, 0.0, math.nan, -0.5, -50.0, -1e-9])
    older = torch.tensor([-0.1, -math.inf, -0.5, 0.0, -1e-9, -2.0])
    pool.log_beta.view(-1)[entries.slot] = torch.stack([newest, older], 1).flatten()
    pool.position.view(-1)[entries.slot] = torch.tensor([1, 0] * 6).int()
    policy = make_policy("dbtrimkv", ahead)
    policy = replace(policy, scoring=replace(policy.scoring, newest_age=0))
    rows, columns = to_device(cache)
    work, nans = empty_eviction(1, rows), 0
    # One at a time shows the order of all; the interpreter takes its time.
    for budget in (10, 8, 5, 2) if is_triton(form) else range(11, 0, -1):
        gone, nan = eager_counts(cache, policy, 0, now, budget)
        form(work, policy, rows, columns, on_device([0]), on_device([now]), on_device([budget]))
        nans += nan
        assert (work.dropped.tolist(), work.nan.tolist()) == ([gone], [nans])
        assert_same(cache, rows, columns)


# The eviction kernels on a GPU: in a CUDA graph, and what a Hopper SM has room for.


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("name", ["dbtrimkv", "trimkv"])
def test_append_and_evict_in_one_cuda_graph(name: str) -> None:
    """Captured once, replayed for steps that take pages, drop entries, and do neither."""
    from mmkv.engine.backends.cuda.kernels.evict import evict

    policy = make_policy(name)
    lengths = torch.full((2, 2, 2), 20)
    cache = eager_cache(lengths, 8, pages=120, width=8)
    rows, columns = to_device(cache)
    seqs, seen, allowed = on_device([1, 0, -1]), on_device([20, 20, 0]), on_device([90, 70, 0])
    room, work = empty_room(3, rows), empty_eviction(3, rows)
    graph, state = torch.cuda.CUDAGraph(), snapshot(rows, columns)

    def step() -> None:
        slots = make_room(room, rows, seqs)
        seat = slots.clamp(min=0).flatten()
        columns.position.view(-1)[seat] = seen[:, None].expand(3, 4).flatten().int()
        seen.add_(1)
        evict(work, policy, rows, columns, seqs, seen, allowed)

    step()  # compiles; a capture may not
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    now = [rows.length, rows.table, rows.stack, rows.top]
    now += [getattr(columns, column) for column in COLUMNS]
    for tensor, old in zip(now, state, strict=True):
        tensor.copy_(old)
    seen.copy_(on_device([20, 20, 0]))
    for number in range(40):
        graph.replay()
        place = cache.append(torch.tensor([1, 0]), 1)[..., 0]
        cache.pool.position.view(-1)[place] = 20 + number
        for seq, budget in ((1, 90), (0, 70)):
            if int(cache.length[seq].sum()) > budget:
                eager_evict(cache, policy, seq, 21 + number, budget)
    assert int(room.error) == 0
    assert_same(cache, rows, columns)


# The most registers and bytes of shared memory.
MOST = {
    "evict.plan_kernel": (40, 4096),
    "evict.score_kernel": (96, 1024),
    "select.guard_kernel": (80, 1024),
    "select.group_kernel": (80, 16384),
    "select.count_kernel": (80, 16384),
    "evict.fill_kernel": (80, 1024),
    "evict.pages_kernel": (40, 4096),
}


@needs_compiler
@pytest.mark.parametrize(
    ("launch", "settings"),
    [
        ("evict", {"policy": "dbtrimkv", "lookahead": math.inf}),
        ("evict", {"policy": "balanced:floor=0.7", "lookahead": 2, "every": 16}),
        ("evict_to_shares", {"policy": "snapkv", "groups": 36, "floors": True}),
        ("evict_to_shares", {"policy": "h2o", "groups": 288}),
    ],
    ids=str,
)
def test_kernels_fit_a_hopper_sm(launch: str, settings: dict[str, Any]) -> None:
    """36 layers of 8 heads of 128 in bfloat16."""
    for code in compiled(launch, **settings):
        registers, shared = MOST[code.kernel]
        assert code.registers <= registers and code.spills <= ONE_SPILL
        assert code.shared <= shared
        if code.kernel == "evict.score_kernel":
            assert "fma.rn.f32" not in code.ptx, "a rounding that torch makes is left out"
        if code.kernel == "evict.plan_kernel" and "0.7" in settings["policy"]:
            assert f"0d{struct.pack('>d', 0.7).hex().upper()}" in code.ptx, "in float64"
