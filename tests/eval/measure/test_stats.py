"""Intervals and p-values against full enumeration, and by how often they hold on drawn data."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mmkv.eval.measure.stats import mean, paired


def resampled_means(sums: list[float], counts: list[float]) -> np.ndarray:
    """Return the mean of every resample of the dialogues, each as likely as the others, sorted."""
    every = itertools.product(range(len(sums)), repeat=len(sums))
    return np.sort([sum(sums[i] for i in p) / sum(counts[i] for i in p) for p in every])


def test_a_mean_weighs_dialogues_by_their_questions() -> None:
    found = mean([3, 0, 8], [4, 1, 10])
    assert found.value == pytest.approx(11 / 15)
    assert found.low == 0.0 and found.high == pytest.approx(8 / 10)


def test_the_interval_holds_95_percent_of_all_resamples() -> None:
    """Of 27 resamples one (3.7 %) has the mean 1: inside 95 % on that side, outside 90 %."""
    found = mean([0, 0, 1], [1, 1, 1])
    assert (found.low, found.high) == (0.0, 1.0)
    found = mean([1, 1, 0], [1, 1, 1])
    assert (found.low, found.high) == (0.0, 1.0)
    # And of 4**4 resamples one (0.4 %) has it: outside of both.
    found = mean([0, 0, 0, 1], [1, 1, 1, 1])
    assert found.high == 0.75
    sums, counts = [2.0, 7.0, 1.0, 0.0, 4.0], [3.0, 9.0, 2.0, 5.0, 4.0]
    every = resampled_means(sums, counts)
    found = mean(sums, counts, draws=40_000)
    for at, share in ((found.low, 0.025), (found.high, 0.975)):
        # Where it stands among all: within four standard errors of the draws.
        below, upto = (np.searchsorted(every, at, side) / len(every) for side in ("left", "right"))
        assert below - 0.004 <= share <= upto + 0.004


def test_the_interval_covers_the_truth_in_95_of_100_studies() -> None:
    """Dialogues of 1 to 9 questions that are right together: questions are not independent."""
    generator, held = np.random.default_rng(7), 0
    for study in range(500):
        counts = generator.integers(1, 10, 80)
        # Answers of a dialogue go by its own chance of being right, 0.6 at the mean.
        right = generator.binomial(counts, generator.beta(0.6, 0.4, 80))
        found = mean(right, counts, draws=600, seed=study)
        held += found.low <= 0.6 <= found.high
    # The standard error of 500 studies is 1 %; a 90 % interval would hold 450 times.
    assert 463 <= held <= 487


def test_a_paired_difference_is_that_of_the_same_dialogues() -> None:
    first, second, counts = [5.0, 1.0, 4.0, 9.0, 2.0], [3.0, 0.0, 4.0, 6.0, 1.0], [5, 2, 6, 9, 3]
    found = paired(first, second, counts)
    assert found.value == pytest.approx(7 / 25)
    every = resampled_means([2.0, 1.0, 0.0, 3.0, 1.0], counts)
    assert np.quantile(every, 0.015) <= found.low <= np.quantile(every, 0.035)
    assert np.quantile(every, 0.965) <= found.high <= np.quantile(every, 0.985)
    assert len({paired(first, second, counts, 99, seed).p for seed in range(9)}) > 1
    back = paired(second, first, counts)
    assert back.value == -found.value and back.p == found.p
    assert back.low == pytest.approx(-found.high) and back.high == pytest.approx(-found.low)


@pytest.mark.parametrize(
    "gaps", [[2.0, 1.0, 3.0, 1.0, 2.0], [2.0, -1.0, 3.0, -1.0, 2.0, 4.0], [0.1, 0.2, -0.3, 0.1]]
)
def test_p_counts_the_signs_that_are_as_extreme_on_both_sides(gaps: list[float]) -> None:
    every = list(itertools.product([1, -1], repeat=len(gaps)))
    observed = abs(sum(gaps)) - 1e-9
    exact = sum(abs(sum(s * g for s, g in zip(x, gaps, strict=True))) >= observed for x in every)
    found = paired(gaps, [0.0] * len(gaps), [1] * len(gaps), draws=20_000)
    assert found.p == pytest.approx(exact / len(every), abs=0.014)  # four standard errors


def test_p_is_never_0_and_1_without_a_difference() -> None:
    """Of 2**40 arrangements two are as extreme: none is drawn, and the observed one counts."""
    assert paired([1.0] * 40, [0.0] * 40, [1] * 40, draws=999).p == 1 / 1000
    assert paired([3.0] * 9, [3.0] * 9, [4] * 9).p == 1.0
    # Sums that are equal but for rounding count as equally extreme: both signs of one gap.
    gaps = [0.1, 0.2, 0.3]
    assert paired(gaps, [0.0] * 3, [1] * 3, draws=4000).p == pytest.approx(2 / 8, abs=0.03)


def test_p_is_below_a_twentieth_in_a_twentieth_of_studies_without_a_difference() -> None:
    generator, below = np.random.default_rng(3), 0
    for study in range(600):
        first, second = generator.normal(size=(2, 15))
        below += paired(first, second, [3] * 15, draws=300, seed=study).p <= 0.05
    assert 15 <= below <= 46  # 30 expected, standard error 5.3
