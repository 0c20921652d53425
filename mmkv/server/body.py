"""Refuse requests that are too long, or too slow, before they are read."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmkv.server.answer import error_response
from mmkv.server.errors import ApiError

TOGETHER = 8  # times the most bytes of one body, for all that are arriving


class LimitBody:
    """Answers 413 to a body of more than ``most`` bytes, 408 to one that takes over ``seconds``.

    Bodies that are arriving have a bound together, too: one that passes it is answered with 503.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds
        self._arriving = 0  # bytes of bodies that are not whole yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count what comes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await error_response(self._too_large())(scope, receive, send)
            return
        come, whole, answered = 0, False, False
        until = asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal come, whole
            if whole:  # what comes now is the client's end
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise _Refused(self._late()) from None
            new = len(message.get("body", b""))
            come += new
            self._arriving += new
            if come > self._most:
                raise _Refused(self._too_large())
            whole = not message.get("more_body", False)
            if whole:
                self._arriving -= come
            elif self._arriving > TOGETHER * self._most:
                raise _Refused(self._too_many())
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _Refused as refused:
            if not answered:
                await error_response(refused.error)(scope, receive, send)
        finally:
            if not whole:
                self._arriving -= come

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request is larger than {self._most / 2**20:g} MiB; send fewer or smaller "
            "pictures",
            "request_too_large",
        )

    def _too_many(self) -> ApiError:
        return ApiError(
            503,
            f"requests of over {TOGETHER * self._most / 2**20:g} MiB together are arriving; send "
            "this one later",
            "bodies_arriving",
        )

    def _late(self) -> ApiError:
        return ApiError(
            408,
            f"the request did not arrive within {self._seconds:g} s; send a smaller one",
            "request_timeout",
        )


class _Refused(BaseException):
    """Passes the framework's handlers of exceptions."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error
