"""Prompts that are appended chunk by chunk, and can be taken back whole in between.

Chunks of several sequences may run in one pass: products read the tokens of all, attention and
eviction go sequence by sequence, so each keeps what it would keep alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.backends.torch.step import PackedChunks, PrefillChunk
from mmkv.engine.cache.ragged import Owner
from mmkv.engine.compaction import with_tokens
from mmkv.engine.contents import with_pictures
from mmkv.engine.errors import InputError, NotFiniteError, SessionError
from mmkv.engine.interrupts import CtrlC
from mmkv.engine.model.panels import Panels
from mmkv.engine.model.state_layer import DeltaLayer
from mmkv.engine.scorer_state import store_positions
from mmkv.engine.system import MANY_TOKENS, exact_products, give_back
from mmkv.engine.trace import PRUNED

# Tokens of one pass on a CPU. Products gain nothing from more, and the states of more tokens leave
# the caches.
_MOST_ON_CPU = 512

if TYPE_CHECKING:
    from mmkv.engine.model.families.base import Turn
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


class Prefill:
    """One turn on its way into a sequence; made by :meth:`CachedSequence.begin_prefill`.

    Other sequences may run between two chunks, this one may not. The cache is cut back to the
    budget after each chunk, so where chunks end decides what is kept.

    Attributes:
        tokens: of the turn; done: those that the sequence holds.
        long_rope: whether it is read by the long rope factors.
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
        # Where chunks may end, if some pictures must be in one each; those make room for them.
        self._ends = _whole_ends(session, turn)
        if self._ends is not None:
            self.chunk = max(self.chunk, 1 + max(at - end for at, end in enumerate(self._ends)))
        self.logits: Tensor | None = None
        if not self.tokens:
            raise InputError("the prompt is empty; give at least one token")
        with session.claimed(), session.engine.lock:
            if session.compactions:  # it was made before positions moved
                self._move_back(int(turn.positions[:, 0].min()) - session.next_position)
                turn = self._turn
            # Once for all chunks: where an interrupted prefill continues from, and the ids that
            # penalties count.
            self._highest = turn.positions.amax(0).cummax(0).values.tolist()
            self._ids = turn.token_ids.numpy()
            self._require_context()
            if session.meter is not None:
                session.meter.remember()
            self._start, self._before = session.seen, session.state()
            self._snapshot: Owner | None = None
            self.snapshot_pages = 0
            cache = session.engine.cache
            # A single chunk undoes itself when it fails, and an empty sequence has nothing to copy.
            if undoable and self.tokens > self.chunk and session.seen:
                self.snapshot_pages = cache.held_pages(session.seq)
                self._snapshot = cache.owner(cache.fork(session.seq))
            try:
                session.engine.budgets.reserve(session, self.tokens, self.chunk)
            except BaseException:
                self._forget_snapshot()
                raise
            # The session has it once it has read something: a refusal leaves both open.
            long = session.long_rope
            self.long_rope = session._needs_long(turn.next_position) if long is None else long
            self._undoable = undoable

    @property
    def next_chunk(self) -> int:
        """Count the tokens of the next chunk."""
        stop = min(self.done + self.chunk, self.tokens)
        return (stop if self._ends is None else self._ends[stop]) - self.done

    def advance(self) -> bool:
        """Append one chunk and cut back to the budget; True when the turn is complete.

        A chunk that is interrupted is not counted, and those before it stay.

        Raises:
            SessionError: closed, or used for something else since the last chunk.
            NotFiniteError: the logits are no numbers; the last chunk is taken back where it can be.
        """
        if self.logits is None:
            advance_together([self])
        return self.logits is not None

    @torch.inference_mode()
    def roll_back(self) -> None:
        """Leave the sequence as it was before the turn, bit for bit; for an unfinished turn.

        Raises:
            SessionError: the turn is complete, was not begun with ``undoable``, or is a single
                chunk after which the eviction failed; or a pass over it was left.
        """
        lost = self.done and self._snapshot is None and self._start
        if not self._undoable or self.logits is not None or lost:
            raise SessionError("this prompt cannot be taken back; fork the session before it")
        session, cache = self._session, self._session.engine.cache
        session.require_whole()
        with session.engine.lock:
            if not session.closed:
                session.drop_ahead()
            if self.done and not session.closed:
                snapshot, self._snapshot = self._snapshot, None
                if snapshot is None:
                    cache.clear(session.seq)
                    session.restore(self._before)
                else:
                    session.adopt(snapshot.seq, self._before)
            elif session.compactions == self._before["compactions"]:  # else it has only moved
                session.restore(self._before)
            self._forget_snapshot()
        self.done, self._undoable = 0, False

    def _require_context(self) -> None:
        """Raise ContextError if the turn can have no rope positions in its sequence.

        Whether positions can be drawn together later depends on what the budget will have kept by
        then; here only what can never be is refused.
        """
        session, turn = self._session, self._turn
        engine = session.engine
        grows = session.may_compact and session.may_cap
        if self.tokens <= self.chunk or not grows:
            session.require_context(self.tokens, turn.next_position)
            return
        for done in range(0, self.tokens, self.chunk):
            count = min(self.chunk, self.tokens - done)
            before = self._highest[done - 1] + 1 if done else session.next_position
            # As if nothing had been read: half of the context, or all that the chunk leaves.
            taken = self._end(done + count) - before
            if 2 * taken > engine.spec.max_position:
                session.require_context(self.tokens, turn.next_position)

    def _end(self, count: int) -> int:
        """Return the rope position that follows the first ``count`` tokens."""
        return self._turn.next_position if count == self.tokens else self._highest[count - 1] + 1

    def needs_context(self) -> bool:
        """Return whether positions have to move for the next chunk. Raises ContextError."""
        return self._session.require_context(*self._next_context())

    def make_context(self) -> None:
        """Have rope positions for the next chunk; see :mod:`mmkv.engine.compaction`.

        Raises:
            ContextError: there are none; the chunks before stay.
        """
        back = self._session.make_context(*self._next_context())
        if back:
            self._move_back(back)
            self._highest = [position - back for position in self._highest]

    def _next_context(self) -> tuple[int, int]:
        return self.next_chunk, self._end(self.done + self.next_chunk)

    def _move_back(self, back: int) -> None:
        turn, positions = self._turn, self._turn.positions - back
        self._turn = replace(turn, positions=positions, next_position=turn.next_position - back)

    @property
    def _moved(self) -> bool:
        """Whether the sequence has read anything else since the last chunk."""
        return self._session.seen != self._start + self.done

    def _count(self, turn: Turn, pruned: int, log_beta: Tensor | None) -> None:
        """Count a chunk that the sequence holds now, but for ``pruned`` entries of it.

        Args:
            log_beta: float32 ``[T, L, H]`` of its entries, None without gates.
        """
        session, tokens = self._session, turn.token_ids.numel()
        session.note_ids(self._ids[self.done : self.done + tokens])
        before = int(self._turn.modality[self.done - 1]) if self.done else None
        self.done += tokens
        session.prompt_tokens += tokens
        session.long_rope = self.long_rope
        if session.recorder is not None:
            session.recorder.expect((turn.token_ids, turn.modality))
        if turn.visual is not None:
            session.pictures = with_pictures(session.pictures, turn.modality, session.seen, before)
        if session.runs is not None:
            given = turn.modality, turn.positions + session.newest_shift
            session.runs = with_tokens(session.runs, session.seen, *given)
        session.count_appended(tokens, self._end(self.done))
        if session.meter is not None and log_beta is not None:
            session.meter.add(log_beta, turn.modality.to(log_beta.device))
        session.count_evicted(pruned, 0)
        if session.recorder is not None and pruned:
            session.recorder.missing(session.view(), tokens, PRUNED)

    def _forget_snapshot(self) -> None:
        if self._snapshot is not None:
            self._session.engine.cache.close(self._snapshot.seq)
        self._snapshot, self.snapshot_pages = None, 0


