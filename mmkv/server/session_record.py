"""What a server knows of one session."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mmkv.engine.budget import Budget
    from mmkv.server.kept import Kept
    from mmkv.server.lasting import Note


@dataclass
class Record:
    """One session.

    Attributes:
        kept: its memory after the latest turn; None before the first, or while it lies in the
            folder that servers share.
        note: what that folder says of it; None without.
        busy: whether a turn is under way; made_way: whether it was closed here for another one;
            used: grows with each use; unbound: whether its budget binds nothing.
    """

    id: str
    tenant: str
    budget: Budget
    metadata: dict[str, str]
    kept: Kept | None = None
    busy: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    turns: int = 0
    note: Note | None = None
    made_way: bool = False
    used: int = 0
    unbound: bool = False

    @property
    def lies_in_the_folder(self) -> bool:
        """Whether another server could go on from where it stands."""
        note = self.note
        return note is not None and bool(note.version and (self.kept is None or note.memory))

    @property
    def messages(self) -> int:
        """Count the messages that it holds."""
        if self.kept is not None:
            return len(self.kept.facets.messages)
        return 0 if self.note is None else self.note.messages

    @property
    def state(self) -> Literal["empty", "memory", "file"]:
        """Where its memory lies."""
        if self.kept is None:
            return "empty" if self.note is None or self.note.memory is None else "file"
        return "memory" if self.kept.resident else "file"

    def shown(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        return {
            "id": self.id,
            "object": "session",
            "created": self.created,
            "metadata": self.metadata,
            "budget": "none" if self.unbound else self.budget.describe(),
            "turns": self.turns,
            "messages": self.messages,
            "busy": self.busy,
            "state": self.state,
        }
