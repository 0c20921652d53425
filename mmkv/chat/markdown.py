"""Render a reply's Markdown on a terminal while it comes, block by block.

A block (paragraph, list, table, code) that the next one has ended is printed and never drawn
again; only the open block below is redrawn, in one write, so that nothing flickers and what has
scrolled away is right. Nothing is hidden: HTML, references and the addresses of links stay visible.
"""

from __future__ import annotations

import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableElement
from rich.segment import Segment, SegmentLines
from rich.syntax import Syntax
from rich.table import Table

from mmkv.engine.errors import without_codes

# Redraw at most this often, and spend no more than 1/SHARE of the time on it.
PAUSE_S, SHARE = 0.08, 8
# Rules that would take text off the screen: raw HTML, definitions of links, pictures.
_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["strikethrough", "table"])
    .disable(["reference", "image"])
)


class MarkdownStream:
    """Shows a reply as it comes, on a terminal's ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._open, self._printed, self._rest_until = "", False, 0.0
        self._line_ended = False
        self._drawing = ExitStack()

    def feed(self, piece: str) -> None:
        """Take the next piece of the reply. Control characters are dropped."""
        self._open += without_codes(piece)
        begun = time.monotonic()
        self._line_ended |= "\n" in piece
        if begun < self._rest_until:
            return
        if self._line_ended:
            self._line_ended = False
            self._print_closed()
        if not self._live.is_started:
            self._drawing.enter_context(_no_echo())
            self._live.start()
        height = max(self._console.height - 2, 1)
        lines = self._gap() + self._lines(self._open)
        self._live.update(SegmentLines(lines[-height:], new_lines=True), refresh=True)
        now = time.monotonic()
        self._rest_until = now + max(PAUSE_S, SHARE * (now - begun))

    def close(self) -> None:
        """Print the rest; the cursor is then at the start of a line."""
        with self._drawing:
            self._live.update(SegmentLines([]))
            self._live.stop()
        if lines := self._lines(self._open):
            self._print(lines)
        elif not self._printed:
            self._console.print()
        self._open = ""

    def _print_closed(self) -> None:
        """Print the blocks that are over: whole lines cannot change blocks before the last."""
        known = self._open[: self._open.rfind("\n") + 1]
        starts = [token.map[0] for token in _PARSER.parse(known) if token.level == 0 and token.map]
        if len(starts) > 1 and starts[-1] > starts[0]:
            lines = self._open.split("\n")
            self._open = "\n".join(lines[starts[-1] :])
            self._live.update(SegmentLines([]))  # the open block follows with the next drawing
            self._print(self._lines("\n".join(lines[: starts[-1]])))

    def _print(self, lines: list[list[Segment]]) -> None:
        self._console.print(SegmentLines(self._gap() + lines, new_lines=True), end="")
        self._printed = True

    def _gap(self) -> list[list[Segment]]:
        return [[]] if self._printed else []

    def _lines(self, text: str) -> list[list[Segment]]:
        """Return what ``text`` looks like: lines without blank ones at both ends."""
        lines = self._console.render_lines(_Reply(text), pad=False)
        lines = [_stripped(line) for line in lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines[next((i for i, line in enumerate(lines) if line), 0) :]


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep the terminal from echoing keys, which would move the cursor while blocks are drawn.

    What is typed is not lost: the next prompt reads it.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
        quiet = list(before)
        quiet[3] &= ~termios.ECHO
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    except (OSError, ValueError, termios.error):  # no terminal to read from
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _Code(CodeBlock):
    """Code in the terminal's own colours, without a background that is copied with it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme="ansi_dark", word_wrap=True, padding=(0, 0, 0, 2))


class _Table(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"  # instead of cutting long words
            yield part


class _Reply(Markdown):
    """Markdown whose line breaks are kept."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "table_open": _Table,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in chain.from_iterable(block.children or () for block in self.parsed):
            if token.type == "softbreak":
                token.type = "hardbreak"


def _stripped(line: list[Segment]) -> list[Segment]:
    """Return a line without the spaces that fill it up to the terminal's width."""
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept
