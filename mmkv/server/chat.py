"""/v1/chat/completions, from a request's media to its reply; /v1/completions, a chat without them.

Media are hashed to find the memory of a conversation again, and decoded only when they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from pydantic import Field
from starlette.requests import Request as HttpRequest

from mmkv.calls.parser import CallEnd, CallStart, ParsedReply
from mmkv.server import reply
from mmkv.server.checked import checked, source, take_resume
from mmkv.server.engine_thread import Admitted, Delta, Done, Failed, Request
from mmkv.server.errors import invalid_value, unsupported
from mmkv.server.guard import release_body
from mmkv.server.media.limits import Allowance, MediaError
from mmkv.server.media.resolver import MediaResolver, Medium
from mmkv.server.prompts import Message, Part, digest_of
from mmkv.server.reply import LogprobRows, ReplyHead, ReplyResponse, usage_json
from mmkv.server.schema import (
    NO_TOOLS,
    ChatRequest,
    OpenAIRequest,
    Refused,
    refuse_fields,
    refuse_stream_options,
    refused_but,
)
from mmkv.turn import frames_clip

if TYPE_CHECKING:
    from mmkv.calls.parser import Event, ReplyParser
    from mmkv.prompt.processing import Processor
    from mmkv.server.checked import CheckedChat
    from mmkv.server.job import ChatJob
    from mmkv.server.reply import Spelled
    from mmkv.server.state import Caller, ServerState
    from mmkv.server.work import RequestCounts


# Returns the data: URL of a picture or video that was sent before, by its digest, if it is kept.
Kept = Callable[[str], str | None]


class RequestMedia:
    """Finds the pictures and videos of one request.

    The digest of a data: URL is taken from its content, so a picture that need not be read again is
    not decoded. Others have to be fetched and decoded, once. All share one allowance of memory.

    Args:
        frames: whether its pictures are frames of videos.
    """

    def __init__(self, resolver: MediaResolver, frames: bool = False) -> None:
        self._resolver, self._frames = resolver, frames
        self._allowance = Allowance(resolver.limits, resolver.room)
        self._contents: dict[Part, Any] = {}

    async def named(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the digests of their media. Raises MediaError.

        Media of messages that a conversation already holds have theirs. Waits while the media of
        other requests take all the room.
        """
        await self._resolver.room.enter()
        parts = [part for one in messages for part in one.media if part.digest is None]
        async with self._resolver.texts:
            inside, digest = [one for one in parts if _inside(one)], self._resolver.digest
            digests = await asyncio.to_thread(lambda: {one: digest(one.url) for one in inside})
        far = [one for one in parts if not _inside(one)]
        for part, medium in zip(far, await self._resolve(far), strict=True):
            digests[part] = medium.digest
            self._contents[part] = medium.content

        def named(part: Part) -> Part:
            return dataclasses.replace(part, digest=digests[part]) if part in digests else part

        return [
            dataclasses.replace(one, parts=tuple(map(named, one.parts)))
            if any(part.digest is None for part in one.media)
            else one  # one of a conversation that is held already
            for one in messages
        ]

    async def _resolve(self, parts: Sequence[Part]) -> list[Medium]:
        if not parts:
            return []
        sources = [dataclasses.replace(source(part), frame=self._frames) for part in parts]
        return await self._resolver.resolve(sources, self._allowance)

    async def contents(self, messages: Sequence[Message]) -> list[Any]:
        """Return the pictures and videos of some messages, decoded. Raises MediaError."""
        parts = [dataclasses.replace(p, digest=None) for one in messages for p in one.media]
        wanted = [part for part in dict.fromkeys(parts) if part not in self._contents]
        for part, medium in zip(wanted, await self._resolve(wanted), strict=True):
            self._contents[part] = medium.content
        return [self._contents[part] for part in parts]

    async def contents_at_hand(
        self, messages: Sequence[Message], kept: Kept | None
    ) -> list[Any] | None:
        """Do as :meth:`contents`; None where some cannot be had.

        Args:
            kept: where those are looked for that were not sent again.
        """
        parts = [part for one in messages for part in one.media]
        lacking = [part for part in parts if not part.url]
        if lacking and kept is not None:
            urls = await asyncio.to_thread(lambda: {one: kept(one.digest or "") for one in lacking})
            parts = [dataclasses.replace(one, url=urls.get(one) or one.url) for one in parts]
        if not all(part.url for part in parts):
            return None
        try:
            return await self.contents([Message("user", tuple(parts))])
        except MediaError:
            return None

    def let_go(self) -> None:
        """Give the memory back: the engine has read them, or the request is over."""
        self._contents.clear()
        self._allowance.let_go()


