"""Tables and figure of the stream of :mod:`mmkv.eval.sessions.stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.eval.measure.stats import mean, paired
from mmkv.eval.quality.report import comparisons, interval
from mmkv.eval.sessions.stream import Row
from mmkv.training.measure.tables import pipe_table

BLOCK = 16  # clips that intervals take as one draw


def summarise(
    rows: Mapping[str, Sequence[Sequence[Row]]], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute shares right, memory, and paired tests over blocks of clips.

    Args:
        rows: what :func:`mmkv.eval.sessions.stream.run` returned.
    """
    shared = len(rows["full"][0])
    found = {
        name: {
            "clips": len(runs[0]),
            "latest": _share(runs, "right"),
            "beginning": _share(runs, "beginning"),
            "latest_while_full_ran": _share([run[:shared] for run in runs], "right"),
            "tokens_seen": runs[0][-1]["seen"],
            "most_bytes": max(row["bytes"] for run in runs for row in run),
            "median_age": float(np.median([run[-1]["age"] for run in runs])),
            "most_entries": max(row["entries"] for run in runs for row in run),
            "curve": [
                [row["seen"], row["bytes"], sum(r["right"] for r in part) / len(part)]
                for part in (runs[0][i : i + BLOCK] for i in range(0, len(runs[0]), BLOCK))
                for row in part[-1:]
            ],
        }
        for name, runs in rows.items()
    }
    tests = []
    for budget in budgets:
        for of, first, second in comparisons(rows, methods, budget):
            count = min(len(first[0]), len(second[0]))
            sums = [
                list(np.mean([_blocks(run[:count], "right")[0] for run in runs], 0))
                for runs in (first, second)
            ]
            counts = _blocks(first[0][:count], "right")[1]
            gap = asdict(paired(sums[0], sums[1], counts))
            tests.append({"budget": budget, "of": of, "clips": count, **gap})
    return {
        "methods": list(methods),
        "budgets": list(budgets),
        "block": BLOCK,
        "rows": found,
        "tests": tests,
    }


def _blocks(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Count per block of clips: questions answered right, and questions."""
    cut = [rows[i : i + BLOCK] for i in range(0, len(rows), BLOCK)]
    pairs = [([row[name] for row in part if name in row]) for part in cut]
    kept = [part for part in pairs if part]
    return [float(sum(part)) for part in kept], [float(len(part)) for part in kept]


def _share(runs: Sequence[Sequence[Row]], name: str) -> dict[str, float] | None:
    sums = np.mean([_blocks(run, name)[0] for run in runs], 0)
    counts = _blocks(runs[0], name)[1]
    return asdict(mean(list(sums), counts)) if counts else None


def markdown(found: Mapping[str, Any]) -> str:
    """Tabulate shares of right answers, held entries and paired tests."""
    lines = [
        "### A video that never ends\n",
        f"Share answered right, with 95 % interval over blocks of {found['block']} clips.\n",
        "Age: tokens since the median entry that is held at the end.\n",
    ]
    columns = [
        "method",
        "budget",
        "clips",
        "tokens seen",
        "most bytes held",
        "age",
        "latest clip",
        "latest, while the full cache ran",
        "the very first picture",
    ]
    table = []
    for name, row in found["rows"].items():
        method, _, budget = name.partition(" at ")
        cells = [
            "-" if row[key] is None else interval(row[key])
            for key in ("latest", "latest_while_full_ran", "beginning")
        ]
        held = (f"{row['tokens_seen']:,}", f"{row['most_bytes']:,}", f"{row['median_age']:,.0f}")
        table.append((method, budget or "-", row["clips"], *held, *cells))
    lines.append(pipe_table(columns, table))
    lines += ["", "Paired differences on the latest clip (sign-flip tests over blocks):\n"]
    tests = [
        (test["budget"], test["of"], test["clips"], interval(test, sign=True), f"{test['p']:.4f}")
        for test in found["tests"]
    ]
    lines.append(pipe_table(("budget", "difference", "clips", "share right", "p"), tests))
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the share of right answers and the bytes held along the stream, a column per budget."""
    from matplotlib.figure import Figure

    budgets = found["budgets"]
    figure = Figure(figsize=(3.6 * len(budgets), 5.5), layout="constrained")
    panels = figure.subplots(2, len(budgets), squeeze=False, sharex="col")
    for column, budget in enumerate(budgets):
        above, below = panels[:, column]
        for method in ["full", *found["methods"]]:
            row = found["rows"]["full" if method == "full" else f"{method} at {budget}"]
            seen, nbytes, right = np.array(row["curve"], float).T
            style = {"color": "0.5", "linestyle": "--"} if method == "full" else {}
            above.plot(seen, right, label=method, marker=".", **style)
            below.plot(seen, nbytes / 2**20, marker=".", **style)
        above.set(title=f"budget {budget}", ylim=(-0.02, 1.02))
        below.set(xlabel="tokens seen", yscale="log")
        for panel in (above, below):
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("right on the latest clip")
    panels[1, 0].set_ylabel("MiB held")
    panels[0, 0].legend(fontsize=7)
    figure.suptitle("A video that never ends")
    figure.savefig(path, dpi=110)
