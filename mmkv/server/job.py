"""A chat request as the scheduler's job: a conversation, and one or more replies to it.

The conversations that a request continues and leaves behind, and its steps in the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from mmkv.calls.parser import ReplyParser
from mmkv.engine.budgets import page_bound
from mmkv.engine.errors import InputError
from mmkv.notes import read_notes, times_notes
from mmkv.prompt.held import Read, read_of
from mmkv.prompt.messages import Unknown
from mmkv.prompt.template import REWRITES
from mmkv.reply import ReplyWriter
from mmkv.scheduler.capacity import Reservation
from mmkv.scheduler.replies import EngineJob
from mmkv.server.conversations import ConversationInfo, kept_shares, most_entries
from mmkv.server.errors import ApiError
from mmkv.server.prompts import (
    Message,
    Outline,
    Sampled,
    Segment,
    chain,
    closed,
    is_open,
    link,
    outline,
    outline_unread,
    pictures_in,
    with_sampled,
)
from mmkv.server.work import ChatWork, Choice, RequestCounts, Standing, Usage
from mmkv.thoughts import PROMPT_END
from mmkv.turn import (
    agreed,
    checkpoint_of,
    kept_tokens,
    rendered,
    text_before_media,
    text_behind,
    without_first,
)

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.contents import Memory, Span
    from mmkv.prompt.held import Held
    from mmkv.prompt.template import ChatTemplate
    from mmkv.server.conversations import ConversationState, ConversationStore, PrefixCache
    from mmkv.server.prompts import Rendered
    from mmkv.session import Session


_FEW_OPEN = 40  # messages that were observed, of which the end is looked at


class ConversationLookup:
    """Finds the conversation that a request continues, and keeps those that it leaves behind.

    The prefix cache has those for requests that send the same messages again; the conversation
    store has those of sessions and responses.

    Attributes:
        store: see :class:`~mmkv.server.conversations.ConversationStore`.
    """

    def __init__(
        self,
        engine: Engine,
        work: ChatWork,
        snapshots: PrefixCache,
        conversations: ConversationStore,
    ) -> None:
        self.engine, self.work = engine, work
        self._prefix_cache, self.store = snapshots, conversations

    def find(self) -> Iterator[tuple[int, ConversationState]]:
        """Yield conversations to continue, and how many messages each holds; the longest first.

        One that ends with the reply's prefix as a reply of its own holds one more than there are.
        Called once the digests of all media are known.
        """
        start = self.work.start
        if start is not None:
            yield len(start.info.messages), start
        elif self._shares:
            keys = list(self._keys)
            if begun := self.work.begun.text:
                rules = self.work.logit_settings.rules
                parser = ReplyParser(rules.format, rules.use, self.work.thoughts)
                keys.append(link(keys[-1], self.work.reply_message(parser, begun, cut=True)))
            for count in range(len(keys), 0, -1):
                for table in (self._prefix_cache, self.store):
                    if (found := table.at(keys[count - 1])) is not None:
                        yield count, found

    def touch(self, memory: ConversationState) -> None:
        """Note that a conversation is the most recently used."""
        table = self._prefix_cache if memory.keys else self.store
        table.touch(memory)

    def leave_shared_budget(self) -> None:
        """Keep others from evicting from what the request continues: its copy competes instead."""
        if self.work.start is not None:
            self.store.leave_shared_budget(self.work.start, self.work)

    def join_shared_budget(self) -> None:
        """Let what the request continued compete again: its copy is closed."""
        if self.work.start is not None:
            self.store.join_shared_budget(self.work.start, self.work)

    def keep_at(
        self,
        session: Session,
        count: int,
        seen: tuple[int, ...],
        outline: Outline,
        spans: Sequence[Span] = (),
    ) -> None:
        """Put the state after ``count`` messages into the prefix cache, if that may be useful.

        Args:
            seen: tokens that the session has seen, by modality; spans: of its messages.
        """
        whole = len(self.work.messages)
        if (
            self._shares
            and (self.work.start is None or self.work.snapshots)
            and count in {self._leading, whole - 1, whole} - {0}
        ):
            key, pages = self._keys[count - 1], self.engine.cache.held_pages(session.seq)
            held = tuple(one for one in self._sampled() if one.at < count)
            info = ConversationInfo(seen, outline.rendered(), sampled=held, spans=tuple(spans))
            self._prefix_cache.keep((key,), pages, session.fork, info, replied=False)

    def keep_after(
        self,
        session: Session,
        choice: Choice,
        seen: tuple[int, ...],
        outline: Outline,
        spans: Sequence[Span] = (),
    ) -> None:
        """Keep a session after its reply, or close it.

        Args:
            seen: tokens that the session has seen, by modality; spans: of its messages.
        """
        if self.work.keep:
            made = self._keep_whole(
                session, seen, spans, choice.memory, outline.rendered(), (choice.message,)
            )
            self._keep_start()
            if self.work.start is None and self._shares and choice.finish_reason != "stop":
                self.store.name(made, self._keys_after(choice))
        # After a stop text the session holds words that the client never saw.
        elif choice.finish_reason == "stop" or not self._keep_reply(session, choice, seen, outline):
            session.close()

    def keep_observed(self, session: Session, seen: tuple[int, ...], spans: Sequence[Span]) -> None:
        """Keep a session after what it has observed.

        Args:
            seen: tokens that the session has seen, by modality; spans: of its messages.
        """
        self._keep_whole(session, seen, spans, session.memory())

    def _keep_whole(
        self,
        session: Session,
        seen: tuple[int, ...],
        spans: Sequence[Span],
        memory: Memory,
        rendered: Rendered | None = None,
        reply: tuple[Message, ...] = (),
    ) -> ConversationState:
        """Keep a session for its turns to come; ``reply``: what it ends with behind the request."""
        info = ConversationInfo(
            seen,
            rendered,
            (*(message.without_urls() for message in self.work.messages), *reply),
            self.work.base_key,
            memory,
            sampled=self._sampled(*reply),
            tools=tuple(self.work.tools),
            spans=tuple(spans),
            told=session.told,
            frames=self.work.frames,
            next_position=session.next_position,
        )
        made = self.work.result = self.store.keep(session, info)
        return made

    def _keep_start(self) -> None:
        """Put what the turn went on from into the prefix cache, for who edits its message."""
        start = self.work.start
        if start is None or start.live is None or not (self.work.snapshots and self._shares):
            return
        count, info = len(start.info.messages), start.info
        sampled = tuple(one for one in self._sampled() if one.at < count)
        known = ConversationInfo(info.seen, info.rendered, sampled=sampled, spans=info.spans)
        key = self._keys[count - 1]
        self._prefix_cache.keep((key,), start.pages, start.live.fork, known, replied=True)

    def _keep_reply(
        self, session: Session, choice: Choice, seen: tuple[int, ...], outline: Outline
    ) -> bool:
        if not self._shares:
            return False
        keys = self._keys_after(choice)
        pages = self.engine.cache.held_pages(session.seq)
        info = ConversationInfo(seen, outline.rendered(), sampled=self._sampled(choice.message))
        if self.work.start is None:
            self._prefix_cache.leave_behind(self._keys[self._leading : -2])
        return self._prefix_cache.keep(keys, pages, lambda: session, info, replied=True)

    def _keys_after(self, choice: Choice) -> tuple[str, ...]:
        """Return the keys of a reply: clients may send it back without the spaces around it."""
        same = dict.fromkeys((choice.message, choice.message.stripped()))
        return tuple(link(self._keys[-1], one) for one in same)

    def _sampled(self, *more: Message) -> tuple[Sampled, ...]:
        """Return which messages are replies that are known as the model wrote them, and those."""
        messages = enumerate([*self.work.messages, *more])
        return tuple(
            Sampled(at, one.sampled, one.thought) for at, one in messages if one.sampled is not None
        )

    @property
    def _leading(self) -> int:
        """Count the system messages at the start, which other conversations may share."""
        messages = self.work.messages
        return next((i for i, one in enumerate(messages) if one.role != "system"), 0)

    @cached_property
    def _keys(self) -> list[str]:
        """The key of each message, made on first use: turns of sessions need none."""
        rule = self.engine.processor.rule(pictures_in(self.work.messages))
        return chain(self.work.base_key, self.work.messages, rule)

    @property
    def _shares(self) -> bool:
        """Whether the request uses the prefix cache.

        A policy that scores by the prompt's last queries compresses before the next question is
        known, so it does so only when the request asks for it.
        """
        if self.work.resume == "never" or self.engine.shared is not None:
            return False
        return self.work.asked or not self.engine.policy.scoring.needs.queries


class ChatJob(EngineJob):
    """Reads a conversation, from the longest cached one on, and decodes the replies.

    The KV cache is cut to its budget at the end of each message, so that what the prefix cache
    keeps is what a fresh run would hold there.

    Args:
        chunk: tokens in a chunk.
        admitted: called when the pages are committed and media are wanted: :meth:`resume_from`,
            then :meth:`supply_media` have to be called.

    Attributes:
        fetches: see :class:`mmkv.scheduler.contract.Job`.
        counts: its tokens and entries; conversations: finds and keeps what it continues.
        choices: when the job has ended; observed: whether what is observed has been read.
    """

    session = None  # the job's sessions are its own

    def __init__(
        self,
        engine: Engine,
        work: ChatWork,
        conversations: ConversationLookup,
        chunk: int,
        admitted: Callable[[], None],
    ) -> None:
        super().__init__(engine, engine.budgets.checked(work.budget), chunk)
        self.work = work
        self.conversations = conversations
        self.counts = RequestCounts(engine)
        self._admitted = admitted
        parts = (part for message in work.messages for part in message.media)
        self.fetches = any(part.url[:4].lower() == "http" for part in parts)
        self._media: list[Any] | None = None
        self._all_media: list[Any] | None = None  # of the conversation, where it may be read again
        self._outline: Outline | None = None
        self._continues: ConversationState | None = None
        self._read: Read | None = None
        self._checkpoint: dict[str, Any] = {}  # what that says of one
        self._prompt_end: list[int] = []  # its latest tokens
        self.writers: list[ReplyWriter] = []
        self.choices: list[Choice] = []
        self._dropped = self.observed = False
        self._spans: list[Span] = []  # of the messages that are read

    @property
    def ready(self) -> bool:
        """Whether the media are here, where the request has some."""
        return self._media is not None

    @property
    def finished(self) -> bool:
        """Whether all replies are complete, or one has failed; or what is observed is read."""
        ended = bool(self.writers) and all(one.finish_reason is not None for one in self.writers)
        return ended or self.observed or self.failure is not None

    @property
    def failure(self) -> Exception | None:
        """Why a reply has failed; None where none has."""
        return next((one.failure for one in self.writers if one.failure is not None), None)

    def reservation(self) -> Reservation:
        """Bound the pages of all replies by the budget, or else by the model's context."""
        engine, count = self.engine, self.work.choices
        lasting = engine.budgets.lasting_pages(self.budget)
        if lasting is not None:
            rows, size = engine.spec.rows, engine.cache.pool.page_size
            # What it goes on from stays as it is, beside the shared budget, until the turn is over.
            start = self.work.start if engine.shared is not None else None
            apart = 0 if start is None else start.pages
            return Reservation(lasting * count + apart, math.ceil(self.chunk * rows / size))
        new = min(self.work.sampling.max_new_tokens, engine.spec.max_position - 1)
        most = engine.spec.max_position - new
        bound = page_bound(engine, self.budget, most, new, None, self.chunk)
        return Reservation(bound.steady * count, bound.chunk)

    def prepare(self) -> None:
        """Find the conversation to continue; where there are media, once they are known."""
        if any(message.media for message in self.work.messages):
            self._admitted()
        else:
            self.resume_from(self.work.messages)
            self.supply_media([])

    def resume_from(self, messages: list[Message]) -> int:
        """Open the session, as a copy of the longest cached conversation that fits.

        Args:
            messages: the request's, with the digests of all media.

        Returns:
            how many messages it holds; the media of the others have to be supplied.

        Raises:
            ApiError: 409, the request requires a cached conversation and there is none.
        """
        work, engine, held = self.work, self.engine, 0
        work.messages = messages = self._to_read(messages)
        for count, memory in self.conversations.find():
            self._checkpoint = {}
            known = with_sampled(messages, memory.info.sampled)
            shown = [one.for_template() for one in known]
            found: tuple[Session, Outline] | None
            if work.observes is not None or is_open(known):
                found = self._continued_open(known, count, memory) if count < len(known) else None
            elif count > len(messages):
                found = self._inside_reply(shown, memory)
            else:
                found = self._continued(shown, count, memory)
            if found is None:
                continue
            work.messages = known
            held, (self.live, self._outline) = count, found
            self._continues = memory
            self.conversations.touch(memory)
            self.conversations.leave_shared_budget()
            text, *others = memory.info.seen
            stands = self.live.seen
            spans = [*memory.info.spans, *[(0, 0)] * count][:count]
            self._spans = [(min(at, stands), min(end, stands)) for at, end in spans]
            again = sum(memory.info.seen) - stands  # text that is read in another way
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
        self.live.keeps_media = False  # the request has them
        if engine.shared is not None:
            with engine.lock:
                engine.shared.join(self.live, work.weight)
        return held

    def _to_read(self, messages: list[Message]) -> list[Message]:
        """Return messages without the thoughts that are to be forgotten: they may come back."""
        if not self.engine.forget_thoughts:
            return messages
        return [message.without_thought() for message in messages]

    def _inside_reply(
        self, shown: list[dict[str, Any]], memory: ConversationState
    ) -> tuple[Session, Outline] | None:
        """Open a copy of a conversation whose latest reply is to go on, and let its last token go.

        Nothing else may be read again, nor have been evicted by then: reading the reply once more
        is better.
        """
        held, template, count = memory.held, self._template, len(shown)
        said = next((one.text for one in memory.info.sampled if one.at == count), template.prefix)
        if held is None or not held.ends_with_reply or template.source is None:
            return None
        if not said.endswith(template.prefix):
            return None
        whole = template.with_prefix(said, template.thought).render(shown, opening=True)
        plan = held.plan(whole, self._rule)
        if not plan.appends or plan.text:
            return None
        session, rule = memory.fork(), self._rule
        with ExitStack() as unless_kept:
            unless_kept.callback(session.close)
            plan, why = agreed(session, held.plan(whole, rule, plan.kept - 1), whole, rule)
            same = kept_tokens(session, plan, text_before_media(self.engine.processor, plan))
            again = session.seen - plan.start.seen - same
            if why is not None or not same or again > (not session.evicted):
                return None
            session.go_back(plan, same)
            unless_kept.pop_all()
        self.work.begun = replace(self.work.begun, text=said)
        return session, Outline(whole, [Segment(plan.text, count, count, same)])

    def _continued(
        self, shown: list[dict[str, Any]], count: int, memory: ConversationState
    ) -> tuple[Session, Outline] | None:
        """Open a copy of a conversation of ``count`` messages; return it and what it has to read.

        Where the template now renders those messages differently, the copy goes back to the first
        difference. A conversation that the request did not name is not used then if something has
        been evicted from it: reading everything again is better.
        """
        template, work = self._template, self.work
        named = work.start is not None or work.rewrites == "keep"
        held = memory.held
        if held is not None and held.pieces is not None and template.source is not None:
            made = self._unread(shown, count, held)
            if made is not None:  # mostly; all is rendered once at most then
                return (memory.fork(), made) if made.segments else None
        fits = outline(template, shown, count, memory.replied, memory.info.rendered)
        if fits is not None and not fits.segments:
            return None
        if fits is None and not named and not memory.replied:
            return None
        session = memory.fork()
        session.rewrites = work.rewrites
        with ExitStack() as unless_kept:
            unless_kept.callback(session.close)
            made = self._left_to_read(session, shown, count, fits, named)
            if made is None:
                return None
            unless_kept.pop_all()
        return session, made

    def _unread(self, shown: list[dict[str, Any]], count: int, held: Held) -> Outline | None:
        """Return what is to be read behind what was; None: that is shown in another way now.

        Args:
            count: messages that were read.
        """
        template, rule = self._template, self._rule
        layout, rest = rendered(held, template, shown, True, rule)
        if rest is not None:
            try:
                made = outline_unread(template, shown, count, layout, rest)
                self._checkpoint = checkpoint_of(layout)
                return made
            except Unknown:
                layout = template.go_on(shown, True, None)
        plan = held.plan(layout.text, rule)
        if not plan.appends:
            return None
        self._checkpoint = checkpoint_of(layout)
        return outline_unread(template, shown, count, layout, plan.text)

    def _continued_open(
        self, messages: list[Message], count: int, memory: ConversationState
    ) -> tuple[Session, Outline]:
        """Do as :meth:`_continued` where something is observed, or was: it is read in one piece."""
        template, rule, processor = self._template, self._rule, self.engine.processor
        session, same, why = memory.fork(), 0, None
        held = session.held
        with ExitStack() as unless_kept:
            unless_kept.callback(session.close)
            text, done = self._behind_open(messages, count, held), None
            if text is None and held.pieces is not None and template.source is not None:
                shown = [one.for_template() for one in closed(messages)[0]]
                done, text = rendered(held, template, shown, self.work.observes is None, rule)
            whole = text or (self._whole_open(messages) if done is None else done.text)
            if text is None and done is not None:
                plan = held.plan(whole, rule)
                if not plan.appends:
                    plan, why = agreed(session, plan, whole, rule)
                if why is None and not plan.appends:
                    same = kept_tokens(session, plan, text_before_media(processor, plan))
                    held.differs = session.go_back(plan, same) or held.differs
                text = plan.text if why is None else None
            if text is None:
                parts = closed(messages[:count])[0], closed(messages[count:])[0]
                before, after = ([one.for_template() for one in part] for part in parts)
                text = template.addition(before, after, self.work.observes is None).text
                held.differs = why or held.differs
            unless_kept.pop_all()
        self._checkpoint = {} if why is not None else checkpoint_of(done)
        segments = [Segment(text, count, len(messages), same)]
        return session, Outline(whole, segments, done is not None and done.after is None)

    def _behind_open(self, messages: list[Message], count: int, held: Held) -> str | None:
        """Return the text of what is observed behind a long open message; None: all is rendered."""
        if self._rule is not None or self.work.observes is None or not messages[count - 1].open:
            return None
        opened = closed(messages[max(count - _FEW_OPEN, 0) : count])[0][-1]
        given = opened.for_template(), messages[count].for_template()
        return text_behind(held, self._template, *given)

    def _whole_open(self, messages: list[Message]) -> str:
        """Return the text of messages some of which are open, and of the reply's opening."""
        shown = [one.for_template() for one in closed(messages)[0]]
        if self.work.observes is not None:
            return self._template.render_open(shown)
        return self._template.render(shown, opening=True)

    def _left_to_read(
        self,
        session: Session,
        shown: list[dict[str, Any]],
        count: int,
        fits: Outline | None,
        named: bool,
    ) -> Outline | None:
        """Return what a session still has to read; it goes back first if it has to."""
        processor, held = self.engine.processor, session.held
        template, last = self._template, len(shown)
        whole = template.render(shown, opening=True)
        if held.pieces is None or template.source is None:
            why = None if fits is not None else REWRITES
        else:
            plan = held.plan(whole, rule := self._rule)
            if plan.appends:
                return fits or Outline(whole, [Segment(plan.text, count, last)])
            if session.evicted:
                if fits is not None and self._only_spaces(session, shown, count):
                    return fits
                if not named:
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
    def _template(self) -> ChatTemplate:
        template, work = self.engine.processor.template, self.work
        if work.raw:
            return template.as_raw()
        template = template.with_values(work.template_values).with_tools(work.tools)
        return template.with_prefix(work.begun.text, work.begun.thought)

    @property
    def _rule(self) -> bool | None:
        return self.engine.processor.rule(pictures_in(self.work.messages))

    def _only_spaces(self, session: Session, shown: list[dict[str, Any]], count: int) -> bool:
        """Whether the client sent the latest reply back without the spaces around it.

        That alone is no reason to give up a conversation from which entries have been evicted.
        """
        held, sent = session.held, shown[count - 1]
        if not held.pieces or not held.ends_with_reply:
            return False
        said, text = held.pieces[-1].text or "", "".join(p.get("text", "") for p in sent["content"])
        if said == text:
            return False
        # What the client gave the reply to begin with.
        begun = "" if said.strip() == text.strip() else text.rstrip().removesuffix(said.rstrip())
        as_said = [*shown[: count - 1], {**sent, "content": begun + said}, *shown[count:]]
        whole = self._template.render(as_said, opening=True)
        return held.plan(whole, self._rule).appends

    def supply_media(self, media: list[Any], before: list[Any] | None = None) -> None:
        """Take the decoded media of the messages that were not resumed, in order.

        Args:
            before: those of the messages that were, where all may be read again and are at hand.
        """
        self._media = media
        if before is not None:
            self._all_media = [*before, *media]

    def begin_count(self, messages: list[Message]) -> int:
        """Begin to count the prompt's tokens, with what is kept of the conversation; read nothing.

        Args:
            messages: the request's, with the digests of all media.

        Returns:
            how many messages are counted; the media of the others have to be supplied.
        """
        self.work.messages = messages = self._to_read(messages)
        for count, memory in self.conversations.find():
            known = with_sampled(messages, memory.info.sampled)
            session, shown = memory.live, [one.for_template() for one in known]
            if session is None or count > len(messages):
                continue
            found = outline(self._template, shown, count, memory.replied, memory.info.rendered)
            if found is not None:
                self.work.messages, self._outline = known, found
                self.counts.prompt_tokens = session.seen + len(session.unfed)
                return count
        self._outline = outline(self._template, [one.for_template() for one in messages])
        return 0

    def count_segment(self) -> bool:
        """Count the tokens of the next piece of the prompt; return whether there was one."""
        assert self._outline is not None
        if not self._outline.segments:
            return False
        segment = self._outline.segments.pop(0)
        images, videos = self._media_of(segment)
        continuing, total = self.counts.prompt_tokens > 0, pictures_in(self.work.messages)
        inputs = self.engine.processor.encode(segment.text, images, videos, continuing, total)
        self.counts.prompt_tokens += inputs["input_ids"].shape[1]
        return True

    @property
    def slow_to_begin(self) -> bool:
        """Whether the next chunk encodes pictures."""
        return self._prefill is None and bool(self._media)

    def begin(self) -> None:
        """Prepare the next message, once the one before it is read."""
        if self._again is not None:
            return
        session = self.live
        assert session is not None and self._media is not None
        if self._outline is None and self.work.observes is not None:
            whole = self._whole_open(self.work.messages)
            self._outline = Outline(whole, [Segment(whole, 0, len(self.work.messages))])
        if self._outline is None:
            shown = [message.for_template() for message in self.work.messages]
            self._outline = outline(self._template, shown)
            assert self._outline is not None
        if self._prefill is None:
            inputs = self._inputs(self._outline.segments[0])
            tokens = session.seen + inputs["input_ids"].shape[1]
            self.conversations.store.require_tokens(tokens, self._continues)
            session.cache_salt = self.work.base_key
            self._prefill = session.begin_prefill(inputs, self.chunk, undoable=False)
            session.unfed = ()

    def finish_chunk(self, tokens: int) -> bool | Reservation:
        """Count a chunk; return whether all is read and each reply has its first token."""
        if self._again is not None:
            return self._finish_again()
        session = self.live
        assert session is not None and self._prefill is not None and self._outline is not None
        self.counts.prefilled += tokens
        if self._prefill.logits is None:
            return False
        segment = self._outline.segments[0]
        self.counts.add(self._prefill._turn.modality)
        tokens_read = self._prefill._turn.modality.numel()
        logits, self._prefill = self._prefill.logits, None
        if self._read is not None:
            session.note_read(self._read)
            self._read = None  # and its pictures
        self._outline.segments.pop(0)
        read = segment.last - segment.first
        if read:  # of several in one piece, the last one has its tokens
            begin = session.seen - tokens_read
            self._spans += [*[(begin, begin)] * (read - 1), (begin, session.seen)]
        if self._outline.segments:
            given = segment.last, self.counts.seen, self._outline, self._spans
            self.conversations.keep_at(session, *given)
            return False
        assert logits is not None
        self.counts.prompt_tokens = session.seen
        if self.work.observes is not None:
            self.observed = True
            return True
        self._begin_replies(logits)
        return self.ask_again() or True

    def _whole_prompt(self, again: Session) -> dict[str, torch.Tensor]:
        messages, processor = self.work.messages, self.engine.processor
        text = self._whole_open(messages)
        if self.work.raw:
            return processor.encode_raw(text)
        if self._all_media is None and any(one.media for one in messages):
            raise InputError("its pictures or videos are not at hand: they were not sent again")
        images, videos = _by_kind(messages, self._all_media or [])
        again.cache_salt = self.work.base_key
        return processor.encode(text, images, videos, False, pictures_in(messages))

    def _inputs(self, segment: Segment) -> dict[str, torch.Tensor]:
        """Return the model inputs of a segment, and of what the cache lacks of the last reply."""
        session = self.live
        assert session is not None and self._outline is not None
        images, videos = self._media_of(segment)
        processor, total = self.engine.processor, pictures_in(self.work.messages)
        bundled = self.engine.is_bundled_model
        session.tell(read_notes(self._template, images, videos, bundled))
        if (seen := self.work.observes) is not None:
            what = "pictures" if self.work.messages[-1].media else "texts"
            what = "frames" if seen.frames and what == "pictures" else what
            session.tell(times_notes(processor, what, seen.at))
        if self.work.raw:
            inputs = processor.encode_raw(segment.text)
        else:
            inputs = processor.encode(segment.text, images, videos, session.seen > 0, total)
        ids = inputs["input_ids"][0].tolist()
        self._prompt_end = ids[-PROMPT_END:]
        more = {"rule": self._rule, "unfed": session.unfed, "loose": 0}
        if len(self._outline.segments) == 1:  # where all has been read
            more |= self._checkpoint
        self._read = read_of(processor, segment.text, ids, images, videos, **more)
        return session.with_unfed(without_first(inputs, segment.held))

    def _media_of(self, segment: Segment) -> tuple[list[Any], list[Any]]:
        """Take the pictures and the videos of a segment."""
        assert self._media is not None
        messages = self.work.messages[segment.first : segment.last]
        count = sum(len(message.media) for message in messages)
        media, self._media = self._media[:count], self._media[count:]
        return _by_kind(messages, media)

    def _begin_replies(self, logits: torch.Tensor) -> None:
        session, outline, work = self.live, self._outline, self.work
        assert session is not None and outline is not None
        for at in range(work.choices):
            seed = None if work.sampling.seed is None else (work.sampling.seed + at) % 2**63
            writer = ReplyWriter(
                self.engine,
                replace(work.sampling, seed=seed),
                work.logit_settings,
                prompt=self._prompt_end,
                text=outline.text,
                prefix=self._template.prefix_in(outline.text),
                raw=work.raw,
                apart=True,
            )
            fork = session if at == 0 else session.fork()
            fork.begin_weighing()
            self.writers.append(writer)
            self._begin(fork, writer, logits)
            if writer.failure is not None:  # and so has the request
                return

    def roll_back(self) -> None:
        """Return all pages."""
        for session in [self.live, *(one.session for one in self.decoding)]:
            if session is not None:
                session.close()
        self.conversations.join_shared_budget()

    def interrupt(self) -> None:
        """End the replies where they stand; their sessions are closed."""
        self._dropped = True
        for writer in self.writers:
            writer.finish("interrupted")

    def end(self) -> None:
        """Record the replies; :meth:`leave` then keeps or closes their sessions.

        Sessions of interrupted replies are closed at once.
        """
        watched = None
        for one in self.decoding:
            writer, session, text = one.writer, one.session, one.writer.text
            session.watched = watched or session.watched  # all are of one conversation
            said = session.note_reply(writer, text)
            watched = session.watched
            message = self.work.reply_message(
                writer.parser(whole=True), writer.prefix + text, writer.cut, writer.stop_text
            )
            tokens, reason = len(writer.token_ids), writer.finish_reason or "interrupted"
            thought = writer.thought_tokens if message.thought else 0
            if said != text:  # its thought is forgotten
                message = message.without_thought(said)
            memory = session.memory()
            self.choices.append(Choice(message, tokens, reason, memory, session.told, thought))
            if self._dropped:
                session.close()
                self.conversations.join_shared_budget()

        if self.observed and self._dropped and self.live is not None:
            self.live.close()
            self.conversations.join_shared_budget()

    def leave(self) -> None:
        """Keep each session after its reply, or close it; after :meth:`end`."""
        if len(self.choices) < len(self.decoding):  # what failed before has returned its pages
            return
        if self.observed and self.live is not None and not self.live.closed:
            try:
                self.conversations.keep_observed(self.live, self.counts.seen, self._spans)
            except BaseException:
                self.live.close()
                raise
        for session, choice in self.replies():
            if session.closed:
                continue
            assert self._outline is not None
            try:
                given = self.counts.seen_by(session), self._outline, self._spans_of(session)
                self.conversations.keep_after(session, choice, *given)
            except BaseException:
                session.close()
                raise

    def _spans_of(self, session: Session) -> list[Span]:
        """Return the spans of the messages and of the reply behind them."""
        end = max((stop for _, stop in self._spans), default=0)
        return [*self._spans, (end, max(end, session.seen))]

    def stop(self) -> bool:
        """End the replies where they stand, as at their most tokens; whether one has begun.

        What has come is kept.
        """
        for writer in self.writers:
            writer.finish("length")
        return bool(self.writers)

    def standing(self) -> Standing | None:
        """Measure what the first reply holds now; None before it has begun and once it is over."""
        session = self.decoding[0].session if self.decoding else None
        if session is None or session.closed:
            return None
        read = [one.without_urls() for one in self.work.messages]
        kept = kept_shares(session, [*read, Message("assistant", ())], self._spans_of(session))
        most = most_entries(self.engine, session.budget, session.seen)
        tokens = len(self.writers[0].token_ids)
        seen = self.counts.seen_by(session)
        return Standing(session.memory(), seen, kept, most, session.told, tokens)

    def usage(self) -> Usage:
        """Return the request's usage; after :meth:`end`."""
        bound = self.reservation().steady + self.engine.budgets.fixed_pages
        return self.counts.usage(self.replies(), bound)

    def replies(self) -> list[tuple[Session, Choice]]:
        """Return all replies with their sessions; after :meth:`end`."""
        sessions = [one.session for one in self.decoding]
        return list(zip(sessions, self.choices, strict=True))


def _by_kind(messages: Sequence[Message], media: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the pictures and the videos of messages, whose media are in their order."""
    kinds = [part.kind for message in messages for part in message.media]
    pairs = list(zip(kinds, media, strict=True))
    return tuple([one for kind, one in pairs if kind == name] for name in ("image", "video"))  # type: ignore[return-value]
