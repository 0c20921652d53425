"""Ragged, chunk and windowed attention against their slow forms and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.torch.attention import (
    SPLIT_PAGES,
    build_worklist,
    chunk_attention,
    chunk_attention_reference,
    merge,
    ragged_attention,
    ragged_attention_reference,
    windowed_attention,
)

RAGGED = {"reference": ragged_attention_reference, "fast": ragged_attention}
EVEN = [[33, 30], [31, 32]]
SKEWED = [[1500, 3], [1, 40]]
WITH_EMPTY = [[0, 17], [5, 0]]


def make_cache(lengths: list[list[int]], page: int, dim: int, layers: int = 1):
    """Random pools with shuffled page ids; ``lengths [B][H]``, equal for every layer."""
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor(lengths)[:, None].expand(-1, layers, -1).contiguous()
    width = int((length.max() + page - 1) // page) or 1
    count = length.numel() * width
    table = torch.randperm(count, generator=generator).view(*length.shape, width)
    keys = torch.randn(count, page, dim, generator=generator)
    values = torch.randn(count, page, dim, generator=generator)
    return length, table, keys, values


def dense(length: Tensor, table: Tensor, pool: Tensor) -> list[Tensor]:
    """Return the entries of each row, gathered one by one."""
    page = pool.shape[1]
    rows = []
    for count, pages in zip(length.flatten().tolist(), table.flatten(0, -2), strict=True):
        slots = [pool[pages[i // page], i % page] for i in range(count)]
        rows.append(torch.stack(slots) if slots else pool.new_zeros(0, pool.shape[-1]))
    return rows


@pytest.mark.parametrize("form", RAGGED)
@pytest.mark.parametrize("lengths", [EVEN, SKEWED, WITH_EMPTY], ids=["even", "skewed", "empty"])
@pytest.mark.parametrize(("queries", "page", "dim"), [(1, 16, 32), (4, 8, 64), (40, 16, 128)])
def test_ragged_attention_equals_dense(form, lengths, queries, page, dim) -> None:
    length, table, keys, values = make_cache(lengths, page, dim)
    (work,) = build_worklist(length, table, page)
    rows = length.numel()
    query = torch.randn(rows, queries, dim, generator=torch.Generator().manual_seed(1))
    out, lse = RAGGED[form](query, keys, values, work, 0.2)
    pairs = zip(dense(length, table, keys), dense(length, table, values), strict=True)
    for row, (key, value) in enumerate(pairs):
        scores = query[row].double() @ key.double().T * 0.2
        if not len(key):
            assert torch.equal(out[row], torch.zeros_like(out[row]))
            assert bool((lse[row] == -torch.inf).all())
            continue
        expected = scores.softmax(-1) @ value.double()
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    length, table, keys, values = make_cache(SKEWED, 16, 32)
    (work,) = build_worklist(length, table, 16)
    query = torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(1))
    whole = ragged_attention(query, keys, values, work, 0.2)
    monkeypatch.setattr(
        "mmkv.engine.backends.torch.attention._QUERY_ELEMENTS", 7 * 32 * len(work.row)
    )
    for found, wanted in zip(ragged_attention(query, keys, values, work, 0.2), whole, strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_worklist_splits_only_uneven_rows() -> None:
    length, table, *_ = make_cache(EVEN, 16, 8, layers=2)
    for work in build_worklist(length, table, 16):
        assert work.whole and work.row.tolist() == [0, 1, 2, 3]
        assert work.valid.sum(1).tolist() == [33, 30, 31, 32]
    length, table, *_ = make_cache(SKEWED, 16, 8, layers=2)
    for work in build_worklist(length, table, 16):
        assert not work.whole and work.pages.shape[1] == SPLIT_PAGES
        assert torch.bincount(work.row, work.valid.sum(1)).tolist() == [1500, 3, 1, 40]


@pytest.mark.parametrize("form", [chunk_attention_reference, chunk_attention])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (3, 1)])
def test_chunk_attention_is_causal(form, heads, kv_heads) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(heads, 37, 32, generator=generator)
    key, value = (torch.randn(kv_heads, 37, 32, generator=generator) for _ in range(2))
    out, lse = form(query, key, value, 0.3)
    for head in (0, heads - 1):
        shared = head // (heads // kv_heads)
        for at in (0, 5, 36):
            scores = query[head, at].double() @ key[shared, : at + 1].double().T * 0.3
            expected = scores.softmax(-1) @ value[shared, : at + 1].double()
            torch.testing.assert_close(out[head, at].double(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                lse[head, at].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("form", [chunk_attention_reference, chunk_attention])
def test_the_last_token_of_a_chunk_alone(form) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(8, 37, 32, generator=generator)
    key, value = (torch.randn(2, 37, 32, generator=generator) for _ in range(2))
    whole, alone = form(query, key, value, 0.3), form(query[:, -1:], key, value, 0.3)
    for every, last in zip(whole, alone, strict=True):
        torch.testing.assert_close(last, every[:, -1:], rtol=1e-4, atol=1e-5)


def test_merging_two_sets_of_keys_equals_one() -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 5, 16, generator=generator)
    key, value = (torch.randn(2, 30, 16, generator=generator) for _ in range(2))

    def attend(part: slice) -> tuple[Tensor, Tensor]:
        scores = query @ key[:, part].transpose(1, 2)
        return scores.softmax(-1) @ value[:, part], scores.logsumexp(-1)

    out, lse = merge(attend(slice(0, 11)), attend(slice(11, 30)))
    whole, total = attend(slice(0, 30))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, total)
    empty = (torch.zeros_like(whole), torch.full_like(total, -torch.inf))
    torch.testing.assert_close(merge(empty, (whole, total))[0], whole)


@pytest.mark.parametrize("lengths", [EVEN, SKEWED], ids=["even", "skewed"])
def test_windowed_attention_masks_by_position(lengths) -> None:
    page, window = 16, 9
    length, table, keys, values = make_cache(lengths, page, 32)
    (work,) = build_worklist(length, table, page)
    position = torch.zeros(keys.shape[:2], dtype=torch.int32)
    generator = torch.Generator().manual_seed(4)
    orders = []
    for count, pages in zip(length.flatten().tolist(), table.flatten(0, -2), strict=True):
        order = torch.randperm(count, generator=generator)  # the order inside a row is free
        orders.append(order)
        for index, value in enumerate(order.tolist()):
            position[pages[index // page], index % page] = value
    query = torch.randn(length.numel(), 2, 32, generator=generator)
    at = torch.stack([length.flatten() - 1, length.flatten() // 2], 1)
    out = windowed_attention(query, at, keys, values, position, work, 0.2, window)
    rows = zip(dense(length, table, keys), dense(length, table, values), orders, strict=True)
    for row, (key, value, order) in enumerate(rows):
        for index in range(2):
            seen = (order <= at[row, index]) & (order > at[row, index] - window)
            scores = (key[seen] @ query[row, index]) * 0.2
            expected = scores.softmax(-1) @ value[seen]
            torch.testing.assert_close(out[row, index], expected, rtol=1e-4, atol=1e-5)
