"""What requests may say, what makes no difference, and what is refused in one line."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from mmkv.prompt.template import ChatTemplate
from mmkv.server import schema
from mmkv.server.chat import CompletionRequest
from mmkv.server.errors import ApiError
from mmkv.server.messages import MessagesRequest, PromptRequest
from mmkv.server.prompts import Part
from mmkv.server.responses_schema import ResponseRequest
from mmkv.server.schema import (
    ChatMessage,
    ChatRequest,
    ReplyRequest,
    conversation,
    refuse_fields,
)
from tests.support.chat_models import picture
from tests.support.servers import MODEL, Server, asked, picture_part


def post(server: Server, path: str, body: str, **headers: str) -> httpx.Response:
    kind = {"Content-Type": "application/json"}
    return server.client.post(path, content=body, headers=kind | headers)


def respond(server: Server, said: Any = "hello", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": said, "max_output_tokens": 3} | fields
    return post(server, "/v1/responses", json.dumps(body))


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert "\n" not in error["message"] and "server" not in error["type"]
    return error


@pytest.mark.parametrize("depth", [130, 600, 900, 945, 947, 949])
def test_bodies_that_are_nested_deep(server: Server, depth: int) -> None:
    deep = "[" * depth + "]" * depth  # put in as text: Python's own encoder recurses, too
    form = {"type": "json_schema", "name": "a", "schema": {"a": "DEEP"}}
    for path, body in (
        ("/v1/chat/completions", asked("hello") | {"tools": "DEEP"}),
        ("/v1/chat/completions", asked("hello") | {"metadata": "DEEP"}),
        ("/v1/responses", {"model": MODEL, "input": "a", "text": {"format": form}}),
    ):
        text = json.dumps(body).replace('"DEEP"', deep)
        assert "nested" in error_of(post(server, path, text))["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(server: Server, value: str) -> None:
    for path, body in (
        ("/v1/responses", '{"model": "small", "input": "a", "text": {"format": {"x": %s}}}'),
        ("/v1/responses", '{"model": "small", "input": "a", "stream_options": {"x": %s}}'),
        ("/v1/chat/completions", json.dumps(asked("a"))[:-1] + ', "temperature": %s}'),
        ("/v1/sessions", '{"budget": %s}'),
    ):
        assert "NaN or infinite" in error_of(post(server, path, body % value))["message"]


def test_top_k_has_a_bound_and_can_be_off(server: Server) -> None:
    for wrong in (2**31, 10**30, -2):
        assert error_of(server.chat("hello", top_k=wrong))["param"] == "top_k"
        config = json.dumps({"top_k": wrong})
        wanted = "generation_config.top_k"
        assert error_of(server.chat("hello", generation_config=config))["param"] == wanted
    for good in (-1, 0, 2**31 - 1):
        assert server.chat("hello", top_k=good, temperature=1).status_code == 200


METADATA: list[Any] = [
    {f"{at}": "x" for at in range(17)},
    {"a" * 65: "x"},
    {"a": "x" * 513},
    {"a": 1},
]


@pytest.mark.parametrize("given", METADATA, ids=["pairs", "key", "value", "type"])
def test_metadata_has_openais_limits(server: Server, given: Any) -> None:
    most = {f"{at:064}": "x" * 512 for at in range(16)}
    for ask in (
        lambda metadata: server.chat("hello", metadata=metadata),
        lambda metadata: respond(server, metadata=metadata),
        lambda metadata: server.client.post("/v1/sessions", json={"metadata": metadata}),
    ):
        assert error_of(ask(given))["param"].startswith("metadata")
        assert ask(most).status_code == 200


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key", "service_tier"])
def test_names_are_short(server: Server, name: str) -> None:
    def chat(**fields: Any) -> httpx.Response:
        return server.chat("hello", **fields)

    def response(**fields: Any) -> httpx.Response:
        return respond(server, **fields)

    for ask in (chat, response):
        assert error_of(ask(**{name: "x" * 513}))["param"] == name
        assert ask(**{name: "x" * 512}).status_code == 200


FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"type": "json_object", "schema": {"type": "object"}}, "schema"),
    ({"type": "text", "colour": 1}, "colour"),
    ({"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}, "schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}, "json_schema.foo"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "json_schema.strict"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}, "json_schema.name"),
    ({"type": "json_schema", "json_schema": {}}, "json_schema.schema"),
    ({"type": "json_schema"}, "json_schema.schema"),
    ({"type": ["text"]}, ""),
]


@pytest.mark.parametrize(("given", "named"), FORMATS, ids=lambda one: str(one)[:40])
def test_a_format_has_known_fields(server: Server, given: Any, named: str) -> None:
    error = error_of(server.chat("hello", response_format=given))
    assert error["param"] == "response_format"
    assert error["message"].startswith(f"response_format.{named} " if named else "response_format ")


def test_a_format_of_a_response_is_named_as_it_is_there(server: Server) -> None:
    given = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "foo": 1}
    error = error_of(respond(server, text={"format": given}))
    assert error["param"] == "text.format"
    assert error["message"] == "text.format.foo is not a known field; leave it out"
    good = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": None}}
    assert server.chat("hello", response_format=good).status_code == 200


def test_the_header_on_how_to_resume(server: Server) -> None:
    """A response follows it; a turn of a session cannot."""
    answer = respond(server)
    body = json.dumps({"model": MODEL, "input": "new", "max_output_tokens": 3})
    header = {"X-Mmkv-Resume": "required"}
    assert post(server, "/v1/responses", body, **header).status_code == 409
    wrong = post(server, "/v1/responses", body, **{"X-Mmkv-Resume": "maybe"})
    assert error_of(wrong)["param"] == "X-Mmkv-Resume"
    never = {"X-Mmkv-Resume": "never"}
    after = body[:-1] + f', "previous_response_id": "{answer.json()["id"]}"}}'
    assert "X-Mmkv-Resume" in error_of(post(server, "/v1/responses", after, **never))["message"]
    session = server.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{session}/chat/completions"
    error = error_of(post(server, path, json.dumps(asked("hello")), **never))
    assert "X-Mmkv-Resume" in error["message"]
    assert post(server, path, json.dumps(asked("hello"))).status_code == 200


HINTS: list[dict[str, Any]] = [
    {"reasoning_effort": "high"},
    {"top_logprobs": 0},
    {"top_logprobs": 0, "logprobs": False},
    {"prompt_cache_key": "a", "prompt_cache_options": {"ttl": "1h"}},
    {"service_tier": "auto", "verbosity": "low", "prompt_cache_retention": "24h"},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False},
]


@pytest.mark.parametrize("fields", HINTS, ids=str)
def test_hints_change_nothing(server: Server, fields: dict[str, Any]) -> None:
    plain = server.chat("hello").json()["choices"]
    answer = server.chat("hello", **fields)
    assert answer.status_code == 200 and answer.json()["choices"] == plain


def test_hints_to_a_response_change_nothing(server: Server) -> None:
    reasoning = {"effort": "high", "summary": "auto"}
    hints = {"reasoning": reasoning, "include": ["reasoning.encrypted_content"]}
    said = [{"type": "input_text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    answer = respond(server, [{"role": "user", "content": said}], temperature=0, **hints)
    plain = respond(server, temperature=0).json()
    assert answer.status_code == 200
    assert answer.json()["output"][0]["content"] == plain["output"][0]["content"]
    items = server.client.get(f"/v1/responses/{answer.json()['id']}/input_items").json()["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": "hello"}]


def test_a_part_may_say_what_is_to_be_cached(server: Server) -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    parts = [picture_part(picture("red", (48, 40))), {"type": "text", "text": "what?"}]
    plain = server.chat({"role": "user", "content": parts}).json()["choices"]
    hinted = [part | control for part in parts]
    assert server.chat({"role": "user", "content": hinted}).json()["choices"] == plain


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "text", "text": "a", "colour": 1}, "colour"),
        ({"type": "image_url", "image_url": {"url": "data:,", "size": 2}}, "image_url.size"),
        ({"type": "video_url", "video_url": "data:,", "fps": 2}, "fps"),
    ],
)
def test_a_field_that_a_part_does_not_have_is_named(server: Server, part: Any, place: str) -> None:
    where = "messages[0].content[0]"
    error = error_of(server.chat({"role": "user", "content": [part]}))
    assert error["message"] == f"{where}.{place} is not a known field; leave it out"
    assert error["param"] == where


def test_the_field_at_fault_is_named_in_the_input_of_a_response(server: Server) -> None:
    part = {"type": "input_text", "text": "a", "colour": 1}
    error = error_of(respond(server, [{"role": "user", "content": [part]}]))
    assert error["message"] == "input[0].content[0].colour is not a known field; leave it out"
    item = {"type": "message", "role": "king", "content": "a"}
    assert error_of(respond(server, [item]))["message"].startswith("input[0].role: ")
    error = error_of(respond(server, [{"role": "king", "content": "a"}]))
    assert error["param"] == "input.0.role" and error["message"].startswith("input.0.role: ")
    assert error_of(respond(server, []))["param"] == "input"
    assert error_of(server.chat("hello", stop=5))["param"] == "stop"


CLIENTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"store": False, "service_tier": "auto"}, ["service_tier"]),
    ({"num_ctx": 4096, "keep_alive": "5m", "prediction": None}, ["keep_alive", "num_ctx"]),
    ({"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    ({"verbosity": "low", "metadata": {"a": "b"}, "user": "me"}, ["metadata", "verbosity"]),
    ({"a\nb\u202e,": {"c": [1]}}, ["a\\nb\\u202e"]),
    ({"skip_special_tokens": True, "n": 1, "best_of": 1, "tools": []}, []),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "named"), CLIENTS, ids=lambda one: str(one)[:30])
def test_fields_without_effect_are_named(
    server: Server, fields: dict[str, Any], named: list[str], stream: bool
) -> None:
    plain, answer = (
        server.chat("hello", stream=stream),
        server.chat("hello", stream=stream, **fields),
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-mmkv-ignored", "") == ", ".join(named)
    assert "x-mmkv-ignored" not in plain.headers

    def said(text: str) -> list[str]:
        return re.findall(r'"(?:content|delta)": ?[^,}]*', text)

    assert said(answer.text) == said(plain.text) != []


def test_fields_of_messages_are_named_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"role": "assistant", "content": "b", "reasoning_content": "hm", "own": 1}
    messages = [{"role": "user", "content": "a", "own": 0}, said, {"role": "user", "content": "c"}]
    body = asked("") | {"messages": messages, "files": []}
    server.state.unread.clear()
    with caplog.at_level("WARNING", "mmkv.server"):
        for _ in range(2):
            answer = post(server, "/v1/chat/completions", json.dumps(body))
            found = answer.headers["x-mmkv-ignored"]
            assert found == "files, messages.own"
    logged = [one.getMessage() for one in caplog.records if "no effect" in one.msg]
    assert logged == [f"fields of a request have no effect here: {found}"]
    asks = {"model": MODEL, "input": [{"role": "user", "content": "a", "mark": 1}], "colour": 2}
    asks |= {"reasoning": {"effort": "low", "shade": 3}, "text": {"verbosity": "low"}}
    answer = post(server, "/v1/responses", json.dumps(asks))
    assert answer.headers["x-mmkv-ignored"] == (
        "colour, input.mark, reasoning, reasoning.shade, text.verbosity"
    )
    session = server.client.post("/v1/sessions", json={}).json()["id"]
    answer = post(
        server, f"/v1/sessions/{session}/chat/completions", json.dumps(asked("a") | {"b": 1})
    )
    assert answer.headers["x-mmkv-ignored"] == "b"


def test_the_names_of_a_header_are_few_and_short(server: Server) -> None:
    fields = {"x" * 5000: 1, **{f"y{number:03}": 1 for number in range(200)}}
    found = server.chat("hello", **fields).headers["x-mmkv-ignored"].split(", ")
    assert len(found) == 32 and found[0] == "x" * 64 and found[-1] == "y030"


def test_a_strict_server_refuses_what_it_does_not_know(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.state, "settings", replace(server.state.settings, strict=True))
    for fields, place in (
        ({"a\nb\u202e": 1}, "a\\nb\\u202e"),
        ({"messages": [{"role": "user", "content": "a", "id": 1}]}, "messages[0].id"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    ):
        error = error_of(server.chat("hello", **fields))
        assert error["message"] == f"{place} is not a known field; leave it out"
        assert error["param"] == place
    error = error_of(respond(server, reasoning={"effort": "high", "colour": 1}))
    assert error["message"] == "reasoning.colour is not a known field; leave it out"
    answer = server.chat("hello", metadata={"a": "b"}, tools=[], best_of=1)
    assert answer.status_code == 200 and answer.headers["x-mmkv-ignored"] == "metadata"


_SAID = [{"role": "user", "content": "q"}]
KINDS: dict[type[ReplyRequest], dict[str, Any]] = {
    ChatRequest: {"messages": _SAID},
    CompletionRequest: {"prompt": "q"},
    ResponseRequest: {"input": "q"},
    MessagesRequest: {"messages": _SAID, "max_tokens": 1},
    PromptRequest: {"messages": _SAID},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_an_answer_is_done_or_refused_by_name(kind: type[ReplyRequest]) -> None:
    asked = {"model": MODEL} | KINDS[kind]
    for name in kind.refused.keys() - kind.model_fields.keys():
        harmless = kind.refused[name]
        with pytest.raises(ApiError, match=f"^{name} is not supported") as found:
            refuse_fields(kind.model_validate(asked | {name: "other"}))
        assert (found.value.code, found.value.param) == ("unsupported_parameter", name)
        for value in harmless:
            refuse_fields(kind.model_validate(asked | {name: value}))


@pytest.fixture
def thinking(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Give the server's template a thought to leave out, of 12 bytes."""
    core = server.state.engine_thread.core
    processor = core.engine.processor
    source = (
        f"{processor.template.source}{{% if enable_thinking is false %}}(no thought){{% endif %}}"
    )
    template = ChatTemplate(processor.tokenizer, source, parts=True)
    monkeypatch.setattr(processor, "template", template)
    facts = replace(server.state.facts, template_variables=template.variables)
    monkeypatch.setattr(server.state, "facts", facts)
    return server


