"""The folder where one server's idle memories lie, and what killed servers left beside it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from mmkv.engine.errors import SessionError

log = logging.getLogger("mmkv.server")
_PREFIX, _LOCK = ".hibernated-", ".lock"
_OURS: set[Path] = set()  # of this process, which may lock its own files again
_PATIENCE = 60  # seconds for other servers that begin in the same folder


class HibernationFolder:
    """A folder of its own that goes with its server.

    A server holds a lock in its folder as long as it lives. One that is killed leaves the folder
    and no lock: the next server in the same place removes it.

    Args:
        within: the server's ``--session-folder``, or one that no cleaner empties; None: the
            system's folder for temporary files, where nothing is looked for.

    Attributes:
        path: where it is.
        trouble: why the latest memory could not be written; None where it could.

    Raises:
        SessionError: it cannot be made.
    """

    def __init__(self, within: Path | None) -> None:
        self.trouble: str | None = None
        try:
            with contextlib.ExitStack() as stack:
                if within is not None:
                    within.mkdir(parents=True, exist_ok=True)
                    # So that no folder is found between its making and its lock.
                    common = FileLock(within / f"{_PREFIX[:-1]}{_LOCK}", timeout=_PATIENCE)
                    stack.enter_context(common)
                    _remove_abandoned(within)
                self._made = tempfile.TemporaryDirectory(
                    prefix=_PREFIX, dir=within, ignore_cleanup_errors=True
                )
                self._take()
        except OSError as error:
            raise SessionError(
                f"cannot write to {within or 'the folder for temporary files'} "
                f"({error.strerror or error}); name another --session-folder"
            ) from error
        self.path = Path(self._made.name)
        _OURS.add(self.path)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Have a memory written to it, anew where somebody has removed it.

        The log and :attr:`trouble` say when that fails, and when it works again.

        Raises:
            SessionError: it cannot be written.
        """
        try:
            try:
                if not self.path.is_dir():
                    self.path.mkdir(parents=True, exist_ok=True)
                    self._lock.release()
                    self._take()
            except OSError as error:
                raise SessionError(
                    f"cannot write {self.path}: {error.strerror or error}; name another "
                    "--session-folder"
                ) from error
            yield
        except SessionError as error:
            if self.trouble is None:
                log.error(
                    "idle memories cannot be moved to files, so stored responses are dropped when "
                    "room is short and sessions stay in memory: %s",
                    error,
                )
            self.trouble = _without_paths(error)
            raise
        if self.trouble is not None:
            log.warning("idle memories can be moved to files again")
        self.trouble = None

    def close(self) -> None:
        """Remove it with all that it holds."""
        _OURS.discard(self.path)
        self._lock.release()
        self._made.cleanup()

    def _take(self) -> None:
        self._lock = FileLock(Path(self._made.name) / _LOCK, thread_local=False)
        self._lock.acquire(timeout=0)


def _without_paths(error: BaseException) -> str:
    """Return why something could not be written: for everybody, so it names no place."""
    cause = error.__cause__
    why = cause.strerror if isinstance(cause, OSError) else None
    return f"idle memories cannot be moved to files ({why or type(cause or error).__name__})"


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
