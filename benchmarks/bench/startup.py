"""Time how long commands take from their start to their end, beside ``python -c "import torch"``.

``python -m benchmarks.bench.startup`` starts each command in a process of its own, from files that
the system has read before. The commands take turns, and ``--before DIR`` runs the same commands
from another checkout of mmkv between them. Wall and processor seconds are kept; the ratios are to
the best import of torch of the same run. Compiled modules are kept from run to run, as an
installation has them. On a busy machine only the ratio of processor times means something.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table, take_turns
from benchmarks.bench.shape_files import write_text_model
from mmkv.engine.errors import MmkvError
from mmkv.resources import asset
from mmkv.training.measure.record import ROOT

TORCH = 'python -c "import torch"'
NOW, BEFORE = "now", "before"


@dataclass(frozen=True)
class Command:
    """A command of the table: the interpreter's arguments and the exit code it must end with."""

    arguments: tuple[str, ...]
    code: int = 0


def commands(text_model: str, picture: str) -> dict[str, Command]:
    """Return what is timed, by name, besides the import of torch."""

    def mmkv(*arguments: str, code: int = 0) -> Command:
        return Command(("-m", "mmkv", *arguments), code)

    few = ("--max-new-tokens", "8", "-p")
    return {
        # What every chat imports: transformers' config classes, without its models.
        'python -c "import torch, transformers"': Command(("-c", "import torch, transformers")),
        "mmkv --help": mmkv("--help"),
        "mmkv --version": mmkv("--version"),
        "an argument error": mmkv("chat", "--fps", "x", code=2),
        "a missing picture": mmkv("chat", "--image", "missing.png", "-p", "hi", code=1),
        "a missing model": mmkv("chat", "./missing", "-p", "hi", code=1),
        "chat -p, text model": mmkv("chat", text_model, *few, "what is this?"),
        "chat --image -p, bundled model": mmkv("chat", "--image", picture, *few, "what is this?"),
    }


def seconds(command: Command, checkout: Path) -> tuple[float, float]:
    """Run a command and return its seconds on the clock and of processors.

    Raises:
        BenchError: it ended with another exit code than it should.
    """
    env = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            cwd=tempfile.gettempdir(),
            env=env,
        )
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != command.code:
            said.seek(0)
            last = (said.read().strip().splitlines() or [""])[-1]
            raise BenchError(
                f"{' '.join(command.arguments)} ended with {process.returncode}: {last[:200]}"
            )
    return took, used.ru_utime + used.ru_stime


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all commands of all checkouts in turns, once more than is counted."""
    given = None if args.text_model is None else str(Path(args.text_model).resolve())
    text_model = given or str(write_text_model(folder / "text"))
    checkouts = {NOW: ROOT} | ({BEFORE: args.before.resolve()} if args.before else {})
    torch = Command(("-c", "import torch"))
    methods = {f"{TORCH} | {NOW}": partial(seconds, torch, ROOT)}
    for name, command in commands(text_model, str(asset("scene.png"))).items():
        for checkout, path in checkouts.items():
            methods[f"{name} | {checkout}"] = partial(seconds, command, path)
    found: dict[str, Any] = {}
    for key, runs in take_turns(methods, args.rounds + 1).items():
        # The first reads files and compiles modules.
        wall, processor = (list(each) for each in zip(*runs[1:], strict=True))
        name, _, checkout = key.rpartition(" | ")
        found.setdefault(name, {})[checkout] = {
            "best": min(wall),
            "median": statistics.median(wall),
            "rounds": wall,
            "processor_best": min(processor),
            "processor_median": statistics.median(processor),
        }
    unit = found[TORCH][NOW]
    for sides in found.values():
        for figures in sides.values():
            figures["ratio"] = figures["best"] / unit["best"]
            figures["ratio_of_medians"] = figures["median"] / unit["median"]
            figures["processor_ratio"] = figures["processor_best"] / unit["processor_best"]
    return found


def table_of(found: dict[str, Any]) -> list[list[str]]:
    """Return the best seconds of each command in each checkout, the heading first."""
    rows = [["seconds (times an import of torch)", NOW, BEFORE]]
    for name, sides in found.items():
        cells = (
            f"{sides[at]['best']:.2f} ({sides[at]['ratio']:.2f})" if at in sides else ""
            for at in (NOW, BEFORE)
        )
        rows.append([f"`{name}`" if name.startswith(("mmkv", "python")) else name, *cells])
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the result file; return the exit code."""
    parser = plain_parser("bench.startup", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each command")
    parser.add_argument("--before", type=Path, default=None, help="checkout to compare with")
    parser.add_argument("--text-model", default=None, help="default: the bundled one's text half")
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="mmkv-startup-") as folder:
            found = measure(args, Path(folder))
    except MmkvError as error:
        print(f"startup: error: {error}", file=sys.stderr)
        return 1
    rows = table_of(found)
    table("Start-up", rows[0], rows[1:])
    print(f"written to {save(args, 'startup-cpu', found, {'startup': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
