"""Time each kernel alone, and compare its bytes per second with the measured copy bandwidth.

``python -m benchmarks.bench.kernels`` fills a paged cache with random entries in rows of even or
very uneven length (10x: the longest row holds ten times the mean) and times the public functions of
``engine.backends.cuda.kernels``. Products are those of two layers with tokens of a batch or chunk,
with random weights in each form. Attention runs over enough layers to exceed the GPU's cache. Bytes
are what a kernel must read: keys and values of the live entries, and 8 bytes of retention and
position for a score. The data of append and eviction may stay in the GPU's cache here, while the
weights of a real step flush it; ``benchmarks.bench.decode`` measures their share of a step. Figures
go to ``gpu-kernels.json``. On a CPU the torch references run, which tests this program and not the
kernels.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.harness import (
    attempt,
    device_note,
    matmul_rate,
    on_gpu,
    parser,
    save,
    shown,
    table,
    time_calls,
)
from benchmarks.bench.methods import fill_sequence, pages_for, row_lengths, scatter_pages
from benchmarks.bench.shapes import SHAPES, Shape
from mmkv.engine.backends.cuda.kernels.append import empty_room, make_room
from mmkv.engine.backends.cuda.kernels.buffers import (
    AppendBuffers,
    EvictionBuffers,
    PageTables,
)
from mmkv.engine.backends.cuda.kernels.decode_attention import decode_attention, empty_partials
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction, evict
from mmkv.engine.backends.cuda.kernels.prefill_attention import prefill_attention
from mmkv.engine.backends.cuda.kernels.product import multiply
from mmkv.engine.backends.cuda.kernels.store import store_layer, store_log_beta
from mmkv.engine.backends.cuda.kernels.window_scores import window_scores
from mmkv.engine.backends.cuda.kernels.worklist import (
    build_worklist,
    default_runs,
    empty_worklist,
    tile_entries,
)
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.errors import MmkvError
from mmkv.engine.model.product import INTEGERS, Matrix
from mmkv.engine.policies import make_policy
from mmkv.eval.step import copy_bandwidth, spread

# Products with matrices in a form: as the dtype has them, and as ``--weights`` rounds them.
PRODUCTS = {"product auto": 0, "product int8": 8, "product int4": 4}


@dataclass(frozen=True)
class KernelCase:
    """One state of the cache: ``batch`` sequences of ``mean`` entries per row."""

    kernel: str
    batch: int
    mean: int
    skew: float = 1.0
    layers: int = 0  # 0: the model's own, for attention more if the GPU's cache would hold them
    chunk: int = 0

    def __str__(self) -> str:
        """Return a short name for tables."""
        if self.kernel in PRODUCTS:
            return f"{self.kernel}, {self.chunk or self.batch} tokens"
        rows = "even" if self.skew == 1 else f"{self.skew:g}x skew"
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kernel}, B={self.batch}, {self.mean}/row, {rows}{chunk}"


CASES = [
    KernelCase("attention", 16, 16384, layers=4),
    KernelCase("attention", 1, 32768),
    *(KernelCase("attention", 16, 256, skew) for skew in (1, 10)),
    *(KernelCase("attention", batch, 256, 10) for batch in (1, 4, 64)),
    *(KernelCase("attention", 64, mean, 10) for mean in (64, 1024)),
    *(KernelCase("work list", batch, 256, 10) for batch in (1, 16, 64)),
    *(KernelCase("append", batch, 256, 10) for batch in (1, 16, 64)),
    *(KernelCase("eviction", batch, 256, skew) for batch in (1, 16, 64) for skew in (1, 10)),
    KernelCase("eviction", 16, 1024, 10),
    *(KernelCase("prefill", 1, mean, skew, 36, 2048) for mean, skew in ((256, 10), (1024, 10))),
    KernelCase("prefill", 1, 16384, 1, 4, 2048),
    *(
        KernelCase("window scores", 16, mean, skew)
        for mean, skew in ((256, 1), (256, 10), (1024, 10))
    ),
    *(
        KernelCase(name, batch, 1, layers=2, chunk=chunk)
        for batch, chunk in ((1, 0), (16, 0), (64, 0), (1, 2048))
        for name in PRODUCTS
    ),
]
TINY = [
    KernelCase(kernel, 3, 12, skew, 2, chunk=6 if kernel == "prefill" else 0)
    for kernel in ("attention", "work list", "append", "eviction", "prefill", "window scores")
    for skew in (1, 4)
] + [KernelCase(name, 3, 1, layers=2) for name in PRODUCTS]


SPARE_STEPS = 4  # pages for that many more entries per row
PAST_THE_CACHE = 2**28  # bytes: several times the 60 MB of an H200's L2


class KernelState:
    """A synthetic cache and the buffers of the kernels, for one case."""

    def __init__(
        self, case: KernelCase, shape: Shape, device: torch.device, dtype: torch.dtype, page: int
    ) -> None:
        self.case, self.shape, self.device, self.dtype = case, shape, device, dtype
        self.layers = case.layers or shape.layers
        if case.kernel == "attention" and not case.layers:
            layer_bytes = shape.kv_token_bytes(dtype.itemsize) // shape.layers * case.mean
            enough = math.ceil(PAST_THE_CACHE / (layer_bytes * case.batch))
            self.layers = max(self.layers, min(enough, 4 * shape.layers))
        rows = self.layers * shape.kv_heads
        self.total, seen = case.mean * rows, max(4 * case.mean, 1000)
        pages = pages_for(self.total + SPARE_STEPS * rows, rows, page)
        pool = PagePool(page, shape.head_dim, case.batch * pages, dtype, device)
        self.cache = RaggedCache(pool, self.layers, shape.kv_heads)
        scatter_pages(self.cache)
        for index in range(case.batch):
            length = row_lengths(rows, self.total, seen, case.skew, index)
            fill_sequence(self.cache, length.view(self.layers, -1), seen, index)
        self.cache._widen(int(self.cache.length.max()) // page + 2)
        self.seqs = torch.arange(case.batch, device=device)
        self.seen = torch.full((case.batch,), seen, device=device)
        top = torch.tensor([pool.free_pages], device=device)
        self.rows = PageTables(self.cache.length, self.cache.table, pool._stack, top, page)
        self.entries = int(self.cache.length.sum())

    def normal(self, *size: int) -> Tensor:
        """Draw random numbers in the model's dtype."""
        return torch.empty(*size, device=self.device).normal_().to(self.dtype)

    def row_facts(self) -> dict[str, float]:
        """Describe how uneven the rows are, and what their pages cost."""
        length, page = self.cache.length[self.seqs], self.cache.pool.page_size
        held = int((length + page - 1).div(page, rounding_mode="floor").sum())
        return {
            "mean": float(length.float().mean()),
            "longest": int(length.max()),
            "empty_rows": float((length == 0).float().mean()),
            "physical_over_logical": held * page / self.entries,
        }


