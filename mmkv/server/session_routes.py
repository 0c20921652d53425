"""/v1/sessions and /v1/saved_sessions: what can be asked of sessions over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mmkv.server.chat import ChatCall, take_resume
from mmkv.server.errors import ApiError
from mmkv.server.guard import BodyRoute
from mmkv.server.reply import Answer
from mmkv.server.schema import Body, ChatRequest, Metadata, Number
from mmkv.server.sessions import Record, SessionFiles, Sessions
from mmkv.server.state import Asking, Caller, Room, Turn, release


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
                400,
                "a session has its budget and goes on from itself; leave out mmkv.budget, "
                "mmkv.resume and X-Mmkv-Resume",
                "invalid_value",
                "mmkv",
            )
        if (request.n or 1) != 1:
            raise ApiError(400, "a turn of a session has one reply", "invalid_value", "n")
        self._room, self._sessions, self._record = room, sessions, record
        self._call = ChatCall(room, request, caller, record.kept, True, record.budget)

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        async with self._begun() as turn:
            answer = await self._call.whole()
            await self._stand(turn)
            # Who reads this may send the next turn.
            return answer | {"session": self._record.shown() | {"busy": False}}

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        async with self._begun() as turn, contextlib.aclosing(self._call.stream()) as events:
            stands = False
            async for event in events:
                if self._call.done and not stands:
                    await self._stand(turn)
                    stands = True
                yield event

    @contextlib.asynccontextmanager
    async def _begun(self) -> AsyncIterator[Turn]:
        record = self._record
        self._sessions.require_idle(record)  # others may have come first
        if record.kept is not self._call.work.start:
            raise ApiError(409, "the session went on meanwhile; send the turn again", "conflict")
        record.busy = True
        try:
            async with Turn(self._room, self._call) as turn:
                yield turn
        finally:
            record.busy = False

    async def _stand(self, turn: Turn) -> None:
        """Let the session go on from the memory after this turn, even if the client goes now."""
        standing = asyncio.ensure_future(self._go_on(turn))
        try:
            await asyncio.shield(standing)
        except asyncio.CancelledError:
            while not standing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({standing})
            if not standing.cancelled():
                standing.exception()  # nobody is left to be told
            raise

    async def _go_on(self, turn: Turn) -> None:
        record, before, kept = self._record, self._record.kept, self._call.work.kept
        assert kept is not None
        await self._sessions.stands(record, kept, record.turns + 1)
        record.kept = turn.claim()
        record.turns += 1
        if before is not None:
            release(self._room, before)


class NewSession(Body):
    """What a session is made with.

    Attributes:
        budget: entries per row (256), or text such as ``"64MiB"``; the server's by default.
        file: name of a saved session to go on from.
    """

    budget: Number | str | None = None
    file: str | None = None
    metadata: Metadata = Field(default_factory=dict)


class SavedName(Body):
    """Where a session is saved, by a name in the server's own folder."""

    name: str
    overwrite: bool = False


def sessions_router(room: Room) -> APIRouter:
    """Return the routes; who asks has to be known by then."""
    sessions = Sessions(room)
    router = APIRouter(prefix="/sessions", tags=["sessions"], route_class=BodyRoute)

    @router.post("", summary="Open a session, empty or from a saved one")
    async def create(asked: NewSession, who: Asking, request: Request) -> dict[str, Any]:
        """Open a session; ``X-Session-Id`` names it."""
        name = request.headers.get("x-session-id")
        return (await sessions.create(asked, who, name)).shown()

    @router.get("", summary="The caller's sessions")
    async def listed(who: Asking) -> dict[str, Any]:
        return {"object": "list", "data": [one.shown() for one in await sessions.of(who)]}

    @router.get("/{name}", summary="One session")
    async def one(name: str, who: Asking) -> dict[str, Any]:
        return (await sessions.find(name, who)).shown()

    @router.get("/{name}/memory", summary="What a session remembers, and what that takes")
    async def memory(name: str, who: Asking) -> dict[str, Any]:
        return await sessions.memory(await sessions.find(name, who))

    @router.get("/{name}/messages", summary="What was said; pictures and videos as marks")
    async def messages(name: str, who: Asking) -> dict[str, Any]:
        kept = await sessions.memory_of(await sessions.find(name, who))
        said = () if kept is None else kept.facets.messages
        return {"object": "list", "data": [one.for_template() for one in said]}

    @router.post("/{name}/chat/completions", summary="A turn: messages that are new, and a reply")
    async def turn(name: str, body: ChatRequest, who: Asking, request: Request) -> Response:
        take_resume(request, body)
        record = await sessions.find(name, who, idle=True)
        await sessions.memory_of(record)
        made = SessionTurn(room, sessions, record, body, who)
        work: Any = made.stream if body.stream else made.whole
        return Answer(work, bool(body.stream), room.settings.keep_alive)

    @router.post("/{name}/fork", summary="Another session that goes on from the same memory")
    async def fork(name: str, who: Asking) -> dict[str, Any]:
        return (await sessions.fork(await sessions.find(name, who, idle=True))).shown()

    @router.post("/{name}/save", summary="Write a session to a file of the server")
    async def save(name: str, asked: SavedName, who: Asking) -> dict[str, Any]:
        record = await sessions.find(name, who, idle=True)
        await sessions.save(record, asked, who)
        return record.shown() | {"file": asked.name}

    @router.delete("/{name}", summary="Close a session; its saved files stay")
    async def delete(name: str, who: Asking) -> dict[str, Any]:
        await sessions.delete(await sessions.find(name, who, idle=True))
        return {"id": name, "object": "session", "deleted": True}

    return router


def saved_router(room: Room) -> APIRouter:
    """Return the routes; who asks has to be known by then."""
    files = SessionFiles(room)
    router = APIRouter(prefix="/saved_sessions", tags=["sessions"])

    @router.get("", summary="The caller's saved sessions")
    async def listed(who: Asking) -> dict[str, Any]:
        return {"object": "list", "data": [one.shown() for one in await files.of(who)]}

    @router.delete("/{name}", summary="Remove a saved session; sessions opened from it stay")
    async def delete(name: str, who: Asking) -> dict[str, Any]:
        await files.delete(name, who)
        return {"id": name, "object": "saved_session", "deleted": True}

    return router
