"""What the server writes to disk: saved sessions, a folder that servers share, idle sessions.

Every file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from filelock import FileLock, Timeout
from pydantic import Field, model_validator

from mmkv.engine.budget import Budget
from mmkv.engine.errors import BudgetError, SessionError
from mmkv.engine.paths import drop_drafts, open_regular, whole_file
from mmkv.engine.session_file import SavedBudget
from mmkv.engine.strict import Strict
from mmkv.server.errors import ApiError, invalid_value
from mmkv.server.schema import Metadata

log = logging.getLogger("mmkv.server")
KEPT = ".sessions"  # beside the files that users name, which begin with no dot
_RECORD, _MEMORY = ".json", ".mmkv"
_POLL = 0.005  # seconds between two looks at a lock that another one holds
_ABANDONED = 3600  # seconds after which a file that no record names is removed
_SWEEP = 10  # seconds that a start waits for another server's turn
TENANT = re.compile("[0-9a-f]{32}|public")


class NotWrittenError(SessionError):
    """A session could not be written; it is as it was before."""

    status, code = 507, "not_written"


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError into a NotWrittenError with cause and remedy."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(
            f"the session cannot be written: {error.strerror}; see to the disk of "
            "--session-folder, then send the request again"
        ) from error


def folder_of(tenant: str) -> str:
    """Return what names a tenant's folders: of an API key, a browser, or all without either."""
    return tenant[:32] or "public"


class TenantFolder:
    """Finds the files of tenants, each in a folder of its own below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, tenant: str, name: str) -> Path:
        """Return where a tenant's file lies. Raises SessionError: its folder is a link."""
        place = self._folder / folder_of(tenant)
        if place.is_symlink():  # it may lead to another tenant's
            raise SessionError("the session folder has a link in place of yours; tell its owner")
        return place / name

    def all(self) -> list[Path]:
        """List the folders of tenants. Raises OSError."""
        return [
            one
            for one in self._folder.iterdir()
            if TENANT.fullmatch(one.name) and one.is_dir() and not one.is_symlink()
        ]


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAMED = "named by letters, digits, dots, dashes and underscores"
_SUFFIX = ".mmkv"
_SAVING = ".saving"  # of a folder in which a new name is taken
_ID = r"[0-9a-f]{32}"
# Drafts that older servers left: newer ones are folders, and go with the first that is written.
_OLD_DRAFT = re.compile(rf"({NAME}\.(mmkv|json)-?\w*|tmp\w{{8}})\.part|\.tmp\w{{6}}")


@dataclass(frozen=True)
class SavedSession:
    """A session file: its name, size, and when it was written, in seconds since 1970."""

    name: str
    bytes: int
    saved_at: int

    def shown(self) -> dict[str, Any]:
        """Return it as requests see it."""
        return {
            "id": self.name,
            "object": "saved_session",
            "bytes": self.bytes,
            "saved_at": self.saved_at,
        }


class SavedSessions:
    """The files of the sessions that callers have saved, by name.

    Args:
        folder: the server's ``--session-folder``; None: it has none, and saves nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else TenantFolder(folder)

    def path(self, name: str, tenant: str) -> Path:
        """Return where a saved session lies; callers with different keys have different folders.

        Raises:
            ApiError: 400, the name cannot be one, or this server has no folder. SessionError: the
                caller's folder is a link.
        """
        if self._folder is None:
            raise ApiError(
                400,
                "this server saves no sessions; start it with --session-folder",
                "no_session_folder",
            )
        if not re.fullmatch(NAME, name):
            raise invalid_value("name", f"a file is {NAMED}")
        return self._folder.path(tenant, f"{name}{_SUFFIX}")

    def of(self, tenant: str) -> list[SavedSession]:
        """Return a tenant's files, by name. Raises ApiError (400): this server has no folder."""
        found = []
        for path in sorted(self.path("any", tenant).parent.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError):  # deleted meanwhile
                about = path.lstat()
                name = path.name.removesuffix(_SUFFIX)
                if stat.S_ISREG(about.st_mode) and re.fullmatch(NAME, name):
                    found.append(SavedSession(name, about.st_size, int(about.st_mtime)))
        return found

    def delete(self, name: str, tenant: str) -> None:
        """Remove a file. Raises ApiError: there is none (404), the disk refuses it (507)."""
        try:
            self.path(name, tenant).unlink()  # a link goes, and what it leads to stays
        except FileNotFoundError:
            raise no_such_file(name, "name") from None
        except OSError as error:
            raise ApiError(
                507,
                f"the file cannot be removed: {error.strerror}; see to the disk of "
                "--session-folder",
                "cannot_remove",
            ) from error

    def sweep(self) -> None:
        """Remove what is left of files whose writing was killed."""
        with contextlib.suppress(OSError):
            for place in () if self._folder is None else self._folder.all():
                drop_drafts(place)
                for path in place.iterdir():
                    if _OLD_DRAFT.fullmatch(path.name):
                        _drop_old(path)


