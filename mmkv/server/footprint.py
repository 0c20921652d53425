"""What the server's process may take: the cache, the weights, and the sum of all other bounds.

The cache never takes more than ``--memory``. The process takes more, each part within a bound of
its own that stands where the part is held; here they are added up, and what is resident is compared
with the sum.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mmkv.engine.memory import give_back, resident_bytes
from mmkv.planner import patch_side, states_bytes
from mmkv.server import connections, engine_thread
from mmkv.server.chat import MOST_SCORED
from mmkv.server.guard import TOGETHER, VALUES, always_accepted
from mmkv.server.media.limits import DECODED, MediaLimits
from mmkv.server.media.resolver import TEXTS
from mmkv.server.settings import Footprint

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.server.engine_thread import EngineCore
    from mmkv.server.settings import ServerSettings
    from mmkv.server.state import ServerState

# Measured on CPython 3.11 with pydantic 2 (python -m mmkv.eval.serving.floods), rounded up.
_BODY = 1.5  # bytes held for a byte of a body that arrives
_HANDLED = 4  # the same for the one that is parsed, and for each URL that is made into bytes
_VALUE = 200  # bytes of a JSON value that was checked
_SCORED_TEXT, _SCORED = 160, 1024  # of a log probability as JSON text, and while it is written
_CONNECTION = 128 * 2**10  # of a connection: its head, what uvicorn reads ahead, its objects
_TOKEN = 32  # of a token of a conversation, as text and numbers
_HEAP = 128 * 2**20  # that C's heap keeps, and what is imported late
_TENSORS = 3  # copies of a prompt's pixels: the processor's, the prompt's, the tower's
_EVERY = 5.0  # seconds between two looks at what is resident
_SLACK = 64 * 2**20  # bytes by which the process may grow before memory is given back


def footprint(core: EngineCore, settings: ServerSettings) -> Footprint:
    """Add up what the process may take; called when the engine is ready, in its thread."""
    engine, limits, body = core.engine, MediaLimits(), settings.body
    most = settings.connections or connections.most_connections()
    running, pool = settings.max_running, engine.cache.pool
    taken = settings.most_taken
    on_host = engine.device.type == "cpu"
    weights = engine.decoder.weights.nbytes() if on_host else 0
    parts = {
        "weights and libraries": max(resident_bytes() or 0, weights) + _HEAP,
        "cache": (pool.limit or pool.num_pages) * pool.page_bytes if on_host else 0,
        "features": engine.vision_cache.limit if on_host else 0,
        "connections": most * (_CONNECTION + int(_BODY * always_accepted(body))),
        "bodies": int(_BODY * TOGETHER * body) + (1 + TEXTS) * _HANDLED * body,
        "values": taken * VALUES * _VALUE,
        "media": limits.together + limits.pixels * DECODED if core.facts.sees else 0,
        "reading": _reading(engine, limits, running, on_host, settings.max_choices),
        "scored": MOST_SCORED * (running * _SCORED_TEXT + _SCORED),
        "unsent": engine_thread.UNSENT_TOGETHER * engine_thread.MOST_UNSENT
        + connections.MOST_UNSENT,
        "stored": settings.store_bytes,
        "texts": settings.kept_tokens(engine.spec.max_position) * _TOKEN,
    }
    return Footprint(parts)


def _reading(engine: Engine, limits: MediaLimits, running: int, on_host: bool, choices: int) -> int:
    """Return what prompts take that are read, and steps of replies: pixels, towers, states."""
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
    patches = min(limits.pixels // patch**2, spec.max_position * merge**2)
    pixels = patches * patch**2 * 3 * 4 * getattr(vision, "temporal_patch_size", 1)
    if not on_host:
        return 2 * pixels
    hidden, own = getattr(vision, "hidden_size", width), getattr(vision, "intermediate_size", 0)
    tower = states_bytes(patches, hidden, own)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    read = 4 * running * spec.max_position * width * (1 + levels)
    return _TENSORS * pixels + tower + read + states + logits


async def return_memory(state: ServerState) -> None:
    """Give back to the system what clients that left had taken, while no request is under way.

    The heap keeps it otherwise: what was freed in its middle, whatever its own limit says.
    """
    after = resident_bytes()
    while after is not None:
        await asyncio.sleep(_EVERY)
        now = resident_bytes() or 0
        if now > after + _SLACK and not state.engine_thread.busy:
            await asyncio.to_thread(give_back)
            now = after = resident_bytes() or 0
        after = min(after, now)
