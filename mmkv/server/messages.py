"""/v1/messages, and how many tokens its prompts have: chats in the form of Anthropic's API."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, StrictBool, Tag, ValidationError

from mmkv.calls.parser import CallEnd, CallPiece, CallStart, TextPiece, ThoughtPiece
from mmkv.calls.tools import MOST_TOOLS, parsed_arguments
from mmkv.server.chat import ChatCall
from mmkv.server.checked import checked, take_resume
from mmkv.server.engine_thread import Done
from mmkv.server.errors import ApiError, invalid_value, reworded, unsupported
from mmkv.server.reply import ReplyResponse, usage_json
from mmkv.server.responses import ResponseTable, StoredResponse
from mmkv.server.schema import (
    ECHO,
    IDLE,
    MOST_MESSAGES,
    ChatRequest,
    Count,
    Idle,
    OpenModel,
    Refused,
    ReplyRequest,
    SampledRequest,
    Short,
    refuse_fields,
    refused_but,
)
from mmkv.server.state import Caller, CurrentCaller, ServerState, TurnMemory

if TYPE_CHECKING:
    from mmkv.calls.parser import Event
    from mmkv.server.settings import Facts
    from mmkv.server.work import Usage


def _kind_among(*kinds: str) -> Discriminator:
    """Tell objects apart by their ``type``; those of another one are ``other``."""

    def kind_of(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return kind if kind in kinds else "other"

    return Discriminator(kind_of)


class Block(OpenModel):
    """A part of a message. What is read is kept anyway, whatever ``cache_control`` says."""

    cache_control: Any = None


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Any = None


class Base64Source(OpenModel):
    """A picture in the request itself."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^[\w.+-]{1,64}/[\w.+-]{1,64}$")]
    data: str


class UrlSource(OpenModel):
    """A picture by its address."""

    type: Literal["url"]
    url: str


class Other(OpenModel):
    """Documents, tools that run on Anthropic's servers, and what else there is; refused."""

    type: str


class ImageBlock(Block):
    """A picture."""

    refused = {"transformations": ({}, {"oversized_image": "downsize"})}

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("base64")]
        | Annotated[UrlSource, Tag("url")]
        | Annotated[Other, Tag("other")],
        _kind_among("base64", "url"),
    ]


class ToolUseBlock(Block):
    """A call in an earlier message of the assistant."""

    refused = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: Short
    name: Annotated[str, Field(max_length=128)]
    input: dict[str, Any]


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[Other, Tag("other")],
    _kind_among("text", "image"),
]


class ToolResultBlock(Block):
    """What a call has come to."""

    refused = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: Short
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: StrictBool | None = None


