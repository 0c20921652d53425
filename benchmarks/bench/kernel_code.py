"""What Triton's compiler makes of the kernels: registers, spills, shared memory, for every card.

``python -m benchmarks.bench.kernel_code`` calls the launch functions with the head sizes, dtypes
and stored forms that there are, compiles each distinct launch for every architecture, and writes
``benchmarks/results/kernel-code.json``: for each kernel and card the most that a launch takes, and
the launches that spill or do not fit. It needs no GPU, for the compiler and ptxas are in Triton's
wheel, and an hour of a core. ``--only decode --arch 90`` prints a part of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.recorded_launches import Code, Variant, compiled, recording
from mmkv.engine.backends.cuda.kernels.append import empty_room
from mmkv.engine.backends.cuda.kernels.buffers import (
    EvictionLimits,
    NewestTokens,
    PageTables,
)
from mmkv.engine.backends.cuda.kernels.decode_attention import empty_partials
from mmkv.engine.backends.cuda.kernels.evict import empty_drop, empty_eviction
from mmkv.engine.backends.cuda.kernels.sample import SamplingColumns
from mmkv.engine.backends.cuda.kernels.worklist import empty_worklist, tile_entries
from mmkv.engine.backends.cuda.kernels.write_gated_attention import GatedRows
from mmkv.engine.budget import Interval
from mmkv.engine.cache import PagePool
from mmkv.engine.cache.forms import FORMS
from mmkv.engine.model.product import INTEGERS
from mmkv.engine.policies import make_policy
from mmkv.training.measure.record import RESULTS, write_results

# Bytes of shared memory that a program may take: CUDA C++ Programming Guide, technical
# specifications per compute capability, less the 1 KiB that the system keeps.
SHARED_LIMITS = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
DIMS = (64, 72, 80, 96, 128, 256)  # of the families' heads
DTYPES = ("bfloat16", "float16", "float32")
STORED = ("auto", "int8", "k8v4", "int4")
LAYERS, HEADS, PAGE = 36, 8, 16  # of an 8B model
NUMBERS = ("registers", "spills", "shared")
RUNS = 4 * 132  # programs of decode attention on an H100


def _integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _numbers(dtype: str, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _cache(
    dim: int, form: str, dtype: str, states: int = 0, batch: int = 2
) -> tuple[PagePool, PageTables]:
    kind = getattr(torch, dtype)
    pool = PagePool(PAGE, dim, 8, kind, "cpu", None, states, FORMS[form])
    length = _integers(max(batch, 4), LAYERS, HEADS)
    return pool, PageTables(length, _integers(*length.shape, 64), pool._stack, _integers(1), PAGE)


def _with_gap(stored: Any, gap: int) -> Any:
    """Put ``gap`` numbers between one entry and the next, as vLLM's pages have them."""
    return torch.nn.functional.pad(stored, (0, gap))[..., : stored.shape[-1]] if gap else stored


def decode(
    group: int = 4,
    dim: int = 128,
    form: str = "auto",
    dtype: str = "bfloat16",
    window: int = 0,
    gap: int = 0,
    lse: bool = False,
    tokens: int = 1,
) -> None:
    """Queries of ``group`` heads a KV head and ``tokens``, which see ``window`` tokens, or all."""
    from mmkv.engine.backends.cuda.kernels import decode_attention_triton as ours

    pool, rows = _cache(dim, form, dtype)
    tile = tile_entries(dim, pool.dtype)
    work = empty_worklist(2, LAYERS, HEADS, tile, RUNS, "cpu")
    query = _numbers(dtype, 2 * tokens, HEADS * group, dim)
    ours.decode_attention(
        query,
        _with_gap(pool.stored_keys, gap),
        _with_gap(pool.stored_values, gap),
        rows.table,
        work,
        0,
        empty_partials(work, tokens * group, dim),
        dim**-0.5,
        torch.empty_like(query),
        torch.zeros(query.shape[:2]) if lse else None,
        NewestTokens(window, pool.position, _integers(2 * tokens)) if window else None,
        _integers(2 * tokens) if tokens > 1 else None,
    )


