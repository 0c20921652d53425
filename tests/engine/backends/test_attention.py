"""Ragged, chunk and windowed attention and its mass, against slow forms and sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmkv.engine import scorer_state
from mmkv.engine.backends.cuda import backend as cuda
from mmkv.engine.backends.torch import step
from mmkv.engine.backends.torch.attention import (
    SPLIT_PAGES,
    build_worklist,
    chunk_attention,
    chunk_attention_reference,
    ragged_attention,
    ragged_attention_reference,
    windowed_attention,
)
from mmkv.engine.policies import make_policy
from tests.support.native import engine_for
from tests.support.policies import KINDS
from tests.support.sessions import assert_same_rows, text_ids
from tests.support.tiers import one_in

RAGGED = {"reference": ragged_attention_reference, "fast": ragged_attention}
EVEN = [[33, 30], [31, 32]]
SKEWED = [[1500, 3], [1, 40]]
WITH_EMPTY = [[0, 17], [5, 0]]


def make_cache(lengths: list[list[int]], page: int, dim: int, layers: int = 1):
    """Random pools with shuffled page ids; ``lengths [B][H]``, equal for every layer.

    What no row holds is no number, as what a sequence leaves behind may be.
    """
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor(lengths)[:, None].expand(-1, layers, -1).contiguous()
    width = int((length.max() + page - 1) // page) or 1
    count = length.numel() * width
    table = torch.randperm(count, generator=generator).view(*length.shape, width)
    keys = torch.randn(count, page, dim, generator=generator)
    values = torch.randn(count, page, dim, generator=generator)
    held = torch.zeros(count, page, dtype=torch.bool)
    held[table.flatten()] = (torch.arange(width * page) < length[..., None]).view(-1, page)
    for pool in (keys, values):
        pool[~held] = torch.nan
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


# The mass that queries pay, against sums by hand; in blocks, and in sliding windows.


@pytest.mark.parametrize("elements", [1, 60, 2**20])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_equals_a_sum_by_hand(
    elements: int, window: int, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 9 and 5 entries in any order, 2 heads, 7 queries; one, two or all at a time."""
    monkeypatch.setattr(scorer_state, "_MASS_BLOCK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 2, 7, 4, generator=generator)
    at = torch.arange(3, 10).expand(2, -1)
    keys = torch.randn(16, 4, generator=generator)
    position = torch.randperm(16, generator=generator) % 10
    length, table = torch.tensor([9, 5]), torch.tensor([[2, 0, 3], [1, 4, 4]])
    rows = scorer_state.Rows.of(length, table[:, :3] % 4, 4)
    got = scorer_state.attention_mass(query, at, keys, position, rows, 0.5, group, window)
    for row, count in enumerate(length.tolist()):
        slots = [int(table[row, i // 4]) % 4 * 4 + i % 4 for i in range(count)]
        want = torch.zeros(count, dtype=torch.float64)
        for index in range(7):
            now = int(at[row, index])
            seen = [i for i, s in enumerate(slots) if 0 <= now - int(position[s]) < (window or 99)]
            if not seen:
                continue
            shares = torch.zeros(2, count, dtype=torch.float64)
            for head in range(2):
                scores = keys[[slots[i] for i in seen]].double() @ query[row, head, index].double()
                shares[head, seen] = (scores * 0.5).softmax(-1)
            want += shares.mean(0) if group == "mean" else shares.amax(0)
        torch.testing.assert_close(got[row, :count].double(), want, rtol=1e-5, atol=1e-6)
        assert not got[row, count:].any()


def test_h2o_gives_nothing_to_what_a_window_hides() -> None:
    """Layers 1 and 2 look 20 tokens back, layer 0 at all."""
    engine = engine_for("qwen2_sliding", "h2o", budget=200, prefill_chunk=16)
    windows = engine.spec.sliding_window
    assert windows[0] is None and windows[1] == windows[2] == 20
    session = engine.session()
    session.prefill({"input_ids": text_ids(40, 1)[None]})
    before = session.view()
    mass = before.state()[:, 0].clone()
    session.decode(3)
    after = session.view()
    old = after.position < 40
    gained = after.state()[old, 0] - mass
    assert torch.equal(after.position[old], before.position)
    layer, hidden = before.row // before.kv_heads, before.position <= 40 - 20
    assert (gained[(layer > 0) & hidden] == 0).all()
    assert (gained[(layer > 0) & ~hidden] > 0).all() and (gained[layer == 0] > 0).all()
    # The prompt, in chunks: what a window's length before its end has been seen by 20 queries.
    total = torch.zeros(before.rows).index_add(0, before.row, mass)
    torch.testing.assert_close(total, torch.full_like(total, 40.0), rtol=1e-5, atol=0)


# An engine that reads keys from the pages, as on a GPU, against the one that gathers them.
#
# On a CPU the kernels' torch references stand in for them.


@one_in(3)
@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(("odd", policy) for policy in KINDS),
        ("qwen3_vl", "snapkv"),
        ("llama_biased", "dbtrimkv"),
        ("mistral", "snapkv"),
    ],
)
def test_chunks_and_window_scores_read_pages(
    model: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers, reads = (engine_for(model, policy).session() for _ in range(2))
    reads.engine.backends.cpu.switch_off()  # C would compute window attention
    called = []
    for owner, name in ((step, "prefill_attention"), (cuda, "window_scores")):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _f=whole, _n=name: called.append(_n) or _f(*a))
    for turn in range(2):  # the second meets what the first left, in its first chunk too
        prompt = {"input_ids": text_ids(61, turn)[None]}
        expected = gathers.prefill(prompt)
        with monkeypatch.context() as patch:
            patch.setattr(step, "on_triton", lambda tensor: True)
            patch.setattr(cuda, "on_triton", lambda tensor: True)
            got = reads.prefill(prompt)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert_same_rows(reads, gathers)
        for token in (3, 4, 5):
            torch.testing.assert_close(
                reads.decode(token), gathers.decode(token), rtol=1e-4, atol=1e-4
            )
    scorer = make_policy(policy).scoring  # the kernel joins heads by their mean or sum
    # segments-hs reads the entropy of the newest query alone, which is computed in torch.
    window = scorer.needs.queries > 0 and policy != "segments-hs"
    by_kernel = window and getattr(scorer, "group", "mean") != "max"
    assert ("window_scores" in called) == by_kernel
    # Chunks of mistral that meet earlier ones are past its window, which has a path of its own.
    assert ("prefill_attention" in called) == (model != "mistral")
