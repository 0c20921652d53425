"""The requests of /v1/responses: what is understood, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, TypeAdapter

from mmkv.calls.tools import MOST_TOOLS
from mmkv.server.errors import ApiError, invalid_value, unsupported
from mmkv.server.schema import (
    ECHO,
    IDLE,
    MOST_MESSAGES,
    CacheHint,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    Count,
    Effort,
    Idle,
    ImagePart,
    ImageUrl,
    Metadata,
    OpenModel,
    OtherPart,
    PromptCacheOptions,
    RefusalPart,
    Refused,
    SampledRequest,
    Short,
    StrictModel,
    TextPart,
    VideoPart,
    field_error,
    refuse_fields,
    refuse_stream_options,
    refused_but,
)

_MESSAGE = re.compile(r"\bmessages\[(-?\d+)\]")
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # of which there is none


class InputText(CacheHint):
    """A text of the user, or of an earlier reply."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class InputImage(CacheHint):
    """A picture. ``detail`` makes no difference: pictures are read at the model's size."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None


class InputVideo(CacheHint):
    """A video, as Open Responses has it."""

    type: Literal["input_video"]
    video_url: str


InputPart = InputText | RefusalPart | InputImage | InputVideo | OtherPart


class KnownItem(OpenModel):
    """One item of the input."""

    refused: ClassVar[Refused] = {
        "caller": ({"type": "direct"},),
        **dict.fromkeys(("agent", "namespace"), ()),
        "async": (False,),
    }
    idle: ClassVar[Idle] = dict.fromkeys(("id", "status", "phase"), ECHO)


class MessageItem(KnownItem):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]
    id: Short | None = None
    status: Short | None = None
    phase: Short | None = None


class CallItem(KnownItem):
    """A call of a function, in an earlier reply."""

    type: Literal["function_call"]
    call_id: Short
    name: Annotated[str, Field(max_length=128)]
    arguments: str
    id: Short | None = None
    status: Short | None = None


class ResultItem(KnownItem):
    """What a function returned."""

    idle = {**KnownItem.idle, "name": ECHO}

    type: Literal["function_call_output"]
    call_id: Short
    output: str | Annotated[list[InputPart], Field(fail_fast=True)]
    id: Short | None = None
    status: Short | None = None


class ThoughtText(OpenModel):
    """A thought's text."""

    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(KnownItem):
    """A thought, in an earlier reply. What it has without text is not read."""

    idle = {**KnownItem.idle, "summary": ECHO, "encrypted_content": "only who wrote it can read it"}

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    summary: Any = None
    encrypted_content: str | None = None
    id: Short | None = None
    status: Short | None = None


class ReferenceItem(StrictModel):
    """An item of a stored response, its input or its output, by its id."""

    type: Literal["item_reference"] | None = None
    id: Short


class OtherItem(BaseModel):
    """Calls of other tools, and what else there is; refused."""

    model_config = ConfigDict(extra="allow")

    type: str


# Left to right: the first that takes an item ends the search.
InputItem = Annotated[
    MessageItem | CallItem | ResultItem | ThoughtItem | ReferenceItem | OtherItem,
    Field(union_mode="left_to_right"),
]


_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
Summary = Literal["auto", "concise", "detailed"]


class Reasoning(OpenModel):
    """How a model reasons; of no consequence here, where none does apart from its reply.

    Which of its earlier thoughts it sees again is not: that is the template's to say.
    """

    refused = {"context": ("auto",)}
    idle = {"mode": IDLE["reasoning_effort"]}

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ImageOptions(OpenModel):
    """How pictures are read: at the model's size."""

    refused = {"context_compression": ("auto", "disabled")}


class TextOptions(OpenModel):
    """How the text looks."""

    idle = {"verbosity": IDLE["verbosity"]}

    format: dict[str, Any] | None = None
    verbosity: Short | None = None


