"""The requests of /v1/chat/completions: what is understood, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from mmkv.calls.tools import MOST_TOOLS, ToolCall, arguments_text
from mmkv.engine.budget import Budget
from mmkv.engine.errors import MmkvError
from mmkv.server.errors import ApiError, invalid_value, unsupported
from mmkv.server.prompts import Begun, Message, Part

if TYPE_CHECKING:
    from mmkv.sampling import Settled


Number = Annotated[float, Field(allow_inf_nan=False)]
# Bounded, so that no error repeats thousands of digits.
Count = Annotated[int, Field(ge=1, lt=2**63)]
# llama.cpp and LM Studio say -1 for no limit of the request's own.
Limit = Annotated[Count | None, BeforeValidator(lambda given: None if given == -1 else given)]
# 0 and -1 switch it off.
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
# OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
Short = Annotated[str, Field(max_length=512)]
# llama.cpp and Ollama have another name for it.
RepetitionPenalty = Annotated[
    Annotated[Number, Field(gt=0, le=100)] | None,
    Field(validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")),
]
# Texts that a template may write as they are: none can stand for a special token.
TemplateValues = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        StrictBool | StrictInt | Number | Annotated[str, Field(pattern=r"^[\w .-]{0,64}$")] | None,
    ],
    Field(max_length=16),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StrictModel(BaseModel):
    """An object without fields beyond those that are named."""

    model_config = ConfigDict(extra="forbid")


# Why a field has no effect that clients send back as answers had it; nobody has to be told.
ECHO = "an answer's own"
Refused = Mapping[str, tuple[Any, ...]]
Idle = Mapping[str, str]


class OpenModel(BaseModel):
    """An object that clients give fields of their own.

    Each field that the API's own packages know is one of three: it is done, as the class has it and
    none of these tables; it is refused; or it has no effect. A field that says where a conversation
    is, or what a reply is of, is never of the third kind. Fields that nobody here knows have no
    effect (:func:`unread_fields`).

    Attributes:
        refused: fields that are not done, with the values that ask for what happens anyway.
        idle: fields without effect, and why that is so.
    """

    refused: ClassVar[Refused] = {}
    idle: ClassVar[Idle] = {}

    model_config = ConfigDict(extra="allow")


class CacheHint(StrictModel):
    """A part that may carry a cache hint, which has no effect here."""

    cache_control: Any = None


class HintedPart(CacheHint):
    """A part that may carry more of no effect: what clients keep of a stream, names, sources."""

    id: Any = None
    index: Any = None
    uuid: Any = None
    annotations: Any = None
    citations: Any = None


class TextPart(HintedPart):
    """A text."""

    type: Literal["text"]
    text: str


class RefusalPart(HintedPart):
    """A refusal of an earlier reply; read as text."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(StrictModel):
    """Where a picture is: data:, http(s):, or file: where the server allows it.

    Its other fields are :class:`mmkv.prompt.part_settings.MediaSettings`'; the file says its own
    ``format``.
    """

    url: str
    format: str | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    resized_height: Count | None = None
    resized_width: Count | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(HintedPart):
    """A picture. ``detail`` makes no difference: pictures are read at the model's size."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


class VideoUrl(StrictModel):
    """Where a video is, which of its frames are taken, and their size; see ImageUrl."""

    url: str
    fps: Annotated[Number, Field(gt=0)] | None = None
    num_frames: Count | None = None
    nframes: Count | None = None
    min_frames: Count | None = None
    max_frames: Count | None = None
    video_start: Annotated[Number, Field(ge=0)] | None = None
    video_end: Annotated[Number, Field(ge=0)] | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    total_pixels: Count | None = None
    resized_height: Count | None = None
    resized_width: Count | None = None


class VideoPart(HintedPart):
    """A video."""

    type: Literal["video_url"]
    video_url: VideoUrl | str


class OtherPart(BaseModel):
    """Audio, files and what else there is; refused, but for thoughts of the assistant."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def thought(self) -> str | None:
        """Return the text of a thought, as LangChain's histories have it."""
        text = getattr(self, self.type, None) if self.type in ("thinking", "reasoning") else None
        return text if isinstance(text, str) else None


