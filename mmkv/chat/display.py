"""Show notes, progress bars and memory on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from mmkv.chat.trouble import one_line
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mmkv.api import Engine, Session
    from mmkv.chat.options import ChatOptions
    from mmkv.engine.contents import Memory
    from mmkv.engine.policies import Policy
    from mmkv.engine.runtime import Runtime


class Display:
    """Writes to stderr; ``animated``: whether it is a terminal that shows bars."""

    def __init__(self, options: ChatOptions) -> None:
        self.quiet = options.quiet
        self.faded_said = False  # in this conversation
        self.console = Console(stderr=True, highlight=False)
        self.animated = self.console.is_terminal and not self.quiet

    def note(self, text: str) -> None:
        """Print a remark; silenced by --quiet."""
        if not self.quiet:
            self.say(f"mmkv: {text}")

    def note_faded(self, memory: Memory) -> None:
        """Say, once in a conversation, that pictures have lost most of their entries."""
        line = faded_line(memory)
        if line is not None and not self.faded_said:
            self.faded_said = True
            self.note(line)

    def say(self, text: str) -> None:
        """Print a line that was asked for, such as a command's answer, as plain text."""
        self.console.print(Text(plain(text)), soft_wrap=not self.console.is_terminal)

    def error(self, error: Exception) -> None:
        """Print an error that does not end the conversation, in one line."""
        self.say(f"mmkv: error: {one_line(error)}")

    def show(self, content: RenderableType) -> None:
        """Print a table or chart."""
        self.console.print(content)

    @contextmanager
    def loading(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show a moving bar while a model loads; give a function that shows the present task."""
        if not self.animated:
            yield lambda _: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24))
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(f"loading {name}", total=None)
            yield lambda what: bar.update(task, description=f"loading {name}: {what}")

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
    return memory.tokens_seen * engine.spec.num_layers * engine.spec.num_kv_heads


def memory_line(engine: Engine, session: Session) -> str:
    """Write one line: what was kept, what it takes, and who decided."""
    memory = session.memory()
    total = total_entries(engine, memory)
    share = 100 * memory.entries / total if total else 100
    physical = format_bytes(memory.kv_bytes + memory.metadata_bytes)
    line = (
        f"kept {memory.entries:,} of {total:,} entries ({share:.0f} %), {physical} physical in "
        f"{memory.pages:,} pages; policy {engine.policy.name}"
    )
    if not engine.policy.evicts:
        return f"{line} {_without_budget(engine.policy)}"
    line += f", budget {session.budget.describe()}{in_form(engine)}"
    if memory.evicted_nan:
        return f"{line}; {memory.evicted_nan:,} evicted entries had a score that is no number"
    return line if memory.evicted else f"{line}: nothing had to be evicted"


def faded_line(memory: Memory) -> str | None:
    """Say which pictures have lost most of their entries; None: none has."""
    if not memory.faded:
        return None
    some = ", ".join(f"{i + 1} ({memory.pictures[i]:.0%} kept)" for i in memory.faded[:4])
    more = f" and {len(memory.faded) - 4} others" if len(memory.faded) > 4 else ""
    return (
        f"most of what was read of these pictures is gone: {some}{more}; answers about them may "
        "be wrong, and a larger budget keeps more"
    )


def in_form(engine: Runtime) -> str:
    """Name the form of the cache, where it is not the model's dtype."""
    form = engine.cache.pool.form
    return "" if form.plain else f", kv {form.name}"


def _without_budget(policy: Policy) -> str:
    """Say what bounds the memory of a policy that no budget binds."""
    if policy.admission is not None:
        return "keeps what its write gates admit; no budget binds it"
    return "never evicts" if policy.pruner is None else "prunes pictures; no budget binds it"


def statistics(engine: Engine, session: Session) -> RenderableType:
    """Draw the table and chart of /stats."""
    memory = session.memory()
    total = total_entries(engine, memory)
    facts = Table.grid(padding=(0, 2))
    kept = ", ".join(f"{count:,} {kind}" for kind, count in memory.by_modality.items())
    rows = [
        ("tokens seen", f"{memory.tokens_seen:,}"),
        ("entries kept", f"{memory.entries:,} of {total:,} ({kept})"),
        ("entries evicted", f"{memory.evicted:,}"),
        ("pictures mostly gone", f"{len(memory.faded)} of {len(memory.pictures)}"),
        ("keys and values", f"{format_bytes(memory.kv_bytes)} in {memory.pages:,} pages"),
        ("metadata", format_bytes(memory.metadata_bytes)),
        ("held for /undo", format_bytes(session.snapshot_bytes)),
        ("decode step", session.reply_path),
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
