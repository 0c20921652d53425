"""Where entries are kept: layers, KV heads and modalities of each side of a quality run.

``python -m eval.kept RESULT.json --fraction 1/8`` reads what :mod:`eval.quality` wrote and draws
``RESULT-kept.png``: per side the mean entries of every (layer, KV head) as a share of the mean
budget, above the share that is visual. It prints the same as a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.budgets import in_words


def rows_at(page: Mapping[str, Any], budget: str, sides: Sequence[str]) -> list[dict[str, Any]]:
    """The sides of one data source at one budget, in the order asked for (default: all)."""
    found = {row["side"]: row for row in page["rows"] if row["budget"] == budget}
    return [found[side] for side in (sides or found) if side in found]


def spread(row: Mapping[str, Any]) -> dict[str, float]:
    """How unequal the shares of layers and heads are.

    Returns:
        ``least`` and ``most`` share of the mean budget that a (layer, KV head) holds, and
        ``between_layers``: part of the variance over heads that lies between layers.
    """
    held = np.array(row["entries_by_row"], float)
    share = held / held.mean()
    total = share.var()
    between = share.mean(axis=1).var() / total if total else 0.0
    return {"least": share.min(), "most": share.max(), "between_layers": float(between)}


def draw(pages: Mapping[str, Mapping[str, Any]], path: Path, budget: str, sides: Sequence[str]):
    """One heat map per data source and side, with the visual share as a bar below."""
    from matplotlib.figure import Figure

    chosen = {source: rows_at(page, budget, sides) for source, page in pages.items()}
    columns = max(len(rows) for rows in chosen.values())
    figure = Figure(figsize=(2.1 * columns + 1, 3.6 * len(chosen)), layout="constrained")
    panels = figure.subplots(
        2 * len(chosen), columns, squeeze=False, height_ratios=[6, 1] * len(chosen)
    )
    for panel in panels.flat:
        panel.set_axis_off()
    for index, (source, rows) in enumerate(chosen.items()):
        context = pages[source]["rows"][0]["visual_share"]
        for column, row in enumerate(rows):
            held = np.array(row["entries_by_row"], float)
            heat, bar = panels[2 * index, column], panels[2 * index + 1, column]
            shown = heat.imshow(
                held / held.mean(), aspect="auto", cmap="viridis", vmin=0, vmax=3, origin="lower"
            )
            heat.set_axis_on()
            heat.set(title=row["side"], xlabel="KV head")
            heat.set_xticks(range(held.shape[1]))
            if column == 0:
                heat.set_ylabel(f"{source}\nlayer")
            bar.set_axis_on()
            bar.barh([0], [row["visual_share"]], color="tab:orange")
            bar.axvline(context, color="0.3", linestyle="--")
            bar.set(xlim=(0, 1), yticks=[], xlabel="visual share (dashes: of the context)")
            bar.xaxis.label.set_size(6)
        figure.colorbar(shown, ax=panels[2 * index, :], label="entries / mean budget")
    figure.suptitle(f"Entries kept at {in_words(budget)}")
    figure.savefig(path, dpi=110)


def table(pages: Mapping[str, Mapping[str, Any]], budget: str, sides: Sequence[str]) -> str:
    """Markdown: spread over heads and visual share of every side."""
    lines = [
        "| data | side | least head | most head | variance between layers | visual | of context |",
        "|---|---|---|---|---|---|---|",
    ]
    for source, page in pages.items():
        context = page["rows"][0]["visual_share"]
        for row in rows_at(page, budget, sides):
            found = spread(row)
            lines.append(
                f"| {source} | {row['side']} | {found['least']:.2f} | {found['most']:.2f} | "
                f"{found['between_layers']:.0%} | {row['visual_share']:.0%} | {context:.0%} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m eval.kept", description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of eval.quality")
    parser.add_argument("--fraction", default="1/8", help="the budget to look at")
    parser.add_argument("--sides", nargs="*", default=[], help="default: all")
    args = parser.parse_args(arguments)
    try:
        pages = json.loads(args.result.read_text())["results"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"eval.kept: error: cannot read {args.result}: {error}") from error
    budgets = list(dict.fromkeys(r["budget"] for page in pages.values() for r in page["rows"]))
    if args.fraction not in budgets[1:]:
        raise SystemExit(
            f"eval.kept: error: {args.result} has no budget {args.fraction}; it has "
            f"{', '.join(budgets[1:])}"
        )
    draw(pages, args.result.with_name(f"{args.result.stem}-kept.png"), args.fraction, args.sides)
    print(table(pages, args.fraction, args.sides))


if __name__ == "__main__":
    main()
