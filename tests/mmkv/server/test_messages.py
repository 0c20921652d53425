"""/v1/messages over HTTP: chats in Anthropic's form, and what their prompts take."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmkv import Engine
from mmkv.calls.parser import CallEnd, CallPiece, CallStart, TextPiece, ThoughtPiece
from mmkv.resources import bundled_model
from mmkv.server.messages import MessageBuilder, MessagesCall, MessagesRequest
from tests.support.chat_models import picture, script
from tests.support.servers import MODEL, Server, picture_part, serving, stopped, until
from tests.support.tool_templates import TOOLS as SOME_TOOLS
from tests.support.tool_templates import function, save_seeing_tool_model

# A call of it ends soon, whatever a model with random weights would write.
MARK = function("mark", where={"enum": ["left", "right"]}, again={"type": "boolean"})
MARK["function"]["parameters"]["additionalProperties"] = False
TOOLS = [*SOME_TOOLS, MARK]
TOOL_PARAMS = [
    {
        "name": one["function"]["name"],
        "description": one["function"]["description"],
        "input_schema": one["function"]["parameters"],
    }
    for one in TOOLS
]
FORCED = {"type": "tool", "name": "mark"}
CALL = '<tool_call>\n{"name": "press", "arguments": {"key": "ä<b>"}}\n</tool_call>'


def image(colour: str = "red", size: tuple[int, int] = (48, 40)) -> dict[str, Any]:
    url = picture_part(picture(colour, size))["image_url"]["url"]
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content} | fields


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_tool_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: Engine.from_pretrained(folder, dtype="float32")) as made:
        yield made


def asked(*messages: Any, **fields: Any) -> dict[str, Any]:
    """Return a body; contents are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": one} for at, one in enumerate(messages)]
    return {"model": MODEL, "max_tokens": 8, "temperature": 0, "messages": said} | fields


