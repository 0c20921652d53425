"""Time a decode step on true model shapes: its parts, its lower bound, and peers, in one run.

``python -m eval.bench.decode --shape qwen3-4b`` builds the shape with random weights and fills the
caches of all methods with random entries instead of a long prefill. Methods take turns. The first
group is our graph path with eviction, our full cache and our eager path. Then each peer runs in its
own process, in turns with our graph path. A method that cannot run or does not fit ``--memory`` is
listed with the reason. ms/step is the slope between a short and a long run; tokens/s of ours
includes the fixed cost of a call.

Cases are ``B:CONTEXT:M``, or a set: ``targets``, ``grid``, ``largest`` (each method at the largest
batch that fits ``--largest-memory``), ``tiny``. Figures go to ``gpu-decode-<shape>.json`` after
each case.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime
from mmkv.eval.bench.decode_cases import SETS, Case
from mmkv.eval.bench.decode_report import figure, show, show_targets
from mmkv.eval.bench.memory_estimate import own_bytes, peer_bytes
from mmkv.eval.bench.methods import EAGER_STEPS, Own, concerns_one_method
from mmkv.eval.bench.names import BOUNDED, DYNAMIC, EAGER, FULL, OWN
from mmkv.eval.bench.output import BenchError, device_note, failure, on_gpu, parser, save
from mmkv.eval.bench.parts import split
from mmkv.eval.bench.peer import PEERS, Job
from mmkv.eval.bench.process import PeerProcess
from mmkv.eval.bench.shapes import SHAPES, build_engine
from mmkv.eval.bench.targets import checks
from mmkv.eval.measure.timing import copy_bandwidth, spread, take_turns


class Bench:
    """One shape on one device: its weights, the measured bandwidth, the options."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.shape = args, SHAPES[args.shape]
        self.device, self.dtype = on_gpu(args)
        self.bandwidth = copy_bandwidth(self.device, args.copy_bytes)
        settings: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.base = build_engine(self.shape, "full", **settings)
        self.settings: dict[str, Any] = settings | {"weights_of": self.base}
        self.logs = Path(tempfile.mkdtemp(prefix="mmkv-bench-"))
        total = 4e9
        if self.device.type == "cuda":
            total = 0.92 * torch.cuda.get_device_properties(self.device).total_memory
        self.memory = args.memory * 1e9 if args.memory else total

    def engine(self, case: Case, full: bool) -> Runtime:
        """Build an engine for one method, on the shared weights."""
        policy = "full" if full else "dbtrimkv"
        engine = build_engine(self.shape, policy, case.budget, **self.settings)
        engine.backends.cpu.switch_off()  # on a CPU the methods run in torch
        return engine

    def need(self, case: Case, full: bool) -> int:
        """Estimate the bytes of one of our methods, weights included."""
        budget = None if full else case.budget
        return own_bytes(
            self.shape,
            case.batch,
            case.context,
            budget,
            self.args.steps,
            self.dtype,
            skew=self.args.skew,
        )

    def _peer_need(self, case: Case) -> int:
        """Estimate the bytes of a peer that keeps everything."""
        tokens = case.context + self.args.peer_tokens
        return peer_bytes(self.shape, case.batch, tokens, self.dtype)

    def measure(self, case: Case) -> dict[str, Any]:
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
                continue
            try:
                owns[name] = self._open(case, full)
                left -= need
            except Exception as error:
                self._or_raise(error)
                found["methods"][name] = {"failed": failure(error)}
        self._measure_own(case, owns, found)
        owns.pop(FULL, None)  # frees memory for the peers
        self._release()
        if OWN in owns and self._wants_peers(case):
            for peer in self.args.peers:
                self._measure_peer(case, peer, owns[OWN], found)
        owns.clear()
        self._release()
        return found

    def _open(self, case: Case, full: bool) -> Own:
        engine = self.engine(case, full)
        return Own(engine, case.batch, case.context, self.args.skew, self.args.steps)

    def _measure_own(self, case: Case, owns: dict[str, Own], found: dict[str, Any]) -> None:
        methods: dict[str, Callable[[], float]] = {}
        called: dict[str, list[float]] = {}
        for name, own in owns.items():
            methods[name], called[name] = self._graph_method(own)
        if OWN in owns and self.args.eager:
            methods[EAGER] = lambda: owns[OWN].eager() / EAGER_STEPS
        for name in list(methods):
            try:
                methods[name]()  # compiles, captures
            except Exception as error:
                self._or_raise(error)
                found["methods"][name] = {"failed": failure(error)}
                del methods[name]
        for times in called.values():
            times.clear()
        for name, times in take_turns(methods, self.args.rounds).items():
            own = owns[OWN if name == EAGER else name]
            found["methods"][name] = self._method(own, times, called.get(name) or times)
        if OWN in methods and self.args.parts and case.kind != "largest":
            found["parts"] = self._parts(owns[OWN])

    def _parts(self, own: Own) -> dict[str, Any]:
        try:
            return split(own, self.bandwidth, max(3, self.args.rounds // 2), self.args.steps)
        except Exception as error:
            self._or_raise(error)
            return {"failed": failure(error)}

    def _graph_method(self, own: Own) -> tuple[Callable[[], float], list[float]]:
        runner, called = GraphRunner(own.engine), list[float]()

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
            "bytes": asdict(size),
            "memory": own.memory(),
        }

    def _wants_peers(self, case: Case) -> bool:
        return case.kind in ("given", "tiny") or (case.batch, case.context) in (
            (4, 32768),
            (16, 16384),
        )

    def _measure_peer(self, case: Case, peer: str, own: Own, found: dict[str, Any]) -> None:
        """Time a peer in turns with our graph path, which is measured again."""
        tokens, job = self.args.peer_tokens, self._job(peer, case)
        need = self._peer_need(case) + self.need(case, False)
        if peer not in BOUNDED and need > self.memory:
            reason = f"needs {need / 1e9:.0f} GB beside ours, the memory is {self.memory / 1e9:.0f}"
            found["methods"][peer] = {"failed": reason}
            return
        mine, called = self._graph_method(own)
        try:
            with self._start(job) as process:
                mine()
                called.clear()
                times = take_turns(
                    {"mine": mine, "peer": lambda: process.seconds(tokens) / tokens},
                    self.args.rounds,
                )
                found["methods"][peer] = _peer_method(process, times["peer"])
        except Exception as error:
            self._or_raise(error)
            found["methods"][peer] = {"failed": failure(error).removeprefix("BenchError: ")}
            return
        ours = self._method(own, times["mine"], called)
        found.setdefault("beside", {})[peer] = {
            "ours_ms_per_step": ours["ms_per_step"],
            "ours_over_peers_tokens_per_second": spread(
                [theirs / own for theirs, own in zip(times["peer"], called, strict=True)]
            ),
        }

    def _job(self, peer: str, case: Case) -> Job:
        return Job(
            peer,
            self.args.shape,
            case.batch,
            case.context,
            case.budget,
            self.args.peer_tokens,
            str(self.device),
            self.args.dtype,
        )

    def _start(self, job: Job) -> PeerProcess:
        python = self.args.python.get(job.peer, sys.executable)
        log = self.logs / f"{job.peer.replace(' ', '-')}-{job.batch}x{job.context}.log"
        return PeerProcess(job, python, self.args.patience, log)

    def largest(self, case: Case) -> dict[str, Any]:
        """Time each method alone at the largest batch that fits the stated memory."""
        memory = self.args.largest_memory * 1e9
        found: dict[str, Any] = {**asdict(case), "memory_bytes": memory, "methods": {}}
        for name, full in ((OWN, False), (FULL, True)):

            def need(batch: int, full: bool = full) -> int:
                return self.need(_sized(case, batch), full)

            size = self._most(memory, need)
            if not size:
                found["methods"][name] = {"failed": f"not one sequence fits {memory / 1e9:g} GB"}
                continue
            found["batch"] = found["batch"] or size
            try:
                found["methods"][name] = self._alone(_sized(case, size), full)
            except Exception as error:
                self._or_raise(error)
                found["methods"][name] = {"failed": failure(error)}
            self._release()
        if DYNAMIC in self.args.peers:
            found["methods"][DYNAMIC] = self._largest_peer(case, memory)
        return found

    def _alone(self, case: Case, full: bool) -> dict[str, Any]:
        own = self._open(case, full)
        timed, called = self._graph_method(own)
        timed()
        called.clear()
        return self._method(own, [timed() for _ in range(self.args.rounds)], called)

    def _largest_peer(self, case: Case, memory: float) -> dict[str, Any]:
        batch = self._most(memory, lambda size: self._peer_need(_sized(case, size)))
        if not batch:
            return {"failed": f"not one sequence fits {memory / 1e9:g} GB"}
        try:
            with self._start(self._job(DYNAMIC, _sized(case, batch))) as process:
                tokens = self.args.peer_tokens
                times = [process.seconds(tokens) / tokens for _ in range(self.args.rounds)]
                return _peer_method(process, times)
        except Exception as error:
            self._or_raise(error)
            return {"failed": failure(error).removeprefix("BenchError: ")}

    def _most(self, memory: float, need: Callable[[int], int]) -> int:
        """Find the largest batch up to ``--most-batch`` whose ``need`` is within ``memory``."""
        low, high = 0, self.args.most_batch
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if need(middle) <= memory else (low, middle - 1)
        return low

    def _or_raise(self, error: Exception) -> None:
        if not concerns_one_method(error):
            raise error
        self._release()

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _sized(case: Case, batch: int) -> Case:
    return Case(batch, case.context, case.budget, case.kind)


def _peer_method(process: PeerProcess, times: list[float]) -> dict[str, Any]:
    step = spread([1e3 * t for t in times])
    return {
        "batch": process.job.batch,
        "ms_per_step": step,
        "tokens_per_second": 1e3 * process.job.batch / step["median"],
        "peak_bytes": process.peak_bytes,
        "versions": process.versions,
    }


def _assignments(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        peer, _, path = pair.partition("=")
        if peer not in PEERS or not path:
            raise BenchError(f"--python {pair!r} is not PEER=PATH with one of {', '.join(PEERS)}")
        found[peer] = path
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 when a method of our own failed."""
    options = parser("bench_decode", __doc__)
    options.add_argument("--shape", default="qwen3-4b", choices=SHAPES)
    options.add_argument("--cases", nargs="+", default=["targets"], metavar="CASE")
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
        metavar="PEER=PATH",
        help="Python interpreter of a peer's environment",
    )
    options.add_argument("--patience", type=float, default=240, help="seconds to wait for a peer")
    options.add_argument("--no-parts", dest="parts", action="store_false")
    options.add_argument("--no-eager", dest="eager", action="store_false")
    options.add_argument("--copy-bytes", type=int, help=argparse.SUPPRESS)
    args = options.parse_args(arguments)
    try:
        args.python = _assignments(args.python)
        cases = [case for name in args.cases for case in SETS.get(name) or [Case.parse(name)]]
        bench = Bench(args)
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
        path = save(
            args, f"gpu-decode-{args.shape}", {**machine, "cases": found, "targets": targets}
        )
        show(args.shape, found[-1])
    if curve := figure(args, found):
        print(f"figure in {curve}")
    if targets and bench.device.type == "cuda":
        show_targets(targets)
    print(f"in {path}; what the peers printed: {bench.logs}")
    return int(any("failed" in case["methods"].get(OWN, {}) for case in found))


if __name__ == "__main__":
    sys.exit(main())