def prefill(
    tokens: int,
    group: int = 4,
    dim: int = 128,
    form: str = "auto",
    dtype: str = "bfloat16",
    gap: int = 0,
) -> None:
    """A chunk's queries, to what was retained before it."""
    from mmkv.engine.backends.cuda.kernels import prefill_attention_triton as ours

    pool, rows = _cache(dim, form, dtype)
    ours.prefill_attention(
        _numbers(dtype, tokens, (group + 2) * HEADS, dim)[:, : group * HEADS].transpose(0, 1),
        _with_gap(pool.stored_keys, gap),
        _with_gap(pool.stored_values, gap),
        rows.length[0, 0],
        rows.table[0, 0],
        dim**-0.5,
    )


def write_gated(group: int = 4, dim: int = 128, dtype: str = "bfloat16") -> None:
    """A chunk of a prompt under write gates."""
    from mmkv.engine.backends.cuda.kernels import write_gated_attention_triton as ours

    pool, _ = _cache(dim, "auto", dtype)
    at = torch.arange(512)
    rows = GatedRows(_integers(HEADS, 512), at.repeat(HEADS, 1), torch.zeros(HEADS, 512))
    query = _numbers(dtype, 128, HEADS, group, dim).permute(1, 2, 0, 3)
    keys, values = pool.keys.flatten(0, 1), pool.values.flatten(0, 1)
    ours.write_gated_attention(query, at[-128:], keys, values, rows, 64, 0.5, dim**-0.5)


def store(
    group: int = 4,
    dim: int = 128,
    form: str = "auto",
    dtype: str = "bfloat16",
    norm: bool = True,
) -> None:
    """A new entry."""
    from mmkv.engine.backends.cuda.kernels import store_triton as ours

    pool, _ = _cache(dim, form, dtype)
    angles = _numbers(dtype, 2, dim), _numbers(dtype, 2, dim)
    gain = _numbers(dtype, (group + 1) * HEADS, dim) if norm else None
    fused = _numbers(dtype, 2, (group + 2) * HEADS * dim)
    ours.store_layer(fused, angles, gain, 1e-6, pool, _integers(2, HEADS), _integers(2))


def gates(width: int = 512, dtype: str = "bfloat16") -> None:
    """The rates of a step's entries in all layers."""
    from mmkv.engine.backends.cuda.kernels import store_triton as ours

    pool, _ = _cache(128, "auto", dtype)
    readout = torch.zeros(LAYERS, HEADS, width), torch.zeros(LAYERS, HEADS)
    trunk = _numbers(dtype, LAYERS, 2, width)
    ours.store_log_beta(trunk, *readout, pool.log_beta, _integers(2, LAYERS, HEADS))


def window(queries: int, group: int = 4, dim: int = 128, dtype: str = "bfloat16") -> None:
    """Scores of all entries by the last ``queries`` of each head."""
    from mmkv.engine.backends.cuda.kernels import window_scores_triton as ours

    pool, rows = _cache(dim, "auto", dtype)
    query = _numbers(dtype, 4, LAYERS, HEADS * group, queries, dim)
    where = rows.length, rows.table, _integers(2)
    at = _integers(4, queries)
    ours.window_scores(query, at, pool.keys, pool.position, *where, dim**-0.5)


def append(batch: int = 2) -> None:
    """Room for a new entry in all rows of ``batch`` sequences."""
    from mmkv.engine.backends.cuda.kernels import append_triton as ours

    _, rows = _cache(128, "auto", "bfloat16", batch=batch)
    ours.make_room(empty_room(batch, rows), rows, _integers(batch))


def worklist(batch: int = 2) -> None:
    """The work list of decode attention."""
    from mmkv.engine.backends.cuda.kernels import worklist_triton as ours

    _, rows = _cache(128, "auto", "bfloat16", batch=batch)
    work = empty_worklist(batch, LAYERS, HEADS, 32, RUNS, "cpu")
    ours.build_worklist(work, _integers(batch), rows.length)


