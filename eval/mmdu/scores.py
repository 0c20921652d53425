"""Compute scores from verdicts: both aggregations, and the questions without a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mmkv.eval.mmdu.data import Dialogue
from mmkv.eval.mmdu.rubric import DIMENSIONS, OVERALL, SCORES
from mmkv.eval.mmdu.verdicts import Key, Verdict
from mmkv.training.measure.tables import Table

NO_ANSWER, NOT_JUDGED = "no answer", "not judged"
AVERAGE = "Average"
COLUMNS = (*DIMENSIONS.values(), "Avg", "Overall")
_NAMES = (*DIMENSIONS, AVERAGE, OVERALL)


def aggregate(
    dialogues: Sequence[Dialogue], unanswered: set[str], verdicts: Mapping[Key, Verdict]
) -> dict[str, Any]:
    """Average a run's scores over every question of ``dialogues``; verdicts alone decide it.

    Args:
        unanswered: ids of dialogues without answers. verdicts: the valid ones, by question.

    Returns:
        ``failures`` by kind; ``failures_as_0`` and ``without_failures``: ten times the mean score
        by heading, with ``Average`` (of the six headings); ``overall_ci``: 95 % interval of
        ``failures_as_0`` over dialogues; ``scores``: per dialogue and question, by heading in the
        order of ``headings``, or the kind of failure.
    """
    from mmkv.eval.measure.stats import mean

    table: dict[str, list[list[int] | str]] = {}
    for dialogue in dialogues:
        table[dialogue.id] = [
            NO_ANSWER if dialogue.id in unanswered else _cell(verdicts.get((dialogue.id, turn)))
            for turn in range(len(dialogue.questions))
        ]
    cells = [cell for row in table.values() for cell in row]
    judged = [cell for cell in cells if not isinstance(cell, str)]
    overall = overall_sums(table)
    counts = [len(row) for row in table.values()]
    interval = mean([10 * total for total in overall], counts) if cells else None
    return {
        "headings": list(SCORES),
        "questions": len(cells),
        "judged": len(judged),
        "failures": dict(sorted(Counter(c for c in cells if isinstance(c, str)).items())),
        "failures_as_0": _means(judged, len(cells)),
        "without_failures": _means(judged, len(judged)),
        "overall_ci": None if interval is None else [interval.low, interval.high],
        "scores": table,
    }


def overall_sums(table: Mapping[str, Sequence[list[int] | str]]) -> list[int]:
    """Sum the overall scores of each dialogue, failures as 0."""
    place = SCORES.index(OVERALL)
    return [sum(c[place] for c in row if not isinstance(c, str)) for row in table.values()]


def _cell(verdict: Verdict | None) -> list[int] | str:
    if verdict is None:
        return NOT_JUDGED
    if verdict.scores is None:
        return verdict.failure
    return [verdict.scores[name] for name in SCORES]


def _means(judged: Sequence[list[int]], count: int) -> dict[str, float] | None:
    """Compute ten times the mean over ``count`` questions, those not in ``judged`` being 0."""
    if not count:
        return None
    means = {
        name: 10 * sum(cell[index] for cell in judged) / count for index, name in enumerate(SCORES)
    }
    means[AVERAGE] = sum(means[name] for name in DIMENSIONS) / len(DIMENSIONS)
    return means


def score_table(result: Mapping[str, Any], title: str) -> Table:
    """Tabulate both aggregations as MMDU's paper does: ten times the mean per dimension."""
    table = Table(title, ("aggregation", *COLUMNS, "95 % of Overall", "questions", "failures"))
    low, high = result["overall_ci"] or (0.0, 0.0)
    questions, judged = result["questions"], result["judged"]
    table.add(
        "failures as 0",
        *cells(result["failures_as_0"]),
        f"{low:.1f} .. {high:.1f}",
        questions,
        questions - judged,
    )
    table.add("without failures", *cells(result["without_failures"]), "", judged, 0)
    return table


def cells(means: Mapping[str, float] | None) -> list[str]:
    """Return the means in the order of COLUMNS."""
    return ["-" if means is None else f"{means[name]:.1f}" for name in _NAMES]
