"""POST /v1/chat/completions, from the request's media to its reply.

Media are hashed to find the memory of a conversation again, and decoded only when they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from mmkv.calls.parser import CallEnd, CallStart, ParsedReply
from mmkv.calls.tools import tool_use
from mmkv.engine.errors import MmkvError
from mmkv.grammar import reply_rules, require_tools
from mmkv.prompt.video import FramesSeen
from mmkv.reply import LogitSettings
from mmkv.sampling import Sampling, Settled
from mmkv.server import reply
from mmkv.server.engine_thread import Admitted, Delta, Done, Failed, Request
from mmkv.server.errors import ApiError
from mmkv.server.guard import release_body
from mmkv.server.media.limits import Allowance
from mmkv.server.media.resolver import MediaResolver, Medium, Source
from mmkv.server.prompts import Message, Part, digest_of, thought_apart
from mmkv.server.reply import LogprobRows, ReplyHead
from mmkv.server.schema import (
    ChatRequest,
    MmkvOptions,
    budget_of,
    conversation,
    refuse_unsupported,
    reply_prefix,
    take_generation_config,
    unsupported,
)
from mmkv.server.work import ChatWork
from mmkv.thoughts import marks_if_first
from mmkv.turn import frames_clip

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from mmkv.calls.parser import Event, ReplyParser
    from mmkv.calls.tools import ToolUse
    from mmkv.engine.budget import Budget
    from mmkv.prompt.processing import Processor
    from mmkv.server.conversations import ConversationState
    from mmkv.server.job import ChatJob
    from mmkv.server.messages import PromptRequest
    from mmkv.server.reply import Spelled
    from mmkv.server.responses_schema import ResponseRequest
    from mmkv.server.settings import Facts, ServerSettings
    from mmkv.server.state import Caller, ServerState
    from mmkv.server.work import RequestCounts


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

    def let_go(self) -> None:
        """Give the memory back: the engine has read them, or the request is over."""
        self._contents.clear()
        self._allowance.let_go()


def source(part: Part) -> Source:
    """Return a part as :mod:`mmkv.server.media` takes it."""
    assert part.kind != "text"
    return Source(part.kind, part.url, dict(part.options))


def _inside(part: Part) -> bool:
    return part.url[:5].lower() == "data:"


MOST_STOPS = 16


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
        caller: whose memory it may resume, and in whose queue it waits; a request that names a
            ``user`` waits in that user's.
        start: the conversation that it continues; the request's messages come after its own.
        keep: whether the conversation after the reply is kept.
        budget: of the reply's session; None: the request's, or else the server's.
        raw: whether the texts are read without a chat template, and from the beginning.

    Attributes:
        work: what the engine is asked for; done: whether it has been answered.
        all_skipped: whether all frames that were to be observed are like those before them.
        keeps_body: whether the body is needed to the end, and not freed early.
        counts: of the prompt's tokens; right once a reply has begun.
        taken: the request, once the engine thread has it.

    Raises:
        ApiError: what can be checked without the engine.
    """

    def __init__(
        self,
        state: ServerState,
        request: ChatRequest,
        caller: Caller,
        start: ConversationState | None = None,
        keep: bool = False,
        budget: Budget | None = None,
        raw: bool = False,
    ) -> None:
        facts, settings = state.facts, state.settings
        refuse_unsupported(request)
        take_generation_config(request, facts.sampling)
        if request.model != settings.name:
            raise ApiError(
                404,
                f"the model {request.model[:100]!r} is not served here; ask for {settings.name!r}",
                "model_not_found",
                "model",
            )
        _require_same(request, facts)
        self.state, self.request, self.caller = state, request, caller
        earlier = () if start is None else start.info.messages
        messages = conversation(request.messages, facts.sees, facts.watches, earlier)
        messages, begun = reply_prefix(request, messages)
        if (marks := facts.thoughts) is not None and not raw:
            messages = [thought_apart(message, marks) for message in messages]
        sources = [source(part) for message in messages for part in message.media]
        if sources:
            state.media.check(sources)
        own = budget_of(request.mmkv)
        refuse_budget(facts, own is not None, "mmkv.budget")
        refuse_if_shared(facts, (request.n or 1) > 1, "n")
        budget = own or budget
        resume = None if request.mmkv is None else request.mmkv.resume
        base_key = None
        if start is not None:
            if budget not in (None, start.budget) or resume == "never":
                raise ApiError(
                    400,
                    f"the memory that is gone on from has a budget of {start.budget.describe()} "
                    "and is resumed; leave out mmkv.budget, mmkv.resume and X-Mmkv-Resume",
                    "invalid_value",
                    "mmkv",
                )
            messages, base_key = [*earlier, *messages], start.info.base_key
            budget = start.budget
        self._most_tokens = facts.most_tokens(budget or facts.budget)
        lengths = [sum(map(len, one.texts)) for one in messages]
        facts.context_bounds.require_possible([*lengths, len(begun.text)], self._most_tokens)
        chosen = (budget or facts.budget).describe()
        self._most_scored = settings.bounds.scored
        self.choices = request.n or 1
        if self.choices > settings.max_choices:
            raise ApiError(400, f"n is at most {settings.max_choices} here", "invalid_value", "n")
        self.done = self.keeps_body = self.all_skipped = False
        self.counts: RequestCounts | None = None
        self.taken: Request | None = None
        use = _tool_use(request, facts, () if start is None else start.info.tools)
        given = request.template_values()
        if request.thought_limit == 0:  # where a template can leave the thought out
            given.setdefault("enable_thinking", False)
        values = {name: given[name] for name in sorted(facts.template_variables & given.keys())}
        tools = [] if use is None else use.for_template()
        told = [one for one in (values, tools) if one]
        if start is not None and tools != list(start.info.tools):
            base_key = digest_of([start.info.base_key, tools])
        memory = [facts.base_key, chosen, caller.tenant, request.cache_salt]
        self.work = ChatWork(
            messages,
            base_key or digest_of([*memory, *told]),
            _sampling(request, settings, facts),
            _logit_settings(request, facts, use),
            self.choices,
            budget,
            "never" if raw else resume or "auto",
            asked=resume is not None,
            weight=state.weights.get(caller.tenant, 1.0),
            start=start,
            frames=FramesSeen() if start is None else start.info.frames,
            keep=keep,
            rewrites=(request.mmkv and request.mmkv.rewrites) or "reread",
            template_values=values,
            tools=tools,
            thoughts=None if raw else facts.thoughts,
            raw=raw,
            begun=begun,
        )
        rules = self.work.logit_settings.rules
        must = use is not None and use.choice == "required"
        limit = self.work.sampling.thinking_budget
        if limit is not None and marks_if_first(facts.thoughts, begun.text) is None:
            what = "counts a thought from its beginning, and the assistant's last message has begun"
            raise ApiError(
                400,
                f"thinking_budget {what} the reply behind it; leave one of them out",
                "invalid_value",
                "thinking_budget",
            )
        if begun.text and (rules.answer is not None or must):
            name = "tool_choice" if must else "response_format"
            raise unsupported(
                name,
                f"{name} is the form of a whole reply, and the assistant's last message has begun "
                "this one; leave one of them out",
            )
        if not request.stream:
            self.require_few_scored()
        self.head = ReplyHead(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), settings.name)

    def require_few_scored(self) -> None:
        """Refuse more log probabilities than an answer may hold. Raises ApiError."""
        top = self.work.logit_settings.top_logprobs
        if top is None:
            return
        scored = self.choices * self.work.sampling.max_new_tokens * (1 + top)
        most = self._most_scored
        if scored > most:
            raise ApiError(
                400,
                f"the answer may have {scored:,} log probabilities (n * max_tokens * (1 + "
                f"top_logprobs)), the limit is {most:,}; lower one of them, or ask for a "
                "stream of a chat",
                "too_many_logprobs",
                "top_logprobs",
            )

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
                request.cancel()
                if media is not None:
                    media.let_go()

    async def _supply_media(self, request: Request, media: RequestMedia) -> None:
        """Fetch and decode the media that the engine wants, now that their pages are committed."""
        named = await media.named(self.work.messages)
        if self.work.observes is not None:
            contents = await self._observed(named, media)
            if self.all_skipped:
                return
            await request.on_engine(lambda job: job.resume_from(named))
        else:
            held = await request.on_engine(lambda job: job.resume_from(named))
            contents = await media.contents(named[held:])

        def supply(job: ChatJob) -> None:
            job.supply_media(contents)
            job.work.messages = [one.without_urls() for one in job.work.messages]

        await request.on_engine(supply)
        if not self.keeps_body:  # a reply may take long, and pictures are most of a body
            release_body()

    async def _observed(self, messages: list[Message], media: RequestMedia) -> list[Any]:
        """Return the media that are observed; the last of ``messages`` becomes what is read."""
        work, core = self.work, self.state.engine_thread.core
        assert work.observes is not None and core is not None
        asked, last, processor = work.observes, messages[-1], core.engine.processor
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
                job = await counts.call(lambda: thread.new_job(work))
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


