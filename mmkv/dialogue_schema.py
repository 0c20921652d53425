"""The conversation in a session file. Imports pydantic: imported only when such a file is read."""

from __future__ import annotations

from typing import Any, Literal

from engine.strict import Damage, Strict, parse


class _Text(Strict):
    type: Literal["text"]
    text: str


class _Media(Strict):
    type: Literal["image", "video"]


class _Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Text | _Media]


class _Options(Strict):
    """What ``mmkv chat`` keeps of its command line, in JSON."""

    model: str | None = None
    policy: str | None = None
    lookahead: float | None = None
    evict_every: int | None = None
    gates: str | None = None
    dtype: str | None = None
    weights: str | None = None
    kv: str | None = None


def parse_options(extra: str, key: str) -> dict[str, Any]:
    """Return the options under ``key`` of a header's ``extra``, JSON inside JSON. Raises Damage."""
    held: dict[str, str] = parse(dict[str, str], extra, is_json=True)
    options: _Options = parse(_Options, held.get(key, "{}"), is_json=True)
    return options.model_dump(exclude_none=True)


def parse_history(text: str) -> list[dict[str, Any]]:
    """Return the messages in JSON ``text``. Raises Damage."""
    messages: list[_Message] = parse(list[_Message], text, is_json=True)
    return [message.model_dump() for message in messages]


def parse_unfed(text: str, vocabulary: int, placeholders: set[int]) -> list[int]:
    """Return the token ids in JSON ``text``; none may stand for a picture. Raises Damage."""
    ids: list[int] = parse(list[int], text, is_json=True)
    if any(not 0 <= token < vocabulary or token in placeholders for token in ids):
        raise Damage("a token of the latest reply cannot have been generated")
    return ids