class ResponseRequest(SampledRequest):
    """A request for a response."""

    refused = {
        **refused_but("input", "instructions", "previous_response_id", "store"),
        # What a chat takes, and this API does not have.
        **dict.fromkeys(
            "max_tokens max_completion_tokens response_format logprobs stop "
            "stop_token_ids logit_bias cache_salt generation_config".split(),
            (),
        ),
        "n": (1,),
    }
    idle: ClassVar[Idle] = {name: why for name, why in IDLE.items() if name != "metadata"} | {
        "truncation": "what is too long is refused, and not cut",
        "reasoning": "thoughts are part of the reply",
        "max_tool_calls": "of OpenAI's own tools, of which there are none",
    }

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: StrictBool | None = None
    stream: StrictBool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    metadata: Metadata | None = None
    text: TextOptions | None = None
    # Of no consequence here, or hints that are free to be followed. Nothing is ever truncated.
    truncation: Literal["auto", "disabled"] | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Short | None = None
    image: ImageOptions | None = None
    service_tier: Short | None = None
    reasoning: Reasoning | None = None
    stream_options: Any = None
    max_tool_calls: int | None = None
    tools: Annotated[list[Any], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None


# What a chat has under the same names.
_SAME = {*SampledRequest.model_fields, "user", "safety_identifier", "tools", "parallel_tool_calls"}


def chat_request(asked: ResponseRequest, goes_on: bool) -> tuple[ChatRequest, list[int | None]]:
    """Return the chat request that asks for the same reply; instructions open it.

    Args:
        goes_on: whether it goes on from an earlier response. Without tools of its own it may call
            none then: those that its conversation names stay part of what was read.

    Returns:
        it, and for each message the item that begins it; None for the instructions.

    Raises:
        ApiError: it asks for what this server cannot do.
    """
    refuse_stream_options(asked)
    refuse_fields(asked)
    for name in asked.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise unsupported("include", f"include: {name[:60]!r} is not supported")
    messages, origins = _messages(_items(asked))
    if messages[-1].role == "assistant":
        raise invalid_value("input[-1].role", "the last message has to be the user's")
    if asked.instructions:
        messages.insert(0, ChatMessage(role="system", content=asked.instructions))
        origins.insert(0, None)
    logprobs = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    made = ChatRequest(
        **asked.model_dump(include=_SAME, exclude_unset=True),
        messages=messages,
        max_tokens=asked.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=asked.top_logprobs if logprobs else None,
        response_format=_format(asked.text),
        tool_choice="none" if goes_on and asked.tools is None else asked.tool_choice,
    )
    return made, origins


def with_own_field_names(error: ApiError, origins: Sequence[int | None]) -> ApiError:
    """Return the error with the names of this API's fields, in place of a chat request's.

    Args:
        origins: for each message the item that begins it; None for the instructions.
    """

    def own(found: re.Match[str]) -> str:
        index = int(found[1])
        if not 0 <= index < len(origins):
            return f"input[{index}]"
        item = origins[index]
        return "instructions" if item is None else f"input[{item}]"

    def renamed(text: str) -> str:
        text = re.sub(r"\bresponse_format(\.json_schema)?\b", "text.format", text)
        text = re.sub(r"\bmax_tokens\b", "max_output_tokens", text)
        return _MESSAGE.sub(own, text)

    made = ApiError(error.status, renamed(str(error)), error.code, error.param, **error.extra)
    if error.param is not None:
        made.param = _NAMES.get(error.param, renamed(error.param))
    return made


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """Return the format of the text as chat requests name it."""
    given = None if text is None else text.format
    if given is None or given.get("type") != "json_schema":
        return given
    inside = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inside}


def _messages(items: Sequence[InputItem]) -> tuple[list[ChatMessage], list[int | None]]:
    """Return the messages of a chat: a thought, a text and calls in a row are one reply.

    Returns:
        they, and for each the item that begins it.
    """
    made: list[ChatMessage] = []
    origins: list[int | None] = []
    open_reply = False  # whether the latest message is a reply that calls may be added to
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if isinstance(item, (CallItem, ThoughtItem)) or _is_reply(item):
            last = made[-1] if open_reply else None
            if last is None or not _joins(item, last):
                last = ChatMessage(role="assistant")
                made.append(last)
                origins.append(index)
            _add_to_reply(last, item, where)
            open_reply = True
            continue
        open_reply = False
        origins.append(index)
        if isinstance(item, ResultItem):
            content = _content(item.output, f"{where}.output")
            made.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, MessageItem):
            content = _content(item.content, f"{where}.content")
            made.append(ChatMessage(role=item.role, content=content))
        elif (kind := item.type or "") in _ITEMS:
            raise field_error(_ITEMS[kind], item, where)
        else:
            raise unsupported(where, f"items of type {kind[:40]!r} are not supported")
    return made, origins


