"""Scorers on small views made by hand, against loops over rows and entries, mpmath, and papers."""

from __future__ import annotations

import cmath
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.quality.methods import Cell
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.errors import PolicyError
from mmkv.engine.model.gates import load_gates, make_random_gates, save_gates, trained_age
from mmkv.engine.model.rope import Rope
from mmkv.engine.model.spec import RopeSpec
from mmkv.engine.policies import CacheView, NewTokens, make_policy
from mmkv.engine.policies.allocation import (
    EvenLayerAllocation,
    HeadAllocation,
    LayerAllocation,
    PyramidAllocation,
)
from mmkv.engine.policies.attention import (
    AttentionAndRedundancy,
    AttentionMass,
    CriticalAttention,
    FusedAttention,
    GlobalAttention,
    NewestAttention,
    TrigonometricSeries,
    redundancy,
)
from mmkv.engine.policies.base import WindowReduction, tapped_layers
from mmkv.engine.policies.frozen import (
    AttentionAndChange,
    EntryVariance,
    PreviousChunk,
    StreamChange,
)
from mmkv.engine.policies.scoring import (
    KeyDifference,
    KeyNorm,
    NextChunk,
    Retention,
    lookahead_log_score,
)
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import QUERIES, future_queries, window_attention
from mmkv.resources import asset
from tests.engine.model.test_gates import published, write
from tests.engine.policies.test_policies import make_view
from tests.support.factories import checkpoint
from tests.support.oracle import log_score
from tests.support.sessions import load

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


def test_critical_entries_by_hand() -> None:
    """Half of what the window leaves goes by attention alone, the rest by what values add."""
    view = replace(make_view([[6]], seen=6), position=torch.arange(6))
    paid = torch.tensor([0.30, 0.05, 0.25, 0.10, 0.20, 0.10])
    size = torch.tensor([[1.0], [9.0], [1.0], [2.0], [1.0], [1.0]])
    view = replace(view, source=Source(size, torch.empty(0), torch.empty(0), paid))
    policy = make_policy("criticalkv:window=1,kernel=1,epsilon=0.1")
    found = policy.scores(view, 5).value.tolist()
    assert found == pytest.approx([math.inf, 0.15 * 9, math.inf, 0.2 * 2, 0.3, math.inf])
    assert policy.victims(view, 5).tolist() == [4]
    # Two of three by attention; of equal attention the newer one.
    paid[4] = 0.25
    assert policy.scores(view, 4).value.isinf().tolist() == [True, False, False, False, False, True]
    assert policy.scores(view, 5).value.isinf().tolist() == [True, False, False, False, True, True]


