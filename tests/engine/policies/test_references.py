"""The references of the policies against numbers by hand, and on a small random model."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmkv.training.measure.record import ROOT
from tests.support.factories import Checkpoint
from tests.support.oracle import METHODS, methods
from tests.support.oracle.eviction import Oracle
from tests.support.oracle.methods import Method, PromptKept, make_method
from tests.support.oracle.simulation import Group, Simulation, equal, equal_in_layers, pyramid
from tests.support.policies import EVICTING_KINDS
from tests.support.sessions import save_checkpoint, text_ids
from tests.support.tiers import slow_but

L3 = math.log(3)


class Given(Simulation):
    """Tokens whose tensors are given, without a model; all entries are kept.

    keys, values: ``[L][H][T][D]``; queries: ``[L][Hq][T][D]``; residual: ``[L][T][d]``; weights:
    ``[L][Hq][new][T]``; prompt: how many of the first tokens a prefill brought.
    """

    def __init__(
        self,
        keys: Any,
        values: Any = None,
        queries: Any = None,
        residual: Any = None,
        weights: Any = None,
        prompt: int | None = None,
    ) -> None:
        key = torch.tensor(keys, dtype=torch.float64)
        self.layers, self.heads, self.seen, self.dim = key.shape
        self.scale = self.dim**-0.5
        self.key = list(key)
        self.value = list(key if values is None else torch.tensor(values, dtype=torch.float64))
        query = key if queries is None else torch.tensor(queries, dtype=torch.float64)
        self.query, self.group = list(query), query.shape[1] // self.heads
        self.residual = [] if residual is None else list(torch.tensor(residual).double())
        self.weights = [] if weights is None else list(torch.tensor(weights).double())
        self.new = self.weights[0].shape[1] if self.weights else self.seen
        self.keep = torch.ones(self.layers, self.heads, self.seen, dtype=torch.bool)
        self.prompt = torch.arange(self.seen) < (self.seen if prompt is None else prompt)


def close(got: Tensor, *wanted: float) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64))


# --- shares ----------------------------------------------------------------------------------


def test_equal_shares_hand_the_rest_to_the_first() -> None:
    assert equal(7, 3) == [3, 2, 2]
    # 11 entries for 2 layers of 2 rows: 2 each, 3 over, of which one layer takes 2.
    assert equal_in_layers(11, 2, 2) == [3, 3, 2, 2]


def test_pyramid_by_hand() -> None:
    # Mean 6, of which the window 2 leaves 4: top 4 / 2, bottom 2 * 4 - 2, middle 4.
    assert pyramid(18, 3, 1, window=2, beta=2) == [8, 6, 4]
    # 17: the windows leave 11; 5.5, 3.67 and 1.83 round down to 9, and the first two rows get one.
    assert pyramid(17, 3, 1, window=2, beta=2) == [8, 6, 3]
    assert pyramid(17, 1, 3, window=2, beta=9) == [6, 6, 5]
    assert pyramid(12, 3, 1, window=8, beta=20) == [4, 4, 4]  # the window takes all


def test_pyramid_is_the_integer_formula_of_the_documents() -> None:
    for total in (40, 57, 96, 101):
        for layers, heads, window, beta in (
            (2, 2, 3, 20),
            (5, 1, 4, 2),
            (4, 3, 2, 1),
            (3, 2, 50, 7),
        ):
            rows = layers * heads
            w = min(window, total // rows)
            left = total - rows * w
            wanted = [
                w
                + left
                * ((2 * beta - 1) * (layers - 1) - 2 * (beta - 1) * layer)
                // (rows * beta * (layers - 1))
                for layer in range(layers)
                for _ in range(heads)
            ]
            for number in range(total - sum(wanted)):
                wanted[number] += 1
            assert pyramid(total, layers, heads, window, beta) == wanted
            assert sum(wanted) == total


# --- selection -------------------------------------------------------------------------------


def order(group: Group, scores: list[list[float]]) -> list[tuple[tuple[int, int], int]]:
    """Order in which entries of one layer's rows go."""
    score = torch.tensor([scores], dtype=torch.float64)
    oracle = Oracle.__new__(Oracle)
    oracle.keep = torch.ones(score.shape, dtype=torch.bool)
    return oracle._order(group, score)


