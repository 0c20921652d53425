"""A chat request as the scheduler's job: a conversation, and one or more replies to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.contents import MODALITIES, Memory
from engine.errors import InputError, MmkvError
from engine.page_bound import page_bound
from mmkv.scheduler.contract import Price
from mmkv.scheduler.replies import Growing
from mmkv.server.conversation import Message, chain, link, reply_message
from mmkv.server.errors import ApiError
from mmkv.server.kept import Facets, Kept, Shelf
from mmkv.server.prompts import Outline, Rendered, Segment, outline
from mmkv.server.work import Usage
from mmkv.server.writer import ScoredWriter

if TYPE_CHECKING:
    from engine.prefill import Prefill
    from mmkv.api import Engine
    from mmkv.server.grammar import Grammars
    from mmkv.server.snapshots import Snapshot, Snapshots
    from mmkv.server.work import ChatWork
    from mmkv.session import Session


@dataclass
class Choice:
    """One finished reply."""

    text: str
    tokens: int
    finish_reason: str
    memory: Memory | None


class ChatJob:
    """Reads a conversation, from a snapshot on where there is one, and replies.

    The cache is cut back at the end of each message, so that a snapshot holds what a fresh run
    would hold there.

    Args:
        chunk: tokens in a chunk.
        admitted: called when the pages are committed and media are wanted: :meth:`resume_from`,
            then :meth:`supply` have to be called.

    Attributes:
        fetches: see :class:`mmkv.scheduler.contract.Job`.
        held: messages that were resumed; resumed: their tokens.
        prompt_tokens: of the whole conversation.
        choices: when the job has ended.
    """

    session = None  # the job's sessions are its own

    def __init__(
        self,
        engine: Engine,
        work: ChatWork,
        snapshots: Snapshots,
        shelf: Shelf,
        grammars: Grammars,
        chunk: int,
        admitted: Callable[[], None],
    ) -> None:
        self.engine, self.work, self.chunk = engine, work, chunk
        self.snapshots, self.grammars, self._shelf = snapshots, grammars, shelf
        self.budget = engine.budgets.checked(work.budget)
        self._admitted = admitted
        parts = (part for message in work.messages for part in message.media)
        self.fetches = any(part.url[:4].lower() == "http" for part in parts)
        self._made_keys: list[str] | None = None
        self.live: Session | None = None
        self.held, self.resumed, self.prompt_tokens = 0, 0, 0
        self.prefilled = 0
        self._replied = False
        self._seen = [0] * len(MODALITIES)
        self._media: list[Any] | None = None
        self._outline: Outline | None = None
        self._prefill: Prefill | None = None
        self.growing: list[Growing] = []
        self.writers: list[ScoredWriter] = []
        self.choices: list[Choice] = []
        self._gone_before = dict.fromkeys(MODALITIES, 0)
        self._dropped = False

    @property
    def next_chunk(self) -> int:
        """See :class:`mmkv.scheduler.contract.Job`."""
        return self.chunk if self._prefill is None else self._prefill.next_chunk

    @property
    def ready(self) -> bool:
        """See :class:`mmkv.scheduler.contract.Job`."""
        return self._media is not None

    @property
    def finished(self) -> bool:
        """Whether all replies are complete, or one has failed."""
        ended = bool(self.writers) and all(one.finish_reason is not None for one in self.writers)
        return ended or self.failure is not None

    @property
    def failure(self) -> MmkvError | None:
        """See :class:`mmkv.scheduler.contract.Job`."""
        return next((one.failure for one in self.writers if one.failure is not None), None)

    def price(self) -> Price:
        """Bound the pages of all replies by the budget, or else by the model's context."""
        engine, count = self.engine, self.work.choices
        lasting = engine.budgets.lasting_pages(self.budget)
        if lasting is not None:
            rows, size = engine.spec.rows, engine.cache.pool.page_size
            # What it goes on from stays as it is, beside the shared budget, until the turn is over.
            start = self.work.start if engine.shared is not None else None
            apart = 0 if start is None else start.pages
            return Price(lasting * count + apart, math.ceil(self.chunk * rows / size))
        new = min(self.work.sampling.max_new_tokens, engine.spec.max_position - 1)
        most = engine.spec.max_position - new
        bound = page_bound(engine, self.budget, most, new, None, self.chunk)
        return Price(bound.steady * count, bound.chunk)

    def prepare(self) -> None:
        """Find out where to go on; media are fetched elsewhere."""
        if any(message.media for message in self.work.messages):
            self._admitted()
        else:
            self.resume_from(self.work.messages)
            self.supply([])

    def resume_from(self, messages: list[Message]) -> int:
        """Open the session, as a copy of the deepest snapshot.

        Args:
            messages: the request's, with the digests of all media.

        Returns:
            how many messages it holds; media of the others are to be supplied.

        Raises:
            ApiError: 409 if the request has to be resumed and cannot be.
        """
        work, engine = self.work, self.engine
        work.messages, self._made_keys = messages, None
        found: tuple[int, Snapshot | Kept] | None = None
        if work.start is not None:
            found = len(work.start.facets.messages), work.start
            self._shelf.used(work.start)
        elif self._shares:
            found = self.snapshots.find(self._keys)
        if found is not None:
            held, snapshot = found
            shown = [message.for_template() for message in messages]
            template, known = engine.processor.template, snapshot.rendered
            rest = outline(template, shown, held, snapshot.replied, known)
            if rest is not None and rest.segments:
                self.held, self._replied = held, snapshot.replied
                self.live, self._seen = snapshot.open(), list(snapshot.seen)
                if work.start is not None:
                    self._shelf.set_apart(work.start, work)
                self.resumed, self._outline = self.live.seen, rest
                memory = self.live.memory().by_modality
                self._gone_before = self._gone(self._seen, memory)
        if self.live is None:
            if work.start is not None:
                raise InputError(
                    "the model's chat template shows earlier messages in another way now, so the "
                    "memory cannot be gone on from; send the whole conversation"
                )
            if work.resume == "required":
                raise ApiError(
                    409,
                    "no memory of this conversation's earlier messages is kept; send it with "
                    "resume: auto to have them read again",
                    "not_resumable",
                )
            self.live = engine.session(self.budget)
        if engine.shared is not None:
            with engine.lock:
                engine.shared.join(self.live, work.weight)
        return self.held

    @property
    def _keys(self) -> list[str]:
        """The key of each message; most who name what they go on from need none."""
        if self._made_keys is None:
            self._made_keys = chain(self.work.root, self.work.messages)
        return self._made_keys

    @property
    def _shares(self) -> bool:
        """Whether snapshots are used and made.

        A policy that scores by the prompt's last queries compresses before the next question is
        known, so it shares snapshots only when asked to.
        """
        if self.work.resume == "never" or self.engine.shared is not None:
            return False
        return self.work.asked or not self.engine.policy.scoring.needs.queries

    def supply(self, media: list[Any]) -> None:
        """Give the pictures and videos of the messages that were not resumed, in order."""
        self._media = media

    @property
    def slow_to_begin(self) -> bool:
        """See :class:`mmkv.scheduler.contract.Job`."""
        return self._prefill is None and bool(self._media)

    def begin(self) -> None:
        """Make the next message ready, once the one before it is read."""
        session = self.live
        assert session is not None and self._media is not None
        if self._outline is None:
            shown = [message.for_template() for message in self.work.messages]
            self._outline = outline(self.engine.processor.template, shown)
            assert self._outline is not None
        if self._prefill is None:
            inputs = self._inputs(self._outline.segments[0])
            self._prefill = session.begin_prefill(inputs, self.chunk, undoable=False)
            session.set_unfed(None)

    @property
    def prefill(self) -> Prefill:
        """See :class:`mmkv.scheduler.replies.Replying`."""
        assert self._prefill is not None
        return self._prefill

    def took(self, tokens: int) -> bool:
        """Note a chunk; True when all messages are read and each reply has its first token."""
        session = self.live
        assert session is not None and self._prefill is not None and self._outline is not None
        self.prefilled += tokens
        if self._prefill.logits is None:
            return False
        segment = self._outline.segments[0]
        counts = self._prefill._turn.modality.long().bincount(minlength=len(self._seen)).tolist()
        self._seen = [one + more for one, more in zip(self._seen, counts, strict=True)]
        logits, self._prefill = self._prefill.logits, None
        self._outline.segments.pop(0)
        if self._outline.segments:
            self._keep_at(segment.last)
            return False
        assert logits is not None
        self.prompt_tokens = session.seen
        self._begin_replies(logits)
        return True

    def _inputs(self, segment: Segment) -> dict[str, torch.Tensor]:
        """Make the tensors of a segment, after what the session still lacks of its reply."""
        session = self.live
        assert session is not None and self._media is not None
        kinds = [
            part.kind
            for message in self.work.messages[segment.first : segment.last]
            for part in message.media
        ]
        media, self._media = self._media[: len(kinds)], self._media[len(kinds) :]
        pairs = list(zip(kinds, media, strict=True))
        inputs = self.engine.processor.encode(
            segment.text,
            [one for kind, one in pairs if kind == "image"],
            [one for kind, one in pairs if kind == "video"],
            continuing=session.seen > 0,
        )
        return session.with_unfed(inputs)

    def _keep_at(self, count: int) -> None:
        """Keep a snapshot after ``count`` messages, where other requests are likely to go on."""
        messages, session = self.work.messages, self.live
        leading = next((i for i, one in enumerate(messages) if one.role != "system"), 0)
        assert session is not None
        if (
            self._shares
            and self.work.start is None
            and count in {leading, len(messages) - 1, len(messages)} - {0}
        ):
            key, pages = self._keys[count - 1], self.engine.cache.held_pages(session.seq)
            kept = (session.fork, False, tuple(self._seen), self._rendered())
            self.snapshots.keep((key,), pages, *kept)

    def _begin_replies(self, logits: torch.Tensor) -> None:
        engine, sampling, session = self.engine, self.work.sampling, self.live
        assert session is not None
        extras, tokenizer = self.work.extras, engine.processor.tokenizer
        for at in range(self.work.choices):
            seed = None if sampling.seed is None else (sampling.seed + at) % 2**63
            own = replace(sampling, seed=seed)
            grammar = None if extras.grammar is None else self.grammars.begin(extras.grammar)
            writer = ScoredWriter(
                tokenizer, own, engine.eos_token_ids, extras, grammar, engine.media_token_ids
            )
            token = writer.advance(logits)
            fork = session if at == 0 else session.fork()
            self.growing.append(Growing(fork, writer, -1 if token is None else token))
            self.writers.append(writer)

    def roll_back(self) -> None:
        """Return all pages."""
        for session in [self.live, *(one.session for one in self.growing)]:
            if session is not None:
                session.close()
        self._let_compete()

    def _let_compete(self) -> None:
        """Let what the request went on from compete again: its own session is gone."""
        if self.work.start is not None:
            self._shelf.let_compete(self.work.start, self.work)

    def interrupt(self) -> None:
        """End the replies where they stand; they leave nothing behind."""
        self._dropped = True
        for writer in self.writers:
            writer.finish("interrupted")

    def end(self) -> None:
        """Note what the replies have come to; :meth:`leave` gives the sessions away.

        Replies that were interrupted close theirs at once.
        """
        for one in self.growing:
            writer, session = one.writer, one.session
            session.set_unfed(writer.unfed)
            reply = writer.reply(self.prompt_tokens, session.memory())
            self.choices.append(
                Choice(reply.text, len(reply.token_ids), reply.finish_reason, reply.memory)
            )
            if self._dropped:
                session.close()
                self._let_compete()

    def leave(self) -> None:
        """Keep each session after its reply, or close it; after :meth:`end`."""
        if len(self.choices) < len(self.growing):  # what failed before has returned its pages
            return
        for one, choice in zip(self.growing, self.choices, strict=True):
            try:
                self._give_away(one.session, choice)
            except BaseException:
                one.session.close()
                raise

    def _give_away(self, session: Session, choice: Choice) -> None:
        if session.closed:
            return
        if self.work.keep:
            self._keep_whole(session, choice)
        # After a stop text the session holds words that the client never saw.
        elif choice.finish_reason == "stop" or not self._keep_reply(session, choice.text):
            session.close()

    def _keep_whole(self, session: Session, choice: Choice) -> None:
        assert choice.memory is not None
        read = [message.without_urls() for message in self.work.messages]
        messages = (*read, reply_message(choice.text))
        seen, rendered = self._seen_by(session), self._rendered()
        facets = Facets(messages, self.work.root, seen, choice.memory, rendered)
        self.work.kept = self._shelf.keep(session, facets)

    def _keep_reply(self, session: Session, text: str) -> bool:
        if not self._shares:
            return False
        # Clients may send the reply back without the spaces around it.
        texts = dict.fromkeys((text, text.strip()))
        keys = tuple(link(self._keys[-1], reply_message(one)) for one in texts)
        pages = self.engine.cache.held_pages(session.seq)
        kept = (lambda: session, True, self._seen_by(session), self._rendered())
        return self.snapshots.keep(keys, pages, *kept)

    def _rendered(self) -> Rendered:
        """Return the text that has been read, but for the reply."""
        assert self._outline is not None
        left = sum(len(one.text) for one in self._outline.segments)
        return Rendered.of(self._outline.text[: len(self._outline.text) - left])

    def _seen_by(self, session: Session) -> tuple[int, ...]:
        """Count the tokens that a session has seen, by modality; sampled ones are text."""
        return (self._seen[0] + session.seen - self.prompt_tokens, *self._seen[1:])

    def _gone(self, seen: Sequence[int], kept: Mapping[str, int]) -> dict[str, int]:
        """Count the entries that are gone of those that a session has seen, by modality."""
        rows = self.engine.spec.rows
        return {
            name: count * rows - kept[name] for name, count in zip(MODALITIES, seen, strict=True)
        }

    def _evicted(self) -> dict[str, int]:
        gone = dict.fromkeys(MODALITIES, 0)
        for one, choice in zip(self.growing, self.choices, strict=True):
            assert choice.memory is not None
            own = self._gone(self._seen_by(one.session), choice.memory.by_modality)
            gone = {name: gone[name] + own[name] for name in MODALITIES}
        return gone

    def evicted_here(self) -> dict[str, int]:
        """Count the entries that this request evicted, by modality; after :meth:`end`."""
        times = len(self.choices)
        return {
            name: count - times * self._gone_before[name] for name, count in self._evicted().items()
        }

    def usage(self) -> Usage:
        """Return the request's numbers; after :meth:`end`."""
        memories = [one.memory for one in self.choices if one.memory is not None]
        kept = {name: sum(one.by_modality[name] for one in memories) for name in MODALITIES}
        page, budgets = self.engine.cache.pool.kv_page_bytes, self.engine.budgets
        bound = self.price().steady + budgets.fixed_pages
        return Usage(
            self.prompt_tokens,
            sum(one.tokens for one in self.choices),
            self.resumed,
            sum(one.entries for one in memories),
            sum(self._evicted().values()),
            kept,
            sum(one.kv_bytes for one in memories),
            bound * page,
            self.engine.shared is not None,
        )
