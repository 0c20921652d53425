"""The decode step of every policy, or over every form of keys and values, in turns.

``python -m benchmarks.bench.decode --policies all`` and ``--kv all`` give each policy or form an
engine on the same random weights, with random gates where it reads gates, and sequences that have
read CONTEXT random tokens and hold what the policy keeps of them. Policies that keep prompts whole
then generate until their budget is full. What is timed is the same number of decode steps for each,
from forks of these sequences, so that every round starts from the same cache; the steps are whole
intervals between two evictions. On a CPU the times are CPU seconds of one thread, on a GPU seconds
from idle to idle.

Beside the time stands what the step runs on, and how often the host would wait for a GPU within a
step: operations whose result, or whose shape, the host has to read. A captured CUDA graph cannot
hold any. On a CPU they are counted in the torch references that run in place of its kernels.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench.harness import attempt, ratios, shown, take_turns
from benchmarks.bench.shapes import Shape, build_engine
from mmkv.engine.backends.cuda import CudaBackend, GraphRunner, policy_step, static_step
from mmkv.engine.backends.cuda.kernels import delta
from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.config import KV_FORMS
from mmkv.engine.policies import PRESETS, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.steps import decode_burst
from mmkv.eval.step import spread, synchronize

aten = torch.ops.aten
# Their result, or its shape, is known to the host once it has waited: .item(), .tolist(), int(),
# bool(), .nonzero(), torch.unique ... And a tensor made of the host's own numbers is a copy.
READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.lift_fresh,
}
# What has a form in Triton beside the reference that runs on a CPU.
KERNELS = {
    static_step: "make_room build_worklist rms_norm store_layer decode_attention gated evict "
    "experts store_log_beta",
    policy_step: "drop evict_to_shares window_scores",
    delta: "conv_step delta_step",
}
# The shares of the memory of a GPU that weights leave, for the caches of all policies together.
_CACHES = 0.7


class HostReads(TorchDispatchMode):
    """Notes what makes the host wait for a GPU, or what a graph cannot hold: on a CPU, too.

    Attributes:
        found: the operations, in their order; those inside of kernels do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        with self:  # an operation that is made of others is seen before these are
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if self._reads(func, args):
            self.found.append(str(func))
        return func(*args, **kwargs)

    @staticmethod
    def _reads(func: Any, args: Any) -> bool:
        packet = func.overloadpacket
        if func in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor):
            return True
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            return any(
                one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            )
        return packet in READS

    def kernel(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel's reference, whose own reads do not count."""

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, True
            try:
                return run(*args, **kwargs)
            finally:
                self._inside = before

        return uncounted


@contextlib.contextmanager
def counting() -> Iterator[HostReads]:
    """Count the host reads of each static step within, as it is first run."""
    reads, run, seen = HostReads(), StaticStep.run, set[tuple[StaticStep, bool]]()

    def counted(step: StaticStep, cut: bool = True) -> None:
        if (step, cut) in seen:  # what it does is the same each time
            return run(step, cut)
        seen.add((step, cut))
        with reads:
            return run(step, cut)

    with contextlib.ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names.split():
                counted_not = reads.kernel(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, counted_not))
        stack.enter_context(mock.patch.object(StaticStep, "run", counted))
        yield reads


