"""A session over a WebSocket: what it observes, and replies, as JSON messages both ways.

A client that sends a frame a second need not open a request for each. What the HTTP routes check
is checked here for every message: the session, its owner, limits, media, the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from mmkv.engine.errors import STOPS, shown
from mmkv.server.errors import ApiError, api_error, invalid, invalid_value
from mmkv.server.guard import values_of
from mmkv.server.metrics import size_of
from mmkv.server.reply import error_response, rendered
from mmkv.server.schema import ChatRequest, ObserveRequest
from mmkv.server.turns import SessionObservation, SessionTurn

if TYPE_CHECKING:
    from mmkv.server.connections import SocketConnection
    from mmkv.server.sessions import SessionTable
    from mmkv.server.state import Caller, ServerState


log = logging.getLogger("mmkv.server")
PATH = "/v1/sessions/{name}/socket"


def socket_route(state: ServerState, sessions: SessionTable) -> WebSocketRoute:
    """Return the route; a :class:`~mmkv.server.guard.CheckKey` has to stand before it."""

    async def connect(socket: WebSocket) -> None:
        name, caller = socket.path_params["name"], socket.state.caller
        try:
            await sessions.find(name, caller)
        except ApiError as error:
            await error_response(error)(socket.scope, socket.receive, socket.send)
            return
        await socket.accept()
        await SessionSocket(state, sessions, name, caller, socket).run()

    return WebSocketRoute(PATH, connect)


class SessionSocket:
    """One client's WebSocket to one session.

    A message is an object whose ``type`` is ``observe`` or ``ask``, with the fields of the route of
    that name; one is answered after the other. An error is one object with ``error``, and the
    socket stays open. When the client leaves, what is under way is cancelled.
    """

    def __init__(
        self,
        state: ServerState,
        sessions: SessionTable,
        name: str,
        caller: Caller,
        socket: WebSocket,
    ) -> None:
        self._state, self._sessions, self._socket = state, sessions, socket
        self._name, self._caller = name, caller
        self._connection: SocketConnection | None = socket.scope.get("mmkv.connection")

    async def run(self) -> None:
        """Answer messages until the client leaves."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read(messages))
        tasks: list[asyncio.Future[Any]] = [reading]
        try:
            while True:
                coming = asyncio.ensure_future(messages.get())
                tasks = [reading, coming]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                message = coming.result()
                size = size_of(message.get("text") or message.get("bytes") or b"")
                working = asyncio.ensure_future(self._answered(message))
                tasks = [reading, working]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    return
                working.result()
                if self._connection is not None:
                    self._connection.release(size)
        except WebSocketDisconnect:
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: asyncio.Queue[Any]) -> None:
        """Read messages until the client leaves; the connection bounds how many may wait.

        It would not notice that the client leaves while one is not read.
        """
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            messages.put_nowait(message)

    async def _answered(self, message: dict[str, Any]) -> None:
        try:
            await self._answer(message)
        except (asyncio.CancelledError, WebSocketDisconnect, *STOPS):
            raise
        except BaseException as error:
            made = api_error(error)
            if made.status == 500:  # it says that the log has the details
                log.error("a message of a WebSocket failed", exc_info=error)
            await self._send(made.body())

    async def _answer(self, message: dict[str, Any]) -> None:
        text = message.pop("text", None)
        if text is None:
            raise ApiError(400, "the message is binary; send JSON as text", "invalid_request")
        with self._counted(values_of(text)):
            await self._act(*_parsed(text))

    @contextlib.contextmanager
    def _counted(self, values: int) -> Iterator[None]:
        """Count the values of a message while it is under way. Raises ApiError (503)."""
        room = self._state.bodies
        room.values += values
        try:
            if room.full(0, values):
                raise room.error()
            yield
        finally:
            room.values -= values

    async def _act(self, kind: str, fields: dict[str, Any]) -> None:
        if error := self._state.refusal():
            raise error
        session = await self._sessions.find(self._name, self._caller, idle=True)
        given = self._state, self._sessions.commit_turn, self._sessions.require_idle, session
        if kind == "observe":
            asked = _checked(ObserveRequest, fields)
            await self._sessions.load_memory(session)
            await self._send(await SessionObservation(*given, asked, self._caller).whole())
            return
        usual = {"model": self._state.settings.name, "stream": True}
        body = _checked(ChatRequest, usual | fields)
        if not body.stream:
            what = "a reply over a WebSocket comes in pieces; leave out stream"
            raise invalid_value("stream", what)
        ignored = self._state.headers_for(body).get("X-Mmkv-Ignored")
        await self._sessions.load_memory(session)
        turn = SessionTurn(*given, body, self._caller)
        if turn.background:
            what = "a reply over a WebSocket ends with it; leave out mmkv.background"
            raise invalid_value("mmkv.background", what)
        async with contextlib.aclosing(turn.stream()) as events:
            async for event in events:
                if isinstance(event, dict):
                    await self._send(event)
        conversation, told = session.conversation, session.shown() | {"busy": False}
        notes = [] if conversation is None else conversation.info.notes
        ended = {"object": "session.turn", "ignored": ignored, "notes": notes, "session": told}
        await self._send(ended)

    async def _send(self, event: dict[str, Any]) -> None:
        await self._socket.send_text(rendered(event, ascii=True).decode())


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return a message's type and its other fields. Raises ApiError."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"the message is no valid JSON ({shown(error)}); send an object"
        raise ApiError(400, what, "invalid_request") from None
    kind = fields.pop("type", None) if isinstance(fields, dict) else None
    if kind not in ("observe", "ask"):
        what = "a message is a JSON object whose type is observe or ask"
        raise ApiError(400, what, "invalid_request", "type")
    return kind, fields


def _checked(model: Any, fields: dict[str, Any]) -> Any:
    """Return a message's fields as ``model`` has them. Raises ApiError."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)) from None
