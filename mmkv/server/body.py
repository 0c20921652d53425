"""Refuse requests that are too long, before they are read."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmkv.server.answer import error_response
from mmkv.server.errors import ApiError


class LimitBody:
    """Answers 413 to a body of more than ``most`` bytes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count what comes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await self._refuse(scope, receive, send)
            return
        come, answered = 0, False

        async def counted() -> Message:
            nonlocal come
            message = await receive()
            come += len(message.get("body", b""))
            if come > self._most:
                raise _TooLong
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLong:
            if not answered:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            413,
            f"the request is larger than {self._most / 2**20:g} MiB; send fewer or smaller "
            "pictures",
            "request_too_large",
        )
        await error_response(error)(scope, receive, send)


class _TooLong(BaseException):
    """Passes the framework's handlers of exceptions."""