def _drop_old(path: Path) -> None:
    """Remove a file that has not been written to for an hour."""
    with contextlib.suppress(OSError):
        if path.lstat().st_mtime < time.time() - _ABANDONED:
            path.unlink()


def write_session(save: Callable[[Path], None], path: Path, over: bool = True) -> None:
    """Write a session file.

    Args:
        save: writes it, whole or not at all; over: whether one that is there may be replaced.

    Raises:
        NotWrittenError: the disk refuses it; ApiError: 409, there is one.
    """
    try:
        with disk_errors():
            if over:
                save(path)
            else:
                _write_new(save, path)
    except SessionError as error:
        # Where the files lie is no affair of who asks.
        shown = str(error).replace(f"{path.parent}{os.sep}", "")
        raise NotWrittenError(shown) from error


def _write_new(save: Callable[[Path], None], path: Path) -> None:
    """Write a session file where there is none; of two at once the second is refused."""
    with FileLock(path.with_name(_SAVING)):  # among all servers with this folder
        if path.exists():
            raise saved_already(path.stem)
        save(path)


def copy_whole(path: Path, to: Path) -> None:
    """Copy a file, whole or not at all. Raises SessionError."""
    try:
        with whole_file(to, private=True) as draft:
            shutil.copyfile(path, draft)
    except OSError as error:
        raise SessionError(
            f"cannot write {to.name}: {error.strerror}; the old file is untouched"
        ) from error


def no_such_file(name: str, param: str) -> ApiError:
    """Return the error of a request that names a file which is not there."""
    message = f"there is no saved session {name}; save one first"
    return ApiError(404, message, "file_not_found", param)


def saved_already(name: str) -> ApiError:
    """Return the error of a name that is taken, where the caller does not want it replaced."""
    return ApiError(409, f"there is a file {name} already; set overwrite", "file_exists", "name")


_Count = Annotated[int, Field(ge=0, le=2**62)]
# Of a picture or video, by its bytes or at random; empty where it is not known.
Digest = Annotated[str, Field(pattern=f"^({_ID}|[0-9a-f]{{64}})?$")]
_LONGEST = 2**24  # bytes of a record, which has 70 for each picture


