"""Run an endless video: clip after clip with questions in between, under one budget.

A numbered picture comes first, then clip after clip. After each clip one question asks for the
content of a cell at the clip's start or end. After every eighth clip a copy of the session is asked
about the first picture; the stream itself never contains the answer. The bundled model was trained
with one clip per dialogue, so older clips in the full cache can confuse it.

The model's position limit is lifted, because a method that evicts holds a bounded number of
entries. The full cache runs over the first clips only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.documents import scene_document
from benchmarks.quality.methods import Cell, Comparison, is_share
from benchmarks.quality.report import comparisons, interval
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.measure.stats import mean, paired
from mmkv.prompt.loading import load_processor
from mmkv.training.data.dialogues import caption, cell_question, clip_of_stream, grid
from mmkv.training.data.examples import require_scene_tokens
from mmkv.training.data.scenes import Scene, SceneTurn
from mmkv.training.measure.record import Journal
from mmkv.training.measure.tables import pipe_table
from mmkv.training.measure.teacher_forced import spans

Row = dict[str, Any]
_REMEMBER = 8  # clips between two questions about the beginning
_SAVE = 32  # clips between two checkpoints


def first_picture() -> Scene:
    """Draw the first picture of the stream."""
    return grid(random.Random("stream-first"), "heldout", least=8)


def clip_turn(index: int) -> SceneTurn:
    """Make clip ``index`` of the stream and its question, a function of the index alone."""
    clip, question = clip_of_stream(random.Random(f"stream-{index}"), "heldout")
    if index == 0:
        return SceneTurn((first_picture(), clip), question, (caption(1), ""))
    return SceneTurn((clip,), question)


def beginning_turn(index: int) -> SceneTurn:
    """Make a question about the first picture."""
    item = random.Random(f"beginning-{index}").choice(first_picture().items)
    return SceneTurn((), cell_question(1, item.cell, item.name))


@torch.inference_mode()
def predicts_answer(session: CachedSequence, turn: SceneTurn, tokenizer: Any) -> bool:
    """Append a turn with its true answer; whether greedy decoding would have generated it."""
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


def run(
    compared: Comparison, clips: int, full_clips: int, journal: Journal
) -> dict[str, list[list[Row]]]:
    """Run every method over the stream under every budget, but for what the journal holds.

    Returns:
        ``"method at budget"`` and ``"full"`` -> per gate folder -> per clip.

    Raises:
        InputError: a model that does not read scenes, or budgets that are shares: the stream has no
            length to take a share of.
    """
    processor = load_processor(compared.model)
    require_scene_tokens(processor, compared.model)
    if any(map(is_share, compared.budgets)):
        raise InputError("a stream has no end to take a share of; give --budgets in entries")
    base = Runtime.from_pretrained(
        compared.model, policy="full", dtype=compared.dtype, device=compared.device
    )
    endless = dataclasses.replace(base.spec, max_position=2**31 - 1)
    free = Runtime(base.family, endless, base.decoder.weights, None, base.policy)
    cells = compared.cells()
    rows: dict[str, list[list[Row]]] = {}
    engines = {
        cell: cell.engine(free, compared.model) for group in cells.values() for cell in group
    }
    full_clips = min(clips, full_clips)
    total = sum(
        full_clips if c.budget is None else clips for group in cells.values() for c in group
    )
    with tqdm(total=total, desc="reading the stream", unit="clip") as bar:
        for name, group in cells.items():
            rows[name] = []
            for cell in group:
                count = full_clips if cell.budget is None else clips
                run = _StreamRun(engines[cell], cell, compared, journal, processor.tokenizer)
                rows[name].append(run.rows(count, bar))
    for path in journal.path.parent.glob(f"{journal.path.stem}.*.session"):
        path.unlink()
    return rows


class _StreamRun:
    """Run one cell over the stream; rows go to the journal, memory to a session file."""

    def __init__(
        self, engine: Runtime, cell: Cell, compared: Comparison, journal: Journal, tokenizer: Any
    ) -> None:
        self.engine, self.cell, self.journal, self.tokenizer = engine, cell, journal, tokenizer
        self.key = f"{compared.described()} stream {cell.key()}"
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:12]
        self.file = journal.path.with_name(f"{journal.path.stem}.{digest}.session")

    def rows(self, clips: int, bar: tqdm) -> list[Row]:
        """Return the rows of the first ``clips`` clips, running those that the journal lacks."""
        found = {row["clip"]: row["row"] for row in self.journal.rows("stream", self.key)}
        if all(index in found for index in range(clips)):
            bar.update(clips)
            return [found[index] for index in range(clips)]
        with self._session() as session:
            bar.update(self.done)
            for index in range(self.done, clips):
                found[index] = self._read_clip(session, index)
                self.journal.add([{"stream": self.key, "clip": index, "row": found[index]}])
                if (index + 1) % _SAVE == 0:
                    session.save(self.file, {"clips": str(index + 1)})
                bar.update()
        return [found[index] for index in range(clips)]

    def _session(self) -> CachedSequence:
        """Open the session as it was saved last, or a new one."""
        self.done = 0
        if self.file.is_file():
            try:
                session, extra = self.engine.load_session(self.file)
            except SessionError:
                return self._new()  # from other gates or another version: read it again
            self.done = int(extra["clips"])
            return session
        return self._new()

    def _new(self) -> CachedSequence:
        # In entries, whatever the length; the full cache takes none.
        return self.engine.session(None if self.cell.budget is None else self.cell.budget_for(1))

    def _read_clip(self, session: CachedSequence, index: int) -> Row:
        row: Row = {"right": predicts_answer(session, clip_turn(index), self.tokenizer)}
        if (index + 1) % _REMEMBER == 0:
            with session.fork() as copy:
                row["beginning"] = predicts_answer(copy, beginning_turn(index), self.tokenizer)
        memory = session.memory()
        held = torch.cat([row for layer in session.retained() for row in layer])
        return {
            **row,
            "seen": memory.tokens_seen,
            "entries": memory.entries,
            "bytes": memory.pages * self.engine.cache.pool.page_bytes,
            "age": memory.tokens_seen - int(held.median()),
        }


BLOCK = 16  # clips that intervals take as one draw


def summarise(
    rows: Mapping[str, Sequence[Sequence[Row]]], methods: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """Compute shares right, memory, and paired tests over blocks of clips.

    Args:
        rows: what :func:`benchmarks.session_stream.run` returned.
    """
    shared = len(rows["full"][0])
    found = {
        name: {
            "clips": len(runs[0]),
            "latest": _share(runs, "right"),
            "beginning": _share(runs, "beginning"),
            "latest_while_full_ran": _share([run[:shared] for run in runs], "right"),
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
        for of, first, second in comparisons(rows, methods, budget):
            count = min(len(first[0]), len(second[0]))
            sums = [
                list(np.mean([_blocks(run[:count], "right")[0] for run in runs], 0))
                for runs in (first, second)
            ]
            counts = _blocks(first[0][:count], "right")[1]
            gap = asdict(paired(sums[0], sums[1], counts))
            tests.append({"budget": budget, "of": of, "clips": count, **gap})
    return {
        "methods": list(methods),
        "budgets": list(budgets),
        "block": BLOCK,
        "rows": found,
        "tests": tests,
    }


def _blocks(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Count per block of clips: questions answered right, and questions."""
    cut = [rows[i : i + BLOCK] for i in range(0, len(rows), BLOCK)]
    pairs = [([row[name] for row in part if name in row]) for part in cut]
    kept = [part for part in pairs if part]
    return [float(sum(part)) for part in kept], [float(len(part)) for part in kept]


