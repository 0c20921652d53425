"""The harness of the programs that compare policies on held-out dialogues.

A program parses its options (:func:`add_options`), reads every dialogue through every method
(:class:`ComparisonRuns`), and hands what it found with tables and a figure to :func:`finish`. Each
run of a dialogue is one row of a journal: a killed comparison continues from it, and a larger one
runs only what is new. Rows become means with intervals and paired tests over dialogues
(:func:`summarise`), and these tables (:func:`tables`) and curves (:func:`draw`).
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
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.quality.methods import Cell, Comparison, axis_label
from benchmarks.tasks import needles
from benchmarks.tasks.documents import ENDLESS, DistinctDocuments, GeneratedDocuments
from mmkv.engine.cache.forms import FORMS
from mmkv.engine.cache.layout import Layout
from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.families.loading import resolve_device
from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.stats import mean, paired
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model_name
from mmkv.training.data.examples import Examples, examples
from mmkv.training.measure.record import RESULTS, Journal, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import DialogueRun, FullCache, Reading, read_together

T = TypeVar("T")
Record = dict[str, Any]
Runs = Sequence[Sequence[Mapping[str, Any]]]
Page = Mapping[str, Any]
Table = list[list[str]]


# --- options, result files and errors ---


def add_options(parser: argparse.ArgumentParser, name: str, journal: bool = True) -> None:
    """Add the options of every comparison.

    Args:
        name: of the result files; journal: whether runs go through :class:`ComparisonRuns`.
    """
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each worker")
    if journal:
        parser.add_argument("--workers", type=int, default=1, help="processes that run dialogues")
        parser.add_argument(
            "--fresh", action="store_true", help="drop the runs in the journal and start anew"
        )
    else:
        parser.set_defaults(workers=1, fresh=False)
    parser.add_argument("--name", default=name, help="name of the files NAME.json, .md and .png")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")


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
    found: Any,
    shown: Mapping[str, Table],
    draw: Callable[[Any, Path], Any],
) -> None:
    """Write the result file with its tables, the same as Markdown, and the figure; print them.

    Args:
        shown: tables by name, rows of cells, the heading first.
    """
    asked = {name: value for name, value in vars(args).items() if name not in ("output", "fresh")}
    write_results(path, asked, found, shown)
    parts = (f"### {name}\n\n{pipe_table(rows[0], rows[1:])}\n" for name, rows in shown.items())
    text = "\n".join(parts)
    path.with_suffix(".md").write_text(text)
    draw(found, path.with_suffix(".png"))
    print(text)


# --- reading ---


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
        together: dialogues that share the passes of one process.
    """

    def __init__(
        self,
        comparison: Comparison,
        journal: Journal,
        workers: int = 1,
        together: int = 1,
    ) -> None:
        self.comparison, self.journal = comparison, journal
        self.workers, self.together = workers, together
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
        where = f"{compared.described()} {compared.max_length} {source} Reader"
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
            self._reader = self._reader or Reader(self.comparison)
            for batch in batches:
                yield from self._reader.read(source, batch)
            return
        if self._pool is None:
            # Spawned, not forked: torch's threads do not survive a fork.
            self._pool = ProcessPoolExecutor(
                self.workers,
                multiprocessing.get_context("spawn"),
                _start,
                (self.comparison, torch.get_num_threads()),
            )
        for future in as_completed(self._pool.submit(_read, source, batch) for batch in batches):
            yield from future.result()


_reader: Reader | None = None


def _start(comparison: Comparison, threads: int) -> None:
    global _reader
    torch.set_num_threads(threads)
    _reader = Reader(comparison)


def _read(source: str, batch: dict[int, list[Cell]]) -> list[tuple[int, list[Record]]]:
    assert _reader is not None
    return list(_reader.read(source, batch))


# --- means and paired tests ---


