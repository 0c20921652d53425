"""Scores of all entries as sortable integers, in Triton: ``engine.policies.scoring`` on pages.

Or scores that torch has computed, in the order of their entries.

As there, what does not depend on age is evaluated in float64 and rounded once, so that it is right
to the last bit but in rare ties of rounding: the order of entries must not depend on the machine.
Products are formed in float64, where they are exact, and rounded: a multiply-add that skips this
rounding cannot arise.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl

from mmkv.engine.policies.base import Policy, kernel_of
from mmkv.engine.policies.scoring import Retention

# Small programs, because rows are short and their reads depend on each other: what counts is how
# many rows are on their way at once.
BLOCK = 256
WARPS = 2
# What the HORIZON of the kernel means, beside the horizons 1 and 2.
POSITION = tl.constexpr(0)
FINITE = tl.constexpr(3)
INFINITE = tl.constexpr(4)
STATE = tl.constexpr(5)
GIVEN = tl.constexpr(6)


def horizon(policy: Policy) -> tuple[int, float, int]:
    """The kernel's HORIZON for a policy, its lookahead, and its SHIFT of ages."""
    if not isinstance(policy.scoring, Retention):
        others = {"recency": POSITION, "state": STATE, "torch": GIVEN}
        return others[kernel_of(policy.scoring)].value, 1.0, 0
    ahead, shift = policy.scoring.lookahead, policy.scoring.age_shift
    if math.isinf(ahead):
        return INFINITE.value, 1.0, shift
    return (int(ahead) if ahead in (1, 2) else FINITE.value), float(ahead), shift


@triton.jit
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
