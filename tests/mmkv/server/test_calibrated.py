"""A server whose answers are weighed against a calibration: notes, second readings, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine, Sampling
from mmkv.calibration import doubt_of
from mmkv.reply import ReplyWriter
from tests.support.calibrated import certified
from tests.support.chat_models import picture
from tests.support.servers import Server, asked, picture_part, serving

RED, BLUE = picture_part(picture("red", (40, 32))), picture_part(picture("blue", (32, 48)))
FIRST = {"role": "user", "content": [RED, {"type": "text", "text": "which colour is it, then?"}]}
NEXT = {"role": "user", "content": [BLUE, {"type": "text", "text": "and this one?"}]}

Start = Callable[..., AbstractContextManager[Server]]


def load(folder: Path, **options: Any) -> Engine:
    given = {"policy": "dbtrimkv", "gates": "random", "budget": 12} | options
    return Engine.from_pretrained(
        folder, dtype="float32", prefill_chunk=16, page_size=4, kv_limit=2**22, **given
    )


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Start:
    def started(on_risk: str) -> AbstractContextManager[Server]:
        return serving(lambda: certified(load(folder), tmp_path, on_risk))

    return started


def told(answer: Any) -> tuple[str, Any]:
    body = answer.json()
    return body["choices"][0]["message"]["content"], body["usage"]["mmkv"]


def test_a_doubtful_answer_is_read_again(start: Start, folder: Path) -> None:
    """Also where the chat goes on from a copy of its memory, whose pictures it did not need."""
    full = load(folder, policy="full", budget=None)
    with start("reread") as server, serving(lambda: full) as other:
        reply, usage = told(server.chat(FIRST))
        assert (reply, usage["escalated"]) == (told(other.chat(FIRST))[0], "reread")
        second = server.chat(FIRST, reply, NEXT, n=2)
        wanted = other.chat(FIRST, reply, NEXT, n=2, mmkv={"resume": "never"})
        texts = [
            [one["message"]["content"] for one in each.json()["choices"]]
            for each in (second, wanted)
        ]
        assert texts[0] == texts[1]
        usage = told(second)[1]
        assert usage["resumed"] > 0 and usage["evicted"] > 0 and usage["escalated"] == "reread"
        assert any("read again" in note for note in usage["notes"])
        metrics = server.client.get("/metrics").text
        assert 'mmkv_answers_escalated{outcome="reread"} 3.0' in metrics
        assert "mmkv_answers_weighed 3.0" in metrics and "mmkv_calibration_drift 0.0" in metrics
        assert server.held == 0


@pytest.mark.parametrize(("on_risk", "answers"), [("say", 3), ("refuse", 1)])
def test_choices_are_of_one_conversation(start: Start, on_risk: str, answers: int) -> None:
    """For the drift, whose test takes scores that depend on nothing."""
    with start(on_risk) as server:
        server.chat(FIRST, n=3)
        control = server.inside(lambda core: core.engine.loss_control)
        assert control is not None
        assert (control.answers, control.drift.conversations) == (answers, 1)


def test_a_session_whose_pictures_were_not_sent_again(start: Start) -> None:
    with start("reread") as server:
        name = server.client.post("/v1/sessions", json={}).json()["id"]
        path = f"/v1/sessions/{name}/chat/completions"
        first = server.client.post(path, json=asked(FIRST))
        assert told(first)[1]["escalated"] == "reread"
        second = told(server.client.post(path, json=asked(NEXT)))[1]
        assert second["escalated"] == "not_reread"
        assert any("could not be read again" in note for note in second["notes"])


def test_the_pages_pictures_are_read_again(start: Start, folder: Path) -> None:
    """Turns in the background keep their pictures for clients; the page sends none twice."""
    full = load(folder, policy="full", budget=None)
    with start("reread") as server, serving(lambda: full) as other:
        name = server.client.post("/v1/sessions", json={}).json()["id"]
        path, given = f"/v1/sessions/{name}/chat/completions", []
        for message in (FIRST, NEXT):
            given.append(message)
            body = asked(message) | {"stream": True, "mmkv": {"background": True}}
            lines = server.client.post(path, json=body).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line[6:7] == "{"]
            parts = [one["choices"][0]["delta"] for one in events if one.get("choices")]
            reply = "".join(part.get("content") or "" for part in parts)
            (usage,) = [one["usage"]["mmkv"] for one in events if one.get("usage")]
            assert usage["escalated"] == "reread"
            assert reply == told(other.chat(*given, mmkv={"resume": "never"}))[0]
            given.append(reply)


def test_an_answer_is_refused(start: Start) -> None:
    with start("refuse") as server:
        answer = server.chat(FIRST)
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "forgotten"
        assert "has been forgotten" in answer.json()["error"]["message"]
        assert 'outcome="refused"} 1.0' in server.client.get("/metrics").text
        assert server.held == 0


def test_a_choice_that_cannot_begin_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the end no page may be held, of which the server itself sees to."""
    draw, drawn = ReplyWriter.draw_from, list[ReplyWriter]()

    def fails(self: ReplyWriter, *given: Any) -> int | None:
        drawn.append(self)
        if len(drawn) == 2:
            raise RuntimeError("made up")
        return draw(self, *given)

    monkeypatch.setattr(ReplyWriter, "draw_from", fails)
    with serving(lambda: load(folder)) as server:
        drawn.clear()  # of its warm-up
        assert server.chat("so?", n=2).status_code == 500


def test_without_room_it_is_only_said(start: Start, folder: Path) -> None:
    plain = load(folder)
    long = {"role": "user", "content": "many words, more than there is room for twice; " * 12}
    with start("reread") as server, serving(lambda: plain) as other:
        pool = server.inside(lambda core: core.engine.cache.pool)
        server.inside(lambda core: setattr(pool, "limit", 100))
        reply, usage = told(server.chat(long))
        assert (reply, usage["escalated"]) == (told(other.chat(long))[0], "not_reread")
        assert server.held == 0


def test_a_stream_goes_on_from_the_second_reading(folder: Path, tmp_path: Path) -> None:
    """What was streamed before an answer became doubtful stays."""
    plain = load(folder)
    for number in range(12):
        question = {
            "role": "user",
            "content": f"many words, {number}, more than one chunk has: why?",
        }
        doubts = list[float]()
        with plain.session() as session:
            logits = session.prefill(plain.inputs([question]))
            for _ in range(8):
                doubts.append(doubt_of(logits))
                logits = session.decode(int(logits.argmax()))
        if (at := doubts.index(max(doubts))) > 1:
            break
    assert at > 1
    made = certified(load(folder), tmp_path, "reread", limit=doubts[at], score="doubt")
    (want,) = made.generate([question], sampling=Sampling(max_new_tokens=8))
    (own,) = plain.generate([question], sampling=Sampling(max_new_tokens=8))
    assert want.token_ids[:at] == own.token_ids[:at] and want.token_ids != own.token_ids
    with serving(
        lambda: certified(load(folder), tmp_path, "reread", doubts[at], "doubt")
    ) as server:
        body = asked(question, max_tokens=8, stream=True, stream_options={"include_usage": True})
        lines = server.client.post("/v1/chat/completions", json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line[6:7] == "{"]
        deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == want.text
        assert events[-1]["usage"]["mmkv"]["escalated"] == "reread"
        assert server.held == 0
