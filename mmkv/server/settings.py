"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmkv.engine.budget import Budget
    from mmkv.prompt.qwen_vision import VideoRules
    from mmkv.prompt.video import FrameRule
    from mmkv.sampling import Settled
    from mmkv.server.prompts import Lengths


@dataclass(frozen=True)
class Settings:
    """Bounds and names of one server; nothing here is about the model.

    Attributes:
        name: the model as requests name it.
        api_keys: keys that requests may show; none: everyone may ask.
        open_metrics: whether /metrics needs no key.
        key_weights: of those keys' sessions in a shared budget, in the same order; none: 1 each.
        cors: origins whose web pages may ask, as browsers name them; ``*``: all.
        hosts: names that the Host header may have; none: see :mod:`mmkv.server.guard`.
        max_queue: requests that wait for room; max_running: those that are served at a time.
        max_per_key: requests of one key (or one address, without keys) at a time; None: no limit.
        max_choices: replies to one request (``n``).
        max_tokens: of a reply whose request does not say; None: as the checkpoint says.
        body: most bytes of a request, which has to arrive in body_seconds.
        snapshot_bytes: most bytes of the copies by which chats resume; None: what is free.
        session_folder: where sessions are saved, and idle ones hibernate; None: none are saved.
        idle_folder: where idle ones hibernate without it, if it can be made; None: a temporary one.
        lasting: whether sessions outlast the server, in that folder, for all servers that share it.
        max_sessions: most sessions that are open; store_bytes: most bytes of stored responses.
        media_folder: where file: URLs may point; None: nowhere.
        connections: most that are open; None: what the file descriptors are enough for.
        head_seconds, stall_seconds: see :class:`mmkv.server.connections.ConnectionLimits`.
        keep_alive: seconds after which a stream without news sends a comment.
        page: whether ``/`` is a page to chat with.
        drain: seconds that replies under way have when the server is told to stop.
        warm: whether the server starts a decoding process and reads a picture before it serves, so
            that the first one is as fast as others.
    """

    name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    open_metrics: bool = False
    key_weights: tuple[float, ...] = ()
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_queue: int = 64
    max_running: int = 8
    max_per_key: int | None = None
    max_choices: int = 8
    max_tokens: int | None = None
    body: int = 32 * 2**20
    body_seconds: float = 120.0
    snapshot_bytes: int | None = None
    session_folder: Path | None = None
    idle_folder: Path | None = None
    lasting: bool = False
    max_sessions: int = 1000
    store_bytes: int = 2**30
    media_folder: Path | None = None
    page: bool = True
    connections: int | None = None
    head_seconds: float = 20.0
    stall_seconds: float = 30.0
    keep_alive: float = 15.0
    drain: float = 30.0
    warm: bool = False


@dataclass(frozen=True)
class Facts:
    """What the HTTP routes know of the engine.

    Attributes:
        root: a hash of what the memory of a conversation depends on: weights, gates, policy,
            cuts, template.
        context: most positions; vocabulary: number of tokens; lengths: bounds texts by them.
        sampling: of replies whose request does not say.
        shared: whether all sessions compete for the budget; unbound: whether it binds nothing.
        sees, watches: whether the model takes pictures, videos; picture_rules, rules: how it scales
            them; frame_rule: which frames of a video it is shown.
    """

    root: str
    policy: str
    budget: Budget
    lookahead: float
    context: int
    vocabulary: int
    lengths: Lengths
    sees: bool
    watches: bool
    sampling: Settled
    shared: bool = False
    unbound: bool = False
    rules: VideoRules | None = None
    frame_rule: FrameRule | None = None
    picture_rules: VideoRules | None = None

    @property
    def bound(self) -> str:
        """The budget as it is shown."""
        return "none" if self.unbound else self.budget.describe()