def test_ties_fall_on_position_then_head_and_nan_is_lowest() -> None:
    rows = [(0, 0), (0, 1)]
    got = order(Group(rows, 0), [[2.0, 1.0, math.inf], [1.0, 1.0, math.nan]])
    assert got == [
        ((0, 1), 2),
        ((0, 1), 0),
        ((0, 0), 1),
        ((0, 1), 1),
        ((0, 0), 0),
        ((0, 0), 2),
    ]


def test_floors_guard_the_best_of_a_row() -> None:
    got = order(Group([(0, 0), (0, 1)], 0, floor=1), [[0.1, 0.2], [0.8, 0.9]])
    assert got == [((0, 0), 0), ((0, 1), 0), ((0, 0), 1), ((0, 1), 1)]


# --- attention -------------------------------------------------------------------------------

# Two tokens; the second query's logits are 0 and log 3: it pays 1/4 and 3/4.
TWO: dict[str, Any] = {"keys": [[[[0.0], [L3]]]], "queries": [[[[1.0], [1.0]]]]}


def test_window_attention_by_hand() -> None:
    sim = Given(**TWO)
    close(sim.window_attention(0, 2)[0, 0, 0], 1.0, 0.0)  # causal
    close(sim.window_attention(0, 2)[0, 0, 1], 0.25, 0.75)
    sim.keep[0, 0, 1] = False
    close(sim.window_attention(0, 1)[0, 0, 0], 1.0, 0.0)  # over what is kept now
    sim.keep[0, 0, 0] = False
    close(sim.window_attention(0, 1)[0, 0, 0], 0.0, 0.0)


def test_h2o_adds_up_what_each_pass_pays() -> None:
    method = methods.H2O()
    # Two query heads for one KV head: their mean counts.
    first = Given(TWO["keys"], queries=[[[[1.0]] * 2] * 2], weights=[[[[1, 0], [0.25, 0.75]]] * 2])
    method.passed(first)
    close(method.score(first)[0, 0], 1.25, 0.75)
    second = Given(
        [[[[0.0], [L3], [0.0]]]],
        queries=[[[[1.0]] * 3] * 2],
        weights=[[[[0.5, 0.0, 0.5]], [[0.1, 0.2, 0.7]]]],
    )
    method.passed(second)
    close(method.score(second)[0, 0], 1.25 + 0.3, 0.75 + 0.1, 0.6)
    highest = methods.H2O(group="max")
    highest.passed(second)
    close(highest.score(second)[0, 0], 0.5, 0.2, 0.7)
    assert method.protected(second, total=4).tolist() == [False, True, True]
    assert method.protected(second, total=3).tolist() == [False, False, True]


def test_tova_takes_the_mean_over_the_heads_of_a_layer() -> None:
    sim = Given([[[[0.0], [L3]], [[0.0], [0.0]]]], queries=[[[[9.0], [1.0]]] * 2])
    close(methods.Tova().score(sim)[0].flatten(), 0.375, 0.625, 0.375, 0.625)


def test_pooling_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    close(methods.pooled(values, 3, "avg"), 1.0, 2.0, 5 / 3)
    close(methods.pooled(values, 3, "max"), 2.0, 3.0, 3.0)
    assert methods.pooled(values[:0], 3, "avg").numel() == 0


# Three tokens, the last of which observes; logits 0, log 3 and 0: 1/5, 3/5, 1/5.
THREE: dict[str, Any] = {"keys": [[[[0.0], [L3], [0.0]]]], "queries": [[[[1.0]] * 3]]}


def test_snapkv_pools_the_prefix_alone() -> None:
    sim = Given(**THREE)
    method = methods.SnapKV(window=1, kernel=3)
    close(method.score(sim)[0, 0, :2], 4 / 15, 4 / 15)
    assert method.protected(sim, 2).tolist() == [False, False, True]
    close(methods.SnapKV(window=1, kernel=1).score(sim)[0, 0, :2], 0.2, 0.6)


def test_groups_of_query_heads_are_reduced_as_asked() -> None:
    # A second query head with the query 0 pays 1/3 everywhere.
    sim = Given(THREE["keys"], queries=[[[[1.0]] * 3, [[0.0]] * 3]])
    for how, wanted in (("mean", 7 / 15), ("max", 3 / 5), ("sum", 14 / 15)):
        got = methods.SnapKV(window=1, kernel=1, group=how).score(sim)
        close(got[0, 0, 1:2], wanted)


