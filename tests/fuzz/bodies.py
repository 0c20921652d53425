"""Whole bodies of requests, by the path they are posted to, and what may be added to them.

Chats, responses and Anthropic's messages have tools, calls and results with pictures.
"""

from __future__ import annotations

import base64
from typing import Any

from hypothesis import strategies as st

from mmkv.resources import asset
from tests.fuzz.server import MADE, MODEL

_DATA = base64.b64encode(asset("scene.png").read_bytes()).decode()
_URL = f"data:image/png;base64,{_DATA}"
SHOWN: dict[str, Any] = {"type": "image_url", "image_url": {"url": _URL}}
SAID = [{"role": "user", "content": "what?"}]

_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"row": {"type": "integer", "enum": [1, 2]}, "of": {"enum": ["a", "b"]}},
    "required": ["row"],
    "additionalProperties": False,
}
_SCHEMAS: tuple[Any, ...] = (
    _PLACE,
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    {"type": "object", "properties": {}},
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2},
            "n": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
        },
        "$defs": {"one": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
    },
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {"s": {"type": "string", "pattern": "^[a-c]{1,3}$"}}},
)
_LOOK = {"name": "look", "description": "look at it", "parameters": _PLACE, "strict": True}
_FIND = {"name": "find", "parameters": _SCHEMAS[1]}
_TOOLS: list[list[dict[str, Any]]] = [
    [_LOOK, _FIND],
    *([{"name": "look", "parameters": schema}] for schema in _SCHEMAS),
]


def _each(talks: list[Any], made: Any) -> list[Any]:
    """Return a body for every set of tools, and for each talk at least one."""
    return [made(talks[number % len(talks)], tools) for number, tools in enumerate(_TOOLS)]


def _chats() -> list[Any]:
    asked = {"role": "user", "content": [SHOWN, {"type": "text", "text": "what is there?"}]}
    looked = {"name": "look", "arguments": '{"row": 1}'}
    calls = [
        {"id": "call_1", "type": "function", "function": looked},
        {"id": "call_2", "type": "function", "function": {"name": "find", "arguments": "no"}},
    ]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    seen = [SHOWN, {"type": "text", "text": "a"}]
    results = [
        {"role": "tool", "tool_call_id": "call_1", "content": seen},
        {"role": "tool", "tool_call_id": "call_2", "content": "none"},
    ]
    talks = [
        SAID,
        [asked, called, *results],
        [asked, called, *results, {"role": "assistant", "content": "a"}, asked],
        [asked, called | {"content": "I look."}, *results[::-1], *SAID],
    ]
    plain = [
        SAID,
        [
            *({"role": "system", "content": "be brief"}, *SAID),
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [{"type": "text", "text": "and?"}]},
        ],
        [asked],
    ]
    return [
        *({"model": MODEL, "messages": talk} for talk in plain),
        *_each(
            talks,
            lambda talk, tools: {
                "model": MODEL,
                "messages": talk,
                "tools": [{"type": "function", "function": tool} for tool in tools],
            },
        ),
    ]


def _responses() -> list[Any]:
    image = {"type": "input_image", "image_url": _URL, "detail": "auto"}
    asked = {"role": "user", "content": [image, {"type": "input_text", "text": "what?"}]}
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"row": 1}'}
    result = {"type": "function_call_output", "call_id": "call_1"}
    thought = {"type": "reasoning", "summary": [], "content": []}
    talks = [
        "what?",
        [asked, call, result | {"output": "a"}],
        [asked, thought, call | {"id": "fc_1"}, result | {"output": [image]}, asked],
    ]
    return [
        {"model": MODEL, "input": "what?", "instructions": "be brief"},
        {"model": MODEL, "input": [asked]},
        {"model": MODEL, "input": "and?", "previous_response_id": MADE},
        *_each(
            talks,
            lambda talk, tools: {
                "model": MODEL,
                "input": talk,
                "tools": [{"type": "function"} | tool for tool in tools],
            },
        ),
    ]


def _messages() -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": _DATA}
    image = {"type": "image", "source": source}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"row": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    said = {"type": "text", "text": "I look."}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}

    def after(*blocks: Any, shown: Any) -> list[Any]:
        used = {"role": "assistant", "content": list(blocks)}
        return [asked, used, {"role": "user", "content": shown}]

    talks = [
        SAID,
        after(use, shown=[result | {"content": "a"}]),
        after(thought, said, use, shown=[result | {"content": [image]}, image]),
        after(use, shown=[result | {"is_error": True}]),
    ]
    return _each(
        talks,
        lambda talk, tools: {
            "model": MODEL,
            "max_tokens": 4,
            "messages": talk,
            "tools": [
                {"name": tool["name"], "description": "", "input_schema": tool["parameters"]}
                for tool in tools
            ],
        },
    )