# Left to right: the first that takes a part ends the search.
ContentPart = Annotated[
    TextPart | RefusalPart | ImagePart | VideoPart | OtherPart, Field(union_mode="left_to_right")
]
# Of very many parts, the first that is wrong is enough.
Content = str | Annotated[list[ContentPart], Field(fail_fast=True)]


class CalledFunction(OpenModel):
    """A function, and its arguments as JSON text."""

    name: Annotated[str, Field(max_length=128)]
    arguments: str | dict[str, Any] | None = None


class CalledTool(OpenModel):
    """A call in an earlier message of the assistant."""

    id: Short | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


# In one message of a history.
MOST_CALLS = 128


class ChatMessage(OpenModel):
    """One message."""

    refused = dict.fromkeys(("function_call", "audio"), ({}, ""))
    idle: ClassVar[Idle] = {
        "name": "templates show roles alone; of a tool's result without an id, it is read",
        "annotations": "sources of an earlier reply, which it names in words",
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MOST_CALLS)] | None = None
    tool_call_id: Short | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    # vLLM and OpenRouter have the other name for it.
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None


class StreamOptions(OpenModel):
    """Options of a stream."""

    idle: ClassVar[Idle] = {"include_obfuscation": "nothing is padded"}

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class MmkvOptions(StrictModel):
    """What mmkv adds to OpenAI's requests.

    Attributes:
        resume: whether to go on from a kept copy of the conversation's memory: ``auto`` where
            there is one, ``never``, or ``required``.
        budget: entries per row (256), or text such as ``"64MiB"``; the server's by default.
        policy, lookahead: have to be the server's.
        rewrites: what to do where earlier messages are shown in another way now: ``reread`` them
            so, or ``keep`` them as they were read.
        background: whether a turn of a session goes on when its client leaves; what it was sent
            is kept for clients, and the memory of its earlier turns as long as there is room.
    """

    resume: Literal["auto", "never", "required"] | None = None
    rewrites: Literal["reread", "keep"] | None = None
    budget: Number | str | None = None
    policy: str | None = None
    lookahead: float | None = None
    background: StrictBool | None = None


# Far from where Python's recursion ends: values that are passed on are compared and written again.
DEEPEST = 128


class Body(StrictModel):
    """A whole request."""

    @model_validator(mode="before")
    @classmethod
    def _is_proper(cls, given: Any) -> Any:
        """Raise ValueError for what JSON does not have, or what is nested too deep.

        That is NaN, infinities, and texts that UTF-8 cannot write (half a surrogate pair).
        """
        level, depth = [given], 0
        while level:
            if depth > DEEPEST:
                raise ValueError(f"the body is nested more than {DEEPEST} deep; send a flatter one")
            inner: list[Any] = []
            for value in level:
                if isinstance(value, str):
                    if not (value.isascii() or _whole(value)):
                        raise ValueError(
                            "a text has half of a surrogate pair; send whole characters"
                        )
                elif isinstance(value, dict):
                    inner += value.keys()
                    inner += value.values()
                elif isinstance(value, list):
                    inner += value
                elif isinstance(value, float) and not math.isfinite(value):
                    raise ValueError("a number is NaN or infinite; send finite numbers")
            level, depth = inner, depth + 1
        return given


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Rendered on the engine thread, mostly once; see mmkv.server.prompts for templates that need more.
MOST_MESSAGES = 1024


