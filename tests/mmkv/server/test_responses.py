"""/v1/responses over HTTP: replies that are gone on from by their id, and what stored ones take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from mmkv import Engine
from mmkv.server import responses_schema
from mmkv.server.conversations import ConversationState
from mmkv.server.errors import ApiError
from mmkv.server.responses import ResponseTable, StoredResponse
from mmkv.server.state import Caller, ServerState
from tests.support.chat_models import picture
from tests.support.servers import MODEL, Server, asked, paused_in_a_reply, picture_part, serving

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
URL = picture_part(picture("red", (48, 40)))["image_url"]["url"]
SCENE = [
    {"type": "input_image", "image_url": URL},
    {"type": "input_text", "text": "what is red here?"},
]
TURNS = ("and what is left of it, and right of it?", "so how many are there?")


def load(folder: Path) -> Engine:
    options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
    return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


def body(said: Any, **fields: Any) -> dict[str, Any]:
    given = said if isinstance(said, str) else [{"role": "user", "content": said}]
    return {"model": MODEL, "input": given, "temperature": 0, "max_output_tokens": 12} | fields


def post(server: Server, said: Any, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/responses", json=body(said, **fields))


def responded(server: Server, said: Any, **fields: Any) -> dict[str, Any]:
    """Return a response, of OpenAI's type."""
    answer = post(server, said, **fields)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