def summarise(
    raw: Mapping[str, Runs], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute means with intervals for every method and budget, and the paired tests between
    methods.

    Args:
        raw: what :meth:`ComparisonRuns.of` returns.

    Returns:
        ``rows`` (one per method and budget), ``tests`` (first method against each other method, and
        against the full cache) and the sizes of the data. With ``whole_texts``, where every token
        but the first was predicted and none asked for, negative log-likelihoods stand for accuracy.
    """
    full = raw["full"][0]
    questions = [len(row["right"]) for row in full]
    tokens = [sum(row["tokens"]) for row in full]
    texts = all(count == row["seen"] - 1 for count, row in zip(tokens, full, strict=True))
    rows = [row_of("full", "1", raw["full"], questions, tokens)]
    tests = []
    for budget in budgets:
        for method in methods:
            runs = raw[f"{method} at {budget}"]
            rows.append(row_of(method, budget, runs, questions, tokens))
            rows[-1]["of_full"] = rows[-1]["accuracy"]["value"] / max(
                rows[0]["accuracy"]["value"], 1e-9
            )
        for of, one, two in comparisons(raw, methods, budget):
            tests.append(
                {
                    "budget": budget,
                    "of": of,
                    "accuracy": difference(one, two, "right", questions),
                    "kl_per_token": difference(one, two, "kl", tokens),
                }
            )
            if texts:
                tests[-1]["nll_per_token"] = difference(one, two, "nll", tokens)
    return {
        **({"whole_texts": True} if texts else {}),
        "dialogues": len(full),
        "questions": sum(questions),
        "answer_tokens": sum(tokens),
        "context_tokens": {
            "mean": sum(row["seen"] for row in full) / len(full),
            "least": min(row["seen"] for row in full),
            "most": max(row["seen"] for row in full),
        },
        "rows": rows,
        "tests": tests,
    }


def comparisons(
    raw: Mapping[str, T], methods: Sequence[str], budget: str
) -> Iterator[tuple[str, T, T]]:
    """Yield the pairs to test at a budget: each method with each later one, and with the full
    cache.

    Args:
        raw: something of every cell, under ``"method at budget"`` and ``"full"``.

    Yields:
        ``"first - second"``, and what ``raw`` has of the two.
    """
    for first, second in [
        *itertools.combinations(methods, 2),
        *itertools.product(methods, ["full"]),
    ]:
        one, two = (
            raw["full" if method == "full" else f"{method} at {budget}"]
            for method in (first, second)
        )
        yield f"{first} - {second}", one, two


def _average(runs: Runs, name: str) -> list[float]:
    """Sum a value over the answers of each dialogue, averaged over gate seeds."""
    return [sum(sum(row[name]) for row in rows) / len(rows) for rows in zip(*runs, strict=True)]


def difference(one: Runs, two: Runs, name: str, counts: Sequence[int]) -> dict[str, float]:
    """Return the paired difference of two cells per item; ``name``: of what each answer has."""
    return asdict(paired(_average(one, name), _average(two, name), counts))


def row_of(
    method: str, budget: str, runs: Runs, questions: Sequence[int], tokens: Sequence[int]
) -> dict[str, Any]:
    """Return means with intervals of one cell: a method at a budget, over its gate seeds."""
    seen = sum(row["seen"] for row in runs[0])
    layouts = [row["per_row"] for run in runs for row in run]
    entries = sum(row["entries"] for run in runs for row in run)
    return {
        "method": method,
        "budget": budget,
        "seeds": len(runs),
        "accuracy": asdict(mean(_average(runs, "right"), questions)),
        "accuracy_by_seed": [
            sum(sum(row["right"]) for row in run) / sum(questions) for run in runs
        ],
        "kl_per_token": asdict(mean(_average(runs, "kl"), tokens)),
        "nll_per_token": asdict(mean(_average(runs, "nll"), tokens)),
        "agreement": asdict(mean(_average(runs, "agree"), tokens)),
        "kept_of_context": entries / len(runs) / np.size(layouts[0]) / seen,
        "evicted": sum(row["evicted"] for run in runs for row in run),
        "visual_share": sum(row["visual"] for run in runs for row in run) / max(entries, 1),
        "entries_by_row": np.mean(layouts, axis=0).round(3).tolist(),
    }


# --- tables and figure ---


def interval(value: Mapping[str, float], sign: bool = False) -> str:
    """Format a value and its interval, as tables show them."""
    form = "+.3f" if sign else ".3f"
    return f"{value['value']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def row_at(page: Page, method: str, budget: str) -> Mapping[str, Any]:
    """Return the row of a method at a budget."""
    return next(r for r in page["rows"] if (r["method"], r["budget"]) == (method, budget))


def named(page: Page, what: str) -> list[str]:
    """Return the methods or budgets (``what``: ``method``, ``budget``) of a page, in its order."""
    return list(dict.fromkeys(row[what] for row in page["rows"] if row["method"] != "full"))


def tables(pages: Mapping[str, Page], first: str = "data") -> dict[str, Table]:
    """Make the tables of pages of :func:`summarise`.

    Args:
        pages: by the name that stands in the first column, under the heading ``first``.

    Returns:
        ``data``: what was read; ``accuracy``: by budget and method, with 95 % intervals, and the
        KL to the full cache per token; ``differences``: paired, with p of sign-flip tests over
        dialogues. Of whole texts ``perplexity`` and ``perplexity-differences`` instead.
    """
    made: dict[str, Table] = {"data": [[first, "dialogues", "questions", "tokens each"]]}
    for name, page in pages.items():
        shown, tested, gaps = _shown(page)
        methods, read = named(page, "method"), page["context_tokens"]
        sizes = (page["dialogues"], page["questions"], f"{read['least']:,} to {read['most']:,}")
        made["data"].append([name, *map(str, sizes)])
        heading = [first, "budget", "full", *methods]
        rows = made.setdefault(shown, [heading])
        for budget in named(page, "budget"):
            cells = [interval(_measure(page["rows"][0], shown))]
            for row in (row_at(page, method, budget) for method in methods):
                kl = row["kl_per_token"]["value"]
                cells.append(f"{interval(_measure(row, shown))}; {kl:.3f}")
            rows.append([name, budget, *cells])
        heading = [first, "budget", "difference", gaps, "p", "KL per token", "p"]
        rows = made.setdefault(tested, [heading])
        measure = "accuracy" if shown == "accuracy" else "nll_per_token"
        for test in page["tests"]:
            rows.append([name, test["budget"], test["of"]])
            for value in (test[measure], test["kl_per_token"]):
                rows[-1] += [interval(value, sign=True), f"{value['p']:.4f}"]
    return made


def _shown(page: Page) -> tuple[str, str, str]:
    """Return the names of a page's measure and of its differences, and the latter's heading."""
    if page.get("whole_texts"):
        return "perplexity", "perplexity-differences", "log perplexity"
    return "accuracy", "differences", "accuracy"


def _measure(row: Mapping[str, Any], shown: str) -> Mapping[str, float]:
    """Return the shown value of a row and its interval."""
    if shown == "accuracy":
        return row["accuracy"]
    return {name: float(np.exp(value)) for name, value in row["nll_per_token"].items()}


def draw(pages: Mapping[str, Page], path: Path) -> None:
    """Draw accuracy or perplexity (above) and KL (below) by budget, a column per data source."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(pages), 7), layout="constrained")
    panels = figure.subplots(2, len(pages), squeeze=False)
    for (above, below), (source, page) in zip(panels.T, pages.items(), strict=True):
        shown, budgets = _shown(page)[0], named(page, "budget")
        for method in named(page, "method"):
            mine = [row for row in page["rows"] if row["method"] == method]
            mine.sort(key=lambda row: Fraction(row["budget"]))
            x = [float(Fraction(row["budget"])) for row in mine]
            curve(above, x, [_measure(row, shown) for row in mine], method)
            curve(below, x, [row["kl_per_token"] for row in mine], method)
        full = _measure(page["rows"][0], shown)["value"]
        above.axhline(full, color="0.5", linestyle="--", label="full")
        above.set(title=source, ylabel=shown)
        if shown == "accuracy":
            above.set(ylim=(0, 1.02))
        below.set(ylabel="KL to the full cache per token", yscale="log")
        for panel in (above, below):
            panel.set(xscale="log", xlabel=axis_label(budgets))
            panel.set_xticks([float(Fraction(budget)) for budget in budgets], budgets)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        above.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def curve(
    panel: Any,
    x: Sequence[float],
    values: Sequence[Mapping[str, float]],
    label: str,
    marker: str = "o",
) -> None:
    """Draw values with their intervals, in the order of ``x``."""
    panel.plot(x, [v["value"] for v in values], marker=marker, markersize=4, label=label)
    panel.fill_between(x, [v["low"] for v in values], [v["high"] for v in values], alpha=0.15)