def _inside(part: Part) -> bool:
    return part.url[:5].lower() == "data:"


@dataclasses.dataclass
class ReplyPart:
    """What is new of one reply: thoughts, texts and calls, in order.

    Attributes:
        index: of the reply; spelled: its tokens that are new, where log probabilities are wanted.
        finish_reason: why it has ended (``calls``: with calls); None: it goes on.
        stop_text: the stop string that ended it, if one did.
    """

    index: int
    events: list[Event]
    spelled: list[Spelled]
    finish_reason: str | None = None
    stop_text: str | None = None


class ChatCall:
    """One request to the chat endpoint.

    Args:
        checked: what it asks for.
        caller: in whose queue it waits; a request that names a ``user`` waits in that user's.

    Attributes:
        work: what the engine is asked for; done: whether it has been answered.
        all_skipped: whether all frames that were to be observed are like those before them.
        keeps_body: whether the body is needed to the end, and not freed early.
        counts: of the prompt's tokens; right once a reply has begun.
        taken: the request, once the engine thread has it.
        kept_media: where media are looked for that a client does not send again; None: nowhere.
    """

    def __init__(self, state: ServerState, checked: CheckedChat, caller: Caller) -> None:
        self.state, self.caller = state, caller
        self.request, self.work = checked.request, checked.work
        self.choices, self._most_tokens = checked.work.choices, checked.most_tokens
        self.done = self.keeps_body = self.all_skipped = False
        self.counts: RequestCounts | None = None
        self.taken: Request | None = None
        self.kept_media: Kept | None = None
        name = state.settings.name
        self.head = ReplyHead(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), name)

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        replies = [ParsedReply() for _ in range(self.choices)]
        reasons = [""] * self.choices
        rows = [LogprobRows() for _ in replies] if self.request.logprobs else None
        async for part in self.parts():
            if isinstance(part, Done):
                return reply.completion(self.head, replies, reasons, rows, part.usage)
            replies[part.index].add(part.events)
            if rows is not None:
                rows[part.index].add(reply.logprobs(part.spelled)["content"])
            reasons[part.index] = part.finish_reason or ""
        raise AssertionError("a request ends with Done or an error")

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        begun: set[int] = set()
        options = self.request.stream_options
        self.head.with_usage = options is not None and bool(options.include_usage)
        async with contextlib.aclosing(self.parts()) as parts:
            async for part in parts:
                if isinstance(part, Done):
                    if self.head.with_usage:
                        yield reply.usage_chunk(self.head, part.usage)
                    yield "[DONE]"
                    return
                if part.index not in begun:
                    begun.add(part.index)
                    opening = {"role": "assistant", "content": "", "refusal": None}
                    yield reply.chunk(self.head, part.index, opening)
                spelled = part.spelled if self.request.logprobs else None
                deltas = [reply.delta(event) for event in part.events]
                deltas = [one for one in deltas if one] or ([{"content": ""}] if spelled else [])
                for delta in deltas:
                    yield reply.chunk(self.head, part.index, delta, None, spelled)
                    spelled = [] if spelled is not None else None
                if part.finish_reason is not None:
                    yield reply.chunk(self.head, part.index, {}, part.finish_reason)

    async def parts(self) -> AsyncGenerator[ReplyPart | Done]:
        """Run the request as :meth:`events` does; yield its replies' thoughts, texts and calls."""
        parsers: dict[int, ReplyParser] = {}
        whole: dict[int, bool] = {}  # of those that call, whether their latest call is
        async with contextlib.aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Done):
                    yield event
                    return
                at, reason = event.index, event.finish_reason
                if at not in parsers:
                    assert self.taken is not None
                    parsers[at] = self.taken.parser(at)
                found = parsers[at].push(event.text)
                if reason is not None:
                    cut = reason != "eos" or event.stop_text is not None
                    found += parsers[at].finish(cut, event.stop_text)
                for one in found:
                    if isinstance(one, (CallStart, CallEnd)):
                        whole[at] = isinstance(one, CallEnd)
                if reason in ("eos", "stop") and whole.get(at):  # others could not be run
                    reason = "calls"
                yield ReplyPart(at, found, event.spelled, reason, event.stop_text)

    async def events(self) -> AsyncGenerator[Delta | Done]:
        """Run the request; closing the iterator cancels it."""
        asked = self.request
        if not self.keeps_body:  # the work has what it named; its objects may be very many
            asked.messages = []
        user = f"{self.caller.name} {asked.user or asked.safety_identifier or ''}"
        with self.state.count_request(self.caller):
            await self._count_texts()
            request = await self.state.engine_thread.submit(self.work, user)
            self.taken = request
            media: RequestMedia | None = None
            try:
                while True:
                    event = await request.events.get()
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Admitted):
                        observes = self.work.observes
                        frames = observes is not None and observes.frames
                        media = RequestMedia(self.state.media, frames)
                        await self._supply_media(request, media)
                        if self.all_skipped:
                            return
                        continue
                    if media is not None:  # they were read before the first token
                        media.let_go()
                    self.done, self.counts = isinstance(event, Done), request.counts
                    if isinstance(event, Done):
                        notes = self.work.logit_settings.rules.notes
                        event.usage.notes = [*event.usage.notes, *notes]
                    yield event
                    if self.done:
                        return
            finally:
                if not self.done:
                    request.cancel()
                if media is not None:
                    media.let_go()

    async def _supply_media(self, request: Request, media: RequestMedia) -> None:
        """Fetch and decode the media that the engine wants, now that their pages are committed."""
        named, before = await media.named(self.work.messages), None
        if self.work.observes is not None:
            contents = await self._observed(named, media)
            if self.all_skipped:
                return
            await request.on_engine(lambda job: job.resume_from(named))
        else:
            held = await request.on_engine(lambda job: job.resume_from(named))
            contents = await media.contents(named[held:])
            control = self.state.engine_thread.core.engine.loss_control
            if control is not None and control.action == "reread":
                before = await media.contents_at_hand(named[:held], self.kept_media)

        def supply(job: ChatJob) -> None:
            job.supply_media(contents, before)
            job.work.messages = [one.without_urls() for one in job.work.messages]

        await request.on_engine(supply)
        if not self.keeps_body:  # a reply may take long, and pictures are most of a body
            release_body()

    async def _observed(self, messages: list[Message], media: RequestMedia) -> list[Any]:
        """Return the media that are observed; the last of ``messages`` becomes what is read."""
        work, processor = self.work, self.state.engine_thread.core.engine.processor
        assert work.observes is not None
        asked, last = work.observes, messages[-1]
        contents = await media.contents([last])

        def compose() -> tuple[list[Part], list[Any]]:
            pictures = [one for one, p in zip(contents, last.media, strict=True) if _is_image(p)]
            kept, work.frames = work.frames.chosen(pictures, asked.skip_similar)
            left, parts, found, number = iter(contents), [], [], 0
            for part in last.parts:
                content = None if part.kind == "text" else next(left)
                if part.kind == "image":
                    number += 1
                    if number - 1 not in kept:
                        continue
                parts.append(part)
                found += [] if part.kind == "text" else [content]
            if not asked.frames:
                return parts, found
            assert asked.at is not None
            return _as_videos(processor, parts, found, kept, asked.at, asked.fps)

        parts, found = await asyncio.to_thread(compose)
        self.all_skipped = not parts
        messages[-1] = dataclasses.replace(last, parts=tuple(parts))
        return found

    async def _count_texts(self) -> None:
        """Refuse what has too many tokens, beside the engine thread. Raises ContextError."""
        texts = [one.texts for one in self.work.messages]
        bounds = self.state.facts.context_bounds
        await bounds.count([*texts, [self.work.begun.text]], self._most_tokens)

    async def count_prompt(self) -> int:
        """Count the tokens that the prompt would have, with those of its pictures; none is read."""
        thread, work, counts = self.state.engine_thread, self.work, self.state.counts
        media = RequestMedia(self.state.media)
        with self.state.count_request(self.caller), counts.place():
            await self._count_texts()
            try:
                named = await media.named(work.messages)
                job = await counts.call(lambda: thread.core.job(work, lambda: None))
                held = await counts.call(lambda: job.begin_count(named))
                contents = await media.contents(named[held:])
                await counts.call(lambda: job.supply_media(contents))
                while await counts.call(job.count_segment):  # others get a turn in between
                    pass
                return job.counts.prompt_tokens
            finally:
                media.let_go()