def streamed(server: Server, said: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return a stream's events, each of OpenAI's type and named before its data."""
    given = body(said, stream=True, **fields)
    with server.client.stream("POST", "/v1/responses", json=given) as answer:
        assert answer.status_code == 200, answer.read()
        blocks = [one for one in "".join(answer.iter_text()).split("\n\n") if one]
    assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        found.append(event)
    return found


def text_of(response: dict[str, Any]) -> str:
    (message,) = response["output"]
    return message["content"][0]["text"]


def test_the_events_of_a_stream(server: Server) -> None:
    first = responded(server, SCENE)
    wanted = responded(server, TURNS[0], previous_response_id=first["id"])
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = streamed(server, TURNS[0], previous_response_id=first["id"], **logprobs)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    pieces = [one for one in found if one["type"] == "response.output_text.delta"]
    assert len(pieces) == len(found) - 8 > 1
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    assert "".join(one["delta"] for one in pieces) == text_of(last) == text_of(wanted)
    rows = last["output"][0]["content"][0]["logprobs"]
    assert rows == [row for one in pieces for row in one["logprobs"]]
    assert len(rows) == last["usage"]["output_tokens"] and len(rows[0]["top_logprobs"]) == 2
    assert server.client.get(f"/v1/responses/{last['id']}").json() == last
    again = responded(server, TURNS[1], previous_response_id=last["id"])
    other = responded(server, TURNS[1], previous_response_id=wanted["id"])
    assert text_of(again) == text_of(other)


def test_a_schema_is_followed(server: Server) -> None:
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    found = responded(server, SCENE, text={"format": form}, max_output_tokens=40)
    assert found["text"]["format"] == form
    assert isinstance(json.loads(text_of(found))["red"], bool)


def test_items_and_deletion(server: Server) -> None:
    response = responded(
        server,
        "",
        input=[
            {"role": "developer", "content": "be short"},
            {"type": "message", "role": "user", "content": SCENE},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a red thing"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "sure?"}]},
        ],
    )
    path = f"/v1/responses/{response['id']}"
    items = server.client.get(f"{path}/input_items", params={"order": "asc"}).json()
    ResponseItemList.model_validate(items)
    assert [one["role"] for one in items["data"]] == ["developer", "user", "assistant", "user"]
    names = [one["id"] for one in items["data"]]
    for limit, after, found, more in (
        (3, None, names[:3], True),
        (4, None, names, False),
        (1, 1, names[2:3], True),
        (2, 1, names[2:], False),
        (2, 3, [], False),
    ):
        said = {"order": "asc", "limit": limit} | ({} if after is None else {"after": names[after]})
        page = server.client.get(f"{path}/input_items", params=said).json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (found, more)
    assert server.client.delete(path).json()["deleted"]
    for answer in (
        server.client.get(path),
        server.client.delete(path),
        server.client.get(f"{path}/input_items"),
    ):
        assert answer.status_code == 404
    gone = post(server, "go on", previous_response_id=response["id"])
    assert gone.status_code == 400
    assert gone.json()["error"]["code"] == "previous_response_not_found"


def kept(server: Server) -> int:
    return server.inside(lambda core: len(core.scheduler.sessions))


def test_what_is_not_stored(server: Server) -> None:
    before = kept(server)
    response = responded(server, "hello", store=False)
    assert response["store"] is False and kept(server) == before
    assert server.client.get(f"/v1/responses/{response['id']}").status_code == 404
    gone = post(server, "go on", previous_response_id=response["id"])
    assert gone.json()["error"]["param"] == "previous_response_id"


def test_instructions_stand_at_the_beginning(server: Server) -> None:
    first = responded(server, "hello", instructions="be kind")
    whole = server.client.post(
        "/v1/chat/completions",
        json=asked(
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello"},
            max_tokens=12,
        ),
    )
    assert text_of(first) == whole.json()["choices"][0]["message"]["content"]
    for given in ({}, {"instructions": "be kind"}):
        after = responded(server, "go on", previous_response_id=first["id"], **given)
        assert after["instructions"] == "be kind"
    other = post(server, "go on", previous_response_id=first["id"], instructions="be rude")
    assert other.status_code == 400 and other.json()["error"]["param"] == "instructions"


# What is wrong, and the field of this API, not of the chat that it becomes, that the error names.
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tools"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"text": {"format": {"type": "no such format"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "none"}}}}, "text.format"),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
        "input[0].tool_call_id",
    ),
    ({"input": []}, "input"),
    ({"input": [{"role": "assistant", "content": "hello"}]}, "input[-1].role"),
    ({"input": "long " * 2000, "mmkv": {"budget": "50%"}}, "input"),
    ({"stop": ["x"]}, "stop"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    *(
        ({"input": [{"role": "user", "content": [{"type": kind} | part]}]}, param)
        for kind, part, param in (
            ("input_file", {"file_id": "x"}, "input[0].content[0]"),
            ("input_image", {"file_id": "x"}, "input[0].content[0]"),
            ("input_image", {"image_url": "/etc/x"}, None),
        )
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str | None) -> None:
    answer = post(server, "hello", **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"], error
    assert error["param"] == param, error
    assert not re.search(r"\b(messages|max_tokens)\b", error["message"]), error


@pytest.mark.parametrize("instructions", [None, "be brief"])
def test_the_item_at_fault_is_counted_without_instructions(
    server: Server, instructions: str | None
) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": []}]
    error = post(server, "", instructions=instructions, input=said).json()["error"]
    assert error["param"] == "input[1].content" and error["message"].startswith("input[1]")


def test_a_thought_a_text_and_calls_in_a_row_are_one_reply() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "point", "arguments": "{}"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = [{"role": role, "content": text} for role, text in zip("uaua", "wxyz", strict=True)]
    for one in said:
        one["role"] = {"u": "user", "a": "assistant"}[one["role"]]
    items = [*said[:3], thought, said[3], call, call, said[1], thought, call]
    made, origins = responses_schema._messages([responses_schema.item_of(one) for one in items])
    found = [(one.content, one.reasoning_content, len(one.tool_calls or ())) for one in made]
    wanted = [("w", None, 0), ("x", None, 0), ("y", None, 0), ("z", "hm", 2), ("x", None, 0)]
    assert found == [*wanted, (None, "hm", 1)] and origins == [0, 1, 2, 3, 7, 8]


FUNCTION = {
    "type": "function",
    "name": "point",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALLING = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}


def test_a_response_calls_a_function_and_goes_on(server: Server) -> None:
    more: dict[str, Any] = CALLING | {"max_output_tokens": 200}
    first = responded(server, "go", **more)
    (call,) = first["output"]
    assert call["type"] == "function_call" and first["status"] == "completed"
    assert set(json.loads(call["arguments"])) == {"x"}
    url = picture_part(picture())["image_url"]["url"]
    shown = [{"type": "input_text", "text": "a screen"}, {"type": "input_image", "image_url": url}]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": shown}
    went_on = responded(server, "", input=[result], previous_response_id=first["id"], **more)
    assert went_on["usage"]["mmkv"]["resumed"] == first["usage"]["total_tokens"]
    assert went_on["usage"]["mmkv"]["pictures"] == 1
    assert [one["type"] for one in went_on["output"]] == ["function_call"]
    listed = server.client.get(f"/v1/responses/{went_on['id']}/input_items").json()
    ResponseItemList.model_validate(listed)
    assert listed["data"][0]["type"] == "function_call_output"
    # Without tools of its own it calls none, and goes on all the same.
    plain = responded(server, "so?", previous_response_id=went_on["id"], max_output_tokens=5)
    assert [one["type"] for one in plain["output"]] == ["message"]
    assert plain["usage"]["mmkv"]["resumed"] >= went_on["usage"]["total_tokens"]


def test_items_of_stored_responses_may_be_referred_to(server: Server) -> None:
    """As Vercel's SDK does: the same as if they were sent, and nothing is read twice."""
    first = responded(server, SCENE)
    (reply,) = first["output"]
    listed = server.client.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    asked, more = {"role": "user", "content": SCENE}, {"role": "user", "content": "go on"}
    wanted = responded(server, "", input=[asked, reply, more])
    for items in (
        [asked, {"type": "item_reference", "id": reply["id"]}, more],
        [{"id": listed[0]["id"]}, {"id": reply["id"], "type": None}, more],
    ):
        found = responded(server, "", input=items)
        assert text_of(found) == text_of(wanted)
        read_before = found["usage"]["input_tokens_details"]["cached_tokens"]
        assert read_before >= first["usage"]["total_tokens"] - 1
        shown = server.client.get(f"/v1/responses/{found['id']}/input_items").json()
        ResponseItemList.model_validate(shown)
        assert [one["type"] for one in shown["data"]] == ["message"] * 3
    called = responded(server, "go", **CALLING, max_output_tokens=200)
    (call,) = called["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    given = [{"role": "user", "content": "go"}, {"type": "item_reference", "id": call["id"]}]
    found = responded(server, "", input=[*given, result], **CALLING, max_output_tokens=200)
    read_before = found["usage"]["input_tokens_details"]["cached_tokens"]
    assert read_before == called["usage"]["total_tokens"]
    server.client.delete(f"/v1/responses/{called['id']}")
    for name in ("msg_none", call["id"], f"{reply['id']}9"):
        gone = post(server, "", input=[asked, {"type": "item_reference", "id": name}])
        error = gone.json()["error"]
        assert gone.status_code == 404 and error["code"] == "item_not_found"
        assert error["param"] == "input[1]"


def test_a_stored_response_is_not_streamed_again(server: Server) -> None:
    path = f"/v1/responses/{responded(server, 'hello')['id']}"
    assert server.client.get(path, params={"stream": "false"}).status_code == 200
    for params, name in (({"stream": "true"}, "stream"), ({"starting_after": 3}, "starting_after")):
        error = server.client.get(path, params=params).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)


def test_another_model(server: Server) -> None:
    assert post(server, "hello", model="gpt").status_code == 404


def test_half_characters_are_refused(server: Server) -> None:
    halves = {"metadata": {"a": "\ud800"}}
    for path, given in (
        ("/v1/responses", body("hello", **halves)),
        ("/v1/responses", body("\udfff")),
        ("/v1/sessions", halves),
    ):
        kind = {"Content-Type": "application/json"}
        answer = server.client.post(path, content=json.dumps(given), headers=kind)
        assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]


