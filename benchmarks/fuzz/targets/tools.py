"""The server's tools: bodies that name and answer calls, and clients that leave a stream.

Chats, responses and Anthropic's messages, on a template that shows tools, calls and results.
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import save_vision_model
from benchmarks.fuzz.target import Case, Wrong, as_bytes, as_text
from benchmarks.fuzz.targets.http import (
    ANSWERED_ID,
    MODEL,
    OPTIONS,
    RESPONSE_OPTIONS,
    HttpBodies,
    check_answer,
)
from mmkv.engine.errors import MmkvError

_TEMPLATE = """
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
tools: <tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
call as <tool_call>
{"name": NAME, "arguments": {}}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' -%}
<tool_response>
{{ shown(message.content) }}
</tool_response>
{%- else -%}
{{ shown(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function else call %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
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
_NAMES = ("look", "find")


class ToolBodies(HttpBodies):
    """Requests with tools, forced and free calls, and a history of calls and results.

    What is answered as a call names a tool of the request, and a call that was not cut off has
    arguments that are JSON.
    """

    name = "tool bodies"

    def _save_model(self, folder: Path) -> Path:
        model = save_vision_model(folder)
        (model / "chat_template.jinja").write_text(_TEMPLATE.lstrip())
        return model

    def _bodies(self, picture: str) -> dict[str, list[Any]]:
        chats = _chats(picture)
        return {
            "/v1/chat/completions": chats,
            f"/v1/sessions/{ANSWERED_ID}/chat/completions": chats[:2],
            "/v1/responses": _answers(picture),
            "/v1/messages": _messages(picture),
            "/v1/messages/count_tokens": _messages(picture),
        }

    def _options(self, path: str) -> dict[str, tuple[Any, ...]]:
        if "messages" in path:
            return _MESSAGE_OPTIONS
        return _CHAT_OPTIONS if path.endswith("completions") else _ANSWER_OPTIONS

    def make(self, rng: Random) -> Case:
        path = rng.choice(sorted(self._wholes))
        body = self._body(rng, path)
        if rng.random() < 0.6:
            body = mutate.edit(rng, body, 2)
        content = json.dumps(body).encode()
        if rng.random() < 0.05:
            content = mutate.flip(rng, content, 2)
        kind = "application/json"
        return {"method": "POST", "path": path, "type": kind, "body": as_text(content)}

    def _body(self, rng: Random, path: str) -> dict[str, Any]:
        """Return a whole body with options; most name a tool choice and a length."""
        body = copy.deepcopy(rng.choice(self._wholes[path]))
        options = self._options(path)
        chosen = set(rng.sample(sorted(options), rng.randrange(4)))
        length = "max_output_tokens" if "responses" in path else "max_tokens"
        chosen |= {name for name in ("tool_choice", length) if rng.random() < 0.8}
        made: dict[str, Any] = body | {name: rng.choice(options[name]) for name in sorted(chosen)}
        return made

    def _check_reply(self, answer: httpx.Response) -> None:
        if answer.status_code != 200 or answer.request.method != "POST":
            return
        if not answer.headers.get("content-type", "").startswith("application/json"):
            return
        asked = json.loads(answer.request.content)
        known = {
            (one.get("function") or one).get("name")
            for one in asked.get("tools") or ()
            if isinstance(one, dict)
        }
        for name, arguments, whole in _calls(answer.json()):
            if name not in known:
                raise Wrong(f"it calls {name!r}, which is no tool of {sorted(map(str, known))}")
            if whole and not isinstance(json.loads(arguments), dict):
                raise Wrong(f"arguments that are no object: {arguments[:100]!r}")


def _calls(made: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return the calls of an answer: name, arguments, and whether the reply was not cut off."""
    found = []
    for choice in made.get("choices") or ():
        calls = choice["message"].get("tool_calls") or ()
        whole = choice["finish_reason"] == "tool_calls"
        if whole and not calls:
            raise Wrong("finish_reason is tool_calls, and there are none")
        found += [(one["function"]["name"], one["function"]["arguments"], whole) for one in calls]
    for item in made.get("output") or ():
        if item["type"] == "function_call":
            whole = made["status"] == "completed"
            found.append((item["name"], item["arguments"], whole))
    if made.get("type") == "message":
        for block in made["content"]:
            if block["type"] == "tool_use":
                found.append((block["name"], json.dumps(block["input"]), True))
    return found


def _function(name: str, schema: Any, strict: bool | None = None) -> dict[str, Any]:
    made = {"name": name, "description": f"{name} at it", "parameters": schema}
    return made if strict is None else made | {"strict": strict}


def _tool_sets() -> list[list[dict[str, Any]]]:
    two = [_function("look", _PLACE, True), _function("find", _SCHEMAS[1])]
    return [two, *([_function("look", schema)] for schema in _SCHEMAS)]


def _chats(picture: str) -> list[Any]:
    image = {"type": "image_url", "image_url": {"url": picture}}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "what is there?"}]}
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"row": 1}'},
    }
    other = {"id": "call_2", "type": "function", "function": {"name": "find", "arguments": "no"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call, other]}
    results = [
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [image, {"type": "text", "text": "a"}],
        },
        {"role": "tool", "tool_call_id": "call_2", "content": "none"},
    ]
    talks = [
        [{"role": "user", "content": "what?"}],
        [asked],
        [asked, called, *results],
        [asked, called, *results, {"role": "assistant", "content": "a"}, asked],
        [asked, called | {"content": "I look."}, *results[::-1], {"role": "user", "content": "?"}],
    ]
    return [
        {"model": MODEL, "messages": talks[number % len(talks)], "tools": _openai_tools(tools)}
        for number, tools in enumerate(_tool_sets() * 2)
    ]


def _openai_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": one} for one in tools]


def _answers(picture: str) -> list[Any]:
    image = {"type": "input_image", "image_url": picture, "detail": "auto"}
    asked = {"role": "user", "content": [image, {"type": "input_text", "text": "what?"}]}
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"row": 1}'}
    result = {"type": "function_call_output", "call_id": "call_1"}
    thought = {"type": "reasoning", "summary": [], "content": []}
    inputs: list[Any] = [
        "what?",
        [asked],
        [asked, call, result | {"output": "a"}],
        [asked, thought, call | {"id": "fc_1"}, result | {"output": [image]}, asked],
    ]
    return [
        {
            "model": MODEL,
            "input": inputs[number % len(inputs)],
            "tools": [{"type": "function"} | one for one in tools],
        }
        | ({"previous_response_id": ANSWERED_ID} if number % 3 == 2 else {})
        for number, tools in enumerate(_tool_sets() * 2)
    ]


def _messages(picture: str) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
    image = {"type": "image", "source": source}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"row": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    talks: list[Any] = [
        [{"role": "user", "content": "what?"}],
        [asked],
        [asked, _said(use), {"role": "user", "content": [result | {"content": "a"}]}],
        [
            asked,
            _said(thought, {"type": "text", "text": "I look."}, use),
            {"role": "user", "content": [result | {"content": [image]}, image]},
        ],
        [asked, _said(use), {"role": "user", "content": [result | {"is_error": True}]}],
    ]
    return [
        {
            "model": MODEL,
            "max_tokens": 4,
            "messages": talks[number % len(talks)],
            "tools": [
                {"name": one["name"], "description": "", "input_schema": one["parameters"]}
                for one in tools
            ],
        }
        for number, tools in enumerate(_tool_sets() * 2)
    ]


def _said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def _chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


_ALLOWED = {"mode": "required", "tools": [_chosen("look")]}
_CHAT_OPTIONS: dict[str, tuple[Any, ...]] = OPTIONS | {
    "tool_choice": (
        *("required", "required", "auto", "none"),
        *map(_chosen, _NAMES),
        {"type": "allowed_tools", "allowed_tools": _ALLOWED},
    ),
    "parallel_tool_calls": (True, False),
    "max_tokens": (1, 8, 40, 120),
    "stream": (True, False),
    "chat_template_kwargs": ({"enable_thinking": True}, {}),
    "reasoning_effort": ("low", "none"),
    "store": (False,),
}
_ANSWER_OPTIONS: dict[str, tuple[Any, ...]] = RESPONSE_OPTIONS | {
    "tool_choice": (
        *("required", "required", "auto", "none"),
        *({"type": "function", "name": name} for name in _NAMES),
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    ),
    "parallel_tool_calls": (True, False),
    "max_output_tokens": (1, 8, 40, 120),
    "max_tool_calls": (1,),
    "reasoning": ({"effort": "low", "summary": "auto"}, {"effort": "none"}),
}
_MESSAGE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "tool_choice": (
        *({"type": kind} for kind in ("any", "any", "auto", "none")),
        {"type": "any", "disable_parallel_tool_use": True},
        *({"type": "tool", "name": name} for name in _NAMES),
    ),
    "max_tokens": (1, 8, 40, 120),
    "stream": (True, False),
    "system": ("be brief", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]),
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
}


class CutStreams(ToolBodies):
    """A client goes away in the middle of its request or of a streamed reply.

    It has to end soon, and give back every page; the server serves the next one.
    """

    name = "cut streams"

    def make(self, rng: Random) -> Case:
        path = rng.choice([one for one in sorted(self._wholes) if "count" not in one])
        body = self._body(rng, path) | {"stream": rng.random() < 0.9}
        if rng.random() < 0.1:
            body = mutate.edit(rng, body)
        return {
            "path": path,
            "body": json.dumps(body),
            # Pieces of the answer after which it is gone; below 0: before its request is whole.
            "cut": rng.choice((-1, 0, 1, 2, 3, rng.randrange(4, 12), rng.randrange(4, 60))),
            "again": rng.random() < 0.2,
        }

    async def _ask(self, case: Case) -> None:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            name = await self._made_before(client, case["path"] + case["body"])
            path = case["path"].replace(ANSWERED_ID, name)
            content = as_bytes(case["body"].replace(ANSWERED_ID, name))
            try:
                tries = [self._cut(path, content, case["cut"])]
                if case["again"]:  # the same, at once, beside it
                    tries.append(self._cut(path, content, case["cut"] + 5))
                await asyncio.gather(*tries)
                whole = {"model": MODEL, "messages": [{"role": "user", "content": "what?"}]}
                answer = await client.post("/v1/chat/completions", json=whole)
                check_answer(answer)
                if answer.status_code != 200:
                    raise Wrong(f"the next one is answered with {answer.status_code}")
            finally:
                await self._clean(client, name)

    async def _cut(self, path: str, content: bytes, cut: int) -> None:
        """Send a request, and go away after ``cut`` pieces of its answer."""
        gone, sent, come = asyncio.Event(), 0, 0
        pieces = [content[:-1]] if cut < 0 else [content]

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent < len(pieces):
                sent += 1
                return {"type": "http.request", "body": pieces[sent - 1], "more_body": cut < 0}
            if cut > 0:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal come
            come += message["type"] == "http.response.body"
            last = message["type"] == "http.response.body" and not message.get("more_body")
            if come >= cut or last:
                gone.set()
            await asyncio.sleep(0)

        headers = [(b"content-type", b"application/json"), (b"host", b"server")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
            "state": {},
        }
        try:
            await self._app(scope, receive, send)
        except (MmkvError, TypeError, ValueError) as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error