def _whole_ends(session: CachedSequence, turn: Turn) -> list[int] | None:
    """Return where chunks of a turn may end; None: anywhere.

    Raises:
        InputError: its first picture would be seen together with one of the turn before.
    """
    if not turn.whole_pictures or turn.visual is None:
        return None
    behind = session.pictures[-1][1] if session.pictures else 0
    if turn.token_ids.numel() and behind == session.seen > 0 and int(turn.modality[0]):
        raise InputError(
            "this turn begins with a picture right behind one of the turn before, and this "
            "model sees such a pair as one; put text between, or both into one turn"
        )
    return turn.whole_ends()


def run_whole(prefill: Prefill, progress: Callable[[int, int], None] | None = None) -> Tensor:
    """Append all chunks; float32 logits ``[vocab]``. ``progress(done, total)`` after each.

    Ctrl-C is delivered between two chunks.
    """
    complete = False
    while not complete:
        complete = prefill.advance()
        if not complete:
            CtrlC.check()
        if progress is not None:
            progress(prefill.done, prefill.tokens)
    assert prefill.logits is not None
    return prefill.logits


@torch.inference_mode()
def extend_together(sessions: Sequence[CachedSequence], turns: Sequence[Turn]) -> Tensor:
    """Append a turn to each of B sequences; float32 logits ``[B, vocab]``.

    A pass reads at most as many tokens as a chunk of the engine has, so that all sequences
    together hold no more beside their budgets than one that reads alone.

    Args:
        sessions: different open sequences of one engine.
        turns: one each, whose positions follow those of its sequence.

    Raises:
        InputError, ContextError, SessionError: before anything has changed; BudgetError: likewise,
            where one prompt alone has no room.
        SessionError, BudgetError, NotFiniteError: as :func:`advance_together`; chunks that were
            read before stay.
    """
    with claimed(sessions):
        prefills = [Prefill(*parts) for parts in zip(sessions, turns, strict=True)]
        while waiting := [prefill for prefill in prefills if prefill.logits is None]:
            with sessions[0].engine.lock:  # the pool may grow
                advance_together(_pack(waiting))
            CtrlC.check()
    return torch.stack([prefill.logits for prefill in prefills if prefill.logits is not None])


