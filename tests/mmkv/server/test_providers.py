"""What the providers' own packages send and take: every field is known, every answer is valid.

The packages are openai and anthropic, and the zod schemas of Vercel's AI SDK as JSON schemas.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter
from typing_extensions import get_type_hints, is_typeddict

from mmkv import Engine
from mmkv.server.chat import ChatCall, CompletionRequest
from mmkv.server.messages import MessagesRequest, PromptRequest, ToolParam
from mmkv.server.responses_schema import ResponseRequest
from mmkv.server.schema import WHERE, ChatRequest, OpenModel, OtherPart, StrictModel
from tests.support.chat_models import picture, script
from tests.support.servers import MODEL, Server, picture_part, serving
from tests.support.tool_templates import function, save_seeing_tool_model

# It is imported in functions: two seconds, which every worker would take to collect these tests.
if find_spec("anthropic") is None:
    pytest.skip("pip install -e '.[test]'", allow_module_level=True)
jsonschema = pytest.importorskip("jsonschema", reason="pip install -e '.[test]'")

FORMS: list[tuple[type[OpenModel], str, str]] = [
    (ChatRequest, "openai.types.chat.completion_create_params", "CompletionCreateParams"),
    (CompletionRequest, "openai.types.completion_create_params", "CompletionCreateParams"),
    (ResponseRequest, "openai.types.responses.response_create_params", "ResponseCreateParams"),
    (ResponseRequest, "openai.types.beta.response_create_params", "ResponseCreateParams"),
    (MessagesRequest, "anthropic.types.message_create_params", "MessageCreateParams"),
    (MessagesRequest, "anthropic.types.beta.message_create_params", "MessageCreateParams"),
    (PromptRequest, "anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
    (PromptRequest, "anthropic.types.beta.message_count_tokens_params", "MessageCountTokensParams"),
]
# What the packages send as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


def _inside(hint: Any, wanted: Any) -> list[Any]:
    """Return the classes of a kind in an annotation."""
    if wanted(hint):
        return [hint]
    args = () if get_origin(hint) is Literal else get_args(hint)
    return [one for arg in args for one in _inside(arg, wanted)]


def _kinds(hint: Any) -> set[Any]:
    """Return the values of a ``type`` in an annotation."""
    if get_origin(hint) is Literal:
        return {*get_args(hint)}
    return {one for arg in get_args(hint) for one in _kinds(arg)}


def _fits(ours: type[BaseModel], theirs: Any) -> bool:
    """Whether objects of a type of theirs are read as one of our classes."""
    if ours is ToolParam:
        own = {"custom"}
    elif "type" in ours.model_fields:
        own = _kinds(ours.model_fields["type"].annotation)
    else:
        own = set()
    kinds = _kinds(get_type_hints(theirs, include_extras=True).get("type"))
    if ours.__name__ in ("Other", "OtherItem") or ours is OtherPart:
        return False
    return bool(own & kinds) or not (own and kinds)


def _unknown(ours: Any, theirs: Any, seen: set[Any], place: str = "") -> Iterator[str]:
    """Yield the fields of a type of theirs that are neither done, nor refused, nor without effect.

    An object that takes no other fields refuses them.
    """
    if (ours, theirs) in seen:
        return
    seen.add((ours, theirs))
    names = dict(ours.model_fields)
    for field in ours.model_fields.values():
        names |= dict.fromkeys(getattr(field.validation_alias, "choices", ()), field)
    for name, hint in get_type_hints(theirs, include_extras=True).items():
        if name in names:
            below, inside = _inside(names[name].annotation, _is_model), _inside(hint, is_typeddict)
            for one, other in itertools.product(below, inside):
                if _fits(one, other):
                    yield from _unknown(one, other, seen, f"{place}{name}.")
        elif issubclass(ours, OpenModel) and name not in {**ours.refused, **ours.idle}:
            yield place + name


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


@pytest.mark.parametrize(("ours", "module", "name"), FORMS, ids=lambda one: str(one)[-60:])
def test_every_field_of_a_package_is_done_or_refused_or_known_to_change_nothing(
    ours: type[OpenModel], module: str, name: str
) -> None:
    """A field of a newer package fails here, and has to be put into one of the tables."""
    try:
        params = getattr(import_module(module), name)
    except ModuleNotFoundError:  # of an older package
        pytest.skip(module)
    for theirs in _inside(params, is_typeddict):
        assert set(_unknown(ours, theirs, set())) <= HEADERS


@pytest.mark.parametrize("form", dict.fromkeys(one for one, *_ in FORMS))
def test_where_a_conversation_is_never_counts_as_without_effect(form: type[OpenModel]) -> None:
    def classes(one: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield one
        for field in one.model_fields.values():
            for inner in _inside(field.annotation, _is_model):
                yield from classes(inner)

    for one in {*classes(form)}:
        if issubclass(one, OpenModel):
            assert not one.refused.keys() & one.idle.keys(), one
            assert not one.idle.keys() & WHERE.keys() - {"compaction"}, one  # which is not counted
        else:
            assert issubclass(one, (StrictModel, OtherPart)) or one.__name__ == "OtherItem", one
    done = form.model_fields.keys() - form.idle.keys()
    assert WHERE.keys() - form.refused.keys() - done <= {"compaction"}


SAID = {"messages": [{"role": "user", "content": "q"}]}
LEAST = {
    "chat/completions": SAID,
    "completions": {"prompt": "q"},
    "responses": {"input": "q"},
    "messages": SAID | {"max_tokens": 1},
    "messages/count_tokens": SAID,
}
# A value of each that asks for something, and the forms that do it.
PLACES: dict[str, tuple[Any, set[str]]] = {
    "previous_response_id": ("resp_1", {"responses"}),
    "previous_message_id": ("msg_1", set()),
    "conversation": ({"id": "conv_1"}, set()),
    "thread": ({"type": "continue", "previous_message_id": "msg_1"}, {"messages"}),
    "prompt": ({"id": "pmpt_1"}, {"completions"}),
    "input": ("q", {"responses"}),
    "messages": (SAID["messages"], LEAST.keys() - {"completions", "responses"}),
    "instructions": ("be brief", {"responses"}),
    "container": ("container_1", set()),
    "compaction": ({"type": "compaction_20260901"}, {"messages/count_tokens"}),
    "multi_agent": ({"enabled": True}, set()),
    "moderation": ({"model": "m"}, set()),
    "context_management": ([{"type": "compaction", "compact_threshold": 1000}], set()),
    "background": (True, set()),
    "background_options": ({"completion_window": "24h"}, set()),
    "store": (True, {"responses"}),
    "mcp_servers": ([{"type": "url", "url": "https://mcp.example", "name": "m"}], set()),
}
# Others that stand deeper: the form, its fields, and the one that is named.
DEEPER: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"context_management": {"edits": [{"type": kind}]}}, "context_management")
    for kind in ("compact_20260112", "clear_tool_uses_20250919")
]
DEEPER += [
    ("messages", {"messages": [{"role": "user", "content": [block]}]}, "messages[0].content[0]")
    for block in (
        {"type": "compaction", "content": "what was said"},
        {"type": "container_upload", "file_id": "file_1"},
    )
]
DEEPER += [
    ("responses", {"input": [{"role": "user", "content": "q"}, item]}, "input[1]")
    for item in (
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "item_reference", "id": "msg_1"},
    )
]
DEEPER += [
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "audio": {"id": "a"}}, *SAID["messages"]]},
        "messages[0].audio",
    ),
    ("responses", {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    *(
        (
            path,
            {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
            "prompt_cache_options.comparison_response_id",
        )
        for path in ("chat/completions", "responses")
    ),
]


def test_where_a_conversation_is_has_its_answer_in_every_form(server: Server) -> None:
    """Refused with the field's name, which clients show; never 200 without what it asks for."""
    assert PLACES.keys() == WHERE.keys()
    rows = [
        (path, {name: value}, name)
        for path in LEAST
        for name, (value, done) in PLACES.items()
        if path not in done
    ]
    for path, fields, name in rows + DEEPER:
        for more in ({}, {"stream": True}) if "count" not in path else ({},):
            answer = server.client.post(
                f"/v1/{path}", json={"model": MODEL, **LEAST[path]} | fields | more
            )
            found = answer.status_code, answer.json()["error"]
            assert found[0] in (400, 404), (path, fields)
            named = found[1]["message" if path.startswith("messages") else "param"]
            assert name in named, (path, fields, found)


