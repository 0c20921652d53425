"""Chats whose replies call functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mmkv import Engine
from mmkv.grammar import RuleState
from mmkv.sampling import Sampler
from tests.support.chat_models import picture
from tests.support.servers import Server, picture_part, serving
from tests.support.tiers import one_in
from tests.support.tool_templates import (
    HERMES,
    LLAMA3,
    MISTRAL,
    QWEN_XML,
    function,
    save_seeing_tool_model,
    save_tool_model,
    tool_tokenizer,
)

TOOLS = [
    function("press", key={"type": "string", "enum": ["a", "Enter", "<é>"]}),
    function("point", x={"type": "integer", "minimum": 0, "maximum": 99}, left={"type": "boolean"}),
]
POINT = {"type": "function", "function": {"name": "point"}}
FORMS = {"hermes": HERMES, "qwen-xml": QWEN_XML, "llama3": LLAMA3, "mistral": MISTRAL}
# A call of each form, with text before it where that may be.
CALLS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "point", "arguments": {"x": 7, "left": true}}'
    "\n</tool_call>",
    "qwen-xml": "I look.\n<tool_call>\n<function=point>\n<parameter=x>\n7\n</parameter>\n"
    "<parameter=left>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "point", "parameters": {"x": 7, "left": true}}',
    "mistral": '[TOOL_CALLS][{"name": "point", "arguments": {"x": 7, "left": true}}]',
}


def _load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="streamingllm", budget=4096, dtype="float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of a small Qwen3-VL whose template shows tools."""
    folder = save_seeing_tool_model(tmp_path_factory.mktemp("tools"))
    with serving(lambda: _load(folder)) as made:
        yield made


@pytest.fixture(scope="module", params=FORMS)
def formed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """Yield the name of a form and a server of a model that has it."""
    folder = save_tool_model(tmp_path_factory.mktemp("form"), FORMS[request.param])
    with serving(lambda: _load(folder)) as made:
        yield request.param, made


def _script(monkeypatch: pytest.MonkeyPatch, form: str, *texts: str) -> None:
    """Have the model say some texts, each to its end."""
    tokenizer = tool_tokenizer(FORMS[form])
    spelled: list[int] = []
    for text in texts:
        spelled += tokenizer(text, add_special_tokens=False)["input_ids"]
        spelled.append(tokenizer.eos_token_id)
    monkeypatch.setattr(Sampler, "draw", lambda *_: spelled.pop(0))


def _replied(server: Server, *messages: Any, **fields: Any) -> dict[str, Any]:
    answer = server.chat(*messages, **{"max_tokens": 200, "tools": TOOLS} | fields)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    ChatCompletion.model_validate(made, strict=True)
    return made


