"""Plot the training curve of a distillation run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HELD_OUT = ("held_out_kl", "held_out_agreement", "held_out_exact")
_RETENTION = (
    ("losses", ("kl", "ntp", "capacity")),
    ("soft entries per head", ("kept", "kept_least", "kept_most")),
    ("shares", ("agreement", "visual_share")),
    ("held out, with eviction", _HELD_OUT),
)
_WRITE = (
    ("losses", ("distill", "sparsity")),
    ("share of entries admitted", ("admitted", "admitted_least", "admitted_most")),
    ("mean gate", ("gate",)),
    ("held out, with admission", (*_HELD_OUT, "held_out_admitted")),
)


def draw_curve(history: Sequence[Mapping[str, Any]], path: Path, budget: float | None) -> None:
    """Draw losses, retained or admitted entries and held-out figures over the steps.

    Args:
        history: log lines with ``step``; path: the PNG to write; budget: M, drawn as a line;
            None for write gates, which have none.

    Raises:
        ImportError: naming the extra, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the curve needs matplotlib: pip install 'mmkv[train]'") from error
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    groups = _RETENTION if budget is not None else _WRITE
    panels = figure.subplots(1, len(groups))
    for panel, (title, names) in zip(panels, groups, strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in history if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, marker="." * (len(points) < 9))
        panel.set(title=title, xlabel="step")
        if title == "losses":
            panel.set_yscale("symlog", linthresh=1e-3)
        if "kept" in names and budget is not None:
            panel.set_yscale("log")
            panel.axhline(budget, color="0.6", linestyle="--", label=f"M = {budget:g}")
        if panel.has_data():
            panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
