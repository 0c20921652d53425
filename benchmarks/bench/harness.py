"""One harness for the speed programs: settings, rounds in turns, tables and result files.

A program adds its own options to those of :func:`parser`, times its methods with
:func:`take_turns`, writes what it has after each case (:func:`save`) and shows it as a table.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.bench.child import BenchError
from mmkv.engine.errors import MmkvError
from mmkv.eval.step import spread, wall
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import Table

T = TypeVar("T")


def plain_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that say where results go."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    made.add_argument("--name", default=None, help="name of the result file, without .json")
    return made


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of all speed programs that a GPU may run."""
    made = plain_parser(name, about)
    made.add_argument("--device", default="auto", help="auto, cpu or cuda")
    made.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    made.add_argument("--rounds", type=int, default=7, help="timed runs of each method")
    return made


def where(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype asked for. Raises ModelError for a device that is not there."""
    from mmkv.engine.model.families.loading import resolve_device

    return resolve_device(args.device), getattr(torch, args.dtype)


def on_gpu(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return what :func:`where` returns; refuse a CPU, where these programs take hours.

    Raises:
        BenchError: there is no GPU, and the CPU was not asked for.
    """
    device, dtype = where(args)
    if device.type != "cuda" and args.device == "auto" and args.shape != "tiny":
        raise BenchError(
            "no GPU here; --shape tiny shows that it runs, --device cpu insists (slow)"
        )
    return device, dtype


def assignments(pairs: Sequence[str], known: Iterable[str]) -> dict[str, str]:
    """Read ``--python NAME=PATH``, an interpreter for each peer. Raises BenchError."""
    found, known = dict[str, str](), list(known)
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in known or not path:
            raise BenchError(f"--python {pair!r} is not NAME=PATH with one of {', '.join(known)}")
        found[name] = path
    return found


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that change what is measured."""
    return {k: v for k, v in vars(args).items() if k not in ("output", "name")}


def save(
    args: argparse.Namespace,
    name: str,
    found: Any,
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> Path:
    """Write what has been found so far, and the tables that pages show of it.

    Called after each case, so that nothing is lost.
    """
    path: Path = args.output / f"{args.name or name}.json"
    return write_results(path, settings(args), found, tables)


def device_note(device: torch.device) -> str:
    """Return the machine that the figures were measured on."""
    if device.type == "cuda":
        return f"measured on {torch.cuda.get_device_name(device)}"
    return "a CPU: the kernels' torch references ran; this shows that the program works, no more"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows, the first column as a name."""
    Table(title, columns, [[str(cell) for cell in row] for row in rows]).show()


def shown(value: Mapping[str, Any], form: str = ".3f", scale: float = 1) -> str:
    """Return a median with its quartiles, in text."""
    middle, low, high = (
        format(scale * one, form) for one in (value["median"], *value["quartiles"])
    )
    return f"{middle} ({low} .. {high})"


def failure(error: BaseException) -> str:
    """Return the first line of an error, short enough for a table."""
    kind = "" if isinstance(error, BenchError) else f"{type(error).__name__}: "
    return f"{kind}{(str(error).strip().splitlines() or [''])[0]}"[:240]


def attempt(found: dict[str, Any], name: str, call: Callable[[], T]) -> T | None:
    """Return what a method returns; where it fails, note why under its name and return None.

    An error after which a GPU cannot be used any more by this process is raised.
    """
    try:
        return call()
    except (MmkvError, RuntimeError) as error:
        lost = ("device-side assert", "illegal memory", "misaligned", "launch failure")
        if isinstance(error, RuntimeError) and any(word in str(error) for word in lost):
            raise
        found[name] = {"failed": failure(error)}
    release()
    return None


def release() -> None:
    """Give memory that nothing holds back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Compute the spread of what one method has over another, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def take_turns(methods: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every method once a round, in an order that turns round each time.

    Drift of the machine then falls on all methods alike. The methods return what they measured.
    """
    measured: dict[str, list[T]] = {name: [] for name in methods}
    for round_ in range(rounds):
        for name in list(methods) if round_ % 2 == 0 else reversed(list(methods)):
            measured[name].append(methods[name]())
    return measured


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Measure floating-point operations per second of a square product of random matrices."""
    left, right = (torch.empty(size, size, device=device).normal_().to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = time_calls(lambda: torch.matmul(left, right, out=out), device, 5)
    return 2 * size**3 / statistics.median(times)


def time_calls(
    call: Callable[[], Any], device: torch.device, rounds: int = 7, least: float = 0.02
) -> list[float]:
    """Time calls: seconds per call, one figure a round.

    On a GPU the call is captured as a CUDA graph and its replays are timed with events: gaps
    between launches, which a graph of the whole step does not have either, stay out. The call
    must not read anything back, and must leave its inputs such that it can be repeated.

    Args:
        least: seconds of one round; it decides how often the call is repeated in it.
    """
    if device.type == "cuda":
        return _time_graph(call, device, rounds, least)
    once = min(wall(call, device) for _ in range(2))
    repeats = max(1, round(least / max(once, 1e-9)))

    def repeated() -> None:
        for _ in range(repeats):
            call()

    return [wall(repeated, device) / repeats for _ in range(rounds)]


def _time_graph(
    call: Callable[[], Any], device: torch.device, rounds: int, least: float
) -> list[float]:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # libraries allocate and kernels compile before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    replay(2)
    repeats = max(2, min(2000, round(least / max(replay(3), 1e-9))))
    replay(repeats)  # brings the clocks up
    return [replay(repeats) for _ in range(rounds)]