def _is_image(part: Part) -> bool:
    return part.kind == "image"


def _as_videos(
    processor: Processor,
    parts: list[Part],
    media: list[Any],
    kept: Sequence[int],
    at: float,
    fps: float | None,
) -> tuple[list[Part], list[Any]]:
    """Return parts and media with each run of pictures as the frames of one video.

    Args:
        kept: the number of each picture among those that were sent.
    """
    left, numbers = iter(media), iter(kept)
    made: list[Part] = []
    clips = []
    for is_picture, run in itertools.groupby(parts, _is_image):
        if not is_picture:
            made += run
            continue
        pictures = list(run)
        frames, own = [next(left) for _ in pictures], [next(numbers) for _ in pictures]
        clips.append(frames_clip(processor, frames, own, at, fps))
        digest = digest_of([[one.digest for one in pictures], own, at, fps])
        made.append(Part("video", digest=digest))
    return made, clips


class CompletionRequest(OpenAIRequest):
    """A request to continue a text."""

    refused: ClassVar[Refused] = {
        **refused_but("prompt"),
        **NO_TOOLS,
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "thinking_budget"), ()),
    }

    prompt: str | Annotated[list[Any], Field(max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def text(self) -> str:
        """Return the text that is continued. Raises ApiError: it is no text."""
        (text,) = [self.prompt] if isinstance(self.prompt, str) else (self.prompt or [None])
        if not isinstance(text, str):
            raise unsupported("prompt", "prompt is one text here; token ids are not supported")
        if not text:
            raise invalid_value("prompt", "prompt is empty; send a text")
        return text

    def as_chat(self) -> ChatRequest:
        """Return the chat request that draws the same reply to the text as a message."""
        refuse_stream_options(self)
        same = self.model_dump(
            exclude={"prompt", "logprobs", "stream_options", *(self.model_extra or {})},
            exclude_unset=True,
        )
        if self.logprobs is not None:
            same |= {"logprobs": True, "top_logprobs": self.logprobs}
        said = {"role": "user", "content": self.text()}
        return ChatRequest.model_validate({**same, "messages": [said]})


class CompletionCall:
    """One request. Raises ApiError: what can be said before the engine is asked."""

    def __init__(self, state: ServerState, asked: CompletionRequest, caller: Caller) -> None:
        refuse_fields(asked)
        options = asked.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._scored = asked.logprobs is not None
        request = checked(state, asked.as_chat(), caller, raw=True)
        self._call = ChatCall(state, request, caller)
        self._call.head.id = f"cmpl-{secrets.token_hex(12)}"

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        texts = [""] * self._call.choices
        reasons: list[str | None] = [None] * len(texts)
        spelled: list[list[Spelled]] = [[] for _ in texts]
        async for event in self._call.events():
            if isinstance(event, Done):
                choices = [
                    self._choice(index, text, 0, spelled[index], reasons[index])
                    for index, text in enumerate(texts)
                ]
                return self._completion(choices) | {"usage": usage_json(event.usage)}
            texts[event.index] += event.text
            spelled[event.index] += event.spelled or ()
            reasons[event.index] = event.finish_reason
        raise AssertionError("a request ends with Done or an error")

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        sent = [0] * self._call.choices
        usage = {"usage": None} if self._with_usage else {}
        async with contextlib.aclosing(self._call.events()) as events:
            async for event in events:
                if isinstance(event, Done):
                    if self._with_usage:
                        yield self._completion([]) | {"usage": usage_json(event.usage)}
                    yield "[DONE]"
                    return
                start, spelled = sent[event.index], event.spelled or []
                sent[event.index] += sum(len(one.text) for one in spelled)
                choice = self._choice(event.index, event.text, start, spelled, event.finish_reason)
                yield self._completion([choice]) | usage

    def _completion(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._call.head.fields("text_completion") | {"choices": choices}

    def _choice(
        self, index: int, text: str, start: int, spelled: list[Spelled], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": _logprobs(spelled, start) if self._scored else None,
            "finish_reason": None if reason is None else reply.FINISH[reason],
        }


def _logprobs(spelled: list[Spelled], start: int) -> dict[str, Any]:
    """Return the log probabilities of some tokens, of which the first begins at ``start``."""
    offsets, best = [], []
    for one in spelled:
        offsets.append(start)
        start += len(one.text)
        shown: dict[str, float] = {}
        for other in (*one.top, one):  # parts of characters may look alike
            shown.setdefault(other.text, other.logprob)
        best.append(shown)
    return {
        "tokens": [one.text for one in spelled],
        "token_logprobs": [one.logprob for one in spelled],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def add_chats(router: APIRouter, state: ServerState) -> None:
    """Add the routes to those that need a key."""

    @router.post("/chat/completions", summary="Reply to a conversation")
    async def chat(request: HttpRequest, body: ChatRequest) -> Response:
        headers = state.headers_for(body)
        take_resume(request, body)
        caller = request.state.caller
        call = ChatCall(state, checked(state, body, caller), caller)
        work: Any = call.stream if body.stream else call.whole
        return ReplyResponse(work, bool(body.stream), state.settings.keep_alive, headers)

    @router.post("/completions", summary="Continue a text")
    async def complete(request: HttpRequest, body: CompletionRequest) -> Response:
        headers = state.headers_for(body)
        call = CompletionCall(state, body, request.state.caller)
        work: Any = call.stream if body.stream else call.whole
        return ReplyResponse(work, bool(body.stream), state.settings.keep_alive, headers)