def evict(policy: str, batch: int = 2, every: int = 1, **of_policy: Any) -> None:
    """An eviction to a budget, by a policy's own scores."""
    from mmkv.engine.backends.cuda.kernels import evict_triton as ours

    chosen = make_policy(policy, **of_policy)
    pool, rows = _cache(128, "auto", "bfloat16", batch=batch)
    work = empty_eviction(batch, rows, 2**17)
    seqs, seen, allowed = (_integers(batch) for _ in range(3))
    ours.evict(work, chosen, rows, pool, seqs, seen, allowed, Interval(every))


def evict_to_shares(policy: str, groups: int = 1, floors: bool = False, batch: int = 2) -> None:
    """An eviction to what each group of rows may keep, by scores that torch made where it must."""
    from mmkv.engine.backends.cuda.kernels import evict_triton as ours
    from mmkv.engine.backends.cuda.kernels.evict import scores_in_torch

    chosen, count = make_policy(policy), LAYERS * HEADS
    pool, rows = _cache(128, "auto", "bfloat16", chosen.scoring.needs.state, batch)
    work = empty_eviction(batch, rows, 2**17, groups)
    limits = EvictionLimits(
        _integers(batch, groups),
        _integers(batch, count) if floors else None,
        _integers(batch),
        _integers(batch),
    )
    scores = torch.zeros(batch, count, 512) if scores_in_torch(chosen) else None
    seqs, seen = (_integers(batch) for _ in range(2))
    ours.evict_to_shares(work, chosen, rows, pool, seqs, seen, limits, scores)


def drop(dim: int = 128, form: str = "auto", dtype: str = "bfloat16", batch: int = 2) -> None:
    """Drop entries that are known: what moves entries of every form."""
    from mmkv.engine.backends.cuda.kernels import evict_triton as ours

    pool, rows = _cache(dim, form, dtype, batch=batch)
    victims = torch.zeros(batch, LAYERS * HEADS, 512, dtype=torch.bool)
    work = empty_drop(batch, rows, 512)
    ours.drop(work, rows, pool, _integers(batch), victims, _integers(batch))


def norm(width: int, dtype: str = "bfloat16", add: bool = True) -> None:
    """RMSNorm of a step, with or without the residual sum before it."""
    from mmkv.engine.backends.cuda.kernels import pointwise_triton as ours

    x = _numbers(dtype, 2, width)
    ours.rms_norm(x, torch.zeros_like(x) if add else None, _numbers(dtype, width), 1e-6)


def gated(width: int, dtype: str = "bfloat16", activation: str = "silu") -> None:
    """The gated activation of an MLP."""
    from mmkv.engine.backends.cuda.kernels import pointwise_triton as ours

    ours.gated(_numbers(dtype, 2, 2 * width), activation)


def turned(dim: int = 128, dtype: str = "bfloat16", norm: bool = True) -> None:
    """Norm and RoPE of a chunk's heads."""
    from mmkv.engine.backends.cuda.kernels import pointwise_triton as ours

    heads, angles = _numbers(dtype, 64, 40, dim), _numbers(dtype, 64, dim)
    ours.turned(heads, _numbers(dtype, 40, dim) if norm else None, 1e-6, (angles, angles))


def merged(dim: int = 128, dtype: str = "bfloat16") -> None:
    """Attention to a chunk and to what was before it, together."""
    from mmkv.engine.backends.cuda.kernels import pointwise_triton as ours

    part = _numbers(dtype, 32, 64, dim), torch.zeros(32, 64)
    ours.merged(*part, *part)


def draw(vocab: int = 151_936) -> None:
    """A token's noise and its choice."""
    from mmkv.engine.backends.cuda.kernels import sample_triton as ours

    noise = ours.uniform(_integers(2), _integers(2))
    ours.sample(torch.zeros(2, vocab), SamplingColumns.idle(2, torch.device("cpu")), noise)


def experts(tokens: int, dtype: str = "bfloat16") -> None:
    """Eight of 128 experts for each token."""
    from mmkv.engine.backends.cuda.kernels import experts_triton as ours

    x, chosen = _numbers(dtype, tokens, 256), _integers(tokens, 8)
    ours.experts(x, chosen, _numbers(dtype, 128, 192, 256), _numbers(dtype, 128, 256, 96))