def _share(runs: Sequence[Sequence[Row]], name: str) -> dict[str, float] | None:
    sums = np.mean([_blocks(run, name)[0] for run in runs], 0)
    counts = _blocks(runs[0], name)[1]
    return asdict(mean(list(sums), counts)) if counts else None


def markdown(found: Mapping[str, Any]) -> str:
    """Tabulate shares of right answers, held entries and paired tests."""
    lines = [
        "### A video that never ends\n",
        f"Share answered right, with 95 % interval over blocks of {found['block']} clips.\n",
        "Age: tokens since the median entry that is held at the end.\n",
    ]
    columns = [
        "method",
        "budget",
        "clips",
        "tokens seen",
        "most bytes held",
        "age",
        "latest clip",
        "latest, while the full cache ran",
        "the very first picture",
    ]
    table = []
    for name, row in found["rows"].items():
        method, _, budget = name.partition(" at ")
        cells = [
            "-" if row[key] is None else interval(row[key])
            for key in ("latest", "latest_while_full_ran", "beginning")
        ]
        held = (f"{row['tokens_seen']:,}", f"{row['most_bytes']:,}", f"{row['median_age']:,.0f}")
        table.append((method, budget or "-", row["clips"], *held, *cells))
    lines.append(pipe_table(columns, table))
    lines += ["", "Paired differences on the latest clip (sign-flip tests over blocks):\n"]
    tests = [
        (test["budget"], test["of"], test["clips"], interval(test, sign=True), f"{test['p']:.4f}")
        for test in found["tests"]
    ]
    lines.append(pipe_table(("budget", "difference", "clips", "share right", "p"), tests))
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the share of right answers and the bytes held along the stream, a column per budget."""
    from matplotlib.figure import Figure

    budgets = found["budgets"]
    figure = Figure(figsize=(3.6 * len(budgets), 5.5), layout="constrained")
    panels = figure.subplots(2, len(budgets), squeeze=False, sharex="col")
    for column, budget in enumerate(budgets):
        above, below = panels[:, column]
        for method in ["full", *found["methods"]]:
            row = found["rows"]["full" if method == "full" else f"{method} at {budget}"]
            seen, nbytes, right = np.array(row["curve"], float).T
            style = {"color": "0.5", "linestyle": "--"} if method == "full" else {}
            above.plot(seen, right, label=method, marker=".", **style)
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
