"""Copies of sessions by the conversation that they hold, so that a chat goes on where it stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmkv.prompt.held import Held
    from mmkv.scheduler import Scheduler
    from mmkv.server.prompts import Rendered
    from mmkv.session import Session


@dataclass(eq=False)
class Snapshot:
    """A session at the end of a message.

    Attributes:
        keys: those it is found by; replied: whether it ends with a reply that was sampled.
        seen: tokens that it has seen, by modality; pages: that it holds, which does not change.
        rendered: the text that was read, but for such a reply.
    """

    keys: tuple[str, ...]
    session: Session
    replied: bool
    seen: tuple[int, ...]
    pages: int
    rendered: Rendered | None = None

    @property
    def held(self) -> Held:
        """Return what it has read, as text."""
        return self.session.held

    def open(self) -> Session:
        """Return a session that goes on from here."""
        return self.session.fork()

    def close(self) -> None:
        """Return its pages."""
        self.session.close()


class Snapshots:
    """Snapshots within a limit; those used longest ago, and those in a request's way, go first.

    Args:
        most: pages that all may hold together; None: as the scheduler has room.
    """

    def __init__(self, scheduler: Scheduler, most: int | None) -> None:
        self._scheduler, self._most = scheduler, most
        self._found: dict[str, Snapshot] = {}

    @property
    def pages(self) -> int:
        """Count the pages that they hold."""
        return self._scheduler.residents.spare_pages

    def find(self, keys: Sequence[str]) -> Iterator[tuple[int, Snapshot]]:
        """Yield snapshots of a conversation's first messages, the longest first.

        Whoever goes on from one calls :meth:`used`.

        Args:
            keys: of its messages, in order.

        Yields:
            how many messages it holds, and the snapshot.
        """
        for count in range(len(keys), 0, -1):
            if (found := self._found.get(keys[count - 1])) is not None:
                yield count, found

    def used(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was used last."""
        self._scheduler.residents.used_spare(snapshot)

    def keep(
        self,
        keys: tuple[str, ...],
        pages: int,
        session: Callable[[], Session],
        replied: bool,
        seen: tuple[int, ...],
        rendered: Rendered | None = None,
    ) -> bool:
        """Keep what ``session`` returns, if there is room for its ``pages``; whether there is.

        The first that was kept under a key stays.
        """
        fresh = tuple(dict.fromkeys(key for key in keys if key not in self._found))
        if not fresh:
            return False

        def make() -> Snapshot:
            return Snapshot(fresh, session(), replied, seen, pages, rendered)

        made = self._scheduler.keep_spare(pages, make, self._dropped, self._most)
        if made is not None:
            self._found |= dict.fromkeys(fresh, made)
        return made is not None

    def _dropped(self, snapshot: Snapshot) -> None:
        for key in snapshot.keys:
            del self._found[key]
