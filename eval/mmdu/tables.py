"""Tables on stdout and as Markdown, from the same cells."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text


@dataclass
class Table:
    """Cells as text: the first column is a name, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row."""
        self.rows.append([str(cell) for cell in cells])

    def show(self) -> None:
        """Print the table on stdout: as Markdown where that is no terminal, on its side where
        the terminal is too narrow.
        """
        console = Console(highlight=False)
        if not console.is_terminal:
            # A pipe or file gets whole cells, however many columns there are.
            print(self.markdown(), flush=True)
            return
        lines = [list(self.columns), *self.rows]
        if sum(max(map(len, column)) + 3 for column in zip(*lines, strict=True)) >= console.width:
            lines = [list(column) for column in zip(*lines, strict=True)]
        made = RichTable(title=Text(self.title))
        for index, column in enumerate(lines[0]):
            made.add_column(Text(column), justify="right" if index else "left")
        for row in lines[1:]:
            made.add_row(*(Text(cell) for cell in row))
        console.print(made)
        sys.stdout.flush()

    def markdown(self) -> str:
        """The table as Markdown, under its title."""
        lines = [list(self.columns), ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        body = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
