"""A video that never ends: clip after clip, questions in between, one bounded memory.

A numbered picture comes first, then clip after clip. After each clip one question asks what was in
a cell at the start or the end of it; after every eighth, a copy of the session is asked about the
picture of the very beginning, so that the stream itself never holds the answer. The bundled model
has learned one clip per dialogue: what the full cache still holds of older clips can confuse it.

The model's position limit is lifted: what a side that evicts holds is bounded. The full cache reads
the first clips only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from engine.errors import InputError, SessionError
from engine.policies import Budget
from engine.runtime import Engine
from engine.session import Session
from eval.dialogues import (
    caption,
    cell_question,
    changing_clip,
    clip_question,
    exchanged,
    grid,
)
from eval.documents import scene_document
from eval.forced import spans
from eval.quality_report import interval
from eval.quality_run import Cell, Comparison
from eval.scenes import Scene, Turn
from eval.stats import mean, paired
from mmkv.processing import load_processor
from training.sources import require_scene_tokens

Row = dict[str, Any]
_REMEMBER = 8  # clips between two questions about the beginning
_SAVE = 32  # clips between two checkpoints
BLOCK = 16  # clips that intervals take as one draw


def first_picture() -> Scene:
    """What the stream begins with."""
    return grid(random.Random("stream-first"), "heldout", least=8)


def clip_turn(index: int) -> Turn:
    """Clip ``index`` of the stream and the question about it; a function of the index alone."""
    rng = random.Random(f"stream-{index}")
    first = grid(rng, "heldout")
    last, changed = exchanged(first, rng)
    clip = changing_clip(first, last, rng)
    when = rng.choice(["start", "end"])
    item = changed if rng.random() < 0.4 else rng.choice(first.items)
    question = clip_question(clip, item.cell, when)
    if index == 0:
        return Turn((first_picture(), clip), question, (caption(1), ""))
    return Turn((clip,), question)


def beginning_turn(index: int) -> Turn:
    """A question about the first picture."""
    item = random.Random(f"beginning-{index}").choice(first_picture().items)
    return Turn((), cell_question(1, item.cell, item.name))


@torch.inference_mode()
def hear(session: Session, turn: Turn, tokenizer: Any) -> bool:
    """Append a turn with its true answer; whether greedy decoding would have said it."""
    example = scene_document([turn], tokenizer)
    cuts, labels = example.pop("cuts"), example.pop("labels")[0]
    read = session.engine.family.turn(example, session.next_position, session.engine.device)
    ((start, stop),) = spans(labels.tolist())
    done, right = 0, True
    for part in [*cuts, start]:
        logits = session.extend(read.part(done, part))
        done = part
    for token in labels[start:stop].tolist():
        right &= int(logits.argmax()) == token
        logits = session.decode(token)
    session.extend(read.part(stop, labels.numel()))
    return right


def run(compared: Comparison, clips: int, full_clips: int, journal: Path) -> dict[str, Any]:
    """Let every side hear the stream under every budget, but for what the journal holds.

    Raises:
        InputError: a model that does not read scenes, or budgets that are shares: the stream has no
            length to take a share of.
    """
    require_scene_tokens(load_processor(compared.model), compared.model)
    if any(Fraction(budget) <= 1 for budget in compared.fractions):
        raise InputError("a stream has no end to take a share of; give --budgets in entries")
    base = Engine.from_pretrained(compared.model, policy="full", dtype=compared.dtype, device="cpu")
    endless = dataclasses.replace(base.spec, max_position=2**31 - 1)
    free = Engine(base.family, endless, base.decoder.weights, None, base.policy)
    tokenizer = load_processor(compared.model).tokenizer
    cells = compared.cells()
    rows: dict[str, list[list[Row]]] = {}
    engines = {cell: cell.engine(free) for group in cells.values() for cell in group}
    full_clips = min(clips, full_clips)
    total = sum(
        full_clips if c.fraction is None else clips for group in cells.values() for c in group
    )
    with tqdm(total=total, desc="hearing the stream", unit="clip") as bar:
        for name, group in cells.items():
            rows[name] = []
            for cell in group:
                count = full_clips if cell.fraction is None else clips
                hearing = _Hearing(engines[cell], cell, compared, journal, tokenizer)
                rows[name].append(hearing.rows(count, bar))
    for path in journal.parent.glob(f"{journal.stem}.*.session"):
        path.unlink()
    names = [side.name for side in compared.sides]
    return summarise(rows, names, list(compared.fractions))


class _Hearing:
    """One cell hears the stream; its rows are in the journal, its memory in a session file."""

    def __init__(
        self, engine: Engine, cell: Cell, compared: Comparison, journal: Path, tokenizer: Any
    ) -> None:
        self.engine, self.cell, self.journal, self.tokenizer = engine, cell, journal, tokenizer
        self.key = f"{compared.described()} stream {cell.key()}"
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:12]
        self.file = journal.with_name(f"{journal.stem}.{digest}.session")

    def rows(self, clips: int, bar: tqdm) -> list[Row]:
        """The rows of the first ``clips`` clips."""
        found = self._journaled()
        if all(index in found for index in range(clips)):
            bar.update(clips)
            return [found[index] for index in range(clips)]
        with self._session() as session:
            bar.update(self.heard)
            with self.journal.open("a") as file:
                file.write("\n")  # ends a line that was cut off
                for index in range(self.heard, clips):
                    found[index] = self._hear(session, index)
                    line = {"stream": self.key, "clip": index, "row": found[index]}
                    file.write(json.dumps(line) + "\n")
                    if (index + 1) % _SAVE == 0:
                        file.flush()
                        session.save(self.file, {"heard": str(index + 1)})
                    bar.update()
        return [found[index] for index in range(clips)]

    def _session(self) -> Session:
        """The session as it was saved last, or a new one."""
        self.heard = 0
        if self.file.is_file():
            try:
                session, extra = self.engine.load_session(self.file)
            except SessionError:
                return self._new()  # from other gates or another version: hear it again
            self.heard = int(extra["heard"])
            return session
        return self._new()

    def _new(self) -> Session:
        return self.engine.session(Budget.of(float(self.cell.fraction or 1)))

    def _hear(self, session: Session, index: int) -> Row:
        row: Row = {"right": hear(session, clip_turn(index), self.tokenizer)}
        if (index + 1) % _REMEMBER == 0:
            with session.fork() as copy:
                row["beginning"] = hear(copy, beginning_turn(index), self.tokenizer)
        memory = session.memory()
        held = torch.cat([row for layer in session.retained() for row in layer])
        return {
            **row,
            "seen": memory.tokens_seen,
            "entries": memory.entries,
            "bytes": memory.pages * self.engine.cache.pool.page_bytes,
            "age": memory.tokens_seen - int(held.median()),
        }

    def _journaled(self) -> dict[int, Row]:
        found: dict[int, Row] = {}
        for line in self.journal.read_text().splitlines() if self.journal.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # blank, or the line that was being written when the run was killed
            if row.get("stream") == self.key:
                found[row["clip"]] = row["row"]
        return found


def _blocks(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Per block of clips: questions answered right, and questions."""
    cut = [rows[i : i + BLOCK] for i in range(0, len(rows), BLOCK)]
    pairs = [([row[name] for row in part if name in row]) for part in cut]
    kept = [part for part in pairs if part]
    return [float(sum(part)) for part in kept], [float(len(part)) for part in kept]


def _share(runs: Sequence[Sequence[Row]], name: str) -> dict[str, float] | None:
    sums = np.mean([_blocks(run, name)[0] for run in runs], 0)
    counts = _blocks(runs[0], name)[1]
    return asdict(mean(list(sums), counts)) if counts else None


def summarise(
    rows: Mapping[str, Sequence[Sequence[Row]]], sides: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Shares right, memory, and paired tests over blocks of clips.

    Args:
        rows: ``"side at budget"`` and ``"full"`` -> per gate folder -> per clip.
    """
    shared = len(rows["full"][0])
    found = {
        name: {
            "clips": len(runs[0]),
            "latest": _share(runs, "right"),
            "beginning": _share(runs, "beginning"),
            "latest_while_full_heard": _share([run[:shared] for run in runs], "right"),
            "tokens_seen": runs[0][-1]["seen"],
            "most_bytes": max(row["bytes"] for run in runs for row in run),
            "median_age": float(np.median([run[-1]["age"] for run in runs])),
            "most_entries": max(row["entries"] for run in runs for row in run),
            "curve": [
                [row["seen"], row["bytes"], sum(r["right"] for r in part) / len(part)]
                for part in (runs[0][i : i + BLOCK] for i in range(0, len(runs[0]), BLOCK))
                for row in part[-1:]
            ],
        }
        for name, runs in rows.items()
    }
    tests = []
    for budget in budgets:
        pairs = [(a, b) for i, a in enumerate(sides) for b in sides[i + 1 :]]
        for one, two in [*pairs, *((side, "full") for side in sides)]:
            first = rows[f"{one} at {budget}"]
            second = rows["full"] if two == "full" else rows[f"{two} at {budget}"]
            count = min(len(first[0]), len(second[0]))
            sums = [
                list(np.mean([_blocks(run[:count], "right")[0] for run in runs], 0))
                for runs in (first, second)
            ]
            counts = _blocks(first[0][:count], "right")[1]
            gap = asdict(paired(sums[0], sums[1], counts))
            tests.append({"budget": budget, "of": f"{one} - {two}", "clips": count, **gap})
    return {"sides": list(sides), "budgets": list(budgets), "block": BLOCK, "rows": found,
            "tests": tests}  # fmt: skip


def markdown(found: Mapping[str, Any]) -> str:
    """What was answered and held, and the paired tests."""
    lines = [
        "### A video that never ends\n",
        f"Share answered right, with 95 % interval over blocks of {found['block']} clips.\n",
        "Age: tokens since the median entry that is held at the end.\n",
        "| side | budget | clips | tokens seen | most bytes held | age | latest clip | "
        "latest, while the full cache heard | the very first picture |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        side, _, budget = name.partition(" at ")
        cells = [
            "-" if row[key] is None else interval(row[key])
            for key in ("latest", "latest_while_full_heard", "beginning")
        ]
        lines.append(
            f"| {side} | {budget or '-'} | {row['clips']} | {row['tokens_seen']:,} | "
            f"{row['most_bytes']:,} | {row['median_age']:,.0f} | {' | '.join(cells)} |"
        )
    lines += ["", "Paired differences on the latest clip (sign-flip tests over blocks):\n"]
    lines += ["| budget | difference | clips | share right | p |", "|---|---|---|---|---|"]
    for test in found["tests"]:
        lines.append(
            f"| {test['budget']} | {test['of']} | {test['clips']} | {interval(test, sign=True)} | "
            f"{test['p']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Share right (above) and bytes held (below) along the stream, a column per budget."""
    from matplotlib.figure import Figure

    budgets = found["budgets"]
    figure = Figure(figsize=(3.6 * len(budgets), 5.5), layout="constrained")
    panels = figure.subplots(2, len(budgets), squeeze=False, sharex="col")
    for column, budget in enumerate(budgets):
        above, below = panels[:, column]
        for side in ["full", *found["sides"]]:
            row = found["rows"]["full" if side == "full" else f"{side} at {budget}"]
            seen, nbytes, right = np.array(row["curve"], float).T
            style = {"color": "0.5", "linestyle": "--"} if side == "full" else {}
            above.plot(seen, right, label=side, marker=".", **style)
            below.plot(seen, nbytes / 2**20, marker=".", **style)
        above.set(title=f"budget {budget}", ylim=(-0.02, 1.02))
        below.set(xlabel="tokens seen", yscale="log")
        for panel in (above, below):
            panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("right on the latest clip")
    panels[1, 0].set_ylabel("MiB held")
    panels[0, 0].legend(fontsize=7)
    figure.suptitle("A video that never ends")
    figure.savefig(path, dpi=110)
