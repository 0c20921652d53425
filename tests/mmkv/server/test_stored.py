"""What stored responses take, and how their input is listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai import OpenAI

from mmkv import Engine
from mmkv.server.conversations import ConversationState
from mmkv.server.responses import ResponseTable, StoredResponse
from mmkv.server.state import Caller, ServerState
from tests.support.chat_models import save_qwen3_vl
from tests.support.servers import MODEL, Server, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="streamingllm", budget=64, dtype="float32")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


def respond(server: Server, said: Any = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": said, "max_output_tokens": 3, "temperature": 0} | fields
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


METADATA = {f"{at}": "x" * 512 for at in range(16)}
SCHEMA = {"type": "object", "description": "x" * 8000}
FORM = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
LARGE: list[dict[str, Any]] = [
    {"metadata": METADATA},
    {"text": FORM},
    {"top_logprobs": 20, "max_output_tokens": 12},
]


@pytest.mark.parametrize("fields", LARGE, ids=["metadata", "schema", "logprobs"])
def test_what_is_shown_counts_in_the_limit(folder: Path, fields: dict[str, Any]) -> None:
    def stands(server: Server, response: dict[str, Any]) -> bool:
        return server.client.get(f"/v1/responses/{response['id']}").status_code == 200

    with serving(lambda: load(folder), snapshot_bytes=0) as made:
        assert stands(made, respond(made, **fields))
        (pages,) = made.inside(
            lambda core: [one.bytes for one in core.scheduler.sessions]  # type: ignore[attr-defined]
        )
    with serving(lambda: load(folder), snapshot_bytes=0, store_bytes=pages + 4000) as made:
        assert stands(made, respond(made))
        assert not stands(made, respond(made, **fields))


def test_what_a_response_took_is_what_its_end_gives_back() -> None:
    """A memory that shares a budget shrinks while it is stored."""
    worker = SimpleNamespace(core=SimpleNamespace(), post=lambda command: None)
    state = SimpleNamespace(settings=SimpleNamespace(store_bytes=1000), engine_thread=worker)
    responses = ResponseTable(cast(ServerState, state))
    for at in range(30):
        kept = SimpleNamespace(bytes=600, lost=False)
        stored = StoredResponse("me", cast(ConversationState, kept), b"{}", b"[]", None)
        responses.keep(f"{at}", stored)
        kept.bytes = 100  # others have taken the rest
        assert responses.find(f"{at}", Caller("me", "me")) is stored
        responses.delete(f"{at}")


def test_instructions_that_say_nothing_are_none(server: Server) -> None:
    for first, after in ((None, ""), ("", None), ("", ""), ("be kind", "")):
        before = respond(server, instructions=first)
        later = respond(server, previous_response_id=before["id"], instructions=after)
        assert (later["instructions"] or None) == (first or None)


def test_the_input_is_listed_page_by_page(server: Server) -> None:
    said = [{"role": "user", "content": f"number {at}"} for at in range(25)]
    name = respond(server, said)["id"]
    path = f"/v1/responses/{name}/input_items"

    def listed(**given: Any) -> dict[str, Any]:
        answer = server.client.get(path, params=given)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def numbers(page: dict[str, Any]) -> list[int]:
        return [int(one["content"][0]["text"].removeprefix("number ")) for one in page["data"]]

    newest = listed()
    assert numbers(newest) == list(range(24, 4, -1)) and newest["has_more"]
    assert newest["first_id"] == newest["data"][0]["id"]
    rest = listed(after=newest["last_id"])
    assert numbers(rest) == [4, 3, 2, 1, 0] and not rest["has_more"]
    oldest = listed(order="asc", limit=3)
    assert numbers(oldest) == [0, 1, 2] and oldest["has_more"]
    assert numbers(listed(order="asc", limit=100)) == list(range(25))
    end = listed(after=rest["last_id"])
    assert end["data"] == [] and not end["has_more"] and end["first_id"] is None
    for wrong, param in (
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_of_another"}, "after"),
    ):
        answer = server.client.get(path, params=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.responses.input_items.list(name, limit=10, order="asc")
    assert [one.content[0].text for one in found] == [one["content"] for one in said]  # type: ignore[union-attr]