def test_what_a_value_adds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of (1, 2) the first head makes (1, 4), the second (-1, 3): their L1 norms are 5 and 4."""
    monkeypatch.setattr("mmkv.engine.policies.attention._BLOCK_ELEMENTS", 1)
    first = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [-1.0, 1.0]]])
    values = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-1.0, -2.0]]).view(1, 1, 1, 3, 2)
    values = torch.cat([values, -2 * values]).expand(2, 2, 1, 3, 2)  # two sequences, two layers
    new = NewTokens(
        torch.arange(3).expand(2, 3),
        True,
        torch.empty(0),
        {},
        lambda: values,
        lambda: values,
        lambda layer: first * (layer + 1),
    )
    found = CriticalAttention().on_append(new)
    assert found.shape == (2, 3, 2, 1, 1)
    assert found[0, :, 0, 0, 0].tolist() == [4.5, 0.0, 4.5]
    assert found[1, :, 1, 0, 0].tolist() == [18.0, 0.0, 18.0]


@pytest.mark.parametrize("weights", ["auto", "bf16", "int8", "int4"])
def test_output_matrices_in_every_form(weights: str, generator: torch.Generator) -> None:
    """By heads, beside the product that a decoder computes, which may round states."""
    engine = Runtime.from_pretrained(checkpoint("qwen3"), device="cpu", weights=weights)
    decoder, spec = engine.decoder, engine.spec
    mixed = torch.randn(3, spec.num_heads, spec.head_dim, generator=generator)
    out = decoder.weights.layers[1].out
    expected = decoder.weights.product(mixed.flatten(1), out)
    found = torch.einsum("thd,hde->te", mixed, decoder.output(1))
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_the_series_of_distances() -> None:
    """Term by term: ``|E q_f| |k_f| cos(w_f distance + phase)``, and what is apart from the center.

    Two query heads of one KV head, with four features that two frequencies turn and one that none
    does; six queries, of which the window of eight has two places free.
    """
    generator = torch.Generator().manual_seed(3)
    frequency, ahead = [1.0, 0.1], 9
    query = torch.randn(2, 6, 5, generator=generator) + 1
    key, at = torch.randn(7, 5, generator=generator), [0, 1, 2, 3, 4, 6, 9]

    def turned(x: Tensor, position: int) -> Tensor:
        turns = [cmath.exp(1j * w * position) for w in frequency]
        pairs = [complex(x[f], x[2 + f]) * turn for f, turn in enumerate(turns)]
        return torch.tensor([z.real for z in pairs] + [z.imag for z in pairs] + [float(x[4])])

    spec = RopeSpec("default", torch.tensor(frequency))
    rope = Rope(spec, torch.device("cpu"), torch.float32)
    ring, places = torch.zeros(1, 2, 8, 5), torch.full((1, 8), -1)
    for number, position in enumerate(range(4, 10)):
        ring[0, :, position % 8] = torch.stack([turned(x, position) for x in query[:, number]])
        places[0, position % 8] = position

    class Turning(Source):
        def future_queries(self, view: CacheView, ahead: int, doubling: bool) -> Any:
            form = PagePool(8, 5, 1, torch.float32, torch.device("cpu")).form
            return future_queries(ring, places, form, view.seen, ahead, rope, doubling=doubling)

        def bands(self, vectors: Tensor) -> Tensor:
            return rope.bands(vectors)

    stored = torch.stack([turned(k, p) for k, p in zip(key, at, strict=True)])
    view = replace(make_view([[7]], seen=10), position=torch.tensor(at))
    view = replace(view, source=Turning(stored, stored, stored, stored))
    scores = []
    for head in query.double():
        found = []
        for k, position in zip(key.double(), at, strict=True):
            total = float(head[:, 4].mean() * k[4])
            total += float(head[:, 4].abs().mean() - head[:, 4].mean().abs()) * abs(float(k[4]))
            for f, w in enumerate(frequency):
                asked = [complex(q[f], q[2 + f]) for q in head]
                center, own = sum(asked) / 6, complex(k[f], k[2 + f])
                phase = cmath.phase(center) - cmath.phase(own)
                series = [math.cos(w * (9 + d - position) + phase) for d in (1, 2, 4, 8)]
                total += abs(center) * abs(own) * sum(series) / 4
                total += (sum(map(abs, asked)) / 6 - abs(center)) * abs(own)
            found.append(total)
        mean, deviation = statistics.fmean(found), statistics.pstdev(found)
        scores.append([(x - mean) / deviation for x in found])
    expected = [max(pair) for pair in zip(*scores, strict=True)]
    assert expected != scores[0] and expected != scores[1]
    assert TrigonometricSeries(8, ahead).score(view).tolist() == pytest.approx(expected, abs=1e-4)


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
    paid: list[list[list[float]]] = []
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
        paid.append(shares)
    over = join | {
        "variance": lambda x: statistics.variance(x) if len(x) > 1 else 0.0,
        "entropy": lambda x: -sum(a * math.log(a) for a in x if a),
    }
    first, last = over[reduction.queries], join[reduction.group]
    cells = (torch.tensor(paid, dtype=torch.float64).permute(2, 0, 1)).tolist()  # [N][w][heads]
    if reduction.queries in join:
        return [first([last(heads) for heads in cell]) for cell in cells]
    return [last([first(list(shares)) for shares in zip(*cell, strict=True)]) for cell in cells]


REDUCTIONS = [
    WindowReduction(group, of, queries)
    for group in ("mean", "max", "sum")
    for of in ("shares", "logits")
    for queries in ("mean", "max", "variance", "entropy")
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seen", [2, 3, 14])
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


# The lookahead score against mpmath at 50 digits.
#
# Tolerance. The score is a sum of two float32 terms, ``a * log_beta`` and the log of a partial
# geometric sum, each correct to a few rounding units (2**-24) of its own magnitude. The error
# bound is therefore ``4 * 2**-24 * (|a log_beta| + |log sum| + 1)``: relative to the terms, not
# to their sum, which may cancel; and the 1 covers sums near ``log 1 = 0``, where one unit of the
# ratio inside the log is one unit of absolute error outside. A bound in units of 2**-24 is what
# rules out the naive ``1 - exp(log_beta)``, wrong by 100 % at ``log_beta = -1e-9``.


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


# The age of an entry: the papers', and that of the authors' released code.


@pytest.mark.parametrize(
    ("text", "lookahead", "newest"),
    [
        ("dbtrimkv", 2, 1),
        ("dbtrimkv", 1, 1),
        ("dbtrimkv:age=released", 1, 2),
        ("dbtrimkv:age=released", 2, 3),
        ("dbtrimkv:age=released", math.inf, 3),
        ("trimkv", 2, 0),
        ("trimkv:age=released", 2, 2),
    ],
)
def test_ages_of_the_presets(
    text: str, lookahead: float, newest: int, generator: torch.Generator
) -> None:
    """Each score is the sum of powers of beta that its source writes, from that age on."""
    scoring = make_policy(text, lookahead).scoring
    assert isinstance(scoring, Retention) and scoring.newest_age == newest
    # Away from 0: a beta near 1 would need more terms than the 4,000 that stand for infinity.
    log_beta = -0.01 - 3 * torch.rand(60, generator=generator)
    view = replace(make_view([[40, 20]], seen=40), log_beta=log_beta)
    steps = scoring.lookahead if math.isfinite(scoring.lookahead) else 4000
    age = (newest + 39 - view.position)[:, None] + torch.arange(int(steps))
    terms = (view.log_beta.double()[:, None] * age).exp().sum(1).log()
    torch.testing.assert_close(scoring.score(view).double(), terms, rtol=1e-5, atol=1e-5)


def test_an_age_is_named_unless_it_is_equation_9s() -> None:
    assert make_policy("dbtrimkv").identity().startswith("dbtrimkv: Retention(lookahead=2), Glob")
    assert "Retention(lookahead=1, newest_age=0)" in make_policy("trimkv").identity()
    made = make_policy("dbtrimkv:age=released")
    assert made.name == "dbtrimkv:age=released" and "newest_age=3" in made.identity()
    # Where released is the default, the papers' is what has to be said.
    assert make_policy("dbtrimkv", age="released").name == "dbtrimkv"
    assert make_policy("dbtrimkv:age=paper", age="released").name == "dbtrimkv:age=paper"
    assert make_policy("dbtrimkv:age=paper", age="released").scoring == Retention(2)
    for bad in (-1, 0.5):
        with pytest.raises(PolicyError, match="whole number of at least 0"):
            Retention(2, bad)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="give paper or released"):
        make_policy("trimkv:age=1")


@pytest.mark.parametrize("worst", [-math.inf, math.nan, -1e30])
def test_the_newest_of_trimkv_outlives_its_own_step(worst: float) -> None:
    """Algorithm 1 scores it beta^0 = 1, whatever its beta; ties with 1 fall on older ones."""
    policy = make_policy("trimkv")
    for others in (-0.5, 0.0):
        view = make_view([[9, 9]], seen=9)
        newest = view.position == 8
        view = replace(view, log_beta=torch.where(newest, worst, torch.full((18,), others)))
        for budget in range(2, 18):
            assert not newest[policy.victims(view, budget)].any()
        assert bool(newest[policy.victims(view, 1)].any())  # a row of no share keeps nothing


def test_gates_of_the_authors_layout_bring_their_age(tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    spec = load(folder).spec
    theirs = write(published(spec, "rg"), tmp_path / "theirs")
    save_gates(load_gates(theirs, spec), tmp_path / "ours", spec)  # trained here: the paper's age
    save_gates(make_random_gates(spec), tmp_path / "tied", spec)
    found = {
        name: trained_age(tmp_path / name if name != "random" else name)
        for name in ("theirs", "ours", "tied", "random")
    }
    assert found == {"theirs": "released", "ours": "paper", "tied": "paper", "random": "paper"}

    def newest(gates: Path, **options: Any) -> int:
        engine = Runtime.from_pretrained(folder, gates=gates, device="cpu", **options)
        scoring = engine.policy.scoring
        assert isinstance(scoring, Retention)
        return scoring.newest_age

    assert (newest(theirs), newest(tmp_path / "ours")) == (3, 1)
    assert newest(theirs, lookahead=1) == 2
    assert newest(theirs, policy="trimkv") == 2
    assert newest(tmp_path / "ours", policy="trimkv") == 0
    assert newest(theirs, policy="dbtrimkv:age=paper") == 1
    assert newest(theirs, policy=make_policy("trimkv")) == 0  # an object is taken as it is


def test_runs_of_eval_quality_with_other_ages_are_other_runs() -> None:
    gates = str(asset("gates/smollm2-135m-trimkv-0"))
    cells = {
        text: Cell(text, None, gates, "1/8").key()
        for text in ("dbtrimkv", "trimkv", "dbtrimkv:age=released")
    }
    assert "age" not in cells["dbtrimkv"]  # runs of old journals stay
    assert " age 0 " in cells["trimkv"] and " age 3 " in cells["dbtrimkv:age=released"]


# Scores given at creation, over passes of any length, against loops over single tokens.


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
            lambda layer: torch.empty(0),
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
    a, b = ((0.2, 0.7), (0.0, 0.2)) if bands else (0.9, 0.3)
    layers = ([1, 2, 3], [0, 1]) if bands else ([4], [1])
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


def test_depths_are_those_of_the_papers_32_layers() -> None:
    """EpiKV's layers 10 and 21; the bands of layers 7 to 13 and 18 to 25."""
    layers = {name: make_policy(name).scoring.needs.taps for name in ("epikv", "band-adaptive")}
    found = {name: [tapped_layers(tap, 32) for tap in taps] for name, taps in layers.items()}
    assert {name: [[*each] for each in taps] for name, taps in found.items()} == {
        "epikv": [[10], [21]],
        "band-adaptive": [[*range(7, 14)], [*range(18, 26)]],
    }


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
