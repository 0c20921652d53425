"""``mmkv chat -p``: one question, one answer on stdout, one line on memory on stderr.

With ``--cost`` also the cost of eviction: the same reply, read again with the full cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.api import Engine
from mmkv.chat.display import answer, calls_shown, in_form, memory_line
from mmkv.chat.saved import chat_extra, write_figures, write_report
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import MmkvError
from mmkv.engine.paths import user_path
from mmkv.engine.policies import make_policy

if TYPE_CHECKING:
    from mmkv.chat.display import Display
    from mmkv.chat.options import ChatOptions
    from mmkv.session import Session


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
            tools=options.functions,
        )
        calls = [] if session.last is None else session.last.tool_calls
        if calls and not options.json:
            display.show(calls_shown([(one.name, one.arguments) for one in calls]))
            display.note("--json prints calls; mmkv chat -i asks for their results")
        if finished:
            display.note(memory_line(engine, session))
        if trace is not None and options.report is not None and session.history:
            if finished and options.load is None:
                turn = _conversation(options.system, prompt, images, videos)
                display.note("reading it again with a full cache: what did the answer look at?")
                try:
                    trace.measure_attention(engine.inputs(turn))
                except MmkvError as error:  # the page is worth having without
                    display.note(f"cannot tell what the answer looked at: {error}")
            display.note(write_report(trace, Path(options.report), options.compare))
            if options.figures is not None:
                display.note(write_figures(trace, Path(options.figures)))
        if options.save is not None and session.history:
            session.save(options.save, chat_extra(engine, options.engine, options.model))
            display.note(f"saved to {options.save}")
        last = session.last
        if finished and options.cost and last is not None and last.token_ids:
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


def cost_line(engine: Engine, session: Session, conversation: list[dict[str, Any]]) -> str:
    """Compare the latest reply of ``session`` with what the full cache makes of it.

    Both caches are fed the prompt and the tokens of the reply, its end token too. The difference
    is the mean over them of KL(full || kept), in nats.

    Args:
        conversation: the messages that ``session`` was sent, with their media.
    """
    assert session.last is not None
    tokens, inputs = session.last.token_ids, engine.inputs(conversation)
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
    with engine.session() as session:
        rows = [session.prefill(inputs)]
        rows += [session.decode(token) for token in (tokens if ended else tokens[:-1])]
        return torch.stack(rows).cpu(), session.memory().kv_bytes
