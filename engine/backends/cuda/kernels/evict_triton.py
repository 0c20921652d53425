"""``kernels.evict`` in Triton: a fixed sequence of kernels, whatever there is to evict.

Plan (who has to evict how much), score, guard (where rows have floors), select
(``kernels.select_triton``: a launch per byte for a budget shared by all rows, one for groups of
rows, none for one budget per row), fill, pages. Programs of sequences that need no eviction read
one number and end.

Scores are those of ``engine.policies.scoring`` as sortable integers, or what torch has computed, in
the order of the entries. As there, what does not depend on age is evaluated in float64 and rounded
once, so that it is right to the last bit but in rare ties of rounding: the order of entries must
not depend on the machine. Products are formed in float64, where they are exact, and rounded: a
multiply-add that skips this rounding cannot arise.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels import select_triton
from mmkv.engine.backends.cuda.kernels.buffers import (
    BINS,
    BLOCK,
    MOST_TIES,
    TURNS,
    EvictionBuffers,
    EvictionLimits,
    PageTables,
)
from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.backends.cuda.kernels.select_triton import is_victim, lowest_of_row
from mmkv.engine.budget import EVERY_STEP, Interval
from mmkv.engine.cache import Columns
from mmkv.engine.policies.allocation import FlooredAllocation, HeadAllocation
from mmkv.engine.policies.base import Policy, kernel_of
from mmkv.engine.policies.scoring import Retention

PLAN_WARPS = 4
# Of score, guard and fill. Rows hold some hundred entries, whose reads depend on each other, and
# lose one or two: small programs, so that many rows are on their way at once (21 per
# multiprocessor; with blocks of 512 and 8 moves it was 7).
ROW_BLOCK = 256
ROW_WARPS = 2
MOVES = 4
PAGES_BLOCK = 4096
PAGES_WARPS = 8
_MOST = 2**31 - 1  # that a row can hold more than its share
# What the HORIZON of score_kernel means, beside the horizons 1 and 2.
POSITION = tl.constexpr(0)
FINITE = tl.constexpr(3)
INFINITE = tl.constexpr(4)
STATE = tl.constexpr(5)
GIVEN = tl.constexpr(6)


def evict(
    work: EvictionBuffers,
    policy: Policy,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    seen: Tensor,
    allowed: Tensor,
    interval: Interval = EVERY_STEP,
) -> Tensor:
    """See ``evict``: 5 + TURNS launches, 6 + TURNS with floors, or 4 with a budget per row."""
    count = work.starts.shape[1]
    ratio, free = 0.0, 0
    if isinstance(policy.allocation, FlooredAllocation):
        ratio, free = float(policy.allocation.floor), policy.allocation.free
    budgets = {
        "allowed": allowed,
        "slack": min(interval.steps - 1, _MOST // count),
        "free": free,
        "PART": interval.part,
        "FLOOR": ratio,
    }
    groups = count if type(policy.allocation) is HeadAllocation else 1
    limits = EvictionLimits(work.share, work.floor if ratio > 0 else None, work.share, work.share)
    return _evict(work, policy, rows, pool, seqs, seen, groups, limits, budgets, None)


def evict_to_shares(
    work: EvictionBuffers,
    policy: Policy,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    seen: Tensor,
    limits: EvictionLimits,
    scores: Tensor | None = None,
) -> Tensor:
    """See ``evict_to_shares``.

    5 + TURNS launches where all rows are one group, 4 where each is one, else 5; one more with
    floors.
    """
    groups = limits.share.shape[1]
    return _evict(work, policy, rows, pool, seqs, seen, groups, limits, None, scores)


def _evict(
    work: EvictionBuffers,
    policy: Policy,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    seen: Tensor,
    groups: int,
    limits: EvictionLimits,
    budgets: dict[str, Any] | None,
    scores: Tensor | None,
) -> Tensor:
    """Launch an eviction to ``limits``; where ``budgets`` are given the plan works them out."""
    batch_slots, count = work.starts.shape
    width, page = rows.table.shape[-1], rows.page_size
    capacity, per_group, known = work.keys.shape[1], count // groups, budgets is None
    cells = _MOST if scores is None else scores.shape[-1]
    if budgets is None:
        budgets = {"allowed": limits.above, "slack": 0, "free": 0, "PART": 0, "FLOOR": 0.0}
    plan_kernel[(batch_slots,)](
        seqs,
        seen,
        budgets["allowed"],
        limits.above,
        rows.length,
        rows.top,
        work.plan,
        work.starts,
        work.counts,
        limits.share,
        work.floor,
        work.dropped,
        work.top_before,
        count,
        groups,
        per_group,
        budgets["slack"],
        work.most_entries,
        cells,
        MOST_TIES // count,
        budgets["free"],
        batch_slots,
        KNOWN=known,
        PART=budgets["PART"],
        FLOOR=budgets["FLOOR"],
        BLOCK=triton.next_power_of_2(count),
        GROUPS=triton.next_power_of_2(groups),
        EACH=triton.next_power_of_2(per_group),
        TURNS=TURNS,
        BINS=BINS,
        num_warps=PLAN_WARPS,
    )
    kind, ahead, shift = horizon(policy)
    score_kernel[(batch_slots, count)](
        seqs,
        seen,
        rows.length,
        rows.table,
        pool.log_beta,
        pool.position,
        pool.state,
        pool.log_beta if scores is None else scores,
        limits.recent,
        work.plan,
        work.starts,
        work.keys,
        work.ties,
        count,
        width,
        capacity,
        cells,
        ahead,
        policy.protect_first,
        policy.protect_recent,
        KNOWN=known,
        HORIZON=kind,
        SHIFT=shift,
        STATES=pool.state.shape[-1],
        PAGE=page,
        BLOCK=ROW_BLOCK,
        num_warps=ROW_WARPS,
    )
    if limits.floor is not None and per_group > 1:  # one row keeps its best anyway
        select_triton.guard_kernel[(batch_slots, count)](
            work.keys,
            work.ties,
            work.plan,
            work.starts,
            rows.length,
            seqs,
            limits.floor,
            count,
            capacity,
            BLOCK=ROW_BLOCK,
            num_warps=ROW_WARPS,
        )
    threshold = None
    if groups == 1:
        for turn in range(TURNS + 1):
            select_triton.count_kernel[(batch_slots, work.chunks if turn < TURNS else 1)](
                work.keys,
                work.ties,
                work.plan,
                work.state,
                work.counts,
                capacity,
                batch_slots,
                work.chunks,
                turn,
                TURNS=TURNS,
                BLOCK=BLOCK,
                num_warps=select_triton.WARPS,
            )
        threshold = work.state[TURNS][:, None]
    elif per_group > 1:
        threshold = work.threshold
        select_triton.group_kernel[(batch_slots, groups)](
            work.keys,
            work.ties,
            work.plan,
            work.starts,
            limits.share,
            threshold,
            count,
            per_group,
            capacity,
            BLOCK=BLOCK,
            num_warps=select_triton.WARPS,
        )
    _fill(work, rows, pool, seqs, limits.share, threshold)
    return work.dropped


def drop(
    work: EvictionBuffers,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    victims: Tensor,
    nan: Tensor,
) -> None:
    """See ``drop``: the last two launches of an eviction, for victims that are known."""
    entries = rows.length.flatten(1).sum(1)[seqs.clamp(min=0)]
    due = victims.flatten(1).any(1) & (seqs >= 0)
    work.plan[:, 0] = entries * due
    work.plan[:, 2] = nan
    work.keys.copy_(victims.flatten(1).logical_not() * 2 + 1)
    work.dropped.zero_()
    work.top_before.copy_(rows.top)
    _fill(work, rows, pool, seqs, work.starts, work.threshold)


def _fill(
    work: EvictionBuffers,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    share: Tensor,
    threshold: Tensor | None,
) -> None:
    """Launch what drops the victims and gives back their pages.

    Args:
        threshold: ``[B, G, 4]``; None: each row finds its own, from its ``share``.
    """
    batch_slots, count = work.starts.shape
    width, page = rows.table.shape[-1], rows.page_size
    capacity = work.keys.shape[1]
    sizes = {
        "KEY": pool.keys.shape[-1],
        "VALUE": pool.values.shape[-1],
        "KEY_SCALE": pool.key_scale.shape[-1],
        "VALUE_SCALE": pool.value_scale.shape[-1],
        "STATE": pool.state.shape[-1],
    }
    fill_kernel[(batch_slots, count)](
        seqs,
        rows.length,
        rows.table,
        *pool.columns(),
        work.plan,
        work.starts,
        work.keys,
        work.ties,
        share,
        work.state if threshold is None else threshold,
        work.freed,
        count,
        1 if threshold is None else count // threshold.shape[1],
        width,
        capacity,
        PER_ROW=threshold is None,
        PAGE=page,
        **sizes,
        **{f"{name}_BLOCK": triton.next_power_of_2(max(n, 1)) for name, n in sizes.items()},
        BLOCK=ROW_BLOCK,
        MOVES=MOVES,
        num_warps=ROW_WARPS,
    )
    pages_kernel[(batch_slots,)](
        seqs,
        rows.length,
        rows.table,
        rows.stack,
        rows.top,
        work.top_before,
        work.plan,
        work.freed,
        work.dropped,
        work.nan,
        count,
        width,
        batch_slots,
        PAGE=page,
        BLOCK=PAGES_BLOCK,
        ROWS=triton.next_power_of_2(count),
        num_warps=PAGES_WARPS,
    )


def horizon(policy: Policy) -> tuple[int, float, int]:
    """The kernel's HORIZON for a policy, its lookahead, and its SHIFT of ages."""
    if not isinstance(policy.scoring, Retention):
        others = {"recency": POSITION, "state": STATE, "torch": GIVEN}
        return others[kernel_of(policy.scoring)].value, 1.0, 0
    ahead, shift = policy.scoring.lookahead, policy.scoring.age_shift
    if math.isinf(ahead):
        return INFINITE.value, 1.0, shift
    return (int(ahead) if ahead in (1, 2) else FINITE.value), float(ahead), shift


