"""Tables and figure of ``eval.dilution``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.eval.measure.stats import mean, paired
from mmkv.eval.quality.report import interval
from mmkv.eval.quality.run import Record
from mmkv.training.measure.tables import pipe_table

Raw = Mapping[str, Sequence[Sequence[Record]]]
_SHARES = (
    "useful",
    "distractors",
    "dialogue",
    "first",
    "bound",
    "predicted",
    "kept_useful",
    "kept_others",
    "kept_distractors",
)
_COLUMNS = (
    "haystack",
    "cache",
    "answers right",
    "useful",
    "distractors",
    "dialogue",
    "first tokens",
    "lost at least",
    "predicted useful",
    "rho_U",
    "rho_D",
    "rho_D of distractors",
    "useful / (useful + distractors)",
    "useful, looking heads",
)
_LOOKING = 10  # per cent of the heads that count as looking at the needle


def summarise(
    domain: str, read: Sequence[tuple[int, Raw]], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute everything the result file holds.

    Args:
        read: per length what :meth:`mmkv.eval.quality.run.ComparisonRuns.of` returned.

    Returns:
        ``lengths``: per length and cell the means of ``measure`` with intervals
        over documents, ``looking``: useful share in the heads that look at the needle most with the
        full cache in all *other* documents (chosen on the same ones they would regress),
        ``difference``: useful share minus the full cache's, ``difference_looking`` likewise, and
        ``inside``, ``difference_inside`` of useful / (useful + distractors); ``heads``: measured
        and predicted useful share of every head, documents and lengths together.
    """
    looking = _looking(read)
    cells = ["full", *(f"{method} at {budget}" for budget in budgets for method in methods)]
    lengths = {
        str(length): {name: _cell(raw[name], raw["full"], looking[length]) for name in cells}
        for length, raw in read
    }
    heads = {}
    for name in cells:
        measured, predicted = (
            np.mean([_heads(raw[name], key) for _, raw in read], 0)
            for key in ("heads", "heads_predicted")
        )
        heads[name] = {
            "measured": measured.round(5).tolist(),
            "predicted": predicted.round(5).tolist(),
            "correlation": _correlation(measured, predicted),
        }
    return {
        "domain": domain,
        "documents": len(read[0][1]["full"][0]),
        "methods": list(methods),
        "budgets": list(budgets),
        "lengths": lengths,
        "heads": heads,
    }


def _looking(read: Sequence[tuple[int, Raw]]) -> dict[int, list[np.ndarray]]:
    """Return per length and document a mask ``[L, H, G]``: the heads that look most in all the
    others.
    """
    shares = {length: [np.array(r["heads"]) for r in raw["full"][0]] for length, raw in read}
    total = sum(share for part in shares.values() for share in part)
    return {
        length: [rest >= np.percentile(rest, 100 - _LOOKING) for rest in (total - x for x in part)]
        for length, part in shares.items()
    }


def _correlation(one: np.ndarray, two: np.ndarray) -> float | None:
    """Compute the Pearson correlation.

    None where one of them does not vary (nothing useful was kept anywhere).
    """
    if not one.std() or not two.std():
        return None
    return float(np.corrcoef(one.flat, two.flat)[0, 1])


def _heads(runs: Sequence[Sequence[Record]], name: str) -> np.ndarray:
    return np.mean([record[name] for run in runs for record in run], 0)


def _cell(
    runs: Sequence[Sequence[Record]], full: Sequence[Sequence[Record]], looking: list[np.ndarray]
) -> dict[str, Any]:
    def by_document(runs: Sequence[Sequence[Record]], name: str) -> list[float]:
        return [float(np.mean([r[name] for r in rows])) for rows in zip(*runs, strict=True)]

    def focus(runs: Sequence[Sequence[Record]]) -> list[float]:
        return [
            float(np.mean([np.array(r["heads"])[mask].mean() for r in rows]))
            for mask, rows in zip(looking, zip(*runs, strict=True), strict=True)
        ]

    def inside(runs: Sequence[Sequence[Record]]) -> list[float]:
        pairs = zip(by_document(runs, "useful"), by_document(runs, "distractors"), strict=True)
        return [useful / max(useful + others, 1e-9) for useful, others in pairs]

    once = [1.0] * len(runs[0])
    hits = [float(np.mean([sum(r["right"]) for r in rows])) for rows in zip(*runs, strict=True)]
    asked = [len(record["right"]) for record in runs[0]]
    return {
        "accuracy": asdict(mean(hits, asked)),
        **{name: asdict(mean(by_document(runs, name), once)) for name in _SHARES},
        "looking": asdict(mean(focus(runs), once)),
        "inside": asdict(mean(inside(runs), once)),
        "difference_inside": asdict(paired(inside(runs), inside(full), once)),
        "difference": asdict(
            paired(by_document(runs, "useful"), by_document(full, "useful"), once)
        ),
        "difference_looking": asdict(paired(focus(runs), focus(full), once)),
    }