# Answers.


URL = picture_part(picture("red", (48, 40)))["image_url"]["url"]
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]},
}
MARK = function("mark", at={"enum": [1, 2]})
MARK["function"]["parameters"]["additionalProperties"] = False
PARAMS = MARK["function"]["parameters"]
CALL = '<tool_call>\n{"name": "mark", "arguments": {"at": 1}}\n</tool_call>'
THOUGHT = f"<think>\nwhy\n</think>\n\nwell:\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of a small Qwen3-VL whose template shows tools and thoughts."""
    folder = save_seeing_tool_model(tmp_path_factory.mktemp("tools"))

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=512, dtype="float32")

    with serving(load) as made:
        yield made


ASKED = SAID | {"max_tokens": 200}
TOOL = {"name": "mark", "description": "m", "input_schema": PARAMS}
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# By the path: requests for a reply, which thinks, answers and calls, or what is left of that.
BODIES: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        ASKED | {"tools": [MARK]},
        ASKED | {"tools": [MARK], "logprobs": True, "top_logprobs": 2, "stop": "well"},
        ASKED | {"tools": [MARK], "stop": "1"},
        ASKED | {"max_tokens": 8},
    ],
    "completions": [
        {"prompt": "q", "max_tokens": 9, "logprobs": 2},
        {"prompt": "q", "max_tokens": 9},
    ],
    "responses": [
        {"input": "q", "tools": [{"type": "function"} | MARK["function"] | {"strict": False}]},
        {"input": "q", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"input": "q", "max_output_tokens": 30, "store": False, "metadata": {"a": "b"}},
    ],
    "messages": [
        ASKED | {"tools": [TOOL]},
        ASKED | {"tools": [TOOL], "stop_sequences": ["1"], "thread": {"type": "create"}},
        ASKED | {"context_management": EDITS, "diagnostics": {"previous_message_id": "msg_1"}},
        ASKED | {"max_tokens": 20, "thinking": {"type": "adaptive", "display": "omitted"}},
    ],
}
VENDOR = Path(__file__).parents[2] / "support" / "ai_sdk_schemas.json"


