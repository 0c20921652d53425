"""/v1/sessions: conversations whose memory the server keeps until they are deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from engine.sequence import MODALITIES
from mmkv.server.answer import Answer
from mmkv.server.chat import ChatCall
from mmkv.server.conversation import digest_of
from mmkv.server.errors import ApiError
from mmkv.server.room import Caller, Room
from mmkv.server.schema import Body, ChatRequest, Number, parse_budget
from mmkv.server.turns import Asking, Turn, hold, release

if TYPE_CHECKING:
    from engine.budget import Budget
    from mmkv.server.kept import Kept

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


class NewSession(Body):
    """What a session is made with.

    Attributes:
        budget: entries per row (256), or text such as ``"64MiB"``; the server's by default.
        file: name of a saved session to go on from.
    """

    budget: Number | str | None = None
    file: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)


class SavedName(Body):
    """Where a session is saved, by a name in the server's own folder."""

    name: str
    overwrite: bool = False


@dataclass
class Record:
    """One session.

    Attributes:
        kept: its memory after the latest turn; None before the first.
        busy: whether a turn is under way.
    """

    id: str
    tenant: str
    budget: Budget
    metadata: dict[str, str]
    kept: Kept | None = None
    busy: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    turns: int = 0

    @property
    def state(self) -> Literal["empty", "memory", "file"]:
        """Where its memory lies."""
        if self.kept is None:
            return "empty"
        return "memory" if self.kept.resident else "file"

    def shown(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return {
            "id": self.id,
            "object": "session",
            "created": self.created,
            "metadata": self.metadata,
            "budget": self.budget.describe(),
            "turns": self.turns,
            "messages": 0 if self.kept is None else len(self.kept.facets.messages),
            "busy": self.busy,
            "state": self.state,
        }


class Sessions:
    """The sessions of a server; all methods run in the event loop."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._records: dict[str, Record] = {}

    def of(self, caller: Caller) -> list[Record]:
        """Return the sessions of a caller, oldest first."""
        return [one for one in self._records.values() if one.tenant == caller.tenant]

    def find(self, name: str, caller: Caller, idle: bool = False) -> Record:
        """Return a session. Raises ApiError: 404, also for another's; 409 if it has to be idle."""
        record = self._records.get(name)
        if record is None or record.tenant != caller.tenant:
            raise ApiError(
                404, f"there is no session {name[:60]!r}; create one", "session_not_found"
            )
        if idle and record.busy:
            raise ApiError(
                409, "a turn of the session is under way; wait for it or end it", "session_busy"
            )
        return record

    async def create(self, asked: NewSession, caller: Caller) -> Record:
        """Open a session, empty or from a saved one."""
        self._require_room()
        budget = parse_budget(asked.budget, "budget") or self._room.facts.budget
        if asked.file is None:
            return self._add(caller.tenant, budget, asked.metadata)
        if asked.budget is not None:
            raise ApiError(400, "a saved session has its own budget", "invalid_value", "budget")
        path, machine = self._path(asked.file, caller), self._room.worker.machine
        assert machine is not None
        # What other settings or cuts it was made with is not known: it resumes nothing else.
        root = digest_of([self._room.facts.root, secrets.token_hex(16)])
        name, shelf = asked.file, machine.shelf
        kept = await self._room.worker.call(lambda: shelf.load(path, name, root))
        record = self._add(caller.tenant, kept.budget, asked.metadata)
        record.kept = kept
        return record

    def fork(self, record: Record) -> Record:
        """Open another session that goes on from where this one stands."""
        self._require_room()
        made = self._add(record.tenant, record.budget, dict(record.metadata))
        made.kept, made.turns = record.kept, record.turns
        if made.kept is not None:
            hold(self._room, made.kept)
        return made

    async def save(self, record: Record, asked: SavedName, caller: Caller) -> None:
        """Write a session to a file of the server's folder."""
        kept, path = record.kept, self._path(asked.name, caller)
        if kept is None:
            raise ApiError(400, "the session is empty; save it after a turn", "invalid_value")
        if path.exists() and not asked.overwrite:
            raise ApiError(
                409, f"there is a file {asked.name} already; set overwrite", "file_exists", "name"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        await self._room.worker.call(lambda: kept.save(path))

    def delete(self, record: Record) -> None:
        """Close a session; its saved files stay."""
        del self._records[record.id]
        if record.kept is not None:
            release(self._room, record.kept)

    def memory(self, record: Record) -> dict[str, Any]:
        """Return what a session remembers, and what that takes."""
        shown = {"id": record.id, "object": "session.memory", "state": record.state}
        if record.kept is None:
            return shown
        facets = record.kept.facets
        return (
            shown
            | dataclasses.asdict(facets.memory)
            | {
                "seen_by_modality": dict(zip(MODALITIES, facets.seen, strict=True)),
                "bytes": record.kept.bytes,
            }
        )

    def _add(self, tenant: str, budget: Budget, metadata: dict[str, str]) -> Record:
        name = f"sess_{secrets.token_hex(12)}"
        self._records[name] = made = Record(name, tenant, budget, metadata)
        return made

    def _require_room(self) -> None:
        most = self._room.settings.max_sessions
        if len(self._records) >= most:
            raise ApiError(
                503, f"{most} sessions are open, as many as this server keeps", "too_many_sessions"
            )

    def _path(self, name: str, caller: Caller) -> Path:
        """Return where a saved session lies; callers with different keys have different folders."""
        folder = self._room.settings.session_folder
        if folder is None:
            raise ApiError(
                400,
                "this server saves no sessions; start it with --session-folder",
                "no_session_folder",
            )
        if not re.fullmatch(_NAME, name):
            raise ApiError(
                400,
                "a file is named by letters, digits, dots, dashes and underscores",
                "invalid_value",
                "name",
            )
        return folder / (caller.tenant[:32] or "public") / f"{name}.mmkv"


class SessionTurn:
    """One turn of a session; a chat completion whose messages are the new ones alone."""

    def __init__(
        self,
        room: Room,
        sessions: Sessions,
        record: Record,
        request: ChatRequest,
        caller: Caller,
    ) -> None:
        own = request.mmkv
        if own is not None and (own.budget is not None or own.resume is not None):
            raise ApiError(
                400, "a session has its budget and goes on from itself", "invalid_value", "mmkv"
            )
        if (request.n or 1) != 1:
            raise ApiError(400, "a turn of a session has one reply", "invalid_value", "n")
        self._room, self._sessions, self._record = room, sessions, record
        self._call = ChatCall(room, request, caller, record.kept, True, record.budget)

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        async with self._begun() as turn:
            answer = await self._call.whole()
            self._stand(turn)
            return answer | {"session": self._record.shown()}

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        async with self._begun() as turn, contextlib.aclosing(self._call.stream()) as events:
            stands = False
            async for event in events:
                if self._call.done and not stands:
                    self._stand(turn)
                    stands = True
                yield event

    @contextlib.asynccontextmanager
    async def _begun(self) -> AsyncIterator[Turn]:
        record = self._record
        self._sessions.find(record.id, self._call.caller, idle=True)  # others may have come first
        record.busy = True
        try:
            async with Turn(self._room, self._call) as turn:
                yield turn
        finally:
            record.busy = False

    def _stand(self, turn: Turn) -> None:
        """Let the session go on from the memory after this turn."""
        record, before = self._record, self._record.kept
        record.kept = turn.claim()
        record.turns += 1
        if before is not None:
            release(self._room, before)


def sessions_router(room: Room) -> APIRouter:
    """Return the routes; who asks has to be known by then."""
    sessions = Sessions(room)
    router = APIRouter(prefix="/sessions", tags=["sessions"])

    @router.post("", summary="Open a session, empty or from a saved one")
    async def create(asked: NewSession, who: Asking) -> dict[str, Any]:
        return (await sessions.create(asked, who)).shown()

    @router.get("", summary="The caller's sessions")
    async def listed(who: Asking) -> dict[str, Any]:
        return {"object": "list", "data": [one.shown() for one in sessions.of(who)]}

    @router.get("/{name}", summary="One session")
    async def one(name: str, who: Asking) -> dict[str, Any]:
        return sessions.find(name, who).shown()

    @router.get("/{name}/memory", summary="What a session remembers, and what that takes")
    async def memory(name: str, who: Asking) -> dict[str, Any]:
        return sessions.memory(sessions.find(name, who))

    @router.get("/{name}/messages", summary="What was said; pictures and videos as marks")
    async def messages(name: str, who: Asking) -> dict[str, Any]:
        kept = sessions.find(name, who).kept
        said = () if kept is None else kept.facets.messages
        return {"object": "list", "data": [one.for_template() for one in said]}

    @router.post("/{name}/chat/completions", summary="A turn: messages that are new, and a reply")
    async def turn(name: str, body: ChatRequest, who: Asking) -> Response:
        made = SessionTurn(room, sessions, sessions.find(name, who, idle=True), body, who)
        work: Any = made.stream if body.stream else made.whole
        return Answer(work, bool(body.stream), room.settings.keep_alive)

    @router.post("/{name}/fork", summary="Another session that goes on from the same memory")
    async def fork(name: str, who: Asking) -> dict[str, Any]:
        return sessions.fork(sessions.find(name, who, idle=True)).shown()

    @router.post("/{name}/save", summary="Write a session to a file of the server")
    async def save(name: str, asked: SavedName, who: Asking) -> dict[str, Any]:
        record = sessions.find(name, who, idle=True)
        await sessions.save(record, asked, who)
        return record.shown() | {"file": asked.name}

    @router.delete("/{name}", summary="Close a session; its saved files stay")
    async def delete(name: str, who: Asking) -> dict[str, Any]:
        sessions.delete(sessions.find(name, who, idle=True))
        return {"id": name, "object": "session", "deleted": True}

    return router
