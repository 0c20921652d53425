"""One turn of a session: from its memory to the one after the reply, or back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from mmkv.server.chat import ChatCall
from mmkv.server.errors import ApiError
from mmkv.server.room import Caller, Room
from mmkv.server.schema import ChatRequest
from mmkv.server.session_record import Record
from mmkv.server.sessions import Sessions
from mmkv.server.turns import Turn, release


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
