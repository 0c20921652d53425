"""Tables on stdout and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text


def pipe_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = False
) -> str:
    """Make a Markdown table without a line end; ``numbers`` aligns all but the first column."""
    rule = ["---", *["---:" if numbers else "---"] * (len(columns) - 1)]
    head, *body = (f"| {' | '.join(map(str, line))} |" for line in (columns, *rows))
    return "\n".join([head, f"|{'|'.join(rule)}|", *body])


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
        """Return the table as Markdown, under its title."""
        columns, *rows = ([_escaped(cell) for cell in line] for line in (self.columns, *self.rows))
        return f"**{self.title}**\n\n{pipe_table(columns, rows, numbers=True)}\n"


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
