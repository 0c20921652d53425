"""A server whose sessions compete for one budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv import Engine
from mmkv.server.conversations import ConversationState
from mmkv.server.engine_thread import EngineCore
from tests.support.chat_models import picture
from tests.support.servers import Server, asked, paused_in_a_reply, picture_part, serving

BUDGET = 24
LONG = {
    "role": "user",
    "content": [picture_part(picture("red", (64, 56))), {"type": "text", "text": "what is it?"}],
}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "page_size": 16, "dtype": "float32"}
        engine = Engine.from_pretrained(folder, prefill_chunk=32, evict_every=1, **options)
        engine.share(BUDGET, floor=2, by_risk=True)
        shared = engine.shared
        assert shared is not None
        # Room for the shared pages twice (a turn may stand beside what it goes on from), a chunk,
        # and four sessions: a fifth moves to a file. One page more would be a BudgetError.
        rows = engine.spec.rows
        engine.cache.pool.limit = 2 * shared.fixed_pages + 4 * rows + 32 * rows // 16
        return engine

    with serving(load) as made:
        yield made


@pytest.fixture(autouse=True)
def _all_deleted(server: Server) -> Iterator[None]:
    yield
    for one in server.client.get("/v1/sessions").json()["data"]:
        assert server.client.delete(f"/v1/sessions/{one['id']}").json()["deleted"]
    assert "mmkv_page_leaks_total 0.0" in server.client.get("/metrics").text


def created(server: Server) -> str:
    return server.client.post("/v1/sessions", json={}).json()["id"]


def turn(server: Server, name: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    path = f"/v1/sessions/{name}/chat/completions"
    answer = server.client.post(path, json=asked(*messages, **{"max_tokens": 12} | fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def entries(server: Server, name: str) -> int:
    return server.client.get(f"/v1/sessions/{name}/memory").json()["entries"]


def held(core: EngineCore) -> int:
    assert core.engine.shared is not None
    return core.engine.shared.held


def cache(server: Server, begins: str) -> dict[str, Tensor]:
    """Return what the session in memory holds whose first message is ``begins``."""

    def read(core: EngineCore) -> dict[str, Tensor]:
        (found,) = (
            one.live
            for one in core.scheduler.sessions
            if isinstance(one, ConversationState) and one.info.messages[0].parts[0].text == begins
        )
        assert found is not None
        return core.engine.cache.export(found.seq)

    return server.inside(read)


def test_sessions_take_room_from_each_other_and_never_more_than_there_is(server: Server) -> None:
    rows = server.inside(lambda core: core.engine.spec.rows)
    first, second = created(server), created(server)
    used = turn(server, first, LONG)["usage"]["mmkv"]
    assert used["shared_pool"] and used["evicted"] > 0
    assert 0 < used["risk"] < 1 and not used["over_risk"]
    alone = entries(server, first)
    assert alone <= BUDGET * rows
    turn(server, second, LONG)
    both = [entries(server, one) for one in (first, second)]
    assert both[0] < alone and both[0] >= 2 * rows
    assert sum(both) == server.inside(held) <= (BUDGET + 1) * rows
    for asks in ("and left?", "and right?"):
        for one in (first, second):
            assert turn(server, one, asks)["usage"]["mmkv"]["resumed"] > 0
        assert server.inside(held) <= (BUDGET + 1) * rows
    assert server.chat("without a session").json()["usage"]["mmkv"]["resumed"] == 0


def test_a_turn_that_is_cut_off_leaves_its_session_as_it_was(server: Server) -> None:
    texts = ("first of two that fill it", "second of two that fill it")
    first, second = created(server), created(server)
    for name, text in zip((first, second), texts, strict=True):
        turn(server, name, text, max_tokens=40)
    before, whole = cache(server, texts[0]), server.inside(held)
    with paused_in_a_reply(server) as reached:
        body = asked("a long one", max_tokens=60, stream=True)
        path = f"/v1/sessions/{first}/chat/completions"
        with server.client.stream("POST", path, json=body) as answer:
            assert reached.wait(60)
            answer.close()
    server.wait_for(lambda core: not core.scheduler.running)
    # What was gone on from competed with nobody, and the others can only have lost.
    after = cache(server, texts[0])
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert server.inside(held) <= whole
    assert turn(server, first, "two")["usage"]["mmkv"]["resumed"] > 0


def test_keys_have_weights(folder: Path, tmp_path: Path) -> None:
    """The same dialogue under two keys: who weighs more holds more, also when it has come back."""

    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "dtype": "float32"}
        engine = Engine.from_pretrained(folder, prefill_chunk=32, kv_limit=2**23, **options)
        engine.share(BUDGET)
        return engine

    def weights(core: EngineCore) -> list[float]:
        shared = core.engine.shared
        assert shared is not None
        kept = [one for one in core.scheduler.sessions if isinstance(one, ConversationState)]
        return [shared.weight(one.live) for one in kept if one.live is not None]

    held: dict[tuple[float, ...], list[int]] = {}
    for given in ((), (1.0, 1e6)):
        keys = {"api_keys": ("light", "heavy"), "key_weights": given}
        with serving(load, session_folder=tmp_path / f"{len(given)}", **keys) as server:
            found: list[int] = []
            names = []
            for key in ("light", "heavy"):
                server.client.headers["Authorization"] = f"Bearer {key}"
                names.append(created(server))
                turn(server, names[-1], LONG)
                turn(server, names[-1], "and left of it?")
            for key, name in zip(("light", "heavy"), names, strict=True):
                server.client.headers["Authorization"] = f"Bearer {key}"
                found.append(entries(server, name))
            assert sorted(server.inside(weights)) == sorted(given or (1.0, 1.0))
            path = f"/v1/sessions/{names[1]}"
            assert server.client.post(f"{path}/save", json={"name": "it"}).status_code == 200
            again = server.client.post("/v1/sessions", json={"file": "it"})
            assert again.status_code == 200
            assert max(server.inside(weights)) == max(given or (1.0,))
            assert sum(one > 1 for one in server.inside(weights)) == 2 * bool(given)
            for name in (*names, again.json()["id"]):
                for key in ("light", "heavy"):
                    server.client.headers["Authorization"] = f"Bearer {key}"
                    server.client.delete(f"/v1/sessions/{name}")
            held[given] = found
    light, heavy = held[1.0, 1e6]
    assert heavy > held[()][1] and light < held[()][0]


def test_those_without_room_move_to_files_and_come_back(server: Server) -> None:
    names = [created(server) for _ in range(6)]
    for asks in (LONG, "and left?"):
        for one in names:
            turn(server, one, asks)
    states = {one["state"] for one in server.client.get("/v1/sessions").json()["data"]}
    assert states == {"memory", "file"}


def test_two_answers_to_one_response(server: Server) -> None:
    body = {"model": "small", "max_output_tokens": 8, "temperature": 0}
    first = server.client.post("/v1/responses", json=body | {"input": "what is red?"}).json()
    again = body | {"input": "and blue?", "previous_response_id": first["id"]}
    answers = [server.client.post("/v1/responses", json=again) for _ in range(2)]
    assert [one.status_code for one in answers] == [200, 200]
    for one in (first, *(one.json() for one in answers)):
        server.client.delete(f"/v1/responses/{one['id']}")
    assert server.inside(held) == 0


def test_what_a_session_cannot_have_of_its_own(server: Server) -> None:
    for fields in ({"mmkv": {"budget": 8}}, {"n": 2}):
        answer = server.chat("one", **fields)
        assert answer.status_code == 400 and "share one budget" in answer.text
    assert server.client.post("/v1/sessions", json={"budget": 8}).status_code == 400
    assert server.client.get("/v1/models").json()["data"][0]["mmkv"]["shared_budget"]
