"""Tell who asks by the key of a request, before its body is read."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mmkv.server.answer import error_response
from mmkv.server.errors import ApiError
from mmkv.server.page import FILES
from mmkv.server.room import Caller, digest_of_key

# What tells nothing about anybody's requests. All else wants a key.
_OPEN = frozenset(("/health", "/docs", "/openapi.json", *FILES))


class CheckKey:
    """Notes a :class:`Caller` in the request's state, and answers 401 to a stranger.

    Args:
        keys: those that are known; with none, everybody may ask and is told by the address.
        open_metrics: whether /metrics needs none: its counters tell how much others have asked.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_metrics: bool = False) -> None:
        self._open = _OPEN | {"/metrics"} if open_metrics else _OPEN
        self._app, self._known = app, [digest_of_key(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose key fits."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if not self._known:
            address = request.client.host if request.client else ""
            request.state.caller = Caller("", address)
        elif (name := self._fitting(request.headers.get("authorization", ""))) is not None:
            request.state.caller = Caller(name, name)
        else:
            error = ApiError(
                401, "no valid API key; send Authorization: Bearer KEY", "invalid_api_key"
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fitting(self, shown: str) -> str | None:
        """Return the key's digest when one of the known ones is shown."""
        scheme, _, key = shown.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return None
        given = digest_of_key(key.strip())
        # All are compared, whichever fits, in a time that says nothing.
        fits = [hmac.compare_digest(given, known) for known in self._known]
        return given.hex() if any(fits) else None