def post(server: Server, *messages: Any, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/messages", json=asked(*messages, **fields))


def message(server: Server, *messages: Any, **fields: Any) -> dict[str, Any]:
    answer = post(server, *messages, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def counted(server: Server, *messages: Any, **fields: Any) -> int:
    body = asked(*messages, **fields)
    for name in ("max_tokens", "temperature"):
        del body[name]
    answer = server.client.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def streamed(server: Server, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return a stream's events, each named before its data."""
    found = []
    for block in post(server, *messages, stream=True, **fields).text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events make, as a client does."""
    made: dict[str, Any] = events[0]["message"]
    pieces: list[str] = []
    for event in events[2:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(made["content"])
            made["content"].append(event["content_block"])
            pieces = []
        elif event["type"] == "content_block_delta":
            block, delta = made["content"][event["index"]], event["delta"]
            kind, given = delta["type"].removesuffix("_delta"), delta
            if kind == "input_json":
                pieces.append(given["partial_json"])
            else:
                block[kind] += given[kind]
        elif event["type"] == "content_block_stop" and pieces:
            with contextlib.suppress(ValueError):  # it was cut off
                made["content"][event["index"]]["input"] = json.loads("".join(pieces))
        elif event["type"] == "message_delta":
            made |= event["delta"]
            made["usage"] |= event["usage"]
    return made


def prompt_of(usage: dict[str, Any]) -> int:
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return read + usage["cache_creation_input_tokens"]


SCENE = [image(), text("what is red here?")]


def test_a_message_is_the_reply_of_a_chat(server: Server) -> None:
    made = message(server, SCENE, "a thing", "where?", system=[text("be"), text("short")])
    whole = server.chat(
        {"role": "system", "content": "be\n\nshort"},
        {"role": "user", "content": [picture_part(picture("red", (48, 40))), SCENE[1]]},
        {"role": "assistant", "content": "a thing"},
        {"role": "user", "content": "where?"},
        max_tokens=8,
        mmkv={"resume": "never"},
    ).json()
    choice = whole["choices"][0]
    assert made["content"] == [text(choice["message"]["content"])]
    assert made["stop_reason"] == "max_tokens" and choice["finish_reason"] == "length"
    assert made["stop_sequence"] is None and made["id"].startswith("msg_")
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", MODEL)
    assert prompt_of(made["usage"]) == whole["usage"]["prompt_tokens"]
    assert made["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    assert made["usage"]["output_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert made["usage"]["mmkv"]["pictures"] == 1


def test_the_last_message_of_the_assistant_is_continued(server: Server) -> None:
    made = message(server, SCENE, "It is (")
    shown = {"role": "user", "content": [picture_part(picture("red", (48, 40))), SCENE[1]]}
    begun = {"role": "assistant", "content": "It is ("}
    whole = server.chat(shown, begun, max_tokens=8, mmkv={"resume": "never"}).json()
    assert made["content"] == [text(whole["choices"][0]["message"]["content"])]
    assert prompt_of(made["usage"]) == whole["usage"]["prompt_tokens"]
    assert counted(server, SCENE, "It is (") == prompt_of(made["usage"])


def test_forced_calls_are_those_of_a_chat(server: Server) -> None:
    fields = {"tools": TOOL_PARAMS, "tool_choice": FORCED, "max_tokens": 120}
    made = message(server, "go", **fields)
    (block,) = made["content"]
    whole = server.chat(
        "go",
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "mark"}},
        max_tokens=120,
    ).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert block["name"] == "mark" and block["type"] == "tool_use"
    assert block["caller"] == {"type": "direct"}
    assert block["input"] == json.loads(call["function"]["arguments"])
    assert block["input"].keys() == {"where", "again"} and made["stop_reason"] == "tool_use"
    assert prompt_of(made["usage"]) == whole["usage"]["prompt_tokens"]
    assert counted(server, "go", tools=TOOL_PARAMS, tool_choice=FORCED) == prompt_of(made["usage"])
    assert counted(server, "go") < prompt_of(made["usage"])


def test_thoughts_that_are_not_to_be_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.inside(lambda core: core.engine)
    script(monkeypatch, engine, ["<think>\nhm\n</think>\n\nyes"] * 2)
    fields: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}}
    fields["max_tokens"] = 99
    made, found = message(server, "q", **fields), put_together(streamed(server, "q", **fields))
    assert made["content"] == found["content"]
    assert made["content"][0]["thinking"] == "" and made["content"][0]["signature"]
    assert made["content"][1] == text("yes") and made["stop_reason"] == "end_turn"


def test_thinking_is_the_templates(server: Server) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    on, off = (
        counted(server, "q", thinking=thinking),
        counted(server, "q", thinking={"type": "disabled"}),
    )
    assert off - on == 6  # two marks and four line ends, of a thought that is empty
    assert on == counted(server, "q") == counted(server, "q", thinking={"type": "adaptive"})


@pytest.mark.parametrize(
    ("said", "stop", "reason", "kinds"),
    [
        ("one two three", ["nope", " three", "two"], ("stop_sequence", "two"), ["text"]),
        ("one two", ["three"], ("end_turn", None), ["text"]),
        (CALL, ["three"], ("tool_use", None), ["tool_use"]),
        (CALL, ["<b"], ("stop_sequence", "<b"), ["tool_use"]),  # half a call is not to be run
        (f"go {CALL}", ["name"], ("stop_sequence", "name"), ["text"]),  # none has begun
    ],
)
def test_why_a_reply_ends(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    stop: list[str],
    reason: tuple[str, str | None],
    kinds: list[str],
) -> None:
    fields: dict[str, Any] = {"stop_sequences": stop, "tools": TOOL_PARAMS, "max_tokens": 99}
    engine = server.inside(lambda core: core.engine)
    for ask in (message, lambda *given, **more: put_together(streamed(*given, **more))):
        script(monkeypatch, engine, [said])
        made = ask(server, "q", **fields)
        assert (made["stop_reason"], made["stop_sequence"]) == reason
        assert [one["type"] for one in made["content"]] == kinds


def test_a_call_that_is_cut_off_has_no_input(server: Server) -> None:
    fields: dict[str, Any] = {"tools": TOOL_PARAMS, "tool_choice": FORCED, "max_tokens": 40}
    made = message(server, "go", **fields)
    (block,) = made["content"]
    assert made["stop_reason"] == "max_tokens"
    assert (block["name"], block["input"]) == ("mark", {})
    events = streamed(server, "go", **fields)
    pieces = [
        one["delta"]["partial_json"] for one in events if "delta" in one and one.get("index") == 0
    ]
    assert "".join(pieces).startswith('{"wh')


START, PIECE, END = CallStart(0, "c", "press"), CallPiece(0, '{"key": 1}'), CallEnd(0)
BROKEN = [START, CallPiece(0, '{"key": 1e999}'), END]  # which JSON cannot hold


@pytest.mark.parametrize(
    ("events", "ended", "blocks", "reason"),
    [
        ([START, PIECE, END], ("calls", None), [{"key": 1}], "tool_use"),
        ([START, PIECE], ("length", None), [{}], "max_tokens"),  # without its end
        ([START, PIECE, END, START, PIECE], ("stop", "x"), [{"key": 1}, {}], "stop_sequence"),
        (BROKEN, ("calls", None), [{}], "end_turn"),
        ([*BROKEN, START, PIECE, END], ("calls", "x"), [{}, {"key": 1}], "stop_sequence"),
        ([TextPiece("a"), TextPiece("b"), START, PIECE, END], ("eos", "x"), ["ab", {"key": 1}], ""),
        ([ThoughtPiece("hm"), TextPiece("a")], ("context", None), ["hm", "a"], ""),
    ],
)
def test_blocks_are_whole_or_empty(
    events: list[Any], ended: tuple[str, str | None], blocks: list[Any], reason: str
) -> None:
    """A call that cannot be run has no input, and the reply then ends for another reason."""
    for shows in (True, False):
        made = MessageBuilder(shows)
        told = [*made.take(events), *made.close()]
        begun = [one["index"] for one in told if one["type"] == "content_block_start"]
        assert begun == list(range(len(blocks)))
        given = [one.get("input", one.get("text", one.get("thinking"))) for one in made.content]
        assert given == [one if shows or one != "hm" else "" for one in blocks]
        end = made.stop(*ended)
        wanted = {"eos": "end_turn", "context": "model_context_window_exceeded"}
        assert end["stop_reason"] == (reason or wanted[ended[0]])
        assert end["stop_sequence"] == (ended[1] if reason == "stop_sequence" else None)


def test_results_of_calls_are_messages_of_tools(server: Server) -> None:
    """As a chat with the same calls and results; text behind them is the user's."""
    used = {"type": "tool_use", "id": "toolu_1", "name": "press", "input": {"key": "a"}}
    other = used | {"id": "toolu_2"}
    thought = {"type": "thinking", "thinking": "two keys", "signature": "x"}
    made = message(
        server,
        "press",
        [thought, text("so"), used, other],
        [
            result("toolu_1", [text("here"), image()], cache_control={"type": "ephemeral"}),
            result("toolu_2", "no such key", is_error=True),
            text("and now?"),
        ],
        tools=TOOL_PARAMS,
    )
    call = {"type": "function", "function": {"name": "press", "arguments": '{"key": "a"}'}}
    whole = server.chat(
        {"role": "user", "content": "press"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "two keys",
            "tool_calls": [call | {"id": "1"}, call | {"id": "2"}],
        },
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [text("here"), picture_part(picture("red", (48, 40)))],
        },
        {"role": "tool", "tool_call_id": "2", "content": "Error: no such key"},
        {"role": "user", "content": "and now?"},
        tools=TOOLS,
        max_tokens=8,
        mmkv={"resume": "never"},
    ).json()
    assert made["content"] == [text(whole["choices"][0]["message"]["content"])]
    assert prompt_of(made["usage"]) == whole["usage"]["prompt_tokens"]


def test_a_loop_of_calls_and_pictures_reads_only_what_is_new() -> None:
    """With the model at hand, whose template knows no tools, and a budget."""

    def load() -> Engine:
        return Engine.from_pretrained(bundled_model(), policy="dbtrimkv", budget=64)

    with serving(load) as server:
        fields: dict[str, Any] = {"tools": TOOL_PARAMS, "tool_choice": FORCED, "max_tokens": 200}
        said: list[Any] = [[image(size=(64, 64)), text("point at it")]]
        read = 0
        for step in range(3):
            wanted = counted(server, *said, tools=TOOL_PARAMS, tool_choice=FORCED)
            made = message(server, *said, **fields)
            usage, (block,) = made["usage"], made["content"]
            assert usage["cache_read_input_tokens"] == read and made["stop_reason"] == "tool_use"
            assert prompt_of(usage) == wanted
            if step:  # a picture, and a few words around it
                assert usage["input_tokens"] < wanted / 3
                assert usage["mmkv"]["evicted"] > 0 and usage["mmkv"]["differs"] is None
            read = prompt_of(usage) + usage["output_tokens"]  # everything before
            again = [text("done"), image("blue", (64, 64 + 8 * step))]
            said += [made["content"], [result(block["id"], again)]]
        assert usage["mmkv"]["pictures"] == 3
        # Read afresh, calls may have other tokens than the model wrote them with.
        never = {"resume": "never"}
        fresh = message(server, *said[:-2], **fields, mmkv=never)["usage"]
        wanted = counted(server, *said[:-2], tools=TOOL_PARAMS, tool_choice=FORCED, mmkv=never)
        assert (fresh["cache_read_input_tokens"], fresh["input_tokens"]) == (0, wanted)


def test_a_body_is_let_go_once_it_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []
    begin, whole = MessagesCall.__init__, MessagesCall.whole

    def noted(call: MessagesCall, *given: Any) -> None:
        begin(call, *given)
        bodies.extend(one for one in given if isinstance(one, MessagesRequest))

    async def looked(call: MessagesCall) -> Any:
        assert [one.messages for one in bodies] == [[]]  # it would stay as long as the reply takes
        return await whole(call)

    monkeypatch.setattr(MessagesCall, "__init__", noted)
    monkeypatch.setattr(MessagesCall, "whole", looked)
    assert message(server, SCENE)["content"]


def test_a_prompt_that_is_counted_is_not_read(server: Server) -> None:
    before = server.held
    sized = [counted(server, [image(size=(48, side)), text("new")]) for side in (48, 96)]
    assert sized[1] > sized[0] > counted(server, [text("new")])
    assert message(server, [image(size=(48, 96)), text("new")])["usage"]["input_tokens"] == sized[1]
    assert server.held == before


def test_a_header_that_changes_is_no_part_of_the_prompt(server: Server) -> None:
    bill = "x-anthropic-billing-header: cc_version=1; cch="
    for at in range(2):
        answer = post(server, "a long question " * 9, system=[text(f"{bill}{at}"), text("be")])
        assert answer.headers["x-mmkv-ignored"] == "system.x-anthropic-billing-header"
    assert answer.json()["usage"]["cache_read_input_tokens"] > 0


def test_an_answer_that_follows_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        (block,) = message(server, SCENE, max_tokens=40, **fields)["content"]
        assert isinstance(json.loads(block["text"])["red"], bool)


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
USED = {"type": "tool_use", "id": "toolu_1", "name": "press", "input": {"key": "a"}}
FAR = [[{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a"}}]]
BAD_SCHEMA = {"type": "json_schema", "schema": {"type": 3}}
Fields = dict[str, Any]


KINDS = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error"}
ERRORS: list[tuple[list[Any], Fields, str]] = [
    ([], {}, "messages"),
    ([[]], {}, "messages[0].content is empty"),
    (["q", "a", []], {"system": "s"}, "messages[2].content"),
    ([[{"type": "document"}]], {}, "messages[0].content[0]"),
    ([[{"text": "q"}]], {}, "messages.0.content"),
    ([[text("q"), USED]], {}, "content[1]: tool_use"),
    (
        ["q", [USED], [result("toolu_9", "x")]],
        {"system": "s"},
        "messages[2].content[0].tool_use_id",
    ),
    (
        ["q", [USED], [result("toolu_1", [text("x"), {"type": "search_result"}])]],
        {},
        "messages[2].content[0].content[1]",
    ),
    (["q", [text("a"), image()], "q"], {}, "messages[1].content[1]"),
    ([[{"type": "image", "source": {"type": "file", "file_id": "f"}}]], {}, "base64 or url"),
    ([[{"type": "image", "source": {"type": "base64", "data": "eA=="}}]], {}, "media_type"),
    (["q " * 70000], {}, "prompt is too long: "),
    (["q", [USED], [result("toolu_1", "x")] * 1023], {}, "messages: a chat has 1,025 of these"),
    (
        ["q", "a"],
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        "thinking.budget_tokens counts",
    ),
    *(
        (["q"], fields, named)
        for fields, named in (
            ({"max_tokens": None}, "max_tokens"),
            ({"output_format": {"type": "x"}}, "output_config"),
            ({"output_format": BAD_SCHEMA}, "output_config.format"),
            ({"tools": [SEARCH]}, "web_search_20250305"),
            ({"tools": [{"name": "f"}]}, "input_schema"),
            ({"tool_choice": {"type": "any"}}, "tools"),
            ({"tool_choice": {"type": "tool"}}, "name"),
            ({"container": "c"}, "container"),
            ({"mcp_servers": [{}]}, "mcp_servers"),
            ({"stop": "a"}, "stop"),
            ({"min_tokens": 4}, "min_tokens"),
            ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
            ({"model": "claude"}, "'claude' is not served"),
        )
    ),
    (FAR, {}, "127.0.0.1"),
]


@pytest.mark.parametrize(("messages", "fields", "named"), ERRORS)
def test_errors_have_anthropics_form(
    server: Server, messages: list[Any], fields: Fields, named: str
) -> None:
    status = 403 if messages is FAR else 404 if "model" in fields else 400
    body = {name: value for name, value in asked(*messages, **fields).items() if value is not None}
    answers = [server.client.post("/v1/messages", json=body | {"stream": s}) for s in (False, True)]
    if "max_tokens" in body and "stop_sequences" not in body:
        del body["max_tokens"]
        answers.append(server.client.post("/v1/messages/count_tokens", json=body))
    for answer in answers:
        assert answer.status_code == status, answer.text
        shown = answer.json()
        assert shown["type"] == "error" and shown["error"]["type"] == KINDS[status]
        assert named in shown["error"]["message"]


def test_a_reply_that_is_too_long_is_no_long_prompt(server: Server) -> None:
    """Clients sum a conversation up when they read that its prompt is too long."""
    error = post(server, "q", max_tokens=64000).json()["error"]
    assert error["message"].startswith("max_tokens is 64,000")


def test_prompts_are_counted_one_after_the_other(folder: Path) -> None:
    """So many at once would keep the engine's thread from its replies."""
    load = Engine.from_pretrained
    body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}]}

    def count(_: int) -> int:
        return server.client.post("/v1/messages/count_tokens", json=body).status_code

    with serving(lambda: load(folder, dtype="float32"), max_queue=3) as server:
        thread = server.state.engine_thread
        with ThreadPoolExecutor(6) as pool:
            with stopped(server):
                answers = [pool.submit(count, at) for at in range(6)]
                until(lambda: sum(one.done() for one in answers) == 2)  # only 3 may wait
                assert thread._commands.qsize() <= 1
            assert sorted(one.result() for one in answers) == [200] * 4 + [529] * 2
        assert count(0) == 200


def test_other_errors_of_the_path(server: Server) -> None:
    for answer, status in (
        (server.client.get("/v1/messages"), 405),
        (server.client.get("/v1/messages/batches"), 404),
        (server.client.post("/v1/messages", content="x"), 415),
    ):
        assert answer.status_code == status and answer.json()["type"] == "error"
    assert "type" not in server.client.get("/v1/other").json()


def test_a_full_queue_is_overload(folder: Path) -> None:
    load = Engine.from_pretrained
    with serving(lambda: load(folder, dtype="float32"), max_queue=0, max_running=1) as server:
        thread = server.state.engine_thread
        with stopped(server):
            thread._places, before = 0, thread._places
            answer = post(server, "q")
            thread._places = before
    assert answer.status_code == 529 and answer.headers["retry-after"]
    assert answer.json()["error"]["type"] == "overloaded_error"


def test_a_failure_within_a_stream_is_its_last_event(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmkv.server.chat import ChatCall

    parts = ChatCall.parts

    async def breaking(self: ChatCall) -> Any:
        async for part in parts(self):
            yield part
            raise RuntimeError("secret")

    monkeypatch.setattr(ChatCall, "parts", breaking)
    events = streamed(server, "q")
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(events)


def test_keys_in_the_header_of_either_api(folder: Path) -> None:
    def load() -> Engine:
        return Engine.from_pretrained(folder, dtype="float32")

    with serving(load, api_keys=("right", "other")) as server:
        given: list[tuple[dict[str, str], int]] = [
            ({}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "right"}, 401),
            ({"x-api-key": "right"}, 200),
            ({"authorization": "Bearer other"}, 200),
            ({"x-api-key": "right", "authorization": "Bearer wrong"}, 200),
        ]
        for headers, status in given:
            answer = server.client.post("/v1/messages", json=asked("q"), headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
                assert "x-api-key" in answer.json()["error"]["message"]
            assert server.client.get("/v1/models", headers=headers).status_code == status


def test_fields_without_effect_are_listed(server: Server) -> None:
    answer = post(
        server,
        [text("q") | {"cache_control": {"type": "ephemeral"}, "odd": 1}],
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "me", "more": "x"},
        output_config={"effort": "low"},
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 1024},
        speed="fast",
        tools=[TOOL_PARAMS[0] | {"defer_loading": False}],
        tool_choice={"type": "none"},
    )
    assert answer.status_code == 200, answer.text
    listed = answer.headers["x-mmkv-ignored"].split(", ")
    assert {one for one in listed if one != "thinking.budget_tokens"} == {
        "messages.content.odd",
        "metadata.more",
        "output_config.effort",
        "service_tier",
        "speed",
    }
    assert "x-mmkv-ignored" not in post(server, "q", metadata={"user_id": "me"}).headers