def test_morphkv_fuses_by_sum_or_maximum() -> None:
    # The second query pays 1/4 and 3/4, the third 1/5, 3/5, 1/5.
    sim = Given(**THREE)
    close(methods.MorphKV(window=2).score(sim)[0, 0, :1], 0.45)
    close(methods.MorphKV(window=2, fusion="max").score(sim)[0, 0, :1], 0.25)


def test_expected_attention_by_hand() -> None:
    """Queries before RoPE (1, 0) and (3, 0), which a quarter turn puts on the second axis."""
    keys = [[5.0, 5.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.0]]
    sim: Any = Given([[keys]], values=[[[[9.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 4.0]]]])
    sim.unrotated = [torch.tensor([[[7.0, 7.0], [7.0, 7.0], [1.0, 0.0], [3.0, 0.0]]])]
    sim.rope_position = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 5], [0, 1, 4, 2]])
    asked: list[range] = []
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    sim.mean_rotation = lambda layer, positions: asked.append(positions) or turn
    # Mean (0, 2) and variance 1 of the second feature: of key 1, 2 * 2 / sqrt 2 + 4 / (2 * 2).
    rest = math.exp(2 * 2**0.5 + 1) + 2
    shares = [math.exp(2 * 2**0.5 + 1) / rest, 1 / rest, 1 / rest]
    method = methods.Expected(window=2, ahead=3, sinks=1, epsilon=0.5)
    wanted = [(share + 0.5) * norm for share, norm in zip(shares, (1, 2, 5), strict=True)]
    close(method.score(sim)[0, 0, 1:], *wanted)
    assert asked == [range(6, 9)] and method.protected(sim, 9).tolist() == [True] + [False] * 3
    # Of a window that reaches into the sinks the others count; without others, these.
    sim.unrotated[0][0, :2] = torch.tensor([[9.0, 0.0], [2.0, 0.0]])
    wide = methods.Expected(window=4, sinks=1, epsilon=0.5).score(sim)
    three = math.exp(2 * 2**0.5 + 2 / 3)  # queries 2, 1 and 3: mean 2, variance 2 / 3
    close(wide[0, 0, 1:2], three / (three + 2) + 0.5)


def test_adakv_competes_in_layers_with_floors() -> None:
    sim = Given([[[[0.0]] * 9] * 2] * 2)
    groups = methods.AdaKV(floor=0.5).groups(sim, 25)
    assert groups == [Group([(0, 0), (0, 1)], 13, 3), Group([(1, 0), (1, 1)], 12, 3)]
    both = methods.AdaPyramidKV(window=2, beta=2, floor=0.5).groups(sim, 24)
    # Mean 6, windows leave 4: 6 at the bottom and 2 at the top, and the window for each.
    assert [(g.share, g.floor) for g in both] == [(16, 4), (8, 2)]


# --- redundancy ------------------------------------------------------------------------------


def test_redundancy_spares_the_last_similar_key() -> None:
    """Keys 0, 1 and 3 are equal: 0 and 1 spare 3, and 3 spares 1. Column means 2/4, 1/4, 0, 0."""
    same, other = [1.0, 0.0], [0.0, 2.0]
    got = methods.redundancy(torch.tensor([same, same, other, same]), 0.5, cut=False)
    torch.testing.assert_close(got, torch.tensor([0.5, 0.25, 0.0, 0.0]).double().softmax(0))


def test_redundancy_cut_at_the_threshold() -> None:
    """Cosines: 0.6 of keys 0 and 1, 0.8 of 1 and 2, 0 of 0 and 2."""
    given = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]).double()
    # Row 0 spares 1, row 1 spares 2, row 2 spares 1; what is left: C[1, 0] = 0.6.
    wanted = torch.tensor([0.2, 0.0, 0.0]).double().softmax(0)
    for cut in (False, True):
        torch.testing.assert_close(methods.redundancy(given, 0.5, cut=cut), wanted)
    # Above 0.7 only 1 and 2 are similar, and spare each other; 0.6 counts unless it is cut.
    torch.testing.assert_close(
        methods.redundancy(given, 0.7, cut=False),
        torch.tensor([0.2, 0.2, 0.0]).double().softmax(0),
    )
    torch.testing.assert_close(
        methods.redundancy(given, 0.7, cut=True), torch.full((3,), 1 / 3).double()
    )


