"""The memories that a chat request goes on from and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from mmkv.server.conversation import chain, link, pictures_in, reply_message
from mmkv.server.kept import Facets, Kept, Shelf

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.server.prompts import Outline
    from mmkv.server.snapshots import Snapshot, Snapshots
    from mmkv.server.work import ChatWork, Choice
    from mmkv.session import Session


class Memories:
    """Finds the memory that a request goes on from, and keeps those after its messages.

    Snapshots are for whoever sends the same messages again; the shelf has what sessions and
    responses name.
    """

    def __init__(self, engine: Engine, work: ChatWork, snapshots: Snapshots, shelf: Shelf) -> None:
        self.engine, self.work = engine, work
        self._snapshots, self._shelf = snapshots, shelf

    def find(self) -> Iterator[tuple[int, Snapshot | Kept]]:
        """Yield how many messages are held by a memory, and it, those with most of them first.

        Called once the digests of all media are known.
        """
        start = self.work.start
        if start is not None:
            yield len(start.facets.messages), start
        elif self._shares:
            yield from self._snapshots.find(self._keys)

    def used(self, memory: Snapshot | Kept) -> None:
        """Note that a memory was used last."""
        if isinstance(memory, Kept):
            self._shelf.used(memory)
        else:
            self._snapshots.used(memory)

    def set_apart(self) -> None:
        """Let what the request goes on from compete with no one: its own session stands for it."""
        if self.work.start is not None:
            self._shelf.set_apart(self.work.start, self.work)

    def let_compete(self) -> None:
        """Let what the request went on from compete again: its own session is gone."""
        if self.work.start is not None:
            self._shelf.let_compete(self.work.start, self.work)

    def keep_at(
        self, session: Session, count: int, seen: tuple[int, ...], outline: Outline
    ) -> None:
        """Keep a snapshot after ``count`` messages, where other requests are likely to go on.

        Args:
            seen: tokens that the session has seen, by modality.
        """
        messages = self.work.messages
        leading = next((i for i, one in enumerate(messages) if one.role != "system"), 0)
        if (
            self._shares
            and self.work.start is None
            and count in {leading, len(messages) - 1, len(messages)} - {0}
        ):
            key, pages = self._keys[count - 1], self.engine.cache.held_pages(session.seq)
            self._snapshots.keep((key,), pages, session.fork, False, seen, outline.rendered())

    def keep_after(
        self, session: Session, choice: Choice, seen: tuple[int, ...], outline: Outline
    ) -> None:
        """Keep a session after its reply, or close it.

        Args:
            seen: tokens that the session has seen, by modality.
        """
        if self.work.keep:
            self._keep_whole(session, choice, seen, outline)
        # After a stop text the session holds words that the client never saw.
        elif choice.finish_reason == "stop" or not self._keep_reply(
            session, choice.text, seen, outline
        ):
            session.close()

    def _keep_whole(
        self, session: Session, choice: Choice, seen: tuple[int, ...], outline: Outline
    ) -> None:
        assert choice.memory is not None
        read = [message.without_urls() for message in self.work.messages]
        messages = (*read, reply_message(choice.text))
        facets = Facets(messages, self.work.root, seen, choice.memory, outline.rendered())
        self.work.kept = self._shelf.keep(session, facets)

    def _keep_reply(
        self, session: Session, text: str, seen: tuple[int, ...], outline: Outline
    ) -> bool:
        if not self._shares:
            return False
        # Clients may send the reply back without the spaces around it.
        texts = dict.fromkeys((text, text.strip()))
        keys = tuple(link(self._keys[-1], reply_message(one)) for one in texts)
        pages = self.engine.cache.held_pages(session.seq)
        return self._snapshots.keep(keys, pages, lambda: session, True, seen, outline.rendered())

    @cached_property
    def _keys(self) -> list[str]:
        """The key of each message; most who name what they go on from need none."""
        rule = self.engine.processor.rule(pictures_in(self.work.messages))
        return chain(self.work.root, self.work.messages, rule)

    @property
    def _shares(self) -> bool:
        """Whether snapshots are used and made.

        A policy that scores by the prompt's last queries compresses before the next question is
        known, so it shares snapshots only when asked to.
        """
        if self.work.resume == "never" or self.engine.shared is not None:
            return False
        return self.work.asked or not self.engine.policy.scoring.needs.queries