def product(bits: int, tokens: int, dtype: str = "bfloat16") -> None:
    """States by a matrix [4096, 4096] in 8 or 4 bits, or by bfloat16 rows with 16."""
    from mmkv.engine.backends.cuda.kernels import product_triton as ours

    x, bias = _numbers(dtype, tokens, 4096), _numbers(dtype, 4096)
    if bits == 16:
        ours.multiply_rounded(x, _numbers("bfloat16", 4096, 4096), bias)
    else:
        kind = INTEGERS[bits]
        codes, scales = kind.filled(4096, 4096, lambda *_: None)
        ours.multiply(x, kind(codes, scales, (4096, 4096), 0.0), bias)


def delta(dtype: str = "bfloat16", heads: int = 32, dim: int = 128) -> None:
    """A step and a chunk of linear layers, and their convolutions."""
    from mmkv.engine.backends.cuda.kernels import delta_triton as ours

    for tokens in (2, 64):
        q, k = (_numbers(dtype, tokens, heads // 2, dim) for _ in range(2))
        v, rate = _numbers(dtype, tokens, heads, dim), torch.zeros(tokens, heads)
        x, taps = _numbers(dtype, tokens, 8192), _numbers(dtype, 8192, 4)
        if tokens == 2:
            ours.delta_step(q, k, v, rate, rate, torch.zeros(4, heads, dim, dim), _integers(2))
            ours.conv_step(x, taps, _numbers(dtype, 4, 8192, 3), _integers(2))
        else:
            ours.delta_chunk(q, k, v, rate, rate, torch.zeros(heads, dim, dim))
            ours.causal_conv(x, taps, _numbers(dtype, 8192, 3))


def capacity(packed: bool) -> None:
    """What the gates of training retain, and its gradient; of one document or of several."""
    from mmkv.training import capacity_triton as ours

    log_beta = torch.zeros(4, 500, requires_grad=True)
    ours.retained_counts(log_beta, _integers(500) if packed else None).sum().backward()


LAUNCHES = {
    made.__name__: made
    for made in (
        *(decode, prefill, write_gated, store, window, append, worklist, evict, evict_to_shares),
        *(drop, norm, gated, turned, merged, draw, experts, gates, product, delta, capacity),
    )
}


@dataclass(frozen=True)
class Case:
    """A call of one of ``LAUNCHES``."""

    launch: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.launch, *(f"{name}={at}" for name, at in self.settings.items())])

    def variants(self) -> list[Variant]:
        """Return what the call launches, each once."""
        with recording() as seen:
            LAUNCHES[self.launch](**self.settings)
        return list(seen)


def cases() -> Iterator[Case]:
    """Return what the table holds: every kernel with all that its code depends on."""

    def case(launch: str, **settings: Any) -> Case:
        return Case(launch, settings)

    for dim, form, dtype in every(DIMS, STORED, DTYPES):
        if form != "auto" and dtype != "bfloat16" and dim not in (128, 256):
            continue  # the hardest to fit say enough
        stored = {"dim": dim, "form": form, "dtype": dtype}
        yield case("decode", **stored)
        for tokens in (16, 2048):
            yield case("prefill", tokens=tokens, **stored)
        yield case("store", **stored)
        yield case("drop", **stored)
    for dim, dtype in every(DIMS, DTYPES):
        yield case("turned", dim=dim, dtype=dtype)
        yield case("merged", dim=dim, dtype=dtype)
        yield case("write_gated", dim=dim, dtype=dtype)
        for queries, group in ((16, 4), (64, 7)):
            yield case("window", queries=queries, group=group, dim=dim, dtype=dtype)
    for group in (1, 8, 20):
        yield case("decode", group=group)
        yield case("store", group=group)
    yield case("decode", window=1024, dim=256, group=2)
    yield case("decode", gap=136, lse=True)
    yield case("decode", tokens=8)
    yield case("prefill", tokens=2048, gap=136)
    yield case("store", norm=False)
    yield case("turned", norm=False)
    yield case("draw")
    for batch in (1, 16, 64):
        yield case("append", batch=batch)
        yield case("worklist", batch=batch)
    for policy in ("dbtrimkv", "trimkv", "streamingllm", "balanced"):
        yield case("evict", policy=policy, every=16)
    for ahead in (2, 128, float("inf")):
        yield case("evict", policy="dbtrimkv", lookahead=ahead)
    for policy, groups, floors in (
        ("h2o", LAYERS * HEADS, False),
        ("snapkv", 1, True),
        ("snapkv", LAYERS, True),
    ):
        yield case("evict_to_shares", policy=policy, groups=groups, floors=floors)
    for dtype in DTYPES:
        for width in (576, 2560, 4096, 8192):
            yield case("norm", width=width, dtype=dtype)
        yield case("norm", width=4096, dtype=dtype, add=False)
        for activation in ("silu", "gelu_tanh"):
            yield case("gated", width=12288, dtype=dtype, activation=activation)
        for bits, tokens in every((8, 4, *((16,) if dtype == "float32" else ())), (1, 64, 2048)):
            yield case("product", bits=bits, tokens=tokens, dtype=dtype)
        for tokens in (16, 4096):
            yield case("experts", tokens=tokens, dtype=dtype)
        yield case("gates", dtype=dtype)
        yield case("delta", dtype=dtype)
    for packed in (False, True):
        yield case("capacity", packed=packed)


