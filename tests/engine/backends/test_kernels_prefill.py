"""Attention of a prefill chunk to retained rows, torch and Triton, against dense float64."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.torch.attention import chunk_attention, merge
from mmkv.eval.bench.kernel_code import SHARED_LIMITS, prefill, window
from tests.support.kernels import (
    DEVICE,
    Paged,
    attention,
    beside_a_sink,
    compile_case,
    forms,
    needs_compiler,
    paged,
    rounded,
)

FORMS = forms("prefill_attention", "prefill_attention")
SCALE = 0.2


def queries(heads: int, count: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 16, 45])
@pytest.mark.parametrize("lengths", [[33, 30], [190, 1], [0, 17], [32, 64], [0, 0]], ids=str)
def test_equals_dense_attention(form, count, lengths) -> None:
    cache = paged(torch.tensor([[lengths]]), 16, 32, torch.float32, DEVICE)
    check(form, cache, queries(8, count, 32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dim", "group", "page"), [(32, 8, 8), (64, 1, 64), (96, 3, 16), (128, 7, 32), (128, 4, 16)]
)
def test_shapes(form, dim, group, page) -> None:
    """The second sequence's second layer; heads, layers and sequences must not be mixed up."""
    length = torch.tensor([[[3, 20], [9, 4]], [[17, 2], [77, 40]]])
    cache = paged(length, page, dim, torch.float32, DEVICE)
    check(form, cache, queries(2 * group, 11, dim), seq=1, layer=1)


# bfloat16 only where a GPU is: the interpreter's arithmetic in it is wrong.
DTYPES = [torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [9, 40])
def test_half_precision(form, dtype, count) -> None:
    """Both block sizes of half precision: up to 64 queries per KV head, and more."""
    cache = paged(torch.tensor([[[150, 9]]]), 16, 64, dtype, DEVICE)
    check(form, cache, queries(8, count, 64, dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 8), (8, 4), (4, 4), (16, 16), (4, 8)])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(32, torch.float32), (96, torch.float32), (64, DTYPES[-1])], ids=str
)
def test_fewer_bits(form, key_bits, value_bits, dim, dtype) -> None:
    cache = paged(torch.tensor([[[70, 0]]]), 16, dim, dtype, DEVICE)
    check(form, rounded(cache, key_bits, value_bits), queries(6, 11, dim, dtype), wider=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_small_values_beside_a_sink_keep_their_digits_in_float16(form, bits) -> None:
    cache, query = beside_a_sink(bits)
    out, _ = form(query, cache.keys, cache.values, cache.length[0, 0], cache.table[0, 0], SCALE)
    want, _ = attention(query[0], *cache.row(0, 0, 0), SCALE)
    assert (out[0].double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("form", FORMS)
def test_large_logits(form) -> None:
    cache = paged(torch.tensor([[[70]]]), 16, 32, torch.float32, DEVICE)
    query = queries(2, 5, 32) * 100
    out, lse = form(query, cache.keys, cache.values, cache.length[0, 0], cache.table[0, 0], SCALE)
    want, logs = attention(query, *cache.row(0, 0, 0), SCALE)
    assert (out.double() - want).abs().max() <= 2e-4  # logits of 500, rounded to 3e-5
    torch.testing.assert_close(lse.double(), logs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_merges_with_the_chunk_itself(form) -> None:
    """Retained rows and the causal chunk together, one KV head empty."""
    cache = paged(torch.tensor([[[40, 0]]]), 16, 32, torch.float32, DEVICE)
    query = queries(4, 13, 32)
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(2, 13, 32, generator=generator).to(DEVICE) for _ in range(2))
    past = form(query, cache.keys, cache.values, cache.length[0, 0], cache.table[0, 0], SCALE)
    out, _ = merge(past, chunk_attention(query, key, value, SCALE))
    for head in range(4):
        old_key, old_value = cache.row(0, 0, head // 2)
        for at in (0, 7, 12):
            keys = torch.cat([old_key, key[head // 2, : at + 1].double()])
            values = torch.cat([old_value, value[head // 2, : at + 1].double()])
            want, _ = attention(query[head, at : at + 1], keys, values, SCALE)
            torch.testing.assert_close(out[head, at].double(), want[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("form", FORMS)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
@pytest.mark.parametrize("queries", [64, 2048])
def test_kernel_of_fewer_bits_fits_a_hopper_sm(queries, bits, dtype, tmp_path: Path) -> None:
    """No spills (Triton 3.8: 68 bytes), and as many programs as fit with plain pages."""
    case = prefill(queries, bits, dtype)
    code = compile_case(case, tmp_path)
    assert code.spills <= 68 and code.registers <= 255
    assert code.shared <= (113 if case.num_warps == 4 else 227) * 1024


@needs_compiler
@pytest.mark.parametrize("queries", [64, 2048])
def test_kernel_fits_a_hopper_sm(queries, tmp_path: Path) -> None:
    """Two programs per SM for short chunks, one of 8 warps else; Hopper's own matrix products."""
    case = prefill(queries)
    code = compile_case(case, tmp_path)
    assert code.spills == 0 and code.registers <= (256 if case.num_warps == 4 else 192)
    assert code.shared <= (113 if case.num_warps == 4 else 227) * 1024
    assert "wgmma.mma_async" in code.ptx and "cp.async.wait_group \t2" in code.ptx


# What takes most: Hopper's and Blackwell's matrix units have paths of their own, the rest shares
# one, and of those sm_89 has the least memory, with sm_86 and sm_120.
@needs_compiler
@pytest.mark.parametrize("arch", [89, 90, 100])
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (window, ("lse", 448, torch.bfloat16)),
        (window, ("probability", 448, torch.bfloat16)),
        (prefill, (2048, (0, 0), torch.float32)),
    ],
    ids=["lse", "probability", "prefill"],
)
def test_the_largest_programs_fit_every_card(make, arguments, arch, tmp_path: Path) -> None:
    """SnapKV's window of 64 on Qwen2.5-VL-7B: 448 queries a KV head; and float32.

    ``python -m mmkv.eval.bench.kernel_code`` does the same for all kernels and cards.
    """
    assert compile_case(make(*arguments), tmp_path, arch).shared <= SHARED_LIMITS[arch]
