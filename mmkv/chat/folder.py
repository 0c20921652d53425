"""A folder whose pictures a chat reads as they come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv.engine.errors import InputError, plain
from mmkv.prompt.media import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

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
