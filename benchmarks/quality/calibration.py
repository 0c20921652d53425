"""Measure whether calibrations keep their promise: ``python -m benchmarks.quality.calibration``.

Held-out dialogues are cut into halves 200 times: one half calibrates, the other is answered. The
tables have the mean share that is lost and not escalated, how many of the splits pass alpha, and
what is escalated, by score; a fixed budget of the same mean memory beside it; and what becomes of
the promise, and of the alarm, where the dialogues are others than the calibration's. A killed run
continues.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmkv.api import Engine
from mmkv.calibration import (
    CalibratedAnswer,
    CalibratedDialogue,
    Calibration,
    Drift,
    Score,
    limit_of,
)
from mmkv.engine.paths import named_model
from mmkv.eval.calibrate import answer_of, measured
from mmkv.loading import Terminal
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import spans

ALPHAS = (0.02, 0.05, 0.1)
SCORES: tuple[Score, ...] = ("both", "doubt", "risk")
_SPLITS, _ALARMS = 200, 100


@dataclass(frozen=True)
class DialogueSet:
    """Dialogues of one kind under one budget; ``calibrates``: whether it is cut into halves."""

    name: str
    model: str
    data: str
    budget: float
    count: int
    calibrates: bool = True


TINY, TEXT = "tiny-vlm", "smollm2-135m"
SETS = (
    DialogueSet("dense M=32", TINY, "scenes:dense", 32, 320),
    DialogueSet("dense M=16", TINY, "scenes:dense", 16, 320),
    DialogueSet("sparse M=16", TINY, "scenes:sparse", 16, 320),
    DialogueSet("facts in text M=40", TEXT, "tasks:recall", 40, 200),
    DialogueSet("sparse M=32", TINY, "scenes:sparse", 32, 100, False),
    DialogueSet("40 pictures M=32", TINY, "scenes:40-pictures", 32, 100, False),
    DialogueSet("256 distractors M=32", TINY, "scenes:256-distractors", 32, 100, False),
    DialogueSet("records in text M=40", TEXT, "tasks:records", 40, 60, False),
)
# Calibrated on one set, answered on the other.
SHIFTS = (
    ("dense M=32", "dense M=32"),
    ("dense M=32", "sparse M=32"),
    ("dense M=32", "40 pictures M=32"),
    ("dense M=32", "256 distractors M=32"),
    ("facts in text M=40", "records in text M=40"),
)
# Beside the first set: the same dialogues under larger budgets.
LARGER = tuple(
    DialogueSet(f"dense M={budget:g}", TINY, "scenes:dense", budget, 320, False)
    for budget in (36, 40, 44, 48)
)

Row = dict[str, Any]
Dialogues = list[CalibratedDialogue]


def read(of: DialogueSet, folder: Path) -> tuple[list[Row], list[list[int]]]:
    """Return the rows of a set, and the tokens that each answer of it stands behind."""
    model = bundled_model() if of.model == TINY else named_model(of.model)
    assert model is not None
    engine = Engine.from_pretrained(model, policy="dbtrimkv", budget=of.budget, dtype="float32")
    data = examples(str(model), [of.data], of.count, 0, max_length=16384, split="heldout")
    output = folder / f"{of.name.replace(' ', '-')}.json"
    rows = measured(engine, data, of.count, output, Terminal())
    seen = []
    for row in rows:
        labels = data.encoder(data.mixture[row["number"]])[0].labels.tolist()
        seen.append([start for start, _ in spans(labels)][: len(row["answers"])])
    return rows, seen


def dialogues(rows: Sequence[Row], score: Score) -> Dialogues:
    """Return what a calibration holds of rows."""
    return [
        CalibratedDialogue(answers=[answer_of(one, "answers", score) for one in row["answers"]])
        for row in rows
    ]


def drawn_at_random(every: Dialogues) -> Dialogues:
    """Return the same dialogues with scores that know nothing."""
    draw = random.Random(0)

    def answer(one: CalibratedAnswer) -> CalibratedAnswer:
        score = draw.random()
        return CalibratedAnswer(score=score, losses=[(score, loss) for _, loss in one.losses])

    return [CalibratedDialogue(answers=[answer(one) for one in each.answers]) for each in every]


def splits(every: Dialogues, alpha: float) -> dict[str, float]:
    """Calibrate on halves and answer the others."""
    draw, found = np.random.default_rng(0), []
    for _ in range(_SPLITS):
        order = draw.permutation(len(every))
        half = len(every) // 2
        own, others = ([every[at] for at in part] for part in (order[:half], order[half:]))
        limit = limit_of(own, alpha)
        found.append((_mean(one.lost(limit) for one in others), _escalated(others, limit)))
    lost, escalated = np.array(found).T
    return {
        "lost": round(float(lost.mean()), 4),
        "above alpha": round(float((lost > alpha).mean()), 3),
        "escalated": round(float(escalated.mean()), 4),
    }


def shifted(own: Dialogues, others: Dialogues, same: bool, budget: float) -> dict[str, Any]:
    """Calibrate on one set and answer another; of the ``same`` set on halves."""
    draw, lost, escalated, alarms = np.random.default_rng(1), [], [], []
    for _ in range(_ALARMS):
        mine, theirs = own, [others[at] for at in draw.permutation(len(others))]
        if same:
            mine, theirs = theirs[: len(theirs) // 2], theirs[len(theirs) // 2 :]
        made = Calibration(
            format="mmkv-calibration-1",
            identity={},
            data=[],
            loss="answers",
            score="both",
            alpha=0.05,
            dialogues=mine,
        )
        lost.append(_mean(one.lost(made.limit) for one in theirs))
        escalated.append(_escalated(theirs, made.limit))
        drift = Drift(made)
        for dialogue in [*theirs, theirs[0]]:  # the last test comes with the one behind it
            watched = None
            for answer in dialogue.answers:
                watched = drift.note(watched, answer.score)
        alarms.append(drift.alarm or math.inf)
    median = float(np.median(alarms))
    return {
        "lost without": round(_mean(one.lost(math.inf) for one in others), 4),
        "lost": round(float(np.mean(lost)), 4),
        "escalated": round(float(np.mean(escalated)), 4),
        "alarms": round(float(np.isfinite(alarms).mean()), 3),
        "after": None if math.isinf(median) else int(median),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _escalated(every: Dialogues, limit: float) -> float:
    return _mean(one.escalated(limit) for one in every)


def beside_fixed(
    rows: Sequence[Row], seen: Sequence[Sequence[int]], larger: Mapping[str, Sequence[Row]]
) -> list[dict[str, Any]]:
    """Return what is lost by mean memory: entries per row, with those of second readings."""
    every, lines = dialogues(rows, "both"), []
    for alpha in ALPHAS:
        found = splits(every, alpha)
        limit = limit_of(every, alpha)
        more = _mean(
            _mean(at * (one.score >= limit) for at, one in zip(some, each.answers, strict=True))
            for some, each in zip(seen, every, strict=True)
        )
        line = {"memory": f"M=32, alpha {alpha:g}", "entries": round(32 + more, 1)}
        lines.append(line | {"lost": found["lost"]})
    for name, own in {"dense M=32": rows, **larger}.items():
        lost = _mean(one.lost(math.inf) for one in dialogues(own, "both"))
        entries = float(name.rpartition("=")[2])
        lines.append({"memory": name, "entries": entries, "lost": round(lost, 4)})
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.calibration")
    parser.add_argument("--runs", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--output", type=Path, default=RESULTS / "calibration.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every = {of.name: read(of, args.runs) for of in (*SETS, *LARGER)}
    promised = []
    for of in SETS:
        if not of.calibrates:
            continue
        by_score = {score: dialogues(every[of.name][0], score) for score in SCORES}
        by_score |= {"random": drawn_at_random(by_score["both"])}  # type: ignore[dict-item]
        for score, own in by_score.items():
            for alpha in ALPHAS:
                line = {"set": of.name, "score": score, "alpha": alpha}
                unlimited = round(_mean(one.lost(math.inf) for one in own), 4)
                promised.append(line | {"without": unlimited} | splits(own, alpha))
    changed = []
    for own_name, other in SHIFTS:
        own, others = (dialogues(every[name][0], "both") for name in (own_name, other))
        found = shifted(own, others, own_name == other, 32)
        changed.append({"calibrated on": own_name, "answered": other} | found)
    larger = {of.name: every[of.name][0] for of in LARGER}
    memory = beside_fixed(*every["dense M=32"], larger)
    results = {"promised": promised, "shifts": changed, "memory": memory}
    tables = {"promised": promised_table(promised)}
    tables |= {name: _table(results[name]) for name in ("shifts", "memory")}
    settings = {"sets": [vars(of) for of in (*SETS, *LARGER)], "splits": _SPLITS}
    write_results(args.output, settings, results, tables)
    for head, *lines in tables.values():
        print(pipe_table(head, lines), end="\n\n")


def promised_table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each set and alpha, with what each score escalates."""
    found: dict[tuple[str, float], dict[str, str]] = {}
    for line in lines:
        row = found.setdefault((line["set"], line["alpha"]), {})
        if line["score"] == "both":
            row |= {"dialogues": line["set"], "lost": _shown(line["without"])}
            row |= {"alpha": _shown(line["alpha"]), "with limit": _shown(line["lost"])}
            row |= {"above alpha": _shown(line["above alpha"])}
        name = {"both": "escalated"}.get(line["score"], line["score"])
        row[name] = _shown(line["escalated"])
    return [list(next(iter(found.values()))), *(list(row.values()) for row in found.values())]


def _table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [list(lines[0]), *([_shown(cell) for cell in line.values()] for line in lines)]


def _shown(cell: Any) -> str:
    if isinstance(cell, float) and cell <= 1:
        return f"{cell:.3g}"
    return "-" if cell is None else str(cell)


if __name__ == "__main__":
    main()
