"""Headers that say what the body of a request does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv.server.errors import ApiError
from mmkv.server.schema import MmkvOptions

if TYPE_CHECKING:
    from fastapi import Request

    from mmkv.server.responses_schema import ResponseRequest
    from mmkv.server.schema import ChatRequest


def take_resume(request: Request, body: ChatRequest | ResponseRequest) -> None:
    """Let X-Mmkv-Resume say what ``mmkv.resume`` does not. Raises ApiError."""
    given = request.headers.get("x-mmkv-resume")
    if given is None:
        return
    if given not in ("auto", "never", "required"):
        raise ApiError(
            400, "X-Mmkv-Resume is auto, never or required", "invalid_value", "X-Mmkv-Resume"
        )
    body.mmkv = body.mmkv or MmkvOptions()
    body.mmkv.resume = body.mmkv.resume or given  # type: ignore[assignment]
