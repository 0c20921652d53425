"""Decode attention over paged ragged rows, torch and Triton, against dense float64 attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.buffers import Partials, WorkList
from mmkv.engine.backends.cuda.kernels.decode_attention import empty_partials
from mmkv.engine.backends.cuda.kernels.worklist import build_worklist_reference, empty_worklist
from mmkv.eval.bench.kernel_code import decode
from tests.support.kernels import (
    DEVICE,
    ONE_SPILL,
    Paged,
    attention,
    beside_a_sink,
    compile_case,
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
@pytest.mark.parametrize(
    ("dim", "dtype"), [(32, torch.float32), (96, torch.float32), (64, DTYPES[-1])], ids=str
)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
def test_decode_kernel_of_fewer_bits_fits_a_hopper_sm(bits, dtype, tmp_path: Path) -> None:
    """Three programs of 4 warps per multiprocessor at least. ptxas spills one register, out and in,
    to stay at 128 with 8 bits.
    """
    code = compile_case(decode(4, bits=bits, dtype=dtype), tmp_path)
    assert code.spills <= ONE_SPILL and code.registers <= 168 and code.shared <= 56 * 1024


@needs_compiler
@pytest.mark.parametrize(("group", "tile", "dim"), [(4, 32, 128), (8, 32, 128), (1, 64, 64)])
def test_decode_kernel_fits_a_hopper_sm(group, tile, dim, tmp_path: Path) -> None:
    """Four programs of 4 warps per multiprocessor: 128 registers, 56 KiB of shared memory.

    Also that two tiles are on their way while one is in use: the loop waits for all but the
    youngest groups of copies.
    """
    code = compile_case(decode(group, tile, dim), tmp_path)
    assert code.spills <= ONE_SPILL and code.registers <= 128 and code.shared <= 56 * 1024
    assert "cp.async.cg.shared.global" in code.ptx
    assert "cp.async.wait_group \t3" in code.ptx
