"""How many tokens a chat request has read and how many entries it has evicted, by modality."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mmkv.engine.contents import MODALITIES
from mmkv.server.work import Choice, Usage

if TYPE_CHECKING:
    import torch

    from mmkv.api import Engine
    from mmkv.session import Session


class Counts:
    """Counts the tokens and entries of one request.

    Attributes:
        seen: tokens of the messages that its session holds, by modality.
        prompt_tokens: of the whole conversation.
        resumed: those of them that were not read again; prefilled: those that were.
        notes: see :class:`mmkv.server.work.Usage`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen = (0,) * len(MODALITIES)
        self.prompt_tokens, self.resumed, self.prefilled = 0, 0, 0
        self.notes: list[str] = []
        self._gone_before = dict.fromkeys(MODALITIES, 0)

    def resume(self, session: Session, seen: Sequence[int]) -> None:
        """Begin with a session that goes on from a memory, which has seen so many tokens."""
        self.seen, self.resumed = tuple(seen), session.seen
        self._gone_before = self._gone(self.seen, session.memory().by_modality)

    def add(self, modality: torch.Tensor) -> None:
        """Count tokens that have been read, by their modalities."""
        more = modality.long().bincount(minlength=len(self.seen)).tolist()
        self.seen = tuple(one + other for one, other in zip(self.seen, more, strict=True))

    def seen_by(self, session: Session) -> tuple[int, ...]:
        """Count the tokens that a session has seen, by modality; sampled ones are text."""
        return (self.seen[0] + session.seen - self.prompt_tokens, *self.seen[1:])

    def evicted_here(self, replies: Sequence[tuple[Session, Choice]]) -> dict[str, int]:
        """Count the entries that this request evicted, by modality."""
        before = self._gone_before
        return {
            name: count - len(replies) * before[name]
            for name, count in self._evicted(replies).items()
        }

    def usage(self, replies: Sequence[tuple[Session, Choice]], bound: int) -> Usage:
        """Return the request's numbers.

        Args:
            replies: all, with the sessions that they stand in.
            bound: the most pages that these may hold between two chunks.
        """
        choices = [choice for _, choice in replies]
        memories = [one.memory for one in choices if one.memory is not None]
        kept = {name: sum(one.by_modality[name] for one in memories) for name in MODALITIES}
        return Usage(
            self.prompt_tokens,
            sum(one.tokens for one in choices),
            self.resumed,
            sum(one.entries for one in memories),
            sum(self._evicted(replies).values()),
            kept,
            sum(one.kv_bytes for one in memories),
            bound * self.engine.cache.pool.kv_page_bytes,
            self.engine.shared is not None,
            next((one.differs for one in memories if one.differs), None),
            max((len(one.pictures) for one in memories), default=0),
            max((len(one.faded) for one in memories), default=0),
            list(dict.fromkeys(self.notes)),
        )

    def _evicted(self, replies: Iterable[tuple[Session, Choice]]) -> dict[str, int]:
        gone = dict.fromkeys(MODALITIES, 0)
        for session, choice in replies:
            assert choice.memory is not None
            own = self._gone(self.seen_by(session), choice.memory.by_modality)
            gone = {name: gone[name] + own[name] for name in MODALITIES}
        return gone

    def _gone(self, seen: Sequence[int], kept: Mapping[str, int]) -> dict[str, int]:
        """Count the entries that are gone of those that a session has seen, by modality."""
        rows = self.engine.spec.rows
        return {
            name: count * rows - kept[name] for name, count in zip(MODALITIES, seen, strict=True)
        }
