"""A reply is the same by ``Session.send``, by ``engine.generate`` and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmkv import Engine, InputError, Sampling
from mmkv.sampling import Sampler
from mmkv.server.reply import FINISH
from tests.support.servers import Server, serving
from tests.support.tiers import one_in
from tests.support.tool_templates import function, save_tool_model

TOOLS = [
    function("press", key={"type": "string", "enum": ["a", "Enter"]}),
    function("point", x={"type": "integer", "minimum": 0, "maximum": 99}),
]
CALL = '<tool_call>\n{"name": "point", "arguments": {"x": 7}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"row": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["row"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
HOT = {"temperature": 2.0, "seed": 3}
# By name: how it is drawn, what else is asked for, what the model is made to say (None: nothing),
# and what comes of it: the answer, the thought, the calls, and why it ends. None: by chance.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, Any]] = {
    "greedy": ({}, {}, None, None),
    "seed": (HOT, {}, None, None),
    "penalties": (
        {"repetition_penalty": 1.4, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {},
        None,
        None,
    ),
    "penalties and seed": (HOT | {"presence_penalty": 2.0, "top_k": 9}, {}, None, None),
    "bias": ({}, {"logit_bias": {65: 100.0}}, None, ("b" * 40, None, [], "length")),
    "bias and seed": (HOT, {"logit_bias": {65: 9.0, 66: 9.0}}, None, None),
    "stop": ({"stop": ("two", "x")}, {}, "one two three", ("one ", None, [], "stop")),
    "thought": (
        {},
        {},
        "<think>\nhm\n</think>\n\nfour",
        ("four", "hm", [], "eos"),
    ),
    "budget of a thought": (
        {"thinking_budget": 2},
        {},
        "<think>\nhm, well",
        None,
    ),
    "call": ({}, {"tools": TOOLS}, "So.\n" + CALL, ("So.", None, [("point", {"x": 7})], "calls")),
    "thought and call": (
        {},
        {"tools": TOOLS},
        f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}",
        ("", "hm", [("point", {"x": 7})] * 2, "calls"),
    ),
    "call that is cut off": ({}, {"tools": TOOLS}, CALL[:40], None),
    "call and stop": (
        {"stop": ("</tool_call>",)},
        {"tools": TOOLS},
        CALL,
        ("", None, [("point", {"x": 7})], "calls"),
    ),
    "call that has to be": (
        HOT | {"max_new_tokens": 300},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        None,
        None,
    ),
    "call of one function": (
        HOT | {"max_new_tokens": 300},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "press"}}},
        None,
        None,
    ),
    "none may be called": (
        {"max_new_tokens": 99},
        {"tools": TOOLS, "tool_choice": "none"},
        CALL,
        (CALL, None, [], "eos"),
    ),
    "schema": (HOT, {"response_format": FORMAT}, None, None),
    "schema or call": (HOT, {"response_format": FORMAT, "tools": TOOLS}, None, None),
}


def load(folder: Any) -> Engine:
    return Engine.from_pretrained(folder, policy="streamingllm", budget=4096, dtype="float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_tool_model(tmp_path_factory.mktemp("hermes"))
    with serving(lambda: load(folder)) as made:
        yield made


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str | None], None]:
    """Have the model say a text, and then what it is asked to draw."""
    queue: list[int] = []
    draw = Sampler.draw

    def drawn(self: Any, *given: Any) -> int:
        return queue.pop(0) if queue else draw(self, *given)

    monkeypatch.setattr(Sampler, "draw", drawn)

    def say(tokenizer: Any, text: str | None) -> None:
        queue.clear()
        if text is not None:
            queue.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
            queue.append(tokenizer.eos_token_id)

    return say


Answer = tuple[str, str | None, list[tuple[str, Any]], str, int]


def of_reply(reply: Any) -> Answer:
    calls = [(one.name, one.parsed) for one in reply.tool_calls]
    reason = "calls" if reply.finish_reason == "tool_calls" else reply.finish_reason
    return reply.content, reply.reasoning, calls, FINISH[reason], len(reply.token_ids)


def over_http(server: Server, drawn: dict[str, Any], more: dict[str, Any]) -> Answer:
    fields = {{"max_new_tokens": "max_tokens"}.get(name, name): one for name, one in drawn.items()}
    answer = server.chat("go", **fields | more)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    functions = [one["function"] for one in message.get("tool_calls", ())]
    calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
    used = answer.json()["usage"]["completion_tokens"]
    thought = message.get("reasoning_content")
    return message["content"] or "", thought, calls, choice["finish_reason"], used


@one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_reply_is_the_same_on_every_road(
    name: str, server: Server, says: Callable[[Any, str | None], None]
) -> None:
    drawn, more, text, wanted = CASES[name]
    drawn = {"temperature": 0.0, "max_new_tokens": 40 if text is None else 200} | drawn
    engine = server.inside(lambda core: core.engine)
    tokenizer, sampling = engine.processor.tokenizer, Sampling(**drawn)
    with engine.session() as session:
        says(tokenizer, text)
        pieces = "".join(session.send("go", sampling=sampling, **more))
        assert session.last is not None
        found = of_reply(session.last)
    says(tokenizer, text)
    (reply,) = engine.generate([{"role": "user", "content": "go"}], sampling, **more)
    says(tokenizer, text)
    same = [of_reply(reply), over_http(server, drawn, more)]
    assert same == [found, found]
    content, thought, calls, reason, _ = found
    assert content in pieces and CALL not in pieces.replace(content, "")
    if wanted is not None:
        assert (content, thought, calls, reason) == (*wanted[:3], FINISH[wanted[3]])
    if "response_format" in more and not calls:
        assert json.loads(content).keys() == {"row"}
    if "tool_choice" in more and more["tool_choice"] != "none":
        assert len(calls) == 1


def test_a_batch_goes_on_from_calls(server: Server, says: Callable[..., None]) -> None:
    """The prompt is that of transformers: the template with the functions and the result."""
    engine = server.inside(lambda core: core.engine)
    made = {"name": "point", "arguments": {"x": 7}}
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": made}]},
        {"role": "tool", "tool_call_id": "a", "name": "point", "content": "hit"},
    ]
    theirs = engine.processor.tokenizer.apply_chat_template(
        talk, tools=TOOLS, add_generation_prompt=True
    )["input_ids"]
    (reply,) = engine.generate(talk, Sampling.greedy(max_new_tokens=1), tools=TOOLS)
    assert reply.prompt_tokens == len(theirs)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"logit_bias": [1]}, "a dict of numbers"),
        ({"logit_bias": {"65": 1.0}}, "token ids are numbers below"),
        ({"logit_bias": {10**9: 1.0}}, "token ids are numbers below"),
        ({"logit_bias": {65: float("nan")}}, "logit_bias of token 65 is nan"),
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        ({"response_format": FORMAT, "prefix": "Well"}, "leave one of them out"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": 3}, "tools must be a list"),
    ],
)
def test_what_cannot_be_asked_for(server: Server, more: dict[str, Any], said: str) -> None:
    engine = server.inside(lambda core: core.engine)
    with engine.session() as session, pytest.raises((InputError, TypeError), match=said):
        session.send("go", **more)
    if "prefix" not in more:
        with pytest.raises((InputError, TypeError), match=said):
            engine.generate([{"role": "user", "content": "go"}], **more)
