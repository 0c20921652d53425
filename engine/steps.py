"""Decode steps of several sequences of one engine together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.engine.backends.base import Burst, Counts
from mmkv.engine.backends.cuda.kernels.sample import Draw, Draws, guard
from mmkv.engine.budgets import batch_of, count, give_room
from mmkv.engine.errors import (
    BROKEN,
    ContextError,
    InputError,
    NotFiniteError,
    SessionError,
    require_list,
)
from mmkv.engine.interrupts import CtrlC
from mmkv.engine.prefill import claimed
from mmkv.engine.scorer_state import revise_state
from mmkv.engine.system import exact_products

if TYPE_CHECKING:
    from mmkv.engine.drafts import Guess
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence

# Tokens of a reply between two reads by the host, and those after which Ctrl-C is looked for: who
# asks for more at a time is told by ``seen`` how far it came.
BURST = 16


def decode_step(
    engine: Runtime,
    sessions: Sequence[CachedSequence],
    token_ids: Sequence[int],
    guesses: Sequence[Guess] | None = None,
) -> Tensor:
    """Append one token to each of B sessions; see :meth:`mmkv.engine.runtime.Runtime.decode`."""
    require_list("sessions", sessions, "sessions")
    with claimed(sessions, ahead=True), engine.lock, exact_products(engine.device):
        before = [(session.seen, session.dial) for session in sessions]
        token_ids = _checked(engine, sessions, token_ids)
        for session, token in zip(sessions, token_ids, strict=True):
            if session.recorder is not None:
                session.recorder.expect(token)
        if engine.drafts is not None:
            logits = engine.drafts.decode(sessions, token_ids, guesses)
            for session, token in zip(sessions, token_ids, strict=True):
                session.read_ids |= 1 << token
            return logits
        interval = engine.interval
        batch, counts = batch_of(sessions, token_ids, interval), Counts()
        backend = engine.backends.for_step(batch)
        if batch.recorded:
            give_room(batch, sessions, backend)
        try:
            try:
                logits = backend.decode(batch, counts)
            finally:  # also where an interrupt came when the step was made
                count(sessions, counts)
        except BaseException:
            for session, (seen, dial) in zip(sessions, before, strict=True):
                session.roll_back()
                if session.seen == seen:
                    session.dial = dial  # it was turned for the step
            engine.budgets.cut(sessions, interval)  # where the step stands
            raise
        for session, token in zip(sessions, token_ids, strict=True):
            session.read_ids |= 1 << token
        if engine.model.has_on_step and not counts.revised:
            for session in sessions:
                entries = engine.cache.entries(session.seq)
                view = session.view(entries)
                revise_state(engine.cache, engine.policy.scoring, session.seq, entries, view)
        uncut = [sessions[index] for index in counts.uncut] if counts.uncut else ()
        engine.budgets.cut(uncut, interval, backend if counts.tried else None)
        return logits


def decode_steps(
    engine: Runtime,
    sessions: Sequence[CachedSequence],
    token_ids: Sequence[int],
    steps: int,
    stop: Sequence[int],
    draws: Sequence[Draw] | None,
) -> list[list[int]]:
    """Append ``steps`` tokens to each; see :meth:`mmkv.engine.runtime.Runtime.decode_many`."""
    require_list("sessions", sessions, "sessions")
    with claimed(sessions, ahead=True):
        with engine.lock:
            token_ids = _checked(engine, sessions, token_ids)
            whole = _reserved(sessions, steps)
            recorded = any(session.recorder is not None for session in sessions)
            graph = engine.many_path == "graph" and engine.drafts is None
            if graph and not recorded and whole:
                decode = engine.backends.for_bursts().decode_many
                return decode_burst(engine, decode, sessions, token_ids, steps, stop, draws)
        return _step_by_step(engine, sessions, token_ids, steps, stop, draws)


def _reserved(sessions: Sequence[CachedSequence], steps: int) -> bool:
    """Have positions for all steps, or return False where single steps find theirs as they go.

    Raises:
        ContextError: there are none, and a session ends at the context.
    """
    whole = True
    for session in sessions:
        try:
            session.make_context(steps, session.next_position + steps)
        except ContextError:
            if not (session.engine.policy.evicts and session.may_compact and session.runs):
                raise
            whole = False
    return whole


def decode_burst(
    engine: Runtime,
    decode: Callable[..., None],
    sessions: Sequence[CachedSequence],
    token_ids: Sequence[int],
    steps: int,
    stop: Sequence[int] = (),
    draws: Sequence[Draw] | None = None,
) -> list[list[int]]:
    """Run a burst on ``decode``, a backend's ``decode_many``, and count what it came to.

    See :meth:`mmkv.engine.runtime.Runtime.decode_many`.
    """
    batch = batch_of(sessions, token_ids, engine.interval)
    budgets = (session.budget for session in sessions)
    batch.share = [each.value if each.kind == "fraction" else 0 for each in budgets]
    burst = Burst.of(batch)
    try:
        decode(batch, burst, steps, stop, draws)
    finally:
        for index, session in enumerate(sessions):
            if burst.appended[index]:
                counted = burst.appended[index], burst.entries[index], burst.nan[index]
                session.count_burst(*counted, burst.log_beta[index])
            if burst.generated[index]:  # what came last has not been appended
                session.note_ids([token_ids[index], *burst.generated[index][:-1]])
    if any(row[-1:] == [BROKEN] for row in burst.generated):
        raise NotFiniteError(burst.generated)
    return burst.generated


def _step_by_step(
    engine: Runtime,
    sessions: Sequence[CachedSequence],
    token_ids: Sequence[int],
    steps: int,
    stop: Sequence[int],
    draws: Sequence[Draw] | None,
) -> list[list[int]]:
    """:func:`decode_steps` without a graph."""
    generated: list[list[int]] = [[] for _ in sessions]
    token, going = list(token_ids), list(range(len(sessions)))
    drawn: Draws | None = None
    if draws is not None:
        drawn = Draws(draws, engine.decoder.weights.head.shape[0], engine.device)
    ends = {*stop, BROKEN}
    for done in range(steps):
        if done and done % BURST == 0:
            CtrlC.check()
        stepped = [sessions[index] for index in going]
        guesses = None
        if engine.drafts is not None and draws is not None:
            guesses = [draws[index].after(generated[index]) for index in going]
        logits = engine.decode(stepped, [token[index] for index in going], guesses)
        for index, chosen in zip(going, _next_ids(engine, stepped, logits, drawn), strict=True):
            token[index] = chosen
            generated[index].append(chosen)
        rows = [row for row, index in enumerate(going) if token[index] not in ends]
        if not rows:
            break
        if drawn is not None and len(rows) < len(going):
            drawn.keep(rows)
        going = [going[row] for row in rows]
    if BROKEN in token:
        raise NotFiniteError(generated)
    return generated


def next_ids(
    engine: Runtime, sessions: Sequence[CachedSequence], logits: Tensor, draws: Sequence[Draw]
) -> list[int]:
    """Choose the ids that a burst would say after a step with these ``logits [B, vocab]``.

    BROKEN where they are no numbers.
    """
    plain = all(draw.plain for draw in draws)
    made = None if plain else Draws(draws, logits.shape[-1], engine.device)
    return _next_ids(engine, sessions, logits, made)


def _next_ids(
    engine: Runtime, sessions: Sequence[CachedSequence], logits: torch.Tensor, drawn: Draws | None
) -> list[int]:
    """Return the id that follows in each, or BROKEN where its logits are no numbers."""
    logits, broken = guard(logits, engine.never_chosen)
    if drawn is None:
        chosen = logits.argmax(-1)
    else:
        seen = torch.tensor([session.seen for session in sessions], device=engine.device)
        chosen = drawn.next(logits, seen)
    return chosen.masked_fill(broken, BROKEN).tolist()


def _checked(
    engine: Runtime, sessions: Sequence[CachedSequence], token_ids: Sequence[int]
) -> list[int]:
    """Return the token ids, once everything about a step is right."""
    if isinstance(token_ids, torch.Tensor) and token_ids.dim() == 1:
        token_ids = token_ids.tolist()
    else:
        require_list("token_ids", token_ids, "token ids")
    if not sessions or len(sessions) != len(token_ids):
        raise InputError(
            f"{len(sessions)} sessions and {len(token_ids)} tokens; give one token a session"
        )
    if len({id(session) for session in sessions}) != len(sessions):
        raise InputError("a session stands twice in the batch; fork it to decode it twice")
    checked = [token if type(token) is int else _token_id(token) for token in token_ids]
    moves, vocabulary = False, engine.model.decoder.weights.embed.shape[0]
    for session, token in zip(sessions, checked, strict=True):
        if session.engine is not engine:
            raise SessionError("a session of another engine; decode it with its own engine")
        session._require_open()
        moves |= session.require_context(1, session.next_position + 1)
        if not 0 <= token < vocabulary:
            raise InputError(f"token id {token} is outside the vocabulary")
    if moves:
        _move_positions(engine, sessions)
    for session in sessions:
        if session.budget.risk is not None:
            session.turn_dial(decoding=True)
    return checked


def _move_positions(engine: Runtime, sessions: Sequence[CachedSequence]) -> None:
    """Have rope positions for a step, and its pages first: nothing refuses once they have moved."""
    engine.cache.pool.reserve(sum(engine.cache.pages_for(one.seq, 1) for one in sessions))
    for session in sessions:
        session.make_context(1, session.next_position + 1)


def _token_id(token: Any) -> int:
    """Return a token id as an int. Raises TypeError: it is no whole number."""
    try:
        made = operator.index(token)
    except TypeError:
        made = None
    if made is None or isinstance(token, bool):
        raise TypeError(f"a token id must be a whole number, not a {type(token).__name__}")
    return made
