"""``/watch``: a panel that shows the session's memory while a reply is made."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mmkv.chat.display import layer_chart, total_entries
from mmkv.engine.budget import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mmkv.api import Engine, Session

_EVERY_S = 0.1
_LINES = 8  # of a reply that is shown above the panel while it comes
_WIDTH = 30


class Watch:
    """Redraws the panel as pieces of a reply come, and leaves nothing of it in the end.

    Args:
        echo: whether the reply's last lines are shown, too: where it goes to the same terminal.
    """

    def __init__(self, engine: Engine, session: Session, console: Console, echo: bool) -> None:
        self._engine, self._session, self._echo = engine, session, echo
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
        shown = panel(self._engine, self._session, made / took if took > 0 and made else 0.0)
        if not self._echo:
            return shown
        return Group(Text("\n".join(self._text.splitlines()[-_LINES:])), shown)


def panel(engine: Engine, session: Session, rate: float) -> Panel:
    """Draw bytes, entries by modality against the budget, bars per layer, and tokens/s."""
    memory = session.memory()
    physical = memory.kv_bytes + memory.metadata_bytes
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
