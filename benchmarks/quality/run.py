"""Run every dialogue of ``benchmarks.quality`` through every method, in worker processes.

Each run of a dialogue is one row of a journal. A killed comparison continues from the journal, and
a larger one runs only what is new.

Programs that compare policies share their options, result files and error exits: they are here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.quality.methods import Cell, ComparedMethod, Comparison
from benchmarks.tasks import needles
from benchmarks.tasks.documents import ENDLESS, DistinctDocuments, GeneratedDocuments
from mmkv.engine.cache.forms import FORMS
from mmkv.engine.cache.layout import Layout
from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.families.loading import resolve_device
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model_name
from mmkv.training.data.examples import Examples, examples
from mmkv.training.measure.record import RESULTS, Journal, write_results
from mmkv.training.measure.teacher_forced import DialogueRun, FullCache, Reading, read_together

Record = dict[str, Any]


def held_out(
    model: str, name: str, max_length: int
) -> GeneratedDocuments | DistinctDocuments | Examples:
    """Make held-out dialogues as processor outputs with ``labels [1, T]``, some with ``cuts``.

    A name decides its dialogues completely, and dialogue n does not depend on how many are read.
    Those of a file are all different.

    Args:
        name: of a kind of needles (:attr:`benchmarks.tasks.needles.Haystack.name`), or a source of
            :mod:`mmkv.training.data.examples`.

    Raises:
        InputError: an unknown source, or one that the model cannot read.
    """
    if name.startswith("needle:"):
        return GeneratedDocuments(needles.maker(name, model, load_processor(model)))
    data = examples(model, [name], ENDLESS, seed=0, max_length=max_length, split="heldout")
    # Generated ones differ by their seed.
    generated = name.rpartition("*")[2].startswith(("scenes:", "tasks:"))
    return data if generated else DistinctDocuments(name, data)


class Reader:
    """The loaded model of a comparison and its engines, one per policy and gates."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.base = Runtime.from_pretrained(
            comparison.model, policy="full", dtype=comparison.dtype, device=comparison.device
        )
        self._engines: dict[Cell, Runtime] = {}
        for cell in itertools.chain.from_iterable(comparison.cells().values()):
            self._engine(cell)  # wrong gates show before the long run starts
        self._data: dict[str, Any] = {}

    def _engine(self, cell: Cell) -> Runtime:
        key = cell.unbudgeted()
        if key not in self._engines:
            self._engines[key] = cell.engine(self.base, self.comparison.model)
        return self._engines[key]

    @torch.inference_mode()
    def read(
        self, source: str, todo: Mapping[int, Sequence[Cell]]
    ) -> Iterator[tuple[int, list[Record]]]:
        """Run held-out dialogues, each through its cells, side by side.

        Yields:
            the index of each and a :func:`record` per cell.
        """
        readings = {index: self._reading(source, index) for index in todo}
        found: dict[tuple[int, Cell], Record] = {}
        alike: dict[Cell, dict[int, list[Cell]]] = {}
        for index, cells in todo.items():
            for cell in cells:
                alike.setdefault(cell.unbudgeted(), {}).setdefault(index, []).append(cell)
        for key, mine in alike.items():
            engine = self._engine(key)
            worth = bf16_worth(engine.cache.pool.layout) if key.in_bytes else 1
            asked = []
            for index, cells in mine.items():
                tokens = readings[index].labels.numel()
                budgets = [cell.budget_for(tokens, worth) for cell in cells]
                asked.append(dataclasses.replace(readings[index], budgets=budgets))
            runs = read_together(engine, asked)
            for (index, cells), made in zip(mine.items(), runs, strict=True):
                for cell, run in zip(cells, made, strict=True):
                    found[index, cell] = record(run)
        for index, cells in todo.items():
            yield index, [found[index, cell] for cell in cells]

    def _reading(self, source: str, index: int) -> Reading:
        """Make a dialogue, without budgets; the full cache reads it here."""
        if source not in self._data:
            self._data[source] = held_out(self.comparison.model, source, self.comparison.max_length)
        example = self._data[source][index]
        inputs = {k: v for k, v in example.items() if k not in ("labels", "cuts")}
        labels = example["labels"].flatten().clone()
        labels[0] = -100
        turn = self.base.family.turn(inputs, 0, self.base.device)
        if turn.next_position > self.base.spec.max_position:
            raise InputError(
                f"dialogue {index} of {source} reaches position {turn.next_position:,}, the model "
                f"was trained for {self.base.spec.max_position:,}; give shorter dialogues"
            )
        full = FullCache.of(self.base, turn, labels)
        return Reading(turn, labels, (), full, example.get("cuts", ()))


def bf16_worth(layout: Layout) -> float:
    """Return how many entries of a cache take the bytes of one in bfloat16, metadata included."""
    half = dataclasses.replace(layout, form=FORMS["bf16"])
    return half.entry_bytes() / layout.entry_bytes()


