"""Send one turn and print the reply, for both forms of ``mmkv chat``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mmkv.chat.record import record
from mmkv.engine.errors import STOPS, without_codes

if TYPE_CHECKING:
    from mmkv.api import Engine, Session
    from mmkv.chat.display import Display
    from mmkv.chat.markdown import MarkdownStream
    from mmkv.chat.options import ChatOptions
    from mmkv.chat.watch import Watch
    from mmkv.reply import Reply
    from mmkv.sampling import Sampling


class OutputClosed(BrokenPipeError):
    """Whoever read the answers has gone (``mmkv chat | head``)."""


def answer(
    engine: Engine,
    session: Session,
    options: ChatOptions,
    display: Display,
    text: str,
    images: Sequence[Any],
    videos: Sequence[Any],
    system: str | None,
    sampling: Sampling,
    indent: int | None = None,
    watching: bool = False,
) -> bool:
    """Send a turn and print the reply; False when Ctrl-C stopped it.

    stdout gets the reply's text (as it comes, or whole) or its JSON (``indent``), and nothing
    else; on a terminal the text's Markdown is rendered, unless ``options`` say plain.

    ``watching``: a panel on stderr shows the memory meanwhile; a reply to the same terminal is
    printed when it is whole.

    Raises OutputClosed, MmkvError, or whatever else fails; the session may hold the
    turn then.
    """
    whole = options.no_stream or options.json
    watch = _watch(engine, session, display) if watching else None
    late = watch is not None and sys.stdout.isatty() and not whole
    finished, line_open = True, False
    view = _view(options)
    with display.prefilling() as bar:
        try:
            if images or videos:
                _prepare_to_see(engine, options, display)
            pieces = session.send(
                text, images=images, videos=videos, system=system, sampling=sampling, progress=bar
            )
        except KeyboardInterrupt:
            return False
        before = len(session.history)
        try:
            for piece in pieces:
                bar.close()
                if watch is not None:
                    watch.feed(piece)
                if not whole and not late:
                    line_open = True
                    view.feed(piece)
        except KeyboardInterrupt:
            finished = False
        except STOPS:
            raise
        except BaseException:
            if line_open:
                view.close()
            raise
        finally:
            pieces.close()
            if watch is not None:
                watch.close()
    if len(session.history) == before:  # stopped while the prompt was read: nothing was appended
        if line_open:
            view.close()
        return False
    if options.json and session.last is not None:
        _write(json.dumps(record(engine, session, options.model), indent=indent) + "\n")
    elif (whole or late) and session.last is not None:
        view.feed(session.last.text)
        view.close()
    elif finished or line_open:
        view.close()
    if session.note:
        display.note(session.note)
    if session.last is not None:
        if session.last.memory is not None:
            display.note_faded(session.last.memory)
        _end_notes(session.last, options, display)
    return finished


def _end_notes(reply: Reply, options: ChatOptions, display: Display) -> None:
    """Say why a reply broke off, and how fast it came where that was asked for."""
    count = len(reply.token_ids)
    if reply.finish_reason == "context":
        display.note("the reply ends here: the model has no positions left; /clear starts anew")
    elif reply.finish_reason == "length":
        display.note(
            f"the reply was cut off after {count:,} tokens; --max-new-tokens, or /set "
            "max_new_tokens, allows more"
        )
    if options.stats:
        display.note(
            f"{count:,} tokens at {reply.tokens_per_second:.1f} tokens/s, the first after "
            f"{reply.seconds_to_first_token:.2f} s; {reply.prompt_tokens:,} tokens read"
        )


def _prepare_to_see(engine: Engine, options: ChatOptions, display: Display) -> None:
    """Read what the first picture needs, with a moving bar."""
    if engine.processor.sees and not engine.family.sees_at_once:
        with display.loading(options.model) as progress:
            progress("what reads pictures")
            _ = engine.family.hf


def _watch(engine: Engine, session: Session, display: Display) -> Watch:
    from mmkv.chat.watch import Watch

    return Watch(engine, session, display.console, echo=sys.stdout.isatty())


class _Plain:
    """Writes a reply as it is; to a terminal without the codes that would steer it."""

    def __init__(self) -> None:
        self._shown = sys.stdout.isatty()

    def feed(self, piece: str) -> None:
        _write(without_codes(piece) if self._shown else piece)

    def close(self) -> None:
        _write("\n")


def _view(options: ChatOptions) -> _Plain | MarkdownStream:
    """Return what shows a reply: rendered on a terminal that can move its cursor, else plain."""
    if options.plain or options.json or not sys.stdout.isatty():
        return _Plain()
    console = Console(highlight=False)
    if console.is_dumb_terminal:
        return _Plain()
    from mmkv.chat.markdown import MarkdownStream

    return MarkdownStream(console)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed(*error.args) from error
