"""What the server's process may take: the cache, the weights, and the sum of all other bounds.

The cache never takes more than ``--memory``. The process takes more, each part within a bound of
its own that stands where the part is held; here they are added up, and what is resident is compared
with the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import BudgetError
from mmkv.engine.system import give_back, resident_bytes
from mmkv.planner import patch_side, states_bytes
from mmkv.server.media.limits import DECODED, MediaLimits
from mmkv.server.media.resolver import TEXTS
from mmkv.server.settings import (
    FEW,
    VALUES,
    Footprint,
    always_accepted,
    mib,
    most_connections,
)

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.server.settings import ServerSettings

# Measured on CPython 3.11 with pydantic 2, rounded up (benchmarks/serving/floods.py of 2562fd54).
_BODY = 1.5  # bytes held for a byte of a body that arrives
_HANDLED = 4  # the same for the one that is parsed, and for each URL that is made into bytes
_VALUE = 200  # bytes of a JSON value that was checked
_SCORED_TEXT, _SCORED = 160, 1024  # of a log probability as JSON text, and while it is written
_CONNECTION = 128 * 2**10  # of a connection: its head, what uvicorn reads ahead, its objects
_TOKEN = 32  # of a token of a conversation, as text and numbers
_HEAP = 128 * 2**20  # that C's heap keeps, and what is imported late
_TENSORS = 3  # copies of a prompt's pixels: the processor's, the prompt's, the tower's
UNSENT_TOGETHER = 8  # times the most bytes of a reply that wait for its client, of all replies
_EVERY = 5.0  # seconds between two looks at what is resident
_SLACK = 64 * 2**20  # bytes by which the process may grow before memory is given back


# The least that --process-memory leaves of each bound: small pictures, short bodies, a few clients.
_LEAST = {"body": 2**20, "connections": 16, "store_bytes": 2**22}
_LEAST_BOUNDS = {
    "bodies": 2,
    "values": VALUES,
    "media": 2**25,
    "shown": 2**19,
    "scored": 2**12,
    "unsent": 2**20,
    "answers": 2**23,
    "contexts": 8,
}


def fitted(engine: Engine, settings: ServerSettings) -> tuple[ServerSettings, Footprint]:
    """Return settings whose bounds keep the process within ``process_memory``, and its parts.

    All bounds of requests go down together, each by the same share of the way to the least that it
    may be. Called when the engine is ready, in its thread.

    Raises:
        BudgetError: the least is too much.
    """
    resident = resident_bytes() or 0
    most = settings.process_memory
    contexts = settings.max_sessions + settings.most_taken
    settings = replace(settings, connections=settings.connections or most_connections())
    whole = footprint(engine, settings, resident)
    if most is None or whole.total <= most:
        return settings, whole

    def at(way: float) -> ServerSettings:
        bounds = replace(settings.bounds, contexts=settings.bounds.contexts or contexts)
        bounds = replace(bounds, **_lowered(bounds, _LEAST_BOUNDS, way))
        return replace(settings, bounds=bounds, **_lowered(settings, _LEAST, way))

    least = footprint(engine, at(0), resident)
    if least.total > most:
        raise BudgetError(
            f"the process takes at least {least}, more than the {mib(most)} of --process-memory; "
            "raise that, or lower --memory"
        )
    low, high = 0.0, 1.0
    for _ in range(20):
        way = (low + high) / 2
        low, high = (
            (way, high) if footprint(engine, at(way), resident).total <= most else (low, way)
        )
    return at(low), footprint(engine, at(low), resident)


def _lowered(held: Any, least: dict[str, int], way: float) -> dict[str, Any]:
    """Return each bound so far on the way from its least to what it is, in equal factors."""
    given = {name: (getattr(held, name), bound) for name, bound in least.items()}
    return {
        name: min(value, round(bound * (value / bound) ** way)) if value > bound else value
        for name, (value, bound) in given.items()
    }


def media_limits(settings: ServerSettings) -> MediaLimits:
    """Return the limits of pictures and videos that a server with these settings has."""
    bounds, made = settings.bounds, MediaLimits()
    return replace(
        made,
        together=bounds.media,
        shown=bounds.shown,
        # Half of the room for one of the largest, encoded and decoded.
        bytes=min(made.bytes, bounds.media // 2),
        worker_bytes=min(made.worker_bytes, settings.process_memory or made.worker_bytes),
    )


def footprint(engine: Engine, settings: ServerSettings, resident: int) -> Footprint:
    """Add up what the process may take, with what is resident now that the engine is ready."""
    body, bounds, pool = settings.body, settings.bounds, engine.cache.pool
    most = settings.connections or most_connections()
    running = settings.max_running
    on_host, sees = engine.device.type == "cpu", engine.processor.sees
    weights = engine.decoder.weights.nbytes() if on_host else 0
    small = int(_BODY * always_accepted(body)) + FEW * _VALUE
    parts = {
        "weights and libraries": max(resident, weights) + _HEAP,
        "cache": (pool.limit or pool.num_pages) * pool.page_bytes if on_host else 0,
        "features": engine.vision_cache.limit if on_host else 0,
        "connections": most * (_CONNECTION + small),
        "bodies": int(_BODY * bounds.bodies * body) + (1 + TEXTS) * _HANDLED * body,
        "values": bounds.values * _VALUE,
        "media": bounds.media + bounds.shown * DECODED if sees else 0,
        "reading": _reading(engine, bounds.shown, running, on_host, settings.max_choices),
        "scored": bounds.scored * (running * _SCORED_TEXT + _SCORED),
        "unsent": UNSENT_TOGETHER * bounds.unsent + bounds.answers,
        "stored": settings.store_bytes,
        "texts": settings.kept_tokens(engine.spec.max_position) * _TOKEN,
    }
    return Footprint(parts)


def _reading(engine: Engine, shown: int, running: int, on_host: bool, choices: int) -> int:
    """Return what prompts take that are read, and steps of replies: pixels, towers, states.

    Args:
        shown: pixels of a request, as large as the model reads them.
    """
    spec = engine.spec
    width, config = spec.hidden_size, engine.family.config
    inner = getattr(config.get_text_config(), "intermediate_size", None) or 4 * width
    states = states_bytes(engine.prefill_chunk, width, inner)
    logits = 4 * choices * (running + 1) * spec.vocab_size  # of each reply, in float32
    vision = getattr(config, "vision_config", None)
    if not engine.processor.sees or vision is None:
        return states + logits if on_host else 0
    # A request's pictures have at most as many tokens as the context, and so many pixels. No family
    # makes a token of more than 2 x 2 patches where its settings do not say so.
    patch = patch_side(getattr(vision, "patch_size", None))
    merge: int = getattr(vision, "spatial_merge_size", 0) or getattr(config, "scale_factor", 2)
    patches = min(shown // patch**2, spec.max_position * merge**2)
    pixels = patches * patch**2 * 3 * 4 * getattr(vision, "temporal_patch_size", 1)
    if not on_host:
        return 2 * pixels
    hidden, own = getattr(vision, "hidden_size", width), getattr(vision, "intermediate_size", 0)
    tower = states_bytes(patches, hidden, own)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    read = 4 * running * (patches // merge**2) * width * (1 + levels)
    return _TENSORS * pixels + tower + read + states + logits


async def return_memory(busy: Callable[[], bool]) -> None:
    """Give back to the system what clients that left had taken, while no request is under way.

    The heap keeps it otherwise: what was freed in its middle, whatever its own limit says.

    Args:
        busy: whether a request is.
    """
    after = resident_bytes()
    while after is not None:
        await asyncio.sleep(_EVERY)
        now = resident_bytes() or 0
        if now > after + _SLACK and not busy():
            await asyncio.to_thread(give_back)
            now = after = resident_bytes() or 0
        after = min(after, now)