def advance_together(prefills: Sequence[Prefill]) -> None:
    """Append the next chunk of each of B unfinished prompts in one pass, and cut to the budgets.

    Sequences and prompts are different ones of one engine. A pass that is interrupted is not
    counted for any of them.

    Raises:
        SessionError: one is closed, or was used for something else since its last chunk.
        NotFiniteError: the last logits of one are no numbers; that one's chunk is taken back where
            it can be, the others go on.
    """
    ChunkPass(prefills).run()


class PassMark:
    """Stands for a pass that was left, in its sessions and in the engine."""


@contextmanager
def claimed(
    sessions: Sequence[CachedSequence], by: PassMark | None = None, ahead: bool = False
) -> Iterator[None]:
    """Claim different sessions for one call, which may take the engine's lock several times.

    Ctrl-C is held back meanwhile: the call is made whole.

    Args:
        by: the mark of the pass that goes on; None: they are claimed for another call.
        ahead: whether what is cached of tokens that they have not seen is of use.

    Raises:
        SessionError: one is closed, or in use.
    """
    with CtrlC():
        taken: list[CachedSequence] = []
        try:
            for session in sessions:
                session._take()
                taken.append(session)
                session._require_open()
                session._require_idle()
                if session.left is not by:
                    session.require_whole(by)
                if not ahead:
                    session.drop_ahead()
            yield
        finally:
            for session in taken:
                session._claim.release()


