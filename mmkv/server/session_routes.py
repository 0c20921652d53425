"""/v1/sessions: what can be asked of sessions over HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mmkv.server.answer import Answer
from mmkv.server.body import BodyRoute
from mmkv.server.headers import take_resume
from mmkv.server.room import Room
from mmkv.server.schema import Body, ChatRequest, Metadata, Number
from mmkv.server.session_turns import SessionTurn
from mmkv.server.sessions import Sessions
from mmkv.server.turns import Asking


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
