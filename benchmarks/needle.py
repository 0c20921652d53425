"""Measure needles found in a haystack, by depth, length, policy and budget.

``python -m benchmarks.needle MODEL --domain text|pictures|video --lengths 1024 2048 --method ...``
hides several keys with several values in text or pictures (``benchmarks.tasks.needles``), evicts
down to the budget, and only then asks. Answers are teacher-forced with eviction after each token. A
value is found when each of its tokens is the most likely one after the true answer so far. The
program writes JSON, a Markdown table and heat maps over depth and length. A killed run continues
when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiment
from benchmarks.experiment import ComparisonRuns, Record, add_options, finish, interval, running
from benchmarks.quality.methods import ComparedMethod, Comparison
from benchmarks.tasks.needles import SIZES, Haystack, Needle, maker
from mmkv.engine.errors import InputError
from mmkv.eval.measure.stats import mean
from mmkv.prompt.loading import load_processor

LENGTHS = {"text": [512, 1024, 2048], "pictures": [256, 512, 1024, 2048], "video": [256, 512, 1024]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.needle", description=__doc__)
    add_options(parser, "needle")
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
        default=["32", "64", "128", "256"],
        help="mean entries per layer and KV head, or shares of the dialogue such as 1/8",
    )
    parser.add_argument("--domain", choices=list(SIZES), default="pictures")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=length,
        metavar="TOKENS",
        help="lengths in tokens, such as 512 or 128k",
    )
    for place, name in enumerate(("keys", "values", "queries")):
        usual = ", ".join(f"{domain} {sizes[place]}" for domain, sizes in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {usual}")
    parser.add_argument("--limit", type=int, default=16, help="documents of each length")
    args = parser.parse_args(arguments)
    keys, values, queries = SIZES[args.domain]
    args.lengths = args.lengths or LENGTHS[args.domain]
    with running(args, "benchmarks.needle") as (path, journal):
        if args.limit < 1:
            raise InputError(f"--limit {args.limit} reads nothing; give at least 1")
        methods = tuple(map(ComparedMethod.parse, args.method or default_methods(args.model)))
        budgets = tuple(args.budgets)
        compared = Comparison(args.model, args.dtype, methods, budgets, device=args.device)
        read = []
        with ComparisonRuns(compared, journal, args.workers) as runs:
            for tokens in sorted(set(args.lengths)):
                kind = Haystack.parse(
                    f"needle:{args.domain}:{tokens}:{args.keys or keys}:{args.values or values}:"
                    f"{args.queries or queries}"
                )
                make = maker(kind.name, args.model, load_processor(args.model))
                make(0)  # errors show before the long run starts
                raw = runs.of(kind.name, args.limit)
                read.append((kind, raw, [make(index).notes for index in range(args.limit)]))
        page = summarise(read, [method.name for method in methods], args.budgets)
        finish(args, path, page, tables(page), draw)


def default_methods(model: str) -> list[str]:
    """Return the methods that are compared where none is named."""
    gates = Path(model) / "gates"
    own = [f"dbtrimkv:{gates}"] if (gates / "gates.json").is_file() else []
    return [*own, "snapkv", "streamingllm"]


def length(text: str) -> int:
    """Parse a number of tokens: ``512``, ``1k`` (1,024)."""
    try:
        made = int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens") from None
    if made < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return made


Raw = Mapping[str, list[list[Record]]]
Read = tuple[Haystack, Raw, list[list[Needle]]]


def found(record: Record, notes: Sequence[Needle]) -> list[list[bool]]:
    """Tell for each answer and value whether every token of the value was the most likely one."""
    answers = []
    for wrong, note in zip(record["wrong"], notes, strict=True):
        missed = {index for index, _ in wrong}
        answers.append([missed.isdisjoint(range(*value)) for value in note.values])
    return answers


def _by_value(raw: Raw, notes: Sequence[Sequence[Needle]]) -> dict[str, list[list[Record]]]:
    """Copy the runs with ``right`` counted by value, as the tables show them."""

    def counted(record: Record, about: Sequence[Needle]) -> Record:
        values = found(record, about)
        return {**record, "right": [value for answer in values for value in answer]}

    return {
        name: [[counted(*pair) for pair in zip(run, notes, strict=True)] for run in runs]
        for name, runs in raw.items()
    }


def summarise(
    read: Sequence[Read], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute everything the result file holds.

    Args:
        read: per length the kind of document, what :meth:`ComparisonRuns.of`
            returned, and per document the notes of its answers.

    Returns:
        ``lengths``: per length a page of :func:`benchmarks.experiment.summarise` over values;
        ``all``: that of all lengths together; ``queries``: share of queries all of whose values
        were found, by method and budget; ``heat``: by method and budget the share found,
        ``[part of the depth][length]``, and ``counted``: values per cell.
    """
    by_value = [(kind, _by_value(raw, notes), notes) for kind, raw, notes in read]
    names = list(by_value[0][1])
    together = {
        name: [[row for _, raw, _ in by_value for row in raw[name][seed]] for seed in range(seeds)]
        for name, seeds in ((name, len(by_value[0][1][name])) for name in names)
    }
    heat, queries = {}, {}
    for name in names:
        cells = [_by_depth(kind, raw[name], notes) for kind, raw, notes in by_value]
        heat[name] = [[column[part][0] for column in cells] for part in range(len(cells[0]))]
        queries[name] = _queries([(raw[name], notes) for _, raw, notes in read])
    counted = [_by_depth(kind, raw["full"], notes) for kind, raw, notes in by_value]
    kind = read[0][0]
    return {
        "domain": kind.domain,
        "keys": kind.keys,
        "values": kind.values,
        "queries_asked": kind.queries,
        "methods": list(methods),
        "budgets": list(budgets),
        "lengths": {
            str(kind.length): experiment.summarise(raw, methods, budgets)
            for kind, raw, _ in by_value
        },
        "all": experiment.summarise(together, methods, budgets),
        "queries": queries,
        "heat": heat,
        "counted": [[column[part][1] for column in counted] for part in range(kind.parts)],
    }