def record(run: DialogueRun) -> Record:
    """Return the record of one dialogue in the result file."""
    return {
        "right": [answer.right for answer in run.answers],
        "tokens": [answer.tokens for answer in run.answers],
        "kl": [round(answer.kl, 5) for answer in run.answers],
        "nll": [round(answer.nll, 5) for answer in run.answers],
        "agree": [answer.agree for answer in run.answers],
        "wrong": [answer.wrong for answer in run.answers],
        "seen": run.tokens_seen,
        "entries": run.entries,
        "evicted": run.evicted,
        "visual": sum(n for name, n in run.by_modality.items() if name != "text"),
        "per_row": run.per_row,
        "bytes": run.nbytes,
    }


class ComparisonRuns:
    """All runs of a comparison: from the journal, or run when they are asked for.

    A context manager. The model is loaded once for all sources, and only if something is left to
    read; so are the workers.

    Args:
        journal: finished runs. They are kept under what decides them, so methods, seeds, budgets
            and dialogues can be added later.
        reader: what reads them, for programs that keep something else of each.
        together: dialogues that share the passes of one process.
    """

    def __init__(
        self,
        comparison: Comparison,
        journal: Journal,
        workers: int = 1,
        reader: type[Reader] = Reader,
        together: int = 1,
    ) -> None:
        self.comparison, self.journal = comparison, journal
        self.workers, self.kind, self.together = workers, reader, together
        self._reader: Reader | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ComparisonRuns:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def of(self, source: str, count: int, first: int = 0) -> dict[str, list[list[Record]]]:
        """Run ``count`` dialogues of a source, from the one with index ``first``, through every
        cell.

        Returns:
            ``"method at budget"`` -> per gate folder -> per dialogue what the reader keeps.
        """
        compared = self.comparison
        cells = compared.cells()
        keys = {cell: cell.key() for cell in itertools.chain.from_iterable(cells.values())}
        where = f"{compared.described()} {compared.max_length} {source} {self.kind.__name__}"
        done = {
            (row["cell"], row["index"]): row["record"] for row in self.journal.rows("where", where)
        }
        wanted = range(first, first + count)
        left = {
            index: [cell for cell in keys if (keys[cell], index) not in done] for index in wanted
        }
        todo = {index: missing for index, missing in left.items() if missing}
        if done:
            note = f"{source}: {len(done)} runs are in {self.journal.path}"
            tqdm.write(note, file=sys.stderr)
        made = self._read(source, todo)
        for index, records in tqdm(made, f"reading {source}", len(todo), unit="dialogue"):
            rows = [
                {"where": where, "cell": keys[cell], "index": index, "record": found}
                for cell, found in zip(todo[index], records, strict=True)
            ]
            for row in self.journal.add(rows):
                done[row["cell"], index] = row["record"]
        return {
            name: [[done[keys[cell], index] for index in wanted] for cell in seeds]
            for name, seeds in cells.items()
        }

    def _read(
        self, source: str, todo: Mapping[int, list[Cell]]
    ) -> Iterator[tuple[int, list[Record]]]:
        if not todo:
            return
        rows = list(todo.items())
        batches = [
            dict(rows[first : first + self.together])
            for first in range(0, len(rows), self.together)
        ]
        if self.workers <= 1:
            self._reader = self._reader or self.kind(self.comparison)
            for batch in batches:
                yield from self._reader.read(source, batch)
            return
        if self._pool is None:
            # Spawned, not forked: torch's threads do not survive a fork.
            self._pool = ProcessPoolExecutor(
                self.workers,
                multiprocessing.get_context("spawn"),
                _start,
                (self.kind, self.comparison, torch.get_num_threads()),
            )
        for future in as_completed(self._pool.submit(_read, source, batch) for batch in batches):
            yield from future.result()


_reader: Reader | None = None


def _start(kind: type[Reader], comparison: Comparison, threads: int) -> None:
    global _reader
    torch.set_num_threads(threads)
    _reader = kind(comparison)


def _read(source: str, batch: dict[int, list[Cell]]) -> list[tuple[int, list[Record]]]:
    assert _reader is not None
    return list(_reader.read(source, batch))


os.environ.setdefault("HF_HUB_OFFLINE", "1")


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
    methods = tuple(ComparedMethod.parse(text) for text in texts)
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
        yield path, Journal(journal)
    except (MmkvError, OSError) as error:
        raise SystemExit(f"{program}: error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(f"{program}: stopped; the same command continues from {journal}") from None


def finish(
    args: argparse.Namespace,
    path: Path,
    found: Mapping[str, Any],
    markdown: Callable[[Any], str],
    draw: Callable[[Any, Path], Any],
) -> None:
    """Write the result file, its tables and its figure beside it, and print the tables."""
    asked = {name: value for name, value in vars(args).items() if name not in ("output", "fresh")}
    write_results(path, asked, found)
    text = markdown(found)
    path.with_suffix(".md").write_text(text)
    draw(found, path.with_suffix(".png"))
    print(text)
