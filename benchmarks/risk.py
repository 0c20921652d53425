"""Measure whether the risk of a session (:mod:`mmkv.engine.risk`) says how far its answers go off.

``python -m benchmarks.risk`` reads drawn, held-out dialogues of the bundled model under several
budgets. Before each answer it takes the session's risk; the answer is read teacher-forced, beside
the full
cache: KL(full || ours) a token, and whether the answer is *lost*, right with the full cache and
wrong here. A killed run continues. The tables have a reliability curve (questions in tenths by
their risk) and rank correlations over all budgets and within each, whose 95 % intervals resample
dialogues.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.bands import spearman
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model_name
from mmkv.training.data.dialogues import scene_example, scene_turns
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.measure.record import RESULTS, Journal, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import FullCache, spans

# One question under one budget: what is known before it is answered, and what came of it.
Row = dict[str, Any]
KNOWN = ("risk", "risk of pictures", "entries gone")
FOUND = ("kl", "wrong", "lost")
_DRAWS = 200


@torch.inference_mode()
def ask(engine: Runtime, source: str, seed: int, budgets: Sequence[float]) -> list[Row]:
    """Read one dialogue under every budget; a row for each of its questions and each budget."""
    turns = scene_turns(source, seed, "heldout")
    example = scene_example(turns, build_tokenizer())
    labels = example.pop("labels")[0]
    read = engine.family.turn(example, 0, engine.device)
    reference = F.log_softmax(torch.stack(list(FullCache.of(engine, read, labels).logits())), -1)
    rows = []
    for budget in budgets:
        done, theirs = 0, iter(reference)
        with engine.session(budget) as session:
            for number, (start, stop) in enumerate(spans(labels.tolist())):
                logits = session.extend(read.part(done, start))
                risk, done = session.risk(), stop
                assert risk is not None
                known = risk.total, risk.by_modality.get("image", 0.0)
                gone = session.evicted / (session.evicted + session.entries)
                kl, right, full_right = 0.0, True, True
                for token in labels[start:stop].tolist():
                    ours, full = F.log_softmax(logits, -1), next(theirs)
                    kl += float((full.exp() * (full - ours)).sum())
                    right &= int(ours.argmax()) == token
                    full_right &= int(full.argmax()) == token
                    logits = session.decode(token)
                asked = turns[number].question
                row = {"source": source, "dialogue": seed, "question": number, "budget": budget}
                row |= {"kind": f"{asked.about}: {asked.kind}", "kl": kl / (stop - start)}
                row |= dict(zip(KNOWN, (*known, gone), strict=True))
                rows.append(row | {"wrong": not right, "lost": full_right and not right})
    return rows


class QuestionTable:
    """Rows in columns, each of a dialogue, which is what intervals resample."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = columns
        _, self.dialogue = np.unique(columns["dialogue"], return_inverse=True)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> QuestionTable:
        """Make them of what :func:`ask` gave."""
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        dialogue = [f"{row['source']} {row['dialogue']}" for row in rows]
        return cls(columns | {"dialogue": np.array(dialogue)})

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def where(self, mask: np.ndarray) -> QuestionTable:
        """Return some of them: a mask or indices."""
        return QuestionTable({name: column[mask] for name, column in self.columns.items()})

    def resampled(self, measure: Callable[[np.ndarray], float]) -> list[float | None]:
        """Return ``measure`` of all indices and its interval; None where it has no value."""
        count = self.dialogue.max() + 1
        parts = [np.flatnonzero(self.dialogue == i) for i in range(count)]
        picks = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
        drawn = [measure(np.concatenate([parts[i] for i in pick])) for pick in picks]
        fine = [value for value in drawn if value == value]
        made = [measure(np.arange(len(self.dialogue)))]
        made += np.quantile(fine, [0.025, 0.975]).tolist() if fine else [float("nan")] * 2
        return [None if value != value else round(float(value), 4) for value in made]


class _MeanOf:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __call__(self, at: np.ndarray) -> float:
        return float(self._values[at].mean())


def tenths(rows: QuestionTable, known: str) -> list[dict[str, Any]]:
    """Return the reliability curve: a tenth of the rows a line, by what is ``known`` of them."""
    lines = []
    for part in np.array_split(np.argsort(rows[known], kind="stable"), 10):
        mine = rows.where(part)
        line: dict[str, Any] = {
            "least": float(mine[known].min()),
            "most": float(mine[known].max()),
        }
        for name in FOUND:
            line[name] = mine.resampled(_MeanOf(mine[name].astype(float)))
        lines.append(line)
    return lines


