"""A chat request as the scheduler's job: a conversation, and one or more replies to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mmkv.engine.budgets import page_bound
from mmkv.engine.errors import InputError
from mmkv.prompt.held import Read, read_of
from mmkv.prompt.media import notes
from mmkv.prompt.template import REWRITES
from mmkv.scheduler.contract import Price
from mmkv.scheduler.replies import Growing
from mmkv.server.conversation import pictures_in
from mmkv.server.counts import Counts
from mmkv.server.errors import ApiError
from mmkv.server.memories import Memories
from mmkv.server.prompts import Outline, Segment, outline
from mmkv.server.work import Choice, Usage
from mmkv.server.writer import ScoredWriter
from mmkv.turn import agreed, kept_tokens, text_before_media, without_first

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.prefill import Prefill
    from mmkv.server.conversation import Message
    from mmkv.server.grammar import Grammars
    from mmkv.server.kept import Kept
    from mmkv.server.snapshots import Snapshot
    from mmkv.server.work import ChatWork
    from mmkv.session import Session


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
        counts: its tokens and entries; memories: what it goes on from and leaves behind.
        choices: when the job has ended.
    """

    session = None  # the job's sessions are its own

    def __init__(
        self,
        engine: Engine,
        work: ChatWork,
        memories: Memories,
        grammars: Grammars,
        chunk: int,
        admitted: Callable[[], None],
    ) -> None:
        self.engine, self.work, self.chunk = engine, work, chunk
        self.memories, self.grammars, self.counts = memories, grammars, Counts(engine)
        self.budget = engine.budgets.checked(work.budget)
        self._admitted = admitted
        parts = (part for message in work.messages for part in message.media)
        self.fetches = any(part.url[:4].lower() == "http" for part in parts)
        self.live: Session | None = None
        self._media: list[Any] | None = None
        self._outline: Outline | None = None
        self._prefill: Prefill | None = None
        self._read: Read | None = None
        self.growing: list[Growing] = []
        self.writers: list[ScoredWriter] = []
        self.choices: list[Choice] = []
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
    def failure(self) -> Exception | None:
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
        work, engine, held = self.work, self.engine, 0
        work.messages = messages
        shown = [message.for_template() for message in messages]
        for count, memory in self.memories.find():
            found = self._gone_on(shown, count, memory)
            if found is None:
                continue
            held, (self.live, self._outline) = count, found
            self.memories.used(memory)
            self.memories.set_apart()
            text, *others = memory.seen
            again = sum(memory.seen) - self.live.seen  # text that is read in another way
            self.counts.resume(self.live, (text - again, *others))
            break
        if self.live is None:
            if work.start is not None:
                raise InputError(
                    "the template shows nothing new behind the memory that is gone on from; send "
                    "the whole conversation"
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
        return held

    def _gone_on(
        self, shown: list[dict[str, Any]], count: int, memory: Snapshot | Kept
    ) -> tuple[Session, Outline] | None:
        """Open a session on a memory of ``count`` messages; what it has to read.

        Where the template shows those in another way now, it goes back to where that begins. A
        memory that was not named is left alone then, if something has been evicted from it: what
        is read afresh is better.
        """
        template, work = self.engine.processor.template, self.work
        named = work.start is not None or work.rewrites == "keep"
        held = memory.held
        if held is not None and held.pieces is not None and template.source is not None:
            rule = self._rule

            def unread(whole: str) -> str | None:
                plan = held.plan(whole, rule)
                return plan.text if plan.appends else None

            made = outline(template, shown, count, unread=unread)
            if made is not None:  # mostly; all is rendered once then
                return (memory.open(), made) if made.segments else None
        fits = outline(template, shown, count, memory.replied, memory.rendered)
        if fits is not None and not fits.segments:
            return None
        if fits is None and not named and not memory.replied:
            return None
        session = memory.open()
        session.rewrites = work.rewrites
        try:
            made = self._agreed(session, shown, count, fits, named)
        except BaseException:
            session.close()
            raise
        if made is None:
            session.close()
        return None if made is None else (session, made)

    def _agreed(
        self,
        session: Session,
        shown: list[dict[str, Any]],
        count: int,
        fits: Outline | None,
        named: bool,
    ) -> Outline | None:
        """Return what a session reads to hold the conversation; it goes back if it has to."""
        processor, held = self.engine.processor, session.held
        template, last = processor.template, len(shown)
        whole = template.render(shown, opening=True)
        if held.pieces is None or template.source is None:
            why = None if fits is not None else REWRITES
        else:
            plan = held.plan(whole, rule := self._rule)
            if plan.appends:
                return fits or Outline(whole, [Segment(plan.text, count, last)])
            if fits is not None and session.evicted and self._only_spaces(session, shown, count):
                return fits
            if session.evicted and not named:
                return None
            plan, why = agreed(session, plan, whole, rule)
            if why is None:
                same = kept_tokens(session, plan, text_before_media(processor, plan))
                held.differs = session.go_back(plan, same) or held.differs
                return Outline(whole, [Segment(plan.text, count, last, same)])
        if why is None or not named:
            return fits
        held.differs = why
        text = template.addition(shown[:count], shown[count:]).text
        return fits or Outline(whole, [Segment(text, count, last)])

    @property
    def _rule(self) -> bool | None:
        return self.engine.processor.rule(pictures_in(self.work.messages))

    def _only_spaces(self, session: Session, shown: list[dict[str, Any]], count: int) -> bool:
        """Whether the client sent the latest reply back without the spaces around it.

        That alone is no reason to let a memory go from which entries have been evicted.
        """
        held, sent = session.held, shown[count - 1]
        if not held.pieces or not held.ends_with_reply:
            return False
        said, text = held.pieces[-1].text or "", "".join(p.get("text", "") for p in sent["content"])
        if said == text or said.strip() != text.strip():
            return False
        as_said = [*shown[: count - 1], {**sent, "content": said}, *shown[count:]]
        whole = self.engine.processor.template.render(as_said, opening=True)
        return held.plan(whole, self._rule).appends

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
        self.counts.prefilled += tokens
        if self._prefill.logits is None:
            return False
        segment = self._outline.segments[0]
        self.counts.add(self._prefill._turn.modality)
        logits, self._prefill = self._prefill.logits, None
        if self._read is not None:
            session.note_read(self._read)
            self._read = None  # and its pictures
        self._outline.segments.pop(0)
        if self._outline.segments:
            self.memories.keep_at(session, segment.last, self.counts.seen, self._outline)
            return False
        assert logits is not None
        self.counts.prompt_tokens = session.seen
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
        images = [one for kind, one in pairs if kind == "image"]
        videos = [one for kind, one in pairs if kind == "video"]
        self.counts.notes += notes(images, videos)
        processor, total = self.engine.processor, pictures_in(self.work.messages)
        inputs = processor.encode(segment.text, images, videos, session.seen > 0, total)
        ids = inputs["input_ids"][0].tolist()
        more = {"rule": self._rule, "unfed": session.unfed, "stays": sys.maxsize}
        self._read = read_of(processor, segment.text, ids, images, videos, **more)
        return session.with_unfed(without_first(inputs, segment.held))

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
            token = writer.begin(logits, session.read_ids)
            fork = session if at == 0 else session.fork()
            self.growing.append(Growing(fork, writer, -1 if token is None else token))
            self.writers.append(writer)

    def roll_back(self) -> None:
        """Return all pages."""
        for session in [self.live, *(one.session for one in self.growing)]:
            if session is not None:
                session.close()
        self.memories.let_compete()

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
            reply = writer.reply(self.counts.prompt_tokens, session.memory())
            session.note_reply(writer, reply.text)
            self.choices.append(
                Choice(reply.text, len(reply.token_ids), reply.finish_reason, reply.memory)
            )
            if self._dropped:
                session.close()
                self.memories.let_compete()

    def leave(self) -> None:
        """Keep each session after its reply, or close it; after :meth:`end`."""
        if len(self.choices) < len(self.growing):  # what failed before has returned its pages
            return
        for session, choice in self._replies():
            if session.closed:
                continue
            assert self._outline is not None
            try:
                seen = self.counts.seen_by(session)
                self.memories.keep_after(session, choice, seen, self._outline)
            except BaseException:
                session.close()
                raise

    def evicted_here(self) -> dict[str, int]:
        """Count the entries that this request evicted, by modality; after :meth:`end`."""
        return self.counts.evicted_here(self._replies())

    def usage(self) -> Usage:
        """Return the request's numbers; after :meth:`end`."""
        bound = self.price().steady + self.engine.budgets.fixed_pages
        return self.counts.usage(self._replies(), bound)

    def _replies(self) -> list[tuple[Session, Choice]]:
        """Return all, with the sessions that they stand in."""
        sessions = [one.session for one in self.growing]
        return list(zip(sessions, self.choices, strict=True))
