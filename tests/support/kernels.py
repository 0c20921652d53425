"""Kernels in the tests: marks, compiling for Hopper, ragged rows, and eviction beside torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench.recorded_launches import Code
from mmkv.engine.backends.cuda.kernels.append import empty_room, make_room
from mmkv.engine.backends.cuda.kernels.buffers import PageTables
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction
from mmkv.engine.budget import Interval
from mmkv.engine.cache import COLUMNS, Columns, EncodedKV, KVForm, PagePool, RaggedCache
from mmkv.engine.cache.forms import AUTO, Codec
from mmkv.engine.cache.forms import FORMS as KV
from mmkv.engine.policies import CacheView, Policy
from mmkv.engine.policies.allocation import FlooredAllocation, GlobalAllocation

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_CUDA and not INTERPRETED else "cpu")


def _interpret_faster() -> None:
    """Have Triton's interpreter look for what it patches once, not in every call of a function."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names(holder: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(holder) if is_builtin(member)]

    def patch_builtin(holder: Any, builder: Any, scope: Any) -> None:
        for name in names(holder):
            if is_builtin(member := getattr(holder, name)):  # not where a caller has patched it
                interpreter._patch_attr(holder, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


if HAS_TRITON and INTERPRETED:
    _interpret_faster()


# Triton 3.7 and later let one register of some kernels wait in memory, out and in: 4 bytes each.
ONE_SPILL = 8


def needs_compiler(test: Any) -> Any:
    """Mark a test that compiles a kernel."""
    reason = "needs Triton (the compiler works without a GPU)"
    return pytest.mark.triton(pytest.mark.skipif(not HAS_TRITON, reason=reason)(test))


def triton_form(launch: Callable[..., Any]) -> Any:
    """Return a parameter for a test of both forms: a Triton launch function, where it can run."""
    runs = HAS_TRITON and (INTERPRETED or DEVICE.type == "cuda")
    reason = "needs Triton, and TRITON_INTERPRET=1 on a CPU (the interpreter)"
    marks = [pytest.mark.triton, pytest.mark.skipif(not runs, reason=reason)]
    return pytest.param(launch, id="triton", marks=marks)


def forms(idea: str, name: str) -> list[Any]:
    """Return the torch reference and the Triton launch function of ``kernels.{idea}.{name}``."""

    def reference(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"mmkv.engine.backends.cuda.kernels.{idea}")
        return getattr(module, f"{name}_reference")(*args, **kwargs)

    def triton(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"mmkv.engine.backends.cuda.kernels.{idea}_triton")
        return getattr(module, name)(*args, **kwargs)

    return [pytest.param(reference, id="torch"), triton_form(triton)]


def is_triton(form: Callable[..., Any]) -> bool:
    """Return which of :func:`forms` this is."""
    return form.__name__ == "triton"


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """Start one process for all kernels; it loads torch and Triton once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compiled_launches"]
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def asked(**request: Any) -> Any:
    """Return what ``tests.support.compiled_launches`` makes of a request."""
    process = _compiler()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(request), file=process.stdin, flush=True)
    reply = json.loads(process.stdout.readline())
    assert "error" not in reply, reply["error"]
    return reply["made"]


def compiled(launch: str, arch: int = 90, **settings: Any) -> list[Code]:
    """Compile all that one of ``benchmarks.bench.kernel_code.LAUNCHES`` launches."""
    codes = [
        Code(**code) for code in asked(kind="codes", launch=launch, arch=arch, settings=settings)
    ]
    for code in codes:
        print(
            f"{code.kernel}: {code.warps} warps, {code.registers} registers, "
            f"{code.spills} B spilled, {code.shared} B shared"
        )
    return codes


# An eager cache and the same cache as device tensors, for the tests of append and evict.


def eager_cache(
    lengths: Tensor,
    page: int,
    pages: int,
    width: int,
    dim: int = 4,
    seed: int = 0,
    form: KVForm = AUTO,
    states: int = 0,
) -> RaggedCache:
    """Sequences with rows of ``lengths [S, L, H]``; free pages in random order, random content.

    Positions of a row are different and below its sequence's longest row; their order is random.
    """
    source = torch.Generator().manual_seed(seed)
    pool = PagePool(page, dim, pages, form=form, state_size=states)
    pool._stack.copy_(torch.randperm(pages, generator=source))
    pool.limit = pages
    cache = RaggedCache(pool, *lengths.shape[1:])
    for length in lengths:
        rows = length.flatten().tolist()
        total, seen = sum(rows), max(max(rows), 1)
        places = [torch.randperm(seen, generator=source)[:count] for count in rows]
        content = {}
        for name in ("key", "value"):
            x = torch.randn(total, dim, generator=source)
            content[f"{name}s"], content[f"{name}_scale"] = getattr(form, name).encode(x)
        content |= {"log_beta": -torch.rand(total, generator=source)}
        content |= {"position": torch.cat(places).int()}
        content |= {"modality": torch.randint(3, (total,), generator=source).to(torch.uint8)}
        content |= {"state": torch.randn(total, states, generator=source)} if states else {}
        cache.import_({"length": length, **content})
    assert lengths.max() <= width * page, "the test's rows are longer than its table"
    table = torch.zeros(*lengths.shape, width, dtype=torch.int64)
    have = min(width, cache.table.shape[-1])  # the eager table is wider than it need be
    table[..., :have] = cache.table[: len(lengths), ..., :have]
    cache.table, cache.length = table, cache.length[: len(lengths)].clone()
    return cache


class Copies(Columns):
    """The pool's tensors, copied to the device."""

    def __init__(self, pool: PagePool) -> None:
        for name in COLUMNS:
            setattr(self, name, getattr(pool, name).clone().to(DEVICE))


def to_device(cache: RaggedCache) -> tuple[PageTables, Columns]:
    """The same state as tensors that share nothing with ``cache``."""
    top = torch.tensor([cache.pool.free_pages], device=DEVICE)
    tensors = (x.clone().to(DEVICE) for x in (cache.length, cache.table, cache.pool._stack))
    return PageTables(*tensors, top, cache.pool.page_size), Copies(cache.pool)


def assert_same(cache: RaggedCache, rows: PageTables, columns: Columns) -> None:
    """Lengths, tables, free pages in their order, and every slot of every column."""
    assert torch.equal(rows.length.cpu(), cache.length)
    used = cache._page_mask(slice(None))
    assert torch.equal(rows.table.cpu()[used], cache.table[used]), "tables differ"
    top = int(rows.top)
    assert top == cache.pool.free_pages
    assert torch.equal(rows.stack[:top].cpu(), cache.pool.free_list()), "free pages differ"
    for name in COLUMNS:
        ours, theirs = getattr(columns, name).cpu(), getattr(cache.pool, name)
        # Bit by bit: NaN equals itself.
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"{name} differ"


def snapshot(rows: PageTables, columns: Columns | None = None) -> list[Tensor]:
    """Copies of all tensors that may change."""
    tensors = [rows.length, rows.table, rows.stack, rows.top]
    tensors += [getattr(columns, name) for name in COLUMNS] if columns else []
    return [tensor.clone() for tensor in tensors]


def unchanged(before: list[Tensor], rows: PageTables, columns: Columns | None = None) -> bool:
    """Whether nothing has changed since :func:`snapshot`."""
    now = snapshot(rows, columns)
    return all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


# Random paged caches for the attention kernels' tests, and dense float64 attention over them.


@dataclass(frozen=True)
class Paged:
    """Pools ``[pages, P, D]``, ``length [S, L, H]``, ``table [S, L, H, W]`` on one device."""

    keys: Tensor | EncodedKV
    values: Tensor | EncodedKV
    length: Tensor
    table: Tensor

    def row(self, seq: int, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[entries, D]`` of one row in float64, gathered slot by slot."""
        size, count = self.keys.shape[1], int(self.length[seq, layer, head])
        pages = self.table[seq, layer, head].tolist()
        slots = [(pages[i // size], i % size) for i in range(count)]
        index = (
            torch.tensor(slots, dtype=torch.int64, device=self.table.device).view(-1, 2).unbind(1)
        )
        return self.keys[index].double(), self.values[index].double()


def paged(
    length: Tensor, page: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Paged:
    """Return the rows of ``length [S, L, H]`` entries in shuffled pages.

    Slots without an entry hold NaN, unused table columns a page of NaN: whoever reads them fails.
    """
    generator = torch.Generator().manual_seed(seed)
    held = (length + page - 1) // page
    width, count = int(held.max()) + 1, int(held.sum())
    order = torch.randperm(count, generator=generator) + 1
    inside = torch.arange(width) < held[..., None]
    table = torch.zeros(*length.shape, width, dtype=torch.int64)
    table[inside] = order
    pools = []
    for _ in range(2):
        pool = torch.randn(count + 1, page, dim, generator=generator).to(dtype)
        pool[0] = torch.nan
        last = table.gather(-1, (held - 1).clamp(min=0)[..., None])[..., 0]
        for seat, used in zip(last.flatten(), (length % page).flatten(), strict=True):
            if used:
                pool[seat, used:] = torch.nan
        pools.append(pool.to(device))
    return Paged(pools[0], pools[1], length.to(device), table.to(device))


def rounded(cache: Paged, key_bits: int, value_bits: int) -> Paged:
    """The same rows with their keys and values in codes; NaN stays NaN, or -inf."""

    def stored(pool: Tensor, bits: int) -> EncodedKV:
        codec = Codec(bits)
        return EncodedKV(*codec.encode(pool), codec, pool.dtype)

    keys, values = stored(cache.keys, key_bits), stored(cache.values, value_bits)
    return replace(cache, keys=keys, values=values)


def beside_a_sink(bits: int, dim: int = 64) -> tuple[Paged, Tensor]:
    """Return a row of float16 with values of ``bits``, and a query ``[1, 1, dim]`` of scale 0.2.

    The first entry is 8 nats above all others, which have values of size 0.1 and outweigh its own.
    """
    cache = paged(torch.tensor([[[512]]]), 16, dim, torch.float16, DEVICE)
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(512, generator=generator)
    score[0] = score.max() + 8
    value = torch.randn(512, dim, generator=generator) * 0.1 + 0.05
    value[0] *= 0.01
    pages = cache.table[0, 0, 0, :32]
    cache.keys[pages, :, 0] = score.view(32, 16).to(cache.keys)
    cache.values[pages] = value.view(32, 16, dim).to(cache.values)
    query = torch.zeros(1, 1, dim, dtype=torch.float16, device=DEVICE)
    query[..., 0] = 5
    return replace(cache, values=rounded(cache, bits, bits).values), query


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute plain float64 attention of ``query [Q, D]``; no keys give zeros and -inf."""
    scores = query.double() @ key.T * scale
    if not len(key):
        return torch.zeros_like(query, dtype=torch.float64), scores.logsumexp(-1)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# The eager cache beside its copy on the device, both evicting: for the tests of the kernels.


# Three sequences of 2 layers and 2 heads: empty rows, single entries, whole pages, long rows.
LENGTHS = torch.tensor(
    [[[0, 1], [33, 8]], [[5, 5], [5, 5]], [[16, 16], [40, 7]]], dtype=torch.int64
)
ROWS = 4
# Few values, and the same positions in most rows: ties everywhere. Or all of them different.
LEVELS = {
    "ties": [0.0, -0.0, -1e-9, -1.5e-8, -1e-3, -0.6931472, -2.0, -50.0, -1e30],
    "one score": [0.0],
    "not a number": [math.nan, -math.inf, -0.5, math.nan],
    "all different": None,
}


def on_device(values: list[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def needs_eviction(cache: RaggedCache, policy: Policy, seq: int, budget: int, slack: int) -> bool:
    """Whether all rows together, or one that has a budget of its own, stand above it."""
    length = cache.length[seq].flatten().tolist()
    if isinstance(policy.allocation, (GlobalAllocation, FlooredAllocation)):
        return sum(length) > budget + slack
    rows = len(length)
    return any(n > (budget + rows - 1 - r) // rows + slack // rows for r, n in enumerate(length))


def eager_evict(cache: RaggedCache, policy: Policy, seq: int, seen: int, budget: int) -> int:
    """The session's own way: how many went."""
    return eager_counts(cache, policy, seq, seen, budget)[0]


def eager_counts(
    cache: RaggedCache, policy: Policy, seq: int, seen: int, budget: int
) -> tuple[int, int]:
    """The session's own way: how many went, and how many of them had a score that is NaN."""
    entries, pool = cache.entries(seq), cache.pool
    view = CacheView(
        seen,
        cache.layers,
        cache.kv_heads,
        entries.row,
        cache.length[seq].flatten(),
        pool.position.view(-1)[entries.slot].long(),
        pool.log_beta.view(-1)[entries.slot],
        pool.modality.view(-1)[entries.slot],
    )
    victims = policy.victims(view, budget)
    cache.drop(seq, victims, entries)
    return victims.numel(), int(policy.scores(view, budget).value[victims].isnan().sum())


class Machine:
    """The eager cache and its copy on the device, taken through the same steps."""

    def __init__(
        self, policy: Policy, levels: str, seed: int, page: int = 8, kv: str = "auto"
    ) -> None:
        self.policy, self.levels = policy, LEVELS[levels]
        self.random = torch.Generator().manual_seed(seed)
        self.cache = eager_cache(
            LENGTHS * page // 8, page, pages=160, width=12, seed=seed, form=KV[kv]
        )
        pool = self.cache.pool
        pool.log_beta.copy_(self.rates(pool.log_beta.numel()).view_as(pool.log_beta))
        self.rows, self.columns = to_device(self.cache)
        self.seen = [int(length.max()) for length in self.cache.length]
        self.work = empty_eviction(3, self.rows)
        self.nan = [0, 0, 0]
        self.room = empty_room(3, self.rows)

    def rates(self, count: int) -> Tensor:
        if self.levels is None:
            return -(10 ** (torch.rand(count, generator=self.random) * 10 - 9))
        chosen = torch.randint(len(self.levels), (count,), generator=self.random)
        return torch.tensor(self.levels)[chosen]

    def draw(self, *values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=self.random))]

    def append(self, seqs: list[int]) -> None:
        """One token of each sequence, with the same content on both sides."""
        slots = make_room(self.room, self.rows, on_device(seqs)).cpu()
        live = torch.tensor([seq for seq in seqs if seq >= 0])
        place = self.cache.append(live, 1)[..., 0]
        assert torch.equal(slots[torch.tensor(seqs) >= 0], place)
        position = torch.tensor([self.seen[seq] for seq in live]).view(-1, 1, 1).expand_as(place)
        content = {"position": position.flatten().int(), "log_beta": self.rates(place.numel())}
        for name in ("keys", "values"):
            content[name] = torch.randn(place.numel(), 4, generator=self.random)
        content["modality"] = content["position"].to(torch.uint8) % 3
        for name, column in content.items():
            getattr(self.cache.pool, name).flatten(0, 1)[place.flatten()] = column
            ours = getattr(self.columns, name)
            ours.flatten(0, 1)[place.flatten().to(DEVICE)] = column.to(DEVICE)
        for seq in live.tolist():
            self.seen[seq] += 1

    def evict(
        self, form: Any, seqs: list[int], budgets: list[int], slack: int, part: int = 0
    ) -> list[int]:
        """On both sides; the whole state must agree afterwards."""
        seen = [self.seen[seq] for seq in seqs]  # of an idle batch slot: any number
        dropped = form(
            self.work,
            self.policy,
            self.rows,
            self.columns,
            on_device(seqs),
            on_device(seen),
            on_device(budgets),
            Interval(slack // ROWS + 1, part),
        )
        expected = []
        for slot, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            gone, nan, let = 0, 0, slack
            if part:
                let = min(slack, max(budget // part // ROWS - 1, 0) * ROWS)
            if seq >= 0 and needs_eviction(self.cache, self.policy, seq, budget, let):
                gone, nan = eager_counts(self.cache, self.policy, seq, self.seen[seq], budget)
            expected.append(gone)
            self.nan[slot] += nan
        assert dropped is self.work.dropped
        assert dropped.tolist() == expected
        assert self.work.nan.tolist() == self.nan
        assert_same(self.cache, self.rows, self.columns)
        return expected

    def step(self, form: Any) -> list[int]:
        """A decode step of a random batch, and an eviction by little, by much or by nothing."""
        order = torch.randperm(3, generator=self.random).tolist()
        seqs = [seq if self.draw(1, 1, 1, 0) else -1 for seq in order]
        if max(seqs) >= 0:
            self.append(seqs)
        held = [int(self.cache.length[seq].sum()) for seq in seqs]
        budgets = [max(n - self.draw(-3, 0, 1, 4, 5, n // 4, n), ROWS) for n in held]
        return self.evict(form, seqs, budgets, self.draw(0, 0, ROWS, 9 * ROWS), self.draw(0, 4))