def refuse_if_shared(facts: Facts, given: bool, field: str) -> None:
    """Refuse a setting per request where all sessions share one budget. Raises ApiError."""
    if facts.shared and given:
        raise ApiError(
            400, "all sessions of this server share one budget; leave this out", "shared", field
        )


def refuse_budget(facts: Facts, given: bool, field: str) -> None:
    """Refuse a budget where all sessions share one, or where none is used. Raises ApiError."""
    refuse_if_shared(facts, given, field)
    if facts.unbound and given:
        what = f"policy {facts.policy!r} evicts nothing, so that {field} would bind nothing"
        raise unsupported(field, f"{what}; leave it out, or ask another server")


def _require_same(request: ChatRequest, facts: Facts) -> None:
    """Refuse what a server cannot change from request to request. Raises ApiError."""
    options = request.mmkv
    if options is not None and options.background:
        raise unsupported(
            "mmkv.background", "mmkv.background is for streamed turns of a session; leave it out"
        )
    for name in ("policy", "lookahead") if options is not None else ():
        wanted, there = getattr(options, name), getattr(facts, name)
        if wanted is not None and wanted != there:
            raise unsupported(
                f"mmkv.{name}", f"this server runs with {name} {there}; start another for {wanted}"
            )


def _sampling(request: ChatRequest, settings: ServerSettings, facts: Facts) -> Settled:
    most = request.max_completion_tokens or request.max_tokens or settings.max_tokens
    if most is None:
        most = min(facts.sampling.max_new_tokens, facts.context)
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MOST_STOPS:
        raise ApiError(400, f"there are at most {MOST_STOPS} stop texts", "invalid_value", "stop")
    if most > facts.context:
        raise ApiError(
            400,
            f"max_tokens is {most:,}, the model's context has {facts.context:,} positions",
            "context_length_exceeded",
            "max_tokens",
        )
    try:
        return Sampling(
            max_new_tokens=most,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=None if request.top_k is None else max(request.top_k, 0),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=None if request.seed is None else request.seed % 2**63,
            stop=stop,
            thinking_budget=request.thought_limit if facts.thoughts else None,
        ).settled(facts.sampling)
    except MmkvError as error:
        raise ApiError(400, str(error), "invalid_value") from error


