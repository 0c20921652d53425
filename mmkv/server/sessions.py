"""A server's sessions: conversations whose memory stays until they are deleted; their files."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from mmkv.engine.budget import Budget
from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import SessionError
from mmkv.server.chat import refuse_budget
from mmkv.server.errors import ApiError
from mmkv.server.prompts import digest_of
from mmkv.server.schema import parse_budget
from mmkv.server.state import Caller, Room, hold, release
from mmkv.server.store import Lasting, Note, NotWrittenError, told

if TYPE_CHECKING:
    from pathlib import Path

    from mmkv.server.kept import Kept
    from mmkv.server.session_routes import NewSession, SavedName


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAMED = "named by letters, digits, dots, dashes and underscores"
_SUFFIX = ".mmkv"
_SAVING = ".saving"  # of a folder in which a new name is taken


@dataclass(frozen=True)
class Saved:
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


class SessionFiles:
    """Writes and reads memories, on the engine's thread; whoever asks waits in the event loop."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def path(self, name: str, caller: Caller) -> Path:
        """Return where a saved session lies; callers with different keys have different folders.

        Raises:
            ApiError: 400, the name cannot be one, or this server has no folder.
        """
        folder = self._room.settings.session_folder
        if folder is None:
            raise ApiError(
                400,
                "this server saves no sessions; start it with --session-folder",
                "no_session_folder",
            )
        if not re.fullmatch(NAME, name):
            raise ApiError(
                400,
                f"a file is {NAMED}",
                "invalid_value",
                "name",
            )
        return folder / (caller.tenant[:32] or "public") / f"{name}{_SUFFIX}"

    async def of(self, caller: Caller) -> list[Saved]:
        """Return a caller's files, by name. Raises ApiError (400): this server has no folder."""
        folder = self.path("any", caller).parent

        def read() -> list[Saved]:
            found = []
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                with contextlib.suppress(OSError):  # deleted meanwhile, a broken link
                    about = path.stat()
                    name = path.name.removesuffix(_SUFFIX)
                    if stat.S_ISREG(about.st_mode) and re.fullmatch(NAME, name):
                        found.append(Saved(name, about.st_size, int(about.st_mtime)))
            return found

        return await asyncio.to_thread(read)

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove a file. Raises ApiError: there is none (404), the disk refuses it (507)."""
        path = self.path(name, caller)

        def remove() -> None:
            try:
                path.unlink()
            except FileNotFoundError:
                raise no_such_file(name, "name") from None
            except OSError as error:
                raise ApiError(
                    507,
                    f"the file cannot be removed: {error.strerror}; see to the disk of "
                    "--session-folder",
                    "cannot_remove",
                ) from error

        await asyncio.to_thread(remove)

    async def write(self, kept: Kept, path: Path, over: bool = True) -> None:
        """Write a session file.

        Args:
            over: whether one that is there may be replaced.

        Raises:
            NotWrittenError: the disk refuses it; ApiError: 409, there is one.
        """

        def write() -> None:
            with told():
                if over:
                    kept.save(path)
                else:
                    _save_new(kept, path)

        try:
            await self._room.worker.call(write)
        except SessionError as error:
            # Where the files lie is no affair of who asks.
            shown = str(error).replace(f"{path.parent}{os.sep}", "")
            raise NotWrittenError(shown) from error

    async def load(self, path: Path, name: str, tenant: str) -> Kept:
        """Read a session file of a tenant.

        Args:
            name: of the file, for messages.

        Raises:
            SessionError: it cannot be read; CapacityError: there is no room now.
        """
        machine = self._room.worker.machine
        assert machine is not None
        shelf = machine.shelf
        # What other settings or cuts it was made with is not known: it resumes nothing else.
        root = digest_of([self._room.facts.root, secrets.token_hex(16)])
        weight = self._room.weights.get(tenant, 1.0)
        return await self._room.worker.call(lambda: shelf.load(path, name, root, weight))


def _save_new(kept: Kept, path: Path) -> None:
    """Write a session file where there is none; of two at once the second is refused."""
    with FileLock(path.with_name(_SAVING)):  # among all servers with this folder
        if path.exists():
            raise saved_already(path.stem)
        kept.save(path)


def no_such_file(name: str, param: str) -> ApiError:
    """Return the error of a request that names a file which is not there."""
    message = f"there is no saved session {name}; save one first"
    return ApiError(404, message, "file_not_found", param)


def saved_already(name: str) -> ApiError:
    """Return the error of a name that is taken, where the caller does not want it replaced."""
    return ApiError(409, f"there is a file {name} already; set overwrite", "file_exists", "name")


@dataclass
class Record:
    """One session.

    Attributes:
        kept: its memory after the latest turn; None before the first, or while it lies in the
            folder that servers share.
        note: what that folder says of it; None without.
        busy: whether a turn is under way; made_way: whether it was closed here for another one;
            used: grows with each use; unbound: whether its budget binds nothing.
    """

    id: str
    tenant: str
    budget: Budget
    metadata: dict[str, str]
    kept: Kept | None = None
    busy: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    turns: int = 0
    note: Note | None = None
    made_way: bool = False
    used: int = 0
    unbound: bool = False

    @property
    def lies_in_the_folder(self) -> bool:
        """Whether another server could go on from where it stands."""
        note = self.note
        return note is not None and bool(note.version and (self.kept is None or note.memory))

    @property
    def messages(self) -> int:
        """Count the messages that it holds."""
        if self.kept is not None:
            return len(self.kept.facets.messages)
        return 0 if self.note is None else self.note.messages

    @property
    def state(self) -> Literal["empty", "memory", "file"]:
        """Where its memory lies."""
        if self.kept is None:
            return "empty" if self.note is None or self.note.memory is None else "file"
        return "memory" if self.kept.resident else "file"

    def shown(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return {
            "id": self.id,
            "object": "session",
            "created": self.created,
            "metadata": self.metadata,
            "budget": "none" if self.unbound else self.budget.describe(),
            "turns": self.turns,
            "messages": self.messages,
            "busy": self.busy,
            "state": self.state,
        }


class Sessions:
    """The sessions of a server; all methods run in the event loop.

    Where they last, a session's note decides: one that another server has changed is read anew.
    """

    def __init__(self, room: Room) -> None:
        self._room, self._files = room, SessionFiles(room)
        self._records: dict[tuple[str, str], Record] = {}
        self._uses = itertools.count(1)
        self._coming: list[Record | _Coming] = []  # what is read from files, by identity
        folder = room.settings.session_folder
        lasts = room.settings.lasting and folder is not None
        self._lasting = Lasting(folder) if lasts and folder is not None else None
        if self._lasting is not None:
            self._lasting.sweep()

    async def of(self, caller: Caller) -> list[Record]:
        """Return the sessions of a caller, oldest first."""
        tenant = caller.tenant
        if self._lasting is not None:
            lasting = self._lasting
            notes = await asyncio.to_thread(lambda: list(lasting.notes(tenant)))
            return [self._shown(tenant, note) for note in notes]
        return [one for one in self._records.values() if one.tenant == tenant]

    async def find(self, name: str, caller: Caller, idle: bool = False) -> Record:
        """Return a session. Raises ApiError: 404, also for another's; 409 if it has to be idle."""
        if self._lasting is not None and re.fullmatch(NAME, name):
            note = await asyncio.to_thread(self._lasting.note, caller.tenant, name)
            self._take_note(caller.tenant, name, note)
        record = self._records.get((caller.tenant, name))
        if record is None:
            raise _gone(name)
        record.used = next(self._uses)
        if idle:
            self.require_idle(record)
        return record

    def require_idle(self, record: Record) -> None:
        """Raise ApiError: a turn is under way, or the session is gone."""
        if self._records.get((record.tenant, record.id)) is not record:
            if record.made_way:
                raise ApiError(409, "the session made way for others; send it again", "conflict")
            raise _gone(record.id)
        if record.busy:
            raise ApiError(
                409, "a turn of the session is under way; wait for it or end it", "session_busy"
            )

    async def memory_of(self, record: Record) -> Kept | None:
        """Return a session's memory, from the shared folder if it lies there alone."""
        note, lasting = record.note, self._lasting
        gone = record.kept is not None and record.kept.lost and record.lies_in_the_folder
        if gone and not record.busy:  # the idle memory was removed, its session file was not
            assert record.kept is not None
            release(self._room, record.kept)
            record.kept = None
        if record.kept is not None or lasting is None or note is None or not note.version:
            return record.kept
        self._require_room(record.tenant, record)
        if note.memory:
            path = lasting.memory(record.tenant, note)
            with self._coming_in(record):
                kept = await self._files.load(path, record.id, record.tenant)
            if self._records.get((record.tenant, record.id)) is not record:
                release(self._room, kept)
                raise _gone(record.id)
            if record.kept is None and record.note is note:
                record.kept = kept
            else:  # another request was faster
                release(self._room, kept)
        return record.kept

    async def stands(self, record: Record, kept: Kept, turns: int) -> None:
        """Write down that a session stands at another memory, where sessions last.

        Raises:
            SessionError: another server was faster; NotWrittenError: it cannot be written. The
                session stands where it stood.
        """
        lasting = self._lasting
        if lasting is None or record.note is None:
            return
        path = lasting.new_memory(record.tenant, record.id)
        note = dataclasses.replace(
            record.note, memory=path.name, messages=len(kept.facets.messages), turns=turns
        )
        await self._files.write(kept, path)
        try:
            record.note = await asyncio.to_thread(lasting.commit, record.tenant, note)
        except Exception:  # no cancellation: the thread may still put the note in its place
            path.unlink(missing_ok=True)
            raise

    async def create(self, asked: NewSession, caller: Caller, name: str | None = None) -> Record:
        """Open a session, empty or from a saved one.

        Args:
            name: its id, if the caller names it. Raises ApiError (409): there is one.
        """
        if name is not None:
            await self._require_new(name, caller)
        budget = parse_budget(asked.budget, "budget") or self._room.facts.budget
        refuse_budget(self._room.facts, asked.budget is not None, "budget")
        if asked.file is None:
            self._require_room(caller.tenant)
            return await self._add(caller.tenant, budget, asked.metadata, name)
        if asked.budget is not None:
            raise ApiError(400, "a saved session has its own budget", "invalid_value", "budget")
        path = self._files.path(asked.file, caller)
        if not await asyncio.to_thread(path.is_file):  # nobody makes way for it
            raise no_such_file(asked.file, "file")
        self._require_room(caller.tenant)
        with self._coming_in(_Coming(caller.tenant)):
            kept = await self._files.load(path, asked.file, caller.tenant)
        return await self._add(caller.tenant, kept.budget, asked.metadata, name, kept)

    async def fork(self, record: Record) -> Record:
        """Open another session that goes on from where this one stands."""
        kept = await self.memory_of(record)
        if kept is not None:
            hold(self._room, kept)  # whatever makes way for the fork
        try:
            self._require_room(record.tenant)
        except ApiError:
            if kept is not None:
                release(self._room, kept)
            raise
        return await self._add(
            record.tenant, record.budget, dict(record.metadata), None, kept, record.turns
        )

    async def save(self, record: Record, asked: SavedName, caller: Caller) -> None:
        """Write a session to a file of the server's folder."""
        kept, path = await self.memory_of(record), self._files.path(asked.name, caller)
        if kept is None:
            raise ApiError(400, "the session is empty; save it after a turn", "invalid_value")
        if path.exists() and not asked.overwrite:
            raise saved_already(asked.name)
        with told():
            path.parent.mkdir(parents=True, exist_ok=True)
        await self._files.write(kept, path, asked.overwrite)

    async def delete(self, record: Record) -> None:
        """Close a session; its saved files stay."""
        self._forget(record)
        if self._lasting is not None:
            await asyncio.to_thread(self._lasting.delete, record.tenant, record.id)

    async def memory(self, record: Record) -> dict[str, Any]:
        """Return what a session remembers, and what that takes."""
        kept = await self.memory_of(record)
        shown = {"id": record.id, "object": "session.memory", "state": record.state}
        if kept is None:
            return shown
        if self._room.facts.shared:
            await self._room.worker.call(kept.look)
        facets = kept.facets
        return (
            shown
            | dataclasses.asdict(facets.memory)
            | {
                "seen_by_modality": dict(zip(MODALITIES, facets.seen, strict=True)),
                "bytes": kept.bytes,
            }
        )

    async def _add(
        self,
        tenant: str,
        budget: Budget,
        metadata: dict[str, str],
        name: str | None = None,
        kept: Kept | None = None,
        turns: int = 0,
    ) -> Record:
        """Register a session, which takes over ``kept``."""
        name = name or f"sess_{secrets.token_hex(12)}"
        if (tenant, name) in self._records:  # since it was looked for
            if kept is not None:
                release(self._room, kept)
            raise _exists(name)
        made = Record(name, tenant, budget, metadata, kept, turns=turns)
        made.unbound = self._room.facts.unbound
        self._records[tenant, name] = made
        if self._lasting is None:
            return made
        made.note = Note(name, made.created, (budget.kind, budget.value), metadata)
        try:
            if kept is None:
                made.note = await asyncio.to_thread(self._lasting.commit, tenant, made.note)
            else:
                await self.stands(made, kept, turns)
        except BaseException:
            self._forget(made)
            raise
        return made

    def _forget(self, record: Record) -> None:
        """Close a session here, unless that was done."""
        if self._records.get((record.tenant, record.id)) is not record:
            return
        del self._records[record.tenant, record.id]
        if record.kept is not None:
            kept, record.kept = record.kept, None
            release(self._room, kept)

    def _take_note(self, tenant: str, name: str, note: Note | None) -> None:
        """Follow what the shared folder says of a session; one that is busy decides at its end."""
        record = self._records.get((tenant, name))
        if record is not None and (record.busy or record.note == note):
            return
        if record is not None and (record.note is None or record.note.version):
            self._forget(record)
        elif record is not None:
            return  # it is being written for the first time
        if note is not None:
            self._records[tenant, name] = self._of_note(tenant, note)

    def _shown(self, tenant: str, note: Note) -> Record:
        """Return a session as it stands, here or in the folder; one that is not open stays so."""
        record = self._records.get((tenant, note.id))
        current = record is not None and (record.busy or record.note == note)
        return record if record is not None and current else self._of_note(tenant, note)

    def _of_note(self, tenant: str, note: Note) -> Record:
        facts = self._room.facts
        budget = facts.budget if facts.shared else Budget(*note.budget)  # type: ignore[arg-type]
        made = Record(note.id, tenant, budget, note.metadata, created=note.created)
        made.note, made.turns, made.unbound = note, note.turns, facts.unbound
        return made

    async def _require_new(self, name: str, caller: Caller) -> None:
        """Raise ApiError: the name cannot be one, or is a session's."""
        if not re.fullmatch(NAME, name):
            raise ApiError(400, f"X-Session-Id is {NAMED}", "invalid_value")
        try:
            await self.find(name, caller)
        except ApiError:
            return
        raise _exists(name)

    def _require_room(self, tenant: str, besides: Record | None = None) -> None:
        """Make sure that a key may have one more session open, beside all but one.

        Each key has an equal share.

        Raises:
            ApiError: 503, it has its share, or as many are open as may.
        """
        most, keys = self._room.settings.max_sessions, len(set(self._room.settings.api_keys))
        if keys > 1:
            share = max(most // keys, min(most, 1))
            self._make_way(share, f"{share} sessions of your key are", besides, tenant)
        self._make_way(most, f"{most} sessions are", besides)

    def _make_way(
        self, most: int, open_are: str, besides: Record | None, tenant: str | None = None
    ) -> None:
        """Let one more session be open, of one key's or of all. Raises ApiError.

        Where they last, one that is idle need not be: it lies in the folder. That used longest ago
        goes first. What lies there alone is not open here, however many know of it.
        """
        opened = [
            one
            for one in self._records.values()
            if one is not besides
            and tenant in (None, one.tenant)
            and (one.kept is not None or one.turns == 0)
        ]
        movable = [one for one in opened if one.lies_in_the_folder and not one.busy]
        movable.sort(key=lambda one: one.used)
        coming = {
            id(one) for one in self._coming if one is not besides and tenant in (None, one.tenant)
        }
        short = len(coming.union(map(id, opened))) + 1 - most
        if short > len(movable):
            raise ApiError(
                503, f"{open_are} open, as many as this server keeps", "too_many_sessions"
            )
        for one in movable[: max(short, 0)]:
            one.made_way = True
            self._forget(one)

    @contextmanager
    def _coming_in(self, one: Record | _Coming) -> Iterator[None]:
        """Count a session that is read from its file among those that are open."""
        self._coming.append(one)
        try:
            yield
        finally:
            self._coming = [other for other in self._coming if other is not one]


@dataclasses.dataclass(eq=False)
class _Coming:
    """A saved session that is read for a key."""

    tenant: str


def _gone(name: str) -> ApiError:
    return ApiError(404, f"there is no session {name[:60]!r}; create one", "session_not_found")


def _exists(name: str) -> ApiError:
    return ApiError(409, f"there is a session {name!r} already", "session_exists")