def _types(path: str) -> tuple[list[TypeAdapter[Any]], list[TypeAdapter[Any]]]:
    """Return the packages' types of an answer and of an event."""
    from anthropic import types
    from anthropic.types import beta
    from openai.types import Completion, chat, responses

    own: dict[str, tuple[list[Any], list[Any]]] = {
        "chat/completions": ([chat.ChatCompletion], [chat.ChatCompletionChunk]),
        "completions": ([Completion], []),  # its type has no reason that is null
        "responses": ([responses.Response], [responses.ResponseStreamEvent]),
        "messages": (
            [types.Message, beta.BetaMessage],
            [types.RawMessageStreamEvent, beta.BetaRawMessageStreamEvent],
        ),
    }
    whole, events = own[path]
    return [*map(TypeAdapter, whole)], [*map(TypeAdapter, events)]


def _vendored(path: str) -> tuple[list[Any], list[Any]]:
    """Return what checks an answer and an event as Vercel's packages do."""
    form, known = path.partition("/")[0], json.loads(VENDOR.read_text())
    names = [name for name in known if name.split(",")[0] == form]
    assert names
    whole, events = (
        [jsonschema.Draft202012Validator(known[n]) for n in names if n.endswith("event") == events]
        for events in (False, True)
    )
    return whole, events


def _check(found: Any, types: list[TypeAdapter[Any]], schemas: list[Any]) -> None:
    for one in types:
        one.validate_python(found, strict=True)
    for schema in schemas:
        schema.validate(found)


@pytest.mark.parametrize("path", BODIES)
def test_answers_and_events_are_what_the_packages_expect(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Strictly: a null where a package takes none would be an error of its client."""
    engine, form = server.inside(lambda core: core.engine), path.partition("/")[0]
    whole, pieces = _vendored(path)
    answers, events = _types(path)
    for number, body in enumerate(BODIES[path]):
        said = THOUGHT if "tools" in body else "<think>\nhm\n</think>\n\nyes, it is so"
        script(monkeypatch, engine, [said, said])
        given = {"model": MODEL, "mmkv": {"resume": "never"}} | body
        if "thread" in body:
            del given["mmkv"]
        made = server.client.post(f"/v1/{path}", json=given)
        assert made.status_code == 200, made.text
        _check(made.json(), answers, whole)
        options = {"stream": True}
        if form in ("chat", "completions") and number:
            options["stream_options"] = {"include_usage": True}
        streamed = server.client.post(f"/v1/{path}", json=given | options)
        lines = [one[6:] for one in streamed.text.splitlines() if one.startswith("data: {")]
        assert len(lines) > 3
        for one in map(json.loads, lines):
            # The Python package drops it before it looks at a type.
            _check(one, events if one.get("type") != "ping" else [], pieces)


@pytest.mark.parametrize("path", BODIES)
def test_errors_are_what_the_packages_expect(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    parts, events = ChatCall.parts, ChatCall.events

    async def breaking(self: ChatCall, inner: Any = events) -> Any:
        async for one in inner(self):
            yield one
            raise RuntimeError

    form, (_, pieces) = path.partition("/")[0], _vendored(path)
    given = {"model": MODEL} | BODIES[path][0]
    shown = server.client.post(f"/v1/{path}", json=given | {"model": "other"}).json()
    assert shown["error"]["message"] and shown["error"]["type"]
    if form == "messages":
        from anthropic.types import ErrorResponse

        kinds: TypeAdapter[Any] = TypeAdapter(ErrorResponse)
        kinds.validate_python(shown | {"request_id": None}, strict=True)
        monkeypatch.setattr(ChatCall, "parts", lambda self: breaking(self, parts))
    else:
        monkeypatch.setattr(ChatCall, "events", breaking)
    answer = server.client.post(f"/v1/{path}", json=given | {"stream": True})
    lines = [one[6:] for one in answer.text.splitlines() if one.startswith("data: {")]
    for one in map(json.loads, lines):
        _check(one, [], pieces)
    assert "error" in lines[-1]


# Threads: conversations that the server holds for Anthropic's clients.


def _client(server: Server) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


def _runner(client: Any, steps: int, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the package's runner of so many steps, and where what it sends is noted."""
    from anthropic import beta_tool

    sent, create = [], client.beta.messages.create

    def noted(**given: Any) -> Any:
        sent.append((given.get("thread", {}).get("type"), len(given["messages"])))
        return create(**given)

    client.beta.messages.create = noted

    def mark(at: Literal[1, 2]) -> Any:
        return [{"type": "text", "text": str(at)}, IMAGE]

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=120,
        max_iterations=steps,
        system="be brief",
        tools=[beta_tool(mark, description="m")],
        messages=[{"role": "user", "content": [IMAGE, {"type": "text", "text": "go"}]}],
        **fields,
    )
    return runner, sent