@dataclass
class Measured:
    """Sequences of one policy that decode again and again from the same cache.

    Attributes:
        interval: decode steps between two evictions; steps: those of a timed run.
    """

    engine: Runtime
    sessions: list[CachedSequence]
    interval: int
    steps: int

    @classmethod
    def of(cls, engine: Runtime, batch: int, context: int, steps: int) -> Measured:
        """Have the sequences read their prompts, and fill budgets that prompts do not count in."""
        generator = torch.Generator().manual_seed(0)
        sessions, vocabulary = [], engine.spec.vocab_size
        for _ in range(batch):
            session = engine.session()
            ids = torch.randint(vocabulary, (1, context), generator=generator)
            session.prefill({"input_ids": ids})
            sessions.append(session)
        policy, rows = engine.policy, engine.spec.rows
        if not policy.evicts:
            return cls(engine, sessions, 1, steps)
        held = context if policy.keeps_prompt else 0
        allowed = engine.budgets.allowed(engine.budget, context)
        interval = engine.interval.at(allowed, rows)
        made = cls(engine, sessions, interval, math.ceil(steps / interval) * interval)
        made._decode(sessions, (allowed // rows if held else 0) + interval)
        return made

    def _decode(self, sessions: Sequence[CachedSequence], steps: int) -> None:
        tokens = [1 + slot % 64 for slot in range(len(sessions))]
        self.engine.decode_many(sessions, tokens, steps)

    def seconds_per_step(self) -> float:
        """Time the steps: CPU seconds, or on a GPU seconds from idle to idle.

        Forks copy what they change on the first eviction, which is not timed.
        """
        device = self.engine.device
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        with contextlib.ExitStack() as stack:
            forks = [stack.enter_context(session.fork()) for session in self.sessions]
            self._decode(forks, self.interval)
            synchronize(device)
            start = clock()
            self._decode(forks, self.steps)
            synchronize(device)
            return (clock() - start) / self.steps

    def host_reads(self) -> int:
        """Count the host reads of a step: of the graph's, or of the eager one where there is none.

        A step of a graph on a GPU was captured, which fails where the host would read.
        """
        engine = self.engine
        with contextlib.ExitStack() as stack:
            forks = [stack.enter_context(session.fork()) for session in self.sessions]
            tokens = [1] * len(forks)
            if graph_reason(engine):
                with HostReads() as reads:
                    engine.decode(forks, tokens)
                return len(reads.found)
            if engine.device.type == "cuda":
                return 0
            with counting() as reads:
                # Up to the first step that evicts.
                runner = GraphRunner(engine.model, engine.cache)
                decode_burst(engine, runner.decode, forks, tokens, self.interval)
            return len(reads.found)

    def row(self) -> dict[str, Any]:
        """Say what the step runs on, and what it holds."""
        engine, reason = self.engine, graph_reason(self.engine)
        entries = sum(session.entries for session in self.sessions)
        return {
            "path": engine.decode_path,
            "evicts_on": engine.evict_path,
            "interval": self.interval,
            "entries_per_row": entries / len(self.sessions) / engine.spec.rows,
            "entry_bytes": engine.cache.pool.layout.entry_bytes(),
            "graph": reason or "yes",
            "host_reads_per_step": self.host_reads(),
        }


def graph_reason(engine: Runtime) -> str:
    """Say why bursts are no CUDA graph; empty where they are, or on a GPU would be."""
    if engine.device.type == "cuda":
        return "" if engine.many_path == "graph" else engine.many_path
    return CudaBackend.policy_reason(engine.policy)


def named(policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return settings of an engine for each of ``--policies``; ``all``: every preset.

    Raises:
        PolicyError: one is not known.
    """
    names = [one for name in policies for one in (PRESETS if name == "all" else (name,))]
    return {name: {"policy": make_policy(name)} for name in dict.fromkeys(["full", *names])}


def forms(kv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return settings of an engine for each of ``--kv``; ``all``: every form."""
    names = [form for form in KV_FORMS if form != "auto"] if "all" in kv else kv
    return {form: {"policy": "dbtrimkv", "kv": form} for form in names}


def measure(
    base: Runtime,
    shape: Shape,
    engines: dict[str, dict[str, Any]],
    case: Any,
    steps: int,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Time the step of each engine in turns.

    Args:
        base: an engine whose weights are used; engines: settings by name.
        case: a :class:`benchmarks.bench.decode.DecodeCase`; steps: of a timed run, at least.

    Returns:
        by name: what :meth:`Measured.row` says, ``ms_per_step``, and ``over_<first>`` (the median
        ratio to the first engine's of the same round); or ``failed`` with the reason.
    """
    settings: dict[str, Any] = {"device": base.device, "dtype": base.dtype, "weights_of": base}
    if base.device.type == "cuda":
        free = torch.cuda.mem_get_info(base.device)[0]
        settings["kv_limit"] = int(_CACHES * free / len(engines))
    found: dict[str, dict[str, Any]] = {}

    def opened(own: dict[str, Any]) -> tuple[Measured, dict[str, Any]]:
        engine = build_engine(shape, budget=case.budget, **own, **settings)
        made = Measured.of(engine, case.batch, case.context, steps)
        row = made.row()
        made.seconds_per_step()  # compiles, captures; a fault shows here
        return made, row

    runs: dict[str, Callable[[], float]] = {}
    for name, own in engines.items():
        if made := attempt(found, name, partial(opened, own)):
            runs[name], found[name] = made[0].seconds_per_step, made[1]
    times, first = take_turns(runs, rounds), next(iter(engines))
    for name, each in times.items():
        found[name]["ms_per_step"] = spread([1e3 * one for one in each])
        if first in times:
            found[name][f"over_{first}"] = ratios(each, times[first])["median"]
    return found


def table_of(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of one case, the heading first."""
    over = f"over_{next(iter(found))}"
    head = ["", "ms", over.replace("over_", "/ "), "entries a row", "bytes an entry", "interval"]
    rows = [[*head, "graph", "host reads", "evicts on"]]
    for name, each in found.items():
        if "failed" in each:
            rows.append([f"`{name}`", *["-"] * 7, each["failed"]])
            continue
        ratio = f"{each[over]:.2f}" if over in each else ""
        cells = [f"`{name}`", shown(each["ms_per_step"], ".2f"), ratio]
        cells += [f"{each['entries_per_row']:.0f}"]
        cells += [str(each[k]) for k in ("entry_bytes", "interval", "graph", "host_reads_per_step")]
        rows.append([*cells, each["evicts_on"].partition(":")[0]])
    return rows