def test_rkv_by_hand() -> None:
    """The maximum of logits comes before the softmax: 0, log 3, 0 from two heads, 1/5, 3/5, 1/5."""
    sim = Given(
        [[[[0.0, 1.0], [L3 * 2**0.5, 0.0], [0.0, -1.0]]]],
        queries=[[[[1.0, 0.0]] * 3, [[0.0, 0.0]] * 3]],
    )
    repeats = methods.redundancy(sim.key[0][0], 0.5, cut=False)
    got = make_method("rkv", 2, {"window": 1, "kernel": 1, "lambda": 0.25}).score(sim)[0, 0, :2]
    wanted = 0.25 * torch.tensor([0.2, 0.6]).double() - 0.75 * repeats[:2]
    torch.testing.assert_close(got, wanted)
    pooled = methods.RKV(window=1, kernel=3, lambda_=1.0).score(sim)[0, 0, :2]
    close(pooled, 0.6, 0.6)


@pytest.mark.parametrize(
    ("form", "wanted"), [("max", (0.5, 1.0)), ("mean", (0.45, 0.9)), ("sum", (11 / 15, 1.4))]
)
def test_gkv_remembers_by_each_form(form: str, wanted: tuple[float, float]) -> None:
    """Attention is now 1/3 and 1 of the greatest; what was remembered halves."""
    method = methods.GKV(window=1, form=form, alpha=0.5, redundancy=False)
    sim = Given(**THREE)
    method.passed(sim)
    close(method.score(sim)[0, 0, :2], 1 / 3, 1.0)  # the first compression: S alone
    assert method.history[0, 0].isnan().tolist() == [False, False, True]
    method.history[0, 0, :2] = {
        "max": torch.tensor([1.0, 0.5]),
        "mean": torch.tensor([17 / 30, 0.8]),
        "sum": torch.tensor([0.8, 0.8]),
    }[form]
    close(method.score(sim)[0, 0, :2], *wanted)
    close(method.history[0, 0, :2], *wanted)


def test_gkv_takes_redundancy_off_after_remembering() -> None:
    sim = Given([[[[0.0, 1.0], [L3 * 2**0.5, 1.0], [0.0, 1.0]]]], queries=[[[[1.0, 0.0]] * 3]])
    repeats = methods.redundancy(sim.key[0][0], 0.5, cut=True)[:2]
    method = make_method("gkv", 2, {"window": 1, "lambda": 0.7})
    method.passed(sim)
    got = method.score(sim)[0, 0, :2]
    remembered = torch.tensor([1 / 3, 1.0]).double()
    torch.testing.assert_close(got, 0.7 * remembered - 0.3 * repeats / repeats.max())
    torch.testing.assert_close(method.history[0, 0, :2], remembered)


# --- keys and values -------------------------------------------------------------------------


def test_keydiff_and_knorm_by_hand() -> None:
    sim = Given([[[[5.0, 0.0], [0.0, 1.0], [0.0, 2.0]]]])
    close(methods.KeyDiff().score(sim)[0, 0], -(5**-0.5), -2 * 5**-0.5, -2 * 5**-0.5)
    close(methods.KNorm().score(sim)[0, 0], -5.0, -1.0, -2.0)
    sim.keep[0, 0, 2] = False  # the mean is that of what the row holds
    close(methods.KeyDiff().score(sim)[0, 0, :2], -(2**-0.5), -(2**-0.5))


