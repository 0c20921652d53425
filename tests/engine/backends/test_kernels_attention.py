"""Attention of steps and prefill chunks over paged ragged rows, against dense float64."""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.bench.kernel_code import SHARED_LIMITS
from mmkv.engine.backends.cuda.kernels.buffers import NewestTokens, Partials, WorkList
from mmkv.engine.backends.cuda.kernels.decode_attention import empty_partials, tokens_at_once
from mmkv.engine.backends.cuda.kernels.pointwise import merged
from mmkv.engine.backends.cuda.kernels.worklist import (
    build_worklist_reference,
    empty_worklist,
    tile_entries,
)
from mmkv.engine.backends.torch.attention import chunk_attention
from tests.support.kernels import (
    DEVICE,
    ONE_SPILL,
    Paged,
    attention,
    beside_a_sink,
    compiled,
    forms,
    is_triton,
    needs_compiler,
    paged,
    rounded,
)

FORMS = forms("decode_attention", "decode_attention")
SCALE = 0.2


def plan(cache: Paged, seqs: list[int], tile: int, runs: int, group: int):
    layers, heads = cache.length.shape[1:]
    work = empty_worklist(len(seqs), layers, heads, tile, runs, DEVICE)
    build_worklist_reference(work, torch.tensor(seqs, device=DEVICE), cache.length)
    return work, empty_partials(work, group, cache.keys.shape[2])


def queries(batch: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, dim, generator=generator).to(DEVICE, dtype)


def run(form, query: Tensor, cache: Paged, work: WorkList, partials: Partials, layer: int = 0):
    out = torch.full(query.shape, torch.nan, dtype=query.dtype, device=DEVICE)
    lse = torch.full(query.shape[:2], torch.nan, device=DEVICE)
    args = (query, cache.keys, cache.values, cache.table, work, layer, partials, SCALE)
    assert form(*args, out, lse) is None
    return out, lse


def compare(
    query: Tensor,
    cache: Paged,
    seqs: list[int],
    layer: int,
    got: tuple[Tensor, Tensor],
    wider: float = 1,
):
    """``got`` against float64; half precision rounds weights and outputs.

    ``wider``: times the tolerance of plain pages, where products are scaled afterwards.
    """
    heads = cache.length.shape[2]
    group = query.shape[1] // heads
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[query.dtype]
    tolerance *= wider
    for b, seq in enumerate(seqs):
        for head in range(heads):
            mine = slice(head * group, (head + 1) * group)
            key, value = cache.row(seq, layer, head)
            if seq < 0:
                key, value = key[:0], value[:0]
            out, lse = attention(query[b, mine], key, value, SCALE)
            error = (got[0][b, mine].double() - out).abs().max()
            assert error <= tolerance * max(1.0, out.abs().max()), (b, head, float(error))
            torch.testing.assert_close(
                got[1][b, mine].double(), lse, rtol=0, atol=max(tolerance / 4, 5e-6)
            )


LENGTHS = {
    "even": [[[33, 30]], [[31, 32]]],
    "skewed": [[[190, 3]], [[1, 40]]],
    "with empty rows": [[[0, 17]], [[5, 0]], [[0, 0]]],
    "at page ends": [[[16, 64]], [[15, 65]]],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runs", [1, 5, 12])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_dense_attention(form, lengths, runs) -> None:
    length = torch.tensor(LENGTHS[lengths])
    cache = paged(length, 16, 32, torch.float32, DEVICE)
    seqs = list(range(len(length)))[::-1]
    query = queries(len(seqs), 8, 32, torch.float32)
    work, partials = plan(cache, seqs, 16, runs, 4)
    compare(query, cache, seqs, 0, run(form, query, cache, work, partials))
    assert not partials.arrived.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dim", "group", "page", "tile"),
    [
        (32, 8, 8, 128),
        (64, 1, 64, 64),
        (96, 3, 16, 32),
        (128, 7, 32, 16),
        (128, 4, 16, 64),
        (256, 2, 16, 16),
        (32, 20, 16, 32),  # more than the 16 rows of the smallest matrix product
        (32, 40, 16, 32),
    ],
)
def test_shapes(form, dim, group, page, tile) -> None:
    length = torch.tensor([[[150, 9]], [[64, 77]]])
    cache = paged(length, page, dim, torch.float32, DEVICE)
    query = queries(2, 2 * group, dim, torch.float32)
    work, partials = plan(cache, [0, 1], tile, 6, group)
    compare(query, cache, [0, 1], 0, run(form, query, cache, work, partials))