@pytest.mark.parametrize("given", ["enable_thinking", "chat_template_kwargs", "response"])
def test_a_request_tells_the_template_whether_to_think(thinking: Server, given: str) -> None:
    def read(values: dict[str, Any]) -> tuple[int, httpx.Response]:
        fields = values if given == "enable_thinking" else {"chat_template_kwargs": values}
        said = f"how? {given}"
        if given == "response":
            answer = respond(thinking, said, **fields)
            return answer.json()["usage"]["input_tokens"], answer
        answer = thinking.chat(said, **fields)
        return answer.json()["usage"]["prompt_tokens"], answer

    plain, _ = read({})
    off, answer = read({"enable_thinking": False})
    assert off - plain == len("(no thought)") and "x-mmkv-ignored" not in answer.headers
    for _ in range(2):  # found again, each in its own kind of memory
        assert read({"enable_thinking": True})[0] == plain
        assert read({"enable_thinking": False})[0] == off
    if given != "enable_thinking":
        names = {"colour": "red", "messages": 3}
        count, answer = read(names)
        assert count == plain and answer.headers["x-mmkv-ignored"] == (
            "chat_template_kwargs.colour, chat_template_kwargs.messages"
        )


def test_what_a_template_is_told_is_plain_and_small(thinking: Server) -> None:
    for wrong in ({"a": "<|im_end|>"}, {"a": [1]}, {"a" * 65: 1}, {"a": "x" * 65}, {"a": {"b": 1}}):
        error = error_of(thinking.chat("hello", chat_template_kwargs=wrong))
        assert error["param"].startswith("chat_template_kwargs")
    error = error_of(thinking.chat("hello", chat_template_kwargs={f"a{n}": n for n in range(17)}))
    assert error["param"] == "chat_template_kwargs"


