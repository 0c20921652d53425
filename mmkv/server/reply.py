"""Answers in the shape of OpenAI's chat completions, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from mmkv.calls.parser import CallPiece, CallStart, TextPiece, ThoughtPiece
from mmkv.detokenizer import token_bytes
from mmkv.engine.errors import STOPS
from mmkv.server.errors import api_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmkv.calls.parser import Event, ParsedReply
    from mmkv.reply import TokenLogprob
    from mmkv.server.errors import ApiError
    from mmkv.server.work import Usage


FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
FINISH["calls"] = "tool_calls"  # a reply that stops, with calls


@dataclasses.dataclass
class ReplyHead:
    """The fields that every object of one answer begins with.

    Attributes:
        with_usage: whether each piece of a stream has the field ``usage``: null but in the last.
    """

    id: str
    created: int
    model: str
    with_usage: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields for an object of a kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class LogprobRows:
    """The log probabilities of a reply as JSON text; as objects they would take ten times that.

    :func:`rendered` writes it as a list.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Take those of more tokens."""
        self._texts += [json.dumps(row, separators=(",", ":")) for row in rows]

    @property
    def text(self) -> str:
        """Return the list in ASCII."""
        return f"[{','.join(self._texts)}]"


def rendered(data: Any, ascii: bool = False) -> bytes:
    """Return JSON in UTF-8 of data that may hold :class:`LogprobRows`."""
    found: list[LogprobRows] = []
    mark = secrets.token_hex(16)  # that no text of a request holds

    def placed(one: Any) -> str:
        if not isinstance(one, LogprobRows):
            raise TypeError(f"{type(one).__name__} is no JSON")
        found.append(one)
        return mark

    text = json.dumps(
        data, ensure_ascii=ascii, allow_nan=False, separators=(",", ":"), default=placed
    )
    if not found:
        return text.encode()
    first, *others = text.split(f'"{mark}"')
    parts = [part for rows, rest in zip(found, others, strict=True) for part in (rows.text, rest)]
    return "".join([first, *parts]).encode()


def completion(
    head: ReplyHead,
    replies: Sequence[ParsedReply],
    reasons: Sequence[str],
    rows: Sequence[LogprobRows] | None,
    usage: Usage,
) -> dict[str, Any]:
    """Return a whole answer."""
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": message_json(parsed),
            "logprobs": None if rows is None else {"content": rows[index], "refusal": None},
            "finish_reason": FINISH[reason],
        }
        for index, (parsed, reason) in enumerate(zip(replies, reasons, strict=True))
    ]
    return head.fields("chat.completion") | {"choices": choices, "usage": usage_json(usage)}


def message_json(parsed: ParsedReply) -> dict[str, Any]:
    """Return a whole reply as OpenAI's message."""
    text = None if parsed.calls and not parsed.text else parsed.text
    made: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": [],
    }
    if parsed.thought is not None:
        made["reasoning_content"] = parsed.thought
    if parsed.calls:
        made["tool_calls"] = [one.as_json() for one in parsed.calls]
    return made


def delta(event: Event) -> dict[str, Any]:
    """Return a piece of a reply as OpenAI's delta; empty for one that says nothing."""
    if isinstance(event, TextPiece):
        return {"content": event.text}
    if isinstance(event, ThoughtPiece):
        return {"reasoning_content": event.text}
    if isinstance(event, CallStart):
        own = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": own}
        return {"tool_calls": [call]}
    if isinstance(event, CallPiece):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {}


def chunk(
    head: ReplyHead,
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    spelled: list[Spelled] | None = None,
) -> dict[str, Any]:
    """Return a piece of a streamed answer."""
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": None if spelled is None else logprobs(spelled),
        "finish_reason": None if reason is None else FINISH[reason],
    }
    usage = {"usage": None} if head.with_usage else {}
    return head.fields("chat.completion.chunk") | {"choices": [choice]} | usage