class SessionRecord(Strict):
    """What the shared folder holds on a session, as JSON.

    Attributes:
        budget: as :meth:`mmkv.engine.budget.Budget.as_list` has it.
        version: a new one with each change; memory: name of its session file, None before the
            first turn; messages: how many it holds; media: digests of its pictures and videos.
        skipped: frames that were not read as they were like those before, those of observations
            that changed no memory included.
    """

    id: Annotated[str, Field(pattern=f"^{NAME}$")]
    created: _Count
    budget: SavedBudget
    metadata: Metadata = {}
    turns: _Count = 0
    messages: _Count = 0
    memory: str | None = None
    version: Annotated[str, Field(pattern=f"^({_ID})?$")] = ""
    media: tuple[Digest, ...] = ()
    skipped: _Count = 0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        try:
            Budget.of_list(*self.budget)
        except BudgetError as error:
            raise ValueError(str(error)) from error
        own = rf"{re.escape(self.id)}\.{_ID}\{_MEMORY}"
        if self.memory is not None and not re.fullmatch(own, self.memory):
            raise ValueError("the memory is not of this session")
        return self

    def changed(self, **fields: Any) -> Self:
        """Return it with other fields, checked as if they were read."""
        return self.model_validate({**dict(self), **fields})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read one; None where there is none. Raises SessionError: no server has written it so."""
        try:
            with open_regular(path, follow=False) as file:
                text = file.read(_LONGEST + 1)
            if len(text) > _LONGEST:
                raise ValueError("too long")
            record = cls.model_validate_json(text)
            if record.id != path.stem:
                raise ValueError("of another session")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise SessionError(
                f"the session {path.stem} cannot be read from the session folder; begin a new one"
            ) from error
        return record


class SessionStore:
    """Sessions that outlast the server (``--keep-sessions``): a record and a session file each.

    A session changes when its record is replaced; the file that a record names is written before,
    under a new name. So a server that dies leaves the session as it was before or after a turn, and
    another server reads in the record which. Changes are made under a lock on the tenant's folder;
    waiting for it blocks the thread.

    Args:
        folder: the server's ``--session-folder``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = TenantFolder(folder / KEPT)

    def record(self, tenant: str, name: str) -> SessionRecord | None:
        """Return what is known of a session; None where there is none. Raises SessionError."""
        return SessionRecord.read(self._folder.path(tenant, name + _RECORD))

    def records(self, tenant: str) -> Iterator[SessionRecord]:
        """Yield those of a tenant's sessions that can be read, oldest first."""
        read = (record for _, record in self._read(tenant) if record is not None)
        yield from sorted(read, key=lambda one: (one.created, one.id))

    def _read(self, tenant: str) -> Iterator[tuple[str, SessionRecord | None]]:
        """Yield the ids of a tenant's sessions, with their records; None: it cannot be read."""
        for path in self._folder.path(tenant, "").glob("*" + _RECORD):
            if re.fullmatch(NAME, path.stem):
                try:
                    record = SessionRecord.read(path)
                except SessionError:
                    yield path.stem, None
                else:
                    if record is not None:  # else it was deleted meanwhile
                        yield path.stem, record

    def memory(self, tenant: str, record: SessionRecord) -> Path:
        """Return where the memory of a session lies."""
        assert record.memory is not None
        return self._folder.path(tenant, record.memory)

    def new_memory(self, tenant: str, name: str) -> Path:
        """Return where the next memory of a session may be written."""
        path = self._folder.path(tenant, f"{name}.{uuid.uuid4().hex}{_MEMORY}")
        with disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, tenant: str, record: SessionRecord) -> SessionRecord:
        """Replace the record of a session; return it with its new version.

        Raises:
            SessionError: another server changed the session meanwhile; NotWrittenError: it cannot
                be written. The earlier record stays.
        """
        path = self._folder.path(tenant, record.id + _RECORD)
        made = record.changed(version=uuid.uuid4().hex)
        with self._locked(tenant):
            before = SessionRecord.read(path)
            if (before.version if before else "") != record.version:
                raise SessionError(
                    "the session went on at another server meanwhile; send its requests to one "
                    "place (X-Session-Id), and this one again"
                )
            with disk_errors():
                if record.memory is not None:  # it has to be on the disk before a record names it
                    _sync(self.memory(tenant, record))
                    _sync(path.parent)
                with whole_file(path, private=True, sync=True) as draft:
                    draft.write_text(json.dumps(dict(made)))
            if before is not None and before.memory not in (None, record.memory):
                with contextlib.suppress(OSError):  # the session stands; sweep() comes again
                    self.memory(tenant, before).unlink()
        return made

    def delete(self, tenant: str, name: str) -> None:
        """Remove a session's files. Raises NotWrittenError."""
        with self._locked(tenant), disk_errors():
            record = None
            with contextlib.suppress(SessionError):
                record = self.record(tenant, name)
            self._folder.path(tenant, name + _RECORD).unlink(missing_ok=True)
            if record is not None and record.memory is not None:
                self.memory(tenant, record).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what servers that were killed have left: files that no record names.

        What cannot be read stays, with all of its session. Nothing in the folder keeps a server
        from starting.
        """
        with contextlib.suppress(OSError):
            for place in self._folder.all():
                with contextlib.suppress(OSError, SessionError):
                    self._sweep(place.name)

    def _sweep(self, tenant: str) -> None:
        with self._locked(tenant, _SWEEP):
            read = dict(self._read(tenant))
            named = {one.memory for one in read.values() if one is not None}
            unread = [name for name, one in read.items() if one is None]
            place = self._folder.path(tenant, "")
            if unread:
                what = "%d sessions in %s cannot be read and stay as they are, %s among them"
                log.warning(what, len(unread), place, unread[0])
            drop_drafts(place)
            for path in place.iterdir():
                memory = re.fullmatch(rf"({NAME})\.{_ID}\{_MEMORY}", path.name)
                lost = memory and path.name not in named and memory[1] not in unread
                if lost or _OLD_DRAFT.fullmatch(path.name):
                    _drop_old(path)

    @contextlib.contextmanager
    def _locked(self, tenant: str, seconds: float = -1) -> Iterator[None]:
        """Lock a tenant's folder against all other threads and servers; wait so long at most."""
        path = self._folder.path(tenant, ".lock")
        with contextlib.ExitStack() as stack:
            with disk_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path).acquire(seconds, poll_interval=_POLL))
            yield


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; Windows cannot open folders."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_PREFIX, _LOCK = ".hibernated-", ".lock"
_OURS: set[Path] = set()  # of this process, which may lock its own files again
_PATIENCE = 60  # seconds for other servers that begin in the same folder


class HibernationFolder:
    """The folder where a server's idle conversations lie; it is removed when the server ends.

    A server holds a lock in its folder as long as it runs. If it is killed, the folder stays
    without a lock, and the next server in the same place removes it.

    Args:
        within: the server's ``--session-folder``, or the user's state folder; None: the system's
            folder for temporary files, where no abandoned ones are looked for.

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
                    with contextlib.suppress(OSError):  # something else lies in its place
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
        """Write to the folder within this; it is made again if somebody has removed it.

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
    """Return why something could not be written, without paths: ``/health`` shows it to all."""
    cause = error.__cause__
    why = cause.strerror if isinstance(cause, OSError) else None
    return f"idle memories cannot be moved to files ({why or type(cause or error).__name__})"


def _remove_abandoned(within: Path) -> None:
    for folder in within.glob(f"{_PREFIX}{'[a-z0-9_]' * 8}"):  # as tempfile names them
        if folder in _OURS or folder.is_symlink() or not folder.is_dir():
            continue
        lock = FileLock(folder / _LOCK)
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):  # its server lives, or it is not ours
            continue
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
