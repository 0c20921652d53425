"""Prompts that are appended chunk by chunk, and can be taken back whole in between.

Chunks of several sequences may run in one pass: products read the tokens of all, attention and
eviction go sequence by sequence, so each keeps what it would keep alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.backends.torch.step import PackedChunks, PrefillChunk
from mmkv.engine.cache.ragged import Owner
from mmkv.engine.contents import with_pictures
from mmkv.engine.device import exact_products
from mmkv.engine.errors import InputError, NotFiniteError, SessionError
from mmkv.engine.interrupts import CtrlC
from mmkv.engine.memory import MANY_TOKENS, give_back
from mmkv.engine.model.panels import Panels
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
            if session.long_rope is None:
                session.long_rope = session._needs_long(turn.next_position)
            self._undoable = undoable
            # Read from the device once for all chunks: where an interrupted prefill continues from,
            # and the ids that penalties count.
            self._highest = turn.positions.amax(0).cummax(0).values.tolist()
            self._ids = turn.token_ids.cpu().numpy()

    @property
    def next_chunk(self) -> int:
        """Count the tokens of the next chunk."""
        return min(self.chunk, self.tokens - self.done)

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
                chunk after which the eviction failed.
        """
        lost = self.done and self._snapshot is None and self._start
        if not self._undoable or self.logits is not None or lost:
            raise SessionError("this prompt cannot be taken back; fork the session before it")
        session, cache = self._session, self._session.engine.cache
        with session.engine.lock:
            if self.done and not session.closed:
                seq = cache.open() if self._snapshot is None else self._snapshot.seq
                self._snapshot = None
                session.adopt(seq, self._before)
            else:
                session.restore(self._before)
            self._forget_snapshot()
        self.done, self._undoable = 0, False

    @property
    def _moved(self) -> bool:
        """Whether the sequence has read anything else since the last chunk."""
        return self._session.seen != self._start + self.done

    def _count(self, turn: Turn, pruned: int) -> None:
        """Count a chunk that the sequence holds now, but for ``pruned`` entries of it."""
        session, tokens = self._session, turn.token_ids.numel()
        session.note_ids(self._ids[self.done : self.done + tokens])
        before = int(self._turn.modality[self.done - 1]) if self.done else None
        self.done += tokens
        session.prompt_tokens += tokens
        if session.recorder is not None:
            session.recorder.expect((turn.token_ids, turn.modality))
        if turn.visual is not None:
            session.pictures = with_pictures(session.pictures, turn.modality, session.seen, before)
        last = self.done == self.tokens
        session.count_appended(
            tokens, self._turn.next_position if last else self._highest[self.done - 1] + 1
        )
        session.count_evicted(pruned, 0)
        if session.recorder is not None and pruned:
            session.recorder.missing(session.view(), tokens, PRUNED)

    def _forget_snapshot(self) -> None:
        if self._snapshot is not None:
            self._session.engine.cache.close(self._snapshot.seq)
        self._snapshot, self.snapshot_pages = None, 0


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
    with ExitStack() as claims:
        for session in sessions:
            claims.enter_context(session.claimed())
        prefills = [Prefill(*parts) for parts in zip(sessions, turns, strict=True)]
        while waiting := [prefill for prefill in prefills if prefill.logits is None]:
            with sessions[0].engine.lock:  # the pool may grow
                advance_together(_pack(waiting))
            CtrlC.check()
    return torch.stack([prefill.logits for prefill in prefills if prefill.logits is not None])


