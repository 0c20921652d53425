"""The lookahead score against mpmath at 50 digits.

Tolerance. The score is a sum of two float32 terms, ``a * log_beta`` and the log of a partial
geometric sum, each correct to a few rounding units (2**-24) of its own magnitude. The error
bound is therefore ``4 * 2**-24 * (|a log_beta| + |log sum| + 1)``: relative to the terms, not
to their sum, which may cancel; and the 1 covers sums near ``log 1 = 0``, where one unit of the
ratio inside the log is one unit of absolute error outside. A bound in units of 2**-24 is what
rules out the naive ``1 - exp(log_beta)``, wrong by 100 % at ``log_beta = -1e-9``.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from mmkv.engine.policies.scoring import log1mexp, lookahead_log_score
from tests.support.oracle import log_score

UNIT = 2.0**-24
LOG_BETAS = [0.0, *(-(10.0**e) for e in range(-9, 2)), -1.5e-8, -3e-4, -0.3, -math.log(2), -20, -50]
AGES = [1, 2, 3, 7, 64, 1000, 99_999, 1_000_000]
LOOKAHEADS = [1, 2, 5, 64, math.inf]


def grid() -> tuple[Tensor, Tensor]:
    """Return all (log_beta, age) pairs, float32 and int64."""
    x = torch.tensor(LOG_BETAS, dtype=torch.float32)
    age = torch.tensor(AGES)
    return x.repeat_interleave(len(AGES)), age.repeat(len(LOG_BETAS))


def exact(x: float, age: int, n: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Return the two terms of the score at 50 digits; ``x`` is taken as the exact float32 value."""
    with mpmath.workdps(50):
        x_exact = mpmath.mpf(x)
        if x == 0:
            return mpmath.mpf(0), mpmath.inf if math.isinf(n) else mpmath.log(n)
        top = mpmath.mpf(0) if math.isinf(n) else mpmath.log(-mpmath.expm1(int(n) * x_exact))
        return age * x_exact, top - mpmath.log(-mpmath.expm1(x_exact))


@pytest.mark.parametrize("n", LOOKAHEADS)
def test_score_matches_mpmath(n: float) -> None:
    x, age = grid()
    got = lookahead_log_score(x, age, n)
    assert got.dtype == torch.float32
    for value, xi, ai in zip(got.tolist(), x.tolist(), age.tolist(), strict=True):
        decayed, summed = exact(xi, ai, n)
        if math.isinf(float(summed)):
            assert value == math.inf
            continue
        bound = 4 * UNIT * (abs(decayed) + abs(summed) + 1)
        assert abs(value - (decayed + summed)) <= bound, (xi, ai, n, value)


@pytest.mark.parametrize("n", LOOKAHEADS)
def test_oracle_score_matches_mpmath(n: float) -> None:
    """The float64 reference that the oracle sorts by is itself right, to 1e-14."""
    x, age = grid()
    for value, xi, ai in zip(log_score(x, age, n).tolist(), x.tolist(), age.tolist(), strict=True):
        decayed, summed = exact(xi, ai, n)
        if math.isinf(float(summed)):
            assert value == math.inf
            continue
        assert abs(value - (decayed + summed)) <= 1e-14 * (abs(decayed) + abs(summed) + 1)


@pytest.mark.parametrize("n", LOOKAHEADS)
def test_score_orders_as_exact(n: float, generator: torch.Generator) -> None:
    """Entries whose exact scores differ by more than 1e-6 relative are ordered alike."""
    count = 4000
    exponent = torch.empty(count).uniform_(-9, math.log10(50), generator=generator)
    x = -(10.0**exponent)
    x[:40] = 0.0
    age = (10.0 ** torch.empty(count).uniform_(0, 6, generator=generator)).long().clamp(1)
    # Half of the entries are neighbours of others, so that close pairs are plenty.
    half = count // 2
    x[half:] = x[:half] * (1 + 1e-5 * torch.randn(half, generator=generator))
    age[half:] = age[:half]
    truth = log_score(x, age, n)
    order = truth.argsort()
    ours = lookahead_log_score(x, age, n).double()[order]
    truth = truth[order]
    # For every entry, the largest of our scores among all that are exactly lower by the margin.
    highest = ours.cummax(0).values
    margin = 1e-6 * truth.abs().clamp(min=1.0)
    below = torch.searchsorted(truth, truth - margin, right=False)
    judged = below > 0
    assert bool(judged.any())
    assert bool((highest[below[judged] - 1] <= ours[judged]).all())


def test_limits() -> None:
    zero, one = torch.zeros(1), torch.ones(1, dtype=torch.int64)
    for n in (1, 2, 5, 64):
        torch.testing.assert_close(lookahead_log_score(zero, one, n), torch.tensor([math.log(n)]))
    assert lookahead_log_score(zero, one, math.inf).item() == math.inf
    x = torch.tensor([-0.25])
    torch.testing.assert_close(lookahead_log_score(x, 3 * one, 1), torch.tensor([-0.75]))
    # The definition itself: beta^a + ... + beta^(a + n - 1).
    terms = torch.exp(x.double() * torch.arange(3, 8)).sum().log()
    torch.testing.assert_close(lookahead_log_score(x, 3 * one, 5).double().sum(), terms)


@pytest.mark.parametrize("n", LOOKAHEADS)
def test_an_entry_of_age_0_is_whole(n: float) -> None:
    """``beta^0 = 1``, of beta = 0 and of no number as well; the steps ahead count as ever."""
    x = torch.tensor([*LOG_BETAS, -math.inf])
    age = torch.zeros(x.numel(), dtype=torch.int64)
    got = lookahead_log_score(x, age, n, least_age=0)
    for value, xi in zip(got.tolist(), x.tolist(), strict=True):
        if math.isinf(xi):
            assert value == 0  # only the first of the summed steps is not 0
        elif xi == 0 and math.isinf(n):
            assert value == math.inf
        else:
            summed = exact(xi, 0, n)[1]
            assert abs(value - summed) <= 4 * UNIT * (abs(summed) + 1)
    one = torch.tensor([math.nan])
    assert lookahead_log_score(one, age[:1], 1, least_age=0).item() == 0
    assert log_score(one, age[:1], 1).item() == 0
    torch.testing.assert_close(log_score(x, age, n).float(), got)


def test_score_uses_the_age_not_only_the_gate() -> None:
    """Two lines in t cross: the order of two entries changes with time."""
    x = torch.tensor([-1e-3, -0.5])
    early = lookahead_log_score(x, torch.tensor([2000, 1]), 2)
    late = lookahead_log_score(x, torch.tensor([2010, 11]), 2)
    assert early[0] < early[1] and late[0] > late[1]


def test_a_gate_bias_of_18_survives() -> None:
    """1 - beta = 1.5e-8 is below float32's resolution at 1; the log form keeps it apart."""
    x = torch.nn.functional.logsigmoid(torch.tensor([18.0, 19.0]))
    assert bool((log1mexp(x) < -17.9).all()) and bool((log1mexp(x).diff() < -0.9).all())
    scores = lookahead_log_score(x, torch.tensor([100_000, 100_000]), 2)
    assert bool(scores[0] < scores[1])
