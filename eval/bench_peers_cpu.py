"""Compare mmkv with llama.cpp, transformers and kvpress on a CPU, in one run.

``python -m eval.bench_peers_cpu MODEL`` reads prompts and decodes greedily with every method: mmkv
with its full cache and within a budget, with weights in bfloat16 and in int8; llama.cpp (through
llama-cpp-python) with f16 and Q8_0; transformers; kvpress. Each is a process of its own with as
many threads as the others, all get the same token ids, and they take turns in every case. A method
that is not installed is a line in the report. ``--python llama.cpp=/envs/llama/bin/python`` says
which interpreter has one (``pip install llama-cpp-python gguf``).

Figures are CPU time of one thread, or times on the clock with more of them; both are in the file.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

from mmkv.engine.errors import MmkvError
from mmkv.eval.bench.harness import BenchError, Child
from mmkv.eval.bench.output import failure, plain_parser, save
from mmkv.eval.bench.peers_cpu import CpuPeerJob
from mmkv.eval.measure.timing import ratios, spread, take_turns
from mmkv.training.measure.record import ROOT, require_output
from mmkv.training.measure.tables import Table

MIB = 2**20
# What Python, torch and the code may take beside weights and entries.
PROGRAM_BYTES = 350 * MIB
# Bits of a weight with its share of a scale: a block of 32 has one of 16 bits.
BITS = {"bf16": 16, "f16": 16, "int8": 8.5, "q8_0": 8.5}
# Prompts are level while the median is within this of the other's.
LEVEL = 1.05


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
    """Yield the targets; ratios are medians over rounds, in each of which both sides ran."""

    def ratio(what: str, case: str, over: str, under: str, wanted: float, least: bool) -> Any:
        methods = found["cases"].get(case, {}).get("methods", {})
        if over not in methods or under not in methods:
            return None
        value = ratios(*(methods[name][f"{found['clock']}_ms"]["rounds"] for name in (over, under)))
        met = value["median"] >= wanted if least else value["median"] <= wanted
        return {
            "target": what,
            "value": value,
            "wanted": f"{'>=' if least else '<='} {wanted:g}",
        } | {"met": met}

    contexts = sorted(int(case.split()[1]) for case in found["cases"] if case.startswith("context"))
    batches = sorted(int(case.split()[1]) for case in found["cases"] if case.startswith("batch"))
    prompts = [case for case in found["cases"] if case.startswith("prompt")]
    pairs = (("mmkv bf16", "llama.cpp f16"), ("mmkv int8", "llama.cpp Q8_0"))
    made: list[Any] = []
    for ours, theirs in pairs if contexts else ():
        case = f"context {contexts[0]}"
        what = f"ms per token at {contexts[0]} tokens, {ours} / {theirs}"
        made.append(ratio(what, case, ours, theirs, 1, False))
    for ours in ("mmkv int8, budget", "mmkv bf16, budget") if contexts else ():
        what = f"llama.cpp Q8_0 / {ours}, ms per token at {contexts[-1]:,} tokens"
        made.append(ratio(what, f"context {contexts[-1]}", "llama.cpp Q8_0", ours, 3, True))
    for case in prompts:
        for ours, theirs in pairs:
            what = f"ms of a {case} tokens, {ours} / {theirs}"
            made.append(ratio(what, case, ours, theirs, LEVEL, False))
    for ours in ("mmkv bf16", "mmkv int8") if batches else ():
        what = f"tokens/s in a batch of {batches[-1]}, {ours} / mmkv before"
        made.append(ratio(what, f"batch {batches[-1]}", "mmkv before", ours, 2, True))
    yield from filter(None, made)
    for name, about in found["methods"].items():
        ours = name.startswith("mmkv") and name != "mmkv before"
        if ours and about.get("memory", {}).get("peak_rss"):
            value = about["memory"]["peak_rss"] / allowed_bytes(found, name)
            yield {
                "target": f"peak size of the process / allowed, {name}",
                "value": spread([value]),
                "wanted": "<= 1",
                "met": value <= 1,
            }


def case_rows(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row per method: times, tokens/s, and the size of its process."""
    cases = found["cases"]
    yield ["method", *map(_heading, cases), "peak RSS", "PSS", "allowed"]
    for name, about in found["methods"].items():
        cells = []
        for case, measured in cases.items():
            times = measured["methods"].get(name)
            if times is None:
                cells.append("-")
                continue
            times = times[f"{found['clock']}_ms"]
            write: Callable[[float], str] = _plain
            if case.startswith("batch"):
                batch = int(case.split()[1])
                times = spread([1e3 * batch / ms for ms in times["rounds"]])
                write = _whole
            low, high = times["quartiles"]
            cells.append(f"{write(times['median'])} ({write(low)} .. {write(high)})")
        memory = about.get("memory", {})
        sizes = [_mib(memory.get(key)) for key in ("peak_rss", "pss")]
        allowed = _mib(allowed_bytes(found, name)) if memory else "-"
        yield [label(name, found), *cells, *sizes, allowed]


