"""Convert rows of common formats to messages of the transformers chat format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.engine.paths import user_path
from mmkv.prompt.media import check_source, describe
from mmkv.prompt.messages import is_blank, take_media
from mmkv.prompt.part_settings import taken_apart
from mmkv.prompt.template import Message

KINDS = ("chat", "llava", "mmdu", "text")

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_PART_SOURCES = ("image", "video", "url", "path", "image_url", "video_url")


class DataError(InputError):
    """Training data that cannot be used at all; a single bad row is skipped instead."""


class RowError(Exception):
    """The reason why a row is skipped."""


@dataclass(frozen=True)
class Conversation:
    """A chat with at least one message of the assistant.

    Attributes:
        messages: role and content parts in the transformers chat format; a picture or video is
            ``{"type": "image" | "video", <the same word>: absolute path, URL or data: URI}``, a
            video also by a list of its frames, with settings beside it.
        file, row: where it came from, for messages; rows count from 1 (JSONL: the line).
    """

    messages: list[Message]
    file: str
    row: int


@dataclass(frozen=True)
class Document:
    """Plain text, every token of which is a target. ``file``, ``row``: as in Conversation."""

    text: str
    file: str
    row: int


Row = Conversation | Document


def read_row(value: Any, kind: str, root: Path, file: str, row: int) -> Row:
    """Read one row as a conversation or document, its media looked for but not opened.

    Args:
        value: the row as JSON gives it, or the text itself.
        kind: one of :data:`KINDS`.
        root: what relative paths of media start from.

    Raises:
        RowError: why the row cannot be used.
    """
    if kind == "text":
        text = _text(value)
        _require_unicode(text)
        return Document(text, file, row)
    messages = _from_messages(value) if kind == "chat" else _from_turns(value, kind)
    return Conversation(_checked(messages, root), file, row)


def _require_unicode(text: str) -> None:
    """Raise RowError for text that no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        odd = ascii(text[error.start])
        raise RowError(f"its text holds {odd}, half of a character (a lone surrogate)") from error


def kind_of(value: Any) -> str | None:
    """Recognise the kind a row looks like, None when like none."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "chat"
    if not isinstance(value, dict):
        return None
    if "messages" in value:
        return "chat"
    if isinstance(value.get("conversations"), list):
        return "mmdu" if "<ImageHere>" in json.dumps(value["conversations"]) else "llava"
    return "text" if isinstance(value.get("text"), str) else None


def _text(value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise RowError("it has no text")
    if not text.strip():
        raise RowError("its text is blank")
    return text


def _from_messages(value: Any) -> list[Message]:
    """Read the messages of a chat row.

    Parts without a source take the row's ``images`` and ``videos``.
    """
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RowError("it has no list of messages")
    aside = value if isinstance(value, dict) else {}
    waiting = {kind: iter(_listed(aside, kind)) for kind in ("image", "video")}
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_with_source(part, waiting) for part in content]
        elif not isinstance(content, str):
            raise RowError(f"a message's content is {type(content).__name__}, not text or parts")
        made.append({"role": message.get("role"), "content": content})
    _require_used(waiting)
    return made


def _with_source(part: Any, waiting: dict[str, Iterator[Any]]) -> Any:
    if not isinstance(part, dict):
        raise RowError("a content part is not an object with a type")
    kind = part.get("type")
    if (
        isinstance(kind, str)
        and kind in waiting
        and not any(part.get(key) for key in _PART_SOURCES)
    ):
        return {**part, kind: _next(waiting, kind)}
    return part


def _from_turns(value: Any, kind: str) -> list[Message]:
    """Read the messages of a LLaVA or MMDU row, whose media fill placeholders in the order of the
    text.
    """
    turns = value.get("conversations") if isinstance(value, dict) else None
    if not isinstance(turns, list):
        raise RowError("it has no list of conversations")
    waiting = {each: iter(_listed(value, each)) for each in ("image", "video")}
    messages = []
    for turn in turns:
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise RowError("a turn has no text under 'value'")
        role = _ROLES.get(str(turn.get("from")))
        if role is None:
            raise RowError(f"a turn is from {turn.get('from')!r}; known are {', '.join(_ROLES)}")
        messages.append({"role": role, "content": list(_parts(text, kind, waiting))})
    _require_used(waiting)
    return messages


def _parts(text: str, kind: str, waiting: dict[str, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Yield text and media of a turn.

    LLaVA rows set a placeholder apart by a newline, which belongs to it: chat templates write what
    their model expects there. MMDU's stand inside sentences (``Image1: <ImageHere>.``).
    """
    if kind == "mmdu":
        pieces = re.split("(<ImageHere>)", text)
    else:
        pieces = re.split(r"(<image>|<video>)\n?", re.sub(r"\n(<image>|<video>)$", r"\1", text))
    for piece in pieces:
        if piece in ("<ImageHere>", "<image>", "<video>"):
            medium = "video" if piece == "<video>" else "image"
            yield {"type": medium, medium: _next(waiting, medium)}
        elif piece:
            yield {"type": "text", "text": piece}


