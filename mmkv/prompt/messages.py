"""Read conversations in the transformers chat format and take their media out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.prompt.part_settings import MediaSettings, Sourced
from mmkv.prompt.template import Message, as_parts

_ROLES = ("system", "user", "assistant")
# Keys under which common formats put the picture or video of a part.
_SOURCE_KEYS = ("image", "video", "url", "path", "image_url", "video_url")


def take_media(messages: Sequence[Message]) -> tuple[list[Message], list[Any], list[Any]]:
    """Split ``messages`` into messages with bare placeholders, pictures, and videos, in order.

    A part is {"type": "text", "text": ...}, or of type image / video (or image_url / video_url)
    with its source under "image", "video", "url", "path" or "image_url", and settings of it
    (:class:`~mmkv.prompt.part_settings.MediaSettings`): its source is then a
    :class:`~mmkv.prompt.part_settings.Sourced`. Raises InputError for anything else.
    """
    plain: list[Message] = []
    images: list[Any] = []
    videos: list[Any] = []
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation is a list of messages, not a {type(messages).__name__}")
    if not messages:
        raise InputError("the conversation is empty; give at least one user message")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(role, str) or role not in _ROLES:
            raise InputError(f"a message needs a role out of {', '.join(_ROLES)}, and a content")
        content: Any = message.get("content")
        if content is not None and not isinstance(content, (str, list, tuple)):
            raise InputError(
                f"a message's content is {type(content).__name__}; give a text or a list of parts"
            )
        parts: list[dict[str, Any]] = []
        for part in as_parts(list(content) if isinstance(content, tuple) else content or ""):
            if not isinstance(part, dict):
                raise InputError(
                    f"a message part is {type(part).__name__}; give a dict with a type"
                )
            kind = str(part.get("type", "")).removesuffix("_url")
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind in ("image", "video"):
                (images if kind == "image" else videos).append(_source(part, kind))
                parts.append({"type": kind})
            else:
                raise InputError(
                    f"a message part of type {part.get('type')!r} is not understood; "
                    "use text, image or video"
                )
        plain.append({"role": message["role"], "content": parts})
    return plain, images, videos


def is_blank(message: Message) -> bool:
    """Return whether a message says nothing in words."""
    return not any(
        part["type"] == "text" and part["text"].strip() for part in as_parts(message["content"])
    )


def _source(part: dict[str, Any], kind: str) -> Any:
    """Return the source of a part, with its settings where it has any."""
    settings = {key: value for key, value in part.items() if value is not None}
    del settings["type"]
    found = None
    for key in _SOURCE_KEYS:
        value = settings.pop(key, None)
        if isinstance(value, dict):  # {"image_url": {"url": ...}}
            settings |= {name: each for name, each in value.items() if each is not None}
            value = settings.pop("url", None)
        found = value if found is None else found
    if found is None:
        raise InputError(
            f"a message part of type {part['type']!r} names no source; add 'url' or 'path'"
        )
    if kind == "image":
        settings.pop("detail", None)  # OpenAI's; pictures are read at the model's size
    return Sourced(found, MediaSettings.of(kind, settings)) if settings else found