def test_a_response_that_is_cut_off_leaves_nothing(server: Server) -> None:
    first = responded(server, SCENE)
    before, held = kept(server), server.held
    given = body("what?", stream=True, previous_response_id=first["id"], max_output_tokens=200)
    with (
        paused_in_a_reply(server) as reached,
        server.client.stream("POST", "/v1/responses", json=given),
    ):
        assert reached.wait(60)
    server.wait_for(lambda core: core.scheduler.running == 0)
    server.wait_for(lambda core: len(core.scheduler.sessions) == before)
    assert server.held == held


def test_stored_responses_have_a_limit(folder: Path) -> None:
    with serving(lambda: load(folder), snapshot_bytes=0, store_bytes=1) as tight:
        response = responded(tight, "hello")
        assert tight.client.get(f"/v1/responses/{response['id']}").status_code == 404
        assert kept(tight) == 0
    with serving(lambda: load(folder), snapshot_bytes=0) as roomy:
        first, second = responded(roomy, "hello"), responded(roomy, "hello")
        path = f"/v1/responses/{first['id']}"
        shown = [roomy.client.get(f"{path}{end}").content for end in ("", "/input_items")]
        one = max(kept_bytes(roomy)) + sum(map(len, shown))
    with serving(lambda: load(folder), snapshot_bytes=0, store_bytes=2 * one + 100) as made:
        first, second = responded(made, "hello"), responded(made, "hello")
        responded(made, "go on", previous_response_id=first["id"])
        assert kept(made) == 2
        assert made.client.get(f"/v1/responses/{first['id']}").status_code == 200
        assert made.client.get(f"/v1/responses/{second['id']}").status_code == 404


