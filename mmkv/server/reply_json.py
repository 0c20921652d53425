"""Replies in the shape of OpenAI's chat completions."""

from __future__ import annotations

import dataclasses
import json
import secrets
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
    """The log probabilities of a reply as it grows, as JSON text: objects take ten times that.

    It stands for a list in what :func:`rendered` writes.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Take those of more tokens."""
        self._texts += [json.dumps(row, separators=(",", ":")) for row in rows]

    @property
    def text(self) -> str:
        """Return the list in ASCII."""
        return f"[{','.join(self._texts)}]"


def rendered(data: Any, ascii: bool = False) -> bytes:
    """Return JSON in UTF-8 of what may hold :class:`Rows`."""
    found: list[Rows] = []
    mark = secrets.token_hex(16)  # that no text of a request holds

    def placed(one: Any) -> str:
        if not isinstance(one, Rows):
            raise TypeError(f"{type(one).__name__} is no JSON")
        found.append(one)
        return mark

    text = json.dumps(
        data, ensure_ascii=ascii, allow_nan=False, separators=(",", ":"), default=placed
    )
    if not found:
        return text.encode()
    first, *others = text.split(f'"{mark}"')
    parts = [part for rows, rest in zip(found, others, strict=True) for part in (rows.text, rest)]
    return "".join([first, *parts]).encode()


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
            "logprobs": None if rows is None else {"content": rows[index], "refusal": None},
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
