"""``python -m benchmarks.fuzz --seconds N``: odd inputs for every door of mmkv, all made from a
seed.

Classes: the command line, picture files with EXIF data, session files (cut, flipped, forged),
gates, checkpoints, chat templates, rows of MMDU and of training data, calls of the Python API,
requests to the server, heads of requests as bytes, a server whose folder of idle memories fails,
Ctrl-C at any bytecode of any public call, errors of libraries in one of two requests, weights that
change under a retained model, requests with tools, clients that leave in the middle of a reply, and
messages over a WebSocket. Most fail, and each has to fail in mmkv's own words. Counted are
tracebacks (any other exception, or a wrong answer), hangs, page leaks, and files that were changed.
Input N of a class depends on the seed and N alone.

Inputs run in one process under a memory limit; a process that dies counts as a traceback, and the
next goes on with the input after. Every kind of failure leaves a small case, and
``--replay FILE`` runs it again and shows what it leads to.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmkv.training.measure.record import write_results
from mmkv.training.measure.tables import pipe_table

_KINDS = ("traceback", "hang", "leak", "harm")


class Report:
    """The counts of a run, per class."""

    def __init__(self, seed: int, classes: list[str]) -> None:
        self.seed, self.classes = seed, classes
        self.inputs: Counter[str] = Counter()
        self.slowest: dict[str, float] = dict.fromkeys(classes, 0.0)
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._started, self.minutes = time.monotonic(), 0.0

    @classmethod
    def joined(cls, pages: Sequence[dict[str, Any]]) -> Report:
        """Add up result files of several runs."""
        results = [page["results"] for page in pages]
        classes = list(dict.fromkeys(name for each in results for name in each["classes"]))
        made = cls(pages[0]["settings"]["seed"], classes)
        for each in results:
            made.minutes += each["minutes"]
            for name, counts in each["classes"].items():
                made.inputs[name] += counts["inputs"]
                made.seconds[name] += counts["seconds"]
                made.slowest[name] = max(made.slowest[name], counts["slowest_s"])
                for kind in _KINDS:
                    made.counts[name, kind] += counts[f"{kind}s"]
            for found in each["failures"]:
                key = (found["class"], found["kind"], found["place"])
                known = made.failures.setdefault(key, found | {"file": "", "times": 0})
                known["times"] += found["times"]
        return made

    def add(self, line: dict[str, Any]) -> None:
        """Count one input as the worker reports it."""
        name = line["class"]
        self.inputs[name] += 1
        self.slowest[name] = max(self.slowest[name], line["seconds"])
        self.seconds[name] += line["seconds"]
        if "kind" not in line:
            return
        self.counts[name, line["kind"]] += 1
        key = (name, line["kind"], line["place"])
        if key not in self.failures:
            self.failures[key] = {
                "class": name,
                "kind": line["kind"],
                "place": line["place"],
                "message": line["message"],
                "first": line["number"],
                "file": line["file"],
                "times": 0,
            }
        self.failures[key]["times"] += 1

    def died(self, current: dict[str, Any], how: str, cases: Path) -> None:
        """Count the input during which the process died or stopped answering."""
        name, number = current["class"], current["number"]
        cases.mkdir(parents=True, exist_ok=True)
        file = cases / f"{name.replace(' ', '-')}-{self.seed}-{number}.json"
        file.write_text(json.dumps({"class": name, "case": current["case"]}, indent=1) + "\n")
        kind = "hang" if how == "hang" else "traceback"
        line = {"class": name, "number": number, "seconds": 0.0, "kind": kind}
        self.add(line | {"place": how, "message": how, "file": str(file)})

    def table(self) -> str:
        """Return the counts as a table, and below it every kind of failure."""
        rows = []
        for name in (*self.classes, "all"):
            mine = self.classes if name == "all" else [name]
            counts = [sum(self.counts[each, kind] for each in mine) for kind in _KINDS]
            inputs = sum(self.inputs[each] for each in mine)
            slowest = max(self.slowest[each] for each in mine)
            rows.append((name, f"{inputs:,}", *counts, f"{slowest:.1f} s"))
        head = ("class", "inputs", "tracebacks", "hangs", "leaks", "files harmed", "slowest, CPU")
        lines = [pipe_table(head, rows)]
        for found in sorted(self.failures.values(), key=lambda each: -each["times"]):
            lines.append(
                f"{found['times']} x {found['class']}: {found['kind']}: {found['place']}: "
                f"{found['message'].splitlines()[0] if found['message'] else ''} "
                f"(seed {self.seed}, input {found['first']}, {found['file']})"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the counts, without what the run was asked to do."""
        return {
            "minutes": round(self.minutes or (time.monotonic() - self._started) / 60, 1),
            "classes": {
                name: {
                    "inputs": self.inputs[name],
                    **{f"{kind}s": self.counts[name, kind] for kind in _KINDS},
                    "seconds": round(self.seconds[name], 1),
                    "slowest_s": self.slowest[name],
                }
                for name in self.classes
            },
            "failures": [
                {key: value for key, value in found.items() if key != "file"}
                for found in self.failures.values()
            ],
        }


