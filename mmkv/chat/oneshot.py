"""``mmkv chat -p``: one question, one answer on stdout, one line on memory on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv.chat.answer import answer
from mmkv.chat.display import memory_line

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.chat.display import Display
    from mmkv.chat.options import ChatOptions


def answer_once(
    engine: Engine,
    options: ChatOptions,
    display: Display,
    prompt: str,
    images: Sequence[Any],
    videos: Sequence[Any],
) -> int:
    """Answer ``prompt`` and return the exit code (130 after Ctrl-C). Raises MmkvError."""
    with engine.session() as session:
        finished = answer(
            engine,
            session,
            options,
            display,
            prompt,
            images,
            videos,
            options.system,
            options.sampling(),
            indent=2,
        )
        if finished:
            display.note(memory_line(engine, session))
    return 0 if finished else 130