_ALL = ("all", {"type": "all"})  # thoughts of earlier turns
# Where a conversation is, or what a reply is of, by the names of all APIs: each form refuses those
# that it does not do, with the values that ask for nothing.
WHERE: Refused = {
    **dict.fromkeys("previous_response_id previous_message_id conversation thread".split(), ()),
    **dict.fromkeys("prompt input messages instructions".split(), ()),
    **dict.fromkeys("container compaction multi_agent moderation".split(), ()),
    "context_management": (
        *([], {}, {"edits": []}),
        *({"edits": [{"type": "clear_thinking_20251015", "keep": kept}]} for kept in _ALL),
    ),
    "background": (False,),
    "background_options": ({}, {"completion_window": "soonest"}),
    "store": (False,),
    "mcp_servers": ([],),
}
# What else would change the answer and is not done here.
UNSUPPORTED: Refused = {
    **WHERE,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "web_search_options"), ()),
    # Templates.
    **dict.fromkeys(("chat_template", "documents"), ({}, [], "")),
    "add_special_tokens": (False,),
    **dict.fromkeys(("thinking", "think"), ()),
    "add_generation_prompt": (True,),
    **dict.fromkeys(("continue_final_message", "echo", "raw"), (False,)),
    # Lengths.
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "max_length"), (-1,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "min_length"), (0,)),
    **dict.fromkeys(("ignore_eos", "ban_eos_token"), (False,)),
    "truncate_prompt_tokens": (),
    # Samplers and searches.
    "do_sample": (True,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (0, 1),
    "early_stopping": (False,),
    **dict.fromkeys(("typical_p", "typical", "tfs_z", "epsilon_cutoff", "eta_cutoff"), (0, 1)),
    **dict.fromkeys(("top_a", "dry_multiplier", "xtc_probability", "dynatemp_range"), (0,)),
    **dict.fromkeys(
        ("mirostat", "mirostat_mode", "no_repeat_ngram_size", "smoothing_factor"), (0,)
    ),
    **dict.fromkeys(("bad_words", "logits_processors", "allowed_token_ids"), ([],)),
    # Forms of the answer.
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs grammar "
        "json_schema format prompt_logprobs suffix".split(),
        ("", {}),
    ),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    # Others.
    **dict.fromkeys(("mm_processor_kwargs", "lora_request", "adapter"), ({},)),
}


# Of those that call no functions.
NO_TOOLS: Refused = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
# Fields of a request that templates are told, as if they stood in chat_template_kwargs.
TOLD_TEMPLATES = ("enable_thinking", "thinking_budget")


# Of requests for a reply, whatever the API.
IDLE: Idle = {
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), "what is read is kept anyway"),
    **dict.fromkeys(("service_tier", "speed"), "all requests are served alike, in turn"),
    **dict.fromkeys(("verbosity", "reasoning_effort"), "the model has no such setting"),
    "inference_geo": "it runs where it runs",
    **dict.fromkeys(("billing_policy", "access_programs"), "nothing is paid for or restricted"),
    "prediction": "every token is decoded",
    "metadata": "of stored chats, of which there are none",
}


class ReplyRequest(Body, OpenModel):
    """A request for a reply, with fields of its own that clients add."""

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[Refused] = UNSUPPORTED
    idle: ClassVar[Idle] = IDLE

    model: str
    mmkv: MmkvOptions | None = None
    chat_template_kwargs: TemplateValues | None = None
    enable_thinking: StrictBool | None = None
    thinking_budget: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None

    def template_values(self) -> dict[str, Any]:
        """Return what the chat template is told beside the conversation."""
        values = dict(self.chat_template_kwargs or {})
        for name in TOLD_TEMPLATES:
            if (given := getattr(self, name)) is not None:
                values.setdefault(name, given)
        return values

    @property
    def thought_limit(self) -> int | None:
        """Return how many tokens a thought may have. Raises ApiError: it is no such number."""
        given = self.template_values().get("thinking_budget")
        if given is not None and (type(given) is not int or not 0 <= given < 2**31):
            where = "chat_template_kwargs.thinking_budget"
            raise invalid_value(where, f"{where} is {given!r}; give a number of tokens")
        return given


class SampledRequest(ReplyRequest):
    """A request for a reply whose tokens are drawn."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None


class OpenAIRequest(SampledRequest):
    """What OpenAI's chats and completions have alike."""

    max_tokens: Limit = None
    n: Count | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: Short | None = None  # in whose turn a request waits


class PromptCacheOptions(OpenModel):
    """How OpenAI's prompt cache is used; what is read here is kept anyway."""

    refused = {"prewarm": (False,), "comparison_response_id": ()}
    idle = dict.fromkeys(("mode", "ttl"), "what is read is kept anyway")


def refused_but(*done: str, **more: tuple[Any, ...]) -> Refused:
    """Return what a form refuses: all that is unsupported but what it does, and ``more``."""
    return {name: values for name, values in UNSUPPORTED.items() if name not in done} | more


