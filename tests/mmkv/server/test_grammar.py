"""Replies in JSON whose schema cannot be followed, or is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.servers import Server

# What llguidance takes, and gives up in the middle of a reply.
LOOP: dict[str, Any] = {
    "type": "object",
    "properties": {"red": {"$ref": "#/$defs/a"}},
    "required": ["red"],
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}
ITSELF = {"$ref": "#/$defs/a", "$defs": LOOP["$defs"]}
WIDE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                f"{at}-{name}": {"type": "string", "pattern": "^a.*b.*c$"} for name in range(8)
            },
        }
        for at in range(60)
    ]
}


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema} | fields
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("schema", [LOOP, WIDE, ITSELF], ids=["loop", "wide", "itself"])
def test_a_schema_that_breaks_in_mid_reply_is_refused(server: Server, schema: Any, n: int) -> None:
    answer = server.chat("what?", response_format=form(schema), max_tokens=80, n=n)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_value")
    assert error["message"].startswith("the schema cannot be followed: ")
    assert "\n" not in error["message"] and error["message"].endswith("simplify it")
    assert server.held == 0
    assert server.chat("what?").status_code == 200


def test_a_stream_whose_schema_breaks_ends_with_the_error(server: Server) -> None:
    """Also while other replies to the same request could go on."""
    lengths = {"enum": ["a", "bcdefghijklmnop"]}
    late = LOOP | {
        "properties": {"colour": lengths} | LOOP["properties"],
        "required": ["colour", "red"],
    }
    given = {"response_format": form(late), "max_tokens": 80, "n": 8, "temperature": 1, "seed": 1}
    lines = [line for line in server.chat("what?", stream=True, **given).text.split("\n") if line]
    assert lines[-1].startswith('data: {"error"') and "cannot be followed" in lines[-1]


def test_a_response_whose_schema_breaks(server: Server) -> None:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": LOOP}}
    body = {"model": "small", "input": "what?", "text": text}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert "the schema cannot be followed" in answer.json()["error"]["message"]


def test_a_streamed_response_whose_schema_breaks_blames_the_request(server: Server) -> None:
    late = LOOP | {
        "properties": {"colour": {"enum": ["a"]}} | LOOP["properties"],
        "required": ["colour", "red"],
    }
    text = {"format": {"type": "json_schema", "name": "answer", "schema": late}}
    body = {"model": "small", "input": "what?", "text": text, "stream": True}
    lines = server.client.post("/v1/responses", json=body).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
