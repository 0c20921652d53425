"""Measure what eviction costs: accuracy and KL to the full cache by budget, with paired tests.

``python -m benchmarks.quality MODEL --data scenes:dense --method dbtrimkv:GATES[,GATES] --method
snapkv ...`` runs the same held-out dialogues through every method at every budget. Answers are
teacher-forced with real eviction (:mod:`mmkv.training.measure.teacher_forced`). The program writes
JSON, a Markdown table and a plot. A killed run continues when it is started again; with more
methods or dialogues only those are run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.experiment import (
    ComparisonRuns,
    add_options,
    draw,
    finish,
    running,
    summarise,
    tables,
)
from benchmarks.quality.methods import ComparedMethod, Comparison

FRACTIONS = ("1/2", "1/3", "1/4", "1/5", "1/8", "1/16", "1/32")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    add_options(parser, "quality")
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        help="data source, as for training.distill; repeatable",
    )
    parser.add_argument("--max-length", type=int, default=8192, help="longest dialogue, tokens")
    parser.add_argument(
        "--method", action="append", required=True, metavar="[NAME=]POLICY[@N][/KV][:GATES,..]"
    )
    parser.add_argument(
        "--fractions",
        nargs="+",
        default=list(FRACTIONS),
        help="budgets: shares of the context, or entries per layer and KV head such as 64",
    )
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="compare at equal bytes: a budget stands for those that its entries take in bfloat16",
    )
    parser.add_argument("--dialogues", type=int, default=120, help="dialogues of each data source")
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        metavar="N",
        help="leave out the first N dialogues, for example those that settings were chosen on",
    )
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="dialogues that each process reads side by side: faster, and more memory",
    )
    args = parser.parse_args(arguments)
    if args.together < 1:
        parser.error("--together takes 1 or more")
    if args.skip < 0 or args.dialogues < 1:
        parser.error("--skip takes 0 or more, --dialogues 1 or more")
    with running(args, "benchmarks.quality") as (path, journal):
        methods = tuple(ComparedMethod.parse(text) for text in args.method)
        comparison = Comparison(
            args.model,
            args.dtype,
            methods,
            tuple(args.fractions),
            args.max_length,
            args.device,
            args.bytes,
        )
        pages = {}
        with ComparisonRuns(comparison, journal, args.workers, together=args.together) as runs:
            for source in args.data:
                raw = runs.of(source, args.dialogues, args.skip)
                names = [method.name for method in methods]
                pages[source] = summarise(raw, names, args.fractions)
        finish(args, path, pages, tables(pages), draw)


if __name__ == "__main__":
    main()