def _by_depth(
    kind: Haystack, runs: Sequence[Sequence[Record]], notes: Sequence[Sequence[Needle]]
) -> list[tuple[float | None, int]]:
    """Compute by depth the share of values found (None without any), and values per run."""
    hits, total = np.zeros(kind.parts), np.zeros(kind.parts)
    for run in runs:
        for record, about in zip(run, notes, strict=True):
            right = iter(record["right"])
            for note in about:
                part = int(note.depth * kind.parts)
                for _ in note.values:
                    hits[part] += next(right)
                    total[part] += 1
    return [
        (float(hit / of) if of else None, int(of) // len(runs))
        for hit, of in zip(hits, total, strict=True)
    ]


def _queries(
    read: Sequence[tuple[Sequence[Sequence[Record]], Sequence[Sequence[Needle]]]],
) -> dict[str, float]:
    """Average whole answers: right in greedy decoding from the first value to the last."""
    sums, counts = [], []
    for runs, notes in read:
        for index in range(len(notes)):
            sums.append(sum(sum(run[index]["right"]) for run in runs) / len(runs))
            counts.append(len(notes[index]))
    return asdict(mean(sums, counts))


def tables(page: Mapping[str, Any]) -> dict[str, experiment.Table]:
    """Make the tables of all lengths; ``queries``: whole answers, where one has several values."""
    pages = page["lengths"] | {"all": page["all"]}
    made = experiment.tables(pages, f"tokens of {page['domain']}")
    if page["values"] > 1 and page["domain"] == "text":
        rows = [["budget", "full", *page["methods"]]]
        for budget in page["budgets"]:
            names = ["full", *(f"{method} at {budget}" for method in page["methods"])]
            rows.append([budget, *(interval(page["queries"][name]) for name in names)])
        made["queries"] = rows
    return made


def draw(page: Mapping[str, Any], path: Path) -> None:
    """Draw heat maps over depth and length: a row of panels per budget, a column per method."""
    from matplotlib.figure import Figure

    methods, budgets, lengths = ["full", *page["methods"]], page["budgets"], list(page["lengths"])
    parts = len(page["heat"]["full"])
    figure = Figure(
        figsize=(1.2 + 2.1 * len(methods), 0.8 + 1.9 * len(budgets)), layout="constrained"
    )
    panels = figure.subplots(len(budgets), len(methods), squeeze=False)
    for row, budget in enumerate(budgets):
        for column, method in enumerate(methods):
            panel = panels[row, column]
            share = page["heat"]["full" if method == "full" else f"{method} at {budget}"]
            cells = np.array(share, float)
            shown = panel.imshow(cells, aspect="auto", cmap="viridis", vmin=0, vmax=1)
            for (y, x), value in np.ndenumerate(cells):
                if not np.isnan(value):
                    ink = "black" if value > 0.6 else "white"
                    panel.text(
                        x, y, f"{value:.2f}", ha="center", va="center", fontsize=6, color=ink
                    )
            panel.set_xticks(range(len(lengths)), lengths, fontsize=7)
            panel.set_yticks(
                np.arange(parts + 1) - 0.5,
                [f"{i / parts:.0%}" for i in range(parts + 1)],
                fontsize=6,
            )
            if row == 0:
                panel.set_title(method, fontsize=9)
            if column == 0:
                panel.set_ylabel(f"budget {budget}\ndepth", fontsize=8)
            if row == len(budgets) - 1:
                panel.set_xlabel("haystack, tokens", fontsize=8)
    figure.colorbar(shown, ax=panels, label="share of values found", shrink=0.6)
    figure.suptitle(f"Needles in {page['domain']}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
