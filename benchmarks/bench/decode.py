"""Time a decode step on true model shapes: its parts, its lower bound, and peers, in one run.

``python -m benchmarks.bench.decode --shape qwen3-4b`` builds the shape with random weights and
fills the caches of all methods with random entries instead of a long prefill. Methods take turns.
The first group is our graph path with eviction, our full cache and our eager path. Then each peer
runs in its own process, in turns with our graph path. A method that cannot run or does not fit
``--memory`` is listed with the reason. ms/step is the slope between a short and a long run;
tokens/s of ours includes the fixed cost of a call.

``--policies all`` (or some names) times the decode step of each policy instead, ``--kv all`` that
of each form of keys and values, see :mod:`benchmarks.bench.policies`; figures go to
``decode-policies-<device>-<shape>.json`` and ``decode-kv-<device>-<shape>.json``.

Cases are ``B:CONTEXT:M``, or a set: ``targets``, ``grid``, ``largest`` (each method at the largest
batch that fits ``--largest-memory``), ``tiny``. Figures go to ``gpu-decode-<shape>.json`` after
each case. Measured speeds are compared with the project's targets (one H200).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import policies as bench_policies
from benchmarks.bench.child import BenchError, Child
from benchmarks.bench.harness import (
    assignments,
    attempt,
    device_note,
    on_gpu,
    parser,
    ratios,
    release,
    save,
    shown,
    table,
    take_turns,
)
from benchmarks.bench.methods import EAGER_STEPS, Own, gate_bytes, own_bytes, peer_bytes, split
from benchmarks.bench.peer import BOUNDED, DYNAMIC, EAGER, FULL, OWN, PEERS, PeerJob
from benchmarks.bench.shapes import SHAPES, build_engine
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.config import KV_FORMS, WEIGHT_FORMS
from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime
from mmkv.eval.step import copy_bandwidth, spread


@dataclass(frozen=True)
class DecodeCase:
    """``batch`` sequences that have seen ``context`` tokens and may keep ``budget`` per row."""

    batch: int
    context: int
    budget: int
    kind: str = "given"

    @classmethod
    def parse(cls, text: str) -> DecodeCase:
        """Parse ``B:CONTEXT:M``. Raises BenchError."""
        try:
            batch, context, budget = (int(part) for part in text.split(":"))
        except ValueError:
            raise BenchError(
                f"case {text!r} is not B:CONTEXT:M, such as 16:16384:256, nor a set: "
                f"{', '.join(SETS)}"
            ) from None
        if min(batch, context, budget) < 1:
            raise BenchError(f"case {text!r} has a number below 1; give B:CONTEXT:M from 1 on")
        return cls(batch, context, budget)


SETS: dict[str, list[DecodeCase]] = {
    "targets": [
        DecodeCase(batch, context, budget, "targets")
        for batch, context, budget in (
            (1, 16384, 256),
            (4, 32768, 1024),
            (8, 16384, 1024),
            (16, 16384, 256),
            (64, 4096, 256),
        )
    ],
    "grid": [
        DecodeCase(batch, context, budget, "grid")
        for batch in (1, 4, 8, 16, 64)
        for context, budget in ((4096, 64), (16384, 128), (32768, 512), (131072, 1024))
    ],
    "largest": [DecodeCase(0, 16384, 256, "largest")],
    "tiny": [DecodeCase(1, 40, 12, "tiny"), DecodeCase(3, 60, 12, "tiny")],
}


# tokens/s on one H200 that a paper states for (shape, batch, context, M).
PUBLISHED = {
    ("qwen3-4b", 4, 32768, 1024): {"full": 68, "SnapKV": 125, "TRIM-KV": 130},
    ("qwen3-4b", 8, 16384, 1024): {"full": 139, "SnapKV": 245, "TRIM-KV": 280},
}


def checks(shape: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the targets that apply to a measured case: name, value, bound, whether it is met."""

    def target(what: str, value: float, wanted: float, at_least: bool) -> dict[str, Any]:
        met = value >= wanted if at_least else value <= wanted
        sign = ">=" if at_least else "<="
        return {"target": what, "value": value, "wanted": f"{sign} {wanted:g}", "met": met}

    methods, where = case["methods"], (case["batch"], case["context"], case["budget"])
    own = methods.get(OWN, {})
    if "ms_per_step" not in own:
        return
    at = f"{shape}, B={where[0]}, {where[1]} tokens, M={where[2]}"
    if case.get("kind") != "largest" and where[0] in (1, 16, 64):
        yield target(f"step / floor, {at}", own["step_over_floor"], 1.20, False)
    if "eviction_of_step" in case.get("parts", {}):
        yield target(f"eviction / step, {at}", case["parts"]["eviction_of_step"], 0.03, False)
    if where[2] >= 64:
        ratio = own["memory"]["physical_over_logical"]
        yield target(f"physical / logical KV, {at}", ratio, 1.10, False)
    if shape == "qwen3-4b" and where == (4, 32768, 1024):
        yield target(f"tokens/s, {at}", own["tokens_per_second"], 1500, True)
    full = methods.get(FULL, {})
    if "ms_per_step" in full and case.get("kind") == "largest":
        ratio = own["tokens_per_second"] / full["tokens_per_second"]
        yield target(f"tokens/s over own full, largest batches, {shape}", ratio, 8, True)
    elif "ms_per_step" in full and where[:1] + where[2:] == (16, 256):
        allowed = full["floor_ms"] / own["floor_ms"]
        got = full["ms_per_step"]["median"] / own["ms_per_step"]["median"]
        yield target(
            f"speed-up over own full / what the bytes allow, {at}", got / allowed, 0.85, True
        )
    if where[0] == 16 and DYNAMIC in case.get("beside", {}):
        ratio = case["beside"][DYNAMIC]["ours_over_peers_tokens_per_second"]["median"]
        yield target(f"tokens/s over transformers, {at}", ratio, 8, True)


