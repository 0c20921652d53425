"""Bodies as agents send them, recorded from their programs and shortened: each is answered.

What they call is forced here: the small model writes nothing of use by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mmkv import Engine
from tests.support.chat_models import picture
from tests.support.servers import MODEL, Server, picture_part, serving
from tests.support.tool_templates import save_seeing_tool_model

SCREEN = picture_part(picture("red", (48, 40)))
URL = SCREEN["image_url"]["url"]
PATH = {"type": "string", "description": "Where it is", "enum": ["/a.png", "/b.png"]}
PARAMETERS = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": PATH,
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 99},
    },
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read", "description": "Read a file.", "parameters": PARAMETERS}
_SEEN = [{"type": "input_text", "text": "<image>"}, {"type": "input_image", "image_url": URL}]
CODEX: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "look"}],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": _SEEN},
        {
            "type": "function_call",
            "id": "fc_1",
            "name": "read",
            "arguments": '{"path":"/a.png"}',
            "call_id": "call_a1",
        },
        {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": "call_a1",
            "output": [{"type": "input_image", "image_url": URL, "detail": "high"}],
        },
    ],
    "tools": [{"type": "function", "strict": False} | FUNCTION],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2155c",
    "client_metadata": {"turn_id": "01a2155c", "thread_id": "01a2155c"},
}


_IMAGE = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
_CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "text",
                    "text": "<system-reminder>\nToday is Thursday.\n</system-reminder>",
                },
                {"type": "text", "text": "what is it?"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "/a.png"}}
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "image", "source": _IMAGE}],
                }
                | _CACHED
            ],
        },
    ],
    "system": [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2; cc_entrypoint=sdk-cli;",
        },
        {"type": "text", "text": "look"} | _CACHED,
    ],
    "tools": [{"name": "read", "description": "Read a file.", "input_schema": PARAMETERS}],
    "metadata": {"user_id": '{"device_id":"a6","session_id":"06"}'},
    "max_tokens": 120,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of a small Qwen3-VL whose template shows tools."""
    folder = save_seeing_tool_model(tmp_path_factory.mktemp("tools"))

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=4096, dtype="float32")

    with serving(load) as made:
        yield made


def _events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("forced", [False, True])
def test_responses_of_codex(server: Server, forced: bool) -> None:
    body = CODEX | {"max_output_tokens": 120}
    if forced:
        body |= {"tool_choice": {"type": "function", "name": "read"}}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    kind: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [kind.validate_python(one) for one in _events(answer.text)]
    made = Response.model_validate(events[-1].response.to_dict())
    calls = [item for item in made.output if item.type == "function_call"]
    if forced:
        assert json.loads(calls[0].arguments)["path"] in PATH["enum"]


@pytest.mark.parametrize("forced", [False, True])
def test_messages_of_claude_code(server: Server, forced: bool) -> None:
    assert server.client.head("/").status_code == 200
    body = CLAUDE_CODE | ({"tool_choice": {"type": "tool", "name": "read"}} if forced else {})
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"}
    answer = server.client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    events = _events(answer.text)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    written = "".join(one.get("delta", {}).get("partial_json", "") for one in events)
    if forced:
        assert json.loads(written)["path"] in PATH["enum"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
