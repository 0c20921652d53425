"""Keep a process that tries odd inputs from changing files outside its own folders.

An input may hold any path, and the program may run as root: what mmkv does when it is asked to save
to ``/etc/passwd`` is to be seen, not to be suffered.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit hooks that change the file system, and how many paths they begin with.
_CHANGES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
}


def write_only_below(folders: Iterable[Path]) -> None:
    """Refuse every change of files elsewhere from now on, for as long as this process runs.

    Devices and the folder for temporary files are open, too. Native code that opens files by itself
    is not seen.

    Args:
        folders: where files may change.

    Raises:
        PermissionError: later, in the call that would change a file elsewhere.
    """
    allowed = [*folders, Path(tempfile.gettempdir()), Path("/dev"), Path("/proc/self")]
    roots = [os.path.realpath(folder) for folder in allowed]

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changed = [path] if isinstance(flags, int) and flags & _WRITES else []
        else:
            changed = list(arguments[: _CHANGES.get(event, 0)])
        for path in changed:
            if isinstance(path, (str, bytes, os.PathLike)) and not _inside(path, roots):
                raise PermissionError(13, "outside the folders of this run", os.fsdecode(path))

    sys.addaudithook(check)


def _inside(path: str | bytes | os.PathLike[str], roots: list[str]) -> bool:
    try:
        real = os.path.realpath(os.fsdecode(path))
    except ValueError:  # a NUL byte: the system refuses it, too
        return True
    return any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)
