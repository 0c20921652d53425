"""What the routes share: settings and engine thread, who asks, and the memory of a turn."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

from fastapi import Depends, Request

from mmkv.engine.errors import CapacityError
from mmkv.engine.system import give_back, resident_bytes
from mmkv.scheduler.loop import queue_is_full
from mmkv.server.errors import ApiError, invalid_value
from mmkv.server.schema import MOST_NAMES, TOLD_TEMPLATES, ReplyRequest, shown_name, unread_fields
from mmkv.server.settings import FEW, RequestBounds, always_accepted

if TYPE_CHECKING:
    from mmkv.server.conversations import ConversationState
    from mmkv.server.engine_thread import EngineThread
    from mmkv.server.media.resolver import MediaResolver
    from mmkv.server.metrics import Metrics
    from mmkv.server.settings import Facts, Footprint, ServerSettings
    from mmkv.server.work import ChatWork


log = logging.getLogger("mmkv.server")
T = TypeVar("T")
_TRIM = 1.0  # seconds between two attempts to free memory for a request
_MOST_LOGGED = 256  # names that clients have chosen


@dataclass(frozen=True)
class Caller:
    """Who asks: ``tenant`` owns sessions and snapshots, ``name`` (key or address) takes turns."""

    tenant: str
    name: str


class BodyRoom:
    """What bodies and messages of WebSockets take together, as long as they are under way.

    Args:
        most: bytes of one; bounds: of all.

    Attributes:
        bytes, values: of those that are counted.
    """

    def __init__(self, most: int, bounds: RequestBounds | None = None) -> None:
        bounds = bounds or RequestBounds()
        self._most, self._bytes, self._values = most, bounds.bodies * most, bounds.values
        self.bytes = self.values = 0

    def full(self, size: int, values: int) -> bool:
        """Whether all pass a bound, and one of ``size`` bytes and so many values is not small."""
        too_long = self.bytes > self._bytes and size > always_accepted(self._most)
        return too_long or (self.values > self._values and values > FEW)

    def error(self) -> ApiError:
        """Return the answer where it is full."""
        return ApiError(
            503,
            f"requests of over {self._bytes / 2**20:g} MiB or {self._values:,} values together are "
            "under way; send this one later",
            "bodies_arriving",
        )


@dataclass
class ServerState:
    """The state of one server, which all routes share.

    Attributes:
        media: fetches and decodes pictures and videos; footprint: memory the process may take.
        busy: requests under way, by caller; unread: names of fields that were logged.
        counts: of prompts whose tokens are counted, and are not read; bodies: of all requests.
        background: turns that go on without their clients.
    """

    settings: ServerSettings
    facts: Facts
    engine_thread: EngineThread
    metrics: Metrics
    media: MediaResolver
    footprint: Footprint | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    busy: Counter[str] = field(default_factory=Counter)
    unread: set[str] = field(default_factory=set)
    background: set[asyncio.Task[None]] = field(default_factory=set)
    counts: PromptCounts = field(init=False)
    bodies: BodyRoom = field(init=False)
    _trimmed: float = 0.0

    def __post_init__(self) -> None:
        self.bodies = BodyRoom(self.settings.body, self.settings.bounds)
        self.counts = PromptCounts(self.engine_thread, self.settings.max_queue)

    def headers_for(self, request: ReplyRequest, more: Sequence[str] = ()) -> dict[str, str]:
        """Return the header that names a request's fields without effect, if it has any.

        Each is logged once, too.

        Args:
            more: fields that have none with this model.

        Raises:
            ApiError: one is not known, and the server is strict.
        """
        strict, given = self.settings.strict, request.template_values()
        names = [*unread_fields(request, strict), *more]
        bounded = ["thinking_budget"] if self.facts.thoughts else []
        read = {*self.facts.template_variables, *bounded}
        unknown = sorted(given.keys() - read)
        if strict and unknown:
            raise invalid_value(
                "chat_template_kwargs",
                f"the model's chat template does not read {unknown[0]!r}; leave it out",
            )
        own = {one for one in TOLD_TEMPLATES if getattr(request, one) is not None}
        where = [one if one in own else f"chat_template_kwargs.{one}" for one in unknown]
        names = sorted([*names, *map(shown_name, where)])
        names = names[:MOST_NAMES]
        new = [name for name in names if name not in self.unread]
        if new and len(self.unread) < _MOST_LOGGED:
            self.unread.update(new)
            log.warning(f"fields of a request have no effect here: {', '.join(new)}")
        return {"X-Mmkv-Ignored": ", ".join(names)} if names else {}

    def refusal(self) -> CapacityError | ApiError | None:
        """Return why no other request for a reply is taken now, and count it; None: one is."""
        if not self.engine_thread.has_place():
            self.metrics.rejected.labels("queue").inc()
            return queue_is_full(self.settings.max_queue, self.settings.max_queue)
        if not self.has_memory():
            self.metrics.rejected.labels("process").inc()
            what = "the server's memory is taken by other requests; send this one later"
            return ApiError(503, what, "process_memory")
        return None

    def has_memory(self) -> bool:
        """Whether the process may read one more prompt beside what it holds now.

        The bounds of its parts say what can come; this sees what the heap makes of it. While no
        request is under way there is nothing to wait for.
        """
        most, known = self.settings.process_memory, self.footprint
        if most is None or known is None or not self.engine_thread.busy:
            return True
        left = most - known.parts["reading"]
        if (resident_bytes() or 0) <= left:
            return True
        now = time.monotonic()
        if now - self._trimmed > _TRIM:
            self._trimmed = now
            give_back()
        return (resident_bytes() or 0) <= left

    @cached_property
    def weights(self) -> dict[str, float]:
        """The weight of a tenant's sessions in a shared budget; 1 for tenants that are not here."""
        tenants = [digest_of_key(key).hex() for key in self.settings.api_keys]
        return dict(zip(tenants, self.settings.key_weights, strict=False))

    @contextmanager
    def count_request(self, caller: Caller) -> Iterator[None]:
        """Count a request of ``caller`` while it is under way. Raises ApiError (429)."""
        most = self.settings.max_per_key
        if most is not None and self.busy[caller.name] >= most:
            self.metrics.rejected.labels("rate").inc()
            raise ApiError(
                429,
                f"{most} requests of yours are under way, as many as this server allows; wait for "
                "one to end",
                "rate_limit_exceeded",
            )
        self.busy[caller.name] += 1
        try:
            yield
        except CapacityError as error:
            waits = "queue" if error.unit == "requests" else "memory"
            reason = "too_large" if error.final else waits
            self.metrics.rejected.labels(reason).inc()
            raise
        finally:
            self.busy[caller.name] -= 1
            if not self.busy[caller.name]:
                del self.busy[caller.name]


