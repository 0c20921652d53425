"""/v1/completions: a text continued as it stands, without a chat template."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictBool

from mmkv.server import reply
from mmkv.server.chat import ChatCall
from mmkv.server.checked import checked
from mmkv.server.engine_thread import Done
from mmkv.server.errors import invalid_value, unsupported
from mmkv.server.reply import ReplyResponse, usage_json
from mmkv.server.schema import (
    NO_TOOLS,
    ChatRequest,
    Count,
    Limit,
    MmkvOptions,
    Number,
    Refused,
    SampledRequest,
    Short,
    StreamOptions,
    TokenIds,
    refuse_fields,
    refuse_stream_options,
    refused_but,
)
from mmkv.server.state import Caller, ServerState

if TYPE_CHECKING:
    from mmkv.server.reply import Spelled


class CompletionRequest(SampledRequest):
    """A request to continue a text."""

    refused: ClassVar[Refused] = {
        **refused_but("prompt"),
        **NO_TOOLS,
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "thinking_budget"), ()),
    }

    model: str
    prompt: str | Annotated[list[Any], Field(max_length=1)]
    max_tokens: Limit = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    n: Count | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: Short | None = None
    mmkv: MmkvOptions | None = None

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


def add_completions(router: APIRouter, state: ServerState) -> None:
    """Add the route to those that need a key."""

    @router.post("/completions", summary="Continue a text")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        headers = state.headers_for(body)
        call = CompletionCall(state, body, request.state.caller)
        work: Any = call.stream if body.stream else call.whole
        return ReplyResponse(work, bool(body.stream), state.settings.keep_alive, headers)