class ChunkPass:
    """A pass over the next chunk of each of B unfinished prompts, which may be left between layers.

    Other sequences of the engine may run meanwhile. Those of the pass refuse to, and the pool is
    not trimmed. What it computes does not depend on where it was left.

    Args:
        prefills: of different sequences of one engine.
        by_layer: whether it may be left.
    """

    def __init__(self, prefills: Sequence[Prefill], by_layer: bool = False) -> None:
        self._prefills, self._by_layer = prefills, by_layer
        self._sessions = [prefill._session for prefill in prefills]
        self._engine = self._sessions[0].engine
        self._chunks: list[PrefillChunk] = []
        self._tapped: list[Tensor] = []
        self._layers: Generator[None, None, tuple[Tensor, Tensor | None]] | None = None
        self._appended = False  # entries that are not counted yet
        self._mark = PassMark()

    @torch.inference_mode()
    def run(self, seconds: float | None = None) -> bool:
        """Begin the pass, or go on with it; return whether it is over.

        Args:
            seconds: how long, but for one layer at least; None, or not ``by_layer``: to its end.

        Raises:
            as :func:`advance_together`. But for NotFiniteError, all chunks are taken back.
        """
        until = None if seconds is None else time.perf_counter() + seconds
        engine = self._engine
        try:
            marked = claimed(self._sessions, self._mark)
            with marked, engine.lock, exact_products(engine.device):
                try:
                    over = self._run(until)
                    self._set_left(not over)
                    return over
                except BaseException:
                    self._take_back()
                    raise
        except SessionError:
            if self._appended:  # one was closed since the pass was left
                self.abort()
            raise

    @torch.inference_mode()
    def abort(self) -> None:
        """Take back what a pass that was left has appended; its chunks can be read again."""
        with self._engine.lock:
            self._take_back()

    def _run(self, until: float | None) -> bool:
        for session in self._sessions:
            session._require_open()  # another thread may have closed it before the lock was had
        if any(prefill._moved for prefill in self._prefills):
            raise SessionError("the session changed while a prompt was read; take the prompt back")
        made = self._run_layers(until)
        if made is None:
            return False
        ends, log_beta = made
        betas = log_beta.split(self._counts) if log_beta is not None else [None] * len(self._chunks)
        pruned = self._store(betas)
        for chunk in self._chunks:
            chunk.put_states()
        self._appended = False
        parts = zip(self._prefills, self._turns, pruned, betas, strict=True)
        for prefill, turn, gone, beta in parts:
            prefill._count(turn, gone, beta)
        self._finish(ends)
        return True

    def _begin(self) -> tuple[Any, ...]:
        """Make room for the tokens of all chunks; return what the decoder is called with."""
        engine, sessions = self._engine, self._sessions
        if any([prefill.needs_context() for prefill in self._prefills]):
            reserve_together(self._prefills)  # nothing refuses once positions have moved
        for prefill in self._prefills:
            prefill.make_context()
        self._before = [session.state() for session in sessions]
        self._turns = [
            one._turn.part(one.done, one.done + one.next_chunk) for one in self._prefills
        ]
        self._counts = [turn.token_ids.numel() for turn in self._turns]
        self._appended = True
        hidden, deepstacks = zip(
            *(engine.decoder.embed_turn(turn) for turn in self._turns), strict=True
        )
        ropes = [
            engine.rope.at(turn.positions.to(engine.device), prefill.long_rope)
            for prefill, turn in zip(self._prefills, self._turns, strict=True)
        ]
        cos, sin = (torch.cat(part) for part in zip(*ropes, strict=True))
        self._chunks = [_chunk(*parts) for parts in zip(sessions, self._turns, ropes, strict=True)]
        self._tapped, step = [], PackedChunks(self._chunks)
        stacks = _joined(deepstacks, self._counts)
        states = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return states, (cos, sin), step, stacks, self._tapped, step

    def _run_layers(self, until: float | None) -> tuple[Tensor, Tensor | None] | None:
        """Return what the decoder does: states of the last tokens and log_beta; None: left."""
        decoder = self._engine.decoder
        if not self._by_layer:
            return decoder.forward(*self._begin())
        if self._layers is None:
            self._layers = decoder.forward_by_layer(*self._begin())
        while True:
            started = time.perf_counter()
            try:
                next(self._layers)
            except StopIteration as end:
                made: tuple[Tensor, Tensor | None] = end.value
                return made
            now = time.perf_counter()
            if until is not None and now + (now - started) > until:
                return None

    def _store(self, betas: Sequence[Tensor | None]) -> list[int]:
        """Store what the layers found beside keys and values; return how many were pruned."""
        engine, chunks = self._engine, self._chunks
        if engine.model.has_on_append:
            taps = list(zip(*(tap.split(self._counts) for tap in self._tapped), strict=True))
            for chunk, own in zip(chunks, taps or [()] * len(chunks), strict=True):
                chunk.write_state(engine.policy.scoring, own, engine.decoder.output)
        pruned = [chunk.finish(beta) for chunk, beta in zip(chunks, betas, strict=True)]
        if engine.model.needs.positions:  # last: of a pass that fails before, none is left
            for chunk, turn in zip(chunks, self._turns, strict=True):
                seqs = torch.tensor([chunk.seq], device=engine.device)
                positions = turn.positions[:, None].to(engine.device)
                store_positions(engine.cache, seqs, chunk.position[None], positions)
        return pruned

    def _finish(self, ends: Tensor) -> None:
        """Compute the logits of prompts that are complete, and cut to the budgets."""
        engine, prefills, sessions = self._engine, self._prefills, self._sessions
        last = [i for i, prefill in enumerate(prefills) if prefill.done == prefill.tokens]
        logits = engine.decoder.logits(ends[last]) if last else ends[:0]
        broken = []
        for i, fine in zip(last, logits.sum(-1).isfinite().tolist(), strict=True):
            if not fine:
                broken.append(i)
                # Nothing has been evicted yet.
                if sessions[i].rewind(self._before[i], self._chunks[i].before):
                    prefills[i].done = self._before[i]["seen"] - prefills[i]._start
        whole = [one for i, one in enumerate(sessions) if i not in broken]
        for session in whole:
            session.turn_dial()
        engine.budgets.cut(whole)
        if sum(self._counts) >= MANY_TOKENS and engine.device.type == "cpu":
            give_back()
        for i, found in zip(last, logits, strict=True):
            if i not in broken:
                prefills[i].logits = found
                prefills[i]._forget_snapshot()
        if broken:
            raise NotFiniteError

    def _take_back(self) -> None:
        """Drop the new entries of all.

        What a scorer has added to older entries, once all layers have run, stays.
        """
        if self._appended:
            for session in self._sessions:
                if not session.closed:
                    session.roll_back()
        self._appended, self._layers = False, None
        self._set_left(False)

    def _set_left(self, left: bool) -> None:
        """Tell the sessions and the engine whether the pass was left."""
        for session in self._sessions:
            if left or session.left is self._mark:
                session.left = self._mark if left else None
        if left:
            self._engine.left.add(self._mark)
        else:
            self._engine.left.discard(self._mark)


