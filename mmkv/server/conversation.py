"""Conversations as requests name them, and the keys by which their memories are found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["text", "image", "video"]


@dataclass(frozen=True)
class Part:
    """A text, or a picture or video by its URL.

    Attributes:
        digest: of a picture's or video's bytes; None until they are known.
        options: settings of a picture or video, see mmkv.prompt.part_settings.
    """

    kind: Kind
    text: str = ""
    url: str = field(default="", repr=False)
    digest: str | None = None
    options: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Message:
    """One message; neighbouring texts are one part."""

    role: str
    parts: tuple[Part, ...]

    @property
    def media(self) -> list[Part]:
        """Return its pictures and videos."""
        return [part for part in self.parts if part.kind != "text"]

    @property
    def texts(self) -> list[str]:
        """Return its texts."""
        return [part.text for part in self.parts if part.kind == "text"]

    def without_urls(self) -> Message:
        """Return it as a memory needs it: URLs can be megabytes, and the media were read."""
        if not any(part.url for part in self.parts):
            return self  # memories of one conversation share its first messages
        return Message(self.role, tuple(replace(part, url="") for part in self.parts))

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates take it, pictures and videos as bare placeholders."""
        texts = {"type": "text"}
        parts = [
            {**texts, "text": part.text} if part.kind == "text" else {"type": part.kind}
            for part in self.parts
        ]
        return {"role": self.role, "content": parts}


def reply_message(text: str) -> Message:
    """Return a reply as the message that a client sends back."""
    return Message("assistant", (Part("text", text),) if text else ())


def chain(root: str, messages: Sequence[Message], rule: object = None) -> list[str]:
    """Return a key per message: a hash of it, all before it, and ``root``.

    Args:
        root: what else the memory of a conversation depends on.
        messages: with the digests of their media.
        rule: by which pictures are read in a conversation with so many; None: by the same always.
    """
    keys = []
    for message in messages:
        root = link(root, message, rule)
        keys.append(root)
    return keys


def pictures_in(messages: Sequence[Message]) -> int:
    """Count the pictures, without videos."""
    return sum(part.kind == "image" for one in messages for part in one.media)


def link(before: str, message: Message, rule: object = None) -> str:
    """Return the key of ``message`` after the one with key ``before``."""
    parts: list[list[Any]] = [
        ["text", part.text] if part.kind == "text" else [part.kind, part.digest, part.options]
        for part in message.parts
    ]
    if rule is not None:
        parts = [[*part, rule] if part[0] == "image" else part for part in parts]
    assert not any(kind != "text" and value is None for kind, value, *_ in parts)
    return digest_of([before, message.role, parts])


_json = json.JSONEncoder(sort_keys=True).encode  # json.dumps makes an encoder each time


def digest_of(value: Any) -> str:
    """Return SHA-256 of a value that JSON can write."""
    return hashlib.sha256(_json(value).encode()).hexdigest()
