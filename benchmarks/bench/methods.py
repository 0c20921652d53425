"""Our methods of the speed programs: graph or eager steps, with eviction or without.

They decode from sessions whose caches look as after a long run, without the run. The time of a step
depends on the number and place of entries and not on their values. So rows are filled with random
keys, values, retention and positions, in pages that are scattered over the pool as after many
evictions. The logits have no meaning.

:func:`own_bytes` and :func:`peer_bytes` estimate the memory that methods need, from sizes alone.
:func:`split` splits a step's time into parts: the same step with one part left out at a time. A
part that is timed alone finds its data in the GPU's cache, where the weights of a whole step would
not leave them; the difference of two whole steps has no such error. A part is left out by replacing
functions of ``static_step`` while the step is captured; the engine needs no switch for it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.bench.harness import take_turns, time_calls
from benchmarks.bench.shapes import Shape
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda import static_step as static_step
from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.cache.forms import Codec
from mmkv.engine.config import EngineConfig
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.steps import decode_burst
from mmkv.eval.step import StepBytes, entry_bytes, spread, step_bytes, wall


def row_lengths(rows: int, total: int, longest: int, skew: float = 1.0, seed: int = 0) -> Tensor:
    """Draw the entries per row, ``[rows]`` int64 in random order, ``total`` in all and
    ``longest`` at most.

    Args:
        skew: the longest row over the mean; 1: all alike. The others follow a geometric series
            down from it (at 10 the shortest rows of a mean of 256 are empty).
    """
    if not 0 <= total <= rows * longest:
        raise ValueError(f"{total} entries do not fit {rows} rows of {longest}")
    mean = total / rows
    skew = min(skew, longest / mean, rows) if total else 1.0
    falling = torch.arange(rows) / max(rows - 1, 1)
    length = (falling * -_steepness(skew)).exp().double()
    length = (length * (total / length.sum())).round().long().clamp(max=longest)
    generator = torch.Generator().manual_seed(seed)
    length = length[torch.randperm(rows, generator=generator)]
    while rest := total - int(length.sum()):
        free = (length < longest) if rest > 0 else (length > 0)
        places = free.nonzero().flatten()
        chosen = places[torch.randperm(len(places), generator=generator)[: abs(rest)]]
        length[chosen] += 1 if rest > 0 else -1
    return length


def _steepness(skew: float) -> float:
    """Find a of ``exp(-a u)``, u in 0 .. 1, whose largest value is ``skew`` times its mean."""
    if skew <= 1.0001:
        return 0.0
    low, high = 1e-6, 10 * skew + 10
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / -math.expm1(-middle) < skew else (low, middle)
    return low


@torch.inference_mode()
def fill_sequence(cache: RaggedCache, lengths: Tensor, seen: int, seed: int = 0) -> int:
    """Open a sequence with random entries; returns its slot.

    Args:
        lengths: ``[L, H]`` int64; seen: tokens seen, above every length. Positions of a row are
            spread evenly below it.
    """
    pool, total = cache.pool, int(lengths.sum())
    generator = torch.Generator(pool.device).manual_seed(seed)
    flat = lengths.to(pool.device).flatten()
    row = torch.repeat_interleave(flat)
    offset = torch.arange(total, device=pool.device) - (flat.cumsum(0) - flat)[row]
    position = (offset * seen).div(flat[row], rounding_mode="floor").int()
    del offset

    def normal(codec: Codec) -> tuple[Tensor, Tensor]:
        """Codes and scales; rotated, such vectors would be drawn alike."""
        made = torch.empty(total, pool.head_dim, dtype=pool.dtype, device=pool.device)
        return codec.encode(made.normal_(generator=generator))

    # log_beta from -1e-4 to -10, about as random gates give.
    power = torch.rand(total, generator=generator, device=pool.device) * 5 - 4
    (keys, key_scale), (values, value_scale) = map(normal, (pool.form.key, pool.form.value))
    return cache.import_(
        {
            "length": lengths,
            "keys": keys,
            "key_scale": key_scale,
            "values": values,
            "value_scale": value_scale,
            "log_beta": -(10**power),
            "position": position,
            "modality": torch.zeros(total, dtype=torch.uint8, device=pool.device),
        }
    )


def scatter_pages(cache: RaggedCache, seed: int = 0) -> None:
    """Hand out the free pages in random order from now on."""
    pool = cache.pool
    order = torch.randperm(pool.free_pages, generator=torch.Generator().manual_seed(seed))
    free = pool.free_list()
    free.copy_(free[order.to(pool.device)])


def pages_for(entries: int, rows: int, page_size: int) -> int:
    """Bound the pages that ``entries`` in ``rows`` rows can take."""
    return min(entries, (entries + rows * (page_size - 1)) // page_size)


@torch.inference_mode()
def synthetic_sessions(
    engine: Runtime, count: int, seen: int, skew: float = 1.0, steps: int = 256, seed: int = 0
) -> list[CachedSequence]:
    """Open sessions at their budget (all ``seen`` tokens, if the policy never evicts).

    Args:
        seen: tokens each has seen; skew: see :func:`row_lengths`; steps: decode steps to come, for
            which pages are set aside now.

    Raises:
        BudgetError: the pool would pass its limit.
    """
    cache, rows = engine.cache, engine.spec.rows
    pool = cache.pool
    entries = most = seen * rows
    if engine.policy.evicts:
        budget = engine.budgets.allowed(engine.budget, seen)
        entries = min(entries, budget)
        most = entries + engine.interval.at(budget, rows) * rows
    else:
        most += steps * rows
    pool.reserve(count * pages_for(most, rows, pool.page_size))
    scatter_pages(cache, seed)
    made = []
    for index in range(count):
        lengths = row_lengths(rows, entries, seen, skew, seed + index)
        session = engine.session()
        shape = (engine.spec.num_layers, engine.spec.num_kv_heads)
        filled = fill_sequence(cache, lengths.view(shape), seen, seed + index)
        counts = {"seen": seen, "next_position": seen, "entries": entries, "meter": None}
        session.adopt(filled, session.state() | counts)
        made.append(session)
    return made


@torch.inference_mode()
def rewind(session: CachedSequence, seen: int) -> None:
    """Take back every token after the first ``seen``, of a session that never evicts."""
    session.restore(session.state() | {"seen": seen, "next_position": seen})
    session.roll_back()
    entries = int(session.engine.cache.length[session.seq].sum())
    session.restore(session.state() | {"entries": entries})


EAGER_STEPS = 8  # few, because it is slow
# Entries that a row may grow by before block tables and graphs are built again.
SPARE_COLUMNS = 1024


class Own:
    """Sessions of an engine, filled with random entries, that decode again and again.

    With a policy that evicts they are at their budget and stay there; without one they are cut
    back after each run.
    """

    def __init__(self, engine: Runtime, batch: int, context: int, skew: float, steps: int) -> None:
        self.engine, self.context, self.steps = engine, context, steps
        self.sessions: list[CachedSequence] = synthetic_sessions(
            engine, batch, context, skew, steps
        )
        longest = int(engine.cache.length.max())
        engine.cache._widen(
            (longest + max(steps, SPARE_COLUMNS)) // engine.cache.pool.page_size + 2
        )
        self.tokens = [batch_slot % engine.spec.vocab_size for batch_slot in range(batch)]

    def timed(self, decode: Callable[[], Any]) -> float:
        """Time one call that decodes, in seconds, and restore the sessions' lengths."""
        seconds = wall(decode, self.engine.device)
        if not self.engine.policy.evicts:
            for session in self.sessions:
                rewind(session, self.context)
        return seconds

    def graph(self, runner: GraphRunner, steps: int | None = None) -> float:
        """Time ``steps`` steps of the static path (a CUDA graph where CUDA is)."""
        count = steps or self.steps
        return self.timed(
            lambda: decode_burst(self.engine, runner.decode, self.sessions, self.tokens, count)
        )

    def graph_step(self, runner: GraphRunner) -> tuple[float, float]:
        """Time a step, in seconds: without what a call of ``decode`` costs once, and with it.

        The first is the slope between a short call and one of all steps.
        """
        few = max(1, self.steps // 4)
        short, long = self.graph(runner, few), self.graph(runner)
        return max(long - short, 1e-9) / max(self.steps - few, 1), long / self.steps

    def eager(self) -> float:
        """Time ``EAGER_STEPS`` steps of :meth:`Runtime.decode`, in torch."""

        def decode() -> None:
            token = self.tokens
            for _ in range(EAGER_STEPS):
                token = self.engine.decode(self.sessions, token).argmax(-1).tolist()

        graphs = self.engine.backends.cuda
        graphs.off = True
        try:
            return self.timed(decode)
        finally:
            graphs.off = False

    def step_bytes(self) -> StepBytes:
        """Count the bytes that a step in the middle of a run reads."""
        found = step_bytes(self.engine, self.sessions)
        if self.engine.policy.evicts:
            return found
        grown = len(self.sessions) * self.engine.spec.rows * self.steps // 2
        return StepBytes(found.weights, found.kv + grown * entry_bytes(self.engine))

    def memory(self) -> dict[str, Any]:
        """Count physical bytes of the entries, and the bytes of the entries alone."""
        pool = self.engine.cache.pool
        pages = sum(self.engine.cache.held_pages(session.seq) for session in self.sessions)
        entries = sum(session.entries for session in self.sessions)
        length = self.engine.cache.length[[session.seq for session in self.sessions]]
        return {
            "entries": entries,
            "kv_bytes": pages * pool.kv_page_bytes,
            "metadata_bytes": pages * pool.metadata_page_bytes + self.engine.cache.table.nbytes,
            "physical_over_logical": pages * pool.page_size / entries,
            "longest_row": int(length.max()),
            "empty_rows": float((length == 0).float().mean()),
        }


def gate_bytes(engine: Runtime) -> int:
    """Count the bytes of the gates that a step reads, 0 without gates."""
    if engine.decoder.gates is None:
        return 0
    tensors = [
        tensor
        for gate in engine.decoder.gates.layers
        for tensor in (*(t for pair in gate.trunk for t in pair), gate.readout, gate.bias)
    ]
    return sum(tensor.nbytes for tensor in tensors)


# Memory besides weights and cache: activations of a chunk and of a step, libraries.
_OWN_REST, _PEER_REST = 2 * 10**9, 3 * 10**9


def own_bytes(
    shape: Shape,
    batch: int,
    context: int,
    budget: float | None,
    steps: int,
    dtype: torch.dtype,
    page: int = EngineConfig.page_size,
    skew: float = 1.0,
) -> int:
    """Estimate the bytes that one of our methods needs, weights included: an estimate from above.

    Pages at their worst case, block tables and eviction scratch for the longest row (twice, as
    tables may double), logits in two precisions, and 2 GB for all else. Pages that a pool on a GPU
    takes ahead of need, where memory is free, are not counted.
    """
    rows, spare = shape.rows, max(steps, SPARE_COLUMNS)
    if budget is None:
        entries, longest = (context + steps) * rows, context + spare
    else:
        entries = int((budget + 1) * rows)
        longest = int(min(context, budget * skew)) + spare
    width = 2 * (longest // page + 2)
    each = pages_for(entries, rows, page) * _page_bytes(shape, dtype, page)
    each += rows * width * 8 + shape.vocab * 8
    if budget is not None:
        each += 8 * rows * width * page
    return shape.weight_bytes(dtype.itemsize) + batch * each + _rest(shape, _OWN_REST)


def peer_bytes(shape: Shape, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Estimate the bytes of a peer with all ``tokens``: weights, cache, one layer's copy, 3 GB."""
    held = batch * tokens * shape.kv_token_bytes(dtype.itemsize)
    rest = _rest(shape, _PEER_REST)
    return shape.weight_bytes(dtype.itemsize) + held + 2 * held // shape.layers + rest


def _page_bytes(shape: Shape, dtype: torch.dtype, page: int) -> int:
    return PagePool(page, shape.head_dim, 0, dtype).page_bytes


def _rest(shape: Shape, nbytes: int) -> int:
    """Allow next to nothing for shapes that only show that a program runs."""
    return nbytes if shape.vocab > 10_000 else 10**6


class Undo:
    """Replaces ``make_room`` and ``evict``: the one records state, the other restores it.

    Rows stay as long as they were although nothing is chosen. That costs four small copies, which
    are timed and added to the eviction again.
    """

    _make_room = staticmethod(static_step.make_room)

    def __init__(self, engine: Runtime) -> None:
        length = engine.cache.length
        self.length, self.top = length.clone(), length.new_zeros(1)

    def make_room(self, room: Any, rows: Any, seqs: Tensor) -> Tensor:
        """Copy the state that ``make_room`` changes, then call it."""
        self.length.copy_(rows.length)
        self.top.copy_(rows.top)
        return self._make_room(room, rows, seqs)

    def evict(self, work: Any, policy: Any, rows: Any, *_: Any) -> Tensor:
        """Restore lengths and free pages; return what the last real eviction dropped."""
        rows.length.copy_(self.length)
        rows.top.copy_(self.top)
        return work.dropped

    def seconds(self, engine: Runtime) -> float:
        """Time the copies of a step."""
        length, top = self.length.clone(), self.top.clone()

        def copies() -> None:
            for target, source in ((self.length, length), (length, self.length)):
                target.copy_(source)
            for target, source in ((self.top, top), (top, self.top)):
                target.copy_(source)

        return statistics.median(time_calls(copies, engine.device, 5, 0.005))


def _leave(*_: Any, **__: Any) -> None:
    """Stand in for a call whose result lies in a buffer."""


def _no_eviction(work: Any, *_: Any) -> Tensor:
    return work.dropped


def _no_gate(step: StaticStep, hidden: list[Tensor], slots: Tensor) -> None:
    pass


def _no_room(room: Any, rows: Any, seqs: Tensor) -> Tensor:
    return room.slots.fill_(0)


def _replaced(engine: Runtime, part: str, undo: Undo) -> dict[str, Any]:
    """Make replacements for the functions that the step calls."""
    heads, dim = engine.spec.num_heads, engine.spec.head_dim

    def no_store(qkv: Tensor, *_: Any) -> Tensor:
        return qkv[:, : heads * dim].view(-1, heads, dim)

    found: dict[str, dict[str, Any]] = {
        "": {},
        "gates": {},
        "attention": {"decode_attention": _leave},
        "eviction": {"make_room": undo.make_room, "evict": undo.evict},
        # With eviction, which has nothing to do then.
        "append": {"make_room": _no_room, "store_layer": no_store, "evict": _no_eviction},
    }
    return found[part]


@contextlib.contextmanager
def without(engine: Runtime, part: str, undo: Undo) -> Iterator[None]:
    """Leave ``part`` out of the steps captured (on a CPU: run) here; "" leaves out nothing."""
    with contextlib.ExitStack() as stack:
        for name, value in _replaced(engine, part, undo).items():
            stack.enter_context(mock.patch.object(static_step, name, value))
        if part == "gates":
            stack.enter_context(mock.patch.object(StaticStep, "_store_log_beta", _no_gate))
        yield


def split(method: Own, bandwidth: float, rounds: int, steps: int) -> dict[str, Any]:
    """Time each part of a step in turns, in milliseconds.

    Returns:
        ``ms``: weights floor, KV floor, matrices (all matrix products alone), attention, gates,
        append, eviction, rest, and the whole ``step``; ``variants``: what was measured.
    """
    engine = method.engine
    evicts, gated = engine.policy.evicts, engine.decoder.gates is not None
    parts = ["", "attention"] + ["gates"] * gated + ["eviction"] * evicts + ["append"]
    undo = Undo(engine)
    runners = {part: GraphRunner(engine.model, engine.cache) for part in parts}

    def timed(part: str) -> float:
        with without(engine, part, undo):
            return method.graph(runners[part], steps) / steps

    for part in parts:  # captures
        timed(part)
    rounds_of = take_turns({part: partial(timed, part) for part in parts}, rounds)
    step = {part: statistics.median(times) for part, times in rounds_of.items()}
    copies = undo.seconds(engine) if evicts else 0.0
    matrices = statistics.median(time_calls(_matrices(engine, len(method.sessions)), engine.device))
    size = method.step_bytes()
    with_entries = step["eviction"] - copies if evicts else step[""]
    seconds = {
        "matrices": matrices,
        "attention": step[""] - step["attention"],
        "gates": step[""] - step["gates"] if gated else 0.0,
        "append": with_entries - step["append"],
        "eviction": step[""] - with_entries,
    }
    seconds["rest"] = step[""] - sum(seconds.values())
    floors = {"weights floor": size.weights / bandwidth, "KV floor": size.kv / bandwidth}
    return {
        "ms": {k: 1e3 * v for k, v in (floors | seconds | {"step": step[""]}).items()},
        "eviction_of_step": seconds["eviction"] / step[""],
        "variants": {f"without {p}" if p else "whole": spread(t) for p, t in rounds_of.items()},
    }


def _matrices(engine: Runtime, batch: int) -> Any:
    """Prepare all matrix products of a step on random inputs, gates left out."""
    weights = engine.decoder.weights
    first = weights.layers[0]
    inputs = {
        size: torch.empty(batch, size, device=engine.device).normal_().to(engine.dtype)
        for size in {m.shape[1] for m in (first.qkv, first.out, first.gate_up, first.down)}
    }

    def call() -> None:
        for layer in weights.layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                weights.product(inputs[matrix.shape[1]], matrix)
        weights.product(inputs[weights.head.shape[1]], weights.head)

    return call
