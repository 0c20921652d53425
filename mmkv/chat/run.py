"""Check the options of a chat, load its engine; give one answer or start a conversation.

torch is imported when the model is loaded: a mistake is told at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.calls.tools import Tool, ToolUse
from mmkv.chat.display import Display, answer, calls_shown, in_form, memory_line
from mmkv.chat.options import ChatOptions
from mmkv.chat.saved import (
    chat_extra,
    checked_target,
    figures_folder,
    is_session,
    report_target,
    write_figures,
    write_report,
)
from mmkv.chat.trouble import require_utf8
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import InputError, MmkvError, first_line
from mmkv.engine.paths import user_path
from mmkv.loading import UsageError, load_engine
from mmkv.prompt.media import check_source, load_image
from mmkv.prompt.video import check_sampling

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.api import Engine
    from mmkv.explain.trace import Trace
    from mmkv.reply import Reply
    from mmkv.session import Session


_LONGEST_LIST = 2**24  # bytes of a file of functions


def run_chat(options: ChatOptions) -> int:
    """Run ``mmkv chat`` and return the exit code. Raises MmkvError."""
    display = Display(options)
    prompt = _prompt(options)
    if options.cost and prompt is None:
        raise UsageError("--cost measures one answer to one prompt; give it with -p")
    if options.report is not None and prompt is None:
        raise UsageError("mmkv explain shows one answer to one prompt; give it with -p")
    images = _read_beforehand(options)
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
    options.certify(engine, display.note)
    read = engine.processor.load_clip
    videos = [read(video, options.fps, options.num_frames) for video in options.video]
    if prompt is not None and not options.interactive:
        return answer_once(engine, options, display, prompt, images, videos)
    from mmkv.chat.repl import Repl

    return Repl(engine, options, display, images, videos).run(prompt)


def _read_beforehand(options: ChatOptions) -> list[Any]:
    """Check all that needs no model, read the tools, and name the files to write; the pictures."""
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
    return images


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


def answer_once(
    engine: Engine,
    options: ChatOptions,
    display: Display,
    prompt: str,
    images: Sequence[Any],
    videos: Sequence[Any],
) -> int:
    """Answer ``prompt`` on stdout, with a line on memory on stderr.

    With ``--cost`` also what eviction cost the answer: the same reply, read again with the full
    cache. Returns the exit code (130 after Ctrl-C). Raises MmkvError.
    """
    with _opened(engine, options) as session:
        trace = session.trace() if options.report is not None else None
        finished = answer(
            session,
            options,
            display,
            prompt,
            images,
            videos,
            options.system if not session.history else None,
            options.sampling(),
            indent=2,
            tools=options.functions,
        )
        last, said = session.last, _conversation(options.system, prompt, images, videos)
        if last is not None and not options.json:
            _show_calls(last, display)
        if finished:
            display.note(memory_line(session))
        if session.history:
            if trace is not None:
                _write_pages(engine, trace, options, display, said if finished else None)
            if options.save is not None:
                session.save(options.save, chat_extra(engine, options.engine, options.model))
                display.note(f"saved to {options.save}")
        if finished and options.cost and last is not None and last.token_ids:
            display.note(cost_line(session, said))
    return 0 if finished else 130


def _show_calls(reply: Reply, display: Display) -> None:
    """Show the calls of a reply, which nobody answers here."""
    if reply.tool_calls:
        display.show(calls_shown([(one.name, one.arguments) for one in reply.tool_calls]))
        display.note("--json prints calls; mmkv chat -i asks for their results")


def _conversation(
    system: str | None, prompt: str, images: Sequence[Any], videos: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the messages that were sent, with their media."""
    media = [{"type": "image", "image": image} for image in images]
    media += [{"type": "video", "video": video} for video in videos]
    turn = {"role": "user", "content": [*media, {"type": "text", "text": prompt}]}
    return [turn] if system is None else [{"role": "system", "content": system}, turn]


def _write_pages(
    engine: Engine,
    trace: Trace,
    options: ChatOptions,
    display: Display,
    said: list[dict[str, Any]] | None,
) -> None:
    """Write the page of ``mmkv explain``, and its figures where they are asked for.

    Args:
        said: the messages before the reply; None: it was stopped.
    """
    assert options.report is not None
    if said is not None and options.load is None:
        display.note("reading it again with a full cache: what did the answer look at?")
        try:
            trace.measure_attention(engine.inputs(said))
        except MmkvError as error:  # the page is worth having without
            display.note(f"cannot tell what the answer looked at: {error}")
    display.note(write_report(trace, Path(options.report), options.compare))
    if options.figures is not None:
        display.note(write_figures(trace, Path(options.figures)))


def _opened(engine: Engine, options: ChatOptions) -> Session:
    if options.load is None:
        return engine.session()
    session, _ = engine.load_session(user_path(options.load))
    if options.rebudget and engine.policy.evicts:
        session.set_budget(engine.budget)
    return session


def cost_line(session: Session, conversation: list[dict[str, Any]]) -> str:
    """Compare the latest reply of ``session`` with what the full cache makes of it.

    Both caches are fed the prompt and the tokens of the reply, its end token too. The difference
    is the mean over them of KL(full || kept), in nats. Lossless decoding has had the full cache:
    then it says how many tokens were drafted.

    Args:
        conversation: the messages that ``session`` was sent, with their media.
    """
    import torch

    from mmkv.api import Engine
    from mmkv.engine.policies import make_policy

    assert session.last is not None
    engine, tokens = session.engine, session.last.token_ids
    if engine.drafts is not None:
        right = session.memory().accepted
        return f"no cost of eviction (lossless): {right} of {len(tokens)} tokens came from drafts"
    inputs = engine.inputs(conversation)
    whole = Engine(
        engine.family,
        engine.spec,
        engine.decoder.weights,
        None,
        make_policy("full"),
        prefill_chunk=engine.prefill_chunk,
        kv=engine.cache.pool.form.name,
    )
    ended = session.last.finish_reason == "eos"
    full, full_bytes = _replay(whole, inputs, tokens, ended)
    kept, kept_bytes = _replay(engine, inputs, tokens, ended)
    best = full.argmax(-1).tolist()
    same = sum(one == other for one, other in zip(best, tokens, strict=False))
    same += ended and best[-1] in engine.eos_token_ids
    divergence = torch.nn.functional.kl_div(
        kept.log_softmax(-1), full.log_softmax(-1), reduction="batchmean", log_target=True
    )
    rounding = engine.decoder.weights.rounding()
    line = (
        f"cost of eviction: the full cache ranks {same} of {len(full)} tokens of the reply "
        f"first, KL {float(divergence):.4f} nats a token; {format_bytes(kept_bytes)} of keys and "
        f"values instead of {format_bytes(full_bytes)}{in_form(engine)}"
    )
    return f"{line}; {rounding}, in both" if rounding else line


def _replay(
    engine: Engine, inputs: dict[str, Tensor], tokens: Sequence[int], ended: bool
) -> tuple[Tensor, int]:
    """Return the logits before each token of a reply, on the CPU, and the bytes held at the end."""
    import torch

    with engine.session() as session:
        rows = [session.prefill(inputs)]
        rows += [session.decode(token) for token in (tokens if ended else tokens[:-1])]
        return torch.stack(rows).cpu(), session.memory().kv_bytes
