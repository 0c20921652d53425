"""/v1/responses: stored replies that a later request continues by their id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from mmkv.calls.parser import CallEnd, CallPiece, CallStart, TextPiece, ThoughtPiece
from mmkv.calls.tools import Tool
from mmkv.engine.errors import STOPS
from mmkv.server import reply
from mmkv.server.chat import ChatCall, ReplyPart
from mmkv.server.checked import checked, take_resume
from mmkv.server.engine_thread import Done
from mmkv.server.errors import ApiError, api_error, invalid_value, reworded, unsupported
from mmkv.server.guard import BodyRoute
from mmkv.server.reply import LogprobRows, ReplyResponse, event_line, rendered
from mmkv.server.responses_schema import (
    InputItem,
    ReferenceItem,
    ResponseRequest,
    chat_request,
    input_items,
    item_of,
    with_own_field_names,
)
from mmkv.server.state import Caller, CurrentCaller, ServerState, TurnMemory, release

if TYPE_CHECKING:
    from mmkv.calls.parser import Event
    from mmkv.sampling import Settled
    from mmkv.server.conversations import ConversationState
    from mmkv.server.reply import Spelled
    from mmkv.server.work import Usage


class ResponseBuilder:
    """Builds a response and its events while the reply grows: a thought, a text, calls.

    Args:
        name: its id; stored: whether later requests can continue it.
        instructions: those that stand in the conversation.
        logprobs: whether the log probabilities of a text's tokens are shown.
        sampling: how its tokens are drawn.
    """

    def __init__(
        self,
        name: str,
        asked: ResponseRequest,
        stored: bool,
        instructions: str | None,
        logprobs: bool,
        sampling: Settled,
    ) -> None:
        self.name, self._key = name, name.removeprefix("resp_")
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the latest item goes on
        self._logprobs, self._rows = logprobs, LogprobRows()
        self._asked, self._stored, self._instructions = asked, stored, instructions
        self._sampling = sampling
        self._created, self._number = int(time.time()), 0
        self._completed: int | None = None

    def whole(self, reason: str, usage: Usage) -> dict[str, Any]:
        """Return the finished response; ``reason``: why the reply ended."""
        self._completed = self._completed or int(time.time())
        status = self._status(reason)
        if not self._items:
            self._items.append(self._message(status))
        if self._open:
            self._items[-1]["status"] = self._last_status(reason)
        made = self._response(status, self._items, usage)
        if status == "completed":
            return made | {"completed_at": self._completed}
        return made | {"incomplete_details": {"reason": "max_output_tokens"}}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first piece."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress", []))

    def add(self, part: ReplyPart) -> Iterator[dict[str, Any]]:
        """Take more of the reply; yield its events."""
        spelled = part.spelled if self._logprobs else []
        for event in part.events:
            kind = _KINDS[type(event)]
            if not self._open or self._items[-1]["type"] != kind or isinstance(event, CallStart):
                yield from self._close("completed")
                yield from self._begin(kind, event)
            item = self._items[-1]
            if isinstance(event, TextPiece):
                item["content"][0]["text"] += event.text
                yield self._text_piece(event.text, spelled)
                spelled = []
            elif isinstance(event, ThoughtPiece):
                item["content"][0]["text"] += event.text
                yield self._at("response.reasoning_text.delta", content_index=0, delta=event.text)
            elif isinstance(event, CallPiece):
                item["arguments"] += event.text
                yield self._at("response.function_call_arguments.delta", delta=event.text)
            elif isinstance(event, CallEnd):
                yield from self._close("completed")
        if spelled and self._open and self._items[-1]["type"] == "message":
            yield self._text_piece("", spelled)

    def closing(self, reason: str, usage: Usage) -> Iterator[dict[str, Any]]:
        """Yield the events after the last piece.

        Each is made when the client is ready for it: log probabilities take much memory.
        """
        if not self._items:
            yield from self._begin("message", None)
        yield from self._close(self._last_status(reason))
        yield self._event(f"response.{self._status(reason)}", response=self.whole(reason, usage))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a response that broke off."""
        code = "invalid_prompt" if error.status < 500 else "server_error"  # of OpenAI's list
        reported = {"code": code, "message": str(error)}
        for one in self._items[-1:] if self._open else ():
            one["status"] = "incomplete"
        output = self._items or [self._message("incomplete")]
        return self._event(
            "response.failed", response=self._response("failed", output) | {"error": reported}
        )

    def _begin(self, kind: str, event: Event | None) -> Iterator[dict[str, Any]]:
        """Begin another item, and yield its events."""
        key = f"{self._key}{len(self._items) or ''}"
        self._open = True
        if isinstance(event, CallStart):
            call = {"type": kind, "id": f"fc_{key}", "call_id": event.id, "name": event.name}
            self._items.append(call | {"arguments": "", "status": "in_progress"})
            yield self._item_event("added", dict(self._items[-1]))
            return
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            head = {"type": kind, "id": f"rs_{key}", "summary": []}
            self._items.append(head | {"content": [part], "status": "in_progress"})
        else:
            self._items.append(self._message("in_progress"))
            part = self._items[-1]["content"][0]
        yield self._item_event("added", self._items[-1] | {"content": []})
        yield self._at("response.content_part.added", content_index=0, part=dict(part))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the latest item, and yield its events."""
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            own = {"name": item["name"], "arguments": item["arguments"]}
            yield self._at("response.function_call_arguments.done", **own)
        else:
            (part,) = item["content"]
            if item["type"] == "message":
                own = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._at("response.output_text.done", content_index=0, **own)
            else:
                yield self._at("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._at("response.content_part.done", content_index=0, part=part)
        yield self._item_event("done", item)

    def _text_piece(self, text: str, spelled: list[Spelled]) -> dict[str, Any]:
        rows = _with_bytes(reply.logprobs(spelled)["content"])
        self._rows.add(rows)
        kind = "response.output_text.delta"
        return self._at(kind, content_index=0, delta=text, logprobs=rows)

    def _message(self, status: str) -> dict[str, Any]:
        key = f"{self._key}{len(self._items) or ''}"
        shown: Any = self._rows if self._logprobs else []
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": shown}
        head = {"id": f"msg_{key}", "type": "message", "role": "assistant"}
        return head | {"status": status, "content": [part]}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number} | fields

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **where, **fields)

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        where = {"output_index": len(self._items) - 1, "item": item}
        return self._event(f"response.output_item.{kind}", **where)

    def _status(self, reason: str) -> str:
        return "incomplete" if reply.FINISH[reason] == "length" else "completed"

    def _last_status(self, reason: str) -> str:
        """Return the status of the latest item: a call that goes on at the end was cut off."""
        called = self._open and self._items[-1]["type"] == "function_call"
        return "incomplete" if called else self._status(reason)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": asked.model,
            "previous_response_id": asked.previous_response_id,
            "instructions": self._instructions,
            "output": output,
            "usage": None if usage is None else self._usage(usage),
            "store": self._stored,
            "metadata": asked.metadata or {},
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "presence_penalty": self._sampling.presence_penalty,
            "frequency_penalty": self._sampling.frequency_penalty,
            "max_output_tokens": asked.max_output_tokens,
            "top_logprobs": asked.top_logprobs or 0,
            "text": {"format": self._format()},
            "truncation": asked.truncation or "disabled",
            "tools": [_shown_tool(one) for one in asked.tools or ()],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "max_tool_calls": asked.max_tool_calls,
            "reasoning": {"effort": None, "summary": None},
            "background": False,
            "service_tier": "default",
            "user": asked.user,
            "safety_identifier": asked.safety_identifier,
            "prompt_cache_key": asked.prompt_cache_key,
        }

    def _format(self) -> dict[str, Any]:
        text = self._asked.text
        return {"type": "text"} if text is None or text.format is None else text.format

    def _usage(self, usage: Usage) -> dict[str, Any]:
        chat = reply.usage_json(usage)
        new = usage.prompt_tokens - usage.resumed
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.resumed,
                "cache_write_tokens": new if self._stored else 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
            "total_tokens": chat["total_tokens"],
            "mmkv": chat["mmkv"],
        }


# The items that events belong to.
_KINDS: dict[type[Event], str] = {
    TextPiece: "message",
    ThoughtPiece: "reasoning",
    **dict.fromkeys((CallStart, CallPiece, CallEnd), "function_call"),
}


def _shown_tool(given: Any) -> dict[str, Any]:
    """Return a function as this API shows it."""
    tool = Tool.of(given)
    shown = {"type": "function", "name": tool.name, "description": tool.description or None}
    return shown | {"parameters": tool.parameters, "strict": tool.strict}


def _with_bytes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for one in [token for row in rows for token in (row, *row["top_logprobs"])]:
        one["bytes"] = one["bytes"] or []  # a token without bytes: chat says null, this API []
    return rows


def page_of(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return a page of a list, from the item that follows ``after`` on. Raises ApiError (400)."""
    names = [one["id"] for one in items]
    if after is not None and after not in names:
        raise invalid_value(
            "after",
            f"after names no item of the list: {after[:60]!r}; take last_id of the page before",
        )
    start = 0 if after is None else names.index(after) + 1
    data, more = items[start : start + limit], start + limit < len(items)
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


