"""Refuse what the queue has no place for, before its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from mmkv.scheduler.loop import queue_is_full
from mmkv.server.answer import error_response

if TYPE_CHECKING:
    from mmkv.server.room import Room

_REPLIES = ("/chat/completions", "/responses")


class RefuseWhenFull:
    """Answers 503 to a request for a reply while as many wait as may.

    A server with more requests than it can answer has to spend its time on those that it took on:
    the body of another one is not read, and the engine's thread is not asked. What comes while that
    has not said yet how many wait passes here, and the scheduler refuses it in the same words.
    """

    def __init__(self, app: ASGIApp, room: Room) -> None:
        self._app, self._room = app, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on for which there may be a place."""
        if scope["type"] == "http" and scope["method"] == "POST":
            room, limit = self._room, self._room.settings.max_queue
            if scope["path"].endswith(_REPLIES) and not room.worker.has_place():
                room.metrics.rejected.labels("queue").inc()
                await error_response(queue_is_full(limit, limit))(scope, receive, send)
                return
        await self._app(scope, receive, send)
