"""References of policies by hand, where no loop of test_scoring.py repeats the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.oracle import methods
from tests.support.oracle.simulation import Simulation

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


# Two tokens; the second query's logits are 0 and log 3: it pays 1/4 and 3/4.
TWO: dict[str, Any] = {"keys": [[[[0.0], [L3]]]], "queries": [[[[1.0], [1.0]]]]}


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


# One channel; changes 0, 3, 1 in one layer and 0, 1, 1 in the other.
HIDDEN = [[[0.0], [3.0], [2.0]], [[0.0], [1.0], [2.0]]]


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
