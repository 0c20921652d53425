"""A reply whose writer raises among others in one step: it fails, and they go on as if alone."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from mmkv import Engine
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.errors import InputError
from mmkv.reply import ReplyWriter
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from tests.support.replies import CHUNK, REPLY

TEXTS = ("one", "two", "three")


def fail(monkeypatch: pytest.MonkeyPatch, writer: ReplyWriter, what: str, error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(writer, what, fails)


def in_bursts(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Decode by the static step that a GPU captures; here it runs as it is."""
    runner = GraphRunner(engine.model, engine.cache)
    monkeypatch.setattr(type(engine), "many_path", "graph")
    monkeypatch.setattr(engine.backends.cuda, "decode_many", runner.decode)


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), InputError("a refusal")])
@pytest.mark.parametrize("what", ["choose", "put", "take_burst"])
def test_the_others_go_on(
    what: str, error: Exception, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "take_burst":
        in_bursts(monkeypatch, engine)
    wanted = []
    for text in TEXTS:
        with engine.session() as session:
            list(session.send(text, sampling=REPLY))
            assert session.last is not None
            wanted.append(session.last.token_ids)
    limits = Limits(quantum=CHUNK, interleave=False)  # until all are in the same step
    with closing(Scheduler(EngineExecutor(engine), limits)) as scheduler:
        stored = [CachedConversation(engine) for _ in TEXTS]
        tickets = [
            scheduler.submit(ReplyJob(engine, message(text), REPLY, session=each), text)
            for text, each in zip(TEXTS, stored, strict=True)
        ]
        while any(ticket.state in ("waiting", "prefill") for ticket in tickets):
            scheduler.turn()
        broken = tickets[1].job.writer
        assert broken is not None
        fail(monkeypatch, broken, what, error)
        while scheduler.turn():
            pass
        assert [ticket.state for ticket in tickets] == ["done", "failed", "done"]
        assert tickets[1].error is error
        for at in (0, 2):
            reply = tickets[at].job.reply
            assert reply is not None and reply.token_ids == wanted[at]
        assert stored[1].live is not None and stored[1].live.history == []
    engine.cache.check()
