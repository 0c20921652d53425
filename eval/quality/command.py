"""Options, result files and error exits of the programs that compare policies."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.families.loading import resolve_device
from mmkv.eval.measure.journal import Journal
from mmkv.eval.quality.methods import Comparison, Method
from mmkv.resources import bundled_model_name
from mmkv.training.measure.record import RESULTS, write_results


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of every comparison; ``name``: of the result files."""
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each worker")
    parser.add_argument("--workers", type=int, default=1, help="processes that run dialogues")
    parser.add_argument(
        "--fresh", action="store_true", help="drop the runs in the journal and start anew"
    )
    parser.add_argument("--name", default=name, help="name of the files NAME.json, .md and .png")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")


def add_methods(parser: argparse.ArgumentParser, budgets: tuple[str, ...]) -> None:
    """Add ``--method`` and ``--budgets``, for programs that have a default for both."""
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="[NAME=]POLICY[@N][:GATES,..]",
        help="repeatable; default: dbtrimkv with the model's own gates, snapkv, streamingllm",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        default=list(budgets),
        help="mean entries per layer and KV head, or shares of the dialogue such as 1/8",
    )


def comparison(args: argparse.Namespace) -> Comparison:
    """Return the comparison that the options of :func:`add_methods` describe.

    Raises:
        InputError: for a method or a budget that cannot be read.
    """
    texts = args.method
    if not texts:
        gates = Path(args.model) / "gates"
        texts = [f"dbtrimkv:{gates}"] if (gates / "gates.json").is_file() else []
        texts += ["snapkv", "streamingllm"]
    methods = tuple(Method.parse(text) for text in texts)
    return Comparison(args.model, args.dtype, methods, tuple(args.budgets), device=args.device)


@contextmanager
def running(args: argparse.Namespace, program: str) -> Iterator[tuple[Path, Journal]]:
    """Give the result file's path and the journal; an error or Ctrl-C inside ends in one line.

    What was read is in the journal by then. ``args.device`` is what ``auto`` stands for from then
    on.
    """
    torch.set_num_threads(args.threads)
    path = args.output / f"{args.name}.json"
    journal = path.with_suffix(".runs.jsonl")
    try:
        args.device = resolve_device(args.device).type
        if args.device != "cpu" and args.workers > 1:
            raise InputError(
                f"--workers {args.workers} would share one GPU; leave out --workers, or give "
                "--device cpu"
            )
        args.output.mkdir(parents=True, exist_ok=True)
        if args.fresh:
            journal.unlink(missing_ok=True)
            for left in journal.parent.glob(f"{journal.stem}.*.session"):  # eval.sessions' stream
                left.unlink()
        yield path, Journal(journal)
    except (MmkvError, OSError) as error:
        raise SystemExit(f"{program}: error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(f"{program}: stopped; the same command continues from {journal}") from None


class Report(Protocol):
    """A module that makes a Markdown text and a figure of a result file."""

    def markdown(self, found: Any, /) -> str:
        """Return the tables."""
        ...

    def draw(self, found: Any, path: Path, /) -> None:
        """Write the figure."""
        ...


def finish(args: argparse.Namespace, path: Path, found: Mapping[str, Any], report: Report) -> None:
    """Write the result file, its tables and its figure beside it, and print the tables."""
    asked = {name: value for name, value in vars(args).items() if name not in ("output", "fresh")}
    write_results(path, asked, found)
    text = report.markdown(found)
    path.with_suffix(".md").write_text(text)
    report.draw(found, path.with_suffix(".png"))
    print(text)
