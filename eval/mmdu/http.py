"""Send one JSON request to a server that may fail, with the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

LARGEST_REPLY = 8 * 2**20


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: of HTTP; 0 when none came. body: parsed JSON, or the text if it is none.
        problem: the reason for a missing status. unreachable: there was no connection at all.
        retry_after: seconds that the server asked to wait, or None.
    """

    status: int
    body: Any = None
    problem: str = ""
    unreachable: bool = False
    retry_after: float | None = None

    def message(self) -> str:
        """Return the server's own words on what is wrong, one line."""
        body = self.body
        if isinstance(body, dict):
            inner = body.get("error", body)
            body = inner.get("message", inner) if isinstance(inner, dict) else inner
        text = " ".join(str(body).split())[:300] if body else "no further word"
        return f"HTTP {self.status}: {text}" if self.status else self.problem


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the key to another address and turn POST into GET."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none: the 3xx reply then counts as an error."""
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def post(
    url: str,
    content: Any,
    headers: dict[str, str],
    timeout: float,
    now: Callable[[], float] = time.monotonic,
) -> Answer:
    """POST ``content`` as JSON; never raises for what the server or network does.

    ``timeout``: seconds for the whole exchange, also when the reply trickles in byte by byte.
    ``now``: the clock that it is measured on.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(content).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "mmkv", **headers},
    )
    deadline = now() + timeout
    try:
        with _OPENER.open(request, timeout=timeout) as reply:
            return Answer(reply.status, _parse(_read(reply, deadline, now)))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(
                error.code,
                _parse(_read_quietly(error, deadline, now)),
                retry_after=retry_after(error.headers.get("Retry-After")),
            )
    except urllib.error.URLError as error:
        # urllib wraps the errors of connecting and sending.
        if isinstance(error.reason, TimeoutError):
            return Answer(0, problem=f"no answer within {timeout:g} s")
        if isinstance(error.reason, ConnectionResetError | BrokenPipeError):
            return Answer(0, problem=f"the connection broke ({error.reason})")
        return Answer(0, problem=f"cannot connect ({error.reason})", unreachable=True)
    except TimeoutError:
        return Answer(0, problem=f"no answer within {timeout:g} s")
    except (OSError, http.client.HTTPException) as error:
        what = str(error) or type(error).__name__
        return Answer(0, problem=f"the connection broke ({what})")


def _read(reply: Any, deadline: float, now: Callable[[], float]) -> bytes:
    content = bytearray()
    while chunk := reply.read1(65536):
        content += chunk
        if now() > deadline:
            raise TimeoutError
        if len(content) > LARGEST_REPLY:
            raise http.client.HTTPException("the reply is far too long")
    return bytes(content)


def _read_quietly(reply: Any, deadline: float, now: Callable[[], float]) -> bytes:
    try:
        return _read(reply, deadline, now)
    except (OSError, http.client.HTTPException):
        return b""


def _parse(content: bytes) -> Any:
    text = content.decode("utf-8", errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header (a number or an HTTP date) to seconds, or None."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    # NaN compares false with everything.
    return max(0.0, seconds) if seconds == seconds else None