_PREFIXES = {"response": "resp_", "thread": "msg_"}


@dataclass
class StoredResponse:
    """A response that later requests can continue, or a message of a thread.

    Attributes:
        shown: as the API shows it; items: its input; both as JSON, whose length is what they take.
        instructions: those of its conversation.
        size: its bytes when it was stored. Those of a memory that shares a budget change.
    """

    tenant: str
    conversation: ConversationState
    shown: bytes
    items: bytes
    instructions: str | None
    size: int = 0


class ResponseTable:
    """The stored responses of a server, and threads, within a limit of bytes; in the event loop.

    The least recently used are deleted first.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def find(self, name: str, caller: Caller, kind: str = "response") -> StoredResponse:
        """Return a response and count it as used.

        Args:
            kind: of what is looked for, which its name begins with.

        Raises:
            ApiError: 404, there is none of the caller's.
        """
        stored = self._stored.get(name) if name.startswith(_PREFIXES[kind]) else None
        if stored is not None and stored.conversation.lost:
            self.delete(name)
            stored = None
        if stored is None or stored.tenant != caller.tenant:
            raise ApiError(
                404,
                f"there is no {kind} {name[:60]!r}: it was deleted, not stored, or made way for "
                "others; send the whole conversation",
                f"{kind}_not_found",
            )
        self._stored.move_to_end(name)
        return stored

    def with_items(self, asked: ResponseRequest, caller: Caller) -> ResponseRequest:
        """Return a request with the items that it refers to. Raises ApiError (404): one is gone."""
        given = asked.input
        if isinstance(given, str) or not any(isinstance(one, ReferenceItem) for one in given):
            return asked
        found = [
            self._item(one.id, caller, f"input[{at}]") if isinstance(one, ReferenceItem) else one
            for at, one in enumerate(given)
        ]
        return asked.model_copy(update={"input": found})

    def _item(self, name: str, caller: Caller, where: str) -> InputItem:
        """Return an item of a stored response, whose name is part of the item's."""
        key = re.search("[0-9a-f]{32}", name)
        try:
            stored = self.find(f"resp_{key[0] if key else ''}", caller)
            items = [*json.loads(stored.shown)["output"], *json.loads(stored.items)]
            return item_of(next(one for one in items if one.get("id") == name))
        except (ApiError, StopIteration):
            what = f"there is no item {name[:60]!r}: its response was deleted, not stored, or made "
            what += f"way for others; send the item itself in {where}"
            raise ApiError(404, what, "item_not_found", where) from None

    def keep(self, name: str, stored: StoredResponse) -> None:
        """Store a response; the least recently used ones are deleted for it."""
        stored.conversation.expendable = True
        stored.size = stored.conversation.bytes + len(stored.shown) + len(stored.items)
        self._stored[name] = stored
        self._bytes += stored.size
        while self._bytes > self._state.settings.store_bytes and self._stored:
            self.delete(next(iter(self._stored)))

    def delete(self, name: str) -> None:
        """Delete a response."""
        stored = self._stored.pop(name)
        self._bytes -= stored.size
        release(self._state, stored.conversation)


