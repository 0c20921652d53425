"""Keep the conversation on disk while it goes on, so that ``mmkv chat --resume`` finds it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mmkv.chat.places import state_folder
from mmkv.chat.trouble import one_line
from mmkv.engine.errors import STOPS, SessionError, as_exception

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmkv.api import Session

KEPT = 5  # files, of all chats together
# A large cache takes seconds to write. Where that is to be noticed, it may take 1/SHARE of the
# time; the end of the chat saves what was left out.
SHARE, NOTICED_S = 20, 0.1
_STALE_S = 3600  # an unfinished file of this age belongs to no living program


class Autosave:
    """Writes one session file a conversation, readable by the user alone.

    Args:
        extra: strings to keep in each file.
        warn: shows a line; called once when files cannot be written.
    """

    def __init__(self, extra: dict[str, str], warn: Callable[[str], None]) -> None:
        self._extra, self._warn = extra, warn
        self._paths: WeakKeyDictionary[Session, Path] = WeakKeyDictionary()
        self._written: WeakKeyDictionary[Session, Any] = WeakKeyDictionary()
        self._rest_until, self._warned = 0.0, False

    def adopt(self, session: Session, path: Path) -> None:
        """Go on writing ``session`` to the autosaved file that it came from."""
        self._paths[session], self._written[session] = path, _version(session)

    def save(self, session: Session, last: bool = False) -> None:
        """Write ``session`` if it has changed; while saving takes too much time only if ``last``.

        Never raises; the first failure is shown.
        """
        if session.closed or not session.history:
            return
        if self._written.get(session) == _version(session):
            return
        begun = time.monotonic()
        if begun < self._rest_until and not last:
            return
        try:
            self._write(session)
        except STOPS:
            raise
        except BaseException as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"mmkv: this chat is not kept for --resume: {one_line(as_exception(error))}"
                )
        now = time.monotonic()
        if now - begun > NOTICED_S:
            self._rest_until = now + SHARE * (now - begun)

    def path(self, session: Session) -> Path | None:
        """Return the file that holds ``session`` as it is now, if one does."""
        same = self._written.get(session) == _version(session)
        return self._paths.get(session) if same else None

    def _write(self, session: Session) -> None:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._paths.get(session) or _new_file(folder)
        session.save(path, self._extra)
        path.chmod(0o600)
        self._paths[session], self._written[session] = path, _version(session)
        _drop_old(folder)


def latest() -> Path:
    """Return the chat that was written last. Raises SessionError: there is none."""
    found = _newest_first(_folder())
    if not found:
        raise SessionError(f"there is no chat to resume in {_folder()}; begin one with mmkv chat")
    return found[0]


def is_autosaved(path: Path) -> bool:
    """Return whether ``path`` is one of the autosaved files."""
    return path.resolve().parent == _folder().resolve()


def _version(session: Session) -> Any:
    return len(session.history), session.seen, session.evicted, session.budget


def _folder() -> Path:
    return state_folder() / "chats"


def _new_file(folder: Path) -> Path:
    stem, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", 0
    while (path := folder / f"{stem}-{number}.mmkv").exists():
        number += 1
    return path


def _newest_first(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("*.mmkv"):
        with suppress(OSError):  # another chat may have dropped it
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _drop_old(folder: Path) -> None:
    with suppress(OSError):
        for path in _newest_first(folder)[KEPT:]:
            path.unlink(missing_ok=True)
        for path in folder.glob("*.part"):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)
