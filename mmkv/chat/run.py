"""Check the options of a chat, load its engine; give one answer or start a conversation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv.calls.tools import Tool, ToolUse
from mmkv.chat.display import Display
from mmkv.chat.options import ChatOptions
from mmkv.chat.saved import checked_target, figures_folder, is_session, report_target
from mmkv.chat.trouble import require_utf8
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import InputError, first_line
from mmkv.engine.paths import user_path
from mmkv.loading import UsageError, load_engine
from mmkv.prompt.media import check_source, load_image
from mmkv.prompt.video import check_sampling

if TYPE_CHECKING:
    from mmkv.api import Engine


_LONGEST_LIST = 2**24  # bytes of a file of functions


def run_chat(options: ChatOptions) -> int:
    """Run ``mmkv chat`` and return the exit code. Raises MmkvError."""
    display = Display(options)
    prompt = _prompt(options)
    if options.cost and prompt is None:
        raise UsageError("--cost measures one answer to one prompt; give it with -p")
    if options.report is not None and prompt is None:
        raise UsageError("mmkv explain shows one answer to one prompt; give it with -p")
    # Check everything that needs no model before the model is loaded.
    images = [load_image(source) for source in options.image]
    check_sampling(options.fps, options.num_frames)
    for source in options.video:
        check_source(source)
    if options.tools is not None:
        options.functions = read_tools(options.tools)
    if options.save is not None:
        options.save = str(_save_target(options))
    if options.report is not None:
        options.report = str(report_target(options.report))
    if options.compare is not None:
        from mmkv.explain.page import read_page

        read_page(options.compare)
    if options.figures is not None:
        options.figures = str(figures_folder(options.figures))
    engine = load_engine(
        options.engine,
        display,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        generation_config=options.generation_config,
        pictures=bool(options.image or options.video),
        memory=options.memory,
    )
    _choose_template(engine, options)
    read = engine.processor.load_clip
    videos = [read(video, options.fps, options.num_frames) for video in options.video]
    if prompt is not None and not options.interactive:
        from mmkv.chat.oneshot import answer_once

        return answer_once(engine, options, display, prompt, images, videos)
    from mmkv.chat.repl import Repl

    return Repl(engine, options, display, images, videos).run(prompt)


def _choose_template(engine: Engine, options: ChatOptions) -> None:
    """Leave the template out for --raw, or tell it whether to think; note what is forgotten.

    Raises:
        InputError: there is none, or it knows no thinking.
    """
    processor = engine.processor
    if options.raw:
        processor.template = processor.template.as_raw()
    elif processor.template.source is None:
        raise InputError(
            f"{options.model} has no chat template, so it is a base model that continues a text; "
            "send it one as it is with --raw, or name a model that was trained to chat"
        )
    elif options.thinking in ("on", "off"):
        values = {"enable_thinking": options.thinking == "on"}
        processor.template = processor.template.with_values(values)
    elif options.thinking is not None:
        engine.require_thoughts(f"--thinking {options.thinking}")
        if options.most_thought == 0 and "enable_thinking" in processor.template.variables:
            processor.template = processor.template.with_values({"enable_thinking": False})
    if options.forget_thoughts:
        engine.require_thoughts("--forget-thoughts")
        engine.forget_thoughts = True


def read_tools(name: str) -> tuple[Tool, ...]:
    """Return the functions that a JSON file lists. Raises InputError."""
    try:
        with user_path(name).open("rb") as file:
            text = file.read(_LONGEST_LIST + 1)
        given = json.loads(text) if len(text) <= _LONGEST_LIST else None
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}; name a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is no JSON ({first_line(error)}); mend it") from error
    if not isinstance(given, list) or not given:
        raise InputError(
            f'{name} has to be a list of functions, [{{"type": "function", "function": {{"name": '
            f"...}}}}], of at most {format_bytes(_LONGEST_LIST)}"
        )
    try:
        return ToolUse(tuple(Tool.of(one, f"[{at}]") for at, one in enumerate(given))).tools
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _save_target(options: ChatOptions) -> Path:
    """Return the file of --save: new, or the one that the conversation was loaded from."""
    assert options.save is not None
    own = None if options.load is None else user_path(options.load).resolve()
    return checked_target(
        options.save,
        "a session file",
        is_session,
        lambda path: path.resolve() == own,
        "delete it first",
    )


def _prompt(options: ChatOptions) -> str | None:
    """Return the question of a one-shot run, None for a conversation. Raises InputError."""
    prompt = options.prompt
    piped = not sys.stdin.isatty()
    if prompt == "-" or (prompt is None and piped and not options.interactive):
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n")
    if prompt is not None and not prompt.strip():
        raise InputError("the prompt is empty; write a question after -p or pipe one in")
    if prompt is not None:
        require_utf8(prompt)
    return prompt
