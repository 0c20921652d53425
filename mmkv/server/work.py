"""What goes to the engine's thread and comes back from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mmkv.sampling import Settled
from mmkv.server.writer import Extras

if TYPE_CHECKING:
    from mmkv.engine.budget import Budget
    from mmkv.engine.contents import Memory
    from mmkv.prompt.held import Rewrites
    from mmkv.server.conversation import Message
    from mmkv.server.kept import Kept

Resume = Literal["auto", "never", "required"]


@dataclass
class ChatWork:
    """What a chat request asks for.

    Attributes:
        root: what the memory depends on beside the messages; see
            :func:`mmkv.server.conversation.chain`.
        budget: of each reply's session; None: the engine's.
        asked: whether the request itself says how to resume.
        weight: of its sessions in a shared budget.
        start: the memory that the request goes on from; ``messages`` begin with its own.
        rewrites: see :class:`mmkv.Session`.
        keep: whether the memory after the reply stays, in ``kept`` when the request is done.
    """

    messages: list[Message]
    root: str
    sampling: Settled
    extras: Extras = field(default_factory=Extras)
    choices: int = 1
    budget: Budget | None = None
    resume: Resume = "auto"
    asked: bool = False
    weight: float = 1.0
    start: Kept | None = None
    keep: bool = False
    rewrites: Rewrites = "reread"
    kept: Kept | None = None


@dataclass
class Choice:
    """One finished reply."""

    text: str
    tokens: int
    finish_reason: str
    memory: Memory | None


@dataclass
class Usage:
    """The numbers of a request; those of memory are sums over its replies.

    Attributes:
        prompt_tokens: of the whole conversation; resumed: those of them that were not read again.
        kept, evicted: entries (layer, KV head, token).
        by_modality: entries that are kept.
        kv_bytes: of the keys and values held at the end; bound_bytes: the most that there can be
            between two chunks.
        pictures: those of the conversation, frames of videos included; faded_pictures: those that
            have lost most of their entries, in the reply where that is worst.
        shared_pool: whether all sessions compete for one budget: what is kept depends on others.
        differs: how what was read differs from the conversation rendered afresh; None: it does not.
        notes: on the pictures and videos that were read, such as one of which the end is missing.
    """

    prompt_tokens: int
    completion_tokens: int
    resumed: int
    kept: int
    evicted: int
    by_modality: dict[str, int]
    kv_bytes: int
    bound_bytes: int
    shared_pool: bool = False
    differs: str | None = None
    pictures: int = 0
    faded_pictures: int = 0
    notes: list[str] = field(default_factory=list)
