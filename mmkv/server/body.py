"""Refuse bodies that are too long, too slow, too many or no JSON, before they are read."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmkv.server.answer import error_response
from mmkv.server.errors import ApiError

TOGETHER = 8  # times the most bytes of one body, for all whose requests are under way
# Values of one body. An empty list takes 64 bytes where its text has 3, and the error of a field
# that is refused a thousand.
VALUES = 2**15
_SMALL = 512  # part of the most bytes: a body that is taken however many there are


def smallest(most: int) -> int:
    """Return the bytes of a body that is taken however many there are."""
    return most // _SMALL


_release: ContextVar[Callable[[], None]] = ContextVar("release")


def release_body() -> None:
    """Count the body of the request that runs here no more: what it named has been read."""
    release = _release.get(None)
    if release is not None:
        release()


class BodyRoute(APIRoute):
    """A route whose requests keep no copy of a body that has been read.

    A request has its bytes and its JSON to the end otherwise, beside the values made of them.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            response = await handler(request)
            for name in ("_body", "_json"):
                request.__dict__.pop(name, None)
            return response

        return answer


class LimitBody:
    """Answers 413 to a body of more than ``most`` bytes, 408 to one that takes over ``seconds``.

    Bodies have a bound together, too, from their first byte until :func:`release_body` or the end
    of their request: one that passes it is answered with 503, unless it is small. What cannot be
    JSON in UTF-8 is answered with 415 or 400.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds
        self._held = 0  # bytes of bodies whose requests are under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count what comes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await error_response(self._too_large())(scope, receive, send)
            return
        come, counted_here, whole, answered = 0, 0, False, False
        until = asyncio.get_running_loop().time() + self._seconds
        text = _JsonText()

        def release() -> None:
            nonlocal counted_here
            self._held -= counted_here
            counted_here = 0

        async def counted() -> Message:
            nonlocal come, counted_here, whole
            if whole:  # what comes now is the client's end
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise _Refused(self._late()) from None
            piece = message.get("body", b"")
            if piece and not come:
                _require_json(headers)
            come += len(piece)
            counted_here += len(piece)
            self._held += len(piece)
            if come > self._most:
                raise _Refused(self._too_large())
            if self._held > TOGETHER * self._most and come > smallest(self._most):
                raise _Refused(self._too_many())
            text.add(piece)
            whole = not message.get("more_body", False)
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        token = _release.set(release)
        try:
            await self._app(scope, counted, noted)
        except _Refused as refused:
            if not answered:
                await error_response(refused.error)(scope, receive, send)
        finally:
            _release.reset(token)
            release()

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
            f"requests of over {TOGETHER * self._most / 2**20:g} MiB together are under way; send "
            "this one later",
            "bodies_arriving",
        )

    def _late(self) -> ApiError:
        return ApiError(
            408,
            f"the request did not arrive within {self._seconds:g} s; send a smaller one",
            "request_timeout",
        )


class _JsonText:
    """Counts the values of a JSON text that comes in pieces. Raises _Refused.

    Each value but the first stands behind a comma or an opening bracket outside of the strings.
    Where the text is no JSON, this is right up to the place where a parser gives up.
    """

    def __init__(self) -> None:
        self._values, self._in_string, self._escape = 1, False, b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")  # as json does

    def add(self, piece: bytes) -> None:
        """Count those of one more piece."""
        if b"\0" in piece:
            raise _Refused(_not_utf8("UTF-16 and UTF-32 are not read"))
        try:
            self._decoder.decode(piece)
        except UnicodeDecodeError as error:
            found = error.object[error.start]
            raise _Refused(_not_utf8(f"it holds the byte {found:#04x}")) from None
        piece = self._escape + piece
        self._escape = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        piece = piece[: len(piece) - len(self._escape)]
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self._values += sum(map(outside.count, (b",", b"[", b"{")))
        if self._values > VALUES:
            raise _Refused(
                ApiError(
                    400,
                    f"the body holds over {VALUES:,} values; send fewer, or longer texts in place "
                    "of lists",
                    "too_many_values",
                )
            )


def _require_json(headers: dict[bytes, bytes]) -> None:
    """Raise _Refused for a body that says of itself that it is no JSON, or says nothing."""
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.strip().lower() not in ("", "identity"):
        what = f"the body is compressed ({coding[:20]!r}); send it without Content-Encoding"
        raise _Refused(ApiError(415, what, "unsupported_media_type"))
    kind = headers.get(b"content-type", b"").decode("latin-1")
    main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
    if main == "application" and (sub == "json" or sub.endswith("+json")):
        return
    said = f"is {kind[:40]!r}" if kind else "is missing"
    what = f"the Content-Type of the body {said}; send JSON, with Content-Type: application/json"
    raise _Refused(ApiError(415, what, "unsupported_media_type"))


def _not_utf8(why: str) -> ApiError:
    return ApiError(400, f"the body is not in UTF-8 ({why}); encode it so", "invalid_request")


class _Refused(BaseException):
    """Passes the framework's handlers of exceptions."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error