def show(shape: str, case: dict[str, Any]) -> None:
    """Print one case."""
    rows: list[list[Any]] = []
    for name, method in case["methods"].items():
        if "failed" in method:
            rows.append([name, "-", "-", "-", "-", method["failed"]])
            continue
        over = f"{method['step_over_floor']:.2f}" if "step_over_floor" in method else ""
        kv = f"{method['memory']['kv_bytes'] / 1e9:.3f} GB KV" if "memory" in method else ""
        speed = f"{method['tokens_per_second']:,.0f}"
        rows.append([name, method["batch"], shown(method["ms_per_step"]), speed, over, kv])
    where = shape, case["batch"], case["context"], case["budget"]
    for name, published in PUBLISHED.get(where, {}).items():
        speed = f"{published:,}"
        rows.append([f"{name} (paper)", case["batch"], "", speed, "", "published, on one H200"])
    names = ("method", "batch", "ms per step", "tokens/s", "step / floor", "")
    kind = f"{case['kind']}: {case['context']} tokens seen, M = {case['budget']}"
    table(f"{shape}, {kind}", names, rows)
    parts = case.get("parts", {})
    if "failed" in parts:
        print(f"the parts of a step could not be measured: {parts['failed']}")
    elif parts:
        parts = parts["ms"]
        table("ms of our evicting step", list(parts), [[f"{v:.3f}" for v in parts.values()]])