def pass_tokens(engine: Runtime) -> int:
    """Return the most tokens of chunks that a pass reads so that each keeps what it keeps alone.

    Bit for bit: a row of a product in C does not depend on the other rows. Elsewhere it may, and
    where sequences share a budget all depends on all; 0 then.
    """
    weights = engine.decoder.weights
    held = all(isinstance(each, Panels) for each in weights.matrices())
    native = weights.product is kernels_for(weights.form).product
    exact = native and weights.dtype == torch.float32
    # More threads of torch cut an elementwise operation inside a vector of the CPU, the rest takes
    # another path: the last bits of a row then depend on the rows beside it.
    exact = exact and torch.get_num_threads() <= 2
    layers = weights.layers
    others = any(
        each.router is not None or not isinstance(each.state_layer, DeltaLayer | None)
        for each in layers
    )
    if not (held and exact) or engine.decoder.hosted or others or engine.shared is not None:
        return 0
    # A quarter more than a chunk: the short ends of prompts are read beside whole chunks.
    return min(engine.prefill_chunk * 5 // 4, _MOST_ON_CPU)


def reserve_together(prefills: Sequence[Prefill]) -> None:
    """Have pages ready for the next chunk of each. Raises BudgetError."""
    with prefills[0]._session.engine.lock:
        prefills[0]._session.engine.cache.pool.reserve(sum(map(needed_pages, prefills)))


def needed_pages(prefill: Prefill) -> int:
    """Count the pages that the next chunk takes, while it is stored."""
    session = prefill._session
    return session.engine.cache.pages_for(session.seq, prefill.next_chunk)


def _pack(waiting: Sequence[Prefill]) -> list[Prefill]:
    """Choose prompts whose next chunks are read in one pass: the longest, and what fits beside.

    So the short ends of prompts wait, and are read together. Their pages are free afterwards.

    Raises:
        BudgetError: the pool has no room for them.
    """
    engine = waiting[0]._session.engine
    pool = engine.cache.pool
    used = pool.num_pages - pool.free_pages + pool.beside
    room = math.inf if pool.limit is None else pool.limit - used
    on_cpu = engine.device.type == "cpu"
    most = min(engine.prefill_chunk, _MOST_ON_CPU) if on_cpu else engine.prefill_chunk
    chosen: list[Prefill] = []
    tokens = pages = 0
    for prefill in sorted(waiting, key=lambda one: one.next_chunk, reverse=True):
        count = prefill.next_chunk
        needed = needed_pages(prefill)
        fits = tokens + count <= most and pages + needed <= room
        if fits or not chosen:
            chosen.append(prefill)
            tokens, pages = tokens + count, pages + needed
    pool.reserve(pages)  # exactly: a pool that runs short takes an eighth more
    return chosen


def _chunk(session: CachedSequence, turn: Turn, rope: tuple[Tensor, Tensor]) -> PrefillChunk:
    """Make room for the tokens of ``turn`` in a sequence."""
    engine, seen = session.engine, session.seen + turn.token_ids.numel()
    return PrefillChunk(
        engine.cache,
        engine.spec,
        session.seq,
        torch.arange(session.seen, seen, device=engine.device),
        turn.modality.to(engine.device),
        engine.model.needs,
        seen,
        session.entries > 0,
        engine.policy.pruner,
        engine.model.write_step(rope),
        engine.backends.chunk_attention,
        turn.whole_pictures and turn.visual is not None and turn.visual.numel() > 0,
        turn.kept,
    )


def _joined(
    deepstacks: Sequence[tuple[tuple[Tensor, Tensor], ...]], counts: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Join the deepstacks of chunks of ``counts`` tokens; those without pictures have none."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    levels = []
    for level in range(max(map(len, deepstacks))):
        there = [
            (stack[level][0] + start, stack[level][1])
            for stack, start in zip(deepstacks, starts, strict=True)
            if level < len(stack)
        ]
        where, features = (torch.cat(part) for part in zip(*there, strict=True))
        levels.append((where, features))
    return tuple(levels)
