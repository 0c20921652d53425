"""The finished rows of a long run, one JSON object a line: a killed run continues from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError

Row = dict[str, Any]


class Journal:
    """The rows of a JSONL file, read once, and the rows that are added.

    A line that is not a whole JSON object (a kill can cut the last one short) is ignored, and its
    work is done again.

    Raises:
        InputError: the file cannot be read, or its folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"cannot use {path}: {error.strerror}; name an --output") from error
        self._cut_off = bool(content) and not content.endswith(b"\n")
        self._rows = list(_whole(content.decode("utf-8", errors="replace")))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def rows(self, key: str, value: str) -> list[Row]:
        """Return the rows that have ``value`` under ``key``."""
        return [row for row in self._rows if row.get(key) == value]

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Write rows at once, so that they are kept together; they are on the disk on return.

        Returns:
            the rows as the file gives them back.

        Raises:
            InputError: they cannot be written.
        """
        lines = [json.dumps(row) for row in rows]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._cut_off + "\n".join(lines) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}; free space") from error
        self._cut_off = False
        added = [json.loads(line) for line in lines]
        self._rows += added
        return added


def _whole(text: str) -> Iterator[Row]:
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