def digest_of_key(key: str) -> bytes:
    """Return SHA-256 of an API key: the name of its tenant."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


async def _caller(request: Request) -> Caller:
    return request.state.caller


CurrentCaller = Annotated[Caller, Depends(_caller)]


class PromptCounts:
    """Has prompts counted on the engine thread, one piece of one of them between two of its turns.

    Args:
        most: how many may wait while one is counted.
    """

    def __init__(self, thread: EngineThread, most: int) -> None:
        self._thread, self._most = thread, most
        self._turn, self._under_way = asyncio.Lock(), 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Have a place among those that are counted. Raises CapacityError: as many wait as may."""
        if self._under_way > self._most:
            raise queue_is_full(self._most, self._most)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def call(self, command: Callable[[], T]) -> T:
        """Run a piece of the work in the thread, when it is this one's turn."""
        async with self._turn:
            return await self._thread.call(command)


class TurnMemory:
    """Keeps the conversation that a turn goes on from, and drops a result that nobody claims.

    A turn that is cut off leaves nothing behind.
    """

    def __init__(self, state: ServerState, work: ChatWork) -> None:
        self._state, self._work = state, work
        self._claimed = False

    def claim(self) -> ConversationState:
        """Return the conversation after the complete reply; the caller has to release it."""
        conversation = self._work.result
        assert conversation is not None
        self._claimed = True
        return conversation

    async def __aenter__(self) -> Self:
        start = self._work.start
        if start is not None:
            hold(self._state, start)
        return self

    async def __aexit__(self, *_: object) -> None:
        # The request was cancelled before this is called, and the commands of a thread keep their
        # order: its reply is complete by then, or never will be.
        thread, work, claimed = self._state.engine_thread, self._work, self._claimed

        def end() -> None:
            for conversation in (work.start, None if claimed else work.result):
                if conversation is not None:
                    thread.core.conversations.release(conversation)
            if work.start is not None and work.result is not None:
                thread.core.conversations.join_shared_budget(work.start, work)

        thread.post(end)


def hold(state: ServerState, conversation: ConversationState) -> None:
    """Add a reference to a conversation, on the engine thread."""
    thread = state.engine_thread
    thread.post(lambda: thread.core.conversations.hold(conversation))


def release(state: ServerState, conversation: ConversationState) -> None:
    """Take a reference away, on the engine thread; the last one frees the conversation."""
    thread = state.engine_thread
    thread.post(lambda: thread.core.conversations.release(conversation))
