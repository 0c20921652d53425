"""A conversation as text: for /history on the screen and /export to a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import InputError

if TYPE_CHECKING:
    from mmkv.api import Session
    from mmkv.prompt.template import Message

_TITLE = "# Conversation with "
_SPEAKERS = {"system": "System", "user": "You", "assistant": "Reply"}


def spoken(message: Message) -> str:
    """Return a message as text; a picture or video is a word in brackets."""
    content: Any = message["content"]
    if isinstance(content, str):
        return content
    words = {"image": "[picture]", "video": "[video]"}
    parts = [words.get(part["type"]) or part.get("text", "") for part in content]
    return " ".join(part for part in parts if part)


def markdown(session: Session, model: str) -> str:
    """Return the whole conversation as a Markdown document."""
    blocks = [f"{_TITLE}{model}"]
    for message in session.history:
        blocks += [f"**{_SPEAKERS[message['role']]}**", spoken(message) or "(nothing)"]
    return "\n\n".join(blocks) + "\n"


def is_transcript(path: Path) -> bool:
    """Return whether a file is one that /export wrote, by its first line."""
    try:
        with path.open("rb") as file:
            return file.read(len(_TITLE)) == _TITLE.encode()
    except OSError:
        return False


def export(session: Session, model: str, path: Path) -> None:
    """Write the conversation to ``path``; the old file stays until the new one is whole.

    Raises:
        InputError: it cannot be written.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".mmkv-")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(markdown(session, model))
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}; choose another path") from error