@torch.inference_mode()
def advance_together(prefills: Sequence[Prefill]) -> None:
    """Append the next chunk of each of B unfinished prompts in one pass, and cut to the budgets.

    Sequences and prompts are different ones of one engine. A pass that is interrupted is not
    counted for any of them.

    Raises:
        SessionError: one is closed, or was used for something else since its last chunk.
        NotFiniteError: the last logits of one are no numbers; that one's chunk is taken back where
            it can be, the others go on.
    """
    sessions = [prefill._session for prefill in prefills]
    engine = sessions[0].engine
    with ExitStack() as claims:
        for session in sessions:
            claims.enter_context(session.claimed())
        claims.enter_context(engine.lock)
        claims.enter_context(exact_products(engine.device))
        if any(prefill._moved for prefill in prefills):
            raise SessionError("the session changed while a prompt was read; take the prompt back")
        before = [session.state() for session in sessions]
        tokens = sum(prefill.next_chunk for prefill in prefills)
        ends = _run_pass(engine, prefills)
        last = [i for i, prefill in enumerate(prefills) if prefill.done == prefill.tokens]
        logits = engine.decoder.logits(ends[last]) if last else ends[:0]
        broken = []
        for i, fine in zip(last, logits.sum(-1).isfinite().tolist(), strict=True):
            if not fine:
                broken.append(i)
                if sessions[i].rewind(before[i]):  # nothing has been evicted yet
                    prefills[i].done = before[i]["seen"] - prefills[i]._start
        engine.budgets.cut([one for i, one in enumerate(sessions) if i not in broken])
        if tokens >= MANY_TOKENS and engine.device.type == "cpu":
            give_back()
        for i, found in zip(last, logits, strict=True):
            if i not in broken:
                prefills[i].logits = found
                prefills[i]._forget_snapshot()
        if broken:
            raise NotFiniteError


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
    experts = any(layer.router is not None for layer in weights.layers)
    if not (held and exact) or engine.decoder.hosted or experts or engine.shared is not None:
        return 0
    # A quarter more than a chunk: the short ends of prompts are read beside whole chunks.
    return min(engine.prefill_chunk * 5 // 4, _MOST_ON_CPU)


def reserve_together(prefills: Sequence[Prefill]) -> None:
    """Have pages ready for the next chunk of each. Raises BudgetError."""
    with prefills[0]._session.engine.lock:
        prefills[0]._session.engine.cache.pool.reserve(sum(map(needed_pages, prefills)))


def needed_pages(prefill: Prefill) -> int:
    """Count the pages that the next chunk takes, while it is stored."""
    cache = prefill._session.engine.cache
    length = cache.length[prefill._session.seq]
    return cache.needed_pages(length + prefill.next_chunk) - cache.needed_pages(length)


def _pack(waiting: Sequence[Prefill]) -> list[Prefill]:
    """Choose prompts whose next chunks are read in one pass: the longest, and what fits beside.

    So the short ends of prompts wait, and are read together. Their pages are free afterwards.

    Raises:
        BudgetError: the pool has no room for them.
    """
    engine = waiting[0]._session.engine
    pool = engine.cache.pool
    room = math.inf if pool.limit is None else pool.limit - pool.num_pages + pool.free_pages
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


def _run_pass(engine: Runtime, prefills: Sequence[Prefill]) -> Tensor:
    """Append the next chunk of each; the states ``[B, d]`` of their last tokens.

    An error takes the new entries of all back. What a scorer has added to older entries, once all
    layers have run, stays.
    """
    sessions = [prefill._session for prefill in prefills]
    turns = [one._turn.part(one.done, one.done + one.next_chunk) for one in prefills]
    counts = [turn.token_ids.numel() for turn in turns]
    try:
        hidden, deepstacks = zip(*(engine.decoder.embed_turn(turn) for turn in turns), strict=True)
        ropes = [
            engine.rope.at(turn.positions, bool(session.long_rope))
            for session, turn in zip(sessions, turns, strict=True)
        ]
        cos, sin = (torch.cat(part) for part in zip(*ropes, strict=True))
        chunks = [_chunk(*parts) for parts in zip(sessions, turns, ropes, strict=True)]
        step = PackedChunks(chunks)
        tapped: list[Tensor] = []
        ends, log_beta = engine.decoder.forward(
            torch.cat(hidden), (cos, sin), step, _joined(deepstacks, counts), tapped, step
        )
        if engine.model.has_on_append:
            taps = list(zip(*(tap.split(counts) for tap in tapped), strict=True))
            for chunk, own in zip(chunks, taps or [()] * len(chunks), strict=True):
                chunk.write_state(engine.policy.scoring, own)
        betas = [None] * len(chunks) if log_beta is None else log_beta.split(counts)
        pruned = [chunk.finish(beta) for chunk, beta in zip(chunks, betas, strict=True)]
    except BaseException:
        for session in sessions:
            session.roll_back()
        raise
    for prefill, turn, gone in zip(prefills, turns, pruned, strict=True):
        prefill._count(turn, gone)
    return ends


def _chunk(session: CachedSequence, turn: Turn, rope: tuple[Tensor, Tensor]) -> PrefillChunk:
    """Make room for the tokens of ``turn`` in a sequence."""
    engine, seen = session.engine, session.seen + turn.token_ids.numel()
    return PrefillChunk(
        engine.cache,
        engine.spec,
        session.seq,
        torch.arange(session.seen, seen, device=engine.device),
        turn.modality,
        engine.model.needs,
        seen,
        session.entries > 0,
        engine.policy.pruner,
        engine.model.write_step(rope),
        engine.backends.chunk_attention,
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