_CHATS, _MESSAGES = _chats(), _messages()
WHOLE: dict[str, list[Any]] = {
    "/v1/chat/completions": _CHATS,
    "/v1/responses": _responses(),
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/completions": [{"model": MODEL, "prompt": "red is"}],
    "/v1/sessions": [{}, {"budget": 16, "metadata": {"a": "b"}}, {"file": "saved"}],
    f"/v1/sessions/{MADE}/chat/completions": [
        *_CHATS,
        *(one | {"stream": True, "mmkv": {"background": True}} for one in _CHATS[:3]),
    ],
    f"/v1/sessions/{MADE}/fork": [{}, {"metadata": {"a": "b"}}],
    f"/v1/sessions/{MADE}/save": [{"name": "saved", "overwrite": True}],
}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


_ALLOWED = {"mode": "required", "tools": [_named("look")]}
_LENGTHS = (1, 8, 40, 120)
_SCHEMA = {"name": "a", "schema": _PLACE}
_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "chat": {
        "stream": (True, True, False),
        "stream_options": ({"include_usage": True},),
        "n": (1, 2, 3),
        "logprobs": (True,),
        "top_logprobs": (0, 2),
        "logit_bias": ({"3": 5}, {"64": -100}),
        "stop": ("a", ["b", "\n"]),
        "seed": (1, -5),
        "temperature": (0, 0.5, 2),
        "top_p": (0.1, 1),
        "top_k": (1, 5),
        "presence_penalty": (-2, 1.5),
        "frequency_penalty": (2,),
        "response_format": (
            *({"type": "json_object"}, {"type": "text"}),
            {"type": "json_schema", "json_schema": _SCHEMA},
        ),
        "user": ("ann",),
        "cache_salt": ("x",),
        "mmkv": (
            {"resume": "never"},
            {"resume": "required"},
            {"budget": 16},
            {"budget": "64KiB"},
            {"background": True},
        ),
        "max_tokens": _LENGTHS,
        "max_completion_tokens": (2,),
        "tool_choice": (
            *("required", "required", "auto", "none"),
            *(_named("look"), _named("find")),
            {"type": "allowed_tools", "allowed_tools": _ALLOWED},
        ),
        "parallel_tool_calls": (True, False),
        "chat_template_kwargs": ({"enable_thinking": True}, {}),
        "reasoning_effort": ("low", "none"),
        "store": (False,),
    },
    "responses": {
        "stream": (True, True, False),
        "store": (False, True),
        "include": (["message.output_text.logprobs"],),
        "top_logprobs": (1,),
        "max_output_tokens": _LENGTHS,
        "temperature": (0, 1.5),
        "text": ({"format": {"type": "json_object"}}, {"format": {"type": "text"}}),
        "metadata": ({"a": "b"},),
        "truncation": ("auto",),
        "mmkv": ({"budget": 16},),
        "tool_choice": (
            *("required", "required", "auto", "none"),
            *({"type": "function", "name": name} for name in ("look", "find")),
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            },
        ),
        "parallel_tool_calls": (True, False),
        "max_tool_calls": (1,),
        "reasoning": ({"effort": "low", "summary": "auto"}, {"effort": "none"}),
    },
    "messages": {
        "tool_choice": (
            *({"type": kind} for kind in ("any", "any", "auto", "none")),
            {"type": "any", "disable_parallel_tool_use": True},
            *({"type": "tool", "name": name} for name in ("look", "find")),
        ),
        "max_tokens": _LENGTHS,
        "stream": (True, False),
        "system": (
            "be brief",
            [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        ),
        "thinking": (
            {"type": "enabled", "budget_tokens": 1024},
            {"type": "disabled"},
            {"type": "adaptive"},
        ),
        "stop_sequences": (["a"],),
        "metadata": ({"user_id": "ann"},),
        "temperature": (0, 1),
        "top_k": (1, 5),
        "top_p": (0.5,),
    },
}


def options(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw up to three more fields of a body: of a ``chat``, of ``responses`` or ``messages``."""
    known = _OPTIONS[kind]
    names = st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({one: st.sampled_from(known[one]) for one in chosen})
    )


@st.composite
def whole(draw: st.DrawFn, path: str) -> Any:
    """Draw a whole body for a path; most that have tools name a choice and a length."""
    body = draw(st.sampled_from(WHOLE[path]))
    if "model" not in body or "prompt" in body:
        return body
    kind = "responses" if "responses" in path else "messages" if "messages" in path else "chat"
    body = body | draw(options(kind))
    length = "max_output_tokens" if kind == "responses" else "max_tokens"
    for name in ("tool_choice", length):
        if "tools" in body and draw(st.integers(0, 4)):
            body[name] = draw(st.sampled_from(_OPTIONS[kind][name]))
    return body
