"""Measure one budget that sessions share, beside equal shares of it.

``python -m benchmarks.pool`` reads groups of 8 scene dialogues of unequal need: 2 long ones (30 to
40 pictures each) and 6 short ones (4 to 8). The sessions of a group are read by turns, so that all
stand at the same share of their dialogue. Each gets an eighth of the budget, or all compete for it
(``Runtime.share``), with and without a floor of half an equal share for each. Answers are
teacher-forced with eviction after each token, and right when every token is the most likely one.
Groups are the unit of intervals and of the paired test. The program prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.quality.report import interval
from mmkv.engine.model.families.base import Turn
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.measure.stats import mean, paired
from mmkv.resources import asset, bundled_model_name
from mmkv.training.data.dialogues import scene_example, scene_turns
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import spans

KINDS = ("40-pictures", "40-pictures", *["dense"] * 6)
LONG = KINDS.count("40-pictures")
# Arms by name: what share of an equal part each session is sure of; None: equal parts.
SETTINGS: dict[str, float | None] = {"equal": None, "pool": 0.0, "pool, floor 1/2": 0.5}


@dataclass
class PoolDialogue:
    """A dialogue that a session reads, up to the end of an answer at a time."""

    session: CachedSequence
    turn: Turn
    labels: Tensor
    right: list[bool] = field(default_factory=list)
    done: int = 0

    @property
    def progress(self) -> float:
        """Return the share of the dialogue that has been read, 1 at its last answer's end."""
        answers = spans(self.labels.tolist())
        return self.done / answers[-1][1]

    def advance(self) -> None:
        """Read on to the end of the next answer."""
        start, stop = spans(self.labels.tolist())[len(self.right)]
        logits = self.session.extend(self.turn.part(self.done, start))
        hit = True
        for token in self.labels[start:stop].tolist():
            hit &= int(logits.argmax()) == token
            logits = self.session.decode(token)
        self.right.append(hit)
        self.done = stop


def read_group(
    engine: Runtime, dialogues: Sequence[tuple[Turn, Tensor]], budget: float, share: float | None
) -> dict[str, Any]:
    """Read all dialogues of a group side by side.

    Args:
        budget: entries per row, of all sessions together.
        share: of an equal part, that each session is sure of; None: each has its part.

    Returns:
        ``right``: by session, of each answer; ``held``: entries per row at the end, by session.
    """
    part = budget / len(dialogues)
    if share is not None:
        engine.share(budget, share * part)
    own = part if share is None else None
    opened = [PoolDialogue(engine.session(own), *dialogue) for dialogue in dialogues]
    try:
        while (next_one := min(opened, key=lambda one: one.progress)).progress < 1:
            next_one.advance()
        held = [one.session.entries / engine.spec.rows for one in opened]
        return {"right": [one.right for one in opened], "held": held}
    finally:
        for one in opened:
            one.session.close()


def summarise(rows: Sequence[dict[str, Any]], budgets: Sequence[str]) -> list[dict[str, Any]]:
    """Average over groups and gate seeds, and pair each setting with equal parts."""
    found = []
    for budget in budgets:
        equal = _by_group(rows, budget, "equal")
        for setting in SETTINGS:
            by_group = _by_group(rows, budget, setting)
            line: dict[str, Any] = {"budget": budget, "setting": setting}
            for name, sessions in _PARTS.items():
                sums, counts = _counted(by_group, sessions)
                line[name] = dataclasses.asdict(mean(sums, counts))
                if setting != "equal":
                    theirs, _ = _counted(equal, sessions)
                    gap = paired(sums, theirs, counts)
                    line[f"{name} less equal"] = dataclasses.asdict(gap)
            long, whole = (
                sum(sum(row["held"][part]) for group in by_group for row in group)
                for part in (_PARTS["long"], _PARTS["all"])
            )
            line["held by the long"] = long / whole
            found.append(line)
    return found


_PARTS = {"all": slice(None), "long": slice(LONG), "short": slice(LONG, None)}


def _by_group(
    rows: Sequence[dict[str, Any]], budget: str, setting: str
) -> list[list[dict[str, Any]]]:
    chosen = [row for row in rows if (row["budget"], row["setting"]) == (budget, setting)]
    return [
        [row for row in chosen if row["group"] == group]
        for group in sorted({row["group"] for row in chosen})
    ]


def _counted(groups: list[list[dict[str, Any]]], part: slice) -> tuple[list[float], list[float]]:
    """Count right answers by group, averaged over gate seeds, and answers."""
    sums = [sum(sum(sum(one) for one in row["right"][part]) for row in g) / len(g) for g in groups]
    return sums, [float(sum(len(one) for one in group[0]["right"][part])) for group in groups]


def table_rows(summary: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield the head and the lines of the table of what :func:`summarise` returns.

    ``NAME less equal`` is the gap: NAME's share of right answers minus that of equal parts.
    """

    def cell(line: dict[str, Any], name: str) -> str:
        one, gap = line[name], line.get(f"{name} less equal")
        if gap is None:
            return interval(one)
        return f"{interval(one)}, {interval(gap, sign=True)}"

    yield ("budget", "sessions have", "all", "2 long", "6 short", "held by the long")
    for line in summary:
        cells = (cell(line, name) for name in _PARTS)
        yield (line["budget"], line["setting"], *cells, f"{line['held by the long']:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__)
    parser.add_argument("--model", default=bundled_model_name())
    parser.add_argument(
        "--gates",
        nargs="+",
        default=[f"{bundled_model_name()}/gates", str(asset("gates/tiny-vlm-dbtrimkv-1"))],
        help="one folder per training seed; their runs are averaged",
    )
    parser.add_argument("--budgets", nargs="+", default=["1/4", "1/8", "1/16"])
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--skip", type=int, default=1000, help="dialogues left out before these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "pool-tiny-vlm.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    settings: dict[str, Any] = {"policy": "dbtrimkv", "dtype": "float32", "device": "cpu"}
    engines = [
        [Runtime.from_pretrained(args.model, gates=gates, **settings) for gates in args.gates]
        for _ in range(2)
    ]
    rows = []
    for group in tqdm(range(args.groups), "groups"):
        dialogues = []
        for place, kind in enumerate(KINDS):
            seed = args.skip + group * len(KINDS) + place
            example = scene_example(scene_turns(kind, seed, "heldout"), tokenizer)
            labels = example.pop("labels")[0]
            dialogues.append((engines[0][0].family.turn(example, 0, engines[0][0].device), labels))
        tokens = sum(turn.token_ids.numel() for turn, _ in dialogues)
        for budget in args.budgets:
            for setting, share in SETTINGS.items():
                for engine in engines[share is not None]:
                    found = read_group(engine, dialogues, float(Fraction(budget)) * tokens, share)
                    rows.append({"group": group, "budget": budget, "setting": setting, **found})
    summary = summarise(rows, args.budgets)
    counts = [{**row, "right": [[sum(one), len(one)] for one in row["right"]]} for row in rows]
    write_results(
        args.output,
        {k: v for k, v in vars(args).items() if k != "output"},
        {"summary": summary, "runs": counts},
    )
    head, *lines = table_rows(summary)
    print(pipe_table(head, lines))


if __name__ == "__main__":
    main()