# (function, kernel calls in it, bytes that it must move, operations that it must do)
Work = tuple[Callable[[], object], int, float, float]


def attention(state: KernelState) -> Work:
    """Decode attention of one step, all layers."""
    shape, pool, layers = state.shape, state.cache.pool, state.layers
    heads = shape.kv_heads
    tile = tile_entries(shape.head_dim, state.dtype)
    work = empty_worklist(
        state.case.batch, layers, heads, tile, default_runs(state.device), state.device
    )
    build_worklist(work, state.seqs, state.cache.length)
    partials = empty_partials(work, shape.heads // heads, shape.head_dim)
    queries = state.normal(layers, state.case.batch, shape.heads, shape.head_dim)
    out = torch.empty_like(queries[0])

    def call() -> None:
        for layer in range(layers):
            decode_attention(
                queries[layer],
                pool.keys,
                pool.values,
                state.cache.table,
                work,
                layer,
                partials,
                shape.head_dim**-0.5,
                out,
            )

    return call, layers, state.entries * 2 * shape.head_dim * state.dtype.itemsize, 0


def work_list(state: KernelState) -> Work:
    """Build the work list of one step, for all layers."""
    shape = state.shape
    tile = tile_entries(shape.head_dim, state.dtype)
    work = empty_worklist(
        state.case.batch,
        state.layers,
        shape.kv_heads,
        tile,
        default_runs(state.device),
        state.device,
    )
    written = work.rows.nbytes + work.runs.nbytes

    def call() -> None:
        build_worklist(work, state.seqs, state.cache.length)

    return call, 1, state.cache.length[state.seqs].nbytes + written, 0


class KernelStep:
    """Append and eviction of one step on a synthetic cache, each time from the same state.

    Without restoring, the cache would drift: rows with high scores grow, others empty.
    """

    def __init__(self, state: KernelState, evicting: EvictionBuffers | None) -> None:
        self.state, self.evicting = state, evicting
        rows, pool = state.rows, state.cache.pool
        self.room: AppendBuffers = empty_room(state.case.batch, rows)
        self.now = [rows.length, rows.top, rows.stack, pool.position, pool.log_beta]
        self.saved = [tensor.clone() for tensor in self.now]
        self.allowed = torch.full_like(state.seqs, state.total)
        self.rates = -torch.rand(self.room.slots.shape, device=state.device) * 3
        self.policy = make_policy("dbtrimkv")

    def append(self) -> None:
        """Append an entry to every row, with a position and a retention of its own."""
        state, pool = self.state, self.state.cache.pool
        slots = make_room(self.room, state.rows, state.seqs)
        position = state.seen[:, None, None].expand_as(slots).int()
        pool.position.view(-1).scatter_(0, slots.flatten(), position.flatten())
        pool.log_beta.view(-1).scatter_(0, slots.flatten(), self.rates.flatten())

    def take_back(self) -> None:
        """Return to the first state, but for keys and values."""
        for tensor, saved in zip(self.now, self.saved, strict=True):
            tensor.copy_(saved)

    def once(self) -> None:
        """Append, evict as many if this step evicts, take everything back."""
        self.append()
        if self.evicting is not None:
            state = self.state
            evict(
                self.evicting,
                self.policy,
                state.rows,
                state.cache.pool,
                state.seqs,
                state.seen + 1,
                self.allowed,
            )
        self.take_back()


def append(state: KernelState) -> Work:
    """Make room in every row; per layer: q/k norm, rope, store; the gates' readout."""
    shape, heads = state.shape, state.shape.kv_heads
    batch, dim = state.case.batch, state.shape.head_dim
    step = KernelStep(state, None)
    wide = state.normal(state.layers, batch, (shape.heads + 2 * heads) * dim)
    norm = state.normal(shape.heads + heads, dim) if shape.kind == "qwen3" else None
    rope = state.normal(batch, dim), state.normal(batch, dim)
    trunk = state.normal(state.layers, batch, shape.gate)
    weight = state.normal(state.layers, heads, shape.gate).float()
    bias = torch.zeros(state.layers, heads, device=state.device)

    def call() -> None:
        made = make_room(step.room, state.rows, state.seqs)
        slots = made.transpose(0, 1).contiguous()
        for layer in range(state.layers):
            store_layer(
                wide[layer],
                rope,
                norm,
                shape.eps,
                state.cache.pool,
                slots[layer],
                state.seen,
            )
        store_log_beta(trunk, weight, bias, state.cache.pool.log_beta, made)
        for tensor, saved in zip(step.now[:2], step.saved, strict=False):
            tensor.copy_(saved)  # lengths and free pages

    element = 2 * dim * state.dtype.itemsize + 9
    moved = wide.nbytes + state.layers * batch * heads * element
    return call, 1, moved, 0


def eviction(state: KernelState, device: torch.device, rounds: int) -> list[float]:
    """Time one step's eviction: append and eviction, less append and undoing."""
    undone = KernelStep(state, None)
    floor = statistics.median(time_calls(undone.once, device, rounds))
    step = KernelStep(state, empty_eviction(state.case.batch, state.rows))
    found = [seconds - floor for seconds in time_calls(step.once, device, rounds)]
    dropped = step.evicting.dropped.tolist() if step.evicting else []
    expected = state.layers * state.shape.kv_heads
    if dropped != [expected] * state.case.batch:
        raise RuntimeError(f"evicted {dropped[:4]}, expected {expected} a sequence")
    return found


def prefill(state: KernelState) -> Work:
    """Attend from a chunk to the entries retained before it, layer by layer."""
    shape, count = state.shape, state.case.chunk
    query = state.normal(count, shape.heads, shape.head_dim).transpose(0, 1)
    cache, scale = state.cache, state.shape.head_dim**-0.5

    def call() -> None:
        for layer in range(state.layers):
            prefill_attention(
                query,
                cache.pool.keys,
                cache.pool.values,
                cache.length[0, layer],
                cache.table[0, layer],
                scale,
            )

    element = 2 * shape.head_dim * state.dtype.itemsize
    moved = state.entries * element + state.layers * 2 * query.nbytes
    group = shape.heads // shape.kv_heads
    return call, state.layers, moved, 4.0 * state.entries * group * count * shape.head_dim


def scores(state: KernelState, window: int = 16) -> Work:
    """Score the attention of the last ``window`` queries to every entry, all layers."""
    shape, cache = state.shape, state.cache
    query = state.normal(state.case.batch, state.layers, shape.heads, window, shape.head_dim)
    at = state.seen[:, None] - 1 - torch.arange(window, device=state.device)
    size = (*cache.table.shape[:3], cache.table.shape[3] * cache.pool.page_size)
    out = torch.zeros(size, device=state.device)

    def call() -> None:
        window_scores(
            query,
            at,
            cache.pool.keys,
            cache.pool.position,
            cache.length,
            cache.table,
            state.seqs,
            shape.head_dim**-0.5,
            out,
        )

    moved = state.entries * (shape.head_dim * state.dtype.itemsize + 8) + query.nbytes
    return call, 1, moved, 0


def product(state: KernelState) -> Work:
    """Multiply by the four matrices of each layer."""
    shape, tokens = state.shape, state.case.chunk or state.case.batch
    inner, mixed = shape.inner, shape.heads * shape.head_dim
    qkv = mixed + 2 * shape.kv_heads * shape.head_dim
    sizes = [(qkv, shape.hidden), (shape.hidden, mixed)]
    sizes += [(2 * inner, shape.hidden), (shape.hidden, inner)]
    matrices = [random_matrix(state, *size) for _ in range(state.layers) for size in sizes]
    inputs = {width: state.normal(tokens, width) for _, width in sizes}

    def call() -> None:
        for matrix in matrices:
            multiply(inputs[matrix.shape[1]], matrix)

    numbers = sum(matrix.numel() for matrix in matrices)
    through = sum(tokens * sum(matrix.shape) * state.dtype.itemsize for matrix in matrices)
    moved = sum(matrix.nbytes for matrix in matrices) + through
    return call, len(matrices), moved, 2.0 * tokens * numbers if state.case.chunk else 0


def random_matrix(state: KernelState, rows: int, width: int) -> Matrix:
    """Make a matrix in the form of the case; random codes take less time than rounding does."""
    bits = PRODUCTS[state.case.kernel]
    if not bits:
        return state.normal(rows, width)
    kind = INTEGERS[bits]
    codes, scales = kind.filled(rows, width, lambda *_: None)
    codes.random_(0, 16 if bits == 4 else 128)
    return kind(codes, scales.fill_(1e-4), (rows, width), 0.0).to(state.device)


PREPARE: dict[str, Callable[[KernelState], Work]] = {
    "attention": attention,
    "work list": work_list,
    "append": append,
    "prefill": prefill,
    "window scores": scores,
    **dict.fromkeys(PRODUCTS, product),
}


@torch.inference_mode()
def measure(
    case: KernelCase,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    bandwidth: float,
    matmul: float,
    page: int = 16,
) -> dict[str, Any]:
    """Time one case.

    Returns:
        seconds of a step's share (all layers of the case), microseconds of one launch, bytes and
        the fraction of ``bandwidth`` they mean; for prefill also the fraction of ``matmul``.
    """
    state = KernelState(case, shape, device, dtype, page)
    found: dict[str, Any] = {"case": str(case), **asdict(case), "layers": state.layers}
    if case.kernel == "eviction":
        times, calls, flops = eviction(state, device, rounds), 1, 0.0
        moved: float = state.entries * 8
    else:
        call, calls, moved, flops = PREPARE[case.kernel](state)
        times = time_calls(call, device, rounds)
    seconds = statistics.median(times)
    found |= {
        "seconds": spread(times),
        "microseconds_per_call": seconds * 1e6 / calls,
        "bytes": moved,
        "of_copy_bandwidth": moved / seconds / bandwidth,
        "rows": state.row_facts(),
    }
    if flops:
        found["of_matmul_rate"] = flops / seconds / matmul
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 if a case failed."""
    options = parser("bench.kernels", __doc__)
    options.add_argument("--shape", default="qwen3-vl-8b", choices=SHAPES)
    options.add_argument("--cases", default="all", choices=["all", "tiny"])
    args = options.parse_args(arguments)
    try:
        device, dtype = on_gpu(args)
    except MmkvError as error:
        options.error(str(error))
    bandwidth = copy_bandwidth(device)
    matmul = matmul_rate(device, dtype, 8192 if device.type == "cuda" else 256)
    machine = {"copy_bandwidth": bandwidth, "matmul_rate": matmul, "note": device_note(device)}
    print(f"copy: {bandwidth / 1e9:,.0f} GB/s; {machine['note']}")
    found: list[dict[str, Any]] = []
    where = SHAPES[args.shape], device, dtype, args.rounds, bandwidth, matmul
    for case in CASES if args.cases == "all" else TINY:
        failed: dict[str, Any] = {}
        one = attempt(failed, str(case), partial(measure, case, *where))
        found.append(one or {"case": str(case), **asdict(case), **failed[str(case)]})
        path = save(args, "gpu-kernels", {**machine, "cases": found})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    rows = []
    for r in found:
        if "failed" in r:
            rows.append([r["case"], "failed", r["failed"], ""])
            continue
        rate = f"{r['of_matmul_rate']:.0%}" if "of_matmul_rate" in r else ""
        us = shown(r["seconds"], ",.1f", 1e6)
        rows.append([r["case"], us, f"{r['of_copy_bandwidth']:.1%}", rate])
    names = ("kernel and state", "us", "of copy bandwidth", "of matmul")
    table(f"Kernels, {args.shape}", names, rows)
    print(f"in {path}")
    return int(any("failed" in r for r in found))


if __name__ == "__main__":
    sys.exit(main())
