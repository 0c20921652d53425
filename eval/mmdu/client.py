"""Ask a judge behind an OpenAI-compatible endpoint, with retries, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from mmkv.engine.errors import InputError, MmkvError

LARGEST_REPLY = 8 * 2**20


@dataclass(frozen=True)
class JudgeAnswer:
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
) -> JudgeAnswer:
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
            return JudgeAnswer(reply.status, _parse(_read(reply, deadline, now)))
    except urllib.error.HTTPError as error:
        with error:
            return JudgeAnswer(
                error.code,
                _parse(_read_quietly(error, deadline, now)),
                retry_after=retry_after(error.headers.get("Retry-After")),
            )
    except urllib.error.URLError as error:
        # urllib wraps the errors of connecting and sending.
        if isinstance(error.reason, TimeoutError):
            return JudgeAnswer(0, problem=f"no answer within {timeout:g} s")
        if isinstance(error.reason, ConnectionResetError | BrokenPipeError):
            return JudgeAnswer(0, problem=f"the connection broke ({error.reason})")
        return JudgeAnswer(0, problem=f"cannot connect ({error.reason})", unreachable=True)
    except TimeoutError:
        return JudgeAnswer(0, problem=f"no answer within {timeout:g} s")
    except (OSError, http.client.HTTPException) as error:
        what = str(error) or type(error).__name__
        return JudgeAnswer(0, problem=f"the connection broke ({what})")


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


# Waits between attempts: the first, and the longest one without a Retry-After.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
# A server that asks for a longer wait enforces a quota and not a rate.
LONGEST_RETRY_AFTER_S = 600.0
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_WRONG_SETUP = frozenset({401, 402, 403, 404, 405})


class JudgeError(MmkvError):
    """The judge cannot be used at all; other questions would fail, too."""


class NoVerdictError(Exception):
    """A question got no reply, for a reason that says nothing about the judged answer."""


@dataclass(frozen=True)
class JudgeReply:
    """A judge's reply. ``refusal``: why it wrote none (a content filter), else empty."""

    text: str
    refusal: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass
class Endpoint:
    """The judge's address and the limits of retries.

    Attributes:
        base_url: for example https://api.openai.com/v1. extra: fields put into every request
            (None takes a field out). retries: attempts after the first. timeout: seconds each.
    """

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)
    extra: dict[str, Any] = field(default_factory=dict)
    retries: int = 6
    timeout: float = 180.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{self.base_url!r} is no http(s) address; check --base-url")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise InputError("the API key holds characters that no key has; set it again")

    @property
    def url(self) -> str:
        """Return the address that requests go to."""
        base = self.base_url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"


class JudgeClient:
    """Asks one judge, from several threads at a time.

    ``notify``: called with a line when something is waited for. ``stop()`` ends all waiting.
    ``now``, ``wait``: the clock in seconds and what waits on it, for callers that own a clock.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        notify: Callable[[str], None] = lambda _: None,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.endpoint, self._notify = endpoint, notify
        self._stopped = threading.Event()
        self._now, self._wait = now, wait or self._stopped.wait
        self._lock = threading.Lock()
        self._quiet_until = 0.0

    def stop(self) -> None:
        """Stop all requests; waiting threads end with NoVerdictError."""
        self._stopped.set()

    def ask(self, text: str, images: Sequence[str]) -> JudgeReply:
        """Ask the judge about ``text`` with ``images`` (data: URIs).

        Rate limits, server faults and timeouts are tried again after growing waits with jitter,
        or after what Retry-After asks for; then all threads wait.

        Raises:
            NoVerdictError: no reply to this question. JudgeError: none to any question.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        content += [{"type": "image_url", "image_url": {"url": image}} for image in images]
        body = {
            "model": self.endpoint.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4096,
            **self.endpoint.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        headers = {"Authorization": f"Bearer {self.endpoint.key}"} if self.endpoint.key else {}
        for attempt in range(self.endpoint.retries + 1):
            self._wait_my_turn()
            answer = post(self.endpoint.url, body, headers, self.endpoint.timeout)
            reply = self._reply(answer)
            if reply is not None:
                return reply
            self._back_off(answer, attempt)
        if answer.unreachable:
            raise JudgeError(f"the judge is down: {self._described(answer)}; check --base-url")
        raise NoVerdictError(f"{self._described(answer)}, {attempt + 1} times")

    def _reply(self, answer: JudgeAnswer) -> JudgeReply | None:
        """Return a reply, None to try again. Raises NoVerdictError, JudgeError."""
        if answer.status == 200:
            return _read_reply(answer.body)
        if answer.status == 400 and _is_filtered(answer.body):
            return JudgeReply("", refusal=self._described(answer))
        if answer.status in _WRONG_SETUP or 300 <= answer.status < 400:
            raise JudgeError(
                f"the judge refuses: {self._described(answer)}; check the key, --base-url and "
                "--judge-model"
            )
        if answer.status == 429 and _is_out_of_money(answer.body):
            raise JudgeError(f"the judge's account is empty: {self._described(answer)}; top it up")
        if answer.status in _AGAIN or answer.status >= 500 or answer.status == 0:
            return None
        raise NoVerdictError(f"the judge does not take the request: {self._described(answer)}")

    def _back_off(self, answer: JudgeAnswer, attempt: int) -> None:
        asked = answer.retry_after
        if asked is not None and asked > LONGEST_RETRY_AFTER_S:
            raise JudgeError(
                f"the judge asks to come back in {asked:,.0f} s ({self._described(answer)}); run "
                "the same command again then"
            )
        if attempt >= self.endpoint.retries:
            return
        # Jitter, so that threads refused at the same time do not retry at the same time.
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.0)
        if asked is not None:
            wait = asked + min(wait, FIRST_WAIT_S)
            with self._lock:
                self._quiet_until = max(self._quiet_until, self._now() + asked)
        self._notify(f"{self._described(answer)}; trying again in {wait:.1f} s")
        self._wait(wait)

    def _wait_my_turn(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                left = self._quiet_until - self._now()
            if left <= 0:
                return
            self._wait(left)
        raise NoVerdictError("stopped")

    def _described(self, answer: JudgeAnswer) -> str:
        """Return the error message without the key, which the server may repeat."""
        text = answer.message()
        if answer.status == 200:
            text = "the judge's reply is no chat completion"
        return text.replace(self.endpoint.key, "***") if self.endpoint.key else text


def _read_reply(body: Any) -> JudgeReply | None:
    """Read the reply in a chat completion.

    Return None when the text holds no completion (a proxy's page).
    """
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text, refusal = message.get("content"), message.get("refusal")
        reason = str(choice.get("finish_reason") or "")
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if isinstance(text, list):  # content in parts
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
    text = text if isinstance(text, str) else ""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    if not text and (refusal or reason == "content_filter"):
        return JudgeReply("", str(refusal or "content filter"), reason, usage)
    return JudgeReply(text, "", reason, usage)


def _is_filtered(body: Any) -> bool:
    error = body.get("error") if isinstance(body, dict) else None
    code = str(error.get("code") or error.get("type")) if isinstance(error, dict) else ""
    return "content_filter" in code or "content_policy" in code


def _is_out_of_money(body: Any) -> bool:
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and "insufficient_quota" in (
        error.get("code"),
        error.get("type"),
    )