@dataclass(frozen=True)
class Found:
    """What an architecture's compiler made of a launch of a case."""

    case: str
    arch: int
    code: Code

    @property
    def place(self) -> list[str]:
        return [self.case, self.code.kernel, f"sm_{self.arch}"]

    @property
    def fits(self) -> bool:
        return self.code.shared <= SHARED_LIMITS[self.arch]


def measured(wanted: Iterable[Case], architectures: Sequence[int]) -> Iterator[Found]:
    """Compile each distinct launch of some cases once for each architecture."""
    known: set[Variant] = set()
    for case in wanted:
        for variant in case.variants():
            if variant not in known:
                known.add(variant)
                for arch in architectures:
                    yield Found(case.name, arch, replace(compiled(variant, arch), ptx=""))


def most(found: Sequence[Found]) -> list[list[str]]:
    """Return for each kernel and card what a launch takes at most, the heading first."""
    rows = [["kernel", "card", "launches", *NUMBERS]]
    for kernel, arch in sorted({(one.code.kernel, one.arch) for one in found}):
        codes = [one.code for one in found if (one.code.kernel, one.arch) == (kernel, arch)]
        numbers = (max(getattr(code, name) for code in codes) for name in NUMBERS)
        rows.append([kernel, f"sm_{arch}", *(f"{number:,}" for number in (len(codes), *numbers))])
    return rows


def spilled(found: Sequence[Found]) -> list[list[Any]]:
    """Return the launches that spill: case, kernel, and bytes for each of ``SHARED_LIMITS``."""
    launches: dict[tuple[str, str], list[int]] = {}
    for one in found:
        launches.setdefault((one.case, one.code.kernel), []).append(one.code.spills)
    return [[*launch, *spills] for launch, spills in launches.items() if any(spills)]


def main() -> None:
    """Run the command of the module docstring."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED_LIMITS))
    parser.add_argument("--only", choices=LAUNCHES)
    args = parser.parse_args()
    wanted = [case for case in cases() if args.only in (None, case.launch)]
    found = []
    for one in measured(wanted, args.arch):
        found.append(one)
        numbers = ", ".join(f"{getattr(one.code, name):,} {name}" for name in NUMBERS)
        print(*one.place, numbers, "" if one.fits else "TOO MUCH", flush=True)
    if args.only is None and args.arch == list(SHARED_LIMITS):
        write_results(
            RESULTS / "kernel-code.json",
            {"triton": triton.__version__, "shared_limits": SHARED_LIMITS},
            {
                "spilled": spilled(found),
                "too_large": [[*one.place, one.code.shared] for one in found if not one.fits],
            },
            {"kernel-code": most(found)},
        )


if __name__ == "__main__":
    main()