def _streamed(server: Server, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 200, "tools": TOOLS, "stream": True} | fields
    answer = server.chat(*messages, **body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    for one in chunks:
        ChatCompletionChunk.model_validate(one)
    return chunks


def joined_pieces(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's pieces make, as clients put it together."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "reason": None}
    for choice in (one["choices"][0] for one in chunks if one["choices"]):
        assert made["reason"] is None  # nothing follows a reply's end
        delta = choice["delta"]
        made["content"] += delta.get("content") or ""
        made["reasoning_content"] += delta.get("reasoning_content") or ""
        made["reason"] = choice["finish_reason"]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(made["calls"]):
                assert call["id"] and call["type"] == "function"
                made["calls"].append(call["function"] | {"id": call["id"]})
            else:
                assert "id" not in call and "name" not in call["function"]
                made["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return made


def _arguments(answer: dict[str, Any], at: int = 0) -> Any:
    return json.loads(answer["choices"][0]["message"]["tool_calls"][at]["function"]["arguments"])


def _check(name: str, given: Any) -> None:
    """What the schemas of TOOLS say, in Python."""
    if name == "press":
        assert set(given) == {"key"} and given["key"] in ("a", "Enter", "<é>")
    else:
        assert name == "point" and set(given) == {"x", "left"}
        assert isinstance(given["left"], bool) and 0 <= given["x"] <= 99


@pytest.mark.parametrize("choice", ["required", POINT])
def test_a_random_model_that_has_to_call_does(formed: tuple[str, Server], choice: Any) -> None:
    form, server = formed
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 2}
    for seed in range(1 if choice is POINT else 2):
        made = _replied(server, "go", seed=seed, **fields)
        message = made["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert message["content"] is None and made["choices"][0]["finish_reason"] == "tool_calls"
        _check(call["function"]["name"], _arguments(made))
        assert choice == "required" or call["function"]["name"] == "point"
        assert (len(call["id"]) == 9) == (form == "mistral")


def test_a_random_model_may_have_to_call_one_of_some(formed: tuple[str, Server]) -> None:
    _, server = formed
    listed = [{"type": "function", "function": {"name": "press"}}]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    made = _replied(server, "go", tool_choice=some, temperature=2, seed=1)
    for call in made["choices"][0]["message"]["tool_calls"]:
        assert call["function"]["name"] == "press"


def test_a_step_reads_what_is_new(
    formed: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send a reply back in parts; the memory holds it as the model wrote it."""
    form, server = formed
    _script(monkeypatch, form, CALLS[form], "done")
    first = _replied(server, "walk on")
    message = first["choices"][0]["message"]
    for result in ("fine", "not so"):  # the second is another client's, from the same memory
        _script(monkeypatch, form, "done")
        call = message["tool_calls"][0]
        back = {key: message[key] for key in ("role", "content", "tool_calls")}
        tool = {"role": "tool", "tool_call_id": call["id"], "content": result}
        again = _replied(server, {"role": "user", "content": "walk on"}, back, tool)
        used = again["usage"]
        assert used["mmkv"]["resumed"] == first["usage"]["total_tokens"], form
        assert used["mmkv"]["differs"] is None
        assert again["choices"][0]["message"]["content"] == "done"


def test_a_result_may_be_a_picture(server: Server) -> None:
    made = _replied(server, "go", tool_choice=POINT)
    call = made["choices"][0]["message"]["tool_calls"][0]
    told = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": [picture_part(picture()), {"type": "text", "text": "the screen"}],
        },
    ]
    again = _replied(server, *told, tool_choice=POINT)
    assert again["usage"]["mmkv"]["pictures"] == 1
    assert again["usage"]["mmkv"]["resumed"] >= made["usage"]["prompt_tokens"]


_TOKEN = tool_tokenizer(HERMES)
_THOUGHT = "<think>\nhm, so\n</think>\n\nwell"
_TWO = CALLS["hermes"] + CALLS["hermes"].removeprefix("I look.")


def _token(text: str) -> int:
    return _TOKEN(text, add_special_tokens=False)["input_ids"][0]


# What is said, what stops it; the answer, the thought, the arguments, the reason of the end.
STOPS: list[tuple[str, dict[str, Any], tuple[str, str, list[str], str]]] = [
    (CALLS["hermes"], {"stop": "left"}, ("I look.", "", ['{"x": 7, "'], "stop")),
    (CALLS["hermes"], {"stop_token_ids": [_token("7")]}, ("I look.", "", ['{"x": '], "stop")),
    (CALLS["hermes"], {"stop": "}"}, ("I look.", "", ['{"x": 7, "left": true'], "stop")),
    (CALLS["hermes"], {"stop": "name"}, ("I look.", "", [], "stop")),
    (CALLS["hermes"], {"stop_token_ids": [_token("p")]}, ("I look.", "", [], "stop")),
    (CALLS["hermes"], {"stop": "_call>"}, ("I look.", "", [], "stop")),
    (CALLS["hermes"], {"stop": 'ol_call>\n{"na'}, ("I look.", "", [], "stop")),
    (
        CALLS["hermes"],
        {"stop": "</tool"},
        ("I look.", "", ['{"x": 7, "left": true}'], "tool_calls"),
    ),
    (_TWO, {"stop": "left"}, ("I look.", "", ['{"x": 7, "'], "stop")),
    (
        CALLS["hermes"] + CALLS["hermes"].replace("7", "8").removeprefix("I look."),
        {"stop": "8"},
        ("I look.", "", ['{"x": 7, "left": true}', '{"x": '], "stop"),
    ),
    (_THOUGHT, {"stop": "so"}, ("", "hm, ", [], "stop")),
    (_THOUGHT, {"stop": "ink>\n\nwell"}, ("", "hm, so", [], "stop")),
    (_THOUGHT, {"stop_token_ids": [_token("s")]}, ("", "hm, ", [], "stop")),
    (_THOUGHT, {"stop": "nk>\nhm"}, ("", "", [], "stop")),
    ("a <tool b", {"stop": " b"}, ("a <tool", "", [], "stop")),  # no mark goes on so
]


@one_in(3)
@pytest.mark.parametrize(("said", "fields", "wanted"), STOPS, ids=lambda one: str(one)[-40:])
def test_a_stop_leaves_no_half_of_a_call_or_mark(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    fields: dict[str, Any],
    wanted: tuple[str, str, list[str], str],
) -> None:
    """In a whole reply, in one of two, and in a stream; a client would run what it is told to."""
    tokens = [*_TOKEN(said, add_special_tokens=False)["input_ids"], _TOKEN.eos_token_id]
    for n in (1, 2, None):
        spelled = iter([token for token in tokens for _ in range(n or 1)])
        monkeypatch.setattr(Sampler, "draw", lambda *_, s=spelled: next(s))
        if n is None:
            joined = joined_pieces(_streamed(server, "go", mmkv={"resume": "never"}, **fields))
            calls = [one["arguments"] for one in joined["calls"]]
            found = [(joined["content"], joined["reasoning_content"], calls, joined["reason"])]
        else:
            made = _replied(server, "go", n=n, mmkv={"resume": "never"}, **fields)
            found = []
            for choice in made["choices"]:
                message = choice["message"]
                called = [one["function"]["arguments"] for one in message.get("tool_calls", ())]
                texts = (message["content"] or "", message.get("reasoning_content") or "")
                found.append((*texts, called, choice["finish_reason"]))
        assert found == [wanted] * (n or 1)


def test_of_two_replies_only_the_one_that_calls_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [CALLS["hermes"], "no " * 50]  # which ends when the call is over
    ids = [[*_TOKEN(x, add_special_tokens=False)["input_ids"], _TOKEN.eos_token_id] for x in said]
    spelled = iter([one[at] for at in range(max(map(len, ids))) for one in ids if at < len(one)])
    monkeypatch.setattr(Sampler, "draw", lambda *_: next(spelled))
    made = _replied(server, "go", n=2, mmkv={"resume": "never"})
    assert [one["finish_reason"] for one in made["choices"]] == ["tool_calls", "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_of_a_schema_is_not_followed_is_said(server: Server, stream: bool) -> None:
    email = {"type": "string", "pattern": "^(?!x)a", "maxLength": 3}
    schema = {"type": "object", "properties": {"to": email}, "required": ["to"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    fields: dict[str, Any] = {"tools": [function("send", to=email)], "response_format": form}
    if stream:
        options = {"include_usage": True}
        usage = _streamed(server, "go", **fields, stream_options=options)[-1]["usage"]
    else:
        usage = _replied(server, "go", **fields)["usage"]
    places = [note.partition(": ")[2] for note in usage["mmkv"]["notes"]]
    assert places == ["properties.to.pattern (^(?!x)a)"] * 2
    form["json_schema"]["strict"] = True
    answer = server.chat("go", **fields)
    assert answer.status_code == 400 and "look-around" in answer.json()["error"]["message"]


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


LARGE = [function(f"f{i}", x={"type": "string", "description": "x" * 50_000}) for i in range(11)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [function("a b")]}, "name"),
        ({"tools": [function("a"), function("a")]}, "two tools"),
        ({"tools": [], "tool_choice": "required"}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tool_choice": "all"}, "tool_choice"),
        ({"tools": LARGE}, "send fewer tools"),
        ({"tools": [_function(parameters={"type": "array"})]}, "object"),
        ({"tools": [_function(strict=True, parameters={"properties": {"x": {"not": {}}}})]}, "f:"),
    ],
)
def test_tools_that_cannot_be(server: Server, fields: dict[str, Any], words: str) -> None:
    answer = server.chat("go", **{"tools": TOOLS} | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_results_answer_calls(server: Server) -> None:
    tool = {"role": "tool", "tool_call_id": "call_none", "content": "x"}
    answer = server.chat({"role": "user", "content": "go"}, tool, tools=TOOLS)
    assert answer.status_code == 400 and "names no call" in answer.json()["error"]["message"]


def test_a_mark_of_calls_in_a_thought_binds_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model itself begins the thought, too; behind it the mark counts."""
    thought = "<think>\nA <tool_call> may help.\n</think>\n\n"
    _script(monkeypatch, "hermes", thought + CALLS["hermes"])
    message = _replied(server, "hm")["choices"][0]["message"]
    assert message["reasoning_content"] == "A <tool_call> may help."
    assert message["content"] == "I look." and len(message["tool_calls"]) == 1
    bound: list[bool] = []
    take = RuleState.take

    def noted(self: RuleState, token: int) -> None:
        take(self, token)
        bound.append(self.masks)

    monkeypatch.setattr(RuleState, "take", noted)
    _script(monkeypatch, "hermes", thought + CALLS["hermes"], "plain")
    _replied(server, "hm, hm")
    first = bound.index(True)
    text = thought + CALLS["hermes"].partition("<tool_call>")[0]
    assert first == len(tool_tokenizer(HERMES)(text)["input_ids"])


def test_half_a_pair_of_surrogates_in_arguments_is_read_as_it_stands(server: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "press"}}
    call["function"] = {"name": "press", "arguments": '{"key": "\\ud800"}'}
    said = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "no"},
    ]
    _replied(server, *said, max_tokens=2)


def _thought_and_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Have the model think and call, with a blank line that its template would not write."""
    reply = "<think>\nWhere? Left.\n</think>\n\n" + CALLS["hermes"].replace("\n", "\n\n", 1)
    _script(monkeypatch, "hermes", reply)
    made = _replied(server, "think of it")
    return made, made["choices"][0]["message"]


def test_a_thought_that_was_changed_is_read_as_it_was_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, message = _thought_and_call(server, monkeypatch)
    call = message["tool_calls"][0]
    resumed = {}
    for thought in (None, " Where? Left.", "Where?", "Left. Where?"):
        _script(monkeypatch, "hermes", "done")
        back = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
        back |= {} if thought is None else {"reasoning_content": thought}
        tool = {"role": "tool", "tool_call_id": call["id"], "content": "fine"}
        again = _replied(server, {"role": "user", "content": "think of it"}, back, tool)
        resumed[thought] = again["usage"]["mmkv"]["resumed"]
    whole = made["usage"]["total_tokens"]
    assert resumed[None] == resumed[" Where? Left."] == whole
    assert resumed["Where?"] < whole and resumed["Left. Where?"] < whole


def _responded(server: Server, said: list[Any], **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    body = {"model": "small", "input": said, "tools": tools, "max_output_tokens": 200}
    answer = server.client.post("/v1/responses", json=body | fields)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_turn_with_other_tools_leaves_nothing_to_those_with_the_first(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _script(monkeypatch, "hermes", "one", "two", "three")
    said: list[Any] = [{"role": "user", "content": "with these"}]
    first = _responded(server, said)
    other = [{"type": "function", "name": "other", "parameters": {"type": "object"}}]
    more = {"role": "user", "content": "and now"}
    fields = {"previous_response_id": first["id"], "store": False}
    _responded(server, [more], tools=other, **fields)
    said += [{"role": "assistant", "content": "one"}, more]
    said += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "so?"}]
    again = _responded(server, said)
    assert again["usage"]["mmkv"]["resumed"] == first["usage"]["total_tokens"]
