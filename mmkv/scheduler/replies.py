"""Jobs that read a prompt and decode a reply, their executor, and a batch of them in one call."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mmkv.engine.budgets import SequenceSize, page_bound
from mmkv.engine.errors import (
    STOPS,
    InputError,
    MmkvError,
    NotFiniteError,
    SessionError,
    as_exception,
)
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.engine.prefill import ChunkPass, needed_pages, pass_tokens, reserve_together
from mmkv.reply import PAUSED, LogitSettings, Reply, ReplyWriter, following, step
from mmkv.sampling import Sampling
from mmkv.scheduler.capacity import Reservation
from mmkv.scheduler.contract import Job
from mmkv.scheduler.loop import Limits, Scheduler
from mmkv.turn import Prompt, compose, with_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.api import Engine
    from mmkv.calibration import Outcome
    from mmkv.engine.budget import Budget
    from mmkv.engine.prefill import Prefill
    from mmkv.scheduler.conversation import CachedConversation
    from mmkv.session import Session, TurnStart


log = logging.getLogger("mmkv.scheduler")


def message(text: str | Sequence[dict[str, Any]], **more: Any) -> Callable[[Session], Prompt]:
    """Return a function that makes the prompt of a message; arguments as in Session.send."""
    return lambda session: compose(session, text, **more)


@dataclass
class DecodingReply:
    """A reply that is being decoded; ``token`` is the latest one, which the cache still lacks."""

    session: Session
    writer: ReplyWriter
    token: int = PAUSED

    @property
    def paused(self) -> bool:
        """Whether its conversation is to be read again before it goes on."""
        return self.token == PAUSED and self.writer.finish_reason is None


class EngineJob(ABC):
    """A job that :class:`EngineExecutor` reads and decodes.

    See :class:`mmkv.scheduler.contract.Job` for what the scheduler asks of it.

    Args:
        budget: of the session that it reads into; chunk: tokens in a chunk.

    Attributes:
        live: that session, once it is open.
        decoding: its replies; those whose writers have finished are left alone.
    """

    def __init__(self, engine: Engine, budget: Budget, chunk: int) -> None:
        self.engine, self.budget, self.chunk = engine, budget, chunk
        self.live: Session | None = None
        self.decoding: list[DecodingReply] = []
        self._prefill: Prefill | None = None  # of what is being read
        # Of a conversation that is read again: for which reply, its inputs, and what reads it.
        self._again_for: DecodingReply | None = None
        self._again_inputs: dict[str, Tensor] = {}
        self._again: Prefill | None = None

    @property
    def next_chunk(self) -> int:
        """Count the tokens of the next chunk."""
        begun = self._again is not None or self._prefill is not None
        return self.prefill.next_chunk if begun else self.chunk

    @property
    def prefill(self) -> Prefill:
        """What :meth:`~mmkv.scheduler.contract.Job.begin` has made ready."""
        made = self._prefill if self._again is None else self._again
        assert made is not None
        return made

    @property
    def held_pages(self) -> int:
        """Count the pages that it holds while its prompt is read, copies to return to included."""
        assert self.live is not None
        held = [self.live, *(one.session for one in self.decoding if one.session is not self.live)]
        held += [one.again for one in held if one.again is not None]
        pages = sum(self.engine.cache.held_pages(one.seq) for one in held)
        return pages + self.prefill.snapshot_pages

    @abstractmethod
    def finish_chunk(self, tokens: int) -> bool | Reservation:
        """Count a chunk that has been read; return whether the prompt is complete.

        Returns:
            the room that it asks for instead, to read a conversation again (:meth:`grant`).
        """

    @abstractmethod
    def _whole_prompt(self, again: Session) -> dict[str, Tensor]:
        """Return model inputs of the whole conversation for ``again``. Raises MmkvError."""

    def ask_again(self) -> Reservation | None:
        """Return the room to read the conversation of a paused reply again; None: none is paused.

        Those that cannot be read again go on.
        """
        for one in self.decoding:
            if not one.paused:
                continue
            try:
                again = one.session.open_again()
                inputs = with_tokens(self._whole_prompt(again), one.writer.token_ids)
                left = one.writer.limit - len(one.writer.token_ids)
                sizes = inputs["input_ids"].shape[-1], min(left, self.engine.spec.max_position)
                bound = page_bound(self.engine, again.budget, *sizes, None, self.chunk)
            except MmkvError as error:
                self._go_on(one, "not_reread", str(error))
                continue
            self._again_for, self._again_inputs = one, inputs
            return Reservation(bound.steady, bound.chunk)
        return None

    def grant(self, fits: bool) -> bool | Reservation:
        """See :meth:`mmkv.scheduler.contract.Job.grant`."""
        one, inputs, self._again_inputs = self._again_for, self._again_inputs, {}
        assert one is not None
        why = "there is no room for it now; raise the memory limit, or lower --reread-budget"
        if fits:
            assert one.session.again is not None
            try:
                self._again = one.session.again.begin_prefill(inputs, self.chunk, undoable=False)
                return False
            except MmkvError as error:
                why = str(error)
        return self.give_up_again(why)

    @property
    def reads_again(self) -> bool:
        """Whether what it reads is a conversation once more."""
        return self._again is not None

    def give_up_again(self, why: str) -> bool | Reservation:
        """Go on with the reply without a second reading; see :meth:`grant`."""
        one, self._again = self._again_for, None
        assert one is not None
        if one.paused:  # it was not ended meanwhile
            self._go_on(one, "not_reread", why)
        return self.ask_again() or True

    def _finish_again(self) -> bool | Reservation:
        """Go on with the reply if its conversation has been read again."""
        one = self._again_for
        assert one is not None and self._again is not None
        if self._again.logits is None:
            return False
        logits, self._again = self._again.logits, None
        if one.paused:
            self._go_on(one, "reread", logits=logits)
        return self.ask_again() or True

    def _go_on(
        self, one: DecodingReply, outcome: Outcome, why: str = "", logits: Tensor | None = None
    ) -> None:
        """Draw the next token of a paused reply; ``logits``: None: its own."""
        weighing = one.session.weighing
        assert weighing is not None and weighing.logits is not None
        own = weighing.logits
        one.session.settle(outcome, why)
        token = one.writer.attempt(one.writer.draw_from, own if logits is None else logits)
        one.token = PAUSED if token is None else token

    def _begin(self, session: Session, writer: ReplyWriter, logits: Tensor) -> None:
        """Begin a reply whose first token ``logits`` [vocab] are of."""
        one = DecodingReply(session, writer)
        self.decoding.append(one)  # before what may fail: its session is returned with the others
        writer.start(session.read_ids)
        token = following(session, writer, logits)
        one.token = PAUSED if token is None else token


class ReplyJob(EngineJob):
    """A prompt and the reply to it, in a session that is kept or one of its own.

    Args:
        prompt: it, or a function that makes it for the open session. That is called on admission,
            so pictures of a waiting request need not be decoded yet.
        budget: of a session of its own; None: the engine's.
        session: one that is kept; its budget counts.
        prompt_tokens: the most tokens of the prompt; a longer one is refused. None: those of the
            prompt, if it is given; otherwise the budget has to bound the pages.
        chunk: tokens in a chunk; None: the engine's.
        undo: whether a reply that is cancelled or fails takes its whole turn back, as a cancelled
            prompt does. A copy of the kept session's pages is held until the reply ends.
        settings: what else is done with the logits, and what the reply has to follow.

    Attributes:
        reply: set when the job has ended.
        writer: set while its prompt is being read; ``writer.take()`` streams the text.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt | Callable[[Session], Prompt],
        sampling: Sampling | None = None,
        budget: Budget | float | None = None,
        session: CachedConversation | None = None,
        prompt_tokens: int | None = None,
        chunk: int | None = None,
        undo: bool = False,
        settings: LogitSettings = LogitSettings(),  # noqa: B008 (frozen)
    ) -> None:
        own = engine.budgets.checked(budget) if session is None else session.budget
        super().__init__(engine, own, chunk or engine.prefill_chunk)
        self._kept = session
        self.sampling, self.settings = engine.settled(sampling), settings
        if isinstance(prompt, Prompt) and prompt_tokens is None:
            prompt_tokens = prompt.tokens
        self._given, self.prompt_tokens = prompt, prompt_tokens
        self.undo = undo and session is not None
        control = engine.loss_control
        refuses = control is not None and control.action == "refuse"
        self._keeps_copy = (undo or refuses) and session is not None
        self.reply: Reply | None = None
        self.writer: ReplyWriter | None = None
        self._before: Session | None = None  # for undo
        self._start: TurnStart | None = None
        self._prompt: Prompt | None = None

    @property
    def session(self) -> CachedConversation | None:
        """Return the session that is kept; None where the job opens one of its own."""
        return self._kept

    @property
    def finished(self) -> bool:
        """Whether the reply is complete."""
        return self.writer is not None and self.writer.finish_reason is not None

    @property
    def ready(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    fetches = False

    def prepare(self) -> None:
        """Do nothing: the prompt is made with its first chunk."""

    @property
    def failure(self) -> Exception | None:
        """Why the reply has failed; None where it has not."""
        return None if self.writer is None else self.writer.failure

    def reservation(self) -> Reservation:
        """Return the most pages that the request can need.

        Where the budget alone is a bound and the conversation may go on, or its length is not
        known, that; otherwise what prompt and longest reply can come to.

        Raises:
            InputError: neither the budget nor a known length bounds the pages; BudgetError: the
                budget is impossible.
        """
        engine, kept = self.engine, self._kept
        extent = SequenceSize() if kept is None else kept.extent
        tokens = self.prompt_tokens
        undo_copy, snapshot = self._copies()
        of_budget = engine.budgets.lasting_pages(self.budget)
        if of_budget is not None and (kept is not None or tokens is None or engine.shared):
            rows, size = engine.spec.rows, engine.cache.pool.page_size
            chunk = math.ceil(self.chunk * rows / size)
            return Reservation(of_budget + undo_copy, chunk, snapshot)
        if tokens is not None:
            new = self.sampling.max_new_tokens
            bound = page_bound(engine, self.budget, tokens, new, extent, self.chunk)
            return Reservation(bound.steady + undo_copy, bound.chunk, snapshot)
        if engine.cache.pool.limit is None:
            return Reservation(0)  # the pool grows: there is nothing to reserve
        raise InputError(
            f"with policy {engine.policy.name!r} and a budget of {self.budget.describe()} the "
            "length decides how much memory a request takes; give prompt_tokens, or a budget in "
            "entries or bytes"
        )

    def _copies(self) -> tuple[int, int]:
        """Count the pages of the copy for undo, and of what a cancelled prompt or waking needs."""
        kept, tokens = self._kept, self.prompt_tokens
        if kept is None:
            return 0, 0
        many_chunks = tokens is None or tokens > self.chunk
        # Read from its file, a session that shares a budget holds what it held until load_session
        # has cut all of them. No snapshot is made before: the same pages serve.
        woken = self.engine.shared is not None and not kept.resident
        snapshot = kept.pages if woken or (many_chunks and not self._keeps_copy) else 0
        return kept.pages if self._keeps_copy else 0, snapshot

    @property
    def held_pages(self) -> int:
        """Count the pages that it holds while its prompt is read, copies to return to included."""
        undo = self._before
        return super().held_pages + (0 if undo is None else self.engine.cache.held_pages(undo.seq))

    @property
    def slow_to_begin(self) -> bool:
        """Whether the first chunk encodes pictures; a prompt yet to be made may have some."""
        if self._prefill is not None:
            return False
        given = self._given
        return not isinstance(given, Prompt) or any("pixel" in name for name in given.inputs)

    def begin(self) -> None:
        """Open or wake the session and prepare the prompt, on the first call."""
        if self._prefill is None:
            self._prepare_prompt()

    def finish_chunk(self, tokens: int) -> bool | Reservation:
        """Begin the reply if the prompt is complete; see :meth:`EngineJob.finish_chunk`."""
        if self._again is not None:
            return self._finish_again()
        assert self._prefill is not None
        if self._prefill.logits is None:
            return False
        session, prompt, writer = self.live, self._prompt, self.writer
        assert session is not None and prompt is not None and writer is not None
        session.begin_reply(prompt, self.settings.rules.notes)
        self._begin(session, writer, self._prefill.logits)
        return self.ask_again() or True

    def _whole_prompt(self, again: Session) -> dict[str, Tensor]:
        assert self.live is not None and self._prompt is not None
        return self.live.whole_prompt(self._prompt, again)

    def roll_back(self) -> None:
        """Take the prompt back; one that is complete gets an empty reply instead."""
        if self._before is not None:
            self._return()
        elif self._prefill is not None and self._prefill.logits is not None:
            self.interrupt()
            self.end()
        elif self._kept is None:
            if self.live is not None:
                self.live.close()
        else:
            reading = None if self._prompt is None else self._prompt.reading
            if reading is not None and reading.plan is not None and self.live is not None:
                # It went back for nothing; what eviction has taken of it stays lost.
                self.live.held.differs = reading.differs or self.live.held.differs
            try:
                if self._prefill is not None:
                    self._prefill.roll_back()
            except SessionError:  # a policy that cannot evict: no state to return to
                self._kept.close()

    def interrupt(self) -> None:
        """End the reply where it stands."""
        if self.writer is not None:
            self.writer.finish("interrupted")

    def end(self) -> None:
        """Make the reply, and add it to the session's history if that is kept."""
        session, writer, prefill = self.live, self.writer, self._prefill
        assert session is not None and writer is not None and prefill is not None
        self.reply = session.end_reply(writer, prefill.tokens)
        if self._kept is None:
            session.close()
        elif writer.failure is not None and self._before is None and self._start is not None:
            session.take_back(self._start)
        elif writer.finish_reason == "interrupted" and (self.undo or writer.failure is not None):
            self._return()
        elif self._before is not None:
            self._before.close()

    def _return(self) -> None:
        """Go back to where the turn began, if a copy was kept."""
        if self._before is not None and self.live is not None:
            self.live._become(self._before)
            self._before = None

    def _prepare_prompt(self) -> None:
        engine, started = self.engine, time.perf_counter()
        self.live = engine.session(self.budget) if self._kept is None else self._kept.wake()
        self._start = self.live.turn_start()
        given = self._given
        prompt = self._prompt = given if isinstance(given, Prompt) else given(self.live)
        self.writer = ReplyWriter(
            engine,
            self.sampling,
            self.settings,
            prompt=prompt.end,
            text=prompt.text,
            prefix=prompt.prefix,
            started=started,
        )
        if self.prompt_tokens is not None and prompt.tokens > self.prompt_tokens:
            raise InputError(
                f"the prompt has {prompt.tokens:,} tokens and was announced with "
                f"{self.prompt_tokens:,}; send it again with the right number"
            )
        if self._keeps_copy:
            self._before = self.live.fork_apart()
        reading = prompt.reading
        if reading is not None and reading.plan is not None:
            # A copy to return to is not priced: what is taken back then is read again next time.
            reading.differs = self.live.go_back(reading.plan, reading.again)
        undoable = self._kept is not None and not self._keeps_copy
        self._prefill = self.live.begin_prefill(prompt.inputs, self.chunk, undoable)


class EngineExecutor:
    """Reads the prompts of jobs on one engine and decodes their replies.

    Pages that are in use when this is made belong to other sessions: they count as taken for as
    long as this lives.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, pool = engine, engine.cache.pool
        self._others = pool.num_pages - pool.free_pages
        self._pass_tokens = pass_tokens(engine)
        self._left: ChunkPass | None = None

    @property
    def pass_tokens(self) -> int:
        """Bound the tokens of chunks that share a pass; 0: chunks are read alone."""
        return 0 if self.engine.shared is not None else self._pass_tokens

    @property
    def _by_layer(self) -> bool:
        """Whether a pass may be left.

        A GPU is not waited for layer by layer. Who shares a budget evicts from all others.
        """
        engine = self.engine
        on_cpu = engine.device.type == "cpu" and not engine.decoder.hosted
        return on_cpu and engine.shared is None

    def pages_for(self, job: Job) -> int:
        """Count the pages that a job holds while its next chunk is stored."""
        reading = cast(EngineJob, job)
        return reading.held_pages + needed_pages(reading.prefill)

    def read(
        self, jobs: Sequence[Job], seconds: float | None = None
    ) -> list[bool | Reservation | Exception] | None:
        """Read the next chunk of each job, in one pass, or go on with the one that was left.

        Where a pass fails before it has changed a job's prompt, that job reads alone.
        """
        taken = cast(Sequence[EngineJob], jobs)
        before = [job.prefill.done for job in taken]
        try:
            if self._left is None:
                prefills = [job.prefill for job in taken]
                if len(taken) > 1:
                    reserve_together(prefills)
                self._left = ChunkPass(prefills, self._by_layer and seconds is not None)
            if not self._left.run(seconds):
                return None
        except STOPS:
            self.abort()  # Ctrl-C comes when it has been left
            raise
        except BaseException as error:
            self._left = None
            return _after_failure(taken, before, error)
        self._left = None
        return [_taken(*each) for each in zip(taken, before, strict=True)]

    def abort(self) -> None:
        """Take back the pass that was left."""
        if self._left is not None:
            self._left.abort()
        self._left = None

    def limit(self) -> int | None:
        """Return the pool's limit (``kv_limit``) without the pages of other sessions.

        Nor with those of a budget that sessions share, which they hold together.
        """
        limit = self.engine.cache.pool.limit
        others = self._others + self.engine.budgets.fixed_pages
        return None if limit is None else max(limit - others, 0)

    def step(self, jobs: Sequence[Job]) -> list[Reservation | None]:
        """Decode one step for the replies of all jobs. Raises MmkvError: nothing has changed."""
        taken = cast(Sequence[EngineJob], jobs)
        decoding = [one for job in taken for one in job.decoding if not one.paused]
        for one in decoding:
            # A reply without a position left ends, so that it does not stop the others.
            if not one.session.has_room:
                one.writer.attempt(one.writer.finish, "context")
        decoding = [one for one in decoding if one.writer.finish_reason is None]
        fed = [(one.session, one.writer, one.token) for one in decoding]
        for one, token in zip(decoding, step(self.engine, fed) if fed else (), strict=True):
            if token is not None:
                one.token = token
        return [job.ask_again() for job in taken]


def _after_failure(
    jobs: Sequence[EngineJob], before: Sequence[int], error: BaseException
) -> list[bool | Reservation | Exception]:
    """Return what has become of each job of a pass that failed.

    Args:
        before: tokens that each had read before the pass.
    """
    if len(jobs) == 1:
        return [_failed(jobs[0], error)]
    if isinstance(error, NotFiniteError):
        return [_taken(*each, error) for each in zip(jobs, before, strict=True)]
    expected = isinstance(error, (MmkvError, MemoryError))
    level = logging.DEBUG if expected else logging.WARNING
    log.log(level, "a pass of several prompts failed", exc_info=error)
    return [
        _read_alone(job) if job.prefill.done == done else _failed(job, error)
        for job, done in zip(jobs, before, strict=True)
    ]


def _failed(job: EngineJob, error: BaseException) -> bool | Reservation | Exception:
    """Return what becomes of a job whose chunk has failed."""
    if job.reads_again and isinstance(error, MmkvError):
        return job.give_up_again(str(error))
    return as_exception(error)


def _read_alone(job: EngineJob) -> bool | Reservation | Exception:
    before = job.prefill.done
    try:
        job.prefill.advance()
    except STOPS:
        raise
    except BaseException as error:
        return _failed(job, error)
    return _taken(job, before)


def _taken(
    job: EngineJob, before: int, broken: NotFiniteError | None = None
) -> bool | Reservation | Exception:
    """Finish a job's chunk; ``broken``: the error of a pass, if this job may be its cause."""
    prefill = job.prefill
    if broken is not None and prefill.logits is None and prefill.done in (before, prefill.tokens):
        return _failed(job, broken)
    try:
        return job.finish_chunk(prefill.done - before)
    except STOPS:
        raise
    except BaseException as error:
        return as_exception(error)


def batch_scheduler(engine: Engine, most: int) -> Scheduler:
    """Return a scheduler for up to ``most`` requests that reads prompts before it decodes."""
    limits = Limits(waiting=most, running=most, quantum=engine.prefill_chunk, interleave=False)
    return Scheduler(EngineExecutor(engine), limits)


@whole
def answer_all(engine: Engine, jobs: Sequence[ReplyJob]) -> list[Reply]:
    """Answer all, in one batch as far as there is room.

    Sessions that jobs have opened are closed. Raises the error of the first job that fails.
    Ctrl-C is delivered between two turns.
    """
    scheduler = batch_scheduler(engine, max(len(jobs), 1))
    try:
        tickets = [scheduler.submit(job) for job in jobs]
        while scheduler.turn():
            CtrlC.check()
            for ticket in tickets:
                if ticket.error is not None:
                    raise ticket.error
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error
        return [job.reply for job in jobs if job.reply is not None]
    finally:
        scheduler.close()