class ChatRequest(OpenAIRequest):
    """A request for replies to a conversation."""

    refused = refused_but(
        "messages", "add_generation_prompt", "continue_final_message", max_output_tokens=()
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Limit = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_salt: str | None = None
    generation_config: str | None = None  # of transformers chat
    safety_identifier: Short | None = None  # as ``user``
    response_format: Any = None
    # Of a last message of the assistant's, see reply_prefix.
    continue_final_message: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    tools: Annotated[list[Any], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    # Of no consequence here, but with limits of OpenAI's.
    metadata: Metadata | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Short | None = None
    service_tier: Short | None = None
    verbosity: Short | None = None
    reasoning_effort: Effort | None = None


class ObserveRequest(Body):
    """What a session observes; no reply follows.

    Attributes:
        content: a text, or parts of type ``text`` and ``image_url``, as a user's message has them.
        at: seconds from the beginning of what is watched: the pictures are then frames of a video,
            behind their times where the model writes them.
        fps: frames a second, for the times of those after the first; 2 by default.
        skip_similar: leave out pictures like the one kept before them: the mean difference of grey
            levels, 0 to 255, up to which they are.
        system: the system's message, only where nothing was said or observed before.
    """

    content: Content
    at: Annotated[Number, Field(ge=0, lt=10**8)] | None = None
    fps: Annotated[Number, Field(gt=0, le=1000)] | None = None
    skip_similar: Annotated[Number, Field(ge=0, le=255)] | None = None
    system: str | None = None

    def as_chat(self, model: str) -> ChatRequest:
        """Return it as a request for a reply, which has the same checks. Raises ApiError."""
        if self.fps is not None and self.at is None:
            what = "fps says when pictures after the first were seen; give at, too"
            raise invalid_value("fps", what)
        said = [] if self.system is None else [ChatMessage(role="system", content=self.system)]
        said.append(ChatMessage(role="user", content=self.content))
        made = ChatRequest(model=model, messages=said, max_tokens=1)
        made.temperature = 0
        return made


# What a header and a log can bear of names that a client has chosen.
MOST_NAMES, _LONGEST_NAME = 32, 64


def shown_name(name: str) -> str:
    """Return the name of a field as a header takes it: short, ASCII, without a comma."""
    return ascii(name[:_LONGEST_NAME])[1:-1].replace(",", "")


def unread_fields(request: ReplyRequest, strict: bool) -> list[str]:
    """List the fields of a request that change nothing in its answer, each name once.

    Args:
        strict: whether a field that is not known is refused.

    Raises:
        ApiError: it is.
    """
    found: set[str] = set()
    for place, part in _open_parts("", request):
        shown = re.sub(r"\[\d+\]", "", place)
        for name, value in (part.model_extra or {}).items():
            if value is None or name in part.refused:
                continue
            if strict and name not in part.idle:
                own = ascii(f"{place}{name}"[:200])[1:-1]
                what = f"{own} is not a known field; leave it out"
                raise invalid_value(own, what)
            found.add(shown_name(shown + name))
        told = (name for name, why in part.idle.items() if why is not ECHO)
        found |= {shown + name for name in told if getattr(part, name, None) is not None}
    return sorted(found)


def _open_parts(place: str, part: OpenModel) -> Iterator[tuple[str, OpenModel]]:
    """Yield an object and those below it that take other fields, with where they stand."""
    yield place, part
    for name, value in vars(part).items():  # its known fields
        if isinstance(value, OpenModel):
            yield from _open_parts(f"{place}{name}.", value)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, OpenModel):
                    yield from _open_parts(f"{place}{name}[{index}].", one)


def refuse_fields(request: ReplyRequest) -> None:
    """Refuse what would change the answer and is not done here. Raises ApiError (400)."""
    for place, part in _open_parts("", request):
        for name, harmless in part.refused.items():
            value = getattr(part, name, None)
            if value is not None and not any(
                value == one and isinstance(value, bool) == isinstance(one, bool)
                for one in harmless
            ):
                name = f"{place}{name}"
                raise unsupported(name, f"{name} is not supported by this server; leave it out")


def refuse_unsupported(request: ChatRequest) -> None:
    """Refuse what this server cannot do. Raises ApiError (400)."""
    refuse_stream_options(request)
    refuse_fields(request)
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if message.role == "function":
            raise unsupported(f"{where}.role", "messages of role function are old; use role tool")


def refuse_stream_options(request: Any) -> None:
    """Refuse options of a stream in a request that wants none, as OpenAI does. Raises ApiError."""
    if request.stream_options is not None and not request.stream:
        raise invalid_value(
            "stream_options", "stream_options need stream: true; set it, or leave them out"
        )


def conversation(
    messages: list[ChatMessage], sees: bool, watches: bool, before: Sequence[Message] = ()
) -> list[Message]:
    """Return the messages, neighbouring texts put together; ``developer`` is ``system`` here.

    Args:
        sees, watches: whether the model takes pictures, videos.
        before: the messages of the conversation that is gone on from.

    Raises:
        ApiError: a part that cannot be read, an empty message, a result of no call.
    """
    found: list[Message] = []
    called = {one.id: one.name for said in before for one in said.calls}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        parts, thoughts = _parts(message, f"{where}.content", sees, watches)
        role = "system" if message.role == "developer" else message.role
        if not parts and role not in ("assistant", "tool"):
            what = f"{where}.content is empty; say something"
            raise invalid_value(f"{where}.content", what)
        own = tuple(part for part in parts if part.url or part.text)
        more = _more_of(message, where, called)
        if thoughts:
            more["thought"] = more["thought"] or "\n".join(thoughts)
        found.append(Message(role, own, **more))
        called |= {one.id: one.name for one in found[-1].calls}
    return found


def _parts(
    message: ChatMessage, where: str, sees: bool, watches: bool
) -> tuple[list[Part], list[str]]:
    """Return a message's parts, neighbouring texts put together, and thoughts among them."""
    content = message.content if message.content is not None else message.refusal
    if isinstance(content, str):
        return [Part("text", content)], []
    parts: list[Part] = []
    thoughts: list[str] = []
    for at, one in enumerate(content or ()):
        if message.role == "assistant" and isinstance(one, OtherPart) and one.thought:
            thoughts.append(one.thought)
            continue
        part = _part(one, f"{where}[{at}]")
        if part.kind != "text":
            _require_taken(part, message.role, sees, watches, f"{where}[{at}]")
        if parts and part.kind == parts[-1].kind == "text":
            part = Part("text", parts.pop().text + part.text)
        parts.append(part)
    return parts, thoughts


def reply_prefix(request: ChatRequest, messages: list[Message]) -> tuple[list[Message], Begun]:
    """Take the assistant's last message off, if there is one: the reply goes on with its text.

    Raises:
        ApiError: the last message is of another role, or without words; the request asks for
            something else, or no question stands before it.
    """
    last = messages[-1]
    begun = last.role == "assistant" and not last.calls and any(map(str.strip, last.texts))
    if last.role not in ("user", "tool") and not begun:
        raise invalid_value(
            "messages[-1].role",
            "the last message has to be the user's, or the assistant's with words that the reply "
            "begins with",
        )
    for name, value in (("continue_final_message", begun), ("add_generation_prompt", not begun)):
        if getattr(request, name) is (not value):
            what = "is" if begun else "is not"
            raise invalid_value(
                name,
                f"{name} has to be {str(value).lower()} here: the last message {what} the "
                "assistant's, which the reply continues; set it so, or leave it out",
            )
    if not begun:
        return messages, Begun()
    before = messages[:-1]
    if not before or before[-1].role in ("system", "assistant"):
        raise invalid_value(
            "messages[-1].role",
            "the assistant's last message is the beginning of a reply, so a message of the user's "
            "has to stand before it",
        )
    return before, Begun("".join(last.texts), last.thought)


def _more_of(message: ChatMessage, where: str, called: Mapping[str, str]) -> dict[str, Any]:
    """Return what a message has beside its parts: calls, a thought, which call it answers.

    Args:
        called: the functions of the calls before it, by the calls' ids.
    """
    if message.role == "assistant":
        calls = []
        for one in message.tool_calls or ():
            text = arguments_text(one.function.arguments or "")
            calls.append(ToolCall(one.function.name, text, *filter(None, [one.id])))
        return {"calls": tuple(calls), "thought": message.reasoning_content or None}
    if message.tool_calls:
        what = f"calls stand in messages of the assistant, not {message.role}"
        raise invalid_value(f"{where}.tool_calls", what)
    if message.role != "tool":
        return {}
    name = message.tool_call_id
    if not called or (name is not None and name not in called):
        what = f"{where}.tool_call_id names no call of a message before it"
        raise invalid_value(f"{where}.tool_call_id", what)
    return {"call_id": name, "name": message.name if name is None else called[name]}


_PARTS: dict[str, type[BaseModel]] = {
    "text": TextPart,
    "refusal": RefusalPart,
    "image_url": ImagePart,
    "video_url": VideoPart,
}


def field_error(model: type[BaseModel], given: BaseModel, where: str) -> ApiError:
    """Return the error of a part that ``model`` does not take: it names the field."""
    try:
        model.model_validate(given.model_dump())
    except ValidationError as error:
        wrong = error.errors()
        first = next((one for one in wrong if one["type"] == "extra_forbidden"), wrong[0])
        names = [*first["loc"][:1], *first["loc"][2:][-1:]]  # in between: of a union's type
        place = ascii(".".join([where, *map(str, names)])[:200])[1:-1]
        message = f"{place}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            message = f"{place} is not a known field; leave it out"
        return invalid_value(where, message)
    return invalid_value(where, f"{where} cannot be read; check its fields")


def _part(given: Any, where: str) -> Part:
    if isinstance(given, TextPart):
        return Part("text", given.text)
    if isinstance(given, RefusalPart):
        return Part("text", given.refusal)
    if isinstance(given, ImagePart):
        return _medium("image", given.image_url, ("url", "detail", "format"))
    if isinstance(given, VideoPart):
        return _medium("video", given.video_url, ("url",))
    if given.type in _PARTS:
        raise field_error(_PARTS[given.type], given, where)
    raise unsupported(
        where, f"a part of type {given.type[:40]!r} is not supported; use text or image_url"
    )


def _medium(kind: Literal["image", "video"], source: BaseModel | str, other: Sequence[str]) -> Part:
    if isinstance(source, str):
        return Part(kind, url=source)
    given = source.model_dump(exclude_none=True)
    options = tuple((name, value) for name, value in given.items() if name not in other)
    return Part(kind, url=given["url"], options=options)


def _require_taken(part: Part, role: str, sees: bool, watches: bool, where: str) -> None:
    if not part.url:
        raise invalid_value(where, f"{where} has an empty url")
    if not (sees if part.kind == "image" else watches):
        raise unsupported(where, f"this model takes no {part.kind}s")
    if role not in ("user", "tool"):
        what = f"pictures and videos stand in messages of the user and of tools, not {role}"
        raise unsupported(where, what)


def parse_budget(given: float | str | None, param: str) -> Budget | None:
    """Return the budget that a field names, None for none. Raises ApiError."""
    if given is None:
        return None
    try:
        return Budget.of(given)
    except MmkvError as error:
        raise invalid_value(param, str(error)) from error


class GenerationFields(StrictModel):
    """The fields of a generation config that a request can set here."""

    max_new_tokens: Count | None = None
    do_sample: StrictBool | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    transformers_version: str | None = None


def take_generation_config(request: ChatRequest, default: Settled) -> None:
    """Let ``generation_config``, JSON in a text, say what the request's own fields do not.

    Args:
        default: what neither says.

    Raises:
        ApiError: it is none, or sets what cannot be set here.
    """
    if request.generation_config is None:
        return
    try:
        given = GenerationFields.model_validate(json.loads(request.generation_config))
    except ValidationError as error:
        first = error.errors()[0]
        place = ascii(".".join(["generation_config", *map(str, first["loc"])])[:200])[1:-1]
        raise invalid_value(place, f"{place}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        what = "generation_config is no JSON object; send one as a text, or leave it out"
        raise invalid_value("generation_config", what) from error
    temperature = 0.0 if given.do_sample is False else given.temperature
    if given.do_sample and temperature is None and not default.temperature:
        temperature = 1.0  # of a checkpoint that is greedy by itself
    most = request.max_completion_tokens or request.max_tokens or given.max_new_tokens
    request.max_tokens = request.max_tokens or most
    if request.temperature is None:
        request.temperature = temperature
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if getattr(request, name) is None:
            setattr(request, name, getattr(given, name))
