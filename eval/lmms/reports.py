"""What lmms-eval's process leaves for ``mmkv eval``: finished replies, and why it ended.

lmms-eval writes its samples at the very end. A disk that is full by then would cost them all. So
each reply goes to a file as it is finished, or to the folder of temporary files once the first
place takes no more. Its exit code does not say why it failed, so the cause goes to a file, too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmkv.engine.errors import MmkvError
from mmkv.eval.lmms.contexts import LEFT_OUT

# Names the file; mmkv eval sets it for lmms-eval's process.
REPLIES_VARIABLE = "MMKV_EVAL_REPLIES"


class FinishedReplies:
    """A file of finished replies, a line of JSON each.

    Args:
        file: where it begins; None: nothing is kept.
    """

    def __init__(self, file: Path | None) -> None:
        self._places = [] if file is None else [file, fallback(file)]
        self._lines: list[str] = []
        self._written = 0

    @classmethod
    def of_parent(cls) -> FinishedReplies:
        """Return the one that ``mmkv eval`` asks for."""
        path = os.environ.get(REPLIES_VARIABLE)
        return cls(Path(path) if path else None)

    def add(self, row: dict[str, Any]) -> str | None:
        """Write a row; return a note when the place has changed, or there is none left."""
        if not self._places:
            return None
        self._lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        reason = self._append()
        if reason is None:
            return None
        full = self._places.pop(0)
        self._written = 0
        if self._places and self._append() is None:
            return f"cannot write {full} ({reason}); finished replies are kept in {self._places[0]}"
        self._places.clear()
        return f"cannot write {full} ({reason}), nor elsewhere; replies are in memory alone"

    def _append(self) -> str | None:
        try:
            with self._places[0].open("ab") as file:
                file.write("".join(self._lines[self._written :]).encode("utf-8", "replace"))
        except OSError as error:
            return error.strerror or str(error)
        self._written = len(self._lines)
        return None


def fallback(file: Path) -> Path:
    """Return where a journal goes when its first place takes no more."""
    return Path(tempfile.gettempdir()) / file.name


def found(file: Path) -> list[Path]:
    """Return the places where a journal left something; the longest first."""
    sizes = {path: path.stat().st_size for path in (file, fallback(file)) if path.is_file()}
    return sorted((path for path in sizes if sizes[path]), key=lambda path: -sizes[path])


# Names the file for the cause; mmkv eval sets it for lmms-eval's process.
CAUSE_VARIABLE = "MMKV_EVAL_CAUSE"


@contextmanager
def reported_to_parent() -> Iterator[None]:
    """Keep a copy of what ends the block for :func:`cause`; also a decorator."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(CAUSE_VARIABLE):
            text = (
                str(error) if isinstance(error, MmkvError) else f"{type(error).__name__}: {error}"
            )
            Path(path).write_text(text, encoding="utf-8")
        raise


# What the samples file calls the texts of a document that were too long and lost something.
CUTS = "cut"


def cut_prompts(results: Path) -> list[str]:
    """Return a line for each task some of whose prompts were cut or left out, from its samples."""
    made = []
    for path in sorted(results.parent.glob(results.name.removesuffix("results.json") + "*.jsonl")):
        task, counts, cuts = path.stem.rpartition("samples_")[2], [0, 0], [0]
        with path.open(encoding="utf-8") as file:
            for row in map(json.loads, file):
                counts[0] += 1
                counts[1] += LEFT_OUT in str(row.get("filtered_resps"))
                lost = _cache_of(row).get(CUTS)
                cuts += [max(one["tokens"] for one in lost)] if lost else []
        if len(cuts) > 1:
            made.append(
                f"task {task}: the context of {len(cuts) - 1} of {counts[0]} documents was cut, as "
                f"the benchmark does it (the longest had {max(cuts):,} tokens); "
                f"see token_counts in {path}"
            )
        if counts[1]:
            made.append(
                f"task {task}: {counts[1]} of {counts[0]} documents, too long, do not count"
            )
    return made


def _cache_of(row: dict[str, Any]) -> dict[str, Any]:
    counts = row.get("token_counts") or [None]
    return (counts[0] or {}).get("cache") or {}


def cause(path: Path) -> str | None:
    """Return what ended the evaluation, None when nothing inside the model did."""
    return path.read_text(encoding="utf-8") if path.is_file() else None