class ResponseCall:
    """One request for a response. Raises ApiError: what can be said before the engine is asked."""

    def __init__(
        self, state: ServerState, responses: ResponseTable, asked: ResponseRequest, caller: Caller
    ) -> None:
        self._state, self._responses, self._caller = state, responses, caller
        self._store = asked.store is not False
        name, before = f"resp_{secrets.token_hex(16)}", None
        self._asked = asked = responses.with_items(asked, caller)
        if asked.previous_response_id is not None:
            try:
                before = responses.find(asked.previous_response_id, caller)
            except ApiError as error:
                error.status, error.param = 400, "previous_response_id"
                error.code = "previous_response_not_found"
                raise
        self._instructions = _instructions(asked, before)
        if before is not None:
            asked = asked.model_copy(update={"instructions": None})
        request, self._origins = chat_request(asked, before is not None)
        conversation = None if before is None else before.conversation
        with reworded(self._own_names):
            made = checked(state, request, caller, start=conversation, keep=self._store)
        self._call = ChatCall(state, made, caller)
        self._call.keeps_body = True  # what was sent is stored, too
        self._name = name
        self._builder = ResponseBuilder(
            name,
            self._asked,
            self._store,
            self._instructions,
            bool(request.logprobs),
            self._call.work.sampling,
        )

    def _own_names(self, error: ApiError) -> ApiError:
        return with_own_field_names(error, self._origins)

    async def _parts(self) -> AsyncGenerator[ReplyPart | Done]:
        with reworded(self._own_names):
            async with contextlib.aclosing(self._call.parts()) as parts:
                async for part in parts:
                    yield part

    async def whole(self) -> dict[str, Any]:
        """Return the response."""
        builder, reason = self._builder, ""
        async with TurnMemory(self._state, self._call.work) as turn:
            async for part in self._parts():
                if isinstance(part, ReplyPart):
                    for _ in builder.add(part):
                        pass
                    reason = part.finish_reason or reason
                    continue
                made = builder.whole(reason, part.usage)
                self._keep(turn, made)
                return made
        raise AssertionError("a request ends with Done or an error")

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str | bytes]:
        """Yield the events of a stream."""
        builder, reason, begun = self._builder, "", False
        async with (
            TurnMemory(self._state, self._call.work) as turn,
            contextlib.aclosing(self._parts()) as parts,
        ):
            try:
                async for part in parts:
                    if not begun:
                        begun = True
                        for opening in builder.opening():
                            yield opening
                    if isinstance(part, ReplyPart):
                        reason = part.finish_reason or reason
                        for event in builder.add(part):
                            yield event
                        continue
                    closing = builder.closing(reason, part.usage)
                    if self._store:
                        self._keep(turn, builder.whole(reason, part.usage))
                    for line in map(event_line, closing):
                        yield line
            except (asyncio.CancelledError, *STOPS):
                raise
            except BaseException as error:
                if not begun:
                    raise
                yield builder.failed(api_error(error))
            yield "[DONE]"

    def _keep(self, turn: TurnMemory, made: dict[str, Any]) -> None:
        if not self._store:
            return
        items = rendered(input_items(self._asked, self._name))
        stored = StoredResponse(
            self._caller.tenant, turn.claim(), rendered(made), items, self._instructions
        )
        self._responses.keep(self._name, stored)


