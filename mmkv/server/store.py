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
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from mmkv.engine.budget import Budget
from mmkv.engine.errors import BudgetError, SessionError
from mmkv.prompt.media import other_kind
from mmkv.server.errors import ApiError

_FOLDER = ".sessions"  # beside the files that users name, which begin with no dot
_RECORD, _MEMORY, _DRAFT = ".json", ".mmkv", ".part"
_POLL = 0.005  # seconds between two looks at a lock that another one holds
_ABANDONED = 3600  # seconds after which a file that no record names is removed


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


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAMED = "named by letters, digits, dots, dashes and underscores"
_SUFFIX = ".mmkv"
_SAVING = ".saving"  # of a folder in which a new name is taken


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
        self._folder = folder

    def path(self, name: str, tenant: str) -> Path:
        """Return where a saved session lies; callers with different keys have different folders.

        Raises:
            ApiError: 400, the name cannot be one, or this server has no folder.
        """
        if self._folder is None:
            raise ApiError(
                400,
                "this server saves no sessions; start it with --session-folder",
                "no_session_folder",
            )
        if not re.fullmatch(NAME, name):
            raise ApiError(400, f"a file is {NAMED}", "invalid_value", "name")
        return self._folder / (tenant[:32] or "public") / f"{name}{_SUFFIX}"

    def of(self, tenant: str) -> list[SavedSession]:
        """Return a tenant's files, by name. Raises ApiError (400): this server has no folder."""
        found = []
        for path in sorted(self.path("any", tenant).parent.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError):  # deleted meanwhile, a broken link
                about = path.stat()
                name = path.name.removesuffix(_SUFFIX)
                if stat.S_ISREG(about.st_mode) and re.fullmatch(NAME, name):
                    found.append(SavedSession(name, about.st_size, int(about.st_mtime)))
        return found

    def delete(self, name: str, tenant: str) -> None:
        """Remove a file. Raises ApiError: there is none (404), the disk refuses it (507)."""
        try:
            self.path(name, tenant).unlink()
        except FileNotFoundError:
            raise no_such_file(name, "name") from None
        except OSError as error:
            raise ApiError(
                507,
                f"the file cannot be removed: {error.strerror}; see to the disk of "
                "--session-folder",
                "cannot_remove",
            ) from error


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
        with tempfile.NamedTemporaryFile(dir=to.parent, suffix=_DRAFT, delete=False) as made:
            draft = Path(made.name)
        try:
            shutil.copyfile(path, draft)
            draft.replace(to)
        finally:
            draft.unlink(missing_ok=True)
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


@dataclass(frozen=True)
class SessionRecord:
    """What the shared folder holds on a session, as JSON.

    Attributes:
        budget: as :meth:`mmkv.engine.budget.Budget.as_list` has it.
        version: a new one with each change; memory: name of its session file, None before the
            first turn; messages: how many it holds; media: digests of its pictures and videos.
        skipped: frames that were not read as they were like those before, those of observations
            that changed no memory included.
    """

    id: str
    created: int
    budget: tuple[Any, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    turns: int = 0
    messages: int = 0
    memory: str | None = None
    version: str = ""
    media: tuple[str, ...] = ()
    skipped: int = 0

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read one; None where there is none. Raises SessionError: it cannot be read."""
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            budget = Budget.of_list(*found.pop("budget"))
            media = tuple(map(str, found.pop("media", ())))
            return cls(budget=tuple(budget.as_list()), media=media, **found)
        except FileNotFoundError:
            return None
        except (BudgetError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise SessionError(
                f"the session {path.stem} cannot be read from the session folder; begin a new one"
            ) from error


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
        self._folder = folder / _FOLDER

    def record(self, tenant: str, name: str) -> SessionRecord | None:
        """Return what is known of a session; None where there is none. Raises SessionError."""
        return SessionRecord.read(self._path(tenant, name + _RECORD))

    def records(self, tenant: str) -> Iterator[SessionRecord]:
        """Yield those of a tenant's sessions that can be read, oldest first."""
        found = []
        for path in self._path(tenant, "").glob("*" + _RECORD):
            with contextlib.suppress(SessionError):
                record = SessionRecord.read(path)
                if record is not None:
                    found.append(record)
        yield from sorted(found, key=lambda one: (one.created, one.id))

    def memory(self, tenant: str, record: SessionRecord) -> Path:
        """Return where the memory of a session lies."""
        assert record.memory is not None
        return self._path(tenant, record.memory)

    def new_memory(self, tenant: str, name: str) -> Path:
        """Return where the next memory of a session may be written."""
        path = self._path(tenant, f"{name}.{uuid.uuid4().hex}{_MEMORY}")
        with disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, tenant: str, record: SessionRecord) -> SessionRecord:
        """Replace the record of a session; return it with its new version.

        Raises:
            SessionError: another server changed the session meanwhile; NotWrittenError: it cannot
                be written. The earlier record stays.
        """
        path = self._path(tenant, record.id + _RECORD)
        made = SessionRecord(**{**vars(record), "version": uuid.uuid4().hex})
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
                _replace(path, json.dumps(vars(made)))
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
            self._path(tenant, name + _RECORD).unlink(missing_ok=True)
            if record is not None and record.memory is not None:
                self.memory(tenant, record).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what servers that were killed have left: files that no record names."""
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                if folder.is_dir():
                    self._sweep(folder.name)

    def _sweep(self, tenant: str) -> None:
        with self._locked(tenant):
            named, unread = set(), set()
            for path in self._path(tenant, "").glob("*" + _RECORD):
                try:
                    record = SessionRecord.read(path)
                    named.add(None if record is None else record.memory)
                except SessionError:
                    unread.add(path.stem)  # somebody may mend it
            for path in self._path(tenant, "").iterdir():
                of = path.name.rsplit(".", 2)[0]
                if path.suffix not in (_MEMORY, _DRAFT) or path.name in named or of in unread:
                    continue
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < time.time() - _ABANDONED:
                        path.unlink()

    @contextlib.contextmanager
    def _locked(self, tenant: str) -> Iterator[None]:
        """Lock a tenant's folder against all other threads and servers."""
        path = self._path(tenant, ".lock")
        with contextlib.ExitStack() as stack:
            with disk_errors():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path).acquire(poll_interval=_POLL))
            yield

    def _path(self, tenant: str, name: str) -> Path:
        return self._folder / (tenant[:32] or "public") / name