CLASSES = (
    "command line",
    "pictures",
    "session files",
    "gates",
    "checkpoints",
    "chat templates",
    "MMDU rows",
    "training rows",
    "Python API",
    "HTTP bodies",
    "HTTP heads",
    "store faults",
    "interrupts",
    "foreign errors",
    "changed weights",
    "tool bodies",
    "cut streams",
    "socket messages",
)
# Shares of a run's inputs: checkpoints take a hundred times as long as pictures.
_SHARES = (6, 34, 14, 20, 1, 5, 2, 9, 9, 10, 10, 2, 2, 2, 2, 10, 5, 2)
_HANG_SECONDS = 10
_DEAD_SECONDS = 60  # without a word: the process does not even see its alarm
_START_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; exit code 1 when an input led to a failure."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.fuzz", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time to run at most")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs to try at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--memory", type=float, default=6.0, help="GiB that inputs may take")
    parser.add_argument("--cases", type=Path, default=Path("fuzz-cases"), help="for failing cases")
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    parser.add_argument("--join", type=Path, nargs="+", help="add up the --output of other runs")
    parser.add_argument("--replay", type=Path, help="run the case in this file, and nothing else")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.is_dir():
        parser.error(f"--output {options.output} is a folder; name a JSON file in it")
    if options.replay is not None:
        return _replay(options.replay, options)
    if options.join is not None:
        return _join(options.join, options.output)
    report = Report(options.seed, options.classes)
    with suppress(KeyboardInterrupt):  # what there is by then is shown
        _run(options, report)
    print(report.table())
    if options.output is not None:
        settings = {"seed": options.seed, "memory_gib": options.memory}
        write_results(options.output, settings, report.as_json())
    return 1 if report.failures else 0


def _join(files: Sequence[Path], output: Path | None) -> int:
    pages = [json.loads(file.read_text()) for file in files]
    report = Report.joined(pages)
    print(report.table())
    if output is not None:
        runs = [{"commit": page["commit"], **page["settings"]} for page in pages]
        write_results(output, {"runs": runs}, report.as_json())
    return 1 if report.failures else 0


def _wanted(options: argparse.Namespace) -> dict[str, int]:
    shares = {name: share for name, share in zip(CLASSES, _SHARES, strict=True)}
    total = sum(shares[name] for name in options.classes)
    return {name: max(1, options.inputs * shares[name] // total) for name in options.classes}


def _plan(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "classes": options.classes,
        "cases": str(options.cases.absolute()),
        "current": str(Path(folder) / "current.json"),
        "memory": int(options.memory * 2**30),
        "hang_seconds": _HANG_SECONDS,
    }


def _run(options: argparse.Namespace, report: Report) -> None:
    """Run workers, one after the other, until the inputs or the time are used up."""
    wanted = _wanted(options)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="mmkv-fuzz-") as folder:
        plan = _plan(options, folder) | {"wanted": wanted}
        while any(report.inputs[name] < wanted[name] for name in wanted):
            # The time to import and prepare does not count: a run of few seconds has inputs, too.
            left = max(0.0, end - time.monotonic())
            done = {name: report.inputs[name] for name in wanted}
            died = _work(plan | {"counts": done, "seconds": min(left, 1e9)}, report)
            if died is not None:
                report.died(json.loads(Path(plan["current"]).read_text()), died, options.cases)
            elif time.monotonic() >= end or not any(
                report.inputs[name] > done[name] for name in wanted
            ):
                return
            if time.monotonic() >= end:
                return


def _start(plan: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fuzz.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONWARNINGS": "ignore"},
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(plan) + "\n")
    worker.stdin.flush()
    return worker


def _work(plan: dict[str, Any], report: Report) -> str | None:
    """Run one worker; return how it died, None when it came to its end."""
    with _start(plan) as worker:
        assert worker.stdout is not None
        patience: float = _START_SECONDS
        while True:
            if not select.select([worker.stdout], [], [], patience)[0]:
                worker.kill()
                return "hang"
            line = worker.stdout.readline()
            if not line:
                break
            patience = _DEAD_SECONDS
            found = json.loads(line)
            if "class" in found:
                report.add(found)
        code = worker.wait()
    if code == 0:
        return None
    if patience == _START_SECONDS:
        raise SystemExit(
            f"benchmarks.fuzz: the worker ended with code {code} before its first input"
        )
    return f"the process ended with code {code}"


def _replay(file: Path, options: argparse.Namespace) -> int:
    kept = json.loads(file.read_text())
    options.classes = [kept["class"]]
    with tempfile.TemporaryDirectory(prefix="mmkv-fuzz-") as folder:
        plan = _plan(options, folder) | {"case": kept["case"]}
        with _start(plan) as worker:
            said, _ = worker.communicate()
    found = json.loads(said.splitlines()[-1]) if said.count("\n") > 1 else {"kind": "died"}
    print(json.dumps(found, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