def test_the_repetition_penalty_has_two_names(server: Server) -> None:
    plain, one, other = (
        server.chat("hello", max_tokens=40, **fields).json()["choices"][0]["message"]["content"]
        for fields in ({}, {"repetition_penalty": 1.9}, {"repeat_penalty": 1.9})
    )
    assert plain != one == other


def test_a_limit_of_minus_one_is_none(server: Server) -> None:
    """As llama.cpp and LM Studio have it; others are as they were."""
    for most in (-1, 5):  # the newer name counts
        answer = server.chat("hello", max_tokens=most, max_completion_tokens=3)
        assert answer.json()["usage"]["completion_tokens"] <= 3
    for fields in ({"max_tokens": -1, "max_completion_tokens": 3}, {"max_tokens": -1}):
        long = "max_completion_tokens" not in fields
        answer = server.chat("hello", logit_bias={"70": 100}, **fields)
        assert answer.json()["usage"]["completion_tokens"] == (512 if long else 3)
    assert error_of(server.chat("hello", max_tokens=-2))["param"] == "max_tokens"


def test_thoughts_of_a_history_have_several_forms() -> None:
    for content, more in (
        ([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}], {}),
        (
            [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "a"},
            ],
            {},
        ),
        ("a", {"reasoning": "hm"}),
        ("a", {"reasoning_content": "hm"}),
    ):
        said = {"role": "assistant", "content": content, **more}
        given = [said, {"role": "user", "content": "b"}]
        first, _ = conversation([ChatMessage.model_validate(one) for one in given], True, True)
        assert (first.thought, first.texts) == ("hm", ["a"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_ends_at_a_token_that_is_named(server: Server, stream: bool) -> None:
    """A bias makes it the likeliest one; without the end the reply would be made of it."""
    fields = {"logit_bias": {"70": 100}, "temperature": 0, "max_tokens": 3}
    assert server.chat("hello", **fields).json()["usage"]["completion_tokens"] == 3
    answer = server.chat("hello", stop_token_ids=[5, 70], stream=stream, **fields)
    assert '"finish_reason":"stop"' in answer.text.replace(" ", "")
    assert not re.search(r'"content": ?"[^"]', answer.text)
    most = server.state.facts.vocabulary
    assert server.chat("hello", stop_token_ids=[most - 1]).status_code == 200
    error = error_of(server.chat("hello", stop_token_ids=[most]))
    assert error["param"] == "stop_token_ids"


def test_a_method_that_is_not_allowed_names_those_that_are(server: Server) -> None:
    for path, methods in (
        ("/v1/models", {"GET"}),
        ("/v1/responses/x", {"GET", "DELETE"}),
        ("/v1/sessions", {"GET", "POST"}),
    ):
        answer = server.client.put(path)
        assert answer.status_code == 405 and answer.json()["error"]["message"]
        assert set(answer.headers["Allow"].split(", ")) == methods


@pytest.mark.parametrize("path", ["chat/completions", "responses", "sessions"])
def test_a_body_that_is_not_there_is_told(server: Server, path: str) -> None:
    told = server.client.post(f"/v1/{path}")
    assert told.status_code == 400 and "has no body" in told.json()["error"]["message"]


def test_a_body_that_is_no_json_names_no_field(server: Server) -> None:
    error = error_of(post(server, "/v1/chat/completions", '{"model": x}'))
    assert error["param"] is None and "character 10" in error["message"]


@pytest.mark.parametrize("stream", [None, False])
@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_obfuscation": False}])
def test_options_of_a_stream_need_a_stream(
    server: Server, stream: bool | None, options: dict[str, Any]
) -> None:
    """OpenAI: only set this when you set ``stream: true``."""
    name = server.client.post("/v1/sessions", json={}).json()["id"]

    def turn(**fields: Any) -> httpx.Response:
        body = asked("hello", max_tokens=3, **fields)
        return server.client.post(f"/v1/sessions/{name}/chat/completions", json=body)

    for ask in (turn, lambda **fields: server.chat("hello", **fields), partial(respond, server)):
        error = error_of(ask(stream=stream, stream_options=options))
        assert error["param"] == "stream_options" and "stream: true" in error["message"]
        assert ask(stream=True, stream_options=options).status_code == 200


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_what_a_model_takes_of_pictures_and_videos(role: str) -> None:
    """By what it sees, by who shows it, and not without an address."""
    for kind, sees, watches in itertools.product(("image", "video"), (True, False), (True, False)):
        taken = role in ("user", "tool") and (sees if kind == "image" else watches)
        with contextlib.nullcontext() if taken else pytest.raises(ApiError):
            schema._require_taken(Part(kind, url="x"), role, sees, watches, "messages[0]")
        with pytest.raises(ApiError, match="empty url"):
            schema._require_taken(Part(kind), role, sees, watches, "messages[0]")


def test_what_has_no_effect_on_a_picture_makes_no_other_prompt() -> None:
    given = {"detail": "low", "format": "image/png", "max_pixels": 64}
    image = {"type": "image_url", "image_url": {"url": "u"} | given}
    video = {"type": "video_url", "video_url": {"url": "v", "fps": 2}}
    asks = {"role": "user", "content": [image, video]}
    made = ChatRequest.model_validate({"model": "m", "messages": [asks]}).messages[0]
    parts = [schema._part(one, "content") for one in made.content]  # type: ignore[union-attr]
    assert [(one.kind, one.url, one.options) for one in parts] == [
        ("image", "u", (("max_pixels", 64),)),
        ("video", "v", (("fps", 2),)),
    ]