def across(rows: QuestionTable, known: str, found: str) -> list[float | None]:
    """Return Spearman's rho over all rows, and its interval."""
    one, two = rows[known], rows[found].astype(float)
    return rows.resampled(lambda at: spearman(one[at], two[at]))


def within(rows: QuestionTable, known: str, found: str) -> list[float | None]:
    """Return the mean of Spearman's rho within each budget, by questions, and its interval."""
    one, two, budget = rows[known], rows[found].astype(float), rows["budget"]

    def measure(at: np.ndarray) -> float:
        each = []
        for value in np.unique(budget[at]):
            mine = at[budget[at] == value]
            rho = spearman(one[mine], two[mine])
            each += [(rho, len(mine))] if rho == rho else []
        total = sum(count for _, count in each)
        return sum(rho * count for rho, count in each) / total if total else float("nan")

    return rows.resampled(measure)


def summarise(every: Sequence[Row]) -> dict[str, Any]:
    """Return what the result file has beside the rows."""
    rows = QuestionTable.of(every)
    budgets = {f"{value:g}": rows.where(rows["budget"] == value) for value in set(rows["budget"])}
    budgets = dict(sorted(budgets.items(), key=lambda item: float(item[0])))
    groups = {"all": rows}
    for field in ("source", "kind"):
        for value in sorted(set(rows[field])):
            groups[f"{field} {value}"] = rows.where(rows[field] == value)
    pairs = [(known, name) for known in KNOWN for name in ("kl", "lost")]
    return {
        "questions": len(set(zip(rows["dialogue"], rows["question"], strict=True))),
        "dialogues": int(rows.dialogue.max() + 1),
        "tenths": {known: tenths(rows, known) for known in KNOWN},
        "tenths_within": {name: tenths(own, "risk") for name, own in budgets.items()},
        "across": {f"{known} / {name}": across(rows, known, name) for known, name in pairs},
        "each_budget": {
            f"{known} / {name} / M = {budget}": across(own, known, name)
            for known, name in pairs
            for budget, own in budgets.items()
        },
        "within": {
            f"{known} / {name} / {group}": within(own, known, name)
            for known, name in pairs
            for group, own in groups.items()
        },
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of a result."""
    parts = [f"{found['questions']} questions in {found['dialogues']} dialogues."]
    lines = []
    for tenth in found["tenths"]["risk"]:
        named = f"{tenth['least']:.4f} .. {tenth['most']:.4f}"
        lines.append([named, *(_shown(tenth[name]) for name in FOUND)])
    parts.append(pipe_table(["risk", "KL a token", "wrong", "lost"], lines))
    for title in ("across", "each_budget", "within"):
        table = [[name, _shown(value)] for name, value in found[title].items()]
        parts.append(pipe_table([f"Spearman's rho, {title}", "rho, 95 % interval"], table))
    return "\n\n".join(parts) + "\n"


def _shown(value: Sequence[float | None]) -> str:
    known = [one for one in value if one is not None]
    return "{:.3f} ({:.3f} .. {:.3f})".format(*known) if len(known) == 3 else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.risk", description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--policy", default="dbtrimkv")
    parser.add_argument("--sources", nargs="+", default=["dense", "sparse", "96-distractors"])
    parser.add_argument("--dialogues", nargs="+", type=int, default=[36, 30, 12])
    parser.add_argument("--first", type=int, default=1000, help="seed of the first dialogue")
    parser.add_argument("--budgets", nargs="+", type=float, default=[16, 32, 64, 128])
    parser.add_argument("--output", type=Path, default=RESULTS / "risk-tiny-vlm.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gates = Path(args.model) / "gates"
    engine = Runtime.from_pretrained(
        args.model, policy=args.policy, gates=gates, dtype="float32", device="cpu"
    )
    jobs = [
        (source, args.first + number)
        for source, count in zip(args.sources, args.dialogues, strict=True)
        for number in range(count)
    ]
    rows = []
    journal = Journal(args.output.with_suffix(".runs.jsonl"))
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    decides = f"{args.model} {args.policy} {args.budgets}"
    for source, seed in tqdm(jobs, "reading", file=sys.stderr):
        where = f"{decides} {source} {seed}"
        rows += journal.rows("where", where) or journal.add(
            [row | {"where": where} for row in ask(engine, source, seed, args.budgets)]
        )
    found = summarise(rows)
    each = {name: [row[name] for row in rows] for name in rows[0] if name != "where"}
    rounded = {
        name: [round(value, 5) if isinstance(value, float) else value for value in values]
        for name, values in each.items()
    }
    write_results(args.output, settings, found | {"rows": rounded})
    print(markdown(found))


if __name__ == "__main__":
    main()
