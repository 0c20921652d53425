"""Compute scores: of a judge's verdicts, and exact ones; and the summary of a run.

Verdicts are written to a journal, so that a killed run continues; they have two aggregations, and
questions without a verdict. Exact answers are counted for sets whose references are the only right
answers (``exact`` rows). A summary comes from the finished files alone, so that a resumed run
reports the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.data import Dialogue
from mmkv.eval.mmdu.rubric import DIMENSIONS, OVERALL, SCORES
from mmkv.training.measure.record import Journal, Row
from mmkv.training.measure.tables import Table

Key = tuple[str, int]  # dialogue id, index of the question


@dataclass(frozen=True)
class Verdict:
    """The verdict of the judge on one answer.

    Attributes:
        turn: index of the question. prompt: hash of what was asked, so that a verdict on another
            answer is never taken for one on this.
        scores: by heading; None with a ``failure``: ``refused``, ``no scores``, ``bad scores``.
        detail: the failure in words. reply: the judge's whole text. asked: how often.
    """

    dialogue: str
    turn: int
    prompt: str
    scores: dict[str, int] | None
    failure: str = ""
    detail: str = ""
    reply: str = ""
    asked: int = 1
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Return the question that the reply answers."""
        return self.dialogue, self.turn


class Verdicts:
    """The verdicts of one judge: a journal whose first row says who judges.

    Raises:
        InputError: the journal belongs to another judge.
    """

    def __init__(self, path: Path, judge: dict[str, Any]) -> None:
        self._journal = Journal(path)
        self.by_key: dict[Key, Verdict] = {}
        if not len(self._journal):
            self._journal.add([{"judge": judge}])
            return
        first, *rest = self._journal
        if first.get("judge") != judge:
            raise InputError(
                f"{path} was made by another judge or with other settings ({first.get('judge')}); "
                "name another --output"
            )
        for row in rest:
            verdict = _verdict(row)
            if verdict is not None:
                self.by_key[verdict.key] = verdict

    def add(self, verdict: Verdict) -> None:
        """Write a verdict; it is on the disk when this returns. Raises InputError."""
        self._journal.add([asdict(verdict)])
        self.by_key[verdict.key] = verdict


def _verdict(row: Row) -> Verdict | None:
    try:
        return Verdict(**row)
    except TypeError:  # a damaged line: its question is asked again
        return None


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


ALL = "all"


@dataclass(frozen=True)
class Share:
    """Right answers of one kind of question; ``low``, ``high``: 95 % interval over dialogues."""

    kind: str
    right: int
    of: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Return right answers per question."""
        return self.right / self.of


def is_right(answer: str, reference: str) -> bool:
    """Return whether an answer says the same as its reference, white space aside."""
    return " ".join(answer.split()) == " ".join(reference.split())


def shares(dialogues: Sequence[Dialogue], answers: Mapping[str, Sequence[str]]) -> list[Share]:
    """Count the right answers per kind, ``all`` last; ``answers`` by dialogue id, missing ones left
    out.

    Questions of one dialogue share a memory, so intervals resample dialogues
    (mmkv.eval.measure.stats.mean). Empty when no answered dialogue has exact references.
    """
    from mmkv.eval.measure.stats import mean

    hits: dict[str, dict[str, list[bool]]] = {}
    for dialogue in dialogues:
        for kind, reference, answer in zip(
            dialogue.exact, dialogue.references, answers.get(dialogue.id, ()), strict=False
        ):
            for name in (kind, ALL):
                hit = is_right(answer, reference)
                hits.setdefault(name, {}).setdefault(dialogue.id, []).append(hit)
    found: list[Share] = []
    for kind in sorted(hits, key=lambda name: (name == ALL, name)):
        groups = list(hits[kind].values())
        right, of = [sum(group) for group in groups], [len(group) for group in groups]
        interval = mean(right, of)
        found.append(Share(kind, sum(right), sum(of), interval.low, interval.high))
    return found


def as_rows(found: Sequence[Share]) -> list[dict[str, Any]]:
    """Return the shares as JSON holds them."""
    return [
        {"kind": s.kind, "right": s.right, "of": s.of, "share": s.share, "ci": [s.low, s.high]}
        for s in found
    ]


def summarize(
    dialogues: Sequence[Dialogue], rows: Mapping[str, dict[str, Any]], failed: int
) -> dict[str, Any]:
    """Compute the numbers of a run; ``rows``: the finished files by dialogue id.

    Per-dialogue means are taken at the dialogue's end, where a cache that is never cut would be
    largest.
    """
    done = [dialogue for dialogue in dialogues if dialogue.id in rows]
    # A file of another program has answers and no numbers.
    turns = [rows[d.id].get("mmkv", {}).get("turns", []) for d in done]
    last = [records[-1] for records in turns if records]
    every = [record for records in turns for record in records]
    answers = {d.id: [turn["value"] for turn in rows[d.id]["conversations"][1::2]] for d in done}
    return {
        "dialogues": len(done),
        "failed": failed,
        "questions": sum(len(dialogue.questions) for dialogue in done),
        "cut_at_max_new_tokens": sum(record["finish_reason"] == "length" for record in every),
        "answer_tokens_mean": _mean(every, "generated"),
        "tokens_seen_mean": _mean(last, "tokens_seen"),
        "tokens_seen_max": _most(last, "tokens_seen"),
        "entries_kept_mean": _mean(last, "entries_kept"),
        "entries_evicted_mean": _mean(last, "entries_evicted"),
        "kv_bytes_mean": _mean(last, "kv_bytes"),
        "kv_bytes_max": _most(every, "kv_bytes"),
        "exact": as_rows(shares(done, answers)),
    }


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(record[key] for record in records) / len(records) if records else 0.0


def _most(records: Sequence[Mapping[str, Any]], key: str) -> int:
    return max((record[key] for record in records), default=0)


def memory_table(summary: dict[str, Any], title: str) -> Table:
    """Tabulate tokens, entries and bytes of a run."""
    table = Table(title, ("per dialogue, at its end", "mean", "largest"))
    kept, evicted = summary["entries_kept_mean"], summary["entries_evicted_mean"]
    largest = f"{summary['tokens_seen_max']:,}"
    table.add("tokens seen", f"{summary['tokens_seen_mean']:,.1f}", largest)
    table.add("entries kept", f"{kept:,.1f}", "-")
    table.add("entries evicted", f"{evicted:,.1f}", "-")
    physical = format_bytes(summary["kv_bytes_mean"]), format_bytes(summary["kv_bytes_max"])
    table.add("keys and values, whole pages", *physical)
    return table


def exact_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Tabulate right answers per kind of question."""
    table = Table(title, ("kind", "right", "of", "share", "95 % interval"))
    for row in rows:
        low, high = row["ci"]
        table.add(
            row["kind"], row["right"], row["of"], f"{row['share']:.3f}", f"{low:.3f} .. {high:.3f}"
        )
    return table
