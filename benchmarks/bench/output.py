"""Arguments, result files, tables and figures that the speed programs share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bench.harness import BenchError
from mmkv.training.measure.record import RESULTS, write_results


def plain_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that say where results go."""
    made = argparse.ArgumentParser(
        prog=f"python -m eval.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    made.add_argument("--name", default=None, help="name of the result file, without .json")
    return made


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of all speed programs."""
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
        BenchError: there is none, and the CPU was not asked for.
    """
    device, dtype = where(args)
    if device.type != "cuda" and args.device == "auto" and args.shape != "tiny":
        raise BenchError(
            "no GPU here; --shape tiny shows that it runs, --device cpu insists (slow)"
        )
    return device, dtype


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that change what is measured."""
    return {k: v for k, v in vars(args).items() if k not in ("output", "name")}


def save(args: argparse.Namespace, name: str, found: Any) -> Path:
    """Write what has been found so far; called after each case, so that nothing is lost."""
    path: Path = args.output / f"{args.name or name}.json"
    return write_results(path, settings(args), found)


def device_note(device: torch.device) -> str:
    """Return the machine and versions that the figures were measured with."""
    if device.type == "cuda":
        return f"measured on {torch.cuda.get_device_name(device)}"
    return "a CPU: the kernels' torch references ran; this shows that the program works, no more"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows; the first column is text, the others are right-aligned."""
    made = Table(title=title)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    Console(width=150).print(made)


def failure(error: BaseException) -> str:
    """Return the first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:240]


def curves(
    path: Path,
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, tuple[list[Any], list[Any]]],
) -> Path | None:
    """Draw ``name -> (x, y)`` on logarithmic axes; return None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    for name, (x, y) in lines.items():
        axes.plot(x, y, marker="o", label=name)
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1], xscale="log", yscale="log")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