def _replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all, and flush it to the disk."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=_DRAFT)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; Windows cannot open folders."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MOST_MEDIA = 512 * 2**20  # bytes of all pictures and videos that are kept for clients
_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"\x1aE\xdf\xa3": "video/webm",
}


def media_type_of(content: bytes) -> str:
    """Return the type of a picture or video by its first bytes."""
    if content[:4] == b"RIFF":
        return "image/webp" if content[8:12] == b"WEBP" else "video/x-msvideo"
    if content[4:8] == b"ftyp":
        return "video/mp4" if other_kind(content) == "video" else "image/heic"
    found = (kind for begin, kind in _BEGINNINGS.items() if content.startswith(begin))
    return next(found, "application/octet-stream")


class MediaStore:
    """Pictures and videos of sessions, as they were sent, so that a client can show them again.

    The files are named by tenant and SHA-256. Where all together pass ``most`` bytes, those of the
    tenant that has the most go first, and of these those that were not asked for the longest. Any
    thread may call the methods.

    Args:
        folder: where they lie; it is made when the first one comes.
    """

    def __init__(self, folder: Path, most: int = MOST_MEDIA) -> None:
        self._folder, self._most, self._lock = folder, most, threading.Lock()

    def put(self, tenant: str, digest: str, content: bytes) -> None:
        """Keep one. Raises OSError."""
        path = self._path(tenant, digest)
        with self._lock:
            if path.exists():
                os.utime(path)
                return
            self._folder.mkdir(exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=self._folder, suffix=_DRAFT)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(draft, path)
            finally:
                Path(draft).unlink(missing_ok=True)
            self._make_room()

    def get(self, tenant: str, digest: str) -> bytes | None:
        """Return one; None where it is not kept."""
        path = self._path(tenant, digest)
        try:
            os.utime(path)
            return path.read_bytes()
        except OSError:
            return None

    def remove(self, tenant: str, digest: str) -> None:
        """Remove one, if it is kept."""
        with contextlib.suppress(OSError):
            self._path(tenant, digest).unlink()

    def _path(self, tenant: str, digest: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            digest = "none"
        return self._folder / f"{tenant[:32] or 'public'}-{digest}"

    def _make_room(self) -> None:
        found: dict[str, list[tuple[int, int, Path]]] = {}
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # removed meanwhile
                about, tenant = path.stat(), path.name.rpartition("-")[0]
                found.setdefault(tenant, []).append((about.st_mtime_ns, about.st_size, path))
        held = {tenant: sum(size for _, size, _ in ones) for tenant, ones in found.items()}
        for ones in found.values():
            ones.sort(reverse=True)
        while sum(held.values()) > self._most:
            most = max(held, key=held.__getitem__)
            _, size, path = found[most].pop()
            path.unlink(missing_ok=True)
            held[most] -= size


log = logging.getLogger("mmkv.server")
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
