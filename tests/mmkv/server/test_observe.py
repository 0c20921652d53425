"""What a session observes over HTTP: frames and texts that are read without a reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine, Sampling, Session
from tests.support.chat_models import picture
from tests.support.servers import Server, asked, picture_part, serving

RED, BLUE = picture("red", (64, 32)), picture("blue", (64, 32))


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="full", dtype="float32", kv_limit=2**24)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def server(folder: Path, saved: Path) -> Iterator[Server]:
    with serving(lambda: load(folder), session_folder=saved, max_sessions=8) as made:
        yield made


def created(server: Server, **fields: Any) -> str:
    answer = server.client.post("/v1/sessions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def observe(server: Server, name: str, *content: Any, **fields: Any) -> dict[str, Any]:
    given = content[0] if isinstance(content[0], str) else list(content)
    answer = server.client.post(f"/v1/sessions/{name}/observe", json={"content": given} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: Server, name: str, *messages: Any) -> dict[str, Any]:
    body = asked(*messages, max_tokens=8, logprobs=True)
    answer = server.client.post(f"/v1/sessions/{name}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_session_over_http_reads_what_one_in_python_reads(
    server: Server, folder: Path, saved: Path
) -> None:
    """Before a reply and after one; a file in between is a session of Python's, too."""
    engine = load(folder)
    name = created(server)
    with engine.session() as session:
        for turn in range(2):
            for what, at in ((RED, 1.5), ("a door opens", 2), (BLUE, 3)):
                given = what if isinstance(what, str) else picture_part(what)
                ours = observe(server, name, given, at=at)
                same = session.observe(what, at=at)
                assert (ours["tokens"], ours["next_position"]) == (
                    same.tokens,
                    same.next_position,
                )
                assert (ours["frames"], ours["note"]) == (same.frames, same.note)
            saving = {"name": "a", "overwrite": True}
            assert server.client.post(f"/v1/sessions/{name}/save", json=saving).status_code == 200
            (path,) = saved.rglob("a.mmkv")
            with Session.load(engine, path) as loaded:
                assert (loaded.history, loaded.seen) == (session.history, session.seen)
            again = created(server, file="a")
            answers = [ask(server, one, "what?") for one in (name, again)]
            list(session.send("what?", sampling=Sampling.greedy(max_new_tokens=8)))
            assert session.last is not None
            for answer in answers:
                assert answer["choices"][0]["message"]["content"] == session.last.text
                read = answer["usage"]["prompt_tokens"]
                assert read == session.seen + len(session.unfed) - len(session.last.token_ids)
                assert answer["session"]["turns"] == (turn + 1 if answer is answers[0] else 1)
            server.client.delete(f"/v1/sessions/{again}")
    shown = server.client.get(f"/v1/sessions/{name}/messages").json()["data"]
    assert [one["role"] for one in shown] == [*["user"] * 4, "assistant"] * 2
    memory = server.client.get(f"/v1/sessions/{name}/memory").json()
    assert [one["kept"] for one in memory["kept_by_message"]] == [1.0] * 10


def test_near_duplicates_are_counted_and_a_refused_one_changes_nothing(server: Server) -> None:
    name = created(server)
    first = observe(server, name, picture_part(RED), picture_part(RED), at=0, skip_similar=2)
    assert (first["frames"], first["skipped"]) == (1, 1)
    again = observe(server, name, picture_part(RED), at=1, skip_similar=2)
    assert (again["tokens"], again["frames"], again["frames_skipped"]) == (0, 0, 2)
    text = {"type": "text", "text": "still red"}
    assert observe(server, name, picture_part(RED), text, at=2, skip_similar=2)["tokens"] > 0
    before = server.client.get(f"/v1/sessions/{name}/memory").json()
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    inside = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    sized = {"type": "image_url", "image_url": {"url": "data:,a", "max_pixels": 99}}
    for status, body in [
        (400, {"content": [film]}),
        (422, {"content": [broken]}),
        (400, {"content": [sized], "at": 1}),
        (400, {"content": " "}),
        (400, {"content": "a", "at": -1}),
        (400, {"content": "a", "fps": 1}),
        (400, {"content": "a", "system": "be kind"}),
        (400, {"content": "a", "other": 1}),
        (403, {"content": [inside]}),
    ]:
        answer = server.client.post(f"/v1/sessions/{name}/observe", json=body)
        assert answer.status_code == status, (body, answer.text)
        assert "\n" not in answer.json()["error"]["message"]
    after = server.client.get(f"/v1/sessions/{name}/memory").json()
    assert after == before
    missing = server.client.post("/v1/sessions/none/observe", json={"content": "a"})
    assert missing.status_code == 404
