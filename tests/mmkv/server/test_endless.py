"""Conversations over HTTP that go on beyond the model's context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmkv import Budget, Engine
from mmkv.server.engine_thread import _facts
from tests.support.chat_models import byte_tokenizer, picture, save_qwen3_vl
from tests.support.servers import MODEL, Server, asked, picture_part, serving

CONTEXT, TURNS = 160, 5  # a turn has over 80 tokens


def load(folder: Path, **options: Any) -> Engine:
    given = {"gates": "random", "policy": "dbtrimkv", "budget": 12, "dtype": "float32"} | options
    return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **given)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("short"), positions=CONTEXT)


@pytest.fixture(scope="module")
def servers(
    short: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Yield two servers that share their sessions; the second has little room for texts."""
    where = {"session_folder": tmp_path_factory.mktemp("kept"), "keep_sessions": True}
    small = {"max_sessions": 1, "max_queue": 1, "max_running": 1}
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(serving(lambda: load(short), **where, **more))
            for more in ({}, small)
        )
        yield one, two


def message(turn: int) -> dict[str, Any]:
    text = {"type": "text", "text": f"{turn}" + "?" * 70}
    shown = [picture_part(picture("red", (24, 24)))] if turn % 3 == 0 else []
    return {"role": "user", "content": [*shown, text]}


def said(answer: httpx.Response) -> tuple[str, dict[str, Any]]:
    body = answer.json()
    assert answer.status_code == 200, body
    return body["choices"][0]["message"]["content"], body["usage"]


def test_a_conversation_goes_on_past_the_context(servers: tuple[Server, Server]) -> None:
    """A session, and the same messages sent whole each time; a fork, at another server."""
    one, two = servers
    symbols = byte_tokenizer().get_vocab().items()  # texts that come back are tokenized alike
    plain = {"logit_bias": {str(at): -100 for name, at in symbols if not name.isascii()}}
    name = one.client.post("/v1/sessions", json={}).json()["id"]
    path, history = "/v1/sessions/{}/chat/completions", []
    for turn in range(TURNS):
        history.append(message(turn))
        given = asked(history[-1], **plain)
        text, usage = said(one.client.post(path.format(name), json=given))
        replayed, again = said(one.chat(*history, cache_salt="chat", **plain))
        assert replayed == text and again["prompt_tokens"] == usage["prompt_tokens"]
        resumed = again["prompt_tokens_details"]["cached_tokens"]
        assert (resumed > 0) == (turn > 0), "only what is new is read"
        history.append({"role": "assistant", "content": text})
    assert usage["prompt_tokens"] > 2 * CONTEXT
    assert usage["mmkv"]["compactions"] == again["mmkv"]["compactions"] >= 2

    history.append(message(TURNS))
    _, usage = said(one.chat(*history, cache_salt="another"))  # from its beginning
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["mmkv"]["compactions"] >= 2
    lines = one.chat(*history, stream=True).text
    assert lines.rstrip().endswith("data: [DONE]") and "error" not in lines
    fork = one.client.post(f"/v1/sessions/{name}/fork").json()["id"]
    body = asked(message(TURNS))
    here, there = (
        said(server.client.post(path.format(which), json=body))
        for server, which in ((one, fork), (two, name))  # the second from the session's file
    )
    assert here[0] == there[0]
    assert there[1]["mmkv"]["compactions"] >= 2 and there[1]["mmkv"]["resumed"] > 2 * CONTEXT
    for server, which in ((one, fork), (two, name)):
        assert server.client.delete(f"/v1/sessions/{which}").status_code == 200


def test_responses_go_on_past_the_context(servers: tuple[Server, Server]) -> None:
    before, read = None, 0
    for turn in range(TURNS):
        body = {"model": MODEL, "input": f"{turn}" + "?" * 70, "max_output_tokens": 5}
        body |= {} if before is None else {"previous_response_id": before}
        answer = servers[0].client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        before, read = answer.json()["id"], answer.json()["usage"]["input_tokens"]
    assert read > 2 * CONTEXT


def test_bounds_that_are_left(servers: tuple[Server, Server]) -> None:
    one, two = servers
    model = one.client.get("/v1/models").json()["data"][0]
    most = one.state.settings.kept_tokens(CONTEXT)
    assert (model["max_model_len"], model["mmkv"]["trained_context"]) == (most, CONTEXT)
    text = "a" * (3 * CONTEXT)
    assert one.client.post(
        "/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 2}
    ).is_success
    answer = one.chat("a" * (2**17 + 200))
    assert answer.status_code == 400 and answer.json()["error"]["message"] == (
        "there are more tokens than the 131,072 tokens that one message may have; send it in "
        "several messages"
    )
    # A share of the tokens grows with the conversation.
    answer = one.chat(text, mmkv={"budget": "50%"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "in entries or bytes" in error["message"]

    few = two.client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert few == (1 + 1 + 3) * CONTEXT
    answer = two.chat("b" * few)
    assert answer.status_code == 400, answer.text
    assert "whose texts this server keeps; begin a new one" in answer.json()["error"]["message"]
    name = two.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}/chat/completions"
    said(two.client.post(path, json=asked("c" * (few // 2))))
    said(two.chat("d" * (few // 3)))  # a copy stays, which makes room
    said(two.chat("e" * (few // 3)))
    answer = two.chat("f" * (few // 2))
    assert answer.status_code == 503 and answer.json()["error"]["unit"] == "tokens"
    assert "close a session" in answer.json()["error"]["message"]
    said(two.client.post(path, json=asked("g")))  # its own texts count once
    answer = two.client.post(path, json=asked("h" * (few // 2)))  # and with those that come
    assert answer.status_code == 400, answer.text
    assert two.client.delete(f"/v1/sessions/{name}").status_code == 200
    said(two.chat("f" * (few // 2)))


def test_only_what_evicts_goes_on(short: Path) -> None:
    full = {"policy": "full", "budget": None, "gates": None}
    for options, goes_on in (({}, True), (full, False), ({"endless": False}, False)):
        facts = _facts(load(short, **options), 1.0, 10**6)
        assert (facts.unbound is not None) == (options is full)
        most = [facts.most_tokens(one) for one in (Budget.of(12), Budget.fraction(0.5))]
        assert most == [10**6 if goes_on else CONTEXT, CONTEXT]  # a share ends at the context
