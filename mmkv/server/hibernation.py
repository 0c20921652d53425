"""The folder where one server's idle memories lie, and what killed servers left beside it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import SessionError

_PREFIX, _LOCK = ".hibernated-", ".lock"
_OURS: set[Path] = set()  # of this process, which may lock its own files again
_PATIENCE = 60  # seconds for other servers that begin in the same folder


class HibernationFolder:
    """A folder of its own that goes with its server.

    A server holds a lock in its folder as long as it lives. One that is killed leaves the folder
    and no lock: the next server in the same place removes it.

    Args:
        within: the server's ``--session-folder``; None: the system's folder for temporary files,
            where nothing is looked for.

    Attributes:
        path: where it is.

    Raises:
        SessionError: it cannot be made.
    """

    def __init__(self, within: Path | None) -> None:
        try:
            if within is None:
                self._made = tempfile.TemporaryDirectory(prefix=_PREFIX)
            else:
                within.mkdir(parents=True, exist_ok=True)
                # So that no folder is found between its making and its lock.
                with FileLock(within / f"{_PREFIX[:-1]}{_LOCK}", timeout=_PATIENCE):
                    _remove_abandoned(within)
                    self._made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=within)
                    self._lock = FileLock(Path(self._made.name) / _LOCK, thread_local=False)
                    self._lock.acquire(timeout=0)
        except OSError as error:
            raise SessionError(
                f"cannot write to {within or 'the folder for temporary files'} "
                f"({error.strerror or error}); name another --session-folder"
            ) from error
        self.path = Path(self._made.name)
        _OURS.add(self.path)

    def close(self) -> None:
        """Remove it with all that it holds."""
        _OURS.discard(self.path)
        if hasattr(self, "_lock"):
            self._lock.release()
        self._made.cleanup()


def _remove_abandoned(within: Path) -> None:
    for folder in within.glob(f"{_PREFIX}*"):
        if folder in _OURS or folder.is_symlink() or not folder.is_dir():
            continue
        lock = FileLock(folder / _LOCK)
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):  # its server lives, or it is not ours
            continue
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
