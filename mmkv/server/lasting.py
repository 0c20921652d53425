"""Sessions that outlast a server, in a folder that servers may share."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from engine.errors import SessionError

_FOLDER = ".sessions"  # beside the files that users name, which begin with no dot
_NOTE, _MEMORY = ".json", ".mmkv"


@dataclass(frozen=True)
class Note:
    """What the folder says of a session.

    Attributes:
        version: a new one with each change; memory: name of its session file, None before the
            first turn; messages: how many it holds.
    """

    id: str
    created: int
    budget: tuple[str, float]
    metadata: dict[str, str] = field(default_factory=dict)
    turns: int = 0
    messages: int = 0
    memory: str | None = None
    version: str = ""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read one; None where there is none. Raises SessionError: it cannot be read."""
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            kind, value = found.pop("budget")
            return cls(budget=(str(kind), float(value)), **found)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise SessionError(
                f"the session {path.stem} cannot be read from the session folder; begin a new one"
            ) from error


class Lasting:
    """The notes and memories of the sessions of one tenant at a time, in a shared folder.

    A session changes when its note is replaced; the memory that a note names is written before,
    under a name of its own. So a server that dies leaves the session as it was before or after a
    turn, and another one that reads the note sees which.

    Args:
        folder: the server's ``--session-folder``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER

    def note(self, tenant: str, name: str) -> Note | None:
        """Return what is known of a session; None where there is none. Raises SessionError."""
        return Note.read(self._path(tenant, name + _NOTE))

    def notes(self, tenant: str) -> Iterator[Note]:
        """Yield those of a tenant's sessions that can be read, oldest first."""
        found = []
        for path in self._path(tenant, "").glob("*" + _NOTE):
            with contextlib.suppress(SessionError):
                note = Note.read(path)
                if note is not None:
                    found.append(note)
        yield from sorted(found, key=lambda one: (one.created, one.id))

    def memory(self, tenant: str, note: Note) -> Path:
        """Return where the memory of a session lies."""
        assert note.memory is not None
        return self._path(tenant, note.memory)

    def new_memory(self, tenant: str, name: str) -> Path:
        """Return where the next memory of a session may be written."""
        path = self._path(tenant, f"{name}.{uuid.uuid4().hex}{_MEMORY}")
        with _told():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, tenant: str, note: Note) -> Note:
        """Put a note in place of the one before it; return it with its version.

        Raises:
            SessionError: another server changed the session meanwhile, or it cannot be written;
                the one before stands.
        """
        path = self._path(tenant, note.id + _NOTE)
        before = Note.read(path)
        if (before.version if before else "") != note.version:
            raise SessionError(
                "the session went on at another server meanwhile; send its requests to one place "
                "(X-Session-Id), and this one again"
            )
        made = Note(**{**vars(note), "version": uuid.uuid4().hex})
        with _told():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
                json.dump(vars(made), draft)
                draft.flush()
                os.fsync(draft.fileno())
            Path(draft.name).replace(path)
        if before is not None and before.memory not in (None, note.memory):
            self.memory(tenant, before).unlink(missing_ok=True)
        return made

    def delete(self, tenant: str, name: str) -> None:
        """Remove a session's files."""
        with contextlib.suppress(SessionError):
            note = self.note(tenant, name)
            if note is not None and note.memory is not None:
                self.memory(tenant, note).unlink(missing_ok=True)
        self._path(tenant, name + _NOTE).unlink(missing_ok=True)

    def _path(self, tenant: str, name: str) -> Path:
        return self._folder / (tenant[:32] or "public") / name


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Say in one line what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise SessionError(f"the session cannot be written: {error.strerror}") from error