class ThinkingBlock(Block):
    """A thought in an earlier message of the assistant; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    """A thought that only Anthropic could read: none of this server's."""

    type: Literal["redacted_thinking"]
    data: str | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[Other, Tag("other")],
    _kind_among("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


class InputMessage(OpenModel):
    """One message."""

    refused = {"clear_at": ("never",), "output_config": ({},)}

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class ToolParam(OpenModel):
    """A function that may be called; its parts are looked at as those of a chat's tools."""

    refused = {"allowed_callers": (["direct"],), "defer_loading": (False,)}
    idle = {
        "eager_input_streaming": "arguments are sent as they are written",
        "input_examples": "templates show schemas alone",
    }

    type: str | None = None
    name: Any = None
    description: Any = None
    input_schema: Any = None
    strict: Any = None
    cache_control: Any = None


class ToolChoice(OpenModel):
    """Whether functions are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=128)] | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(OpenModel):
    """Whether the model thinks before it answers; ``omitted``: its thoughts are not shown."""

    idle = {"block_binding": "signatures are not checked"}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(OpenModel):
    """How the answer looks."""

    refused = {"task_budget": ()}
    idle = {"effort": IDLE["reasoning_effort"]}

    effort: Short | None = None
    format: dict[str, Any] | None = None


class Diagnostics(OpenModel):
    """``previous_message_id``: with which request this one is compared, by its answer."""

    previous_message_id: Short | None = None


class RequestMetadata(OpenModel):
    """``user_id``: in whose turn a request waits."""

    user_id: Short | None = None


# What a chat or a response takes, and this API does not have.
_OTHERS = (
    "input instructions previous_response_id max_output_tokens max_completion_tokens stop "
    "stop_token_ids response_format logprobs top_logprobs logit_bias parallel_tool_calls "
    "cache_salt generation_config"
).split()


class PromptRequest(ReplyRequest):
    """A prompt, of which the tokens are counted."""

    refused: ClassVar[Refused] = {
        **refused_but("thinking", "messages", "compaction"),
        **dict.fromkeys(_OTHERS, ()),
        "n": (1,),
    }
    idle: ClassVar[Idle] = {
        **IDLE,
        "compaction": "it is no part of what is counted",
        "cache_control": ECHO,
        **dict.fromkeys(("fallbacks", "fallback_credit_token"), "nothing is ever declined"),
    }

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as it was called before
    # What is read is kept, whatever it says.
    cache_control: Any = None
    context_management: Any = None


class MessagesRequest(PromptRequest, SampledRequest):
    """A request for a message.

    Attributes:
        thread: ``{"type": "create"}``: the conversation is kept, under the message's id;
            ``{"type": "continue", "previous_message_id": ...}``: it goes on from there.
        diagnostics: asks what prompt cache there was.
    """

    refused: ClassVar[Refused] = {
        name: values for name, values in PromptRequest.refused.items() if name != "thread"
    } | {"compaction": ()}
    idle: ClassVar[Idle] = {
        name: why
        for name, why in PromptRequest.idle.items()
        if name not in ("compaction", "metadata")
    }

    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: StrictBool | None = None
    metadata: RequestMetadata | None = None
    service_tier: Short | None = None
    thread: dict[str, Any] | None = None
    diagnostics: Diagnostics | None = None


# What a chat has under the same names.
_SAME = {*SampledRequest.model_fields, "max_tokens", "stream"}
# A line that a client writes for its own server, another one in each request.
_BILLING = "x-anthropic-billing-header:"
_FAILED = "Error: "
# Of a chat's fields.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class ChatForm:
    """A prompt as a chat: its messages, and where in the request each of their parts stood.

    Attributes:
        messages: as a chat has them.
        unread: what of the request has no effect, beside fields that are not known.

    Raises:
        ApiError: a block that cannot be read.
    """

    def __init__(self, asked: PromptRequest) -> None:
        self.messages: list[dict[str, Any]] = []
        self.unread: list[str] = []
        self._places: list[tuple[str, list[str]]] = []
        thinking = asked.thinking
        self._own_budget = (
            asked.thinking_budget is None
            and thinking is not None
            and thinking.budget_tokens is not None
        )
        self._take_system(asked.system)
        for index, message in enumerate(asked.messages):
            self._take(message, f"messages[{index}]")

    def _take_system(self, system: str | list[TextBlock] | None) -> None:
        texts = [system] if isinstance(system, str) else [one.text for one in system or ()]
        shown = [text for text in texts if text and not text.startswith(_BILLING)]
        if any(text.startswith(_BILLING) for text in texts):
            self.unread.append("system.x-anthropic-billing-header")
        if shown:
            self.messages.append({"role": "system", "content": "\n\n".join(shown)})
            self._places.append(("system", []))

    def _take(self, message: InputMessage, where: str) -> None:
        """Take a message; one with results of calls becomes several."""
        blocks = message.content
        if isinstance(blocks, str):
            self._begin(message.role, where)["content"] = blocks
            return
        made: dict[str, Any] | None = None
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            if isinstance(block, Other):
                raise unsupported(
                    place,
                    f"{place} is of type {block.type[:40]!r}, which is not supported; use text, "
                    "image, tool_use, tool_result or thinking",
                )
            if isinstance(block, ToolResultBlock):
                _require_role("user", message, block, place)
                self._take_result(block, place)
                made = None
                continue
            if made is None:
                made = self._begin(message.role, where) | {"content": []}
                self.messages[-1] = made
            if isinstance(block, (TextBlock, ImageBlock)):
                made["content"].append(_part(block, place))
                self._places[-1][1].append(place)
                continue
            _require_role("assistant", message, block, place)
            if isinstance(block, ToolUseBlock):
                own = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": own}
                made.setdefault("tool_calls", []).append(call)
            elif isinstance(block, ThinkingBlock) and block.thinking:
                before = [made["reasoning_content"]] if "reasoning_content" in made else []
                made["reasoning_content"] = "\n\n".join([*before, block.thinking])
        if not blocks:
            self._begin(message.role, where)["content"] = []

    def _begin(self, role: str, place: str) -> dict[str, Any]:
        made: dict[str, Any] = {"role": role, "content": ""}
        self.messages.append(made)
        self._places.append((place, []))
        return made

    def _take_result(self, block: ToolResultBlock, place: str) -> None:
        """Take a call's result as a message of the tool, and note where each part stood."""
        made = self._begin("tool", place) | {"tool_call_id": block.tool_use_id, "content": []}
        self.messages[-1], places = made, self._places[-1][1]
        if block.is_error:
            made["content"].append({"type": "text", "text": _FAILED})
            places.append(place)
        if isinstance(block.content, str):
            made["content"].append({"type": "text", "text": block.content})
            places.append(f"{place}.content")
            return
        for index, one in enumerate(block.content or ()):
            inner = f"{place}.content[{index}]"
            if isinstance(one, Other):
                what = f"{inner} is of type {one.type[:40]!r}; results hold text and image"
                raise unsupported(inner, what)
            made["content"].append(_part(one, inner))
            places.append(inner)

    def own_names(self, error: ApiError) -> ApiError:
        """Return an error with the fields of this API in place of the chat request's."""
        name = error.param or ""
        text, param = self._own(str(error)), self._own(_NAMES.get(name, name))
        if param != "messages" and param not in text:  # it is not shown by itself
            text = f"{param}: {text}"
        return ApiError(error.status, text, error.code, param or None, **error.extra)

    def _own(self, text: str) -> str:
        def place(found: re.Match[str]) -> str:
            index, part = int(found[1]), found[3]
            if not 0 <= index < len(self._places):
                return found[0]
            own, parts = self._places[index]
            if part is not None and int(part) < len(parts):
                return parts[int(part)]
            return own + (found[2] or "" if own.startswith("messages") else "")

        text = re.sub(r"\bmessages\[(-?\d+)\](\.content(?:\[(\d+)\])?)?", place, text)
        text = re.sub(r"\bresponse_format(\.json_schema)?\b", "output_config.format", text)
        if self._own_budget:
            text = re.sub(r"(?<![\w.])thinking_budget\b", "thinking.budget_tokens", text)
        return re.sub(r"\btool_call_id\b", "tool_use_id", text)


def _require_role(role: str, message: InputMessage, block: Any, place: str) -> None:
    if message.role != role:
        what = f"{place}: {block.type} stands in messages of the {role}, not of the {message.role}"
        raise invalid_value(place, what)


def _part(block: TextBlock | ImageBlock, place: str) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, Other):
        what = f"{place}.source: pictures are given by base64 or url, not {source.type[:40]!r}"
        raise unsupported(place, what)
    if isinstance(source, UrlSource):
        return {"type": "image_url", "image_url": {"url": source.url}}
    url = f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(asked: PromptRequest) -> dict[str, Any]:
    """Return the fields of a chat that say what may be called."""
    found: dict[str, Any] = {}
    if asked.tools is not None:
        found["tools"] = [_tool(one, f"tools[{at}]") for at, one in enumerate(asked.tools)]
    choice = asked.tool_choice
    if choice is None:
        return found
    if choice.type == "tool":
        if choice.name is None:
            what = "tool_choice.name is missing; name the tool that has to be called"
            raise invalid_value("tool_choice.name", what)
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        found["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use is not None:
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found


def _tool(given: ToolParam, where: str) -> dict[str, Any]:
    if given.type not in (None, "custom"):
        raise unsupported(
            where,
            f"{where} is of type {given.type[:40]!a}, which is Anthropic's own; give name, "
            "description and input_schema of a tool that you run",
        )
    if given.input_schema is None:
        what = f"{where}.input_schema is missing; give a JSON schema of type object"
        raise invalid_value(where, what)
    own = {"name": given.name, "description": given.description, "strict": given.strict}
    return {"type": "function", "function": own | {"parameters": given.input_schema}}


def _answer_format(asked: PromptRequest) -> dict[str, Any] | None:
    """Return the format of the answer as chats name it."""
    config = asked.output_config
    given = asked.output_format if config is None or config.format is None else config.format
    if given is None:
        return None
    if given.get("type") != "json_schema" or given.keys() - {"type", "schema"}:
        what = 'output_config.format is {"type": "json_schema", "schema": ...}'
        raise invalid_value("output_config.format", what)
    named = {"name": "answer", "schema": given.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": named}


def chat_request(asked: PromptRequest, form: ChatForm) -> ChatRequest:
    """Return the chat request that asks for the same reply. Raises ApiError."""
    same: dict[str, Any] = asked.model_dump(include=_SAME, exclude_unset=True)
    same |= _tools(asked) | {"messages": form.messages}
    if (answer := _answer_format(asked)) is not None:
        same["response_format"] = answer
    thinking, thinks = asked.thinking, asked.enable_thinking
    if thinking is not None and thinks is None and thinking.type != "adaptive":
        thinks = thinking.type == "enabled"
    if thinks is not None:
        same["enable_thinking"] = thinks
    if thinking is not None and thinking.budget_tokens is not None:
        same.setdefault("thinking_budget", thinking.budget_tokens)
    if isinstance(asked, MessagesRequest):
        if asked.stop_sequences is not None:
            same["stop"] = asked.stop_sequences
        if asked.metadata is not None:
            same["user"] = asked.metadata.user_id
    try:
        return ChatRequest.model_validate(same)
    except ValidationError as error:
        first = error.errors()[0]
        where, *inner = map(str, first["loc"])
        if where == "messages" and not inner:
            what = (
                f"messages: a chat has {len(form.messages):,} of these, results of calls counted "
                f"one by one, and may have {MOST_MESSAGES:,}; leave the oldest out, or sum them up"
            )
            raise invalid_value(where, what) from error
        where += f"[{inner[0]}]" if where == "messages" else ""
        raise invalid_value(where, f"{where}: {first['msg']}"[:500]) from error


def unread_of(asked: PromptRequest, form: ChatForm, facts: Facts) -> list[str]:
    """Return what of a request has no effect with this model, beside fields that are not known."""
    found = list(form.unread)
    thinking = asked.thinking
    if thinking is not None and thinking.type != "adaptive":
        never = thinking.type == "disabled" and facts.thoughts is None
        if "enable_thinking" not in facts.template_variables and not never:
            found.append("thinking.type")
        if thinking.budget_tokens is not None and facts.thoughts is None:
            found.append("thinking.budget_tokens")
    return found


_STOPS = {
    "eos": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "calls": "tool_use",
}


# Of fields that may be null, those that the API always shows; clients take no others as null.
_NOT_ENDED = dict.fromkeys(("stop_reason", "stop_sequence"))
# Who calls; the other values are for code that Anthropic's servers run.
_CALLER = {"type": "direct"}


class MessageBuilder:
    """Builds a message and its events while the reply grows.

    Args:
        shows_thoughts: whether the words of thoughts are shown.

    Attributes:
        content: its blocks that are complete. The input of a call that was cut off, or whose
            arguments are no object, is empty; the reply then does not stop for its calls, because
            a client would run that one without its arguments.
    """

    def __init__(self, shows_thoughts: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._shows_thoughts = shows_thoughts
        self._block: dict[str, Any] | None = None  # that grows
        self._pieces: list[str] = []
        self._ended = True  # whether the latest call has its end
        self._broken = False  # whether one of the calls cannot be run

    def take(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece of the reply."""
        for event in events:
            if isinstance(event, ThoughtPiece):
                yield from self._in("thinking", {"thinking": "", "signature": ""})
                shown = {"type": "thinking_delta", "thinking": event.text}
                yield from self._grown(event.text, shown if self._shows_thoughts else None)
            elif isinstance(event, TextPiece):
                yield from self._in("text", {"text": ""})
                yield from self._grown(event.text, {"type": "text_delta", "text": event.text})
            elif isinstance(event, CallStart):
                yield from self.close()
                self._ended = False
                empty = {"id": event.id, "name": event.name, "input": {}, "caller": _CALLER}
                yield from self._in("tool_use", empty)
            elif isinstance(event, CallPiece):
                given = {"type": "input_json_delta", "partial_json": event.text}
                yield from self._grown(event.text, given)
            elif isinstance(event, CallEnd):
                self._ended = True
                yield from self.close()

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the block that grows, if one does."""
        block, text = self._block, "".join(self._pieces)
        if block is None:
            return
        if block["type"] == "thinking":
            # Clients leave out thoughts without one when they send a message back.
            signed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            block |= {"thinking": text if self._shows_thoughts else "", "signature": signed}
            yield self._delta({"type": "signature_delta", "signature": signed})
        elif block["type"] == "text":
            block["text"] = text
        else:
            given = parsed_arguments(text) if self._ended else text
            if isinstance(given, dict):
                block["input"] = given
            else:
                self._broken = True
        self._block, self._pieces = None, []
        yield {"type": "content_block_stop", "index": len(self.content)}
        self.content.append(block)

    def stop(self, reason: str, text: str | None) -> dict[str, Any]:
        """Return why the reply has ended; ``text``: the stop sequence that was met."""
        if reason == "calls" and self._broken:
            reason = "eos" if text is None else "stop"
        met = text if reason == "stop" else None
        return _NOT_ENDED | {"stop_reason": _STOPS[reason], "stop_sequence": met}

    def _in(self, kind: str, empty: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Go on in the block that grows if it is of a kind; begin another one if not."""
        if self._block is not None and self._block["type"] == kind:
            return
        yield from self.close()
        self._block = {"type": kind, **empty}
        begun = {"type": "content_block_start", "index": len(self.content)}
        yield begun | {"content_block": dict(self._block)}

    def _grown(self, text: str, delta: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        self._pieces.append(text)
        if text and delta is not None:
            yield self._delta(delta)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}


class MessagesCall:
    """One request. Raises ApiError: what can be said before the engine is asked.

    Args:
        threads: where the conversations of threads are kept.

    Attributes:
        unread: what of it has no effect, beside fields that are not known.
    """

    def __init__(
        self, state: ServerState, threads: ResponseTable, asked: PromptRequest, caller: Caller
    ) -> None:
        refuse_fields(asked)
        self._form, self._threads, start = ChatForm(asked), threads, None
        thread = asked.thread if isinstance(asked, MessagesRequest) else None
        if thread is not None and (before := _continued(thread, asked)) is not None:
            start = threads.find(before, caller, "thread").conversation
        with reworded(self._form.own_names):
            made = chat_request(asked, self._form)
            request = checked(state, made, caller, start=start, keep=thread is not None)
        self._call = ChatCall(state, request, caller)
        self._form.messages = []
        self._told: dict[str, Any] = {}
        if asked.context_management is not None:
            self._told["context_management"] = {"applied_edits": []}
        diagnostics = getattr(asked, "diagnostics", None)
        if diagnostics is not None and diagnostics.previous_message_id is not None:
            self._told["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        self.unread = unread_of(asked, self._form, state.facts)
        shown = asked.thinking is None or asked.thinking.display != "omitted"
        self._builder = MessageBuilder(shown)
        self._id, self._model = f"msg_{secrets.token_hex(12)}", self._call.head.model

    async def count(self) -> dict[str, Any]:
        """Return how many tokens the prompt has."""
        with reworded(self._form.own_names):
            return {"input_tokens": await self._call.count_prompt()}

    async def whole(self) -> dict[str, Any]:
        """Return the message."""
        builder = self._builder
        ended: dict[str, Any] = {}
        async with self._turn() as turn:
            async for part in self._call.parts():
                if isinstance(part, Done):
                    self._keep(turn)
                    return self._message(builder.content, _usage(part.usage)) | ended
                list(builder.take(part.events))
                if part.finish_reason is not None:
                    list(builder.close())
                    ended = builder.stop(part.finish_reason, part.stop_text)
        raise AssertionError("a request ends with Done or an error")

    async def stream(self) -> AsyncGenerator[dict[str, Any] | str]:
        """Yield the events of a stream."""
        builder, begun = self._builder, False
        ended: dict[str, Any] = {}
        async with self._turn() as turn, contextlib.aclosing(self._call.parts()) as parts:
            async for part in parts:
                if isinstance(part, Done):
                    self._keep(turn)
                    yield {"type": "message_delta", "delta": ended, "usage": _usage(part.usage)}
                    yield {"type": "message_stop"}
                    return
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._message([], self._read())}
                    yield {"type": "ping"}
                for event in builder.take(part.events):
                    yield event
                if part.finish_reason is not None:
                    for event in builder.close():
                        yield event
                    ended = builder.stop(part.finish_reason, part.stop_text)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[TurnMemory]:
        """Have what the turn goes on from, and its errors in the words of this API."""
        with reworded(self._form.own_names):
            async with TurnMemory(self._call.state, self._call.work) as turn:
                yield turn

    def _keep(self, turn: TurnMemory) -> None:
        """Keep the conversation, under the message's id, if it is a thread's."""
        if self._call.work.keep:
            tenant = self._call.caller.tenant
            self._threads.keep(self._id, StoredResponse(tenant, turn.claim(), b"", b"", None))

    def _read(self) -> dict[str, Any]:
        counts = self._call.counts
        assert counts is not None
        return _tokens(counts.prompt_tokens, counts.resumed, 0)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, **_NOT_ENDED, "usage": usage} | self._told


def _tokens(prompt: int, resumed: int, reply: int, thoughts: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt - resumed,
        "cache_read_input_tokens": resumed,
        "cache_creation_input_tokens": 0,  # it is part of input_tokens
        "output_tokens": reply,
        "output_tokens_details": {"thinking_tokens": thoughts},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    own = usage_json(usage)["mmkv"]
    reply, thoughts = usage.completion_tokens, usage.thought_tokens
    return _tokens(usage.prompt_tokens, usage.resumed, reply, thoughts) | {"mmkv": own}


def _continued(thread: dict[str, Any], asked: PromptRequest) -> str | None:
    """Return the id of the message that a turn of a thread goes on from; None: it begins one.

    Raises:
        ApiError: it is neither, or names anew what the thread has; Anthropic's packages know the
            codes, and send the whole conversation again.
    """
    match thread:
        case {"type": "create", **others} if not others:
            return None
        case {"type": "continue", "previous_message_id": str(name), **others} if not others:
            for field in ("system", "tools"):
                if getattr(asked, field):
                    what = f"a thread keeps the {field} that it was created with; leave it out, or"
                    what += " create another thread"
                    raise ApiError(400, what, "thread_fingerprint_mismatch", field)
            return name
    what = 'thread is {"type": "create"} or {"type": "continue", "previous_message_id": ...}; send'
    what += " the whole conversation without it"
    raise ApiError(400, what, "thread_unsupported_request", "thread")


def add_messages(router: APIRouter, state: ServerState, threads: ResponseTable) -> None:
    """Add the routes to those that need a key.

    Args:
        threads: where the conversations of threads are kept.
    """

    @router.post("/messages", summary="Reply to a conversation (Anthropic's form)")
    async def reply(request: Request, body: MessagesRequest, who: CurrentCaller) -> Response:
        return answer(request, body, who, bool(body.stream))

    @router.post("/messages/count_tokens", summary="The tokens of such a prompt")
    async def count(request: Request, body: PromptRequest, who: CurrentCaller) -> Response:
        return answer(request, body, who, None)

    def answer(request: Request, body: PromptRequest, who: Caller, stream: bool | None) -> Response:
        take_resume(request, body)
        call = MessagesCall(state, threads, body, who)
        headers = state.headers_for(body, call.unread)
        body.messages = []  # their pictures stand in the call by now
        work: Callable[[], Any] = call.count
        if stream is not None:
            work = call.stream if stream else call.whole
        return ReplyResponse(work, bool(stream), state.settings.keep_alive, headers)
