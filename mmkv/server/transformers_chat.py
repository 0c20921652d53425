"""What ``transformers chat`` asks of a server beside OpenAI's API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, StrictBool, ValidationError

from mmkv.server.answer import event_line
from mmkv.server.errors import ApiError
from mmkv.server.schema import Count, Number, Strict, TopK

if TYPE_CHECKING:
    from mmkv.sampling import Settled
    from mmkv.server.schema import ChatRequest


class GenerationFields(Strict):
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
        raise ApiError(400, f"{place}: {first['msg']}", "invalid_value", place) from error
    except (ValueError, RecursionError) as error:
        what = "generation_config is no JSON object; send one as a text, or leave it out"
        raise ApiError(400, what, "invalid_value", "generation_config") from error
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


class LoadRequest(Strict):
    """A model that has to be there before a chat begins."""

    model: str


def load_router(name: str) -> APIRouter:
    """Return the route that says whether a model is loaded: the one that is served is."""
    router = APIRouter()

    @router.post("/load_model", include_in_schema=False)
    async def load(asked: LoadRequest) -> Response:
        state: dict[str, Any] = {"status": "ready", "model": asked.model, "cached": True}
        if asked.model != name:
            message = f"the model {asked.model[:100]!r} is not served here; ask for {name!r}"
            state = {"status": "error", "model": asked.model, "message": message}
        return Response(event_line(state), media_type="text/event-stream")

    return router