def test_lagkv_by_hand() -> None:
    """After one sink, chunks {1, 2} and {3, 4}; ranges of the second: 0 to 2 and 0 to 1."""
    given = [[9.0, 9.0], [2.0, 0.0], [1.0, 0.5], [0.0, 0.0], [2.0, 1.0], [7.0, 7.0]]
    sim = Given([[given]])
    method = methods.LagKV(sinks=1, lag=2)
    # Scaled: (1, 0) with deviation 0.5 sqrt 2, and (0.5, 0.5) with 0.
    deviation = torch.tensor([0.5**0.5, 0.0]).double()
    own, following = torch.tensor(given[1:3]), torch.tensor(given[3:5])
    torch.testing.assert_close(method._spread(own, following), deviation.softmax(0))
    close(method.score(sim)[0, 0, 1:], 0.5, 0.0, 1.0, 1.0, 1.0)
    assert method.protected(sim, 9).tolist() == [True] + [False] * 5
    sim.keep[0, 0, 4:] = False  # one whole chunk: the newest stay
    close(method.score(sim)[0, 0, 1:4], 1.0, 2.0, 3.0)


# --- frozen scores ---------------------------------------------------------------------------

# One channel; changes 0, 3, 1 in one layer and 0, 1, 1 in the other.
HIDDEN = [[[0.0], [3.0], [2.0]], [[0.0], [1.0], [2.0]]]


def hidden(prompt: int = 0) -> Given:
    return Given([[[[0.0]] * 3]] * 2, residual=HIDDEN, prompt=prompt)


def test_changes_means_and_z_scores_by_hand() -> None:
    sim = hidden()
    close(methods.change(sim, 0), 0.0, 3.0, 1.0)
    close(methods.rolling_mean(methods.change(sim, 0), 2), 0.0, 1.5, 2.0)
    # Windows {0}, {0, 3}, {3, 1}: means 0, 1.5, 2; deviations 0, 1.5, 1.
    close(methods.z_score(methods.change(sim, 0), 2, 0.0)[1:], 1.0, -1.0)
    close(methods.z_score(methods.change(sim, 0), 2, 0.5), 0.0, 0.75, -1 / 1.5)


def test_epikv_and_hs_variance_by_hand() -> None:
    sim = hidden()
    close(methods.HiddenVariance(a=0.0, b=0.5, window=2).score(sim)[0, 0], 0.0, 1.0, 1.0)
    # The other layer's windows {0, 1} and {1, 1}: z 1 and 0.
    epikv = methods.EpiKV(a=0.0, b=0.5, window=2, eps=1e-12)
    close(epikv.score(sim)[1, 0], 0.0, 0.0, -1.0)
    assert methods.EpiKV().a * 32 == 10 and methods.EpiKV().b * 32 == 21


def test_bands_of_32_layers_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def change(sim: Simulation, layer: int) -> Tensor:
        seen.append(layer)
        return torch.ones(1)

    monkeypatch.setattr(methods, "change", change)
    sim = Given([[[[0.0]]]] * 32)
    methods.BandAdaptive().token_score(sim)
    assert seen == [*range(7, 14), *range(18, 26)]


def test_prompts_stay_and_the_budget_is_for_the_rest() -> None:
    sim = Given([[[[0.0]] * 12] * 2] * 2, prompt=3)
    method = methods.EpiKV()
    assert [g.share for g in method.groups(sim, 33)] == [12, 11, 11, 11]
    kept = [True] * 3 + [False] * 7 + [True] * 2  # K = 8: the newest 2
    assert method.protected(sim, 33).tolist() == kept


def test_variances_of_keys_and_values_by_hand() -> None:
    """Two rows: variances 1 and 4 of the first token, 0 and 9 of the second."""
    states = [[[[1.0, 3.0], [5.0, 5.0]], [[0.0, 4.0], [0.0, 6.0]]]]
    zeros = torch.zeros(1, 2, 2, 2).tolist()
    sim = Given(states, values=zeros)
    close(methods.StateVariance(window=64).token_score(sim), 2.5, 3.5)
    close(methods.StateVariance(window=1).token_score(sim), 2.5, 4.5)
    close(methods.ValueVariance().token_score(sim), 0.0, 0.0)
    close(methods.ValueVariance(window=1).token_score(Given(zeros, values=states)), 2.5, 4.5)


def test_lag_kv_normalises_by_the_chunk_before() -> None:
    """Chunks of two; the first has ranges 0 to 2 and 0 to 1, so (2, 0) becomes (1, 0)."""
    sim = Given(
        [[[[0.0, 0.0], [2.0, 1.0], [2.0, 0.0]]]], values=[[[[0.0, 0.0], [0.0, 2.0], [0.0, 4.0]]]]
    )
    # Values: ranges 0 to 0, taken as 1e-6, and 0 to 2: (0, 2), of variance 1.
    close(methods.CausalLag(lag=2).token_score(sim), 0.0, 0.25 + 1.0, 0.25 + 1.0)


