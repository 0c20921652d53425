"""Sessions: conversations that stay until they are deleted, and their routes.

/v1/sessions and /v1/saved_sessions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mmkv.engine.budget import Budget
from mmkv.engine.errors import SessionError
from mmkv.server.checked import refuse_budget, take_resume
from mmkv.server.errors import ApiError, invalid_value
from mmkv.server.guard import BodyRoute
from mmkv.server.prompts import digest_of
from mmkv.server.quota import DiskQuota, MediaStore, media_type_of
from mmkv.server.reply import ReplyResponse
from mmkv.server.schema import (
    Body,
    ChatRequest,
    Metadata,
    Number,
    ObserveRequest,
    parse_budget,
)
from mmkv.server.state import Caller, CurrentCaller, ServerState, hold, release
from mmkv.server.store import (
    NAME,
    NAMED,
    SavedSessions,
    SessionRecord,
    SessionStore,
    disk_errors,
    no_such_file,
    saved_already,
    write_session,
)
from mmkv.server.turns import BackgroundTurn, ServerSession, SessionObservation, SessionTurn
from mmkv.server.work import Standing

if TYPE_CHECKING:
    from pathlib import Path

    from mmkv.prompt.video import FramesSeen
    from mmkv.server.conversations import ConversationState


class SessionTable:
    """The sessions of a server; all methods run in the event loop.

    With ``--keep-sessions`` the record in the shared folder decides: a session that another server
    has changed is read again.
    """

    def __init__(self, state: ServerState) -> None:
        self._state, self._saved = state, SavedSessions(state.settings.session_folder)
        self._sessions: dict[tuple[str, str], ServerSession] = {}
        self._uses = itertools.count(1)
        self._opening: list[ServerSession | _Opening] = []  # what is read from files, by identity
        folder = state.settings.session_folder
        lasts = state.settings.keep_sessions and folder is not None
        self._store = SessionStore(folder) if lasts and folder is not None else None
        self._saved.sweep()
        if self._store is not None:
            self._store.sweep()
        idle = state.engine_thread.core.folder.path
        media = (idle if not lasts or folder is None else folder) / ".media"
        settings = state.settings
        bounds = settings.tenant_bytes, settings.tenant_files, self._in_idle_files
        self._quota = DiskQuota(folder, media, *bounds)
        self.media = MediaStore(media, self._quota)

    def _in_idle_files(self, owner: str) -> tuple[int, int]:
        """Return bytes and number of an owner's idle sessions in files; in any thread."""
        opened = list(self._sessions.values())
        found = [one.conversation for one in opened if one.owner == owner]
        sizes = [one.bytes for one in found if one is not None and not one.resident]
        return sum(sizes), len(sizes)

    @asynccontextmanager
    async def _room(
        self, owner: str, tenant: str, size: int, files: int = 1
    ) -> AsyncIterator[None]:
        """Count what is written as long as it is; see :meth:`DiskQuota.writing`."""
        room = self._quota.writing(owner, tenant, size, files)
        await asyncio.to_thread(room.__enter__)
        try:
            yield
        finally:
            room.__exit__(None, None, None)

    async def of(self, caller: Caller) -> list[ServerSession]:
        """Return the sessions of a caller, oldest first."""
        tenant = caller.tenant
        if self._store is not None:
            store = self._store
            records = await asyncio.to_thread(lambda: list(store.records(tenant)))
            return [self._shown(caller, record) for record in records]
        return [one for one in self._sessions.values() if one.tenant == tenant]

    async def find(self, name: str, caller: Caller, idle: bool = False) -> ServerSession:
        """Return a session. Raises ApiError: 404, also for another's; 409 if it has to be idle."""
        if self._store is not None and re.fullmatch(NAME, name):
            record = await asyncio.to_thread(self._store.record, caller.tenant, name)
            self._apply_record(caller, name, record)
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

    async def load_memory(self, session: ServerSession) -> ConversationState | None:
        """Return a session's conversation; it is read from the shared folder if need be."""
        record, store = session.record, self._store
        gone = session.conversation is not None and session.conversation.lost and session.on_disk
        if gone and not session.busy:  # the idle memory was removed, its session file was not
            assert session.conversation is not None
            release(self._state, session.conversation)
            session.conversation = None
        if (
            session.conversation is not None
            or store is None
            or record is None
            or not record.version
        ):
            return session.conversation
        self._require_place(session.tenant, session.owner, session)
        if record.memory:
            path = store.memory(session.tenant, record)
            with self._being_opened(session):
                conversation = await self._load(path, session.id, session.tenant)
            if self._sessions.get((session.tenant, session.id)) is not session:
                release(self._state, conversation)
                raise _gone(session.id)
            if session.conversation is None and session.record is record:
                session.conversation = conversation
                if record.skipped > conversation.info.frames.skipped:
                    frames = dataclasses.replace(conversation.info.frames, skipped=record.skipped)
                    session.frames = frames
            else:  # another request was faster
                release(self._state, conversation)
        return session.conversation

    async def commit_turn(
        self,
        session: ServerSession,
        conversation: ConversationState,
        turns: int,
        frames: FramesSeen | None = None,
    ) -> None:
        """Write a session's new state to the shared folder, where there is one.

        Args:
            frames: what is remembered of observed frames; None: what the conversation says.

        Raises:
            SessionError: another server was faster; NotWrittenError: it cannot be written. The
                session stays as it was.
        """
        store = self._store
        if store is None or session.record is None:
            return
        before, path = session.record, store.new_memory(session.tenant, session.id)
        if before.memory is not None and conversation is session.conversation:
            path = store.memory(session.tenant, before)  # it is written already
        record = before.changed(
            memory=path.name,
            messages=len(conversation.info.messages),
            turns=turns,
            media=conversation.info.digests,
            skipped=(frames or conversation.info.frames).skipped,
        )
        old = None if before.memory is None else session.conversation
        grown = conversation.bytes - (0 if old is None else old.bytes)
        async with self._room(session.owner, session.tenant, grown, int(old is None)):
            if path.name != before.memory:
                await self._write(conversation, path)
            try:
                session.record = await asyncio.to_thread(store.commit, session.tenant, record)
            except Exception:  # no cancellation: the thread may still write the record
                if path.name != before.memory:
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
            self._require_place(caller.tenant, caller.name)
            return await self._add(caller, budget, asked.metadata, name)
        if asked.budget is not None:
            raise invalid_value("budget", "a saved session has its own budget")
        path = self._saved.path(asked.file, caller.tenant)
        if not await asyncio.to_thread(path.is_file):  # nobody makes way for it
            raise no_such_file(asked.file, "file")
        self._require_place(caller.tenant, caller.name)
        with self._being_opened(_Opening(caller.tenant, caller.name)):
            conversation = await self._load(path, asked.file, caller.tenant)
        return await self._add(caller, conversation.budget, asked.metadata, name, conversation)

    async def fork(
        self, session: ServerSession, metadata: dict[str, str] | None = None
    ) -> ServerSession:
        """Open another session that goes on from the same state.

        Args:
            metadata: of the new one; None: the session's.
        """
        conversation = await self.load_memory(session)
        if conversation is not None:
            hold(self._state, conversation)  # whatever makes way for the fork
        try:
            self._require_place(session.tenant, session.owner)
        except ApiError:
            if conversation is not None:
                release(self._state, conversation)
            raise
        if conversation is not None and session.frames is None:
            session.frames = conversation.info.frames
        return await self._add(
            Caller(session.tenant, session.owner),
            session.budget,
            dict(session.metadata if metadata is None else metadata),
            None,
            conversation,
            session.turns,
            session.frames,
        )

    async def describe(self, session: ServerSession, metadata: dict[str, str]) -> None:
        """Give a session other metadata. Raises as :meth:`commit_turn`."""
        if self._store is not None and session.record is not None:
            record = session.record.changed(metadata=metadata)
            session.record = await asyncio.to_thread(self._store.commit, session.tenant, record)
        session.metadata = metadata

    async def save(self, session: ServerSession, asked: SavedName, caller: Caller) -> None:
        """Write a session to a file of the server's folder."""
        conversation, path = (
            await self.load_memory(session),
            self._saved.path(asked.name, caller.tenant),
        )
        if conversation is None:
            raise invalid_value(None, "the session is empty; save it after a turn")
        if path.exists() and not asked.overwrite:
            raise saved_already(asked.name)
        if session.frames is not None:
            conversation.info.frames = session.frames
        with disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
        there = [path.lstat().st_size] if path.is_file() else []
        size = conversation.bytes - sum(there)
        async with self._room(caller.name, caller.tenant, size, 1 - len(there)):
            await self._write(conversation, path, asked.overwrite)

    async def delete_named(self, name: str, caller: Caller) -> None:
        """Close a session, or remove the record of one that cannot be read. Raises ApiError."""
        try:
            session = await self.find(name, caller, idle=True)
        except SessionError:
            assert self._store is not None
            self._apply_record(caller, name, None)
            await asyncio.to_thread(self._store.delete, caller.tenant, name)
        else:
            await self.delete(session)

    async def delete(self, session: ServerSession) -> None:
        """Close a session; its saved files stay."""
        media = _media_of(session)
        self._close(session)
        if self._store is not None:
            await asyncio.to_thread(self._store.delete, session.tenant, session.id)
        if media:
            await self.forget_media(session.tenant, media)

    async def medium(self, session: ServerSession, digest: str) -> bytes:
        """Return a picture or video of a session. Raises ApiError (404): it is not kept."""
        if digest in _media_of(session):
            content = await asyncio.to_thread(self.media.get, session.tenant, digest)
            if content is not None:
                return content
        what = "this picture or video is not kept: the oldest ones make way for others"
        raise ApiError(404, what, "media_not_found")

    async def forget_media(self, tenant: str, digests: set[str]) -> None:
        """Remove pictures and videos that no session of a tenant names any more."""
        others = [one for one in self._sessions.values() if one.tenant == tenant]
        named = {name for one in others for name in _media_of(one)}

        def forget() -> None:
            records = () if self._store is None else self._store.records(tenant)
            left = named.union(*(record.media for record in records))
            for digest in digests - left:
                self.media.remove(tenant, digest)

        await asyncio.to_thread(forget)

    async def memory(self, session: ServerSession) -> dict[str, Any]:
        """Return what a session remembers, and what that takes."""
        conversation = await self.load_memory(session)
        shown = {"id": session.id, "object": "session.memory", "state": session.state}
        if conversation is None:
            return shown

        def measure() -> Standing:
            if self._state.facts.shared:
                conversation.refresh()
            info = conversation.info
            assert info.memory is not None
            given = info.memory, info.seen, conversation.kept(), conversation.most_entries()
            return Standing(*given, info.told)

        standing = await self._state.engine_thread.call(measure)
        return shown | standing.shown() | {"bytes": conversation.bytes}

    async def _add(
        self,
        caller: Caller,
        budget: Budget,
        metadata: dict[str, str],
        name: str | None = None,
        conversation: ConversationState | None = None,
        turns: int = 0,
        frames: FramesSeen | None = None,
    ) -> ServerSession:
        """Register a session, which takes over ``conversation``."""
        tenant, name = caller.tenant, name or f"sess_{secrets.token_hex(12)}"
        if (tenant, name) in self._sessions:  # since it was looked for
            if conversation is not None:
                release(self._state, conversation)
            raise _exists(name)
        made = ServerSession(name, tenant, budget, metadata, conversation, turns=turns)
        made.frames, made.owner = frames, caller.name
        made.unbound = self._state.facts.unbound is not None
        self._sessions[tenant, name] = made
        try:
            async with self._room(caller.name, tenant, 0):  # its record, or its idle memory
                if self._store is None:
                    return made
                kept = tuple(budget.as_list())
                made.record = SessionRecord(
                    id=name, created=made.created, budget=kept, metadata=metadata
                )
                if conversation is None:
                    made.record = await asyncio.to_thread(self._store.commit, tenant, made.record)
                else:
                    await self.commit_turn(made, conversation, turns, frames)
        except BaseException:
            self._close(made)
            raise
        return made

    async def _write(self, conversation: ConversationState, path: Path, over: bool = True) -> None:
        """Have the engine thread write a session file; see :func:`write_session`."""
        await self._state.engine_thread.call(lambda: write_session(conversation.save, path, over))

    async def _load(self, path: Path, name: str, tenant: str) -> ConversationState:
        """Have the engine thread read a session file of a tenant.

        Args:
            name: of the file, for messages.

        Raises:
            SessionError: it cannot be read; CapacityError: there is no room now.
        """
        thread = self._state.engine_thread
        # What other settings or cuts it was made with is not known: it resumes nothing else.
        base_key = digest_of([self._state.facts.base_key, secrets.token_hex(16)])
        weight = self._state.weights.get(tenant, 1.0)
        return await thread.call(
            lambda: thread.core.conversations.load(path, name, base_key, weight)
        )

    def _close(self, session: ServerSession) -> None:
        """Close a session on this server, if it is open."""
        if self._sessions.get((session.tenant, session.id)) is not session:
            return
        del self._sessions[session.tenant, session.id]
        if session.conversation is not None:
            conversation, session.conversation = session.conversation, None
            release(self._state, conversation)

    def _apply_record(self, caller: Caller, name: str, record: SessionRecord | None) -> None:
        """Follow the record in the shared folder; a busy session compares it when its turn ends."""
        session = self._sessions.get((caller.tenant, name))
        if session is not None and (session.busy or session.record == record):
            return
        if session is not None and (session.record is None or session.record.version):
            self._close(session)
        elif session is not None:
            return  # it is being written for the first time
        if record is not None:
            self._sessions[caller.tenant, name] = self._from_record(caller, record)

    def _shown(self, caller: Caller, record: SessionRecord) -> ServerSession:
        """Return a session for a list, open or from its record; it is not opened."""
        session = self._sessions.get((caller.tenant, record.id))
        current = session is not None and (session.busy or session.record == record)
        return session if session is not None and current else self._from_record(caller, record)

    def _from_record(self, caller: Caller, record: SessionRecord) -> ServerSession:
        facts = self._state.facts
        budget = facts.budget if facts.shared else Budget.of_list(*record.budget)
        given = record.id, caller.tenant, budget, record.metadata
        made = ServerSession(*given, created=record.created, owner=caller.name)
        made.record, made.turns = record, record.turns
        made.unbound = facts.unbound is not None
        return made

    async def _require_new(self, name: str, caller: Caller) -> None:
        """Raise ApiError: the name cannot be one, or is a session's."""
        if not re.fullmatch(NAME, name):
            raise invalid_value(None, f"X-Session-Id is {NAMED}")
        try:
            await self.find(name, caller)
        except ApiError:
            return
        raise _exists(name)

    def _require_place(self, tenant: str, owner: str, besides: ServerSession | None = None) -> None:
        """Make room for one more open session; nobody takes all places.

        Each key has an equal share. Without keys an address has three quarters of what other
        addresses leave, and a browser half of what others do: secrets are free to make.

        Raises:
            ApiError: 503, the caller has its share open, or the server its limit.
        """
        settings = self._state.settings
        most, keys = settings.max_sessions, len(set(settings.api_keys))
        opened = self._opened(besides)
        if keys > 1:
            share = max(most // keys, min(most, 1))
            self._close_idle(share, f"{share} sessions of your key are", opened, tenant=tenant)
        browser = tenant and ("browser", {"tenant": tenant}, 0.5)
        for bound in (("address", {"owner": owner}, 0.75), browser):
            if bound and not keys:
                whose, of, part = bound
                others = len(opened) - len(_of(opened, of))
                share = max(int(part * (most - others)), min(most, 1))
                words = f"{share} of the {most} sessions are your {whose}'s and"
                self._close_idle(share, words, opened, **of)
        self._close_idle(most, f"{most} sessions are", opened)

    def _opened(self, besides: ServerSession | None) -> list[ServerSession | _Opening]:
        """List the sessions that are open, or come from their files, but for one.

        Those that lie in the shared folder alone do not count.
        """
        found = {id(one): one for one in self._opening}
        for one in self._sessions.values():
            if one.conversation is not None or one.turns == 0:
                found[id(one)] = one
        return [one for one in found.values() if one is not besides]

    def _close_idle(
        self, most: int, open_are: str, opened: list[ServerSession | _Opening], **of: str
    ) -> None:
        """Close idle sessions until one more may be open, of all or of some.

        Only those that are in the shared folder can be closed, the least recently used first.

        Args:
            most: sessions that may be open; open_are: the limit in words, for the error.
            opened: those that are, without those that are closed here; of: whose count, by field.

        Raises:
            ApiError: too few can be closed.
        """
        count = _of(opened, of)
        coming = {id(one) for one in self._opening}
        movable = [
            one
            for one in count
            if isinstance(one, ServerSession)
            and one.on_disk
            and not (one.busy or id(one) in coming)
        ]
        movable.sort(key=lambda one: one.used)
        short = len(count) + 1 - most
        if short > len(movable):
            raise ApiError(
                503, f"{open_are} open, as many as this server keeps", "too_many_sessions"
            )
        for one in movable[: max(short, 0)]:
            one.closed_for_room = True
            self._close(one)
            opened.remove(one)

    @contextmanager
    def _being_opened(self, one: ServerSession | _Opening) -> Iterator[None]:
        """Count a session as open while it is being read from its file."""
        self._opening.append(one)
        try:
            yield
        finally:
            self._opening = [other for other in self._opening if other is not one]


@dataclasses.dataclass(eq=False)
class _Opening:
    """A saved session that is being read for a tenant."""

    tenant: str
    owner: str


def _of(
    opened: list[ServerSession | _Opening], fields: dict[str, str]
) -> list[ServerSession | _Opening]:
    """Return the sessions with these fields."""
    return [one for one in opened if all(getattr(one, k) == v for k, v in fields.items())]


def _media_of(session: ServerSession) -> set[str]:
    """Return the digests of a session's pictures and videos, those of its present turn too."""
    found = set() if session.record is None else set(session.record.media)
    if session.conversation is not None:
        found.update(session.conversation.info.digests)
    if session.background is not None:
        found.update(session.background.digests)
    return found


def _gone(name: str) -> ApiError:
    return ApiError(404, f"there is no session {name[:60]!r}; create one", "session_not_found")


def _exists(name: str) -> ApiError:
    return ApiError(409, f"there is a session {name!r} already", "session_exists")


class NewSession(Body):
    """What a session is made with.

    Attributes:
        budget: entries per row (256), or text such as ``"64MiB"``; the server's by default.
        file: name of a saved session to go on from.
    """

    budget: Number | str | None = None
    file: str | None = None
    metadata: Metadata = Field(default_factory=dict)


class SessionMetadata(Body):
    """What a session gets in place of its metadata."""

    metadata: Metadata


class ForkedSession(Body):
    """What a fork has of its own; ``metadata``: by default the session's."""

    metadata: Metadata | None = None


class SavedName(Body):
    """Where a session is saved, by a name in the server's own folder."""

    name: str
    overwrite: bool = False


# A picture is shown and nothing else, whatever its bytes say.
_MEDIUM = {
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # it goes with its session, and needs the key each time
}


def sessions_router(state: ServerState, sessions: SessionTable) -> APIRouter:
    """Return the routes; a :class:`~mmkv.server.guard.CheckKey` has to stand before them."""
    router = APIRouter(prefix="/sessions", tags=["sessions"], route_class=BodyRoute)

    @router.post("", summary="Open a session, empty or from a saved one")
    async def create(asked: NewSession, who: CurrentCaller, request: Request) -> dict[str, Any]:
        """Open a session; ``X-Session-Id`` names it."""
        name = request.headers.get("x-session-id")
        return (await sessions.create(asked, who, name)).shown()

    @router.get("", summary="The caller's sessions")
    async def listed(who: CurrentCaller) -> dict[str, Any]:
        return {"object": "list", "data": [one.shown() for one in await sessions.of(who)]}

    @router.get("/{name}", summary="One session")
    async def one(name: str, who: CurrentCaller) -> dict[str, Any]:
        return (await sessions.find(name, who)).shown()

    @router.post("/{name}", summary="Other metadata, such as a title")
    async def describe(name: str, asked: SessionMetadata, who: CurrentCaller) -> dict[str, Any]:
        session = await sessions.find(name, who, idle=True)
        await sessions.describe(session, asked.metadata)
        return session.shown()

    @router.get("/{name}/memory", summary="What a session remembers, and what that takes")
    async def memory(name: str, who: CurrentCaller) -> dict[str, Any]:
        return await sessions.memory(await sessions.find(name, who))

    @router.get("/{name}/messages", summary="What was said; pictures and videos as marks")
    async def messages(name: str, who: CurrentCaller) -> dict[str, Any]:
        conversation = await sessions.load_memory(await sessions.find(name, who))
        said = () if conversation is None else conversation.info.messages
        return {"object": "list", "data": [one.shown_with_media() for one in said]}

    @router.get("/{name}/media/{digest}", summary="A picture or video of a session")
    async def medium(name: str, digest: str, who: CurrentCaller) -> Response:
        content = await sessions.medium(await sessions.find(name, who), digest)
        return Response(content, headers=_MEDIUM, media_type=media_type_of(content))

    @router.post("/{name}/chat/completions", summary="A turn: messages that are new, and a reply")
    async def turn(name: str, body: ChatRequest, who: CurrentCaller, request: Request) -> Response:
        headers = state.headers_for(body)
        take_resume(request, body)
        session = await sessions.find(name, who, idle=True)
        await sessions.load_memory(session)
        made = SessionTurn(state, sessions.commit_turn, sessions.require_idle, session, body, who)
        work: Any = made.stream if body.stream else made.whole
        if made.background:
            work = (await BackgroundTurn.start(made, sessions.media, sessions.forget_media)).follow
        return ReplyResponse(work, bool(body.stream), state.settings.keep_alive, headers)

    @router.post("/{name}/observe", summary="Read pictures or a text without a reply")
    async def observe(name: str, body: ObserveRequest, who: CurrentCaller) -> Response:
        session = await sessions.find(name, who, idle=True)
        await sessions.load_memory(session)
        given = state, sessions.commit_turn, sessions.require_idle, session, body, who
        made = SessionObservation(*given)
        return ReplyResponse(made.whole, False, state.settings.keep_alive)

    @router.get("/{name}/turn", summary="Follow the turn under way from its beginning")
    async def rejoin(name: str, who: CurrentCaller) -> Response:
        turn = (await sessions.find(name, who)).background
        if turn is None or turn.told:
            raise ApiError(404, "no turn in the background is under way", "no_turn")
        return ReplyResponse(turn.follow_at_once, True, state.settings.keep_alive)

    @router.delete("/{name}/turn", summary="End the turn under way; what came of its reply stays")
    async def end(name: str, who: CurrentCaller) -> dict[str, Any]:
        turn = (await sessions.find(name, who)).background
        if turn is None or turn.over:
            raise ApiError(404, "no turn in the background is under way", "no_turn")
        return {"id": name, "object": "session.turn", "kept": await turn.stop()}

    @router.post("/{name}/fork", summary="Another session that goes on from the same memory")
    async def fork(
        name: str, who: CurrentCaller, asked: ForkedSession | None = None
    ) -> dict[str, Any]:
        session = await sessions.find(name, who, idle=True)
        metadata = None if asked is None else asked.metadata
        return (await sessions.fork(session, metadata)).shown()

    @router.post("/{name}/save", summary="Write a session to a file of the server")
    async def save(name: str, asked: SavedName, who: CurrentCaller) -> dict[str, Any]:
        session = await sessions.find(name, who, idle=True)
        await sessions.save(session, asked, who)
        return session.shown() | {"file": asked.name}

    @router.delete("/{name}", summary="Close a session; its saved files stay")
    async def delete(name: str, who: CurrentCaller) -> dict[str, Any]:
        await sessions.delete_named(name, who)
        return {"id": name, "object": "session", "deleted": True}

    return router


def saved_router(state: ServerState) -> APIRouter:
    """Return the routes; a :class:`~mmkv.server.guard.CheckKey` has to stand before them."""
    saved = SavedSessions(state.settings.session_folder)
    router = APIRouter(prefix="/saved_sessions", tags=["sessions"])

    @router.get("", summary="The caller's saved sessions")
    async def listed(who: CurrentCaller) -> dict[str, Any]:
        files = await asyncio.to_thread(saved.of, who.tenant)
        return {"object": "list", "data": [one.shown() for one in files]}

    @router.delete("/{name}", summary="Remove a saved session; sessions opened from it stay")
    async def delete(name: str, who: CurrentCaller) -> dict[str, Any]:
        await asyncio.to_thread(saved.delete, name, who.tenant)
        return {"id": name, "object": "saved_session", "deleted": True}

    return router