class DecodeBench:
    """One shape on one device: its weights, the measured bandwidth, the options."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.shape = args, SHAPES[args.shape]
        self.device, self.dtype = on_gpu(args)
        self.bandwidth = copy_bandwidth(self.device, args.copy_bytes)
        settings: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.base = build_engine(self.shape, "full", form=args.weights, **settings)
        self.settings: dict[str, Any] = settings | {"weights_of": self.base}
        self.logs = Path(tempfile.mkdtemp(prefix="mmkv-bench-"))
        total = 4e9
        if self.device.type == "cuda":
            total = 0.92 * torch.cuda.get_device_properties(self.device).total_memory
        self.memory = args.memory * 1e9 if args.memory else total

    def engine(self, case: DecodeCase, full: bool) -> Runtime:
        """Build an engine for one method, on the shared weights."""
        policy = "full" if full else "dbtrimkv"
        engine = build_engine(self.shape, policy, case.budget, **self.settings)
        engine.backends.cpu.switch_off()  # on a CPU the methods run in torch
        return engine

    def need(self, case: DecodeCase, full: bool) -> int:
        """Estimate the bytes of one of our methods, weights included."""
        budget, steps = None if full else case.budget, self.args.steps
        sizes = case.batch, case.context, budget, steps, self.dtype
        return own_bytes(self.shape, *sizes, skew=self.args.skew)

    def _peer_need(self, case: DecodeCase) -> int:
        """Estimate the bytes of a peer that keeps everything."""
        tokens = case.context + self.args.peer_tokens
        return peer_bytes(self.shape, case.batch, tokens, self.dtype)

    def measure(self, case: DecodeCase) -> dict[str, Any]:
        """Time all methods of one case."""
        found: dict[str, Any] = {**asdict(case), "methods": {}}
        owns: dict[str, Own] = {}
        weights = self.shape.weight_bytes(self.dtype.itemsize)
        left = self.memory - weights
        for name, full in ((OWN, False), (FULL, True)):
            need = self.need(case, full) - weights
            if need > left:
                reason = f"needs {need / 1e9:.0f} GB beside the weights, {left / 1e9:.0f} are left"
                found["methods"][name] = {"failed": reason}
            elif own := attempt(found["methods"], name, partial(self._open, case, full)):
                owns[name] = own
                left -= need
        own = None  # so that what leaves ``owns`` is freed
        self._measure_own(case, owns, found)
        owns.pop(FULL, None)  # frees memory for the peers
        release()
        if OWN in owns and self._wants_peers(case):
            for peer in self.args.peers:
                self._measure_peer(case, peer, owns[OWN], found)
        owns.clear()
        release()
        return found

    def _open(self, case: DecodeCase, full: bool) -> Own:
        engine = self.engine(case, full)
        return Own(engine, case.batch, case.context, self.args.skew, self.args.steps)

    def _measure_own(self, case: DecodeCase, owns: dict[str, Own], found: dict[str, Any]) -> None:
        methods: dict[str, Callable[[], float]] = {}
        called: dict[str, list[float]] = {}
        for name, own in owns.items():
            methods[name], called[name] = self._graph_method(own)
        if OWN in owns and self.args.eager:
            methods[EAGER] = lambda: owns[OWN].eager() / EAGER_STEPS
        for name in list(methods):  # compiles, captures
            if attempt(found["methods"], name, methods[name]) is None:
                del methods[name]
        for times in called.values():
            times.clear()
        for name, times in take_turns(methods, self.args.rounds).items():
            own = owns[OWN if name == EAGER else name]
            found["methods"][name] = self._method(own, times, called.get(name) or times)
        if OWN in methods and self.args.parts and case.kind != "largest":
            rounds = max(3, self.args.rounds // 2)
            timed = partial(split, owns[OWN], self.bandwidth, rounds, self.args.steps)
            if parts := attempt(found, "parts", timed):
                found["parts"] = parts

    def _graph_method(self, own: Own) -> tuple[Callable[[], float], list[float]]:
        runner, called = GraphRunner(own.engine.model, own.engine.cache), list[float]()

        def timed() -> float:
            step, with_call = own.graph_step(runner)
            called.append(with_call)
            return step

        return timed, called

    def _method(self, own: Own, times: list[float], called: list[float]) -> dict[str, Any]:
        size = own.step_bytes()
        floor = size.floor(self.bandwidth)
        step = spread([1e3 * t for t in times])
        return {
            "batch": len(own.sessions),
            "ms_per_step": step,
            "tokens_per_second": len(own.sessions) / spread(called)["median"],
            "floor_ms": 1e3 * floor,
            "step_over_floor": step["median"] / (1e3 * floor),
            "bytes": {**asdict(size), "gates": gate_bytes(own.engine)},
            "memory": own.memory(),
        }

    def _wants_peers(self, case: DecodeCase) -> bool:
        return case.kind in ("given", "tiny") or (case.batch, case.context) in (
            (4, 32768),
            (16, 16384),
        )

    def _measure_peer(self, case: DecodeCase, peer: str, own: Own, found: dict[str, Any]) -> None:
        """Time a peer in turns with our graph path, which is measured again beside it.

        A peer that evicts too (``BOUNDED``) always fits; others are refused where both do not.
        """
        tokens, job = self.args.peer_tokens, self._job(peer, case)
        need = self._peer_need(case) + self.need(case, False)
        if peer not in BOUNDED and need > self.memory:
            reason = f"needs {need / 1e9:.0f} GB beside ours, the memory is {self.memory / 1e9:.0f}"
            found["methods"][peer] = {"failed": reason}
            return
        mine, called = self._graph_method(own)

        def timed() -> dict[str, list[float]]:
            with self._start(job) as process:
                mine()  # captures the graph; not a figure
                called.clear()
                both: dict[str, Callable[[], float]] = {"mine": mine}
                both["peer"] = partial(_seconds, process, tokens)
                times = take_turns(both, self.args.rounds)
                found["methods"][peer] = _peer_method(job.batch, process, times["peer"])
                return times

        if times := attempt(found["methods"], peer, timed):
            ours = self._method(own, times["mine"], called)
            found.setdefault("beside", {})[peer] = {
                "ours_ms_per_step": ours["ms_per_step"],
                # Seconds per step, the peer's over ours.
                "ours_over_peers_tokens_per_second": ratios(times["peer"], called),
            }

    def _job(self, peer: str, case: DecodeCase) -> PeerJob:
        sizes = case.batch, case.context, case.budget, self.args.peer_tokens
        return PeerJob(peer, self.args.shape, *sizes, str(self.device), self.args.dtype)

    def _start(self, job: PeerJob) -> Child:
        python = self.args.python.get(job.peer, sys.executable)
        log = self.logs / f"{job.peer.replace(' ', '-')}-{job.batch}x{job.context}.log"
        return start_peer(job, python, self.args.patience, log)

    def largest(self, case: DecodeCase) -> dict[str, Any]:
        """Time each method alone at the largest batch that fits the stated memory."""
        memory = self.args.largest_memory * 1e9
        found: dict[str, Any] = {**asdict(case), "memory_bytes": memory, "methods": {}}
        peer = [DYNAMIC] if DYNAMIC in self.args.peers else []
        for name in (OWN, FULL, *peer):

            def need(batch: int, name: str = name) -> int:
                sized = replace(case, batch=batch)
                return self._peer_need(sized) if name == DYNAMIC else self.need(sized, name == FULL)

            size = self._most(memory, need)
            if not size:
                found["methods"][name] = {"failed": f"not one sequence fits {memory / 1e9:g} GB"}
                continue
            found["batch"] = found["batch"] or size
            alone = partial(self._alone, replace(case, batch=size), name)
            if method := attempt(found["methods"], name, alone):
                found["methods"][name] = method
            release()
        return found

    def _alone(self, case: DecodeCase, name: str) -> dict[str, Any]:
        if name == DYNAMIC:
            with self._start(self._job(DYNAMIC, case)) as process:
                tokens = self.args.peer_tokens
                times = [_seconds(process, tokens) for _ in range(self.args.rounds)]
                return _peer_method(case.batch, process, times)
        own = self._open(case, name == FULL)
        timed, called = self._graph_method(own)
        timed()
        called.clear()
        return self._method(own, [timed() for _ in range(self.args.rounds)], called)

    def _most(self, memory: float, need: Callable[[int], int]) -> int:
        """Find the largest batch up to ``--most-batch`` whose ``need`` is within ``memory``."""
        low, high = 0, self.args.most_batch
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if need(middle) <= memory else (low, middle - 1)
        return low


def start_peer(job: PeerJob, python: str, patience: float, log: Path) -> Child:
    """Start a peer with the interpreter of its environment; see :class:`Child`."""
    command = [python, "-m", "benchmarks.bench.peer", json.dumps(asdict(job))]
    return Child(command, patience, log)


def _seconds(process: Child, tokens: int) -> float:
    """Have a peer decode; return the seconds of a step. Raises BenchError with the reason."""
    seconds: float = process.ask({"decode": tokens})["wall"]
    return seconds / tokens


def _peer_method(batch: int, process: Child, times: list[float]) -> dict[str, Any]:
    step = spread([1e3 * t for t in times])
    return {
        "batch": batch,
        "ms_per_step": step,
        "tokens_per_second": 1e3 * batch / step["median"],
        "peak_bytes": process.last["peak_bytes"],
        "versions": process.versions,
    }


def _cases(args: argparse.Namespace) -> list[DecodeCase]:
    return [case for name in args.cases for case in SETS.get(name) or [DecodeCase.parse(name)]]


def _time_alike(args: argparse.Namespace) -> int:
    """Time the policies or the forms that ``args`` names; 1 when one of them failed."""
    what = "policies" if args.policies else "kv"
    engines = (
        bench_policies.named(args.policies) if args.policies else bench_policies.forms(args.kv)
    )
    cases = _cases(args)
    if any(case.kind == "largest" for case in cases):
        raise BenchError(f"the set largest is not for --{what}; give B:CONTEXT:M")
    device, dtype = on_gpu(args)
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES[args.shape]
    base = build_engine(shape, "full", device=device, dtype=dtype, form=args.weights)
    found: list[dict[str, Any]] = []
    for case in cases:
        times = bench_policies.measure(base, shape, engines, case, args.steps, args.rounds)
        where = {"batch": case.batch, "context": case.context, "budget": case.budget}
        clock = "seconds" if device.type == "cuda" else "CPU seconds, one thread"
        found.append({**where, "clock": clock, what: times})
        rows = bench_policies.table_of(times)
        name = f"decode-{what}-{device.type}-{args.shape}"
        path = save(args, name, {"cases": found}, {what: rows})
        title = f"{args.shape}: {case.batch} x {case.context} tokens read, M = {case.budget}"
        table(title, rows[0], rows[1:])
    print(f"in {path}")
    return int(any("failed" in each for case in found for each in case[what].values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 when a method of our own failed."""
    options = parser("bench_decode", __doc__)
    options.add_argument("--shape", default="qwen3-4b", choices=SHAPES)
    options.add_argument("--cases", nargs="+", default=["targets"], metavar="CASE")
    options.add_argument("--weights", default="auto", choices=WEIGHT_FORMS, help="form of ours")
    options.add_argument("--steps", type=int, default=128, help="steps of a timed run")
    options.add_argument("--skew", type=float, default=5.0, help="longest row over the mean")
    options.add_argument(
        "--memory", type=float, help="GB for all methods together (default: 92 %%)"
    )
    options.add_argument("--largest-memory", type=float, default=100.0, help="GB for each method")
    options.add_argument("--most-batch", type=int, default=1024)
    options.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    options.add_argument("--peer-tokens", type=int, default=32, help="steps of a peer's timed run")
    options.add_argument(
        "--python",
        nargs="*",
        default=[],
        metavar="NAME=PATH",
        help="Python interpreter of a peer's environment",
    )
    options.add_argument("--patience", type=float, default=240, help="seconds to wait for a peer")
    options.add_argument("--no-parts", dest="parts", action="store_false")
    options.add_argument("--no-eager", dest="eager", action="store_false")
    options.add_argument("--copy-bytes", type=int, help=argparse.SUPPRESS)
    options.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help="time these policies' steps instead, in turns; all: every preset",
    )
    options.add_argument(
        "--kv",
        nargs="+",
        choices=["all", *KV_FORMS],
        metavar="FORM",
        help="time dbtrimkv's step with keys and values in these forms instead",
    )
    args = options.parse_args(arguments)
    try:
        if args.policies or args.kv:
            return _time_alike(args)
        args.python = assignments(args.python, PEERS)
        cases = _cases(args)
        bench = DecodeBench(args)
    except MmkvError as error:
        options.error(str(error))
    machine = {"copy_bandwidth": bench.bandwidth, "note": device_note(bench.device)}
    print(f"copy: {bench.bandwidth / 1e9:,.0f} GB/s; {machine['note']}")
    found: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    path = None
    for case in cases:
        found.append(bench.largest(case) if case.kind == "largest" else bench.measure(case))
        targets += checks(args.shape, found[-1])
        form = "" if args.weights == "auto" else f"-{args.weights}"
        name = f"gpu-decode-{args.shape}{form}"
        path = save(args, name, {**machine, "cases": found, "targets": targets})
        show(args.shape, found[-1])
    if targets and bench.device.type == "cuda":
        rows = [[one["target"], f"{one['value']:.3f}", one["wanted"]] for one in targets]
        met = [["yes" if one["met"] else "NO"] for one in targets]
        columns = ("target", "value", "wanted", "met")
        table("Targets", columns, [[*a, *b] for a, b in zip(rows, met, strict=True)])
    print(f"in {path}; what the peers printed: {bench.logs}")
    return int(any("failed" in case["methods"].get(OWN, {}) for case in found))


if __name__ == "__main__":
    sys.exit(main())
