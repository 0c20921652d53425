"""Measure a budget that follows the risk, beside fixed ones that hold as much on average.

``python -m benchmarks.dial`` reads a mixture of scene dialogues, each in a session of its own:
under a dial (``--risk``), under a fixed budget in entries, and under a share of the tokens. The
last two are chosen so that over all dialogues, gates and steps (a part of a prompt, or a token of
an answer) they hold as many entries on average as the dial did; pages are reported beside them.
Answers are teacher-forced with eviction after each token, and right when every token is the most
likely one. Dialogues are the unit of intervals and of the paired tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.quality.report import interval
from mmkv.engine.model.families.base import Turn
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.stats import mean, paired
from mmkv.resources import asset, bundled_model_name
from mmkv.training.data.dialogues import scene_example, scene_turns
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import spans

ARMS = ("dial", "fixed", "share")
Row = dict[str, Any]
Dialogue = tuple[Turn, Tensor]


def read(engine: Runtime, dialogue: Dialogue, budget: Budget) -> Row:
    """Read a dialogue; right answers, and what was held, as sums over its steps."""
    turn, labels = dialogue
    right, done, held, pages, full = [], 0, [], [], 0
    with engine.session(budget) as session:

        def note() -> None:
            held.append(session.entries)
            pages.append(engine.cache.held_pages(session.seq))

        for start, stop in spans(labels.tolist()):
            logits, hit = session.extend(turn.part(done, start)), True
            note()
            for token in labels[start:stop].tolist():
                hit &= int(logits.argmax()) == token
                logits = session.decode(token)
                note()
            right.append(hit)
            done = stop
            full += session.dial is not None and session.dial[-1]
    counted = {"right": sum(right), "questions": len(right), "steps": len(held)}
    return counted | {"entries": sum(held), "pages": sum(pages), "full": full}


def lengths(dialogue: Dialogue) -> list[int]:
    """Return the tokens that have been read after each step of :func:`read`."""
    seen: list[int] = []
    for start, stop in spans(dialogue[1].tolist()):
        seen += range(start, stop + 1)
    return seen


def equal_budget(
    target: float, seen: Sequence[int], held: Callable[[float, int], float], most: float
) -> float:
    """Return the number with which ``held`` is ``target`` on average over steps of ``seen``."""
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        few = sum(held(middle, one) for one in seen) < target * len(seen)
        low, high = (middle, high) if few else (low, middle)
    return high


def summarise(rows: Sequence[Row], kinds: Sequence[str], risks: Sequence[float]) -> list[Row]:
    """Average over dialogues and gate seeds, and pair the dial with each other arm."""
    found = []
    for risk in risks:
        for kind in ("all", *kinds):
            sums: dict[str, list[float]] = {}
            for arm in ARMS:
                mine = [r for r in rows if (r["risk"], r["arm"]) == (risk, arm)]
                mine = [r for r in mine if kind in ("all", r["kind"])]
                places = sorted({(r["kind"], r["seed"]) for r in mine})
                groups = [[r for r in mine if (r["kind"], r["seed"]) == at] for at in places]
                sums[arm] = [sum(r["right"] for r in each) / len(each) for each in groups]
                counts = [float(each[0]["questions"]) for each in groups]
                steps = sum(r["steps"] for r in mine)
                line = {"risk": risk, "kind": kind, "arm": arm, "questions": int(sum(counts))}
                line |= {"right": dataclasses.asdict(mean(sums[arm], counts))}
                line |= {"full": sum(r["full"] for r in mine) / sum(r["questions"] for r in mine)}
                for unit in ("entries", "pages"):
                    line[f"mean {unit} per row"] = sum(r[unit] for r in mine) / steps
                if arm != "dial":
                    gap = paired(sums["dial"], sums[arm], counts)
                    line["dial less this"] = dataclasses.asdict(gap)
                found.append(line)
    return found


def table(summary: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    head = (
        "risk",
        "dialogues",
        "questions",
        "budget",
        "right",
        "dial less this",
        "entries per row",
    )
    lines = [
        (
            f"{one['risk']:g}",
            one["kind"],
            str(one["questions"]),
            one["arm"],
            interval(one["right"]),
            interval(one["dial less this"], sign=True) if "dial less this" in one else "",
            f"{one['mean entries per row']:.1f}",
        )
        for one in summary
    ]
    return pipe_table(head, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dial", description=__doc__)
    parser.add_argument("--model", default=bundled_model_name())
    parser.add_argument(
        "--gates",
        nargs="+",
        default=[f"{bundled_model_name()}/gates", str(asset("gates/tiny-vlm-dbtrimkv-1"))],
        help="one folder per training seed; their runs are averaged",
    )
    parser.add_argument("--risk", nargs="+", type=float, default=[0.02, 0.1, 0.3])
    parser.add_argument("--least", type=float, default=8, help="entries per row that always stay")
    parser.add_argument("--most", type=float, default=256, help="entries per row, the dial's bound")
    parser.add_argument("--kinds", nargs="+", default=["dense", "sparse"])
    parser.add_argument(
        "--dialogues", nargs="+", type=int, default=[60, 60], help="of each of --kinds"
    )
    parser.add_argument("--skip", type=int, default=3000, help="dialogues left out before these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "dial-tiny-vlm.json")
    args = parser.parse_args(arguments)
    if len(args.dialogues) != len(args.kinds):
        parser.error("--dialogues takes as many numbers as --kinds has names")
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    settings: Row = {"policy": "dbtrimkv", "dtype": "float32", "device": "cpu"}
    engines = [Runtime.from_pretrained(args.model, gates=one, **settings) for one in args.gates]
    rows_each, family = engines[0].spec.rows, engines[0].family
    dialogues: dict[tuple[str, int], Dialogue] = {}
    for kind, count in zip(args.kinds, args.dialogues, strict=True):
        for seed in range(args.skip, args.skip + count):
            example = scene_example(scene_turns(kind, seed, "heldout"), tokenizer)
            labels = example.pop("labels")[0]
            dialogues[kind, seed] = family.turn(example, 0, engines[0].device), labels
    seen = [one for dialogue in dialogues.values() for one in lengths(dialogue)]
    rows: list[Row] = []

    def run(risk: float, arm: str, budget: Budget) -> None:
        for (kind, seed), dialogue in tqdm(dialogues.items(), f"{risk:g} {arm}"):
            for engine in engines:
                mine = read(engine, dialogue, budget)
                for unit in ("entries", "pages"):
                    mine[unit] /= rows_each
                rows.append({"risk": risk, "arm": arm, "kind": kind, "seed": seed, **mine})

    budgets = []
    for risk in args.risk:
        run(risk, "dial", Budget("entries", args.least, risk, Budget.of(args.most)))
        mine = [row for row in rows if row["risk"] == risk]
        held = sum(row["entries"] for row in mine) / sum(row["steps"] for row in mine)
        fixed = equal_budget(held, seen, min, max(seen))
        share = equal_budget(held, seen, lambda part, all: max(1, part * all), 1.0)
        run(risk, "fixed", Budget.of(fixed))
        run(risk, "share", Budget.fraction(share))
        budgets.append({"risk": risk, "held": held, "fixed": fixed, "share": share})
    summary = summarise(rows, args.kinds, args.risk)
    write_results(
        args.output,
        {k: v for k, v in vars(args).items() if k != "output"},
        {"budgets": budgets, "summary": summary, "runs": rows},
    )
    print(table(summary))


if __name__ == "__main__":
    main()