def test_attention_hs_adds_mass_and_z() -> None:
    method = methods.AttentionHidden(a=0.0, window=2, eps=1e-12)
    sim = Given(
        [[[[0.0]] * 3]] * 2,
        residual=HIDDEN,
        weights=[[[[0.2, 0.3, 0.5]]], [[[0.0, 0.0, 1.0]]]],
        prompt=0,
    )
    method.passed(sim)
    close(method.score(sim)[0, 0], 0.2, 1.3, -0.5)
    close(method.score(sim)[1, 0], 0.0, 1.0, 0.0)


def test_entropy_of_the_newest_query() -> None:
    sim = Given(**TWO)
    wanted = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert methods.newest_entropy(sim) == pytest.approx(wanted)
    sim.keep[0, 0, 0] = False
    assert methods.newest_entropy(sim) == 0.0


def test_segments_keep_the_best_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two; entropies 0.5, then lower, then higher: kinds r, t, r."""
    entropies = iter([0.5, 0.5, 0.1, 0.1, 0.9, 0.9])
    monkeypatch.setattr(methods, "newest_entropy", lambda sim: next(entropies))
    method = methods.SegmentHidden(a=0.0, b=0.5, window=2, segment=2, r=1, e=2, t=0)
    for generated in range(1, 7):
        count = generated + 1  # one prompt token
        sim = Given([[[[0.0]] * count]] * 2, residual=[[[0.0]] * count, [[0.0]] * count], prompt=1)
        method.passed(sim)
    assert method.kinds == ["r", "t", "r"]
    # All z are equal: of the first and third segment the newer token stays, of the second none.
    close(method.token_score(sim)[1:], 0.0, 64.0, 0.0, 0.0, 0.0, 64.0)


# The references of the policies on a small random model: what each promises, at every step.


# Small enough that every method has entries to choose from at a budget of 12.
SMALL: dict[str, dict[str, Any]] = {
    "cake": {"window": 4},
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 4, "beta": 4},
    "adakv": {"window": 4},
    "ada-pyramidkv": {"window": 4, "beta": 4},
    "morphkv": {"window": 4},
    "gkv": {"window": 4},
    "rkv": {"window": 4},
    "lagkv": {"sinks": 2, "lag": 3},
    "expected-attention": {"window": 4, "sinks": 2},
    "lag-kv": {"lag": 8},
    "segments-hs": {"segment": 6, "r": 3, "e": 2, "t": 1},
    "wgkv+snapkv": {"observed": 4},
}
# A budget binds nothing in wgkv.
EVICTING = [name for name in METHODS if name not in ("full", "wgkv")]


@cache
def model() -> PreTrainedModel:
    """Three layers of two KV heads, each of two query heads."""
    with tempfile.TemporaryDirectory(prefix="mmkv-references-") as home:
        folder = save_checkpoint(Checkpoint("llama", 4, 2, 32, layers=3), Path(home))
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def gate(layer: int, x: torch.Tensor) -> torch.Tensor:
    """Log betas ``[T, H]`` of states ``[T, d]``, which differ between heads."""
    return torch.nn.functional.logsigmoid(x[:, :2] + layer)


def talk(name: str, budget: float = 12.5) -> Iterator[Oracle]:
    """The conversation after each call: a prompt in chunks, tokens, a new budget, a late turn."""
    settings = {"evict_every": 1, "prefill_chunk": 16, **SMALL.get(name, {})}
    oracle = Oracle(model(), gate, name, budget, **settings)
    ids = text_ids(70, 3)
    oracle.prefill({"input_ids": ids[None, :30]})
    yield oracle
    for token in ids[30:50].tolist():
        oracle.decode(token)
        yield oracle
    oracle.set_budget(9)
    yield oracle
    oracle.prefill({"input_ids": ids[None, 50:60]})
    yield oracle
    for token in ids[60:].tolist():
        oracle.decode(token)
        yield oracle


@pytest.mark.parametrize("name", slow_but(EVICTING_KINDS, EVICTING, "the other presets"))
def test_budgets_hold_and_are_used(name: str) -> None:
    """Groups never hold more than their shares, which are never more than was promised."""
    for oracle in talk(name):
        groups = oracle.method.groups(oracle, oracle.total)
        prompt = int(oracle.prompt.sum()) if isinstance(oracle.method, PromptKept) else 0
        promised = sum(group.share for group in groups) - prompt * oracle.rows
        assert oracle.total - oracle.heads < promised <= oracle.total
        for group in groups:
            held = sum(len(oracle.kept(*row)) for row in group.rows)
            assert held <= group.share
            if oracle.seen * len(group.rows) >= group.share and oracle.evictions:
                assert held == min(group.share, oracle.seen * len(group.rows)), name
        if prompt:
            assert oracle.keep[..., oracle.prompt].all(), "a prompt token went"
        protected = oracle.method.protected(oracle, oracle.total)
        assert oracle.keep[..., protected].all(), "a protected token went"
    assert oracle.evictions > 10


def test_rows_above_their_share_are_cut_while_the_sum_is_below() -> None:
    """A pyramid: the upper layers are cut while the lower ones hold less than they may."""
    oracle = Oracle(model(), None, "pyramidkv", 12, window=4, beta=4)
    oracle.prefill({"input_ids": text_ids(11, 3)[None]})
    assert [len(oracle.kept(layer, 0)) for layer in range(3)] == [11, 11, 6]
    assert int(oracle.keep.sum()) == 56 < oracle.total == 72


def test_rows_of_a_layer_hold_the_same_under_tova() -> None:
    for oracle in talk("tova"):
        assert torch.equal(oracle.keep[:, 0], oracle.keep[:, 1])
    assert not torch.equal(oracle.keep[0], oracle.keep[1])


def test_the_mass_of_a_pass_is_one_for_each_query() -> None:
    for oracle in talk("h2o"):
        got = methods.mass(oracle, "mean").sum(-1)
        torch.testing.assert_close(got, torch.full_like(got, oracle.new))


# EpiKV and those of its controls that add nothing that later steps find.
FROZEN = ["epikv", "hs-variance", "band-adaptive", "kv-key", "kv-val", "lag-kv"]


@pytest.mark.parametrize("name", FROZEN)
def test_epikv_and_its_controls_do_not_change_once_given(name: str) -> None:
    """The paper freezes them: later tokens and evictions change none."""
    first: dict[int, float] = {}
    for oracle in talk(name):
        assert isinstance(oracle.method, PromptKept)
        scores = oracle.method.token_score(oracle).tolist()
        for t, score in enumerate(scores):
            assert first.setdefault(t, score) == pytest.approx(score, abs=1e-9)


def test_gkv_keeps_the_first_scores_as_they_are_and_forgets_none() -> None:
    oracle = Oracle(model(), None, "gkv", 12, evict_every=1, window=4, redundancy=False)
    oracle.prefill({"input_ids": text_ids(20, 3)[None]})
    method: Any = oracle.method
    before = method.history.clone()
    assert before[..., :16].amax(-1).eq(1.0).all() and before[..., 16:].isnan().all()
    oracle.decode(5)
    kept = oracle.keep[..., :16]
    assert (method.history[..., :16] >= 0.8 * before[..., :16] - 1e-12)[kept].all()
    assert not method.history[..., 16].isnan().any() and method.history[..., 17:].isnan().all()


def test_the_documents_name_every_method_with_its_defaults() -> None:
    text = (ROOT / "docs" / "reference" / "policies.md").read_text()
    sections = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        for name in title.split(" and "):
            sections[name] = body
    for name, make in METHODS.items():
        if name == "full":
            continue
        method: Method = make()
        known = {f.name.rstrip("_"): getattr(method, f.name) for f in fields(method) if f.init}
        _, _, parameters = sections[name].partition("Parameters:")
        named = dict(re.findall(r"`(\w+)=([\w.-]+)`", parameters)) if parameters else {}
        known.pop("write_gates", None)  # a path, which has no default
        if name == "wgkv+dbtrimkv":
            known.pop("recent")  # its local window is in its place
        assert named.keys() == known.keys(), name
        for key, value in named.items():
            default = known[key]
            same = str(default).lower() == value
            assert same or float(default) == float(value), f"{name}: {key}"
