"""Show where entries are kept: layers, KV heads and modalities of each method.

``python -m benchmarks.quality.kept RESULT.json --fraction 1/8`` reads a result of
``benchmarks.quality`` and draws ``RESULT-kept.png``: for each method the mean entries of every
(layer, KV head) as a share of the mean budget, on one logarithmic scale with the budget in the
middle, above the visual share. It prints the same as a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from benchmarks.experiment import named
from benchmarks.quality.methods import in_words
from mmkv.training.measure.tables import pipe_table

_COLUMNS = 6  # panels beside each other


def rows_at(page: Mapping[str, Any], budget: str, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of ``methods`` (default: all) of one data source at one budget."""
    found = {row["method"]: row for row in page["rows"] if row["budget"] == budget}
    return [found[method] for method in (methods or found) if method in found]


def shares(row: Mapping[str, Any]) -> np.ndarray:
    """Express entries ``[layers, KV heads]`` as shares of the mean budget."""
    held = np.array(row["entries_by_row"], float)
    return held / held.mean()


def spread(row: Mapping[str, Any]) -> dict[str, float]:
    """Measure how unequal the shares of layers and heads are.

    Returns:
        ``least`` and ``most`` share of the mean budget that a (layer, KV head) holds, and
        ``between_layers``: part of the variance over heads that lies between layers.
    """
    share = shares(row)
    total = share.var()
    between = share.mean(axis=1).var() / total if total else 0.0
    return {"least": share.min(), "most": share.max(), "between_layers": float(between)}


def draw(
    pages: Mapping[str, Mapping[str, Any]], path: Path, budget: str, methods: Sequence[str]
) -> None:
    """Draw a heat map per data source and method, with the visual share as a bar below."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    lines = [
        (source, rows[first : first + _COLUMNS])
        for source, page in pages.items()
        for rows in [rows_at(page, budget, methods)]
        for first in range(0, len(rows), _COLUMNS)
    ]
    columns = max(len(rows) for _, rows in lines)
    most = max(float(shares(row).max()) for _, rows in lines for row in rows)
    most = max(most, 2.0)  # if every head holds the same number
    # Zero has no logarithm: it is shown as the least value.
    scale = LogNorm(1 / most, most, clip=True)
    figure = Figure(figsize=(2.1 * columns + 1, 3.6 * len(lines)), layout="constrained")
    panels = figure.subplots(
        2 * len(lines), columns, squeeze=False, height_ratios=[6, 1] * len(lines)
    )
    for panel in panels.flat:
        panel.set_axis_off()
    for index, (source, rows) in enumerate(lines):
        context = pages[source]["rows"][0]["visual_share"]
        for column, row in enumerate(rows):
            heat, bar = panels[2 * index, column], panels[2 * index + 1, column]
            share = shares(row)
            shown = heat.imshow(share, aspect="auto", cmap="RdBu_r", norm=scale, origin="lower")
            heat.set_axis_on()
            heat.set(title=row["method"], xlabel="KV head")
            heat.set_xticks(range(share.shape[1]))
            if column == 0:
                heat.set_ylabel(f"{source}\nlayer")
            bar.set_axis_on()
            bar.barh([0], [row["visual_share"]], color="tab:orange")
            bar.axvline(context, color="0.3", linestyle="--")
            bar.set(xlim=(0, 1), yticks=[], xlabel="visual share (dashes: of the context)")
            bar.xaxis.label.set_size(6)
    ticks = [tick for tick in 2.0 ** np.arange(-9, 10) if 1 / most <= tick < 0.9 * most]
    figure.colorbar(
        shown,
        ax=panels,
        label="entries / mean budget",
        extend="min",
        aspect=20 * len(lines),
        ticks=[*ticks, most],
        format="{x:.3g}",
    ).minorticks_off()
    figure.suptitle(f"Entries kept at {in_words(budget)}")
    figure.savefig(path, dpi=110)


def table(pages: Mapping[str, Mapping[str, Any]], budget: str, methods: Sequence[str]) -> str:
    """Tabulate the spread over heads and the visual share of every method."""
    columns = (
        "data",
        "method",
        "least head",
        "most head",
        "variance over layers",
        "visual",
        "of context",
    )
    lines = []
    for source, page in pages.items():
        context = page["rows"][0]["visual_share"]
        for row in rows_at(page, budget, methods):
            found = spread(row)
            lines.append(
                (
                    source,
                    row["method"],
                    f"{found['least']:.2f}",
                    f"{found['most']:.2f}",
                    f"{found['between_layers']:.0%}",
                    f"{row['visual_share']:.0%}",
                    f"{context:.0%}",
                )
            )
    return pipe_table(columns, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.kept", description=__doc__)
    parser.add_argument("result", type=Path, help="result file of benchmarks.quality")
    parser.add_argument("--fraction", default="1/8", help="the budget to show")
    parser.add_argument("--methods", nargs="*", default=[], help="methods to show (default: all)")
    args = parser.parse_args(arguments)
    try:
        pages = json.loads(args.result.read_text())["results"]
    except (OSError, ValueError, KeyError) as error:
        refuse(f"cannot read {args.result}: {error}")
    known = {
        what: list(dict.fromkeys(name for page in pages.values() for name in named(page, what)))
        for what in ("budget", "method")
    }
    for what, asked in (("budget", [args.fraction]), ("method", args.methods)):
        for name in asked:
            if name not in known[what]:
                refuse(f"{args.result} has no {what} {name}; it has {', '.join(known[what])}")
    draw(pages, args.result.with_name(f"{args.result.stem}-kept.png"), args.fraction, args.methods)
    print(table(pages, args.fraction, args.methods))


def refuse(reason: str) -> NoReturn:
    """End the program with one line."""
    raise SystemExit(f"benchmarks.quality.kept: error: {reason}")


if __name__ == "__main__":
    main()
