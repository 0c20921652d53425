"""Attention of a prompt's chunk, at every level of C, beside float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import binding, levels
from mmkv.engine.backends.cpu.kernels import NativeChunkAttention
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.cache.forms import KVForm
from tests.engine.backends.test_native import needs_native

FORMS = ["auto", "bf16", "int8", "k8v4", "int4"]
KV_HEADS = 2


def filled(form: str, dim: int, page_size: int, held: list[int], tokens: int) -> RaggedCache:
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


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_a_chunk(form: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its tokens or the last one; rows of different lengths, and more than one stretch."""
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    assert loaded.level == level
    groups, sizes = cycle((1, 2, 3, 7)), cycle((8, 16, 24, 1))
    for dim in (2, 20, 32, 64, 128):
        for held in ([0, 0], [5, 40], [0, 300]):
            for tokens in (1, 4, 33, 270):
                cache = filled(form, dim, next(sizes), held, tokens)
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
    cache, attend = filled("auto", 32, 16, [70, 300], 90), NativeChunkAttention(loaded)
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
