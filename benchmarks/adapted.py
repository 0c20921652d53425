"""Measure what training under compression gives: the same dialogues before and after it.

``python -m benchmarks.adapted MODEL --data scenes:dense --method dbtrimkv:GATES --budget 1/16
--adapter distill=FOLDER,FOLDER --adapter grpo=FOLDER,FOLDER`` reads held-out dialogues with the
model and with each adapter of ``training.adapt`` merged into it, on the bounded cache and on the
full one. Several folders of one name are seeds: their runs are averaged. An answer is right when
greedy decoding would have given it; KL is to the full cache of the model as it was. The program
writes JSON and a Markdown table. A killed run continues when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.domains import held_out
from benchmarks.quality.methods import Cell, ComparedMethod, digest
from benchmarks.quality.report import interval
from benchmarks.quality.run import Record, add_options, finish, record, running
from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.stats import mean, paired
from mmkv.training.measure.record import Journal
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import FullCache, Reading, read_together

BEFORE = "before"


def adapters_of(texts: Sequence[str]) -> dict[str, list[str | None]]:
    """Read ``NAME=FOLDER[,FOLDER]`` options; the model as it was comes first.

    Raises:
        InputError: no name, no folder, or a name twice.
    """
    found: dict[str, list[str | None]] = {BEFORE: [None]}
    for text in texts:
        name, _, folders = text.partition("=")
        if not name or not folders or name in found:
            raise InputError(f"--adapter {text!r}: write another NAME=FOLDER[,FOLDER]")
        found[name] = [*folders.split(",")]
    return found


def read_all(
    args: argparse.Namespace, journal: Journal, adapters: Mapping[str, list[str | None]]
) -> dict[str, dict[str, list[list[Record]]]]:
    """Read every dialogue with every adapter, under the budget and with the full cache.

    Returns:
        name -> ``bounded`` or ``full`` -> per seed, per dialogue its record.
    """
    (gates,) = args.compared.gates or (None,)
    cell = Cell(args.compared.policy, args.compared.lookahead, gates, args.budget)
    data = held_out(args.model, args.data, args.max_length)
    how = {"policy": "full", "dtype": args.dtype, "device": args.device}
    base, found = Runtime.from_pretrained(args.model, **how), {}
    for name, folders in adapters.items():
        rows: dict[str, list[list[Record]]] = {"bounded": [], "full": []}
        engines: dict[str, Runtime] = {}
        for folder in folders:
            held = "none" if folder is None else digest(folder)
            where = f"{args.model} {digest(args.model)} {args.data} {cell.key()} {held}"
            done = {row["index"]: row for row in journal.rows("where", where)}
            todo = [i for i in range(args.dialogues) if i not in done]
            if todo:
                own = Runtime.from_pretrained(args.model, adapter=folder, **how)
                engines = {"bounded": cell.engine(own, args.model), "full": own}
            for index in tqdm(todo, f"{name} {folder or ''}", unit="dialogue"):
                example = data[index]
                labels = example["labels"].flatten().clone()
                labels[0] = -100
                inputs = {k: v for k, v in example.items() if k not in ("labels", "cuts")}
                turn = base.family.turn(inputs, 0, base.device)
                full = FullCache.of(base, turn, labels)
                row: dict[str, Any] = {"where": where, "index": index}
                for kind, engine in engines.items():
                    budgets = [cell.budget_for(len(labels))]
                    cuts: Any = example.get("cuts", ())
                    reading = Reading(turn, labels, budgets, full, cuts)
                    row[kind] = record(read_together(engine, [reading])[0][0])
                (done[index],) = journal.add([row])
            for kind, runs in rows.items():
                runs.append([done[i][kind] for i in range(args.dialogues)])
        found[name] = rows
    return found


def summarise(raw: Mapping[str, Mapping[str, list[list[Record]]]]) -> dict[str, Any]:
    """Return accuracy and KL of each with intervals over dialogues, and what training changed."""

    def sums(name: str, kind: str, what: str) -> list[float]:
        by_seed = [[sum(run[what]) for run in seed] for seed in raw[name][kind]]
        return [float(x) for x in np.mean(by_seed, 0)]

    first = raw[BEFORE]["full"][0]
    questions = [len(run["right"]) for run in first]
    tokens = [sum(run["tokens"]) for run in first]
    rows = []
    for name in raw:
        for kind in ("bounded", "full"):
            right, kl = sums(name, kind, "right"), sums(name, kind, "kl")
            row: dict[str, Any] = {
                "model": name,
                "cache": kind,
                "seeds": len(raw[name][kind]),
                "accuracy": asdict(mean(right, questions)),
                "accuracy_by_seed": [
                    sum(sum(run["right"]) for run in seed) / sum(questions)
                    for seed in raw[name][kind]
                ],
                "kl_per_token": asdict(mean(kl, tokens)),
            }
            if name != BEFORE:
                before = sums(BEFORE, kind, "right")
                row["gain"] = asdict(paired(right, before, questions))
            rows.append(row)
    return {"dialogues": len(first), "questions": sum(questions), "rows": rows}


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table."""
    lines = []
    for row in found["rows"]:
        gain = row.get("gain")
        change = "" if gain is None else f"{interval(gain)}, p = {gain['p']:.4f}"
        figures = interval(row["accuracy"]), change, interval(row["kl_per_token"])
        lines.append((row["model"], row["cache"], *figures))
    head = ("model", "cache", "accuracy", "after - before", "KL per token")
    count = f"{found['questions']} questions in {found['dialogues']} dialogues"
    return f"{count}\n\n{pipe_table(head, lines)}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapted", description=__doc__)
    add_options(parser, "adapted")
    parser.add_argument("--data", required=True, help="data source, as for training.adapt")
    parser.add_argument("--max-length", type=int, default=8192, help="longest dialogue, tokens")
    parser.add_argument("--method", required=True, metavar="POLICY[@N][:GATES]")
    parser.add_argument("--budget", required=True, help="share of the dialogue, or entries")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER[,FOLDER]", help="repeatable"
    )
    parser.add_argument("--dialogues", type=int, default=120)
    args = parser.parse_args(arguments)
    with running(args, "benchmarks.adapted") as (path, journal):
        args.compared = ComparedMethod.parse(args.method)
        with torch.inference_mode():
            raw = read_all(args, journal, adapters_of(args.adapter))
        del args.compared
        finish(args, path, summarise(raw), markdown, _draw_nothing)


def _draw_nothing(found: Any, path: Path) -> None:
    """Draw nothing: two caches a model are a table."""


if __name__ == "__main__":
    main()
