"""Checks before the body of a request is read: key, host, length, and room in the queue."""

from __future__ import annotations

import asyncio
import codecs
import hmac
import ipaddress
import re
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmkv.server.errors import MESSAGES, ApiError, invalid_value
from mmkv.server.page import FILES
from mmkv.server.reply import error_response
from mmkv.server.settings import VALUES
from mmkv.server.state import BodyRoom, Caller, digest_of_key

if TYPE_CHECKING:
    from mmkv.server.state import ServerState


# What tells nothing about anybody's requests. All else wants a key.
_OPEN = frozenset(("/health", "/docs", "/openapi.json", *FILES))


BROWSER = "X-Mmkv-Browser"
_ASKING = ("http", "websocket")  # what may ask for something, by the type of its scope


def network_of(address: str) -> str:
    """Return what of an address tells callers apart: of IPv6 the /64, which one host may have."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a socket of the file system, or a proxy's word
        return address[:64]
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    mapped = found.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(found) >> 64 << 64, 64)))


class CheckKey:
    """Notes a :class:`Caller` in the request's state, and answers 401 to a stranger.

    Without keys, a browser that sends a secret of its own in X-Mmkv-Browser has sessions of its
    own; where there are keys, it means nothing.

    Args:
        keys: the valid ones; with none, everybody may ask, and the address tells callers apart.
        open_metrics: whether /metrics needs none: its counters tell how much others have asked.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_metrics: bool = False) -> None:
        self._open = _OPEN | {"/metrics"} if open_metrics else _OPEN
        self._app, self._known = app, [digest_of_key(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose key fits."""
        if scope["type"] not in _ASKING or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        if not self._known:
            address = network_of(request.client.host if request.client else "")
            browser = request.headers.get(BROWSER, "")
            if browser and not re.fullmatch(r"[A-Za-z0-9_-]{32,128}", browser):
                what = "is 32 to 128 letters, digits, dashes and underscores, at random"
                error = invalid_value(BROWSER, f"{BROWSER} {what}")
                await error_response(error)(scope, receive, send)
                return
            # Without a secret it sees the sessions of all who have none.
            tenant = digest_of_key(f"browser {browser}").hex() if browser else ""
            request.state.caller = Caller(tenant, address)
        elif (name := self._fitting(*_keys(request))) is not None:
            request.state.caller = Caller(name, name)
        else:
            error = ApiError(
                401,
                "no valid API key; send Authorization: Bearer KEY, or x-api-key: KEY",
                "invalid_api_key",
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fitting(self, *shown: str) -> str | None:
        """Return the key's digest when one of the known ones is shown."""
        found = None
        for given in map(digest_of_key, filter(None, shown)):
            # All are compared, whichever fits, in a time that says nothing.
            if any([hmac.compare_digest(given, known) for known in self._known]):
                found = given.hex()
        return found


def _keys(request: HTTPConnection) -> tuple[str, str]:
    """Return the keys that a request shows: as OpenAI's clients do, and as Anthropic's do."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer, request.headers.get("x-api-key", "").strip()


_release: ContextVar[Callable[[], None]] = ContextVar("release")


_kept: ContextVar[list[bool]] = ContextVar("kept")


def release_body() -> None:
    """Stop counting the body of the present request: the engine has read what it names."""
    release = _release.get(None)
    if release is not None:
        release()


def keep_body() -> None:
    """Count the body of the present request past its end, until :func:`release_body`."""
    kept = _kept.get(None)
    if kept is not None:
        kept[0] = True


class BodyRoute(APIRoute):
    """A route that frees a body once it is parsed.

    FastAPI would keep its bytes and its JSON to the request's end, beside the model made of them.
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

    All bodies together have a bound, too, from the first byte until :func:`release_body` or the end
    of the request: one that passes it is answered with 503, unless it is small. What cannot be
    JSON in UTF-8 is answered with 415 or 400.
    """

    def __init__(
        self, app: ASGIApp, most: int, seconds: float, room: BodyRoom | None = None
    ) -> None:
        self._app, self._most, self._seconds = app, most, seconds
        self.room = room or BodyRoom(most)

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
            self.room.bytes -= counted_here
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
            self.room.bytes += len(piece)
            if come > self._most:
                raise _Refused(self._too_large())
            before = text.values
            try:
                text.add(piece)
            finally:
                self.room.values += text.values - before
            if self.room.full(come, text.values):
                raise _Refused(self.room.error())
            whole = not message.get("more_body", False)
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        token, kept = _release.set(release), [False]
        other = _kept.set(kept)
        try:
            await self._app(scope, counted, noted)
        except _Refused as refused:
            if not answered:
                await error_response(refused.error)(scope, receive, send)
        finally:
            _release.reset(token)
            _kept.reset(other)
            self.room.values -= text.values - 1
            if not kept[0]:
                release()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request is larger than {self._most / 2**20:g} MiB; send fewer or smaller "
            "pictures",
            "request_too_large",
        )

    def _late(self) -> ApiError:
        return ApiError(
            408,
            f"the request did not arrive within {self._seconds:g} s; send a smaller one",
            "request_timeout",
        )


class _JsonText:
    """Counts the ``values`` of a JSON text that comes in pieces. Raises _Refused.

    Each value but the first stands behind a comma or an opening bracket outside of the strings.
    Where the text is no JSON, this is right up to the place where a parser gives up.
    """

    def __init__(self) -> None:
        self.values, self._in_string, self._escape = 1, False, b""
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
        self.values += sum(map(outside.count, (b",", b"[", b"{")))
        if self.values > VALUES:
            raise _Refused(
                ApiError(
                    400,
                    f"the body holds over {VALUES:,} values; send fewer, or longer texts in place "
                    "of lists",
                    "too_many_values",
                )
            )


def values_of(text: str) -> int:
    """Count the values of a message. Raises ApiError: there are too many, or it is no Unicode."""
    read = _JsonText()
    try:
        read.add(text.encode("utf-8", "surrogatepass"))
    except _Refused as refused:
        raise refused.error from None
    return read.values


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
    """Is a BaseException so that the framework's exception handlers let it pass."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


_REPLIES = ("/completions", "/observe", "/responses", MESSAGES, f"{MESSAGES}/count_tokens")


class RefuseWhenFull:
    """Answers 503 to a request for a reply while the queue is full, or the process's memory.

    An overloaded server has to spend its time on the requests that it has taken on: the body of
    another one is not read, and the engine thread is not asked. The count may be late by a few
    requests; the scheduler then refuses those, in the same words.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if the queue may have a place."""
        asks = scope["type"] == "http" and scope["method"] == "POST"
        if asks and scope["path"].endswith(_REPLIES) and (error := self._state.refusal()):
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HARMLESS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


def allowed_hosts(
    host: str, keyed: bool = False, named: Sequence[str] = ()
) -> frozenset[str] | None:
    """Return the names that a server on ``host`` answers to; None: all.

    By default those of this machine, where nobody else can reach the server and no key is needed.

    Args:
        keyed: whether requests have to show a key.
        named: further names; no others are answered then.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host.lower() == "localhost"
    own = f"[{host}]" if ":" in host else host.lower()
    if named:
        return frozenset({*_LOCAL, own, *named})
    return frozenset({*_LOCAL, own}) if local and not keyed else None


class CheckHost:
    """Answers 403 to a request whose Host header has another name than ``hosts``, and to what a
    page from elsewhere changes or opens: browsers ask nobody before they open a WebSocket, or POST
    what a form could.

    A page can have its own name lead to 127.0.0.1 (DNS rebinding): the browser then takes the
    server's answers for the page's own, and shows them to it.
    """

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str] | None, origins: Sequence[str] = ()
    ) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, if it names this server."""
        headers = dict(scope["headers"]) if scope["type"] in _ASKING else {}
        if scope.get("method") not in _HARMLESS and not self._is_own_page(headers):
            what = "pages of this origin may not ask this; start the server with --cors-origin and"
            error = ApiError(403, f"{what} the origin", "origin_refused")
            await error_response(error)(scope, receive, send)
            return
        if scope["type"] in _ASKING and self._hosts is not None:
            given = headers.get(b"host")
            if given is not None and _name(given.decode("latin-1")) not in self._hosts:
                error = ApiError(
                    403,
                    "this server does not answer to the name that the Host header has; start it "
                    "with --allowed-host and that name",
                    "host_refused",
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_own_page(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether no page asks, one of this server, or one that --cors-origin names.

        A browser says itself whether a page is of the same origin (Sec-Fetch-Site), also behind a
        proxy that changes the Host header, but to no plain HTTP of another machine.
        """
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if "*" in self._origins or origin in self._origins:
            return True
        if (site := headers.get(b"sec-fetch-site")) is not None:
            return site in (b"same-origin", b"none")
        own = headers.get(b"host", b"").decode("latin-1").lower()
        return not origin or (bool(own) and origin.partition("://")[2] == own)


def _name(header: str) -> str:
    """Return a Host header without its port, and without the dot that may end a name."""
    name, _, port = header.strip().lower().rpartition(":")
    return (name if name and port.isdigit() else header.strip().lower()).removesuffix(".")
