"""The judge's verdicts, one line each, written as they come: what a killed run goes on from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import InputError

Key = tuple[str, int]  # dialogue id, index of the question


@dataclass(frozen=True)
class Verdict:
    """What the judge said on one answer.

    Attributes:
        turn: index of the question. prompt: hash of what was asked, so that a verdict on another
            answer is never taken for one on this.
        scores: by heading; None with a ``failure``: ``refused``, ``no scores``, ``bad scores``.
        detail: the failure in words. reply: the judge's whole text. asked: how often.
    """

    dialogue: str
    turn: int
    prompt: str
    scores: dict[str, int] | None
    failure: str = ""
    detail: str = ""
    reply: str = ""
    asked: int = 1
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """The question it is about."""
        return self.dialogue, self.turn


class Journal:
    """A file of one JSON object a line: first who judges, then verdicts.

    A kill can cut the last line short; it is then dropped, and that question asked again.
    """

    def __init__(self, path: Path, judge: dict[str, Any]) -> None:
        """Open or begin the journal. Raises InputError for one that belongs to another judge."""
        self.path = path
        self.verdicts: dict[Key, Verdict] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                os.truncate(path, len(whole))
        except OSError as error:
            raise InputError(f"cannot use {path}: {error.strerror}; name an --output") from error
        lines = whole.decode("utf-8", errors="replace").split("\n")
        if not whole:
            self._append({"judge": judge})
            return
        found = _parse(lines[0]).get("judge")
        if found != judge:
            raise InputError(
                f"{path} was made by another judge or with other settings ({found}); name another "
                "--output"
            )
        for line in lines[1:]:
            verdict = _verdict(_parse(line))
            if verdict is not None:
                self.verdicts[verdict.key] = verdict

    def add(self, verdict: Verdict) -> None:
        """Note a verdict; it is on the disk when this returns. Raises InputError."""
        self._append(asdict(verdict))
        self.verdicts[verdict.key] = verdict

    def _append(self, content: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}; free space") from error


def _parse(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _verdict(content: dict[str, Any]) -> Verdict | None:
    try:
        return Verdict(**content)
    except TypeError:  # a damaged line: its question is asked again
        return None