def usage_chunk(head: ReplyHead, usage: Usage) -> dict[str, Any]:
    """Return the last piece of a streamed answer."""
    return head.fields("chat.completion.chunk") | {"choices": [], "usage": usage_json(usage)}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage, with what mmkv adds under ``mmkv``."""
    own = dataclasses.asdict(usage)
    prompt, reply = own.pop("prompt_tokens"), own.pop("completion_tokens")
    thoughts = own.pop("thought_tokens")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": usage.resumed},
        "completion_tokens_details": {"reasoning_tokens": thoughts},
        "mmkv": own,
    }


_LOWEST = -9999.0  # JSON has no infinity


@dataclasses.dataclass(frozen=True)
class Spelled:
    """A token as text with its log probability.

    Attributes:
        bytes: of the token; those of several may make up one character. None: not known.
    """

    text: str
    logprob: float
    bytes: list[int] | None
    top: tuple[Spelled, ...] = ()


def spell(tokenizer: Any, scored: Sequence[TokenLogprob]) -> list[Spelled]:
    """Return tokens as text."""
    return [
        _spelled(
            tokenizer, one.token, one.logprob, tuple(_spelled(tokenizer, *two) for two in one.top)
        )
        for one in scored
    ]


def _spelled(tokenizer: Any, token: int, logprob: float, top: tuple[Spelled, ...] = ()) -> Spelled:
    raw = token_bytes(tokenizer).of(token)
    if raw is None:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    else:
        text = raw.decode("utf-8", errors="replace")
    return Spelled(text, max(logprob, _LOWEST), None if raw is None else list(raw), top)


def logprobs(spelled: list[Spelled]) -> dict[str, Any]:
    """Return the log probabilities of some tokens."""
    content = [
        _token(one) | {"top_logprobs": [_token(other) for other in one.top]} for one in spelled
    ]
    return {"content": content, "refusal": None}


def _token(one: Spelled) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": one.bytes}


log = logging.getLogger("mmkv.server")
_STREAM = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ReplyResponse(Response):
    """Answers a request, and cancels its work when the client disconnects.

    Args:
        work: returns the JSON, or an iterator over a stream's events.
        keep_alive: seconds without an event after which a stream sends a comment.
        headers: of an answer that is no error.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[dict[str, Any]]] | Callable[[], AsyncIterator[Any]],
        stream: bool,
        keep_alive: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._work, self._stream, self._keep_alive = work, stream, keep_alive
        self._more_headers = dict(headers or {})
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""

        async def sending(message: Message) -> None:
            try:
                await send(message)
            except OSError as error:
                raise _GoneError from error

        working = asyncio.ensure_future(self._answer(scope, receive, sending))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return
            with contextlib.suppress(_GoneError):
                await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_stream(scope, receive, send)
            return
        try:
            made = rendered(await self._work())  # type: ignore[misc]
            response = Response(made, headers=self._more_headers, media_type="application/json")
        except (asyncio.CancelledError, *STOPS):
            raise
        except BaseException as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events; an error before the first one is an HTTP status, later an event."""
        events: AsyncIterator[Any] = self._work()  # type: ignore[assignment]
        lines = _Lines(send, self._more_headers)
        if scope.get("mmkv.head"):
            await lines.write(b"")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        try:
            async with lines.with_comments(self._keep_alive), contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    await lines.write(event_line(event))
        except (asyncio.CancelledError, _GoneError, *STOPS):
            raise
        except BaseException as error:
            if not lines.started:
                await error_response(error)(scope, receive, send)
                return
            await lines.write(event_line(api_error(error).on(scope["path"])[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _GoneError(Exception):
    """The client disconnected while the answer was written."""


class _Lines:
    """Writes a stream of events over ASGI; two tasks may write.

    Attributes:
        started: whether the status and the headers are sent.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send, self._turn, self._headers = send, asyncio.Lock(), headers
        self._clock = asyncio.get_running_loop().time
        self._latest = self._clock()
        self.started = False

    async def write(self, line: bytes) -> None:
        """Send a line, after the status and the headers if it is the first."""
        async with self._turn:
            self._latest = self._clock()
            if not self.started:
                await self._send(_start(self._headers))
                self.started = True
            await self._send({"type": "http.response.body", "body": line, "more_body": True})

    @contextlib.asynccontextmanager
    async def with_comments(self, every: float) -> AsyncIterator[None]:
        """Send a comment whenever nothing was written for ``every`` seconds.

        One task for the whole stream: one for each event took a tenth of the server's time.
        """
        commenting = asyncio.ensure_future(self._comment(every))
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)

    async def _comment(self, every: float) -> None:
        while True:
            left = self._latest + every - self._clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.write(b": keep-alive\n\n")


class ErrorResponse(JSONResponse):
    """The answer to a request that failed, in the form that its path's API has."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        self.status_code, shown = self._error.on(scope["path"])
        self.body = self.render(shown)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: BaseException) -> ErrorResponse:
    """Return the answer to a request that failed."""
    shown = api_error(error)
    if shown.code == "no_descriptors":
        log.warning("as many files are open as may be; raise the limit (ulimit -n)")
    elif isinstance(error, OSError):  # of this server's files: nobody else says so
        log.error("a request failed", exc_info=error)
    return ErrorResponse(shown)


def event_line(data: dict[str, Any] | str | bytes) -> bytes:
    """Return a server-sent event; bytes are one already.

    An object with a ``type`` gets an ``event`` line with it, too.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return f"data: {data}\n\n".encode()
    kind = f"event: {data['type']}\n" if "type" in data else ""
    return kind.encode() + b"data: " + rendered(data, ascii=True) + b"\n\n"


def _start(more: Mapping[str, str]) -> dict[str, Any]:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", **_STREAM, **more}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
