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
from mmkv.server.state import Caller, ServerState, hold, release
from mmkv.server.store import NotWrittenError, SessionRecord, SessionStore, disk_errors

if TYPE_CHECKING:
    from pathlib import Path

    from mmkv.server.kept import Kept
    from mmkv.server.session_routes import NewSession, SavedName


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
    """Writes and reads memories, on the engine's thread; whoever asks waits in the event loop."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def path(self, name: str, caller: Caller) -> Path:
        """Return where a saved session lies; callers with different keys have different folders.

        Raises:
            ApiError: 400, the name cannot be one, or this server has no folder.
        """
        folder = self._state.settings.session_folder
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

    async def of(self, caller: Caller) -> list[SavedSession]:
        """Return a caller's files, by name. Raises ApiError (400): this server has no folder."""
        folder = self.path("any", caller).parent

        def read() -> list[SavedSession]:
            found = []
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                with contextlib.suppress(OSError):  # deleted meanwhile, a broken link
                    about = path.stat()
                    name = path.name.removesuffix(_SUFFIX)
                    if stat.S_ISREG(about.st_mode) and re.fullmatch(NAME, name):
                        found.append(SavedSession(name, about.st_size, int(about.st_mtime)))
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
            with disk_errors():
                if over:
                    kept.save(path)
                else:
                    _save_new(kept, path)

        try:
            await self._state.engine_thread.call(write)
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
        core = self._state.engine_thread.core
        assert core is not None
        conversations = core.conversations
        # What other settings or cuts it was made with is not known: it resumes nothing else.
        root = digest_of([self._state.facts.root, secrets.token_hex(16)])
        weight = self._state.weights.get(tenant, 1.0)
        return await self._state.engine_thread.call(
            lambda: conversations.load(path, name, root, weight)
        )


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
class ServerSession:
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
    record: SessionRecord | None = None
    closed_for_room: bool = False
    used: int = 0
    unbound: bool = False

    @property
    def on_disk(self) -> bool:
        """Whether another server could go on from where it stands."""
        record = self.record
        return record is not None and bool(record.version and (self.kept is None or record.memory))

    @property
    def messages(self) -> int:
        """Count the messages that it holds."""
        if self.kept is not None:
            return len(self.kept.info.messages)
        return 0 if self.record is None else self.record.messages

    @property
    def state(self) -> Literal["empty", "memory", "file"]:
        """Where its memory lies."""
        if self.kept is None:
            return "empty" if self.record is None or self.record.memory is None else "file"
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


