"""The leaderboard of ``eval.compare``: tables, and one plot of accuracy against bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.eval.quality.methods import Cell
from mmkv.eval.quality.report import Runs, difference, interval, row_of
from mmkv.training.measure.tables import pipe_table

Page = Mapping[str, Any]


def summarise(
    raw: Mapping[str, Runs],
    cells: Mapping[str, Sequence[Cell]],
    speed: Callable[[Cell], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a row for the full cache and for every method at every budget.

    Each row has the measures of ``eval.quality``, physical bytes at the end of a dialogue, the
    speed of its first gates, and paired differences from the first method at the same budget and
    from the full cache.

    Args:
        raw: what :meth:`mmkv.eval.quality.run.ComparisonRuns.of` returns; cells: what it ran.
    """
    full = raw["full"][0]
    questions = [len(row["right"]) for row in full]
    tokens = [sum(row["tokens"]) for row in full]
    first: dict[str, str] = {}
    rows = []
    for name, runs in raw.items():
        method, _, budget = name.partition(" at ")
        row = row_of(method, budget or "1", runs, questions, tokens)
        del row["entries_by_row"]
        row["bytes"] = float(np.mean([one["bytes"] for run in runs for one in run]))
        row["speed"] = dict(speed(cells[name][0]))
        if name != "full":
            reference = first.setdefault(budget, name)
            row["from_full"] = difference(runs, raw["full"], "right", questions)
            row["from_first"] = {
                "of": reference.partition(" at ")[0],
                **difference(runs, raw[reference], "right", questions),
            }
        rows.append(row)
    return {"dialogues": len(full), "questions": sum(questions), "rows": rows}


def markdown(pages: Mapping[str, Page]) -> str:
    """Return the leaderboard: per data source and budget the policies, the most accurate first."""
    text = []
    for source, page in pages.items():
        text.append(f"### {source}: {page['questions']} questions in {page['dialogues']} dialogues")
        rows = page["rows"]
        budgets = list(dict.fromkeys(row["budget"] for row in rows if row["method"] != "full"))
        for budget in budgets:
            mine = [row for row in rows if row["budget"] == budget and row["method"] != "full"]
            mine.sort(key=lambda row: -row["accuracy"]["value"])
            reference = mine[0]["from_first"]["of"]
            columns = (
                f"policy at {budget}",
                "accuracy",
                f"from {reference}",
                "p",
                "KL",
                "top-1 agreement",
                "kB",
                "tokens/s",
                "in eviction",
            )
            lines = [_line(row) for row in [rows[0], *mine]]
            text += ["", pipe_table(columns, lines, numbers=True)]
        text.append("")
    return "\n".join(text)


def _line(row: Mapping[str, Any]) -> list[str]:
    away, speed = row.get("from_first"), row["speed"]
    return [
        row["method"],
        interval(row["accuracy"]),
        "" if away is None else interval(away, sign=True),
        "" if away is None else f"{away['p']:.4f}",
        f"{row['kl_per_token']['value']:.3f}",
        f"{row['agreement']['value']:.3f}",
        f"{row['bytes'] / 1e3:,.0f}",
        f"{speed['tokens_per_second']:,.0f}",
        f"{speed['eviction_share']:.1%}",
    ]


def draw(pages: Mapping[str, Page], path: Path) -> None:
    """Draw accuracy against physical bytes, a panel per data source and a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(pages), 4.8), layout="constrained")
    panels = figure.subplots(1, len(pages), squeeze=False)[0]
    for panel, (source, page) in zip(panels, pages.items(), strict=True):
        for number, method in enumerate(dict.fromkeys(row["method"] for row in page["rows"])):
            mine = [row for row in page["rows"] if row["method"] == method]
            mine.sort(key=lambda row: row["bytes"])
            values = [row["accuracy"] for row in mine]
            panel.errorbar(
                [row["bytes"] / 1e3 for row in mine],
                [value["value"] for value in values],
                [
                    [value["value"] - value["low"] for value in values],
                    [value["high"] - value["value"] for value in values],
                ],
                marker="so^vD*"[number // 10 % 6],
                markersize=4,
                linewidth=1,
                label=method,
            )
        panel.set(title=source, xscale="log", ylim=(0, 1.02))
        panel.set(xlabel="physical bytes of keys and values, kB", ylabel="accuracy")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)