def _instructions(asked: ResponseRequest, before: StoredResponse | None) -> str | None:
    """Return the instructions that the conversation has.

    They are its first message, which a memory has read and cannot exchange.
    """
    if before is None:
        return asked.instructions
    if (asked.instructions or None) not in (None, before.instructions):
        raise invalid_value(
            "instructions",
            "the conversation has other instructions, which its memory holds; leave them out, or "
            "send the whole conversation without previous_response_id",
        )
    return before.instructions


def responses_router(state: ServerState, responses: ResponseTable) -> APIRouter:
    """Return the routes; a :class:`~mmkv.server.guard.CheckKey` has to stand before them."""
    router = APIRouter(prefix="/responses", tags=["responses"], route_class=BodyRoute)

    @router.post("", summary="Reply to a conversation, or go on with an earlier response")
    async def create(body: ResponseRequest, who: CurrentCaller, request: Request) -> Response:
        headers = state.headers_for(body)
        take_resume(request, body)
        call = ResponseCall(state, responses, body, who)
        work: Any = call.stream if body.stream else call.whole
        return ReplyResponse(work, bool(body.stream), state.settings.keep_alive, headers)

    @router.post("/compact", include_in_schema=False)
    async def compact() -> Response:
        raise ApiError(
            404,
            "there is nothing to compact: a memory keeps to its budget by itself; go on with "
            "previous_response_id",
            "not_supported",
        )

    @router.get("/{name}", summary="A stored response")
    async def one(
        name: str, who: CurrentCaller, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        for param, given in (("stream", stream), ("starting_after", starting_after is not None)):
            if given:
                what = "has been streamed, once; get it whole, or set stream when you create one"
                raise unsupported(param, f"{param}: a stored response {what}")
        return Response(responses.find(name, who).shown, media_type="application/json")

    @router.get("/{name}/input_items", summary="What a stored response replied to")
    async def items(
        name: str,
        who: CurrentCaller,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the items, the newest first unless ``order`` is ``asc``."""
        data = json.loads(responses.find(name, who).items)
        return page_of(data if order == "asc" else data[::-1], limit, after)

    @router.delete("/{name}", summary="Let a stored response go")
    async def delete(name: str, who: CurrentCaller) -> dict[str, Any]:
        responses.find(name, who)
        responses.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    return router
