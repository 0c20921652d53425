"""What a long run has found so far, a JSON line each: a run that was killed goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Journal:
    """The rows of a JSONL file, read once, and those that are added.

    A line that was being written when a run was killed is passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.is_file() else ""
        self._cut_off = bool(text) and not text.endswith("\n")
        self._rows = list(_whole(text))

    def rows(self, key: str, value: str) -> list[Row]:
        """Those that have ``value`` under ``key``."""
        return [row for row in self._rows if row.get(key) == value]

    def add(self, rows: list[Row]) -> list[Row]:
        """Write rows at once, so that they are kept together; as the file gives them back."""
        lines = [json.dumps(row) for row in rows]
        with self.path.open("a") as file:
            file.write("\n" * self._cut_off + "\n".join(lines) + "\n")
        self._cut_off = False
        added = [json.loads(line) for line in lines]
        self._rows += added
        return added


def _whole(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
