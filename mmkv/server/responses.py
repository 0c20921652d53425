"""/v1/responses: replies that a later request goes on from by their id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from mmkv.engine.errors import STOPS, MmkvError
from mmkv.server.answer import Answer, event_line
from mmkv.server.body import BodyRoute
from mmkv.server.chat import ChatCall
from mmkv.server.errors import ApiError, api_error
from mmkv.server.headers import take_resume
from mmkv.server.reply_json import rendered
from mmkv.server.responses_json import Shape, page_of
from mmkv.server.responses_schema import (
    ResponseRequest,
    chat_request,
    input_items,
    named_as_asked,
)
from mmkv.server.room import Caller, Room
from mmkv.server.turns import Asking, Turn, release
from mmkv.server.worker import Delta, Done

if TYPE_CHECKING:
    from mmkv.server.kept import Kept


@dataclass
class Stored:
    """A response that can be gone on from.

    Attributes:
        shown: as the API shows it; items: its input; both as JSON, whose length is what they take.
        instructions: those of its conversation.
        size: its bytes when it was stored. Those of a memory that shares a budget change.
    """

    tenant: str
    kept: Kept
    shown: bytes
    items: bytes
    instructions: str | None
    size: int = 0


class Responses:
    """The stored responses of a server, within a limit of bytes; in the event loop.

    Those used longest ago go first.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def find(self, name: str, caller: Caller) -> Stored:
        """Return a response, which counts as used. Raises ApiError (404), also for another's."""
        stored = self._stored.get(name)
        if stored is not None and stored.kept.lost:
            self.delete(name)
            stored = None
        if stored is None or stored.tenant != caller.tenant:
            raise ApiError(
                404,
                f"there is no response {name[:60]!r}: it was deleted, not stored, or made way for "
                "others; send the whole conversation",
                "response_not_found",
            )
        self._stored.move_to_end(name)
        return stored

    def keep(self, name: str, stored: Stored) -> None:
        """Store a response; others make way for it."""
        stored.kept.expendable = True
        stored.size = stored.kept.bytes + len(stored.shown) + len(stored.items)
        self._stored[name] = stored
        self._bytes += stored.size
        while self._bytes > self._room.settings.store_bytes and self._stored:
            self.delete(next(iter(self._stored)))

    def delete(self, name: str) -> None:
        """Let a response go."""
        stored = self._stored.pop(name)
        self._bytes -= stored.size
        release(self._room, stored.kept)


class ResponseCall:
    """One request for a response. Raises ApiError: what can be said before the engine is asked."""

    def __init__(
        self, room: Room, responses: Responses, asked: ResponseRequest, caller: Caller
    ) -> None:
        self._room, self._responses, self._asked, self._caller = room, responses, asked, caller
        self._store = asked.store is not False
        name, before = f"resp_{secrets.token_hex(16)}", None
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
        request = chat_request(asked)
        kept = None if before is None else before.kept
        self._instructed = bool(asked.instructions)
        with self._own_names():
            self._call = ChatCall(room, request, caller, kept, self._store)
            self._call.require_few_scored()
        self._call.keeps_body = True  # what was sent is stored, too
        self._name = name
        self._shape = Shape(
            name,
            self._asked,
            self._store,
            self._instructions,
            bool(request.logprobs),
            self._call.work.sampling,
        )

    @contextlib.contextmanager
    def _own_names(self) -> Iterator[None]:
        """Have errors name the fields of this API, and not those of the chat request."""
        try:
            yield
        except (ApiError, MmkvError) as error:
            raise named_as_asked(api_error(error), self._instructed) from error

    async def _events(self) -> AsyncGenerator[Delta | Done]:
        with self._own_names():
            async with contextlib.aclosing(self._call.events()) as events:
                async for event in events:
                    yield event

    async def whole(self) -> dict[str, Any]:
        """Return the response."""
        shape, reason = self._shape, ""
        async with Turn(self._room, self._call) as turn:
            async for event in self._events():
                if isinstance(event, Delta):
                    shape.add(event.text, event.spelled)
                    reason = event.finish_reason or reason
                    continue
                made = shape.whole(reason, event.usage)
                self._keep(turn, made)
                return made
        raise AssertionError("a request ends with Done or an error")

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str | bytes]:
        """Yield the events of a stream."""
        shape, reason, begun = self._shape, "", False
        async with (
            Turn(self._room, self._call) as turn,
            contextlib.aclosing(self._events()) as events,
        ):
            try:
                async for event in events:
                    if not begun:
                        begun = True
                        for opening in shape.opening():
                            yield opening
                    if isinstance(event, Delta):
                        shape.add(event.text, event.spelled)
                        reason = event.finish_reason or reason
                        if event.text or event.spelled:
                            yield shape.piece(event.text, event.spelled)
                        continue
                    if self._store:
                        self._keep(turn, shape.whole(reason, event.usage))
                    for line in map(event_line, shape.closing(reason, event.usage)):
                        yield line
            except (asyncio.CancelledError, *STOPS):
                raise
            except BaseException as error:
                if not begun:
                    raise
                yield shape.failed(api_error(error))
            yield "[DONE]"

    def _keep(self, turn: Turn, made: dict[str, Any]) -> None:
        if not self._store:
            return
        items = rendered(input_items(self._asked, self._name))
        stored = Stored(
            self._caller.tenant, turn.claim(), rendered(made), items, self._instructions
        )
        self._responses.keep(self._name, stored)


def _instructions(asked: ResponseRequest, before: Stored | None) -> str | None:
    """Return the instructions that the conversation has.

    They stand at its beginning, and what a memory holds cannot be exchanged.
    """
    if before is None:
        return asked.instructions
    if (asked.instructions or None) not in (None, before.instructions):
        raise ApiError(
            400,
            "the conversation has other instructions, which its memory holds; leave them out, or "
            "send the whole conversation without previous_response_id",
            "invalid_value",
            "instructions",
        )
    return before.instructions


def responses_router(room: Room) -> APIRouter:
    """Return the routes; who asks has to be known by then."""
    responses = Responses(room)
    router = APIRouter(prefix="/responses", tags=["responses"], route_class=BodyRoute)

    @router.post("", summary="Reply to a conversation, or go on with an earlier response")
    async def create(body: ResponseRequest, who: Asking, request: Request) -> Response:
        take_resume(request, body)
        call = ResponseCall(room, responses, body, who)
        work: Any = call.stream if body.stream else call.whole
        return Answer(work, bool(body.stream), room.settings.keep_alive)

    @router.post("/compact", include_in_schema=False)
    async def compact() -> Response:
        raise ApiError(
            404,
            "there is nothing to compact: a memory keeps to its budget by itself; go on with "
            "previous_response_id",
            "not_supported",
        )

    @router.get("/{name}", summary="A stored response")
    async def one(name: str, who: Asking) -> Response:
        return Response(responses.find(name, who).shown, media_type="application/json")

    @router.get("/{name}/input_items", summary="What a stored response replied to")
    async def items(
        name: str,
        who: Asking,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the items, the newest first unless ``order`` is ``asc``."""
        data = json.loads(responses.find(name, who).items)
        return page_of(data if order == "asc" else data[::-1], limit, after)

    @router.delete("/{name}", summary="Let a stored response go")
    async def delete(name: str, who: Asking) -> dict[str, Any]:
        responses.find(name, who)
        responses.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    return router
