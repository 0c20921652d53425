"""What comes into a chat: messages, from a pipe or a terminal, and a folder's pictures."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv.engine.errors import InputError, plain
from mmkv.prompt.media import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

BLOCK = '"""'


@dataclass(frozen=True)
class Words:
    """What Tab completes.

    Attributes:
        commands: name -> its arguments as the help shows them; hidden: the same of commands that
            are not offered.
        values: command -> gives the names that may follow it.
    """

    commands: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Callable[[], Iterable[str]]] = field(default_factory=dict)


class MessageReader(ABC):
    """Where messages come from."""

    @abstractmethod
    def read(self) -> str:
        """Read the next message. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""

    @abstractmethod
    def ask(self, question: str) -> str:
        """Read a line. Raises as :meth:`read`."""

    def agrees(self, question: str) -> bool:
        """Ask for a yes; False where nobody can answer."""
        try:
            return self.ask(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False


class LineReader(MessageReader):
    """Reads messages from stdin.

    A line ending in a backslash continues in the next one; three double quotes open and close a
    block of lines.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()

    def read(self) -> str:
        lines = [self._line(">>> ")]
        if lines[0].strip().startswith(BLOCK):
            return self._block(lines[0].strip()[len(BLOCK) :])
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("... "))
        return "\n".join(lines)

    def ask(self, question: str) -> str:
        return self._line(question)

    def agrees(self, question: str) -> bool:
        return self._terminal and super().agrees(question)

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._line("... ")
        lines.append(line.rstrip()[: -len(BLOCK)])
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        # Bytes that are no UTF-8 become surrogates: the whole message is read before it is refused.
        try:
            line = sys.stdin.buffer.readline().decode(errors="surrogateescape")
        except KeyboardInterrupt:
            if self._terminal:
                print(file=sys.stderr)
            raise
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


_PICTURES = {".bmp", ".gif", ".heic", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_WRITTEN_S = 2.0  # a file that has not changed for so long is whole
_Stamp = tuple[int, int]


class WatchedFolder:
    """Finds the pictures that have come into a folder since it was last looked at.

    A name that was read is not read again. A file that cannot be read may be half written: it is
    tried again once it has changed.

    Attributes:
        there: pictures that lay in it before, which are left out; trouble: what could not be read
            at the latest look, in words; each is said once.

    Raises:
        InputError: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._began = path, time.time()
        self._done: set[str] = set()
        self._failed: dict[str, _Stamp] = {}
        self._told: set[str] = set()
        self.trouble: list[str] = []
        self._done = {name for _, name in self._found()}
        self.there = len(self._done)

    def look(self) -> Iterator[tuple[str, float, Image]]:
        """Yield the name of each new picture, seconds since this began, and the picture.

        The oldest comes first. Raises InputError: the folder cannot be read any more.
        """
        self.trouble = []
        for stamp, name in sorted(self._found()):
            if name in self._done or (self._failed.get(name) == stamp and name in self._told):
                continue
            try:
                picture = load_image(self.path / name)
            except InputError as error:
                old = time.time() - stamp[0] / 1e9 > _WRITTEN_S
                if (old or self._failed.get(name) == stamp) and name not in self._told:
                    self._told.add(name)
                    self.trouble.append(str(error))
                self._failed[name] = stamp
                continue
            yield name, max(stamp[0] / 1e9 - self._began, 0.0), picture
            self._done.add(name)  # not when Ctrl-C has ended the look

    def _found(self) -> list[tuple[_Stamp, str]]:
        """Return when each picture was last written, its size, and its name."""
        found = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if Path(entry.name).suffix.lower() not in _PICTURES or entry.name[0] == ".":
                        continue
                    try:
                        about = entry.stat()
                    except OSError:  # removed meanwhile
                        continue
                    found.append(((about.st_mtime_ns, about.st_size), entry.name))
        except OSError as error:
            name = plain(str(self.path))
            raise InputError(
                f"the folder {name} cannot be read ({error.strerror}); name another"
            ) from error
        return found