class SessionTable:
    """The sessions of a server; all methods run in the event loop.

    Where they last, a session's note decides: one that another server has changed is read anew.
    """

    def __init__(self, state: ServerState) -> None:
        self._state, self._files = state, SavedSessions(state)
        self._sessions: dict[tuple[str, str], ServerSession] = {}
        self._uses = itertools.count(1)
        self._opening: list[ServerSession | _Opening] = []  # what is read from files, by identity
        folder = state.settings.session_folder
        lasts = state.settings.keep_sessions and folder is not None
        self._store = SessionStore(folder) if lasts and folder is not None else None
        if self._store is not None:
            self._store.sweep()

    async def of(self, caller: Caller) -> list[ServerSession]:
        """Return the sessions of a caller, oldest first."""
        tenant = caller.tenant
        if self._store is not None:
            store = self._store
            records = await asyncio.to_thread(lambda: list(store.records(tenant)))
            return [self._shown(tenant, record) for record in records]
        return [one for one in self._sessions.values() if one.tenant == tenant]

    async def find(self, name: str, caller: Caller, idle: bool = False) -> ServerSession:
        """Return a session. Raises ApiError: 404, also for another's; 409 if it has to be idle."""
        if self._store is not None and re.fullmatch(NAME, name):
            record = await asyncio.to_thread(self._store.record, caller.tenant, name)
            self._apply_record(caller.tenant, name, record)
        session = self._sessions.get((caller.tenant, name))
        if session is None:
            raise _gone(name)
        session.used = next(self._uses)
        if idle:
            self.require_idle(session)
        return session

    def require_idle(self, session: ServerSession) -> None:
        """Raise ApiError: a turn is under way, or the session is gone."""
        if self._sessions.get((session.tenant, session.id)) is not session:
            if session.closed_for_room:
                raise ApiError(409, "the session made way for others; send it again", "conflict")
            raise _gone(session.id)
        if session.busy:
            raise ApiError(
                409, "a turn of the session is under way; wait for it or end it", "session_busy"
            )

    async def load_memory(self, session: ServerSession) -> Kept | None:
        """Return a session's memory, from the shared folder if it lies there alone."""
        record, store = session.record, self._store
        gone = session.kept is not None and session.kept.lost and session.on_disk
        if gone and not session.busy:  # the idle memory was removed, its session file was not
            assert session.kept is not None
            release(self._state, session.kept)
            session.kept = None
        if session.kept is not None or store is None or record is None or not record.version:
            return session.kept
        self._require_place(session.tenant, session)
        if record.memory:
            path = store.memory(session.tenant, record)
            with self._being_opened(session):
                kept = await self._files.load(path, session.id, session.tenant)
            if self._sessions.get((session.tenant, session.id)) is not session:
                release(self._state, kept)
                raise _gone(session.id)
            if session.kept is None and session.record is record:
                session.kept = kept
            else:  # another request was faster
                release(self._state, kept)
        return session.kept

    async def commit_turn(self, session: ServerSession, kept: Kept, turns: int) -> None:
        """Write down that a session stands at another memory, where sessions last.

        Raises:
            SessionError: another server was faster; NotWrittenError: it cannot be written. The
                session stands where it stood.
        """
        store = self._store
        if store is None or session.record is None:
            return
        path = store.new_memory(session.tenant, session.id)
        record = dataclasses.replace(
            session.record, memory=path.name, messages=len(kept.info.messages), turns=turns
        )
        await self._files.write(kept, path)
        try:
            session.record = await asyncio.to_thread(store.commit, session.tenant, record)
        except Exception:  # no cancellation: the thread may still put the note in its place
            path.unlink(missing_ok=True)
            raise

    async def create(
        self, asked: NewSession, caller: Caller, name: str | None = None
    ) -> ServerSession:
        """Open a session, empty or from a saved one.

        Args:
            name: its id, if the caller names it. Raises ApiError (409): there is one.
        """
        if name is not None:
            await self._require_new(name, caller)
        budget = parse_budget(asked.budget, "budget") or self._state.facts.budget
        refuse_budget(self._state.facts, asked.budget is not None, "budget")
        if asked.file is None:
            self._require_place(caller.tenant)
            return await self._add(caller.tenant, budget, asked.metadata, name)
        if asked.budget is not None:
            raise ApiError(400, "a saved session has its own budget", "invalid_value", "budget")
        path = self._files.path(asked.file, caller)
        if not await asyncio.to_thread(path.is_file):  # nobody makes way for it
            raise no_such_file(asked.file, "file")
        self._require_place(caller.tenant)
        with self._being_opened(_Opening(caller.tenant)):
            kept = await self._files.load(path, asked.file, caller.tenant)
        return await self._add(caller.tenant, kept.budget, asked.metadata, name, kept)

    async def fork(self, session: ServerSession) -> ServerSession:
        """Open another session that goes on from where this one stands."""
        kept = await self.load_memory(session)
        if kept is not None:
            hold(self._state, kept)  # whatever makes way for the fork
        try:
            self._require_place(session.tenant)
        except ApiError:
            if kept is not None:
                release(self._state, kept)
            raise
        return await self._add(
            session.tenant, session.budget, dict(session.metadata), None, kept, session.turns
        )

    async def save(self, session: ServerSession, asked: SavedName, caller: Caller) -> None:
        """Write a session to a file of the server's folder."""
        kept, path = await self.load_memory(session), self._files.path(asked.name, caller)
        if kept is None:
            raise ApiError(400, "the session is empty; save it after a turn", "invalid_value")
        if path.exists() and not asked.overwrite:
            raise saved_already(asked.name)
        with disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
        await self._files.write(kept, path, asked.overwrite)

    async def delete(self, session: ServerSession) -> None:
        """Close a session; its saved files stay."""
        self._close(session)
        if self._store is not None:
            await asyncio.to_thread(self._store.delete, session.tenant, session.id)

    async def memory(self, session: ServerSession) -> dict[str, Any]:
        """Return what a session remembers, and what that takes."""
        kept = await self.load_memory(session)
        shown = {"id": session.id, "object": "session.memory", "state": session.state}
        if kept is None:
            return shown
        if self._state.facts.shared:
            await self._state.engine_thread.call(kept.look)
        info = kept.info
        return (
            shown
            | dataclasses.asdict(info.memory)
            | {
                "seen_by_modality": dict(zip(MODALITIES, info.seen, strict=True)),
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
    ) -> ServerSession:
        """Register a session, which takes over ``kept``."""
        name = name or f"sess_{secrets.token_hex(12)}"
        if (tenant, name) in self._sessions:  # since it was looked for
            if kept is not None:
                release(self._state, kept)
            raise _exists(name)
        made = ServerSession(name, tenant, budget, metadata, kept, turns=turns)
        made.unbound = self._state.facts.unbound
        self._sessions[tenant, name] = made
        if self._store is None:
            return made
        made.record = SessionRecord(name, made.created, (budget.kind, budget.value), metadata)
        try:
            if kept is None:
                made.record = await asyncio.to_thread(self._store.commit, tenant, made.record)
            else:
                await self.commit_turn(made, kept, turns)
        except BaseException:
            self._close(made)
            raise
        return made

    def _close(self, session: ServerSession) -> None:
        """Close a session here, unless that was done."""
        if self._sessions.get((session.tenant, session.id)) is not session:
            return
        del self._sessions[session.tenant, session.id]
        if session.kept is not None:
            kept, session.kept = session.kept, None
            release(self._state, kept)

    def _apply_record(self, tenant: str, name: str, record: SessionRecord | None) -> None:
        """Follow what the shared folder says of a session; one that is busy decides at its end."""
        session = self._sessions.get((tenant, name))
        if session is not None and (session.busy or session.record == record):
            return
        if session is not None and (session.record is None or session.record.version):
            self._close(session)
        elif session is not None:
            return  # it is being written for the first time
        if record is not None:
            self._sessions[tenant, name] = self._from_record(tenant, record)

    def _shown(self, tenant: str, record: SessionRecord) -> ServerSession:
        """Return a session as it stands, here or in the folder; one that is not open stays so."""
        session = self._sessions.get((tenant, record.id))
        current = session is not None and (session.busy or session.record == record)
        return session if session is not None and current else self._from_record(tenant, record)

    def _from_record(self, tenant: str, record: SessionRecord) -> ServerSession:
        facts = self._state.facts
        budget = facts.budget if facts.shared else Budget(*record.budget)  # type: ignore[arg-type]
        made = ServerSession(record.id, tenant, budget, record.metadata, created=record.created)
        made.record, made.turns, made.unbound = record, record.turns, facts.unbound
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

    def _require_place(self, tenant: str, besides: ServerSession | None = None) -> None:
        """Make sure that a key may have one more session open, beside all but one.

        Each key has an equal share.

        Raises:
            ApiError: 503, it has its share, or as many are open as may.
        """
        most, keys = self._state.settings.max_sessions, len(set(self._state.settings.api_keys))
        if keys > 1:
            share = max(most // keys, min(most, 1))
            self._close_idle(share, f"{share} sessions of your key are", besides, tenant)
        self._close_idle(most, f"{most} sessions are", besides)

    def _close_idle(
        self, most: int, open_are: str, besides: ServerSession | None, tenant: str | None = None
    ) -> None:
        """Let one more session be open, of one key's or of all. Raises ApiError.

        Where they last, one that is idle need not be: it lies in the folder. That used longest ago
        goes first. What lies there alone is not open here, however many know of it.
        """
        opened = [
            one
            for one in self._sessions.values()
            if one is not besides
            and tenant in (None, one.tenant)
            and (one.kept is not None or one.turns == 0)
        ]
        movable = [one for one in opened if one.on_disk and not one.busy]
        movable.sort(key=lambda one: one.used)
        coming = {
            id(one) for one in self._opening if one is not besides and tenant in (None, one.tenant)
        }
        short = len(coming.union(map(id, opened))) + 1 - most
        if short > len(movable):
            raise ApiError(
                503, f"{open_are} open, as many as this server keeps", "too_many_sessions"
            )
        for one in movable[: max(short, 0)]:
            one.closed_for_room = True
            self._close(one)

    @contextmanager
    def _being_opened(self, one: ServerSession | _Opening) -> Iterator[None]:
        """Count a session that is read from its file among those that are open."""
        self._opening.append(one)
        try:
            yield
        finally:
            self._opening = [other for other in self._opening if other is not one]


@dataclasses.dataclass(eq=False)
class _Opening:
    """A saved session that is read for a key."""

    tenant: str


def _gone(name: str) -> ApiError:
    return ApiError(404, f"there is no session {name[:60]!r}; create one", "session_not_found")


def _exists(name: str) -> ApiError:
    return ApiError(409, f"there is a session {name!r} already", "session_exists")