def _listed(value: dict[str, Any], kind: str) -> list[Any]:
    """List a row's media of one kind: under ``image`` or ``images``.

    The value may be one, a list, or a dict of them.
    """
    found = value.get(kind) or value.get(f"{kind}s") or []
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, list) else [found]


def _next(waiting: dict[str, Iterator[Any]], kind: str) -> Any:
    for found in waiting[kind]:
        return found
    raise RowError(f"it has more {kind} placeholders than {kind}s")


def _require_used(waiting: dict[str, Iterator[Any]]) -> None:
    for kind, rest in waiting.items():
        if left := len(list(rest)):
            raise RowError(f"it has {left} {kind}(s) more than placeholders")


def _checked(messages: list[Message], root: Path) -> list[Message]:
    """Find the media of the messages, or the reason why they cannot be trained on."""
    try:
        plain, images, videos = take_media(messages)
        waiting = {"image": iter(images), "video": iter(videos)}
        made: list[Message] = []
        for message in plain:
            parts = [
                part
                if part["type"] == "text"
                else _found(next(waiting[part["type"]]), part["type"], root)
                for part in message["content"]
            ]
            made.append({"role": message["role"], "content": parts})
    except InputError as error:
        raise RowError(str(error)) from error
    for message in made:
        for part in message["content"]:
            found = part[part["type"]]
            for text in found if isinstance(found, list) else [found]:
                _require_unicode(text)
    answers = [message for message in made if message["role"] == "assistant"]
    if not answers:
        raise RowError("the assistant says nothing in it")
    if any(is_blank(message) for message in answers):
        raise RowError("a message of the assistant is blank")
    if any(part["type"] != "text" for message in answers for part in message["content"]):
        raise RowError("a message of the assistant holds a picture or video")
    if next(m["role"] for m in made if m["role"] != "system") == "assistant":
        raise RowError("the assistant speaks before the user")
    return made


def _found(source: Any, kind: str, root: Path) -> dict[str, Any]:
    """Return a part with the absolute path of its medium, its settings as they are."""
    bare, settings = taken_apart(source)
    several = kind == "video" and isinstance(bare, list)
    found = [_resolved(one, kind, root) for one in bare] if several else _resolved(bare, kind, root)
    return {"type": kind, kind: found, **settings.given()}


def _resolved(source: Any, kind: str, root: Path) -> str:
    if not isinstance(source, str):
        raise RowError(f"a {kind} is named by {type(source).__name__}, not by a path or URL")
    if source.startswith(("data:", "http://", "https://")):
        return source
    try:
        path = (root / user_path(source.removeprefix("file://"))).absolute()
        check_source(str(path))
    except InputError as error:
        raise RowError(f"{kind} {describe(source)}: {error}") from error
    return str(path)
