"""A client that streams chats and notes when their pieces come; and dialogues of several turns."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import numpy as np

_WORDS = "what is at row column the red blue green cat frog tree star moon left right two".split()


@dataclass
class Streamed:
    """What came of one request; times are seconds since it was sent.

    Attributes:
        status: of HTTP; 0: the connection broke. first: until the first piece of text.
        gaps: between two pieces; usage: as the server gave it; error: its error object.
    """

    status: int = 0
    text: str = ""
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    finish_reason: str | None = None


async def stream_chat(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Streamed:
    """Ask for a reply as a stream, and read it to its end."""
    found, started = Streamed(), time.perf_counter()
    latest = started
    request = {**body, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
        found.status = answer.status_code
        if answer.status_code != 200:
            content = await answer.aread()
            found.error = _error(content)
            found.whole = time.perf_counter() - started
            return found
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                found.error = event["error"]
                break
            found.usage = event.get("usage") or found.usage
            for choice in event.get("choices") or ():
                found.finish_reason = choice.get("finish_reason") or found.finish_reason
                piece = (choice.get("delta") or {}).get("content")
                if not piece:
                    continue
                now = time.perf_counter()
                if found.first is None:
                    found.first = now - started
                else:
                    found.gaps.append(now - latest)
                latest = now
                found.text += piece
    found.whole = time.perf_counter() - started
    return found


def _error(content: bytes) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        made = {"message": content[:200].decode("utf-8", "replace"), "code": None}
    return made


def picture_url(seed: int, size: int = 96) -> str:
    """Return a drawn picture as a data: URL; each seed's is another one."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((size, size), Image.Resampling.NEAREST).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def question(text: str, picture: str | None = None) -> dict[str, Any]:
    """Return a message of the user."""
    if picture is None:
        return {"role": "user", "content": text}
    part = {"type": "image_url", "image_url": {"url": picture}}
    return {"role": "user", "content": [part, {"type": "text", "text": text}]}


def words(rng: Random, count: int) -> str:
    """Return a drawn text of ``count`` words that the bundled model's tokenizer knows."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99 of seconds; None where there are none."""
    if not values:
        return None
    low, high = np.quantile(np.asarray(values), [0.5, 0.99])
    return {"p50": float(low), "p99": float(high)}
