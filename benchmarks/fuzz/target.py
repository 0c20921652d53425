"""What the fuzz program tries: a class of inputs and the code that reads them.

:func:`failure_of` decides whether what an input led to is a refusal or a failure.
"""

from __future__ import annotations

import linecache
import os
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mmkv
from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime

Case = dict[str, Any]


class Wrong(AssertionError):
    """mmkv took an input that it must refuse, or answered wrongly."""


class Target(ABC):
    """One class of inputs.

    A case is a JSON object, so that it can be written to a file and made smaller; bytes stand in it
    as latin-1 text.

    Attributes:
        name: of the class, on the command line and in the table.
        engines: whose pages are counted after each input.
    """

    name: str

    def __init__(self) -> None:
        self.engines: list[Runtime] = []
        self.folder = Path()

    def prepare(self, folder: Path) -> None:
        """Make what all inputs share; ``folder`` is empty and this class's own."""
        self.folder = folder

    @abstractmethod
    def make(self, rng: Random) -> Case:
        """Return a case."""

    @abstractmethod
    def run(self, case: Case) -> None:
        """Give the case to mmkv. Raises what escapes, MmkvError for a refusal."""

    def leaked(self) -> str | None:
        """Return what is wrong with the page pools when no session is open, else None."""
        for engine in self.engines:
            with engine.lock:  # what nobody refers to any more comes back
                pool = engine.cache.pool
            held = pool.num_pages - pool.free_pages
            if held:
                return f"{held} pages are held"
            try:
                engine.cache.check()
            except AssertionError as error:
                return f"the cache is not consistent: {error}"
        return None


class Files:
    """Files that no input may change.

    They stand in the home folder and in the working folder of the run.
    """

    def __init__(self, root: Path) -> None:
        self.home, self.here = root / "home", root / "here"
        for folder in (self.home, self.here):
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("notes.txt", "picture.png", "config.json", "gates.json", "x"):
                (folder / name).write_text("keep me")
        os.environ["HOME"] = str(self.home)
        os.environ.pop("XDG_STATE_HOME", None)
        os.environ.pop("XDG_CONFIG_HOME", None)
        os.chdir(self.here)
        self._kept = [path for folder in (self.home, self.here) for path in folder.iterdir()]
        self._before = self._state()

    def harmed(self) -> str | None:
        """Return which file was changed or is gone, else None. They are put back."""
        now = self._state()
        if now == self._before:
            return None
        changed = [path.name for path in self._kept if now[path] != self._before[path]]
        for path in self._kept:
            if path.is_dir() or path.is_symlink():
                path.rename(path.with_name(f"{path.name}-{os.getpid()}"))
            path.write_text("keep me")
        self._before = self._state()
        return f"changed: {', '.join(changed)}"

    def _state(self) -> dict[Path, tuple[int, int, int] | None]:
        found: dict[Path, tuple[int, int, int] | None] = {}
        for path in self._kept:
            try:
                about = path.lstat()
            except OSError:
                found[path] = None
                continue
            found[path] = (about.st_ino, about.st_size, about.st_mtime_ns)
        return found


def as_bytes(text: str) -> bytes:
    """Return the bytes that a case holds as text."""
    return text.encode("latin-1")


def as_text(content: bytes) -> str:
    """Return bytes as a case holds them."""
    return content.decode("latin-1")


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
    own = [f for f in frames if _own(f.filename, ())]
    parts = []
    if own:
        name = Path(own[-1].filename).relative_to(_HOME).as_posix()
        parts.append(f"{name}:{own[-1].lineno} ({own[-1].name})")
    if frames and (not own or frames[-1] is not own[-1]):
        parts.append(f"{Path(frames[-1].filename).name} ({frames[-1].name})")
    return ", ".join(parts)
