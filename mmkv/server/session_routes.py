"""The routes /v1/sessions and /v1/saved_sessions."""

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
from mmkv.server.reply import ReplyResponse
from mmkv.server.schema import Body, ChatRequest, Metadata, Number
from mmkv.server.sessions import ServerSession, SessionTable
from mmkv.server.state import Caller, CurrentCaller, ServerState, TurnMemory, release
from mmkv.server.store import SavedSessions


class SessionTurn:
    """One turn of a session: a chat completion that sends only the new messages."""

    def __init__(
        self,
        state: ServerState,
        sessions: SessionTable,
        session: ServerSession,
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
        self._state, self._sessions, self._session = state, sessions, session
        self._call = ChatCall(state, request, caller, session.conversation, True, session.budget)

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        async with self._begun() as turn:
            answer = await self._call.whole()
            await self._commit_turn(turn)
            # Who reads this may send the next turn.
            return answer | {"session": self._session.shown() | {"busy": False}}

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        async with self._begun() as turn, contextlib.aclosing(self._call.stream()) as events:
            committed = False
            async for event in events:
                if self._call.done and not committed:
                    await self._commit_turn(turn)
                    committed = True
                yield event

    @contextlib.asynccontextmanager
    async def _begun(self) -> AsyncIterator[TurnMemory]:
        session = self._session
        self._sessions.require_idle(session)  # others may have come first
        if session.conversation is not self._call.work.start:
            raise ApiError(409, "the session went on meanwhile; send the turn again", "conflict")
        session.busy = True
        try:
            async with TurnMemory(self._state, self._call) as turn:
                yield turn
        finally:
            session.busy = False

    async def _commit_turn(self, turn: TurnMemory) -> None:
        """Move the session to its state after this turn, even if the client leaves now."""
        standing = asyncio.ensure_future(self._replace_memory(turn))
        try:
            await asyncio.shield(standing)
        except asyncio.CancelledError:
            while not standing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({standing})
            if not standing.cancelled():
                standing.exception()  # nobody is left to be told
            raise

    async def _replace_memory(self, turn: TurnMemory) -> None:
        session, before, conversation = (
            self._session,
            self._session.conversation,
            self._call.work.result,
        )
        assert conversation is not None
        await self._sessions.commit_turn(session, conversation, session.turns + 1)
        session.conversation = turn.claim()
        session.turns += 1
        if before is not None:
            release(self._state, before)


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


def sessions_router(state: ServerState) -> APIRouter:
    """Return the routes; a :class:`~mmkv.server.guard.CheckKey` has to stand before them."""
    sessions = SessionTable(state)
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

    @router.get("/{name}/memory", summary="What a session remembers, and what that takes")
    async def memory(name: str, who: CurrentCaller) -> dict[str, Any]:
        return await sessions.memory(await sessions.find(name, who))

    @router.get("/{name}/messages", summary="What was said; pictures and videos as marks")
    async def messages(name: str, who: CurrentCaller) -> dict[str, Any]:
        conversation = await sessions.load_memory(await sessions.find(name, who))
        said = () if conversation is None else conversation.info.messages
        return {"object": "list", "data": [one.for_template() for one in said]}

    @router.post("/{name}/chat/completions", summary="A turn: messages that are new, and a reply")
    async def turn(name: str, body: ChatRequest, who: CurrentCaller, request: Request) -> Response:
        take_resume(request, body)
        session = await sessions.find(name, who, idle=True)
        await sessions.load_memory(session)
        made = SessionTurn(state, sessions, session, body, who)
        work: Any = made.stream if body.stream else made.whole
        return ReplyResponse(work, bool(body.stream), state.settings.keep_alive)

    @router.post("/{name}/fork", summary="Another session that goes on from the same memory")
    async def fork(name: str, who: CurrentCaller) -> dict[str, Any]:
        return (await sessions.fork(await sessions.find(name, who, idle=True))).shown()

    @router.post("/{name}/save", summary="Write a session to a file of the server")
    async def save(name: str, asked: SavedName, who: CurrentCaller) -> dict[str, Any]:
        session = await sessions.find(name, who, idle=True)
        await sessions.save(session, asked, who)
        return session.shown() | {"file": asked.name}

    @router.delete("/{name}", summary="Close a session; its saved files stay")
    async def delete(name: str, who: CurrentCaller) -> dict[str, Any]:
        await sessions.delete(await sessions.find(name, who, idle=True))
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