def markdown(page: Mapping[str, Any]) -> str:
    """Tabulate the shares of attention by length and cell, and what theory says beside them."""
    lines = [
        f"### Attention dilution in {page['domain']}: {page['documents']} documents each length\n",
        "Mean share of attention of the steps that predict an answer, over all layers and heads. "
        "*Lost at least*: Proposition 3.1. *Predicted*: Corollary 3.2, from the full cache's "
        "logits and the entries kept. *Looking heads*: the tenth of the heads with the largest "
        "useful share in the full cache over all other documents.\n",
    ]
    table: list[list[str]] = []
    for length, cells in page["lengths"].items():
        for name, cell in cells.items():
            table.append([length, name, f"{cell['accuracy']['value']:.3f}"])
            table[-1].append(interval(cell["useful"]))
            table[-1] += [f"{cell[key]['value']:.3f}" for key in _SHARES[1:]]
            table[-1] += [interval(cell["inside"]), interval(cell["looking"])]
    lines += [
        pipe_table(_COLUMNS, table),
        "",
        "Agreement of measured and predicted useful share over heads (Pearson): "
        + ", ".join(
            f"{name} {held['correlation']:.3f}"
            for name, held in page["heads"].items()
            if name != "full" and held["correlation"] is not None
        )
        + ".",
        "",
        "Paired differences to the full cache (sign-flip tests over documents):\n",
    ]
    table = []
    for length, cells in page["lengths"].items():
        for name, cell in cells.items():
            if name != "full":
                names = ("difference", "difference_inside", "difference_looking")
                table.append([length, name])
                for test in (cell[key] for key in names):
                    table[-1] += [interval(test, sign=True), f"{test['p']:.4f}"]
    columns = ["haystack", "cache"]
    for measured in ("useful", "useful / (useful + distractors)", "useful, looking heads"):
        columns += [measured, "p"]
    lines.append(pipe_table(columns, table))
    return "\n".join(lines) + "\n"


def draw(page: Mapping[str, Any], path: Path) -> None:
    """Draw the useful share by length, and the measured share against the predicted one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    lengths = list(page["lengths"])
    x = [int(length) for length in lengths]
    for panel, key, title in zip(
        panels, ("useful", "looking"), ("all heads", "looking heads"), strict=False
    ):
        for name in page["lengths"][lengths[0]]:
            cells = [page["lengths"][length][name][key] for length in lengths]
            style = {"color": "black", "linestyle": "--"} if name == "full" else {}
            panel.plot(x, [c["value"] for c in cells], marker="o", label=name, **style)
            panel.fill_between(x, [c["low"] for c in cells], [c["high"] for c in cells], alpha=0.1)
        panel.set(
            title=f"attention on the needle, {title}",
            xlabel="haystack, tokens",
            xscale="log",
            ylim=(0, None),
        )
        panel.set_xticks(x, lengths)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of attention")
    panels[0].legend(fontsize=7)
    top = 0.0
    for name, held in page["heads"].items():
        if name != "full":
            predicted, measured = np.array(held["predicted"]), np.array(held["measured"])
            panels[2].plot(predicted.flat, measured.flat, ".", markersize=4, label=name)
            top = max(top, predicted.max(), measured.max())
    panels[2].plot([0, top], [0, top], color="0.5", linewidth=0.8)
    panels[2].set(
        title="useful share of every head", xlabel="predicted by Corollary 3.2", ylabel="measured"
    )
    panels[2].grid(alpha=0.3)
    panels[2].legend(fontsize=7)
    figure.suptitle(f"Attention dilution in {page['domain']}")
    figure.savefig(path, dpi=110)