@pytest.mark.parametrize("stream", [False, True])
def test_the_packages_tool_runner_goes_on_in_one_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """With a picture in each step, which sends what is new; nothing is read twice."""
    steps = 3
    engine = server.inside(lambda core: core.engine)
    script(monkeypatch, engine, [CALL] * (steps - 1) + ["done"])
    client = _client(server)
    runner, sent = _runner(client, 30, stream=stream)
    replies = [one.get_final_message() if stream else one for one in runner]
    assert [one.stop_reason for one in replies] == ["tool_use"] * (steps - 1) + ["end_turn"]
    assert sent == [("create", 1), *[("continue", 1)] * (steps - 1)]
    read = [one.usage.input_tokens for one in replies]
    held = [one.usage.cache_read_input_tokens for one in replies]
    assert len({*read[1:]}) == 1 and all(b > a for a, b in itertools.pairwise(held))


def test_a_thread_that_is_gone_is_begun_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room to store it: the package sends all again, as it does for Anthropic's code."""
    monkeypatch.setattr(server.state, "settings", replace(server.state.settings, store_bytes=0))
    script(monkeypatch, server.inside(lambda core: core.engine), [CALL] * 4 + ["done"])
    client = _client(server)
    runner, sent = _runner(client, 9)
    assert [one.stop_reason for one in runner][-1] == "end_turn"
    told = [("create", 1), ("continue", 1), ("create", 3), ("continue", 1)]
    assert sent == [*told, (None, 5), (None, 7), (None, 9)]


def test_what_a_thread_cannot_do_has_the_code_that_clients_know(server: Server) -> None:
    post, ask = server.client.post, {"model": MODEL, "temperature": 0} | ASKED | {"max_tokens": 3}
    first = post("/v1/messages", json=ask | {"thread": {"type": "create"}, "system": "a"})
    name = first.json()["id"]
    on = {"type": "continue", "previous_message_id": name}
    again = [post("/v1/messages", json=ask | {"thread": on}).json() for _ in range(2)]
    assert again[0]["usage"]["cache_read_input_tokens"] > 0
    assert again[0]["content"] == again[1]["content"] and again[0]["id"] != again[1]["id"]
    plain = post("/v1/messages", json=ask).json()["id"]  # of no thread
    for thread, more, status, code in (
        ({"type": "continue", "previous_message_id": "msg_none"}, {}, 404, "thread_not_found"),
        ({"type": "continue", "previous_message_id": plain}, {}, 404, "thread_not_found"),
        (on, {"system": "a"}, 400, "thread_fingerprint_mismatch"),
        (on, {"tools": [TOOL]}, 400, "thread_fingerprint_mismatch"),
        ({"type": "fork", "previous_message_id": name}, {}, 400, "thread_unsupported_request"),
        ({"type": "continue"}, {}, 400, "thread_unsupported_request"),
        (on | {"upto": 1}, {}, 400, "thread_unsupported_request"),
    ):
        for stream in (False, True):
            body = ask | {"thread": thread, "stream": stream} | more
            answer = post("/v1/messages", json=body)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["details"] == {"error_code": code}
    assert post("/v1/responses", json={"model": MODEL, "input": "q", "previous_response_id": name})
    assert server.client.get(f"/v1/responses/{name}").status_code == 404
