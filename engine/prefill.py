"""A prompt that is appended chunk by chunk, and can be taken back whole in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.torch.step import PrefillChunk
from engine.errors import InputError, NotFiniteError, SessionError
from engine.new_entries import write_state
from engine.trace import PRUNED

if TYPE_CHECKING:
    from engine.model.families.base import Turn
    from engine.sequence import CachedSequence


class Prefill:
    """One turn on its way into a sequence; made by :meth:`CachedSequence.begin_prefill`.

    Other sequences may run between two chunks, this one may not. The cache is cut back to the
    budget after each chunk, so where chunks end decides what is kept.

    Attributes:
        tokens: of the turn; done: those that the sequence holds.
        logits: float32 ``[vocab]`` of the last token, None before the last chunk.
        snapshot_pages: pages of the copy that :meth:`roll_back` returns to.

    Raises:
        InputError, ContextError, BudgetError: before anything has changed.
    """

    def __init__(
        self,
        session: CachedSequence,
        turn: Turn,
        chunk: int | None = None,
        undoable: bool = False,
    ) -> None:
        self._session, self._turn = session, turn
        self.chunk = chunk or session.engine.prefill_chunk
        self.tokens, self.done = turn.token_ids.numel(), 0
        self.logits: Tensor | None = None
        if not self.tokens:
            raise InputError("the prompt is empty; give at least one token")
        with session.claimed(), session.engine.lock:
            session._require_context(self.tokens, turn.next_position)
            self._start, self._before = session.seen, session.state()
            self._snapshot: int | None = None
            self.snapshot_pages = 0
            cache = session.engine.cache
            # A single chunk undoes itself when it fails, and an empty sequence has nothing to copy.
            if undoable and self.tokens > self.chunk and session.seen:
                self.snapshot_pages = cache.held_pages(session.seq)
                self._snapshot = cache.fork(session.seq)
            try:
                session.engine.budgets.reserve(session, self.tokens, self.chunk)
            except BaseException:
                self._forget_snapshot()
                raise
            if session.long_rope is None:
                session.long_rope = session._needs_long(turn.next_position)
            self._undoable = undoable
            # One read from the device for all chunks: where an interrupted prefill continues from.
            self._highest = turn.positions.amax(0).cummax(0).values.tolist()

    @property
    def next_chunk(self) -> int:
        """Count the tokens of the next chunk."""
        return min(self.chunk, self.tokens - self.done)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Append one chunk and cut back to the budget; True when the turn is complete.

        A chunk that is interrupted is not counted, and those before it stay.

        Raises:
            SessionError: closed, or used for something else since the last chunk.
            NotFiniteError: the logits are no numbers; the last chunk is taken back where it can be.
        """
        session, turn, start = self._session, self._turn, self.done
        if self.logits is not None:
            return True
        with session.claimed(), session.engine.lock:
            if session.seen != self._start + start:
                raise SessionError(
                    "the session changed while a prompt was read; take the prompt back"
                )
            stop = start + self.next_chunk
            last = stop == self.tokens
            next_position = turn.next_position if last else self._highest[stop - 1] + 1
            before = session.state()
            hidden = _run_chunk(session, turn, start, stop, next_position)
            self.done = stop
            logits = session.engine.decoder.logits(hidden[-1:])[0] if last else None
            if logits is not None and not logits.sum().isfinite():
                if session.rewind(before):  # nothing has been evicted yet
                    self.done = start
                raise NotFiniteError
            session.engine.budgets.cut([session])
            if last:
                self.logits = logits
                self._forget_snapshot()
            return last

    @torch.inference_mode()
    def roll_back(self) -> None:
        """Leave the sequence as it was before the turn, bit for bit; for an unfinished turn.

        Raises:
            SessionError: the turn is complete, was not begun with ``undoable``, or is a single
                chunk after which the eviction failed.
        """
        lost = self.done and self._snapshot is None and self._start
        if not self._undoable or self.logits is not None or lost:
            raise SessionError("this prompt cannot be taken back; fork the session before it")
        session, cache = self._session, self._session.engine.cache
        with session.engine.lock:
            if self.done and not session.closed:
                seq = cache.open() if self._snapshot is None else self._snapshot
                self._snapshot = None
                session.adopt(seq, self._before)
            else:
                session.restore(self._before)
            self._forget_snapshot()
        self.done, self._undoable = 0, False

    def _forget_snapshot(self) -> None:
        if self._snapshot is not None:
            self._session.engine.cache.close(self._snapshot)
        self._snapshot, self.snapshot_pages = None, 0


def _run_chunk(
    session: CachedSequence, turn: Turn, start: int, stop: int, next_position: int
) -> Tensor:
    """Append tokens ``start`` to ``stop`` of a turn; hidden states ``[stop - start, d]``.

    An error leaves the sequence without them.
    """
    engine, part, count = session.engine, slice(start, stop), stop - start
    hidden, deepstack = engine.decoder.embed_turn(turn.part(start, stop))
    position = torch.arange(session.seen, session.seen + count, device=engine.device)
    rope = engine.rope.at(turn.positions[:, part], bool(session.long_rope))
    try:
        step = PrefillChunk(
            engine.cache,
            engine.spec,
            session.seq,
            position,
            turn.modality[part],
            engine.needs,
            session.seen + count,
            session.entries > 0,
            engine.policy.pruner,
            engine.write_step(rope),
        )
        tapped: list[Tensor] = []
        hidden, log_beta = engine.decoder.forward(hidden, rope, step, deepstack, tapped, step.prune)
        if engine.has_born:
            seqs = torch.tensor([session.seq], device=engine.device)
            slots, scorer, new = step.slots[None], engine.policy.scoring, position[None]
            write_state(engine.cache, scorer, seqs, slots, new, True, [tap[None] for tap in tapped])
        pruned = step.finish(log_beta)
    except BaseException:
        session.roll_back()
        raise
    session.prompt_tokens += count
    if session.recorder is not None:
        session.recorder.expect((turn.token_ids[part], turn.modality[part]))
    session.count_appended(count, next_position)
    session.count_evicted(pruned, 0)
    if session.recorder is not None and pruned:
        session.recorder.missing(session.view(), count, PRUNED)
    return hidden


def run_whole(prefill: Prefill, progress: Callable[[int, int], None] | None = None) -> Tensor:
    """Append all chunks; float32 logits ``[vocab]``. ``progress(done, total)`` after each."""
    complete = False
    while not complete:
        complete = prefill.advance()
        if progress is not None:
            progress(prefill.done, prefill.tokens)
    assert prefill.logits is not None
    return prefill.logits