def _tool_use(
    request: ChatRequest, facts: Facts, before: Sequence[dict[str, Any]]
) -> ToolUse | None:
    """Return what may be called.

    Args:
        before: the functions of the conversation that is gone on from, which hold where the request
            names none.
    """
    try:
        tools = before if request.tools is None else request.tools
        use = tool_use(tools, request.tool_choice, request.parallel_tool_calls)
        return None if use is None else require_tools(facts.call_format, use)
    except MmkvError as error:
        raise ApiError(400, str(error), "invalid_value", "tools") from error


def _logit_settings(request: ChatRequest, facts: Facts, use: ToolUse | None) -> LogitSettings:
    bias = {}
    for text, value in (request.logit_bias or {}).items():
        # Python refuses to read numbers of very many digits.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
        if number is None or number >= facts.vocabulary:
            raise ApiError(
                400,
                f"logit_bias names {text[:20]!r}; token ids are below {facts.vocabulary}",
                "invalid_value",
                "logit_bias",
            )
        bias[number] = value
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", "invalid_value", "top_logprobs")
    top = (request.top_logprobs or 0) if request.logprobs else None
    try:
        rules = reply_rules(request.response_format, facts.call_format, use)
    except MmkvError as error:
        raise ApiError(400, str(error), "invalid_value", "response_format") from error
    stop_tokens = frozenset(request.stop_token_ids or ())
    if any(token >= facts.vocabulary for token in stop_tokens):
        raise ApiError(
            400,
            f"stop_token_ids names {max(stop_tokens)}; token ids are below {facts.vocabulary}",
            "invalid_value",
            "stop_token_ids",
        )
    return LogitSettings(top, bias, rules, stop_tokens)


def take_resume(
    request: HTTPConnection, body: ChatRequest | ResponseRequest | PromptRequest
) -> None:
    """Take ``mmkv.resume`` from the header X-Mmkv-Resume if it is not set. Raises ApiError."""
    given = request.headers.get("x-mmkv-resume")
    if given is None:
        return
    if given not in ("auto", "never", "required"):
        raise ApiError(
            400, "X-Mmkv-Resume is auto, never or required", "invalid_value", "X-Mmkv-Resume"
        )
    body.mmkv = body.mmkv or MmkvOptions()
    body.mmkv.resume = body.mmkv.resume or given  # type: ignore[assignment]
