"""Scorers on small views made by hand, against loops over rows and entries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.cache import PagePool, RaggedCache
from engine.policies import CacheView, make_policy
from engine.policies.allocation import EvenLayerAllocation
from engine.policies.attention import AttentionMass, FusedAttention, NewestAttention
from engine.policies.base import WindowReading
from engine.policies.keys import KeyDifference, KeyNorm
from engine.query_window import QUERIES, window_attention
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
    reading: WindowReading | None = None

    def keys(self) -> Tensor:
        return self.key

    def values(self) -> Tensor:
        return self.value

    def state(self) -> Tensor:
        return self.kept

    def attention(self, view: CacheView, reading: WindowReading) -> Tensor:
        self.reading = reading
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
    assert source.reading == WindowReading()


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 4))
def test_rows_of_a_layer_share_evenly(budget: int, layers: int, heads: int) -> None:
    shares = EvenLayerAllocation().shares(budget, layers, heads)
    rows = layers * heads
    more = (budget % rows) // heads
    expected = [budget // rows + (row // heads < more) for row in range(rows)]
    assert shares.share.tolist() == expected and shares.group.tolist() == list(range(rows))
    assert budget - heads < int(shares.share.sum()) <= budget


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_scores_of_attention_read_what_they_name(group: str) -> None:
    view, source = make([[9, 4]], 1)
    assert torch.equal(AttentionMass(group).score(view), source.kept[:, 0])  # type: ignore[arg-type]
    assert AttentionMass(group).needs.mass == group  # type: ignore[arg-type]
    total = FusedAttention(8, "sum", group).score(view)  # type: ignore[arg-type]
    assert source.reading == WindowReading(group)  # type: ignore[arg-type]
    torch.testing.assert_close(total, source.paid * 8)
    few = replace(view, seen=5)
    torch.testing.assert_close(FusedAttention(8).score(few), source.paid * 5)
    most = FusedAttention(8, "max", group).score(view)  # type: ignore[arg-type]
    assert source.reading == WindowReading(group, queries="max")  # type: ignore[arg-type]
    assert torch.equal(most, source.paid)


def brute_window(
    queries: Tensor, at: list[int], keys: Tensor, position: list[int], reading: WindowReading
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
        if reading.of == "logits":
            logits = [{j: join[reading.group]([row[j] for row in logits]) for j in seen}]
        shares = []
        for row in logits:
            total = sum(map(math.exp, row.values()))
            shares.append([math.exp(row[j]) / total if j in row else 0.0 for j in range(len(keys))])
        paid.append([join[reading.group](list(column)) for column in zip(*shares, strict=True)])
    over = join[reading.queries]
    return [over(list(column)) for column in zip(*paid, strict=True)]


READINGS = [
    WindowReading(group, of, queries)
    for group in ("mean", "max", "sum")
    for of in ("shares", "logits")
    for queries in ("mean", "max")
]


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("seen", [3, 14])
def test_every_reading_of_the_window(seen: int, reading: WindowReading) -> None:
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
    found = window_attention(cache, seq, entries, view, reading)
    at = list(range(max(seen - window, 0), seen))
    for head in range(heads):
        mine = (entries.row == head).nonzero().flatten()
        queries = cache.memory[QUERIES][seq, 0, head * group : (head + 1) * group]
        ordered = torch.stack([queries[:, p % window] for p in at], 1)
        keys = pool.keys.flatten(0, 1)[entries.slot[mine]]
        expected = brute_window(ordered, at, keys, position[mine].tolist(), reading)
        torch.testing.assert_close(found[mine], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_h2o_protects_its_share_of_the_budget() -> None:
    view, _ = make([[30, 30]], 3, seen=30)
    scores = make_policy("h2o").scores(view, 25).value  # 12 for each row: 6 of them
    assert torch.equal(scores.isinf(), view.position >= 24)
    scores = make_policy("h2o:recent=0").scores(view, 25).value
    assert not scores.isinf().any()
