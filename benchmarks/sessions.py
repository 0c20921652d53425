"""Measure long dialogues under one budget: sessions with updates, and an endless video.

``python -m benchmarks.sessions MODEL --domain text|scenes --method ...`` runs dialogues over
several sessions in which facts are replaced (:mod:`benchmarks.session_tasks`); the newest value is
right. ``--domain stream`` shows the bundled model a stream of clips with questions in between
(:mod:`benchmarks.session_stream`), under a bounded memory. Answers are teacher-forced with eviction
after each token, and right when every token is the most likely one. The program writes JSON, a
Markdown table and a figure. A killed run continues when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks import session_stream
from benchmarks.domains import maker
from benchmarks.quality import report as quality_report
from benchmarks.quality.report import interval
from benchmarks.quality.run import (
    ComparisonRuns,
    Record,
    add_methods,
    add_options,
    comparison,
    finish,
    running,
)
from benchmarks.session_tasks import KINDS, SIZES, Asked, SessionTask
from mmkv.engine.errors import InputError
from mmkv.eval.measure.stats import mean
from mmkv.training.measure.tables import pipe_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    add_options(parser, "sessions")
    add_methods(parser, ("32", "64", "128", "256"))
    parser.add_argument("--domain", choices=[*SIZES, "stream"], default="scenes")
    for place, name in enumerate(("sessions", "things", "distractors")):
        usual = ", ".join(f"{domain} {sizes[place]}" for domain, sizes in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {usual}")
    parser.add_argument("--limit", type=int, default=24, help="dialogues, or clips of each stream")
    parser.add_argument(
        "--full-clips", type=int, default=64, help="clips that the full cache runs over (stream)"
    )
    args = parser.parse_args(arguments)
    with running(args, "benchmarks.sessions") as (path, journal):
        if min(args.limit, args.full_clips) < 1:
            raise InputError("--limit and --full-clips are at least 1")
        if args.domain == "stream" and args.workers > 1:
            raise InputError("a stream is read in order by one process; leave out --workers")
        compared = comparison(args)
        names = [method.name for method in compared.methods]
        if args.domain == "stream":
            rows = session_stream.run(compared, args.limit, args.full_clips, journal)
            found = session_stream.summarise(rows, names, args.budgets)
            ways = (session_stream.markdown, session_stream.draw)
        else:
            given = (args.sessions, args.things, args.distractors)
            sizes = [u if g is None else g for g, u in zip(given, SIZES[args.domain], strict=True)]
            kind = SessionTask.parse(f"sessions:{args.domain}:{':'.join(map(str, sizes))}")
            make = maker(args.model, kind.name)
            assert make is not None
            with ComparisonRuns(compared, journal, args.workers) as runs:
                raw = runs.of(kind.name, args.limit)
            notes = [make(index).notes for index in range(args.limit)]
            found = summarise(kind, raw, notes, names, args.budgets)
            ways = (markdown, draw)
        finish(args, path, found, *ways)


Runs = Sequence[Sequence[Record]]
Notes = Sequence[Sequence[Asked]]


def summarise(
    kind: SessionTask,
    raw: Mapping[str, Runs],
    notes: Notes,
    methods: Sequence[str],
    budgets: Sequence[str],
) -> dict[str, Any]:
    """Compute everything the result file holds.

    Args:
        raw: what :meth:`benchmarks.quality.run.ComparisonRuns.of` returned; notes: about each
            answer.

    Returns:
        ``page``: that of ``benchmarks.quality.report.summarise``; ``kinds``: share right by kind of
        question; ``stale``: share of the questions about a replaced value that were answered with
        the replaced one; ``bytes``: mean physical bytes at the end; all three by method and budget.
    """
    return {
        "domain": kind.domain,
        "sessions": kind.sessions,
        "things": kind.things,
        "distractors": kind.distractors,
        "methods": list(methods),
        "budgets": list(budgets),
        "page": quality_report.summarise(raw, methods, budgets),
        "asked": {name: sum(a.kind == name for about in notes for a in about) for name in KINDS},
        "kinds": {name: _by_kind(runs, notes) for name, runs in raw.items()},
        "stale": {name: _stale(runs, notes) for name, runs in raw.items()},
        "bytes": {
            name: sum(row["bytes"] for run in runs for row in run) / sum(map(len, runs))
            for name, runs in raw.items()
        },
    }


def _by_kind(runs: Runs, notes: Notes) -> dict[str, dict[str, float] | None]:
    def right(record: Record, about: Sequence[Asked], name: str) -> int:
        return sum(hit for hit, a in zip(record["right"], about, strict=True) if a.kind == name)

    return {name: _share(runs, notes, name, right) for name in KINDS}


def _stale(runs: Runs, notes: Notes) -> dict[str, float] | None:
    def stale(record: Record, about: Sequence[Asked], name: str) -> int:
        return sum(
            a.kind == name and a.generated_stale(wrong)
            for wrong, a in zip(record["wrong"], about, strict=True)
        )

    replaced = [[a for a in about if a.stale] for about in notes]
    kept = [
        [
            {"wrong": [w for w, a in zip(run[i]["wrong"], about, strict=True) if a.stale]}
            for i, about in enumerate(notes)
        ]
        for run in runs
    ]
    return _share(kept, replaced, "updated", stale)


def _share(runs: Runs, notes: Notes, name: str, count: Any) -> dict[str, float] | None:
    """Average over the questions of a kind and over gate seeds; None without any."""
    sums, counts = [], []
    for index, about in enumerate(notes):
        asked = sum(a.kind == name for a in about)
        if asked:
            sums.append(sum(count(run[index], about, name) for run in runs) / len(runs))
            counts.append(asked)
    return asdict(mean(sums, counts)) if counts else None


def markdown(found: Mapping[str, Any]) -> str:
    """Tabulate accuracy by budget and method, by kind of question, stale answers, paired tests."""
    page, methods = found["page"], found["methods"]
    head = [
        f"### Sessions in {found['domain']}: {found['sessions']} sessions, "
        f"{page['questions']} questions in {page['dialogues']} dialogues of "
        f"{page['context_tokens']['least']} to {page['context_tokens']['most']} tokens\n",
        f"Asked: {', '.join(f'{count} {name}' for name, count in found['asked'].items())}. "
        "Share answered right, with 95 % interval.\n",
    ]
    lines = []
    tables: dict[str, Any] = {
        "all": {
            "full" if row["method"] == "full" else f"{row['method']} at {row['budget']}": row[
                "accuracy"
            ]
            for row in page["rows"]
        },
        **{name: {key: row[name] for key, row in found["kinds"].items()} for name in KINDS},
        "updated: generated the replaced value": found["stale"],
    }
    for what, cells in tables.items():
        for budget in found["budgets"]:
            shown = [cells["full"], *(cells[f"{method} at {budget}"] for method in methods)]
            texts = ["-" if cell is None else interval(cell) for cell in shown]
            lines.append((what, budget, *texts))
    table = pipe_table(("questions", "budget", "full", *methods), lines)
    return "\n".join([*head, table, "", *quality_report.paired_lines(page["tests"])]) + "\n"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the share of right answers by budget, a panel per kind of question."""
    from matplotlib.figure import Figure

    panels: dict[str, Any] = {
        name: {k: row[name] for k, row in found["kinds"].items()} for name in KINDS
    }
    panels["generated the replaced value"] = found["stale"]
    figure = Figure(figsize=(3.1 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    budgets = sorted(found["budgets"], key=Fraction)
    for axis, (title, cells) in zip(axes, panels.items(), strict=True):
        axis.set(title=title, ylim=(-0.02, 1.02))
        quality_report.over_budgets(axis, budgets)
        if cells["full"] is None:
            continue
        for method in found["methods"]:
            mine = [cells[f"{method} at {budget}"] for budget in budgets]
            quality_report.curve(axis, budgets, mine, method)
        axis.axhline(cells["full"]["value"], color="0.5", linestyle="--", label="full")
    axes[0].set_ylabel("share of questions")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"Sessions in {found['domain']}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