def target_rows(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row per target."""
    yield ["target", "measured", "wanted", "holds"]
    for row in found["targets"]:
        low, high = row["value"]["quartiles"]
        measured = f"{row['value']['median']:.2f}"
        if low != high:
            measured += f" ({low:.2f} .. {high:.2f})"
        holds = "yes" if row["met"] else "no"
        yield [
            row["target"].replace("budget", f"M = {found['budget']}"),
            measured,
            row["wanted"],
            holds,
        ]


def label(name: str, found: Mapping[str, Any]) -> str:
    """Return a method's name with the budget it ran in."""
    return name.replace("budget", f"M = {found['budget']}")


def _heading(case: str) -> str:
    kind, _, count = case.partition(" ")
    number = f"{int(count):,}"
    return {
        "prompt": f"prompt of {number}, ms",
        "context": f"at {number}, ms/token",
        "batch": f"batch {number}, tokens/s",
    }[kind]


def _plain(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:,.0f} MiB"


@dataclass(frozen=True)
class Side:
    """A row of the table: a method of ``eval.bench.peers_cpu``, and how its weights lie."""

    method: str
    weights: str

    @property
    def environment(self) -> str:
        """Return what ``--python`` calls its interpreter."""
        return self.method.split()[0]


SIDES = {
    "llama.cpp f16": Side("llama.cpp", "f16"),
    "llama.cpp Q8_0": Side("llama.cpp", "q8_0"),
    "transformers bf16": Side("transformers", "bf16"),
    "kvpress bf16, budget": Side("kvpress", "bf16"),
    "mmkv bf16": Side("mmkv full", "bf16"),
    "mmkv bf16, budget": Side("mmkv budget", "bf16"),
    "mmkv int8": Side("mmkv full", "int8"),
    "mmkv int8, budget": Side("mmkv budget", "int8"),
    # The same as mmkv bf16, of another checkout (--before).
    "mmkv before": Side("before", "bf16"),
}

# The benchmark's modules come from this checkout, all others from the one that is measured.
BEFORE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import mmkv
here = Path(sys.argv[1], "eval")
spec = spec_from_file_location(
    "mmkv.eval", here / "__init__.py", submodule_search_locations=[str(here)]
)
mmkv.eval = sys.modules["mmkv.eval"] = module_from_spec(spec)
spec.loader.exec_module(mmkv.eval)
from mmkv.eval.bench.peers_cpu import main
sys.exit(main(sys.argv[2:]))
"""


class Bench:
    """Every method in its process, and what has been measured so far."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args, self.stack = args, stack
        self.children: dict[str, Child] = {}
        self.files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.logs = Path(tempfile.mkdtemp(prefix="mmkv-bench-"))
        self.failed: dict[str, str] = {}
        self.methods: dict[str, Any] = {}
        self.cases: dict[str, Any] = {}
        self.logits: dict[str, list[float]] = {}
        self.config = json.loads((args.model / "config.json").read_text())
        draw = random.Random(args.seed)
        count = max(*args.contexts, args.prompt, max(args.batches) * args.batch_context)
        self.tokens = [draw.randrange(3, self.config["vocab_size"]) for _ in range(count)]

    def start(self, name: str) -> None:
        """Start the process of one method, or note why it cannot."""
        side, args = SIDES[name], self.args
        job = CpuPeerJob(
            method="mmkv full" if side.environment == "before" else side.method,
            weights=side.weights,
            model=str(args.model),
            gguf="",
            threads=args.threads,
            preparing=args.preparing_threads,
            longest=max(*args.contexts, args.prompt) + args.steps + 8,
            short=args.batch_context + args.steps + 8,
            budget=args.budget,
            policy=args.policy,
            gates=args.gates,
            kv=args.kv,
        )
        log = self.logs / f"{name.replace(' ', '-').replace(',', '')}.log"
        python = args.python.get(side.environment, sys.executable)
        try:
            if side.environment == "llama.cpp":
                job = self.with_gguf(job, python)
            program = ["-m", "mmkv.eval.bench.peers_cpu"]
            path = ROOT
            if side.environment == "before":
                program, path = ["-c", BEFORE, str(ROOT)], args.before
            command = [python, *program, json.dumps(asdict(job))]
            child = self.stack.enter_context(Child(command, args.patience, log, path))
        except BenchError as error:
            self.drop(name, error)
            return
        self.children[name] = child
        self.methods[name] = {
            "weights": side.weights,
            "evicts": side.method in ("mmkv budget", "kvpress"),
            "versions": child.versions,
            "loaded": child.ready["memory"],
        }

    def with_gguf(self, job: CpuPeerJob, python: str) -> CpuPeerJob:
        """Return the job with a GGUF file of the model, written in llama.cpp's environment."""
        target = self.files / f"{job.weights}.gguf"
        words = ["-m", "mmkv.eval.bench.llama_gguf", job.model, f"{target}={job.weights}"]
        probe = [python, "-c", "import llama_cpp"]
        for command, remedy in (
            (probe, "pip install llama-cpp-python gguf, or name an environment with --python"),
            ([python, *words], "the GGUF file was not written"),
        ):
            try:
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, check=False
                )
            except OSError as error:
                raise BenchError(f"cannot start {python}: {error.strerror}") from error
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise BenchError(f"{reason} ({remedy})")
        return CpuPeerJob(**(asdict(job) | {"gguf": str(target)}))

    def drop(self, name: str, error: BaseException) -> None:
        """Go on without a method."""
        self.failed[name] = failure(error).removeprefix("BenchError: ")
        print(f"{name}: {self.failed[name]}", file=sys.stderr)
        child = self.children.pop(name, None)
        if child is not None:
            child.close()

    def ask(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        """Have a method do something; an answer of nan from one that has failed."""
        if name in self.children:
            try:
                return self.children[name].ask(order)
            except BenchError as error:
                self.drop(name, error)
        return {"cpu": nan, "wall": nan, "logits": [], "memory": {}}

    def time(self, case: str, order: dict[str, Any], steps: int, rounds: int) -> None:
        """Have all methods do the same in turns, once untimed and then ``rounds`` times.

        Args:
            steps: parts of one answer's time, in which the figures are given.
        """
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in self.children}

        def once(name: str) -> float:
            answers[name].append(self.ask(name, order))
            return 0.0

        take_turns({name: partial(once, name) for name in list(self.children)}, 1 + rounds)
        self.cases[case] = {"steps": steps, "methods": {}}
        for name in self.children:
            self.cases[case]["methods"][name] = {
                f"{clock}_ms": spread([1e3 * a[clock] / steps for a in answers[name][1:]])
                for clock in ("cpu", "wall")
            }
            if "tokens" in answers[name][0]:
                self.cases[case]["methods"][name]["tokens"] = answers[name][0]["tokens"]

    def hold(self, prompts: list[list[int]]) -> None:
        """Have all methods hold ``prompts``; note the size of each process after one."""
        for name in list(self.children):
            answer = self.ask(name, {"hold": prompts})
            self.logits[name] = answer["logits"]
            if name in self.children and len(prompts) == 1:
                self.methods[name]["memory"] = {"context": len(prompts[0]), **answer["memory"]}

    def run(self) -> dict[str, Any]:
        """Measure every case; write what there is after each."""
        args = self.args
        for name in args.methods:
            self.start(name)
        if not self.children:
            return self.found()
        self.time(f"prompt {args.prompt}", {"read": self.tokens[: args.prompt]}, 1, args.rounds)
        for context in sorted(args.contexts):
            self.hold([self.tokens[:context]])
            if context == min(args.contexts):
                self.compare_logits()
            self.time(f"context {context}", {"decode": args.steps}, args.steps, args.rounds)
            self.save()
        each = args.batch_context
        for batch in sorted(args.batches):
            self.hold([self.tokens[each * i : each * (i + 1)] for i in range(batch)])
            order = {"decode": args.batch_steps}
            self.time(f"batch {batch}", order, args.batch_steps, args.rounds)
            self.save()
        return self.found()

    def compare_logits(self) -> None:
        """Note how far logits lie from those of the first method that has some.

        All run the same weights.
        """
        found = {name: values for name, values in self.logits.items() if values}
        if not found:
            return
        first, base = next(iter(found.items()))
        size = sum(x * x for x in base) ** 0.5
        for name, values in found.items():
            if name in self.methods:
                apart = sum((x - y) ** 2 for x, y in zip(values, base, strict=True)) ** 0.5
                self.methods[name]["logits_apart"] = {"from": first, "relative": apart / size}

    def found(self) -> dict[str, Any]:
        """Return all that has been measured."""
        made = {
            "model": self.args.model.name,
            "sizes": sizes(self.args.model, self.config),
            "clock": "cpu" if self.args.threads == 1 else "wall",
            "budget": self.args.budget,
            "methods": self.methods,
            "not_run": self.failed,
            "cases": self.cases,
        }
        return made | {"targets": checks(made)}

    def save(self) -> Path:
        """Write the result file."""
        return save(self.args, "peers-cpu", self.found())


