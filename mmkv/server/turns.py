"""A session and its turns: while a client waits, or in the background, for clients to follow."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from mmkv.calls.parser import ParsedReply
from mmkv.engine.errors import STOPS, SessionError
from mmkv.prompt.media import data_uri_content
from mmkv.prompt.video import FramesSeen
from mmkv.server import reply
from mmkv.server.chat import ChatCall
from mmkv.server.checked import checked
from mmkv.server.engine_thread import Done
from mmkv.server.errors import ApiError, api_error, invalid_value, unsupported
from mmkv.server.guard import keep_body, release_body
from mmkv.server.quota import media_type_of
from mmkv.server.state import Caller, ServerState, TurnMemory, release
from mmkv.server.work import Observing
from mmkv.turn import observed_text

if TYPE_CHECKING:
    from mmkv.engine.budget import Budget
    from mmkv.server.conversations import ConversationState
    from mmkv.server.prompts import Message
    from mmkv.server.quota import MediaStore
    from mmkv.server.schema import ChatRequest, ObserveRequest
    from mmkv.server.store import SessionRecord
    from mmkv.server.work import Standing, Usage


log = logging.getLogger("mmkv.server")
Forget = Callable[[str, set[str]], Awaitable[None]]
Commit = Callable[..., Awaitable[None]]  # mmkv.server.sessions.SessionTable.commit_turn
_EVERY = 0.5  # seconds between two looks at what the memory of a turn holds


@dataclass
class ServerSession:
    """One session.

    Attributes:
        owner: the key or address that opened it, see :class:`mmkv.server.state.Caller`.
        conversation: its state after the latest turn; None before the first, or while it lies in
            the shared folder alone.
        record: what the shared folder holds on it; None without such a folder.
        busy: whether a turn is under way; background: one that goes on without a client, or the
            latest, if it failed; closed_for_room: whether it was closed here so that
            another could be opened; used: grows with each use; unbound: whether its budget binds
            nothing.
        frames: what is remembered of observed frames where that is more than the conversation
            says, which forks share: after frames that were all skipped.
    """

    id: str
    tenant: str
    budget: Budget
    metadata: dict[str, str]
    conversation: ConversationState | None = None
    busy: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    turns: int = 0
    background: BackgroundTurn | None = None
    record: SessionRecord | None = None
    closed_for_room: bool = False
    used: int = 0
    unbound: bool = False
    frames: FramesSeen | None = None
    owner: str = ""

    @property
    def on_disk(self) -> bool:
        """Whether its latest state is in the shared folder."""
        record = self.record
        return record is not None and bool(
            record.version and (self.conversation is None or record.memory)
        )

    @property
    def messages(self) -> int:
        """Count the messages that it holds."""
        if self.conversation is not None:
            return len(self.conversation.info.messages)
        return 0 if self.record is None else self.record.messages

    @property
    def state(self) -> Literal["empty", "memory", "file"]:
        """Where its memory lies."""
        if self.conversation is None:
            return "empty" if self.record is None or self.record.memory is None else "file"
        return "memory" if self.conversation.resident else "file"

    def shown(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return {
            "id": self.id,
            "object": "session",
            "created": self.created,
            "metadata": self.metadata,
            "budget": "none" if self.unbound else self.budget.describe(),
            "turns": self.turns,
            "messages": self.messages,
            "busy": self.busy,
            "state": self.state,
            "failed": self.background is not None and self.background.failed,
        }


class SessionTurn:
    """One turn of a session: a chat completion that sends only the new messages.

    Args:
        commit: writes the session's new state to the shared folder, where there is one.
        require_idle: raises ApiError where another turn is under way, or the session is gone.

    Attributes:
        background: whether it goes on when its client leaves.
    """

    def __init__(
        self,
        state: ServerState,
        commit: Commit,
        require_idle: Callable[[ServerSession], None],
        session: ServerSession,
        request: ChatRequest,
        caller: Caller,
    ) -> None:
        own = request.mmkv
        if own is not None and (own.budget is not None or own.resume is not None):
            raise invalid_value(
                "mmkv",
                "a session has its budget and goes on from itself; leave out mmkv.budget, "
                "mmkv.resume and X-Mmkv-Resume",
            )
        if (request.n or 1) != 1:
            raise invalid_value("n", "a turn of a session has one reply")
        self.background = own is not None and bool(own.background)
        if own is not None and self.background:
            if not request.stream:
                raise unsupported(
                    "mmkv.background", "mmkv.background is for a stream; set stream: true"
                )
            own.background = None
        self.state, self.session, self.caller = state, session, caller
        self._commit, self._require_idle = commit, require_idle
        start, budget = session.conversation, session.budget
        made = checked(state, request, caller, start=start, keep=True, budget=budget)
        self.call = ChatCall(state, made, caller)
        self.call.work.snapshots = self.background
        if session.frames is not None:
            self.call.work.frames = session.frames

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        async with self.begun() as turn:
            answer = await self.call.whole()
            await self.commit(turn)
            # Who reads this may send the next turn.
            return answer | {"session": self.session.shown() | {"busy": False}}

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        async with self.begun() as turn, contextlib.aclosing(self.call.stream()) as events:
            committed = False
            async for event in events:
                if self.call.done and not committed:
                    await self.commit(turn)
                    committed = True
                yield event

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator[TurnMemory]:
        """Claim the session for this turn. Raises ApiError: it is not idle, or went on."""
        session = self.session
        self._require_idle(session)  # others may have come first
        if session.conversation is not self.call.work.start:
            raise ApiError(409, "the session went on meanwhile; send the turn again", "conflict")
        session.busy = True
        try:
            async with TurnMemory(self.state, self.call.work) as turn:
                yield turn
        finally:
            session.busy = False

    async def commit(self, turn: TurnMemory) -> None:
        """Move the session to its state after this turn, even if the client leaves now."""
        standing = asyncio.ensure_future(self._replace_memory(turn))
        try:
            await asyncio.shield(standing)
        except asyncio.CancelledError:
            while not standing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({standing})
            if not standing.cancelled():
                standing.exception()  # nobody is left to be told
            raise

    async def _replace_memory(self, turn: TurnMemory) -> None:
        session, before, conversation = (
            self.session,
            self.session.conversation,
            self.call.work.result,
        )
        assert conversation is not None
        turns = session.turns + (self.call.work.observes is None)
        await self._commit(session, conversation, turns)
        session.conversation = turn.claim()
        session.turns, session.frames = turns, None
        if before is not None:
            release(self.state, before)


class SessionObservation(SessionTurn):
    """Something that a session observes: its memory grows, and no reply follows.

    The arguments are those of :class:`SessionTurn`.
    """

    def __init__(
        self,
        state: ServerState,
        commit: Commit,
        require_idle: Callable[[ServerSession], None],
        session: ServerSession,
        asked: ObserveRequest,
        caller: Caller,
    ) -> None:
        request = asked.as_chat(state.settings.name)
        if asked.system is not None and session.conversation is not None:
            what = "a system message opens a conversation; open a new session for it"
            raise invalid_value("system", what)
        super().__init__(state, commit, require_idle, session, request, caller)
        work, processor = self.call.work, state.engine_thread.core.engine.processor
        last = work.messages[-1]
        if not last.media and not any(map(str.strip, last.texts)):
            raise invalid_value(None, "content is blank; give words or pictures")
        if any(part.kind == "video" for part in last.media):
            what = "a video is observed by its frames; send them as image_url"
            raise invalid_value("content", what)
        frames = asked.at is not None and processor.watches
        if frames and any(part.options for part in last.media):
            what = "frames have the model's size; leave out sizes of pictures, or at"
            raise invalid_value("content", what)
        parts = []
        for number, part in enumerate(last.parts):
            if part.kind == "text":
                time = asked.at if not number else None  # else it stands behind the frames
                part = replace(part, text=observed_text(processor, part.text, time))
            parts.append(part)
        work.messages[-1] = replace(last, parts=tuple(parts), open=True)
        work.observes = Observing(asked.at, asked.fps, asked.skip_similar, frames)
        self._pictures = len(last.media)

    async def whole(self) -> dict[str, Any]:
        """Return what was read."""
        async with self.begun() as turn:
            session, work = self.session, self.call.work
            before = work.frames
            async for _ in self.call.events():
                pass
            seen, tokens = work.frames, 0
            if self.call.all_skipped:
                assert session.conversation is not None
                await self._commit(session, session.conversation, session.turns, seen)
                session.frames = seen
            else:
                await self.commit(turn)
                assert self.call.counts is not None
                tokens = self.call.counts.prefilled
            assert session.conversation is not None
            info = session.conversation.info
            skipped = seen.skipped - before.skipped
            return {
                "id": session.id,
                "object": "session.observation",
                "tokens": tokens,
                "frames": self._pictures - skipped,
                "skipped": skipped,
                "frames_skipped": seen.skipped,
                "next_position": info.next_position,
                "bytes": session.conversation.bytes,
                "notes": info.notes,
                "session": session.shown() | {"busy": False},
            }


class BackgroundTurn:
    """A turn that goes on when its client leaves. Any number of clients may follow it.

    A client that comes late, or reads slowly, gets several pieces of the reply as one.

    Attributes:
        asked: its messages, for clients; digests: of their pictures and videos.
        over: whether it has ended; error: why it failed, None where it did not; told: whether a
            client knows.
    """

    def __init__(
        self, turn: SessionTurn, media: MediaStore, forget: Forget, asked: list[Message]
    ) -> None:
        self._turn, self._media, self._forget = turn, media, forget
        self.asked = [one.shown_with_media() for one in asked]
        self.digests = tuple(part.digest or "" for one in asked for part in one.media)
        turn.call.kept_media = self._kept_url
        self.over = False
        self.error: ApiError | None = None
        self.told = False
        self._task: asyncio.Task[None] | None = None
        self._reply, self._reason = ParsedReply(), ""
        self._usage: Usage | None = None
        self._standing: Standing | None = None
        self._looked = 0.0
        self._first: float | None = None  # when the reply began
        self._seconds = 0.0  # since then, at its latest piece
        self._news = asyncio.Event()
        self._stopping = False

    @classmethod
    async def start(cls, turn: SessionTurn, media: MediaStore, forget: Forget) -> Self:
        """Begin one.

        Args:
            forget: removes what no session of a tenant names any more.

        Raises:
            MediaError: a data: URL cannot be read.
        """
        start = turn.call.work.start
        messages = turn.call.work.messages[0 if start is None else len(start.info.messages) :]
        urls = {part: part.url for one in messages for part in one.media if part.digest is None}
        inside = {part: url for part, url in urls.items() if url[:5].lower() == "data:"}
        digest = turn.state.media.digest
        digests = await asyncio.to_thread(lambda: {p: digest(u) for p, u in inside.items()})
        made = cls(turn, media, forget, [one.with_digests(digests) for one in messages])
        contents = {digests[part]: url for part, url in inside.items()}
        keep_body()
        made._task = task = asyncio.ensure_future(made._run(contents))
        turn.state.background.add(task)
        task.add_done_callback(turn.state.background.discard)
        return made

    async def stop(self) -> bool:
        """End the reply where it stands; whether one has begun, otherwise the turn is taken back.

        What has come of it is kept, as if it had reached its most tokens.
        """
        taken, kept, task = self._turn.call.taken, False, self._task
        assert task is not None
        if taken is not None and taken.ticket is not None:
            try:
                kept = await taken.on_engine(lambda job: job.stop())
            except ApiError:  # the reply has just ended; the session still has to take it
                kept = True
        if not kept and not self.over:
            self._stopping = True
            task.cancel()
        await asyncio.wait({task})
        return self.error is None

    async def follow(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream, from the first piece of the reply on."""
        while not (self.over or self._begun):
            await self._news.wait()
        self._raise_error()
        async for event in self.follow_at_once():
            yield event

    async def follow_at_once(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream, at once: the first has the messages of the turn."""
        head = self._turn.call.head
        opening = {"role": "assistant", "content": ""}
        yield reply.chunk(head, 0, opening) | {"mmkv": {"asked": self.asked}}
        thought = text = 0
        sent: list[int] = []  # characters of each call's arguments
        standing: Standing | None = None
        while True:
            news, over, parsed = self._news, self.over, self._reply
            if parsed.thought is not None and len(parsed.thought) > thought:
                piece, thought = parsed.thought[thought:], len(parsed.thought)
                yield reply.chunk(head, 0, {"reasoning_content": piece})
            if len(parsed.text) > text:
                piece, text = parsed.text[text:], len(parsed.text)
                yield reply.chunk(head, 0, {"content": piece})
            for index, call in enumerate(parsed.calls):
                known = index < len(sent)
                if not known:
                    sent.append(0)
                if known and len(call.arguments) == sent[index]:
                    continue
                own = {"name": call.name} if not known else {}
                piece, sent[index] = call.arguments[sent[index] :], len(call.arguments)
                whole = {"index": index, "function": own | {"arguments": piece}}
                if not known:
                    whole |= {"id": call.id, "type": "function"}
                yield reply.chunk(head, 0, {"tool_calls": [whole]})
            if self._standing is not None and self._standing is not standing:
                standing = self._standing
                shown = {"memory": standing.shown(), "tokens": standing.tokens}
                shown["seconds"] = round(self._seconds, 3)
                yield head.fields("chat.completion.chunk") | {"choices": [], "mmkv": shown}
            if over:
                break
            await news.wait()
        self._raise_error()
        assert self._usage is not None
        yield reply.chunk(head, 0, {}, self._reason)
        seconds = {"mmkv": {"seconds": round(self._seconds, 3)}}
        yield reply.usage_chunk(head, self._usage) | seconds
        yield "[DONE]"

    def _raise_error(self) -> None:
        """Raise what the turn failed with; its pictures stay until the session's next turn."""
        if self.error is not None:
            self.told = True
            raise self.error

    @property
    def failed(self) -> bool:
        """Whether it failed and no client knows yet."""
        return self.error is not None and not self.told

    @property
    def _begun(self) -> bool:
        return bool(self._reply.text or self._reply.thought or self._reply.calls)

    def _tell(self) -> None:
        """Wake all who follow."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _run(self, contents: dict[str, str]) -> None:
        turn, session = self._turn, self._turn.session
        try:
            async with turn.begun() as memory:
                earlier, session.background = session.background, self
                if earlier is not None:  # it failed
                    await self._forget(turn.caller.tenant, set(earlier.digests))
                await asyncio.to_thread(self._keep_media, contents)
                contents.clear()
                async with contextlib.aclosing(turn.call.parts()) as parts:
                    async for part in parts:
                        if isinstance(part, Done):
                            await turn.commit(memory)
                            self._usage = part.usage
                            continue
                        now = time.monotonic()
                        self._first = now if self._first is None else self._first
                        self._seconds = now - self._first
                        self._reply.add(part.events)
                        self._reason = part.finish_reason or ""
                        self._tell()
                        await self._look()
            session.background = None
        except asyncio.CancelledError:
            what = "the turn was stopped before its reply began; it is taken back"
            closing = ApiError(503, "the server is shutting down; try another one", "shutdown")
            self.error = ApiError(409, what, "turn_stopped") if self._stopping else closing
            if self._stopping:  # the session is as if there had been none
                session.background = None
                await self._forget(turn.caller.tenant, set(self.digests))
        except STOPS:
            raise
        except BaseException as error:
            self.error = api_error(error)
        finally:
            release_body()
            self.over = True
            self._tell()

    def _kept_url(self, digest: str) -> str | None:
        """Return the data: URL of a picture or video that is kept for clients."""
        content = self._media.get(self._turn.caller.tenant, digest)
        if content is None:
            return None
        return f"data:{media_type_of(content)};base64,{base64.b64encode(content).decode()}"

    def _keep_media(self, contents: dict[str, str]) -> None:
        """Keep the pictures and videos for clients."""
        for digest, url in contents.items():
            try:
                caller = self._turn.caller
                self._media.put(caller.name, caller.tenant, digest, data_uri_content(url))
            except (OSError, SessionError) as error:
                why = getattr(error, "strerror", None) or error
                log.warning("a picture is not kept for the page: %s", why)

    async def _look(self) -> None:
        """Ask now and then what the memory holds."""
        taken, now = self._turn.call.taken, time.monotonic()
        if taken is None or now - self._looked < _EVERY:
            return
        self._looked = now
        with contextlib.suppress(ApiError):  # the request is over
            self._standing = await taken.on_engine(lambda job: job.standing()) or self._standing
            self._tell()
