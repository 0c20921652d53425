"""The requests of /v1/responses: what is understood, and what is refused by name."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from mmkv.server.errors import ApiError
from mmkv.server.schema import (
    MOST_MESSAGES,
    NO_TOOLS,
    UNSUPPORTED,
    CacheHint,
    ChatMessage,
    ChatRequest,
    Count,
    Effort,
    ImagePart,
    ImageUrl,
    Metadata,
    MmkvOptions,
    Number,
    OpenModel,
    OtherPart,
    RefusalPart,
    RepetitionPenalty,
    ReplyRequest,
    Short,
    TextPart,
    TopK,
    VideoPart,
    field_error,
    refuse_fields,
    refuse_stream_options,
    unsupported,
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


class InputMessage(OpenModel):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]
    id: Short | None = None
    status: Short | None = None
    phase: Short | None = None


class OtherItem(BaseModel):
    """Calls of tools, references and what else there is; refused."""

    model_config = ConfigDict(extra="allow")

    type: str


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(OpenModel):
    """How a model reasons; of no consequence here, where none does apart from its reply."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextOptions(OpenModel):
    """How the text looks."""

    format: dict[str, Any] | None = None
    verbosity: Short | None = None


class ResponseRequest(ReplyRequest):
    """A request for a response."""

    refused = (
        UNSUPPORTED
        | NO_TOOLS
        | {
            "background": (False,),
            **dict.fromkeys(("conversation", "prompt"), ()),
            # What a chat takes, and this API does not have.
            **dict.fromkeys(
                "messages max_tokens max_completion_tokens response_format logprobs stop "
                "stop_token_ids logit_bias cache_salt generation_config".split(),
                (),
            ),
            "n": (1,),
        }
    )

    model: str
    input: (
        str
        | Annotated[list[InputMessage | OtherItem], Field(min_length=1, max_length=MOST_MESSAGES)]
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    store: StrictBool | None = None
    stream: StrictBool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    metadata: Metadata | None = None
    text: TextOptions | None = None
    mmkv: MmkvOptions | None = None
    # Of no consequence here, or hints that are free to be followed. Nothing is ever truncated.
    truncation: Literal["auto", "disabled"] | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_retention: Short | None = None
    service_tier: Short | None = None
    reasoning: Reasoning | None = None
    stream_options: Any = None
    max_tool_calls: int | None = None
    # Refused unless they ask for what happens anyway.
    tool_choice: Any = None
    parallel_tool_calls: Any = None


def chat_request(asked: ResponseRequest) -> ChatRequest:
    """Return the chat request that asks for the same reply; instructions open it.

    Raises:
        ApiError: it asks for what this server cannot do.
    """
    refuse_stream_options(asked)
    refuse_fields(asked)
    for name in asked.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise unsupported("include", f"include: {name[:60]!r} is not supported")
    items = _items(asked)
    messages = [_message(item, f"input[{index}]") for index, item in enumerate(items)]
    if asked.instructions:
        messages.insert(0, ChatMessage(role="system", content=asked.instructions))
    logprobs = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    return ChatRequest(
        model=asked.model,
        messages=messages,
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logprobs=logprobs,
        top_logprobs=asked.top_logprobs if logprobs else None,
        response_format=_format(asked.text),
        user=asked.user,
        safety_identifier=asked.safety_identifier,
        mmkv=asked.mmkv,
        chat_template_kwargs=asked.template_values() or None,
    )


def with_own_field_names(error: ApiError, instructions: bool) -> ApiError:
    """Return the error with the names of this API's fields, in place of a chat request's.

    Args:
        instructions: whether they stand before the input as the first message.
    """

    def own(found: re.Match[str]) -> str:
        index = int(found[1])
        if index < 0:
            return f"input[{index}]"
        return f"input[{index - instructions}]" if index >= instructions else "instructions"

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


def _message(item: InputMessage | OtherItem, where: str) -> ChatMessage:
    if isinstance(item, OtherItem):
        if item.type == "message":
            raise field_error(InputMessage, item, where)
        raise unsupported(where, f"items of type {item.type[:40]!r} are not supported")
    if isinstance(item.content, str):
        return ChatMessage(role=item.role, content=item.content)
    parts: list[Any] = [_part(one, f"{where}.content[{at}]") for at, one in enumerate(item.content)]
    return ChatMessage(role=item.role, content=parts)


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


def _items(asked: ResponseRequest) -> list[InputMessage | OtherItem]:
    given = asked.input
    return [InputMessage(role="user", content=given)] if isinstance(given, str) else given


def input_items(asked: ResponseRequest, name: str) -> list[dict[str, Any]]:
    """Return the input as the API lists it.

    Args:
        name: of the response; the items' ids are made from it.
    """
    items = _items(asked)
    found = []
    for index, item in enumerate(items):
        assert isinstance(item, InputMessage)
        own = "output_text" if item.role == "assistant" else "input_text"
        parts: list[Any] = (
            [{"type": own, "text": item.content}]
            if isinstance(item.content, str)
            else [
                part.model_dump(exclude_none=True, exclude={"cache_control"})
                for part in item.content
            ]
        )
        for part in parts:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
            elif part["type"] == "input_image":
                part.setdefault("detail", "auto")
        found.append(
            {
                "id": item.id or f"msg_{name}_{index}",
                "type": "message",
                "role": item.role,
                "status": "completed",
                "content": parts,
            }
        )
    return found
