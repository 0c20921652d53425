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
from typing import Any

import torch
from tqdm import tqdm

from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.budgets import is_share
from mmkv.eval.documents import scene_document
from mmkv.eval.measure.journal import Journal
from mmkv.eval.quality.methods import Cell, Comparison
from mmkv.prompt.processing import load_processor
from mmkv.training.data.dialogues import caption, cell_question, clip_of_stream, grid
from mmkv.training.data.scenes import Scene, Turn
from mmkv.training.data.sources import require_scene_tokens
from mmkv.training.measure.teacher_forced import spans

Row = dict[str, Any]
_REMEMBER = 8  # clips between two questions about the beginning
_SAVE = 32  # clips between two checkpoints


def first_picture() -> Scene:
    """Draw the first picture of the stream."""
    return grid(random.Random("stream-first"), "heldout", least=8)


def clip_turn(index: int) -> Turn:
    """Make clip ``index`` of the stream and its question, a function of the index alone."""
    clip, question = clip_of_stream(random.Random(f"stream-{index}"), "heldout")
    if index == 0:
        return Turn((first_picture(), clip), question, (caption(1), ""))
    return Turn((clip,), question)


def beginning_turn(index: int) -> Turn:
    """Make a question about the first picture."""
    item = random.Random(f"beginning-{index}").choice(first_picture().items)
    return Turn((), cell_question(1, item.cell, item.name))


@torch.inference_mode()
def predicts_answer(session: CachedSequence, turn: Turn, tokenizer: Any) -> bool:
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
        return self.engine.session(self.cell.budget_for(1))  # entries, whatever the length

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
