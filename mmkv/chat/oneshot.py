"""``mmkv chat -p``: one question, one answer on stdout, one line on memory on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.chat.answer import answer
from mmkv.chat.display import memory_line
from mmkv.chat.explained import write_figures, write_report
from mmkv.chat.saved import chat_extra
from mmkv.engine.paths import user_path

if TYPE_CHECKING:
    from mmkv.api import Engine, Session
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
    with _opened(engine, options) as session:
        trace = session.trace() if options.report is not None else None
        finished = answer(
            engine,
            session,
            options,
            display,
            prompt,
            images,
            videos,
            options.system if not session.history else None,
            options.sampling(),
            indent=2,
        )
        if finished:
            display.note(memory_line(engine, session))
        if trace is not None and options.report is not None and session.history:
            display.note(write_report(trace, Path(options.report)))
            if options.figures is not None:
                display.note(write_figures(trace, Path(options.figures)))
        if options.save is not None and session.history:
            session.save(options.save, chat_extra(engine, options.engine, options.model))
            display.note(f"saved to {options.save}")
        last = session.last
        if finished and options.cost and last is not None and last.token_ids:
            from mmkv.chat.cost import cost_line

            turn = _conversation(options.system, prompt, images, videos)
            display.note(cost_line(engine, session, turn))
    return 0 if finished else 130


def _conversation(
    system: str | None, prompt: str, images: Sequence[Any], videos: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the messages that were sent, with their media."""
    media = [{"type": "image", "image": image} for image in images]
    media += [{"type": "video", "video": video} for video in videos]
    turn = {"role": "user", "content": [*media, {"type": "text", "text": prompt}]}
    return [turn] if system is None else [{"role": "system", "content": system}, turn]


def _opened(engine: Engine, options: ChatOptions) -> Session:
    if options.load is None:
        return engine.session()
    session, _ = engine.load_session(user_path(options.load))
    if options.rebudget and engine.policy.evicts:
        session.set_budget(engine.budget)
    return session
