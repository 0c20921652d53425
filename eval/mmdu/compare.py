"""``mmkv mmdu table``: compare several judged runs, each with the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.files import read_json
from mmkv.eval.mmdu.judge_run import SCORES_FILE
from mmkv.eval.mmdu.scores import COLUMNS, cells, overall_sums
from mmkv.training.measure.tables import Table


def compare(folders: Sequence[Path], without_failures: bool = False) -> Table:
    """Make a row per run, failures as 0 unless ``without_failures``.

    ``vs first``: Overall as a share of the first run's. ``p``: paired permutation test of Overall
    over the dialogues both have, failures as 0 (mmkv.eval.measure.stats.paired). Raises
    InputError for a folder without scores.
    """
    runs = [(path, page) for folder in folders for path, page in _runs(folder)]
    judges = {str(page["judge"]) for _, page in runs}
    title = "MMDU, without failures" if without_failures else "MMDU, failures as 0"
    if len(judges) > 1:
        title += " (different judges: the rows cannot be compared)"
    columns = ("run", "policy", "budget", *COLUMNS, "failures", "vs first", "p")
    table = Table(title, columns)
    kind = "without_failures" if without_failures else "failures_as_0"
    first = runs[0][1]
    for path, page in runs:
        settings = page.get("run") or {}
        budget = settings.get("budget") or {}
        table.add(
            path.parent if path.name.startswith("judge-") else path,
            settings.get("policy", "-"),
            f"{budget['value']:g} {budget['unit']}" if budget else "-",
            *cells(page[kind]),
            page["questions"] - page["judged"],
            _relative(page[kind], first[kind]),
            "-" if page is first else _p(page["scores"], first["scores"]),
        )
    return table


def _runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Find the scores in the folder itself or in the judges' folders of a folder of answers."""
    places = [folder, *sorted(folder.glob("judge-*"))]
    found = [(place, read_json(place / SCORES_FILE)) for place in places]
    pages = [(place, page) for place, page in found if page is not None]
    if not pages:
        raise InputError(f"{folder} holds no {SCORES_FILE}; run mmkv mmdu judge for it first")
    for place, page in pages:
        wanted = ("judge", "failures_as_0", "without_failures", "scores", "questions", "judged")
        if not isinstance(page, dict) or any(key not in page for key in wanted):
            raise InputError(
                f"{place / SCORES_FILE} is not of mmkv mmdu judge; name another folder"
            )
    return pages


def _relative(means: dict[str, float] | None, first: dict[str, float] | None) -> str:
    if not means or not first or not first["Overall Score"]:
        return "-"
    return f"{100 * means['Overall Score'] / first['Overall Score']:.1f} %"


def _p(scores: dict[str, Any], first: dict[str, Any]) -> str:
    from mmkv.eval.measure.stats import paired

    both = [name for name in first if name in scores and len(scores[name]) == len(first[name])]
    if not both:
        return "-"
    mine, theirs = ({name: table[name] for name in both} for table in (scores, first))
    counts = [len(row) for row in mine.values()]
    return f"{paired(overall_sums(mine), overall_sums(theirs), counts).p:.3f}"
