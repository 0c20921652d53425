"""Replies in the shape of OpenAI's chat completions."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmkv.server.spelling import Spelled
    from mmkv.server.work import Usage

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclasses.dataclass
class Head:
    """What every object of one answer begins with.

    Attributes:
        with_usage: whether each piece of a stream has the field ``usage``: null but in the last.
    """

    id: str
    created: int
    model: str
    with_usage: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields for an object of a kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Rows:
    """The log probabilities of a reply as it grows, as JSON text: objects take ten times that."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def add(self, spelled: list[Spelled]) -> None:
        """Take those of more tokens."""
        for row in logprobs(spelled)["content"]:
            self._texts.append(json.dumps(row, separators=(",", ":")).encode())

    def content(self) -> list[dict[str, Any]]:
        """Return a row for each token."""
        return [json.loads(text) for text in self._texts]


def completion(
    head: Head,
    texts: Sequence[str],
    reasons: Sequence[str],
    rows: Sequence[Rows] | None,
    usage: Usage,
) -> dict[str, Any]:
    """Return a whole answer."""
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None
            if rows is None
            else {"content": rows[index].content(), "refusal": None},
            "finish_reason": FINISH[reason],
        }
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
    ]
    return head.fields("chat.completion") | {"choices": choices, "usage": usage_json(usage)}


def chunk(
    head: Head,
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    spelled: list[Spelled] | None = None,
) -> dict[str, Any]:
    """Return a piece of a streamed answer."""
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": None if spelled is None else logprobs(spelled),
        "finish_reason": None if reason is None else FINISH[reason],
    }
    usage = {"usage": None} if head.with_usage else {}
    return head.fields("chat.completion.chunk") | {"choices": [choice]} | usage


def usage_chunk(head: Head, usage: Usage) -> dict[str, Any]:
    """Return the last piece of a streamed answer."""
    return head.fields("chat.completion.chunk") | {"choices": [], "usage": usage_json(usage)}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage, with what mmkv adds under ``mmkv``."""
    own = dataclasses.asdict(usage)
    prompt, reply = own.pop("prompt_tokens"), own.pop("completion_tokens")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": usage.resumed},
        "mmkv": own,
    }


def logprobs(spelled: list[Spelled]) -> dict[str, Any]:
    """Return the log probabilities of some tokens."""
    content = [
        _token(one) | {"top_logprobs": [_token(other) for other in one.top]} for one in spelled
    ]
    return {"content": content, "refusal": None}


def _token(one: Spelled) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": one.bytes}
