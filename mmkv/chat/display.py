"""What the chat shows: notes, progress and memory on stderr, replies on stdout as text or JSON.

:func:`answer` sends a turn and prints its reply; :class:`Watch` is the panel of ``/watch``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mmkv.chat.trouble import one_line
from mmkv.engine.budget import RISK, format_bytes
from mmkv.engine.errors import STOPS, without_codes
from mmkv.environment import versions
from mmkv.loading import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mmkv.api import Engine, Session
    from mmkv.chat.markdown import MarkdownStream
    from mmkv.chat.options import ChatOptions
    from mmkv.engine.contents import Memory
    from mmkv.engine.policies import Policy
    from mmkv.engine.runtime import Runtime
    from mmkv.prompt.media import Note
    from mmkv.reply import Reply
    from mmkv.sampling import Sampling


class Display(Terminal):
    """Shows what a chat says beside its replies."""

    def __init__(self, options: ChatOptions) -> None:
        super().__init__(options.quiet)
        self.said: set[str] = set()  # what is said once in a conversation

    def tell(self, notes: Sequence[Note]) -> None:
        """Print the notes on a conversation that it has not had yet."""
        for one in notes:
            if one.kind not in self.said:
                self.said.add(one.kind)
                self.note(one)

    def error(self, error: Exception) -> None:
        """Print an error that does not end the conversation, in one line."""
        self.say(f"mmkv: error: {one_line(error)}")

    def show(self, content: RenderableType) -> None:
        """Print a table or chart."""
        self.console.print(content)

    @contextmanager
    def prefilling(self) -> Iterator[PrefillBar]:
        """Show a bar when a prompt takes more than one chunk."""
        bar = PrefillBar(self.console if self.animated else None)
        try:
            yield bar
        finally:
            bar.close()


class PrefillBar:
    """A progress bar, called with (tokens done, all tokens); draws nothing without a console."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Draw the state; the bar appears with the first call that is not the last."""
        if self._console is None or (self._bar is None and done >= total):
            return
        if self._bar is None:
            columns = (TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task("prefill", total=total)
        self._bar.update(self._bar.task_ids[0], completed=done)

    def close(self) -> None:
        """Take the bar off the screen (again: no effect)."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def total_entries(engine: Engine, memory: Memory) -> int:
    """Count the entries that a full cache would hold for the tokens seen."""
    return memory.tokens_seen * engine.spec.entry_layers * engine.spec.num_kv_heads


def memory_line(session: Session) -> str:
    """Write one line: what was kept, what it takes, and who decided."""
    engine, memory = session.engine, session.memory()
    total = total_entries(engine, memory)
    share = 100 * memory.entries / total if total else 100
    physical = format_bytes(memory.physical_bytes)
    line = (
        f"kept {memory.entries:,} of {total:,} entries ({share:.0f} %), {physical} physical in "
        f"{memory.pages:,} pages; policy {engine.policy.name}"
    )
    if engine.drafts is not None:
        bound = f"{session.budget.describe()}{in_form(engine)}"
        return f"{line}, budget {bound}, drafts: {_drafts(memory)}; all entries stay"
    if not engine.policy.evicts:
        return f"{line} {_without_budget(engine.policy)}"
    line += f", budget {session.budget.describe()}{in_form(engine)}"
    return line if memory.evicted else f"{line}: nothing had to be evicted"


def _drafts(memory: Memory) -> str:
    """Say how often lossless decoding foresaw the latest reply."""
    return f"{memory.accepted:,} of {memory.drafted:,} tokens right"


def in_form(engine: Runtime) -> str:
    """Name the form of the cache, where it is not the model's dtype."""
    form = engine.cache.pool.form
    return "" if form.plain else f", kv {form.name}"


def _without_budget(policy: Policy) -> str:
    """Say what bounds the memory of a policy that no budget binds."""
    if policy.admission is not None:
        return "keeps the entries that its write gates admit, whatever the budget"
    return "never evicts" if policy.pruner is None else "prunes pictures, whatever the budget"


def statistics(session: Session) -> RenderableType:
    """Draw the table and chart of /stats."""
    engine, memory = session.engine, session.memory()
    total = total_entries(engine, memory)
    facts = Table.grid(padding=(0, 2))
    kept = ", ".join(f"{count:,} {kind}" for kind, count in memory.by_modality.items())
    rows = [
        ("tokens seen", f"{memory.tokens_seen:,}"),
        ("entries kept", f"{memory.entries:,} of {total:,} ({kept})"),
        ("entries evicted", f"{memory.evicted:,}"),
        *([("moved together", f"{memory.compactions:,} times")] if memory.compactions else []),
        *([("risk", f"{memory.risk:.1%}: {RISK}")] if memory.risk is not None else []),
        ("pictures mostly gone", f"{len(memory.faded)} of {len(memory.pictures)}"),
        ("keys and values", f"{format_bytes(memory.kv_bytes)} in {memory.pages:,} pages"),
        ("metadata", format_bytes(memory.metadata_bytes)),
        *([("linear layers", format_bytes(memory.state_bytes))] if memory.state_bytes else []),
        ("features of pictures", format_bytes(memory.vision_bytes)),
        ("held for /undo", format_bytes(session.snapshot_bytes)),
        *([("drafts", _drafts(memory))] if engine.drafts is not None else []),
        ("decode step", session.decode_path),
        ("eviction", engine.evict_path),
        ("policy, budget", f"{engine.policy.name}, {session.budget.describe()}{in_form(engine)}"),
    ]
    if session.last is not None:
        rows.append(("latest reply", f"{session.last.tokens_per_second:.1f} tokens/s"))
    for name, value in rows:
        facts.add_row(name, value)
    return Group(facts, layer_chart(session.entries_per_layer(), engine.spec.num_kv_heads))


def layer_chart(entries: list[int], heads: int) -> Table:
    """Draw the bars of entries per layer; the number is the mean per KV head."""
    chart = Table.grid(padding=(0, 1))
    longest = max([*entries, 1])
    for layer, count in enumerate(entries):
        bar = Bar(longest, 0, count, width=30)
        chart.add_row(f"layer {layer}", bar, f"{count:,} ({count / heads:.1f} per head)")
    return chart


def record(session: Session, model: str) -> dict[str, Any]:
    """Return what --json prints after a reply of ``session`` (its ``last``)."""
    engine, reply, memory = session.engine, session.last, session.memory()
    assert reply is not None
    pool = engine.cache.pool
    return {
        "text": reply.text,
        "content": reply.content,
        "reasoning": reply.reasoning,
        "tool_calls": [one.as_json() for one in reply.tool_calls],
        "finish_reason": reply.finish_reason,
        "model": model,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "decode_path": session.decode_path,
        "policy": engine.policy.name,
        "policy_note": engine.policy_note,
        "kv": pool.form.name,
        "kv_note": engine.form_note,
        "budget": {"unit": session.budget.kind, "value": session.budget.value},
        "tokens": {
            "prompt": reply.prompt_tokens,
            "generated": len(reply.token_ids),
            "seen": memory.tokens_seen,
        },
        "entries": {
            "kept": memory.entries,
            "evicted": memory.evicted,
            "evicted_nan": memory.evicted_nan,
            "total": total_entries(engine, memory),
            "by_modality": memory.by_modality,
            "pictures": list(memory.pictures),
        },
        "differs": memory.differs,
        "risk": memory.risk,
        "over_risk": memory.over_risk,
        "risk_unknown": memory.risk_unknown,
        "escalated": memory.escalated,
        "drafted": memory.drafted,
        "accepted": memory.accepted,
        "notes": session.notes,
        "memory": {
            "pages": memory.pages,
            "kv_bytes": memory.kv_bytes,
            "metadata_bytes": memory.metadata_bytes,
            "state_bytes": memory.state_bytes,
            "physical_bytes": memory.physical_bytes,
            "pool_bytes": pool.num_pages * pool.page_bytes,
        },
        "time_to_first_token_s": round(reply.seconds_to_first_token, 4),
        "tokens_per_second": round(reply.tokens_per_second, 2),
        "versions": versions(),
    }


class OutputClosed(BrokenPipeError):
    """Whoever read the answers has gone (``mmkv chat | head``)."""


def answer(
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
    tools: Sequence[Any] | None = None,
    results: Sequence[Any] | None = None,
) -> bool:
    """Send a turn and print the reply; False when Ctrl-C stopped it.

    stdout gets the reply's text (as it comes, or whole) or its JSON (``indent``), and nothing
    else; on a terminal the text's Markdown is rendered, unless ``options`` say plain.

    ``watching``: a panel on stderr shows the memory meanwhile; a reply to the same terminal is
    printed when it is whole. ``tools``: as :meth:`mmkv.Session.send` takes them; ``results``: of
    calls, sent instead of ``text``.

    Raises OutputClosed, MmkvError, or whatever else fails; the session may hold the
    turn then.
    """
    output = _Output(session, options, display, watching)
    with display.prefilling() as bar:
        try:
            if images or videos:
                _prepare_to_see(session.engine, options, display)
            more: dict[str, Any] = {"sampling": sampling, "progress": bar, "tools": tools}
            if results is not None:
                pieces = session.send_results(results, **more)
            else:
                more |= {"images": images, "videos": videos, "system": system}
                pieces = session.send(text, **more)
        except KeyboardInterrupt:
            return False
        before, finished = len(session.history), True
        with output, closing(pieces):
            try:
                for piece in pieces:
                    bar.close()
                    output.feed(piece)
            except KeyboardInterrupt:
                finished = False
    if len(session.history) == before:  # stopped while the prompt was read: nothing was appended
        output.break_off()
        return False
    if not options.json:
        output.end(finished)
    elif session.last is not None:
        _write(json.dumps(record(session, options.model), indent=indent) + "\n")
    display.tell(session.notes)
    if session.last is not None:
        _end_notes(session.last, options, display)
    return finished


class _Output:
    """Where the pieces of a reply go: to stdout as they come, or whole; and to the panel.

    A context manager for the time in which they come: an error ends the line that was begun.
    """

    def __init__(
        self, session: Session, options: ChatOptions, display: Display, watching: bool
    ) -> None:
        shown = sys.stdout.isatty()
        self._watch = Watch(session, display.console, echo=shown) if watching else None
        self._whole = options.no_stream or options.json or (watching and shown)
        self._view, self._text = _view(options), ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, STOPS):
            self.break_off()
        if self._watch is not None:
            self._watch.close()

    def feed(self, piece: str) -> None:
        """Take the next piece."""
        self._text += piece
        if self._watch is not None:
            self._watch.feed(piece)
        if not self._whole:
            self._view.feed(piece)

    def break_off(self) -> None:
        """End the line that the reply has begun."""
        if self._text and not self._whole:
            self._view.close()

    def end(self, finished: bool) -> None:
        """Show what has not been shown yet; one of no words is an empty line if ``finished``."""
        if self._whole:
            self._view.feed(self._text)
        if finished or self._text:
            self._view.close()


