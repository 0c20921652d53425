"""Scorers on small views made by hand, against loops over rows and entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.policies import CacheView, make_policy
from mmkv.engine.policies.allocation import (
    EvenLayerAllocation,
    HeadAllocation,
    LayerAllocation,
    PyramidAllocation,
)
from mmkv.engine.policies.attention import (
    AttentionAndRedundancy,
    AttentionMass,
    FusedAttention,
    GlobalAttention,
    NewestAttention,
    redundancy,
)
from mmkv.engine.policies.base import WindowReduction
from mmkv.engine.policies.keys import KeyDifference, KeyNorm, NextChunk
from mmkv.engine.scorer_state import QUERIES, window_attention
from tests.engine.test_policies import make_view

LENGTHS = st.lists(
    st.lists(st.integers(0, 12), min_size=2, max_size=2), min_size=1, max_size=3
).filter(lambda rows: sum(map(sum, rows)) > 0)
SEEDS = st.integers(0, 10**6)


@dataclass
class Source:
    """What a view reads, given beforehand; remembers how attention was asked for."""

    kept: Tensor
    key: Tensor
    value: Tensor
    paid: Tensor
    reduction: WindowReduction | None = None

    def keys(self) -> Tensor:
        return self.key

    def values(self) -> Tensor:
        return self.value

    def state(self) -> Tensor:
        return self.kept

    def attention(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        self.reduction = reduction
        return self.paid


def make(lengths: list[list[int]], seed: int, seen: int = 50) -> tuple[CacheView, Source]:
    """A view with random keys, values, attention and one number of state an entry."""
    view = make_view(lengths, seen, seed)
    generator = torch.Generator().manual_seed(seed)
    count = view.row.numel()
    key, value = torch.randn(2, count, 6, generator=generator) + 0.3
    paid = torch.rand(count, generator=generator)
    source = Source(torch.rand(count, 1, generator=generator), key, value, paid)
    return replace(view, source=source), source


def rows_of(view: CacheView) -> list[list[int]]:
    """The entries of each row in order of position."""
    rows: list[list[int]] = [[] for _ in range(view.rows)]
    for index in view.position.argsort().tolist():
        rows[int(view.row[index])].append(index)
    return rows


@settings(max_examples=40, deadline=None)
@given(LENGTHS, SEEDS)
def test_scores_of_keys(lengths: list[list[int]], seed: int) -> None:
    view, source = make(lengths, seed)
    difference, norm = KeyDifference().score(view), KeyNorm().score(view)
    for row in rows_of(view):
        if not row:
            continue
        unit = {i: source.key[i].double() / source.key[i].double().norm() for i in row}
        mean = sum(unit.values()) / len(row)
        for i in row:
            cosine = float(unit[i] @ mean / mean.norm())
            assert float(difference[i]) == pytest.approx(-cosine, abs=1e-5)
            assert float(norm[i]) == pytest.approx(-math.sqrt(float((source.key[i] ** 2).sum())))


def test_a_key_of_zeros_is_no_nan() -> None:
    view, source = make([[5, 5]], 0)
    source.key.zero_()
    assert not KeyDifference().score(view).isnan().any()


@settings(max_examples=40, deadline=None)
@given(LENGTHS, SEEDS)
def test_the_newest_query_is_averaged_over_a_layer(lengths: list[list[int]], seed: int) -> None:
    """By position, whatever the order of storage and even where a head lacks the position."""
    view, source = make(lengths, seed)
    found = NewestAttention().score(view)
    for i in range(view.row.numel()):
        total = 0.0
        for j in range(view.row.numel()):
            same_layer = int(view.row[i]) // 2 == int(view.row[j]) // 2
            if same_layer and view.position[i] == view.position[j]:
                total += float(source.paid[j])
        assert float(found[i]) == pytest.approx(total / 2, rel=1e-6)
    assert source.reduction == WindowReduction()


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 4))
def test_rows_of_a_layer_share_evenly(budget: int, layers: int, heads: int) -> None:
    shares = EvenLayerAllocation().shares(budget, layers, heads)
    rows = layers * heads
    more = (budget % rows) // heads
    expected = [budget // rows + (row // heads < more) for row in range(rows)]
    assert shares.share.tolist() == expected and shares.group.tolist() == list(range(rows))
    assert budget - heads < int(shares.share.sum()) <= budget


@given(
    st.integers(1, 400), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 30)
)
def test_a_pyramid_of_shares(budget: int, layers: int, heads: int, window: int, beta: int) -> None:
    """Beside the paper's line between its two ends, in fractions."""
    rows = layers * heads
    shares = PyramidAllocation(window, beta).shares(budget, layers, heads)
    held = min(window, budget // rows)
    rest = budget - rows * held
    bottom = Fraction(2 * rest, rows) - Fraction(rest, beta * rows)
    top = Fraction(rest, beta * rows)
    expected = []
    for layer in range(layers):
        exact = bottom - (bottom - top) * Fraction(layer, layers - 1) if layers > 1 else None
        share = held + math.floor(exact) if exact is not None else budget // rows
        expected += [share] * heads
    for row in range(budget - sum(expected)):
        expected[row] += 1
    assert shares.share.tolist() == expected and sum(expected) == budget
    assert shares.group.tolist() == list(range(rows)) and shares.floor is None
    level = PyramidAllocation(window, 1).shares(budget, layers, heads)
    assert torch.equal(level.share, HeadAllocation().shares(budget, layers, heads).share)


@given(
    st.integers(1, 400), st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.0, 0.2, 0.5, 1])
)
def test_heads_of_a_layer_compete(budget: int, layers: int, heads: int, floor: float) -> None:
    level = LayerAllocation(floor).shares(budget, layers, heads)
    whole = [budget // layers + (layer < budget % layers) for layer in range(layers)]
    assert level.share.tolist() == whole
    pyramid = PyramidAllocation(3, 4)
    steep = LayerAllocation(floor, pyramid).shares(budget, layers, heads)
    rows = pyramid.shares(budget, layers, heads).share.tolist()
    assert steep.share.tolist() == [sum(rows[i : i + heads]) for i in range(0, len(rows), heads)]
    for shares in (level, steep):
        assert shares.group.tolist() == [layer for layer in range(layers) for _ in range(heads)]
        assert shares.floor is not None
        for row, sure in enumerate(shares.floor.tolist()):
            assert sure == int(floor * (int(shares.share[row // heads]) // heads))


def brute_redundancy(
    view: CacheView, key: Tensor, threshold: float, only_similar: bool
) -> list[float]:
    """One pair of keys at a time, in float64."""
    found = [0.0] * view.row.numel()
    for row in rows_of(view):
        total = dict.fromkeys(row, 0.0)
        for i in row:
            cosine = {}
            for j in row:
                a, b = key[i].double(), key[j].double()
                cosine[j] = float(a @ b / (a.norm() + 1e-8) / (b.norm() + 1e-8)) if i != j else 0.0
            similar = [j for j in row if cosine[j] > threshold]  # the newest is the last
            for j in row:
                spared = bool(similar) and j == similar[-1]
                if not spared and (j in similar or not only_similar):
                    total[j] += cosine[j]
        weights = {j: math.exp(total[j] / len(row)) for j in row}
        for j in row:
            found[j] = weights[j] / sum(weights.values())
    return found


@settings(max_examples=40, deadline=None)
@given(
    LENGTHS, SEEDS, st.sampled_from([0.0, 0.3, 0.9]), st.booleans(), st.sampled_from([1, 30, 9**9])
)
def test_redundancy(
    lengths: list[list[int]], seed: int, threshold: float, only_similar: bool, block: int
) -> None:
    """In blocks of any size."""
    view, source = make(lengths, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmkv.engine.policies.attention._BLOCK_ELEMENTS", block)
        found = redundancy(view, threshold, only_similar)
    expected = brute_redundancy(view, source.key, threshold, only_similar)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, SEEDS, st.sampled_from([0.0, 0.1, 1.0]))
def test_attention_and_redundancy(lengths: list[list[int]], seed: int, weight: float) -> None:
    view, source = make(lengths, seed)
    found = AttentionAndRedundancy(5, weight, 3).score(view)
    assert source.reduction == WindowReduction("max", "logits")
    alike = brute_redundancy(view, source.key, 0.5, False)
    for row in rows_of(view):
        prefix = [i for i in row if int(view.position[i]) < 45]
        for at, i in enumerate(prefix):
            near = prefix[max(at - 1, 0) : at + 2]
            paid = max(float(source.paid[j]) for j in near)
            expected = weight * paid - (1 - weight) * alike[i]
            assert float(found[i]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


FORMS: dict[Any, Callable[[float, float], float]] = {
    "max": lambda old, new: max(0.75 * old, new),
    "mean": lambda old, new: 0.75 * old + 0.25 * new,
    "sum": lambda old, new: 0.75 * old + new,
}


@settings(max_examples=25, deadline=None)
@given(LENGTHS, SEEDS, st.sampled_from(list(FORMS)), st.booleans())
def test_global_attention(lengths: list[list[int]], seed: int, form: Any, spare: bool) -> None:
    """F over entries of which some have one already; kept as it is before redundancy counts."""
    view, source = make(lengths, seed)
    old = source.kept[:, 0]
    old[view.position % 3 == 0] = -1.0
    before = old.tolist()
    scorer = GlobalAttention(6, 0.75, form, spare, 0.6, 0.2, "sum")
    found = scorer.score(view)
    assert source.reduction == WindowReduction("sum") and scorer.needs.keys == spare
    assert found.state is not None
    alike = brute_redundancy(view, source.key, 0.2, True)
    for row in rows_of(view):
        prefix = [i for i in row if int(view.position[i]) < 44]
        for i in row:
            if i not in prefix:
                assert float(found.state[i, 0]) == before[i]
                continue
            now = float(source.paid[i]) / max(float(source.paid[j]) for j in prefix)
            score = now if before[i] < 0 else FORMS[form](before[i], now)
            assert float(found.state[i, 0]) == pytest.approx(score, rel=1e-5)
            if spare:
                score = 0.6 * score - 0.4 * alike[i] / max(alike[j] for j in prefix)
            assert float(found.value[i]) == pytest.approx(score, rel=1e-4, abs=1e-6)


def test_attention_of_nothing_is_no_nan() -> None:
    view, source = make([[9, 9]], 0)
    source.paid.zero_()
    found = GlobalAttention(2).score(view)
    assert found.state is not None
    assert not found.value.isnan().any() and not found.state.isnan().any()


def brute_spread(x: Tensor, chunk: list[int], after: list[int]) -> Tensor:
    """Softmax over the chunk of the standard deviation over channels."""
    least = torch.stack([x[i] for i in after]).amin(0).double()
    most = torch.stack([x[i] for i in after]).amax(0).double()
    scaled = [(x[i].double() - least) / (most - least).clamp(min=1e-6) for i in chunk]
    return torch.stack([y.std() for y in scaled]).softmax(0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=2), min_size=1, max_size=2),
    SEEDS,
    st.integers(0, 4),
    st.integers(1, 7),
)
def test_spread_against_the_next_chunk(
    lengths: list[list[int]], seed: int, sinks: int, lag: int
) -> None:
    if not sum(map(sum, lengths)):
        lengths = [[1, 0]]
    view, source = make(lengths, seed)
    found = NextChunk(sinks, lag).score(view)
    for row in rows_of(view):
        later = [i for i in row if int(view.position[i]) >= sinks]
        chunks = [later[at : at + lag] for at in range(0, len(later) - lag + 1, lag)]
        if len(chunks) < 2:
            assert all(found[i] == view.position[i] for i in row)
            continue
        ranked = {}
        for chunk, after in itertools.pairwise(chunks):
            spread = brute_spread(source.key, chunk, after)
            spread = spread + brute_spread(source.value, chunk, after)
            order = sorted(range(lag), key=lambda at: float(spread[at]))
            ranked |= {chunk[at]: rank / lag for rank, at in enumerate(order)}
        for i in row:
            assert float(found[i]) == pytest.approx(ranked.get(i, 1.0))


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_scores_of_attention_read_what_they_name(group: str) -> None:
    view, source = make([[9, 4]], 1)
    assert torch.equal(AttentionMass(group).score(view), source.kept[:, 0])  # type: ignore[arg-type]
    assert AttentionMass(group).needs.mass == group  # type: ignore[arg-type]
    total = FusedAttention(8, "sum", group).score(view)  # type: ignore[arg-type]
    assert source.reduction == WindowReduction(group)  # type: ignore[arg-type]
    torch.testing.assert_close(total, source.paid * 8)
    few = replace(view, seen=5)
    torch.testing.assert_close(FusedAttention(8).score(few), source.paid * 5)
    most = FusedAttention(8, "max", group).score(view)  # type: ignore[arg-type]
    assert source.reduction == WindowReduction(group, queries="max")  # type: ignore[arg-type]
    assert torch.equal(most, source.paid)


def brute_window(
    queries: Tensor, at: list[int], keys: Tensor, position: list[int], reduction: WindowReduction
) -> list[float]:
    """Attention of ``queries [G, w, D]`` at ``at`` over ``keys [N, D]``, one number at a time."""
    heads, scale = queries.shape[0], queries.shape[-1] ** -0.5
    join = {"mean": lambda x: sum(x) / len(x), "max": max, "sum": sum}
    paid: list[list[float]] = []
    for index, when in enumerate(at):
        seen = [j for j, p in enumerate(position) if p <= when]
        logits = [
            {j: float(queries[g, index].double() @ keys[j].double()) * scale for j in seen}
            for g in range(heads)
        ]
        if reduction.of == "logits":
            logits = [{j: join[reduction.group]([row[j] for row in logits]) for j in seen}]
        shares = []
        for row in logits:
            total = sum(map(math.exp, row.values()))
            shares.append([math.exp(row[j]) / total if j in row else 0.0 for j in range(len(keys))])
        paid.append([join[reduction.group](list(column)) for column in zip(*shares, strict=True)])
    over = join[reduction.queries]
    return [over(list(column)) for column in zip(*paid, strict=True)]


REDUCTIONS = [
    WindowReduction(group, of, queries)
    for group in ("mean", "max", "sum")
    for of in ("shares", "logits")
    for queries in ("mean", "max")
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seen", [3, 14])
def test_every_reading_of_the_window(seen: int, reduction: WindowReduction) -> None:
    """Over rows of unequal length, one of them without any entry that the first query saw."""
    torch.manual_seed(seen)
    heads, group, dim, window = 2, 3, 4, 5
    pool = PagePool(4, dim, 0, torch.float32, torch.device("cpu"))
    memory = {QUERIES: ((1, heads * group, window, dim), torch.float32)}
    cache = RaggedCache(pool, 1, heads, memory)
    seq = cache.open()
    slots = cache.append(torch.tensor([seq]), seen)[0, 0]
    pool.position.view(-1)[slots] = torch.arange(seen).int()
    pool.keys.normal_()
    cache.memory[QUERIES].normal_()
    cache.drop(seq, torch.arange(seen - 2, seen - 1))  # the newest but one of row 0
    entries = cache.entries(seq)
    view = make_view([cache.length[seq, 0].tolist()], seen)
    position = pool.position.view(-1)[entries.slot].long()
    view = replace(view, row=entries.row, position=position)
    found = window_attention(cache, seq, entries, view, reduction)
    at = list(range(max(seen - window, 0), seen))
    for head in range(heads):
        mine = (entries.row == head).nonzero().flatten()
        queries = cache.memory[QUERIES][seq, 0, head * group : (head + 1) * group]
        ordered = torch.stack([queries[:, p % window] for p in at], 1)
        keys = pool.keys.flatten(0, 1)[entries.slot[mine]]
        expected = brute_window(ordered, at, keys, position[mine].tolist(), reduction)
        torch.testing.assert_close(found[mine], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_h2o_protects_its_share_of_the_budget() -> None:
    view, _ = make([[30, 30]], 3, seen=30)
    scores = make_policy("h2o").scores(view, 25).value  # 12 for each row: 6 of them
    assert torch.equal(scores.isinf(), view.position >= 24)
    scores = make_policy("h2o:recent=0").scores(view, 25).value
    assert not scores.isinf().any()
