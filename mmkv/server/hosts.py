"""Refuse requests that a web page sends to this machine under a name of its own."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from mmkv.engine.errors import InputError
from mmkv.server.answer import error_response
from mmkv.server.errors import ApiError

_LOCAL = ("localhost", "127.0.0.1", "[::1]")


def allowed_hosts(
    host: str, keyed: bool = False, named: Sequence[str] = ()
) -> frozenset[str] | None:
    """Return the names that a server on ``host`` answers to; None: all.

    Those of this machine, where it alone can reach the server and no key is asked for.

    Args:
        keyed: whether requests have to show a key.
        named: further names, as :func:`host_names` returns them; no others are answered then.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host.lower() == "localhost"
    own = f"[{host}]" if ":" in host else host.lower()
    if named:
        return frozenset({*_LOCAL, own, *named})
    return frozenset({*_LOCAL, own}) if local and not keyed else None


def host_names(given: Iterable[str]) -> tuple[str, ...]:
    """Return names as Host headers have them. Raises InputError: one is no name."""
    return tuple(map(_checked, given))


def _checked(name: str) -> str:
    bare = name.strip().lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(bare.removeprefix("[").removesuffix("]"))
    except ValueError:
        if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", bare):
            raise InputError(
                f"{name!r} is no name of a host; give one without scheme, port or *"
            ) from None
        return bare
    return f"[{address}]" if address.version == 6 else str(address)


class CheckHost:
    """Answers 403 to a request whose Host header has another name than ``hosts``.

    A page can have its own name lead to 127.0.0.1 (DNS rebinding): the browser then takes the
    server's answers for the page's own, and shows them to it.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, if it names this server."""
        if scope["type"] == "http" and self._hosts is not None:
            given = dict(scope["headers"]).get(b"host")
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


def _name(header: str) -> str:
    """Return a Host header without its port, and without the dot that may end a name."""
    name, _, port = header.strip().lower().rpartition(":")
    return (name if name and port.isdigit() else header.strip().lower()).removesuffix(".")
