"""Tables and plots of ``benchmarks.quality``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.quality.methods import axis_label
from mmkv.eval.measure.stats import mean, paired
from mmkv.training.measure.tables import pipe_table

T = TypeVar("T")
Runs = Sequence[Sequence[Mapping[str, Any]]]


def summarise(
    raw: Mapping[str, Runs], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute means with intervals for every method and budget, and the paired tests between
    methods.

    Args:
        raw: what :meth:`benchmarks.quality.run.ComparisonRuns.of` returns.

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
    for first, second in [*combinations(methods, 2), *product(methods, ["full"])]:
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


def markdown(pages: Mapping[str, Mapping[str, Any]]) -> str:
    """Make one table per data source: accuracy or perplexity, and KL per token, by method and
    budget.
    """
    text = []
    for source, page in pages.items():
        context, shown = page["context_tokens"], _shown(page)
        held = "" if shown == "perplexity" else f"{page['questions']} questions in "
        what = "texts" if shown == "perplexity" else "dialogues"
        text.append(
            f"### {source}: {held}{page['dialogues']} held-out "
            f"{what} of {context['least']} to {context['most']} tokens\n"
        )
        budgets = list(dict.fromkeys(r["budget"] for r in page["rows"] if r["method"] != "full"))
        methods = list(dict.fromkeys(r["method"] for r in page["rows"] if r["method"] != "full"))
        full = _measure(page["rows"][0], shown)
        text.append(f"Full cache: {interval(full)}. Cells: {shown} with 95 % interval; KL.\n")
        lines = []
        for budget in budgets:
            cells = []
            for method in methods:
                row = next(
                    r for r in page["rows"] if (r["method"], r["budget"]) == (method, budget)
                )
                kl = row["kl_per_token"]["value"]
                cells.append(f"{interval(_measure(row, shown))}; {kl:.3f}")
            lines.append((budget, *cells))
        text.append(pipe_table(("budget", *methods), lines))
        text += ["", *paired_lines(page["tests"])]
        text.append("")
    return "\n".join(text)


def _shown(page: Mapping[str, Any]) -> str:
    return "perplexity" if page.get("whole_texts") else "accuracy"


def _measure(row: Mapping[str, Any], shown: str) -> Mapping[str, float]:
    """Return the shown value of a row and its interval."""
    if shown == "accuracy":
        return row["accuracy"]
    return {name: float(np.exp(value)) for name, value in row["nll_per_token"].items()}


def paired_lines(tests: Sequence[Mapping[str, Any]], where: str = "") -> list[str]:
    """Write the table of the paired tests; ``where`` is named in its heading."""
    text = [f"Paired differences{where} (sign-flip tests over dialogues):\n"]
    names = {"accuracy": "accuracy", "kl_per_token": "KL per token"}
    if tests and "nll_per_token" in tests[0]:
        names = {"nll_per_token": "log perplexity", "kl_per_token": "KL per token"}
    columns = ["budget", "difference"]
    for name in names.values():
        columns += [name, "p"]
    lines = []
    for test in tests:
        lines.append([test["budget"], test["of"]])
        for name in names:
            lines[-1] += [interval(test[name], sign=True), f"{test[name]['p']:.4f}"]
    return [*text, pipe_table(columns, lines)]


def interval(value: Mapping[str, float], sign: bool = False) -> str:
    """Format a value and its interval, as tables show them."""
    form = "+.3f" if sign else ".3f"
    return f"{value['value']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def curve(
    panel: Any, budgets: Sequence[str], values: Sequence[Mapping[str, float]], label: str
) -> None:
    """Draw values with their intervals against budgets, both in the same order."""
    x = [float(Fraction(budget)) for budget in budgets]
    panel.plot(x, [v["value"] for v in values], marker="o", markersize=4, label=label)
    panel.fill_between(x, [v["low"] for v in values], [v["high"] for v in values], alpha=0.15)


def over_budgets(panel: Any, budgets: Sequence[str]) -> None:
    """Lay out the horizontal axis of a panel: budgets, logarithmic."""
    panel.set(xscale="log", xlabel=axis_label(budgets))
    panel.set_xticks([float(Fraction(budget)) for budget in budgets], budgets)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def draw(pages: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw accuracy or perplexity (above) and KL (below) by budget, a column per data source."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(pages), 7), layout="constrained")
    panels = figure.subplots(2, len(pages), squeeze=False)
    for column, (source, page) in enumerate(pages.items()):
        shown = _shown(page)
        rows = [row for row in page["rows"] if row["method"] != "full"]
        budgets = list(dict.fromkeys(row["budget"] for row in rows))
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = sorted(
                (row for row in rows if row["method"] == method),
                key=lambda r: Fraction(r["budget"]),
            )
            x = [row["budget"] for row in mine]
            measured = ([_measure(r, shown) for r in mine], [r["kl_per_token"] for r in mine])
            for panel, values in zip(panels[:, column], measured, strict=True):
                curve(panel, x, values, method)
        full = _measure(page["rows"][0], shown)["value"]
        panels[0, column].axhline(full, color="0.5", linestyle="--", label="full")
        panels[0, column].set(title=source, ylabel=shown)
        if shown == "accuracy":
            panels[0, column].set(ylim=(0, 1.02))
        panels[1, column].set(ylabel="KL to the full cache per token", yscale="log")
        for panel in panels[:, column]:
            over_budgets(panel, budgets)
        panels[0, column].legend(fontsize=8)
    figure.savefig(path, dpi=110)