def with_gaps(cache: Paged) -> Paged:
    """Return the same rows where a key, its value and 5 numbers lie side by side."""
    dim = cache.keys.shape[2]
    wide = torch.full((*cache.keys.shape[:2], 2 * dim + 5), torch.nan, device=DEVICE)
    wide[..., :dim], wide[..., dim : 2 * dim] = cache.keys[:], cache.values[:]
    return replace(cache, keys=wide[..., :dim], values=wide[..., dim : 2 * dim])


@pytest.mark.parametrize("form", FORMS)
def test_entries_with_gaps(form) -> None:
    cache = with_gaps(paged(torch.tensor([[[150, 9]], [[64, 0]]]), 16, 32, torch.float32, DEVICE))
    query = queries(2, 8, 32, torch.float32)
    work, partials = plan(cache, [0, 1], 16, 5, 4)
    compare(query, cache, [0, 1], 0, run(form, query, cache, work, partials))


# bfloat16 only where a GPU is: the interpreter's arithmetic in it is wrong.
DTYPES = [torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision(form, dtype) -> None:
    length = torch.tensor([[[150, 9]], [[64, 77]]])
    cache = paged(length, 16, 64, dtype, DEVICE)
    query = queries(2, 8, 64, dtype)
    work, partials = plan(cache, [0, 1], 64, 6, 4)
    compare(query, cache, [0, 1], 0, run(form, query, cache, work, partials))


# Bits of keys and of values, of every form and crosswise.
BITS = [(8, 8), (8, 4), (4, 4), (16, 16), (4, 8)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
@pytest.mark.parametrize(("dim", "dtype"), [(96, torch.float32), (64, DTYPES[-1])], ids=str)
def test_fewer_bits(form, key_bits, value_bits, dim, dtype) -> None:
    """Rows in several pieces, an empty one, an idle batch slot; head_dim 96 has masked features."""
    length = torch.tensor([[[40, 0]], [[9, 33]]])
    cache = rounded(paged(length, 16, dim, dtype, DEVICE), key_bits, value_bits)
    seqs, query = [1, -1, 0], queries(3, 6, dim, dtype)
    work, partials = plan(cache, seqs, 16, 4, 3)
    compare(query, cache, seqs, 0, run(form, query, cache, work, partials), wider=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_small_values_beside_a_sink_keep_their_digits_in_float16(form, bits) -> None:
    cache, query = beside_a_sink(bits)
    work, partials = plan(cache, [0], 64, 4, 1)
    out, _ = run(form, query, cache, work, partials)
    want, _ = attention(query[0], *cache.row(0, 0, 0), SCALE)
    assert (out[0].double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("form", FORMS)
def test_idle_batch_slots_layers_and_strided_queries(form) -> None:
    """Batch slots of -1 read nothing and give zeros; the scratch serves layer after layer."""
    length = torch.tensor([[[40, 16], [3, 70]], [[33, 0], [20, 90]]])
    cache = paged(length, 16, 32, torch.float32, DEVICE)
    seqs = [1, -1, 0]
    work, partials = plan(cache, seqs, 16, 5, 2)
    packed = queries(3, 8, 32, torch.float32)  # q beside something else, as a fused product gives
    for layer in (0, 1, 0):
        got = run(form, packed[:, 2:6], cache, work, partials, layer)
        compare(packed[:, 2:6], cache, seqs, layer, got)
        assert not got[0][1].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dim", "bits"), [(32, 0), (256, 0), (32, 8)])
def test_a_window_hides_what_is_too_far_back(form, dim, bits) -> None:
    """Wherever an entry lies in its row; of some pieces nothing is seen, and of one row one."""
    length = torch.tensor([[[90, 70]], [[33, 1]]])
    whole = paged(length, 16, dim, torch.float32, DEVICE)
    now, generator = torch.tensor([1000, 400]), torch.Generator().manual_seed(3)
    position = torch.zeros(len(whole.keys), 16, dtype=torch.int32)
    for seq, head in itertools.product((0, 1), (0, 1)):
        at = torch.randint(int(now[seq]), (96,), generator=generator)
        at[32 * head : 32 * head + 32] = 3  # whole pages, the row's first ones or later ones
        at[length[seq, 0, head] - 1] = now[seq]  # the query's own
        position[whole.table[seq, 0, head, :6].cpu()] = at.view(6, 16).int()
    cache = rounded(whole, bits, bits) if bits else whole
    near = NewestTokens(300, position.to(DEVICE), now.to(DEVICE))
    query = queries(2, 8, dim, torch.float32)
    work, partials = plan(whole, [0, 1], 16, 9, 4)
    out = torch.full(query.shape, torch.nan, device=DEVICE)
    lse = torch.full(query.shape[:2], torch.nan, device=DEVICE)
    args = (query, cache.keys, cache.values, cache.table, work, 0, partials, SCALE)
    form(*args, out, lse, near)
    counts = set()
    for seq, head in itertools.product((0, 1), (0, 1)):
        key, value = cache.row(seq, 0, head)
        pages = cache.table[seq, 0, head].cpu()
        at = position[pages].flatten()[: len(key)]
        seen = (at > now[seq] - 300).to(DEVICE)
        counts.add(int(seen.sum()))
        mine = slice(4 * head, 4 * head + 4)
        want, logs = attention(query[seq, mine], key[seen], value[seen], SCALE)
        torch.testing.assert_close(out[seq, mine].double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[seq, mine].double(), logs, rtol=0, atol=1e-5)
    assert min(counts) == 1 and 1 < max(counts) < 60


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dim", "bits", "window"), [(32, 0, None), (96, 0, 20), (32, 8, None), (32, 4, 20)]
)
def test_tokens_of_one_sequence_see_none_behind_them(form, dim, bits, window) -> None:
    """Four tokens of each sequence, or fewer: the last of a row are theirs, and a page and a piece
    end among them. Of an idle sequence, and of places without a token, nothing is asked.
    """
    length = torch.tensor([[[90, 33]], [[18, 2]]])
    whole = paged(length, 16, dim, torch.float32, DEVICE)
    position = torch.zeros(len(whole.keys), 16, dtype=torch.int32)
    for seq, head in itertools.product((0, 1), (0, 1)):
        count = int(length[seq, 0, head])
        at = (41 if seq else 89) - count + 1 + torch.arange(96)
        at[: max(count - 4, 0)] = at[: max(count - 4, 0)].flip(
            0
        )  # of no order but for these tokens' own
        position[whole.table[seq, 0, head, :6].cpu()] = at.view(6, 16).int()
    cache = rounded(whole, bits, bits) if bits else whole
    seqs, behind = [1, -1, 0], torch.tensor([1, 0, 0, 0, 9, 9, 9, 9, 3, 2, 1, 0])
    now = torch.tensor([40, 41, 0, 0, 9, 9, 9, 9, 86, 87, 88, 89])
    near = NewestTokens(window, position.to(DEVICE), now.to(DEVICE)) if window else None
    query = queries(12, 6, dim, torch.float32)
    work, partials = plan(whole, seqs, 16, 7, 12)
    out = torch.full(query.shape, torch.nan, device=DEVICE)
    lse = torch.full(query.shape[:2], torch.nan, device=DEVICE)
    args = (query, cache.keys, cache.values, cache.table, work, 0, partials, SCALE)
    form(*args, out, lse, near, behind.to(DEVICE))
    assert not partials.arrived.any()
    for token, head in itertools.product((0, 1, 8, 9, 10, 11), (0, 1)):
        seq = seqs[token // 4]
        key, value = cache.row(seq, 0, head)
        seen = torch.arange(len(key)) < len(key) - behind[token]
        if window:
            at = position[cache.table[seq, 0, head].cpu()].flatten()[: len(key)]
            seen &= now[token] - at < window
        mine, seen = slice(3 * head, 3 * head + 3), seen.to(DEVICE)
        want, logs = attention(query[token, mine], key[seen], value[seen], SCALE)
        torch.testing.assert_close(out[token, mine].double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[token, mine].double(), logs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_large_logits_and_ties(form) -> None:
    """Logits of 1e4 neither overflow nor blur the merge; equal keys share alike."""
    length = torch.tensor([[[70, 70]]])
    cache = paged(length, 16, 32, torch.float32, DEVICE)
    # Logits that float32 holds exactly: the rest is the merge's own error.
    cache.keys[cache.table[0, 0, 0, :5]] = 0.0
    step = torch.arange(80, device=DEVICE).view(5, 16) % 7
    cache.keys[cache.table[0, 0, 0, :5], :, 0] = 8192.0 + step
    cache.keys[cache.table[0, 0, 1, :5]] = 1.0
    query = queries(1, 4, 32, torch.float32)
    query[:, :2] = 5.0
    work, partials = plan(cache, [0], 16, 10, 2)
    assert work.rows[0, :, 3].tolist() == [5, 5]
    out, lse = run(form, query, cache, work, partials)
    for head in range(2):
        mine = slice(2 * head, 2 * head + 2)
        want, logs = attention(query[0, mine], *cache.row(0, 0, head), SCALE)
        torch.testing.assert_close(out[0, mine].double(), want, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[0, mine].double(), logs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_more_query_heads_than_a_merge_has_room_for(form) -> None:
    """64 heads of 128 features: one piece at a time, of rows in several."""
    cache = paged(torch.tensor([[[90]]]), 16, 128, torch.float32, DEVICE)
    query = queries(1, 64, 128, torch.float32)
    work, partials = plan(cache, [0], 16, 3, 64)
    compare(query, cache, [0], 0, run(form, query, cache, work, partials))


@pytest.mark.parametrize("form", FORMS)
def test_lse_is_optional_and_results_repeat(form) -> None:
    cache = paged(torch.tensor([[[90, 20]]]), 16, 32, torch.float32, DEVICE)
    query = queries(1, 4, 32, torch.float32)
    work, partials = plan(cache, [0], 16, 3, 2)
    want, _ = run(form, query, cache, work, partials)
    out = torch.full_like(query, torch.nan)
    form(query, cache.keys, cache.values, cache.table, work, 0, partials, SCALE, out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("form", FORMS)
def test_a_long_row_is_merged_from_many_pieces(form) -> None:
    """33 pieces: the merge takes them in more than one block at head_dim 128, group 8."""
    if is_triton(form) and DEVICE.type == "cpu":
        cache = paged(torch.tensor([[[160]]]), 16, 128, torch.float32, DEVICE)
        runs = 10  # the interpreter is slow; 10 pieces are three blocks
    else:
        cache = paged(torch.tensor([[[600]]]), 16, 128, torch.float32, DEVICE)
        runs = 33
    query = queries(1, 8, 128, torch.float32)
    work, partials = plan(cache, [0], 16, runs, 8)
    assert int(work.rows[0, 0, 3]) == runs
    compare(query, cache, [0], 0, run(form, query, cache, work, partials))


@needs_compiler
@pytest.mark.parametrize("form", ["int8", "k8v4", "int4"])
def test_decode_kernel_of_fewer_bits_fits_a_hopper_sm(form: str) -> None:
    """Three programs of 4 warps per multiprocessor at least. ptxas spills one register, out and in,
    to stay at 128 with 8 bits.
    """
    (code,) = compiled("decode", form=form)
    assert code.spills <= ONE_SPILL and code.registers <= 168 and code.shared <= 56 * 1024


@needs_compiler
def test_decode_kernel_with_a_window_fits_a_hopper_sm() -> None:
    """Heads of 256 as Gemma 3 has them: three programs per multiprocessor at least."""
    (code,) = compiled("decode", group=2, dim=256, window=1024)
    assert code.spills <= ONE_SPILL and code.registers <= 168 and code.shared <= 64 * 1024


@needs_compiler
@pytest.mark.parametrize(
    ("group", "dim", "gap"),  # inside vLLM value and 16 bytes lie behind a key
    [(8, 128, 0), (1, 64, 0), (4, 128, 136)],
)
def test_decode_kernel_fits_a_hopper_sm(group: int, dim: int, gap: int) -> None:
    """Four programs of 4 warps per multiprocessor: 128 registers, 56 KiB of shared memory.

    Also that two tiles are on their way while one is in use: the loop waits for all but the
    youngest groups of copies.
    """
    (code,) = compiled("decode", group=group, dim=dim, gap=gap)
    assert code.spills <= ONE_SPILL and code.registers <= 128 and code.shared <= 56 * 1024
    assert "cp.async.cg.shared.global" in code.ptx
    assert "cp.async.wait_group \t3" in code.ptx


# Attention of a prefill chunk to retained rows, torch and Triton, against dense float64.


PREFILL_FORMS = forms("prefill_attention", "prefill_attention")


def prefill_queries(heads: int, count: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``[Hq, C, D]`` as the decoder gives it: a transposed view of a part of a wider
    product.
    """
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(count, heads + 1, dim, generator=generator).to(DEVICE, dtype)
    return wide[:, 1:].transpose(0, 1)


def check(
    form, cache: Paged, query: Tensor, seq: int = 0, layer: int = 0, wider: float = 1
) -> None:
    row = cache.length[seq, layer], cache.table[seq, layer]
    out, lse = form(query, cache.keys, cache.values, *row, SCALE)
    assert out.shape == query.shape and out.dtype == query.dtype
    group = query.shape[0] // len(row[0])
    tolerance = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[query.dtype]
    tolerance *= wider
    for head, mine in enumerate(query.split(group)):
        key, value = cache.row(seq, layer, head)
        want, logs = attention(mine, key, value, SCALE)
        here = slice(head * group, (head + 1) * group)
        assert (out[here].double() - want).abs().max() <= tolerance * max(1.0, want.abs().max())
        torch.testing.assert_close(lse[here].double(), logs, rtol=0, atol=max(tolerance / 4, 5e-6))


@pytest.mark.parametrize("form", PREFILL_FORMS)
@pytest.mark.parametrize("count", [1, 16, 45])
@pytest.mark.parametrize("lengths", [[33, 30], [190, 1], [0, 17], [32, 64], [0, 0]], ids=str)
def test_prefill_equals_dense_attention(form, count, lengths) -> None:
    cache = paged(torch.tensor([[lengths]]), 16, 32, torch.float32, DEVICE)
    check(form, cache, prefill_queries(8, count, 32))


@pytest.mark.parametrize("form", PREFILL_FORMS)
def test_prefill_reads_entries_with_gaps(form) -> None:
    cache = with_gaps(paged(torch.tensor([[[77, 12]]]), 16, 32, torch.float32, DEVICE))
    check(form, cache, prefill_queries(8, 11, 32))


@pytest.mark.parametrize("form", PREFILL_FORMS)
@pytest.mark.parametrize(
    ("dim", "group", "page"),
    [(32, 8, 8), (64, 1, 64), (96, 3, 16), (128, 7, 32), (128, 4, 16), (256, 2, 16)],
)
def test_prefill_shapes(form, dim, group, page) -> None:
    """The second sequence's second layer; heads, layers and sequences must not be mixed up."""
    length = torch.tensor([[[3, 20], [9, 4]], [[17, 2], [77, 40]]])
    cache = paged(length, page, dim, torch.float32, DEVICE)
    check(form, cache, prefill_queries(2 * group, 11, dim), seq=1, layer=1)


@pytest.mark.parametrize("form", PREFILL_FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "dim"), [(9, 64), (40, 64), (40, 256)])
def test_prefill_half_precision(form, dtype, count, dim) -> None:
    """All block sizes of half precision: up to 64 queries per KV head, more, heads of 256."""
    cache = paged(torch.tensor([[[150, 9]]]), 16, dim, dtype, DEVICE)
    check(form, cache, prefill_queries(8, count, dim, dtype))


@pytest.mark.parametrize("form", PREFILL_FORMS)
@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 8), (8, 4), (4, 4), (16, 16), (4, 8)])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(32, torch.float32), (96, torch.float32), (64, DTYPES[-1]), (256, DTYPES[-1])],
    ids=str,
)
def test_prefill_fewer_bits(form, key_bits, value_bits, dim, dtype) -> None:
    """What the codes stand for is rounded to the dtype in the reference: the more, the longer."""
    cache = paged(torch.tensor([[[70, 0]]]), 16, dim, dtype, DEVICE)
    wider = 8 if dim == 256 else 4
    query = prefill_queries(6, 11, dim, dtype)
    check(form, rounded(cache, key_bits, value_bits), query, wider=wider)


@pytest.mark.parametrize("form", PREFILL_FORMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_prefill_small_values_beside_a_sink_keep_their_digits_in_float16(form, bits) -> None:
    cache, query = beside_a_sink(bits)
    out, _ = form(query, cache.keys, cache.values, cache.length[0, 0], cache.table[0, 0], SCALE)
    want, _ = attention(query[0], *cache.row(0, 0, 0), SCALE)
    assert (out[0].double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("form", PREFILL_FORMS)
def test_large_logits(form) -> None:
    cache = paged(torch.tensor([[[70]]]), 16, 32, torch.float32, DEVICE)
    query = prefill_queries(2, 5, 32) * 100
    out, lse = form(query, cache.keys, cache.values, cache.length[0, 0], cache.table[0, 0], SCALE)
    want, logs = attention(query, *cache.row(0, 0, 0), SCALE)
    assert (out.double() - want).abs().max() <= 2e-4  # logits of 500, rounded to 3e-5
    torch.testing.assert_close(lse.double(), logs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", PREFILL_FORMS)
def test_merges_with_the_chunk_itself(form) -> None:
    """Retained rows and the causal chunk together, one KV head empty."""
    cache = paged(torch.tensor([[[40, 0]]]), 16, 32, torch.float32, DEVICE)
    query = prefill_queries(4, 13, 32)
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(2, 13, 32, generator=generator).to(DEVICE) for _ in range(2))
    past = form(query, cache.keys, cache.values, cache.length[0, 0], cache.table[0, 0], SCALE)
    out = merged(*past, *chunk_attention(query, key, value, SCALE))
    for head in range(4):
        old_key, old_value = cache.row(0, 0, head // 2)
        for at in (0, 7, 12):
            keys = torch.cat([old_key, key[head // 2, : at + 1].double()])
            values = torch.cat([old_value, value[head // 2, : at + 1].double()])
            want, _ = attention(query[head, at : at + 1], keys, values, SCALE)
            torch.testing.assert_close(out[head, at].double(), want[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("form", PREFILL_FORMS)
def test_queries_that_lie_further_apart_than_32_bits_count(form) -> None:
    """The third token of a chunk starts 2**31 numbers behind the first, as in long chunks."""
    step = 2**30
    if DEVICE.type == "cpu":  # the kernel gives pages for what is touched alone
        raw = mmap.mmap(-1, (2 * step + 64) * 2, flags=mmap.MAP_PRIVATE | 0x4000)  # NORESERVE
        numbers = torch.frombuffer(raw, dtype=torch.float16)
    else:
        numbers = torch.empty(2 * step + 64, dtype=torch.float16, device=DEVICE)
    query = numbers.as_strided((1, 3, 32), (32, step, 1))
    query.copy_(torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(3)))
    check(form, paged(torch.tensor([[[40]]]), 16, 32, torch.float16, DEVICE), query)


@needs_compiler
@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_prefill_kernel_of_fewer_bits_fits_a_hopper_sm(tokens: int, form: str) -> None:
    """No spills, and as many programs as fit with plain pages."""
    (code,) = compiled("prefill", tokens=tokens, form=form)
    assert code.spills == 0 and code.shared <= (113 if code.warps == 4 else 227) * 1024


@needs_compiler
@pytest.mark.parametrize(("tokens", "gap"), [(16, 0), (512, 0), (512, 136)])
def test_prefill_kernel_fits_a_hopper_sm(tokens: int, gap: int) -> None:
    """Two programs per SM for short chunks, one of 8 warps else; Hopper's own matrix products."""
    (code,) = compiled("prefill", tokens=tokens, gap=gap)
    assert code.spills == 0 and code.shared <= (113 if code.warps == 4 else 227) * 1024
    assert "wgmma.mma_async" in code.ptx and "cp.async.wait_group \t2" in code.ptx


# What takes most. Hopper's matrix units have a path of their own, and so do Blackwell's; the rest
# shares one, and of those sm_89 has the least memory, with sm_86 and sm_120.
@needs_compiler
@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("launch", "settings"),
    [
        ("decode", {}),
        ("prefill", {"tokens": 512}),
        ("window", {"queries": 64, "group": 7}),
        ("write_gated", {}),
    ],
)
def test_heads_of_256_fit_every_card(
    launch: str, settings: dict[str, Any], dtype: str, arch: int
) -> None:
    """``python -m benchmarks.bench.kernel_code`` does the same for all launches and cards."""
    for code in compiled(launch, arch, dim=256, dtype=dtype, **settings):
        assert code.shared <= SHARED_LIMITS[arch] and code.spills == 0


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "dim", "arch"), [("bfloat16", 128, 90), ("bfloat16", 256, 89), ("float32", 128, 89)]
)
def test_as_many_tokens_as_attend_at_once_fit_every_card(dtype: str, dim: int, arch: int) -> None:
    tokens = tokens_at_once(4, getattr(torch, dtype))
    (code,) = compiled("decode", arch, dim=dim, dtype=dtype, tokens=tokens)
    assert tokens == 8 and code.shared <= SHARED_LIMITS[arch] and code.spills <= ONE_SPILL


# The work list: every tile of every row is assigned once, in order, in equal runs.


WORKLIST_FORMS = forms("worklist", "build_worklist")


def expected(entries: list[int], sources: list[int], tile: int, runs: int):
    """Deal tiles one by one; returns the rows' and the runs' columns."""
    tiles = [
        (row, start)
        for row, count in enumerate(entries)
        for start in (range(0, count, tile) or [0])
    ]
    busy = min(runs, len(tiles))
    dealt = [
        tiles[p * len(tiles) // busy : (p + 1) * len(tiles) // busy] if p < busy else []
        for p in range(runs)
    ]
    rows = []
    for row, count in enumerate(entries):
        owners = [p for p, mine in enumerate(dealt) if any(r == row for r, _ in mine)]
        rows.append([count, sources[row], owners[0], len(owners)])
    heads = []
    for mine in dealt:
        row, start = mine[0] if mine else (0, 0)
        heads.append([len(mine), row, start, entries[row], sources[row]] if mine else [0] * 5)
    return rows, heads


def worklist_check(form, length: Tensor, seqs: list[int], tile: int, runs: int) -> WorkList:
    layers, heads = length.shape[1:]
    work = empty_worklist(len(seqs), layers, heads, tile, runs, DEVICE)
    work.rows.fill_(-7)
    work.runs.fill_(-7)
    form(work, torch.tensor(seqs, device=DEVICE), length.to(DEVICE))
    for layer in range(layers):
        where = [(max(s, 0), h, s >= 0) for s in seqs for h in range(heads)]
        entries = [int(length[s, layer, h]) if live else 0 for s, h, live in where]
        sources = [(s * layers + layer) * heads + h for s, h, _ in where]
        rows, columns = expected(entries, sources, tile, runs)
        assert work.rows[layer].tolist() == rows
        assert work.runs[layer, :, :5].tolist() == columns
    return work


@pytest.mark.parametrize("form", WORKLIST_FORMS)
@pytest.mark.parametrize("runs", [1, 5, 70])
def test_tiles_are_assigned_once_and_evenly(form, runs) -> None:
    length = torch.tensor([[[1, 16], [0, 0]], [[33, 400], [15, 17]], [[64, 3], [90, 0]]])
    worklist_check(form, length, [2, 0, 1], 16, runs)


@pytest.mark.parametrize("form", WORKLIST_FORMS)
def test_idle_batch_slots_count_as_empty(form) -> None:
    length = torch.tensor([[[40, 16]], [[33, 40]]])
    work = worklist_check(form, length, [-1, 1, -1], 16, 4)
    assert work.rows[0, :, 0].tolist() == [0, 0, 33, 40, 0, 0]
    worklist_check(form, length, [-1, -1], 16, 9)


@pytest.mark.parametrize("form", WORKLIST_FORMS)
def test_more_rows_than_one_block(form) -> None:
    """300 rows, and runs in four blocks: sums carry over from block to block."""
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, 70, (60, 1, 5), generator=generator)
    worklist_check(form, length, torch.randperm(60, generator=generator).tolist(), 16, 100)


def test_long_rows_do_not_overflow() -> None:
    """Tiles times runs pass 2**31."""
    work = worklist_check(
        build_worklist_reference, torch.full((1, 1, 2), 10_000_000), [0], 16, 2000
    )
    assert int(work.runs[0, :, 0].sum()) == 2 * 625_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 130), min_size=2, max_size=2), min_size=1, max_size=6),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_any_lengths(lengths, tile, runs, random) -> None:
    seqs = [random.choice([-1, random.randrange(len(lengths))]) for _ in range(4)]
    worklist_check(build_worklist_reference, torch.tensor(lengths)[:, None], seqs, tile, runs)


def test_a_tile_is_a_fixed_number_of_bytes() -> None:
    half = {d: tile_entries(d, torch.bfloat16) for d in (32, 64, 96, 128)}
    assert half == {32: 128, 64: 64, 96: 32, 128: 32}
    assert tile_entries(128, torch.float32) == 16


@needs_compiler
def test_worklist_kernel_fits_a_hopper_sm() -> None:
    (code,) = compiled("worklist")
    assert code.spills == 0 and code.registers <= 168 and code.shared <= 4096
