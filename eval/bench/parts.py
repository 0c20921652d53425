"""Split a step's time into parts: time the same step with one part left out at a time.

A part that is timed alone finds its data in the GPU's cache, where the weights of a whole step
would not leave them. The difference of two whole steps has no such error. A part is left out by
replacing functions of ``static_step`` while the step is captured; the engine needs no switch for
it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda import static_step as static_step
from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.model.product import plain
from mmkv.engine.runtime import Runtime
from mmkv.eval.bench.methods import Own
from mmkv.eval.measure.timing import spread, take_turns, time_calls


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


def _no_gate(step: StaticStep, index: int, normed: Tensor) -> None:
    return None


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
            stack.enter_context(mock.patch.object(StaticStep, "_readout", _no_gate))
        yield


def split(method: Own, bandwidth: float, rounds: int, steps: int) -> dict[str, Any]:
    """Time each part of a step in turns, in milliseconds.

    Returns:
        ``ms``: weights floor, KV floor, matrices (all matrix products alone), attention, gates
        (the trunks; their readout is part of the append kernel), append, eviction, rest, and the
        whole ``step``; ``variants``: what was measured.
    """
    engine = method.engine
    evicts, gated = engine.policy.evicts, engine.decoder.gates is not None
    parts = ["", "attention"] + ["gates"] * gated + ["eviction"] * evicts + ["append"]
    undo = Undo(engine)
    runners = {part: GraphRunner(engine) for part in parts}

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
                F.linear(inputs[matrix.shape[1]], plain(matrix))
        F.linear(inputs[weights.head.shape[1]], plain(weights.head))

    return call
