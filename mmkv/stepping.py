"""Decode several replies together by one step, or by several steps where a graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv.engine.errors import NotFiniteError
from mmkv.engine.steps import BURST
from mmkv.sampling import likeliest_of

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.sequence import CachedSequence
    from mmkv.reply import ReplyWriter


def step(
    engine: Engine, going: Sequence[tuple[CachedSequence, ReplyWriter, int]]
) -> list[int | None]:
    """Append each reply's token and choose what follows.

    Args:
        going: session, writer and the token that the session does not hold yet.

    Returns:
        per reply the token to feed next, None where it has ended (or failed: see its writer).
        What a writer raises is its own failure; the sessions of all hold their tokens by then.

    Raises:
        ContextError: a session has no position left; nothing has changed.
    """
    sessions, writers = [session for session, *_ in going], [writer for _, writer, _ in going]
    tokens = [token for *_, token in going]
    for writer in writers:
        writer.feeding()
    steps = _ahead(engine, sessions, writers)
    if steps < 2:
        following: list[int | None] = []
        with engine.lock:  # the logits are read back before another thread's step
            logits = engine.decode(sessions, tokens)
            read: Sequence[tuple[float, float] | None] = [None] * len(writers)
            if sum(writer.greedy for writer in writers) > 1:
                read = likeliest_of(logits)
            chosen = [
                writer.attempt(writer.choose, *row)
                for writer, *row in zip(writers, logits, read, strict=True)
            ]
        for writer, token in zip(writers, chosen, strict=True):
            writer.fed()
            following.append(None if token is None else writer.attempt(writer.put, token))
        return following
    draws = [writer.draw for writer in writers]
    try:
        generated = engine.decode_many(
            sessions,
            tokens,
            steps,
            sorted(engine.eos_token_ids),
            None if all(draw.plain for draw in draws) else draws,
        )
    except NotFiniteError as error:  # of some of them, which their writers will say
        generated = error.generated
    return [
        writer.attempt(writer.take_burst, row)
        for writer, row in zip(writers, generated, strict=True)
    ]


def _ahead(
    engine: Engine, sessions: Sequence[CachedSequence], writers: Sequence[ReplyWriter]
) -> int:
    """Return how many steps all replies can take before the host has to look."""
    if engine.many_path != "graph":
        return 1
    positions = engine.spec.max_position - max(session.next_position for session in sessions)
    return min(BURST, positions, *(writer.ahead for writer in writers))