def item_of(given: Any) -> InputItem:
    """Return an item that is stored as JSON."""
    return _ITEM.validate_python(given)


def _is_reply(item: InputItem) -> bool:
    return isinstance(item, MessageItem) and item.role == "assistant"


def _joins(item: InputItem, reply: ChatMessage) -> bool:
    """Whether an item goes on with a reply: calls follow its text, which follows its thought."""
    if isinstance(item, CallItem):
        return True
    begun = reply.content is not None or bool(reply.tool_calls)
    return not begun and not (isinstance(item, ThoughtItem) and reply.reasoning_content)


def _add_to_reply(reply: ChatMessage, item: InputItem, where: str) -> None:
    if isinstance(item, CallItem):
        function = CalledFunction(name=item.name, arguments=item.arguments)
        called = CalledTool(id=item.call_id, type="function", function=function)
        reply.tool_calls = [*(reply.tool_calls or ()), called]
    elif isinstance(item, ThoughtItem):
        reply.reasoning_content = "".join(one.text for one in item.content or ()) or None
    elif isinstance(item, MessageItem):
        reply.content = _content(item.content, f"{where}.content")


def _content(given: str | Sequence[InputPart], where: str) -> Any:
    if isinstance(given, str):
        return given
    return [_part(one, f"{where}[{at}]") for at, one in enumerate(given)]


_ITEMS: dict[str, type[BaseModel]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ThoughtItem,
}
_PARTS: dict[str, type[BaseModel]] = {
    "input_text": InputText,
    "output_text": InputText,
    "text": InputText,
    "refusal": RefusalPart,
    "input_image": InputImage,
    "input_video": InputVideo,
}


def _part(part: InputPart, where: str) -> TextPart | RefusalPart | ImagePart | VideoPart:
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    if isinstance(part, InputImage):
        if part.image_url is None:
            raise unsupported(where, "pictures are given by image_url; file_id is not supported")
        return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
    if isinstance(part, InputVideo):
        return VideoPart(type="video_url", video_url=part.video_url)
    if isinstance(part, RefusalPart):
        return part
    if part.type in _PARTS:
        raise field_error(_PARTS[part.type], part, where)
    raise unsupported(
        where, f"a part of type {part.type[:40]!r} is not supported; use input_text or input_image"
    )


def _items(asked: ResponseRequest) -> Sequence[InputItem]:
    given = asked.input
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def input_items(asked: ResponseRequest, name: str) -> list[dict[str, Any]]:
    """Return the input as the API lists it.

    Args:
        name: of the response; the items' ids are made from it.
    """
    return [_listed(item, f"{name}_{index}") for index, item in enumerate(_items(asked))]


def _listed(item: InputItem, name: str) -> dict[str, Any]:
    """Return an item as the API lists it; ``name``: the end of its id."""
    if isinstance(item, MessageItem):
        own = "output_text" if item.role == "assistant" else "input_text"
        head = {"id": item.id or f"msg_{name}", "type": "message", "role": item.role}
        return head | {"status": "completed", "content": _listed_parts(item.content, own)}
    assert isinstance(item, (CallItem, ResultItem, ThoughtItem))
    kinds = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    made: dict[str, Any] = {"id": f"{kinds[item.type]}_{name}", "status": "completed"}
    made |= item.model_dump(exclude_none=True)
    if isinstance(item, ResultItem) and not isinstance(item.output, str):
        made["output"] = _listed_parts(item.output, "input_text")
    return {"summary": []} | made if item.type == "reasoning" else made


def _listed_parts(content: str | Sequence[InputPart], own: str) -> list[Any]:
    """Return a content as the API lists it; ``own``: what a bare text is."""
    if isinstance(content, str):
        parts: list[Any] = [{"type": own, "text": content}]
    else:
        parts = [one.model_dump(exclude_none=True, exclude={"cache_control"}) for one in content]
    for part in parts:
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
        elif part["type"] == "input_image":
            part.setdefault("detail", "auto")
    return parts
