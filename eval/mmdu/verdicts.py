"""Write the judge's verdicts to a journal, so that a killed run continues."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.eval.measure.journal import Journal, Row

Key = tuple[str, int]  # dialogue id, index of the question


@dataclass(frozen=True)
class Verdict:
    """The verdict of the judge on one answer.

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
        """Return the question that the reply answers."""
        return self.dialogue, self.turn


class Verdicts:
    """The verdicts of one judge: a journal whose first row says who judges.

    Raises:
        InputError: the journal belongs to another judge.
    """

    def __init__(self, path: Path, judge: dict[str, Any]) -> None:
        self._journal = Journal(path)
        self.by_key: dict[Key, Verdict] = {}
        if not len(self._journal):
            self._journal.add([{"judge": judge}])
            return
        first, *rest = self._journal
        if first.get("judge") != judge:
            raise InputError(
                f"{path} was made by another judge or with other settings ({first.get('judge')}); "
                "name another --output"
            )
        for row in rest:
            verdict = _verdict(row)
            if verdict is not None:
                self.by_key[verdict.key] = verdict

    def add(self, verdict: Verdict) -> None:
        """Write a verdict; it is on the disk when this returns. Raises InputError."""
        self._journal.add([asdict(verdict)])
        self.by_key[verdict.key] = verdict


def _verdict(row: Row) -> Verdict | None:
    try:
        return Verdict(**row)
    except TypeError:  # a damaged line: its question is asked again
        return None
