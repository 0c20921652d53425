"""Decide whether what an input led to is a refusal or a failure."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass
from pathlib import Path

import mmkv
from mmkv.engine.errors import MmkvError

_HOME = f"{Path(mmkv.__file__).parent}/"
_PROGRAMS = (f"{_HOME}eval/", f"{_HOME}training/")


class Hang(BaseException):
    """An input took longer than the limit."""


@dataclass(frozen=True)
class Failure:
    """What an input led to that it must not.

    Attributes:
        kind: ``traceback``, ``hang``, ``leak`` or ``harm``.
        place: the error's type and where it was raised, to count the same failures together.
    """

    kind: str
    place: str
    message: str


def failure_of(error: BaseException) -> Failure | None:
    """Return the failure that an exception is, None for a refusal in mmkv's own words."""
    text = str(error)
    if isinstance(error, MmkvError) and text.strip():
        return None
    if isinstance(error, (TypeError, ValueError)) and _own_words(error) and "\n" not in text:
        return None
    kind = "hang" if isinstance(error, Hang) else "traceback"
    return Failure(kind, f"{type(error).__name__} at {_place(error)}", text[:300])


def _own(file: str, apart: tuple[str, ...]) -> bool:
    return file.startswith(_HOME) and not file.startswith(apart)


def _own_words(error: BaseException) -> bool:
    """Return whether mmkv's own code raised the error, in a statement that says so."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return _own(last.filename, _PROGRAMS) and line.startswith("raise ")


def _place(error: BaseException) -> str:
    """Return the innermost place of mmkv's own code, and below it that of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _own(f.filename, (f"{_HOME}eval/fuzz/",))]
    parts = []
    if own:
        name = Path(own[-1].filename).relative_to(_HOME).as_posix()
        parts.append(f"{name}:{own[-1].lineno} ({own[-1].name})")
    if frames and (not own or frames[-1] is not own[-1]):
        parts.append(f"{Path(frames[-1].filename).name} ({frames[-1].name})")
    return ", ".join(parts)
