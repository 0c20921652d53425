"""What the fuzz program tries: a class of inputs and the code that reads them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any

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