def test_pictures_that_were_sent_count_in_the_limit(folder: Path) -> None:
    """What was sent is listed by input_items; the memory itself holds no URL."""
    with serving(lambda: load(folder), snapshot_bytes=0) as made:
        size = 4096  # more than what is shown of the response
        responded(made, SCENE)
        (pages,) = kept_bytes(made)
        urls = made.inside(
            lambda core: [
                part.url
                for kept in core.scheduler.sessions
                for message in kept.info.messages  # type: ignore[attr-defined]
                for part in message.media
            ]
        )
        assert urls == [""]
    padded = URL + "\n" * size  # spaces mean nothing in base64
    said = [{"type": "input_image", "image_url": padded}, SCENE[1]]
    with serving(lambda: load(folder), snapshot_bytes=0, store_bytes=pages + size) as made:
        assert made.client.get(f"/v1/responses/{responded(made, SCENE)['id']}").status_code == 200
        assert made.client.get(f"/v1/responses/{responded(made, said)['id']}").status_code == 404


def kept_bytes(server: Server) -> list[int]:
    return server.inside(
        lambda core: [one.bytes for one in core.scheduler.sessions]  # type: ignore[attr-defined]
    )


# What stored responses take, and how their input is listed.


def respond(server: Server, said: Any = "hello", **fields: Any) -> dict[str, Any]:
    return responded(server, "", input=said, **{"max_output_tokens": 3} | fields)


METADATA = {f"{at}": "x" * 512 for at in range(16)}
SCHEMA = {"type": "object", "description": "x" * 8000}
FORM = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
LARGE: list[dict[str, Any]] = [
    {"metadata": METADATA},
    {"text": FORM},
    {"top_logprobs": 20, "max_output_tokens": 12},
]


def test_what_is_shown_counts_in_the_limit(folder: Path) -> None:
    def stands(server: Server, response: dict[str, Any]) -> bool:
        return server.client.get(f"/v1/responses/{response['id']}").status_code == 200

    with serving(lambda: load(folder), snapshot_bytes=0) as made:
        assert all(stands(made, respond(made, **fields)) for fields in LARGE)
        pages = max(kept_bytes(made))
    with serving(lambda: load(folder), snapshot_bytes=0, store_bytes=pages + 4000) as made:
        for fields in LARGE:
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
        responses.keep(f"resp_{at}", stored)
        kept.bytes = 100  # others have taken the rest
        assert responses.find(f"resp_{at}", Caller("me", "me")) is stored
        responses.delete(f"resp_{at}")
    responses.keep("resp_1", stored)
    kept.lost = True
    with pytest.raises(ApiError, match="made way"):
        responses.find("resp_1", Caller("me", "me"))
    assert not responses._stored and responses._bytes == 0


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
