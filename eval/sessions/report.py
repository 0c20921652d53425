"""Tables and figure of the sessions of ``eval.sessions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from mmkv.eval.measure.stats import mean
from mmkv.eval.quality import report as quality_report
from mmkv.eval.quality.report import interval
from mmkv.eval.quality.run import Record
from mmkv.eval.sessions.tasks import KINDS, Asked, Sessions
from mmkv.training.measure.tables import pipe_table

Runs = Sequence[Sequence[Record]]
Notes = Sequence[Sequence[Asked]]


def summarise(
    kind: Sessions,
    raw: Mapping[str, Runs],
    notes: Notes,
    methods: Sequence[str],
    budgets: Sequence[str],
) -> dict[str, Any]:
    """Compute everything the result file holds.

    Args:
        raw: what :meth:`mmkv.eval.quality.run.ComparisonRuns.of` returned; notes: about each
            answer.

    Returns:
        ``page``: that of ``eval.quality.report.summarise``; ``kinds``: share right by kind of
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