def calls_shown(calls: Sequence[tuple[str, str]]) -> RenderableType:
    """Draw calls: the names of functions, and their arguments as JSON text."""
    lines = Table.grid(padding=(0, 2))
    for name, arguments in calls:
        lines.add_row(Text(without_codes(name), "bold"), Text(without_codes(arguments)))
    return lines


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
    if engine.processor.sees and not engine.family.vision_loaded:
        with display.loading(options.model) as progress:
            progress("what reads pictures")
            _ = engine.family.hf
        if note := engine.family.vision_note:
            display.note(note)


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


_EVERY_S = 0.1
_LINES = 8  # of a reply that is shown above the panel while it comes
_WIDTH = 30


class Watch:
    """Redraws the panel as pieces of a reply come, and leaves nothing of it in the end.

    Args:
        echo: whether the reply's last lines are shown, too: where it goes to the same terminal.
    """

    def __init__(self, session: Session, console: Console, echo: bool) -> None:
        self._session, self._echo = session, echo
        self._text = ""
        self._begun, self._seen, self._drawn = time.monotonic(), session.seen, 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def feed(self, piece: str) -> None:
        """Take a piece of the reply and redraw, at most ten times a second."""
        self._text += piece
        now = time.monotonic()
        if not self._live.is_started:
            self._begun, self._seen = now, self._session.seen
            self._live.start()
        elif now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        self._live.update(self._render(now), refresh=True)

    def close(self) -> None:
        """Take the panel off the screen (again: no effect)."""
        self._live.stop()

    def _render(self, now: float) -> RenderableType:
        took, made = now - self._begun, self._session.seen - self._seen
        shown = panel(self._session, made / took if took > 0 and made else 0.0)
        if not self._echo:
            return shown
        return Group(Text("\n".join(self._text.splitlines()[-_LINES:])), shown)


def panel(session: Session, rate: float) -> Panel:
    """Draw bytes, entries by modality against the budget, bars per layer, and tokens/s."""
    engine, memory = session.engine, session.memory()
    physical = memory.physical_bytes
    facts = Table.grid(padding=(0, 1))
    facts.add_row("bytes", "", f"{format_bytes(physical)} in {memory.pages:,} pages")
    most = max(memory.entries, 1)
    for kind, count in memory.by_modality.items():
        if count:
            facts.add_row(kind, Bar(most, 0, count, width=_WIDTH), f"{count:,} entries")
    total = total_entries(engine, memory)
    allowed = f", {session.allowed_entries:,} allowed" if engine.policy.evicts else ""
    facts.add_row("kept", "", f"{memory.entries:,} of {total:,}{allowed}")
    facts.add_row("speed", "", f"{rate:.1f} tokens/s")
    chart = layer_chart(session.entries_per_layer(), engine.spec.num_kv_heads)
    return Panel(Group(facts, chart), title=f"{engine.policy.name}, {session.budget.describe()}")