def sizes(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Count a checkpoint's parameters, and the numbers that one token adds to its cache."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                size = 1
                for side in file.get_slice(key).get_shape():
                    size *= side
                count += size
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rows = config["num_hidden_layers"] * config["num_key_value_heads"]
    return {"parameters": count, "numbers_per_token": 2 * head_dim * rows}


def _assignments(pairs: Sequence[str]) -> dict[str, str]:
    known = list(dict.fromkeys(side.environment for side in SIDES.values()))
    found = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in known or not path:
            raise BenchError(f"--python {pair!r} is not NAME=PATH with one of {', '.join(known)}")
        found[name] = path
    return found


def options() -> argparse.ArgumentParser:
    """Make the parser."""
    made = plain_parser("bench_peers_cpu", __doc__)
    made.add_argument("model", type=Path, metavar="MODEL", help="folder of a Llama checkpoint")
    add = made.add_argument
    add("--methods", nargs="+", choices=list(SIDES), metavar="METHOD", help=", ".join(SIDES))
    add("--python", nargs="*", default=[], metavar="NAME=PATH", help="a method's interpreter")
    add(
        "--before", type=Path, metavar="DIR", help="another checkout, built, to run beside this one"
    )
    add("--threads", type=int, default=1, help="of what is timed")
    add("--preparing-threads", type=int, default=2, help="of prompts that are not timed")
    add("--rounds", type=int, default=5, help="timed runs of each method in each case")
    add("--prompt", type=int, default=64, help="tokens of the prompt that is timed")
    add("--contexts", type=int, nargs="+", default=[64, 2048, 4096], help="tokens held")
    add("--steps", type=int, default=16, help="decode steps of a run")
    add("--batches", type=int, nargs="+", default=[8, 32], help="sequences decoded together")
    add("--batch-context", type=int, default=64, help="tokens that each of them holds")
    add("--batch-steps", type=int, default=8, help="decode steps of a run of them")
    add("--budget", type=int, default=256, help="M, entries per layer and KV head")
    add("--policy", default="dbtrimkv", help="of mmkv within the budget")
    add("--gates", help="its gates: a folder or file, a hub id, or random")
    add("--kv", default="bf16", help="form of mmkv's keys and values")
    add("--seed", type=int, default=0, help="of the token ids")
    add("--patience", type=float, default=300, help="seconds to wait for an answer")
    return made


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments once they can be run. Raises BenchError, InputError."""
    args.python = _assignments(args.python)
    args.model = args.model.resolve()
    if not (args.model / "config.json").is_file():
        raise BenchError(
            f"{args.model} holds no config.json; python -m eval.smollm2 DIR fetches a model"
        )
    counts = [args.threads, args.preparing_threads, args.rounds, args.prompt, args.steps]
    if min(*counts, *args.contexts, *args.batches, args.batch_context, args.batch_steps) < 1:
        raise BenchError("every count must be at least 1")
    if args.methods is None:
        args.methods = [name for name in SIDES if name != "mmkv before" or args.before]
    if "mmkv before" in args.methods and args.before is None:
        raise BenchError("mmkv before is another checkout: name it with --before DIR")
    if args.gates and Path(args.gates).exists():
        args.gates = str(Path(args.gates).resolve())
    if args.before:
        args.before = args.before.resolve()
    require_output(args.output)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 when no method could be run."""
    parser = options()
    args = parser.parse_args(arguments)
    try:
        args = checked(args)
    except MmkvError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        bench = Bench(args, stack)
        found = bench.run()
        path = bench.save()
    for title, rows in (
        ("Beside other engines", case_rows(found)),
        ("Targets", target_rows(found)),
    ):
        columns, *body = rows
        table = Table(title, columns)
        for row in body:
            table.add(*row)
        table.show()
    for name, reason in found["not_run"].items():
        print(f"{name} was not run: {reason}")
    print(f"in {path}; what the methods printed: {bench.logs}")
    return int(not found["methods"])


if __name__ == "__main__":
    sys.exit(main())
