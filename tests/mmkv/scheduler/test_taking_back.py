"""Prompts and replies that are cancelled: what their sessions hold then."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmkv import Engine
from mmkv.engine.errors import SessionError
from mmkv.scheduler import Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import ReplyJob, message
from tests.support.replies import LONG, REPLY
from tests.support.sessions import assert_same_rows


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_cancelled_prompt_leaves_no_trace(
    chunks: int, engine: Engine, scheduler: Scheduler
) -> None:
    reference, stored = engine.session(), CachedConversation(engine)
    scheduler.submit(ReplyJob(engine, message("first"), REPLY, session=stored))
    while scheduler.turn():
        pass
    list(reference.send("first", sampling=REPLY))
    ticket = scheduler.submit(ReplyJob(engine, message(LONG * 2), REPLY, session=stored))
    for _ in range(chunks):
        scheduler.turn()
    assert ticket.state == "prefill"
    ticket.cancel()
    scheduler.turn()
    assert ticket.state == "cancelled" and stored.live is not None
    assert stored.live.history == reference.history
    assert_same_rows(stored.live, reference)
    again = scheduler.submit(ReplyJob(engine, message("second"), REPLY, session=stored))
    while scheduler.turn():
        pass
    list(reference.send("second", sampling=REPLY))
    assert again.job.reply is not None and reference.last is not None
    assert again.job.reply.token_ids == reference.last.token_ids
    assert_same_rows(stored.live, reference)
    reference.close()


def test_a_cancelled_reply_ends_where_it_stands(engine: Engine, scheduler: Scheduler) -> None:
    stored = CachedConversation(engine)
    ticket = scheduler.submit(ReplyJob(engine, message("first"), REPLY, session=stored))
    while len(ticket.job.writer.token_ids if ticket.job.writer else ()) < 3:
        scheduler.turn()
    ticket.cancel()
    scheduler.turn()
    reply = ticket.job.reply
    assert reply is not None and reply.finish_reason == "interrupted" and len(reply.token_ids) == 3
    assert stored.live is not None and stored.live.history[-1]["role"] == "assistant"
    assert stored.live._unfed == reply.token_ids[-1:]


@pytest.mark.parametrize("turns", [1, 4, 9])
def test_a_turn_is_taken_back_whole_where_that_was_asked(
    turns: int, engine: Engine, scheduler: Scheduler
) -> None:
    stored = CachedConversation(engine)

    def job(text: str) -> ReplyJob:
        return ReplyJob(engine, message(text), REPLY, session=stored, undo=True)

    scheduler.submit(job("first"))
    while scheduler.turn():
        pass
    assert stored.live is not None
    before, held, live = stored.live.fork(), stored.pages, stored.live
    ticket = scheduler.submit(job(LONG))
    for _ in range(turns):
        scheduler.turn()
        # The test holds one copy more.
        pages = engine.cache.pool.num_pages - engine.cache.pool.free_pages
        assert pages - held <= scheduler.ledger.committed
    assert ticket.state == ("decode" if turns == 9 else "prefill")
    ticket.cancel()
    scheduler.turn()
    assert ticket.state == "cancelled" and stored.live is live and stored.pages == held
    assert live.history == before.history and live._unfed == before._unfed
    assert_same_rows(live, before)
    before.close()
    again = scheduler.submit(job("second"))
    while scheduler.turn():
        pass
    assert again.state == "done" and len(live.history) == 4
    assert engine.cache.pool.num_pages - engine.cache.pool.free_pages == stored.pages


def test_a_session_that_is_closed_takes_its_file_with_it(
    engine: Engine, scheduler: Scheduler, tmp_path: Path
) -> None:
    stored = CachedConversation(engine, folder=tmp_path)

    def ask(text: str) -> None:
        ticket = scheduler.submit(ReplyJob(engine, message(text), REPLY, session=stored))
        while scheduler.turn():
            pass
        assert ticket.error is None

    ask("first")
    held, seen = stored.pages, stored.extent
    stored.hibernate()
    assert len(list(tmp_path.iterdir())) == 1 and not stored.resident
    assert (stored.pages, stored.extent) == (held, seen) and held > 0
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages
    stored.wake()
    assert not list(tmp_path.iterdir()) and stored.pages == held
    stored.hibernate()
    stored.close()
    assert not list(tmp_path.iterdir()) and stored.pages == 0
    ask("begins anew")
    assert stored.live is not None and len(stored.live.history) == 2
    stored.close()
    with pytest.raises(SessionError, match="no folder"):
        alone = CachedConversation(engine)
        alone.wake()
        try:
            alone.hibernate()
        finally:
            alone.close()
