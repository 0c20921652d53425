"""/v1/saved_sessions: the files that sessions were saved to."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mmkv.server.room import Room
from mmkv.server.session_files import SessionFiles
from mmkv.server.turns import Asking


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
