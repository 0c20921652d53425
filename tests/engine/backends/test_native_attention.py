"""Attention of a step and of a prompt's chunk, and entries as C stores them, beside float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import binding, levels
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.backends.cpu.kernels import NativeChunkAttention
from mmkv.engine.cache import COLUMNS, PagePool, RaggedCache
from mmkv.engine.cache.forms import FORMS as STORE_FORMS
from mmkv.engine.cache.forms import KVForm
from tests.support.native import needs_native
from tests.support.tiers import one_in

FORMS = ["auto", "bf16", "int8", "k8v4", "int4"]


def filled(form: str, dim: int, page_size: int, length: int) -> tuple[RaggedCache, Tensor, Tensor]:
    """A row of random entries, and its keys and values ``[length, D]`` as they are stored."""
    # C reads queries that are rotated already; here nothing is.
    plain = replace(KVForm.of(form, torch.float32, dim), rotated=False)
    cache = RaggedCache(PagePool(page_size, dim, 0, state_size=1, form=plain), 1, 1)
    slots = cache.append(torch.tensor([cache.open()]), length).flatten()
    noise = torch.Generator().manual_seed(length + dim)
    cache.pool.store(slots, *torch.randn(2, length, dim, generator=noise))
    cache.pool.position.flatten()[slots] = torch.arange(length, dtype=torch.int32)
    return cache, cache.pool.keys_at(slots), cache.pool.values_at(slots)


@one_in(3)
@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_a_row(form: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head sizes that vectors divide or not, groups of one part or more, pages that end within."""
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    assert loaded.level == level
    groups, kinds = cycle((1, 2, 3, 4, 5, 9, 7)), cycle(enumerate(binding.JOINS))
    joined = {"mean": Tensor.mean, "max": Tensor.amax, "sum": Tensor.sum}
    for dim in (2, 20, 32, 64, 96, 128):
        for page_size, length in ((1, 5), (8, 1), (8, 40), (16, 289), (24, 71)):
            cache, keys, values = filled(form, dim, page_size, length)
            state = cache.pool.state.flatten(0, 1)
            for group, (join, kind) in islice(zip(groups, kinds, strict=False), 2):
                query = 2 * torch.randn(group, dim, generator=torch.Generator().manual_seed(group))
                out, scores = torch.full_like(query, torch.nan), torch.empty(group, length)
                views = CacheViews().of(cache, [0])
                oldest = (0, length // 2, length - 3)[group % 3]
                cache.pool.state.zero_()
                places = (
                    query.data_ptr(),
                    group,
                    1 + join,
                    oldest,
                    scores.data_ptr(),
                    out.data_ptr(),
                )
                loaded.mmkv_attend(views, 0, *places)
                score = query.double() @ keys.double().T / dim**0.5
                score[:, : max(oldest, 0)] = -torch.inf
                shares = score.softmax(-1)
                paid = state[cache.entries(0).slot, 0].double()
                torch.testing.assert_close(paid, joined[kind](shares, 0), rtol=0, atol=2e-5)
                torch.testing.assert_close(
                    out.double(), shares @ values.double(), rtol=0, atol=2e-5
                )


@needs_native
@pytest.mark.parametrize("level", levels())
def test_scores_that_are_all_minus_infinity_give_no_number(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What checks for numbers that broke sees them; 0 of each value would be an answer."""
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    cache, _, _ = filled("auto", 32, 16, 3)
    cache.pool.keys.fill_(-1e30)
    query, out = torch.full((1, 32), 1e30), torch.zeros(1, 32)
    places = query.data_ptr(), 1, 0, 0, None, out.data_ptr()
    loaded.mmkv_attend(CacheViews().of(cache, [0]), 0, *places)
    assert out.isnan().all()


# Attention of a prompt's chunk, at every level of C, beside float64.


KV_HEADS = 2


def chunk_filled(form: str, dim: int, page_size: int, held: list[int], tokens: int) -> RaggedCache:
    """Two sequences of two layers; the second one's second layer holds ``held`` entries a row and
    a chunk after them.
    """
    # C reads queries that are rotated already; here nothing is.
    plain = replace(KVForm.of(form, torch.float32, dim), rotated=False)
    cache = RaggedCache(PagePool(page_size, dim, 0, form=plain), 2, KV_HEADS)
    noise = torch.Generator().manual_seed(sum(held) + tokens + dim)
    for _ in range(2):
        seqs = torch.tensor([cache.open()])
        most = max(held)
        slots = cache.append(seqs, max(most, 1)).flatten()
        cache.pool.store(slots, *torch.randn(2, slots.numel(), dim, generator=noise))
        entries = cache.entries(int(seqs))
        keep = torch.tensor([held[row % KV_HEADS] for row in range(2 * KV_HEADS)])
        cache.drop(int(seqs), (entries.offset >= keep[entries.row]).nonzero().flatten(), entries)
        slots = cache.append(seqs, tokens).flatten()
        cache.pool.store(slots, *torch.randn(2, slots.numel(), dim, generator=noise))
    return cache


def wanted(cache: RaggedCache, query: Tensor) -> Tensor:
    """Compute in float64 what the last tokens of sequence 1 get in layer 1, ``[T, Hq D]``."""
    tokens, heads, dim = query.shape
    entries, out = cache.entries(1), torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for head in range(heads):
        row = KV_HEADS + head // (heads // KV_HEADS)
        slots = entries.slot[entries.row == row]
        slots = slots[entries.offset[entries.row == row].argsort()]
        keys, values = (at(slots).double() for at in (cache.pool.keys_at, cache.pool.values_at))
        scores = query[:, head].double() @ keys.T / dim**0.5
        seen = len(slots) - tokens + 1 + torch.arange(tokens)
        scores = scores.masked_fill(torch.arange(len(slots)) >= seen[:, None], -torch.inf)
        out[:, head] = scores.softmax(-1) @ values
    return out.flatten(1)


@one_in(3)
@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_a_chunk(form: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its tokens or the last one; rows of different lengths, and more than one stretch."""
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    assert loaded.level == level
    groups, sizes = cycle((1, 2, 3, 7)), cycle((8, 16, 24, 1))
    for at, dim in enumerate((2, 20, 32, 64, 128)):
        # Each dimension with rows without entries and of more than one stretch.
        for held, tokens in (([0, 0], 33), ([5, 40], (1, 4)[at % 2]), ([0, 300], (4, 270)[at % 2])):
            cache = chunk_filled(form, dim, next(sizes), held, tokens)
            noise = torch.Generator().manual_seed(dim)
            query = torch.randn(tokens, KV_HEADS * next(groups), dim, generator=noise)
            attend = NativeChunkAttention(loaded)
            found = attend(cache, 1, 1, query)
            expected = wanted(cache, query)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
            last = attend(cache, 1, 1, query[-1:])
            torch.testing.assert_close(last.double(), expected[-1:], rtol=0, atol=2e-5)


@needs_native
def test_a_query_s_bits_depend_on_no_other_and_on_no_thread() -> None:
    loaded: Any = binding.library()
    cache, attend = chunk_filled("auto", 32, 16, [70, 300], 90), NativeChunkAttention(loaded)
    noise = torch.Generator().manual_seed(0)
    wide = torch.randn(90, 9, 32, generator=noise)
    query, before = wide[:, :6], torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attend(cache, 1, 1, query))
            assert torch.equal(attend(cache, 1, 1, query[-7:]), found[0][-7:])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# Keys and values as C stores them, in every form.


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kv", [name for name in STORE_FORMS if name != "auto"])
def test_c_rounds_as_torch_does_bit_by_bit(
    kv: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    noise = torch.Generator().manual_seed(3)
    for dim in (2, 22, 32, 96, 128):
        pools = [PagePool(8, dim, 20, form=KVForm.of(kv, torch.float32, dim)) for _ in range(2)]
        size = 10.0 ** torch.randint(-9, 4, (2, 160, 1), generator=noise)
        vectors = size * torch.randn(2, 160, dim, generator=noise)
        vectors[:, :8] = vectors[:, :8, :1]  # no range at all
        vectors[:, 8:12] = 0
        vectors[:, 12:24] = vectors[:, 12:24].abs()
        vectors[:, 24:40] = vectors[:, 24:40].round()
        vectors[:, 40:44] *= 1e-44 / size[:, 40:44]  # too small for a scale of 8 bits
        vectors[:, 44:48] = 7e4 + vectors[:, 44:48].abs() / size[:, 44:48]  # beyond float16
        pools[0].store(torch.arange(160), *vectors)
        cache = RaggedCache(pools[1], 1, 1)
        views = CacheViews().of(cache, [cache.open()])
        for slot, (key, value) in enumerate(vectors.transpose(0, 1).clone()):
            loaded.mmkv_store(views, slot, key.data_ptr(), value.data_ptr())
        for name in COLUMNS:
            ours, theirs = getattr(pools[1], name), getattr(pools[0], name)
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (name, dim)


@needs_native
@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e9])
def test_c_stores_nothing_finite_of_what_is_not(wrong: float, kv: str) -> None:
    loaded: Any = binding.library()
    pool = PagePool(8, 32, 1, form=STORE_FORMS[kv])
    cache = RaggedCache(pool, 1, 1)
    key, value = torch.ones(32), torch.ones(32)
    key[3] = wrong
    views = CacheViews().of(cache, [cache.open()])
    loaded.mmkv_store(views, 2, key.data_ptr(), value.data_ptr())
    assert not pool.keys_at(torch.tensor([2])).isfinite().any()
    assert pool.values_at(torch.tensor([2])).isfinite().all()