@jit
def plan_kernel(
    seqs,
    seen,
    allowed,
    above,
    length,
    top,
    plan,
    starts,
    counts,
    share,
    floor,
    dropped,
    top_before,
    rows,
    groups,
    per_group,
    slack,
    most_entries,
    most_row,
    most_seen,
    free,
    batch_slots,
    KNOWN: tl.constexpr,
    PART: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    TURNS: tl.constexpr,
    BINS: tl.constexpr,
):
    """What one sequence has to give up; grid (B).

    KNOWN: ``share`` and ``above`` say what stays; else it is worked out of the budget ``allowed``.
    """
    batch_slot = tl.program_id(0)
    seq = tl.load(seqs + batch_slot)
    row = tl.arange(0, BLOCK)
    exists = row < rows
    count = tl.load(length + seq * rows + row, mask=exists & (seq >= 0), other=0)
    tl.store(
        starts + batch_slot * rows + row, (tl.cumsum(count, 0) - count).to(tl.int32), mask=exists
    )
    entries = tl.sum(count, 0)
    group = tl.arange(0, GROUPS)
    real = group < groups
    each = tl.arange(0, EACH)
    among = real[:, None] & (each < per_group)[None, :] & (seq >= 0)
    nth = group[:, None] * per_group + each[None, :]
    held = tl.sum(tl.load(length + seq * rows + nth, mask=among, other=0), 1)
    if KNOWN:
        kept = tl.load(share + batch_slot * groups + group, mask=real, other=0)
        slack = tl.load(above + batch_slot)
    else:
        budget = tl.load(allowed + batch_slot)
        if PART > 0:  # Interval.at
            slack = tl.minimum(slack, tl.maximum(budget // rows // PART, 1) - 1)
        # The first groups get what a division leaves over.
        kept = budget // groups + (group < budget % groups).to(tl.int64)
        tl.store(share + batch_slot * groups + group, kept, mask=real)
        if FLOOR > 0:  # FlooredAllocation.shares
            sure = tl.maximum(budget // rows - free, 0).to(tl.float64) * FLOOR
            sure = tl.zeros([BLOCK], tl.int64) + sure.to(tl.int64)
            tl.store(floor + batch_slot * rows + row, sure, mask=exists)
    most = tl.max(tl.where(real, held - kept, 0), 0)
    over = (seq >= 0) & (most > slack * per_group)
    fits = (entries <= most_entries) & (tl.load(seen + batch_slot) <= most_seen)
    fits = fits & (tl.max(count, 0) <= most_row)
    tl.store(plan + batch_slot * 3, tl.where(over & fits, entries, 0))
    tl.store(plan + batch_slot * 3 + 1, most)
    tl.store(plan + batch_slot * 3 + 2, tl.zeros([], tl.int64))
    turn = tl.arange(0, TURNS)[:, None]
    cell = (turn * batch_slots + batch_slot) * BINS + tl.arange(0, BINS)[None, :]
    tl.store(counts + cell, tl.zeros([TURNS, BINS], tl.int32))
    # The last kernel writes the number of those that do evict.
    tl.store(dropped + batch_slot, tl.where(over, -1, 0).to(tl.int64))
    if batch_slot == 0:  # the last kernel writes `top` while others still need it
        tl.store(top_before, tl.load(top))


@jit
def score_kernel(
    seqs,
    seen,
    length,
    table,
    log_beta,
    position,
    pool_state,
    given,
    recent,
    plan,
    starts,
    keys,
    ties,
    rows,
    width,
    capacity,
    cells,
    lookahead,
    protect_first,
    protect_recent,
    KNOWN: tl.constexpr,
    HORIZON: tl.constexpr,
    SHIFT: tl.constexpr,
    STATES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and ties of one row, see ``buffers.EvictionBuffers``; grid (B, R).

    KNOWN: ``recent [B]`` says how many of the newest tokens are protected, not ``protect_recent``.
    """
    batch_slot = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(plan + batch_slot * 3) == 0:
        return
    newest = tl.load(recent + batch_slot) if KNOWN else protect_recent
    now = tl.load(seen + batch_slot).to(tl.int32)
    source = tl.load(seqs + batch_slot) * rows + row
    count = tl.load(length + source).to(tl.int32)
    target = batch_slot.to(tl.int64) * capacity + tl.load(starts + batch_slot * rows + row)
    scores = given + (batch_slot.to(tl.int64) * rows + row) * cells
    for base in range(0, count, BLOCK):
        offset = base + tl.arange(0, BLOCK)
        live = offset < count
        page = tl.load(table + source * width + offset // PAGE, mask=live, other=0)
        slot = page * PAGE + offset % PAGE
        place = tl.load(position + slot, mask=live, other=0)
        if HORIZON == POSITION:
            score = place.to(tl.float32)
        elif HORIZON == STATE:
            score = tl.load(pool_state + slot * STATES, mask=live, other=0.0)
        elif HORIZON == GIVEN:
            score = tl.load(scores + offset, mask=live, other=0.0)
        else:
            rate = tl.load(log_beta + slot, mask=live, other=-1.0)
            score = _retention(rate, now - place + SHIFT, lookahead, HORIZON, SHIFT)
        if protect_first > 0:
            score = tl.where(place < protect_first, float("inf"), score)
        score = tl.where(place >= now - newest, float("inf"), score)
        tl.store(keys + target + offset, _sortable(score), mask=live)
        tie = place.to(tl.int64) * rows + row
        tl.store(ties + target + offset, tie.to(tl.int32), mask=live)


@triton.jit
def _retention(rate, age, lookahead, HORIZON: tl.constexpr, SHIFT: tl.constexpr):
    """``engine.policies.scoring.lookahead_log_score``: float32, to the last bit where it can be."""
    x = rate.to(tl.float64)
    score = (x * age.to(tl.float32).to(tl.float64)).to(tl.float32)
    if SHIFT < 0:
        score = tl.where(age == 0, 0.0, score)  # not 0 * -inf
    if HORIZON == 2:
        score += _log1p(tl.exp(x)).to(tl.float32)
    if HORIZON == INFINITE:
        near = tl.log(-_expm1(x))
        far = _log1p(-tl.exp(x))
        score -= tl.where(x > -0.6931471805599453, near, far).to(tl.float32)
    if HORIZON == FINITE:
        ratio = _expm1(x * lookahead) / _expm1(x)
        score += tl.log(tl.where(x == 0, lookahead, ratio)).to(tl.float32)
    return score


@triton.jit
def _expm1(x):
    """``exp(x) - 1`` in float64 for x <= 0; near 0 by the series, whose ninth term is 1e-15."""
    series = 1.0 + x * (1 / 6) * (1.0 + x * (1 / 7) * (1.0 + x * (1 / 8)))
    series = 1.0 + x * (1 / 3) * (1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * series))
    series = x * (1.0 + x * 0.5 * series)
    return tl.where(x > -0.03125, series, tl.exp(x) - 1.0)


@triton.jit
def _log1p(y):
    """``log(1 + y)`` in float64 for -0.5 <= y <= 1, to 1e-16 of itself.

    It is 2 artanh(s) with s = y / (2 + y), at most 1/3 in size: an odd series.
    """
    s = y / (2.0 + y)
    t = s * s
    series = 1 / 25 + t * (1 / 27 + t * (1 / 29 + t * (1 / 31)))
    series = 1 / 17 + t * (1 / 19 + t * (1 / 21 + t * (1 / 23 + t * series)))
    series = 1 / 9 + t * (1 / 11 + t * (1 / 13 + t * (1 / 15 + t * series)))
    return 2.0 * s * (1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * series))))


@triton.jit
def _sortable(score):
    """The bits of an int32 that, read as uint32, order as the scores do; NaN below all."""
    score = tl.where(score == 0, 0.0, score)  # -0 and 0 are one score
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(score != score, 0, bits)


@jit
def fill_kernel(
    seqs,
    length,
    table,
    pool_keys,
    pool_values,
    pool_key_scale,
    pool_value_scale,
    pool_log_beta,
    pool_position,
    pool_modality,
    pool_state,
    plan,
    starts,
    keys,
    ties,
    share,
    threshold,
    freed,
    rows,
    per_group,
    width,
    capacity,
    PER_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    STATE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEY_SCALE_BLOCK: tl.constexpr,
    VALUE_SCALE_BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Drop the victims of one row; grid (B, R).

    Victims inside the new length, in ascending order, are replaced by the survivors beyond it, in
    ascending order. The pairs are found MOVES at a time, by counting: rows lose about one entry
    per step, and nothing has to be written down. Buffers: see EvictionBuffers; the threshold is a
    key, a tie, and how many go; a score that is no number has key 0.
    """
    batch_slot = tl.program_id(0)
    row = tl.program_id(1)
    tl.store(freed + batch_slot * rows + row, 0)
    if tl.load(plan + batch_slot * 3) == 0:
        return
    source = tl.load(seqs + batch_slot) * rows + row
    before = tl.load(length + source).to(tl.int32)
    start = batch_slot.to(tl.int64) * capacity + tl.load(starts + batch_slot * rows + row)
    if PER_ROW:
        sought = before - tl.load(share + batch_slot * rows + row)
        if sought <= 0:
            return
        key_at, tie_at = lowest_of_row(keys, ties, start, before, sought, BLOCK)
    else:
        level = threshold + (batch_slot * (rows // per_group) + row // per_group) * 4
        key_at = tl.load(level)
        tie_at = tl.load(level + 1)
        if tl.load(level + 2) == 0:
            return
    gone = tl.zeros([], tl.int32)
    without = tl.zeros([], tl.int32)
    for base in range(0, before, BLOCK):
        offset = base + tl.arange(0, BLOCK)
        live = offset < before
        victim = is_victim(keys, ties, start + offset, live, key_at, tie_at)
        gone += tl.sum(victim.to(tl.int32), 0)
        no_number = tl.load(keys + start + offset, mask=live, other=1) == 0
        without += tl.sum((victim & no_number).to(tl.int32), 0)
    if gone == 0:
        return
    if without > 0:
        tl.atomic_add(plan + batch_slot * 3 + 2, without.to(tl.int64), sem="relaxed")
    after = before - gone
    tl.store(length + source, after.to(tl.int64))
    tl.store(freed + batch_slot * rows + row, tl.cdiv(before, PAGE) - tl.cdiv(after, PAGE))

    pages = table + source * width
    for first in range(0, tl.minimum(gone, after), MOVES):
        nth = first + tl.arange(0, MOVES)
        hole = tl.zeros([MOVES], tl.int32)
        mover = tl.zeros([MOVES], tl.int32)
        passed = tl.zeros([], tl.int32)  # holes and movers of the blocks before
        holes = tl.zeros([], tl.int32)
        for base in range(0, before, BLOCK):
            offset = base + tl.arange(0, BLOCK)
            live = offset < before
            victim = is_victim(keys, ties, start + offset, live, key_at, tie_at)
            inside = offset < after
            item = tl.where(inside, victim, live & (victim == 0)).to(tl.int32)
            holes += tl.sum(tl.where(inside, item, 0), 0)
            order = passed + tl.cumsum(item, 0) - 1
            passed += tl.sum(item, 0)
            # All holes come before the first mover, so their number is known by then.
            order = tl.where(inside, order, order - holes)
            chosen = (item == 1)[None, :] & (order[None, :] == nth[:, None])
            hole += tl.sum(tl.where(chosen & inside[None, :], offset[None, :], 0), 1)
            mover += tl.sum(tl.where(chosen & ~inside[None, :], offset[None, :], 0), 1)
        moving = nth < holes
        to = tl.load(pages + hole // PAGE, mask=moving, other=0) * PAGE + hole % PAGE
        at = tl.load(pages + mover // PAGE, mask=moving, other=0) * PAGE + mover % PAGE
        feature = tl.arange(0, KEY_BLOCK)[None, :]
        key_part = moving[:, None] & (feature < KEY)
        key = tl.load(pool_keys + at[:, None] * KEY + feature, mask=key_part)
        part = tl.arange(0, VALUE_BLOCK)[None, :]
        value_part = moving[:, None] & (part < VALUE)
        value = tl.load(pool_values + at[:, None] * VALUE + part, mask=value_part)
        log_beta = tl.load(pool_log_beta + at, mask=moving)
        position = tl.load(pool_position + at, mask=moving)
        modality = tl.load(pool_modality + at, mask=moving)
        tl.store(pool_keys + to[:, None] * KEY + feature, key, mask=key_part)
        tl.store(pool_values + to[:, None] * VALUE + part, value, mask=value_part)
        tl.store(pool_log_beta + to, log_beta, mask=moving)
        tl.store(pool_position + to, position, mask=moving)
        tl.store(pool_modality + to, modality, mask=moving)
        if KEY_SCALE > 0:
            nth_scale = tl.arange(0, KEY_SCALE_BLOCK)[None, :]
            there = moving[:, None] & (nth_scale < KEY_SCALE)
            scale = tl.load(pool_key_scale + at[:, None] * KEY_SCALE + nth_scale, mask=there)
            tl.store(pool_key_scale + to[:, None] * KEY_SCALE + nth_scale, scale, mask=there)
        if VALUE_SCALE > 0:
            nth_scale = tl.arange(0, VALUE_SCALE_BLOCK)[None, :]
            there = moving[:, None] & (nth_scale < VALUE_SCALE)
            scale = tl.load(pool_value_scale + at[:, None] * VALUE_SCALE + nth_scale, mask=there)
            tl.store(pool_value_scale + to[:, None] * VALUE_SCALE + nth_scale, scale, mask=there)
        if STATE > 0:
            number = tl.arange(0, STATE_BLOCK)[None, :]
            kept = moving[:, None] & (number < STATE)
            state = tl.load(pool_state + at[:, None] * STATE + number, mask=kept)
            tl.store(pool_state + to[:, None] * STATE + number, state, mask=kept)


@jit
def pages_kernel(
    seqs,
    length,
    table,
    stack,
    top,
    top_before,
    plan,
    freed,
    dropped,
    nan,
    rows,
    width,
    batch_slots,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Give back the pages that one sequence no longer needs; grid (B)."""
    batch_slot = tl.program_id(0)
    given = tl.zeros([], tl.int32)  # by the batch slots before
    for base in range(0, batch_slot * rows, BLOCK):
        index = base + tl.arange(0, BLOCK)
        given += tl.sum(tl.load(freed + index, mask=index < batch_slot * rows, other=0), 0)
    row = tl.arange(0, ROWS)
    exists = row < rows
    mine = tl.load(freed + batch_slot * rows + row, mask=exists, other=0)
    free = tl.load(top_before) + given
    if batch_slot == batch_slots - 1:
        tl.store(top, free + tl.sum(mine, 0))
    entries = tl.load(plan + batch_slot * 3)
    if entries == 0:
        return
    source = tl.load(seqs + batch_slot) * rows + row
    count = tl.load(length + source, mask=exists, other=0)
    gone = entries - tl.sum(count, 0)
    tl.store(dropped + batch_slot, gone)
    without = tl.load(plan + batch_slot * 3 + 2)
    tl.store(nan + batch_slot, tl.load(nan + batch_slot) + without)
    column = table + source * width + tl.cdiv(count, PAGE)
    place = stack + free + tl.cumsum(mine, 0) - mine
    for nth in range(0, tl.max(mine, 0)):
        page = tl.load(column + nth, mask=nth < mine, other=0)
        tl.store(place + nth, page, mask=nth < mine)
