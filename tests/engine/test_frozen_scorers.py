"""Scores given at creation, over passes of any length, against loops over single tokens."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv.engine.policies import NewTokens, make_policy
from mmkv.engine.policies.base import tapped_layers
from mmkv.engine.policies.frozen import (
    AttentionAndChange,
    EntryVariance,
    PreviousChunk,
    StreamChange,
)

LAYERS, HEADS, DIM, HIDDEN, BATCH = 5, 2, 4, 3, 2
# Lengths of passes, one after another.
PASSES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


class Tokens:
    """Random sequences whose second is ``ahead`` tokens longer, and what a model makes of them."""

    def __init__(self, count: int, ahead: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = count + ahead
        self.ahead = ahead
        self.stream = torch.randn(LAYERS, BATCH, total, HIDDEN, generator=generator)
        shape = (2, BATCH, LAYERS, HEADS, total, DIM)
        self.keys, self.values = torch.randn(shape, generator=generator)

    def part(self, column: Tensor, where: Tensor) -> Tensor:
        """``column [B, ..., T, D]`` at the tokens ``where [B, T]``."""
        parts = zip(column, where, strict=True)
        return torch.stack([one.index_select(-2, at) for one, at in parts])


def frozen_by(scorer: Any, tokens: Tokens, passes: list[int], prompt: bool = False) -> list[Tensor]:
    """The scores of each sequence's tokens: the second's first ones in a pass of their own."""
    shapes = scorer.memory(LAYERS, HEADS, DIM, HIDDEN)
    memory = {name: torch.zeros(BATCH, *shape) for name, shape in shapes.items()}
    layers = [layer for tap in scorer.needs.taps for layer in tapped_layers(tap, LAYERS)]

    def on_append(where: Tensor, kept: dict[str, Tensor], rows: slice) -> Tensor:
        stream = torch.stack([tokens.stream[layer, rows] for layer in layers] or [torch.empty(0)])
        taps = stream if not layers else torch.stack([tokens.part(x, where) for x in stream])
        keys, values = tokens.keys[rows], tokens.values[rows]
        new = NewTokens(
            where,
            prompt,
            taps,
            kept,
            lambda: tokens.part(keys, where),
            lambda: tokens.part(values, where),
        )
        found = scorer.on_append(new)
        assert found.shape == (*where.shape, 1, 1, 1)
        return found[..., 0, 0, 0]

    scores: list[list[Tensor]] = [[] for _ in range(BATCH)]
    if tokens.ahead:
        second = {name: kept[1:] for name, kept in memory.items()}
        scores[1].append(on_append(torch.arange(tokens.ahead)[None], second, slice(1, 2))[0])
        for name, kept in second.items():
            memory[name] = torch.cat([memory[name][:1], kept])
    start = torch.tensor([0, tokens.ahead])
    for count in passes:
        found = on_append(start[:, None] + torch.arange(count), memory, slice(None))
        for row in range(BATCH):
            scores[row].append(found[row])
        start = start + count
    return [torch.cat(parts) for parts in scores]


def changes(tokens: Tokens, layer: int, row: int) -> list[float]:
    """The norm of the change from the token before, 0 for the first."""
    states = tokens.stream[layer, row].double()
    return [0.0, *(float((b - a).norm()) for a, b in itertools.pairwise(states))]


def trailing(values: list[float], at: int, window: int) -> list[float]:
    return values[max(at - window + 1, 0) : at + 1]


def standardised(values: list[float], at: int, window: int, eps: float) -> float:
    held = trailing(values, at, window)
    return (values[at] - statistics.fmean(held)) / (statistics.pstdev(held) + eps)


def check(found: list[Tensor], expected: list[list[float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs)[: len(ours)], rtol=2e-4, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(PASSES, st.integers(0, 5), st.integers(1, 8), st.booleans(), st.booleans())
def test_change_of_the_stream(
    passes: list[int], ahead: int, window: int, normalised: bool, bands: bool
) -> None:
    """Of single layers and of bands, whose mean counts; 0.9 of 5 layers is the fifth."""
    tokens = Tokens(sum(passes), ahead, 7 * window + ahead)
    a, b = ((0.2, 0.7), (0.0, 0.4)) if bands else (0.9, 0.3)
    layers = ([1, 2, 3], [0, 1, 2]) if bands else ([4], [1])
    found = frozen_by(StreamChange(a, b, window, normalised, 0.1), tokens, passes)  # type: ignore[arg-type]
    expected = []
    for row in range(BATCH):
        stream = [changes(tokens, layer, row) for layer in range(LAYERS)]
        scores = []
        for at in range(len(found[row])):
            parts = [
                statistics.fmean(
                    standardised(stream[layer], at, window, 0.1)
                    if normalised
                    else statistics.fmean(trailing(stream[layer], at, window))
                    for layer in side
                )
                for side in layers
            ]
            scores.append(parts[0] - parts[1])
        expected.append(scores)
    check(found, expected)


@settings(max_examples=15, deadline=None)
@given(PASSES, st.integers(0, 5), st.integers(1, 8))
def test_change_beside_attention(passes: list[int], ahead: int, window: int) -> None:
    tokens = Tokens(sum(passes), ahead, window)
    found = frozen_by(AttentionAndChange(0.5, window, 0.1), tokens, passes)
    expected = [
        [standardised(changes(tokens, 2, row), at, window, 0.1) for at in range(len(found[row]))]
        for row in range(BATCH)
    ]
    check(found, expected)


@settings(max_examples=15, deadline=None)
@given(PASSES, st.integers(0, 5), st.integers(1, 8), st.sampled_from(["keys", "values"]))
def test_variance_of_entries(passes: list[int], ahead: int, window: int, of: Any) -> None:
    tokens = Tokens(sum(passes), ahead, window)
    found = frozen_by(EntryVariance(of, window), tokens, passes)
    expected = []
    for row in range(BATCH):
        entries = getattr(tokens, of)[row].double()
        variances = [
            statistics.fmean(
                statistics.pvariance(entries[layer, head, at].tolist())
                for layer in range(LAYERS)
                for head in range(HEADS)
            )
            for at in range(entries.shape[-2])
        ]
        expected.append(
            [statistics.fmean(trailing(variances, at, window)) for at in range(len(found[row]))]
        )
    check(found, expected)


@settings(max_examples=40, deadline=None)
@given(PASSES, st.integers(0, 12), st.integers(1, 6))
def test_spread_against_the_chunk_before(passes: list[int], ahead: int, lag: int) -> None:
    """Passes begin, end and skip chunks anywhere."""
    tokens = Tokens(sum(passes), ahead, lag)
    found = frozen_by(PreviousChunk(lag), tokens, passes)
    expected = []
    for row in range(BATCH):
        scores = []
        for at in range(len(found[row])):
            parts = []
            for column in (tokens.keys[row].double(), tokens.values[row].double()):
                x, start = column[:, :, at], at // lag * lag
                if start:
                    before = column[:, :, start - lag : start]
                    least, most = before.amin(2), before.amax(2)
                    x = (x - least) / (most - least).clamp(min=1e-6)
                parts.append(float(x.var(-1, correction=0).mean()))
            scores.append(sum(parts))
        expected.append(scores)
    check(found, expected)


@pytest.mark.parametrize(
    "scorer",
    [StreamChange(), AttentionAndChange(), EntryVariance("keys"), PreviousChunk(3)],
    ids=lambda scorer: type(scorer).__name__,
)
def test_prompts_are_kept(scorer: Any) -> None:
    tokens = Tokens(12, 0, 0)
    for found in frozen_by(scorer, tokens, [5, 7], prompt=True):
        assert found.isinf().all() and (found > 0).all()
    assert not any(found.isinf().any() for found in frozen_by(scorer, tokens, [12]))


def test_only_the_newest_of_the_budget_are_protected() -> None:
    policy = make_policy("epikv")
    assert [policy.recent(k) for k in (3, 4, 100, 512, 4096)] == [0, 1, 25, 128, 128]
    assert policy.keeps_prompt and math.isclose(policy.recent_share or 0, 0.25)
