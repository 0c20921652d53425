"""The engine thread, the only one that uses torch, and what it owns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch

from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.budgets import why_unbound
from mmkv.engine.errors import STOPS, BudgetError, MmkvError, SessionError, as_exception
from mmkv.engine.runtime import Runtime
from mmkv.engine.system import resident_bytes
from mmkv.resources import BUNDLED_NOTE
from mmkv.sampling import Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.replies import EngineExecutor
from mmkv.server.conversations import ConversationStore, PrefixCache
from mmkv.server.errors import ApiError
from mmkv.server.footprint import UNSENT_TOGETHER, fitted
from mmkv.server.job import ChatJob, ConversationLookup
from mmkv.server.prompts import ContextBounds, digest_of
from mmkv.server.reply import FINISH, Spelled, spell
from mmkv.server.settings import Facts, RequestBounds
from mmkv.server.store import HibernationFolder
from mmkv.server.work import ChatWork

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.calls.parser import ReplyParser
    from mmkv.prompt.qwen_vision import VideoRules
    from mmkv.scheduler import Ticket
    from mmkv.server.metrics import Metrics
    from mmkv.server.settings import ServerSettings
    from mmkv.server.work import RequestCounts, Usage


log = logging.getLogger("mmkv.server")
_SCORED_BYTES = 600  # of a token with its log probability
_BEHIND = 64  # events after which pieces of a reply are put together
T = TypeVar("T")


@dataclass
class Admitted:
    """The pages of a request are reserved, and its media are needed now."""


@dataclass
class Delta:
    """A piece of a reply; ``stop_text``: the stop string, or token, that ended it, if one did."""

    index: int
    text: str
    spelled: list[Spelled] = field(default_factory=list)
    finish_reason: str | None = None
    stop_text: str | None = None


@dataclass
class Done:
    """All replies are complete."""

    usage: Usage


@dataclass
class Failed:
    """The request cannot be answered."""

    error: BaseException


Event = Admitted | Delta | Done | Failed


class Events:
    """The events of a request that were not sent yet; in the event loop.

    A client that reads slower than the reply grows gets several tokens at a time. If the unsent
    part passes a bound all the same, as log probabilities can, the client is dropped: the next
    event is Failed. There is a bound for all requests together, too: past it, the one with the
    largest unsent part is dropped.

    Args:
        others: those of all requests under way; most: bytes of the unsent part, about.
    """

    def __init__(
        self, others: WeakSet[Events] | None = None, most: int = RequestBounds.unsent
    ) -> None:
        self._most = most
        self._others = WeakSet() if others is None else others
        self._others.add(self)
        self._waiting: deque[Event] = deque()
        self._open: dict[int, Delta] = {}  # by reply, the last one that may still grow
        self._some = asyncio.Event()
        self.unsent, self.over = 0, False

    def put(self, event: Event) -> None:
        """Add an event."""
        if self.over:
            return
        if isinstance(event, Delta):
            self.unsent += _size(event)
            if self.unsent > self._most:
                self.drop()
                return
            if len(self._waiting) >= _BEHIND and (last := self._open.get(event.index)):
                last.text += event.text
                last.spelled += event.spelled
                last.finish_reason, last.stop_text = event.finish_reason, event.stop_text
                return
            else:
                self._open[event.index] = event
        self._waiting.append(event)
        self._some.set()
        # Others' parts are looked at where this one is large: few are.
        if self.unsent > self._most // 16:
            behind = sorted(self._others, key=lambda one: one.unsent)
            together = sum(one.unsent for one in behind)
            while together > UNSENT_TOGETHER * self._most:
                together -= behind[-1].unsent
                behind.pop().drop()

    def drop(self) -> None:
        """Drop what was not sent; the client is told that it was too slow."""
        self._waiting.clear()
        self._open.clear()
        self._waiting.append(Failed(_too_slow(self._most)))
        self.unsent, self.over = 0, True
        self._some.set()

    async def get(self) -> Event:
        """Wait for the next event."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        event = self._waiting.popleft()
        if isinstance(event, Delta):
            self.unsent -= _size(event)
            if self._open.get(event.index) is event:
                del self._open[event.index]
        return event


def _size(delta: Delta) -> int:
    """Estimate the bytes that a piece of a reply takes until it is sent."""
    return len(delta.text) + _SCORED_BYTES * sum(1 + len(one.top) for one in delta.spelled)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down; try another one", "shutdown")


def _too_slow(most: int) -> ApiError:
    what = f"over {most >> 20} MiB of the reply were not read; read faster, or ask for less"
    return ApiError(408, what, "client_too_slow")


class Request:
    """A chat request that the engine thread has taken on; made by :meth:`EngineThread.submit`.

    Attributes:
        events: what happens to it, in order; the last one is Done or Failed; none
            follows a cancellation.
        counted: tokens that the metrics have counted; longest: of one reply.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self.events = Events(thread.events, thread.core.settings.bounds.unsent)
        self.loop = asyncio.get_running_loop()
        self.ticket: Ticket[ChatJob] | None = None
        self.times, self.counted, self.longest = RequestTimes(), 0, 0
        self.broken = False  # told that it failed, though its ticket is not over
        self._ended: set[int] = set()  # replies whose end was sent

    @property
    def counts(self) -> RequestCounts:
        """Return the counts of its prompt's tokens, which are right once a reply has begun."""
        assert self.ticket is not None
        return self.ticket.job.counts

    async def on_engine(self, call: Callable[[ChatJob], T]) -> T:
        """Call something with the request's job on the engine thread."""
        ticket = self.ticket
        assert ticket is not None

        def run() -> T:
            if ticket.over:
                raise ApiError(409, "the request is over", "conflict")
            return call(ticket.job)

        return await self._thread.call(run)

    def parser(self, index: int) -> ReplyParser:
        """Return what takes a reply apart that has begun."""
        assert self.ticket is not None
        return self.ticket.job.writers[index].parser()

    def cancel(self) -> None:
        """Cancel it in any state; its pages are free within two turns."""
        if self.ticket is not None:
            self.ticket.cancel()
            self._thread.wake()

    def news(self) -> list[Event]:
        """Return what has happened since the last call; on the engine thread."""
        ticket = self.ticket
        assert ticket is not None
        if ticket.state == "failed":
            assert ticket.error is not None
            return [Failed(ticket.error)]
        found: list[Event] = []
        for index, writer in enumerate(ticket.job.writers):
            piece, scored = writer.take(), writer.take_scored()
            ended = writer.finish_reason if index not in self._ended else None
            if ended is not None:
                self._ended.add(index)
            if piece or scored or ended:
                tokenizer = ticket.job.engine.processor.tokenizer
                spelled = spell(tokenizer, scored) if scored else []
                stop = writer.stop_text if ended else None
                found.append(Delta(index, piece, spelled, ended, stop))
        if ticket.state == "done":
            found.append(Done(ticket.job.usage()))
        return found


@dataclass
class RequestTimes:
    """The times of a request's steps, in seconds of :func:`time.perf_counter`."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None
    latest: float | None = None


class EngineThread(threading.Thread):
    """Runs an :class:`EngineCore`: commands from a queue and turns of its scheduler, in turn.

    Args:
        start: makes the core, in the thread.

    Attributes:
        core: once it is made: :meth:`facts` waits for it.
        failed: whether the thread has ended by an error; every request is refused then.
    """

    core: EngineCore

    def __init__(self, start: Callable[[], EngineCore]) -> None:
        super().__init__(name="mmkv-engine", daemon=True)
        self._start = start
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._commands = queue.SimpleQueue()
        self._requests: list[Request] = []
        self._ending = self._drained = self.failed = False
        # Numbers that one thread writes and the other reads: requests sent to the thread and taken
        # by it, and how many more it could take when it looked last.
        self._sent = self._taken = 0
        self._places = 1
        self.events: WeakSet[Events] = WeakSet()  # of all requests; the event loop's

    async def call(self, command: Callable[[], T]) -> T:
        """Run ``command`` in the thread, between two turns."""
        return await asyncio.wrap_future(self.post(command))

    def post(self, command: Callable[[], T]) -> Future[T]:
        """Queue ``command`` for the thread; may be called from any thread."""
        future: Future[T] = Future()
        self._commands.put((command, future))
        return future

    def facts(self) -> Facts:
        """Return what is known of the engine once it is loaded. Raises what loading it raises."""
        return self.post(lambda: self.core.facts).result()

    def wake(self) -> None:
        """Wake the thread if it waits for a command."""
        self._commands.put(None)

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._requests)

    def has_place(self) -> bool:
        """Whether there seems to be a place for one more request; in the event loop."""
        return self.failed or self._sent - self._taken < self._places

    async def submit(self, work: ChatWork, user: str) -> Request:
        """Take on a request. Raises MmkvError, CapacityError among them."""
        request = Request(self)
        self._sent += 1
        came = False

        def arrive() -> None:
            nonlocal came
            self._taken += not came
            came = True

        def run() -> None:
            arrive()
            core = self.core
            if self._ending or self._drained:
                raise _shutting_down()
            job = core.job(work, lambda: self._tell([(request, [Admitted()])]))
            core.scheduler.admit()  # those that came since the latest turn
            request.ticket = core.scheduler.submit(job, user)
            self._requests.append(request)
            self._count_places()

        try:
            await self.call(run)
        except asyncio.CancelledError:
            self.post(request.cancel)  # after it has been submitted
            self.post(arrive)  # unless it never is
            raise
        return request

    def end_requests(self) -> None:
        """Tell all who wait for a reply that the server ends; in the event loop."""
        self._drained = True
        for events in list(self.events):
            events.put(Failed(_shutting_down()))

    def stop(self) -> None:
        """Cancel what is left, return all pages and end the thread."""
        self._ending = True
        self.wake()
        self.join()

    def run(self) -> None:
        """Work until :meth:`stop` is called."""
        try:
            self.core = self._start()
        except BaseException as error:
            self._refuse(error)
            return
        try:
            self._count_places()
            while not self._ending:
                self._take_commands(wait=not self._requests or self.core.scheduler.blocked)
                self.core.scheduler.turn()
                self._count_places()
                self._publish()
            self.core.close()
            self._publish()
        except BaseException as error:
            log.critical("the engine's thread has failed", exc_info=error)
            self.failed = True
            stopped = ApiError(
                503,
                "the engine has stopped; its log says why, restart the server",
                "engine_stopped",
            )
            for request in self._requests:
                self._tell([(request, [Failed(stopped)])])
            self._refuse(stopped)

    def _take_commands(self, wait: bool) -> None:
        while True:
            try:
                given = self._commands.get(wait)
            except queue.Empty:
                return
            wait = False
            if given is None:
                continue
            command, future = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except BaseException as error:
                # asyncio hands on what is no Exception past every handler of a request.
                future.set_exception(error if isinstance(error, STOPS) else as_exception(error))

    def _count_places(self) -> None:
        """Update how many more requests there is a place for."""
        scheduler = self.core.scheduler
        limits, waiting = scheduler.limits, scheduler.waiting
        free = max(scheduler.places, 0)  # one for each, if there is memory
        self._places = 0 if waiting >= limits.waiting else limits.waiting - waiting + free

    def _publish(self) -> None:
        """Send each request its news, and remove those that are over."""
        news: list[tuple[Request, list[Event]]] = []
        for request in list(self._requests):
            try:
                events = self._published(request)
            except STOPS:
                raise
            except BaseException as error:  # its own: others go on
                log.error("a request failed", exc_info=error)
                events = [] if request.broken else [Failed(as_exception(error))]
                request.broken = True
                assert request.ticket is not None
                request.ticket.cancel()
            if events:
                news.append((request, events))
        if news:
            self._tell(news)

    def _published(self, request: Request) -> list[Event]:
        """Return the news of a request, which is removed if it is over."""
        ticket = request.ticket
        assert ticket is not None
        try:
            events = [] if ticket.state == "cancelled" or request.broken else request.news()
            self.core.observe(request, events)
        finally:
            if ticket.over:
                self._requests.remove(request)
                ticket.job.leave()
        if isinstance(ticket.error, Exception) and not _expected(ticket.error):
            log.error("a request failed", exc_info=ticket.error)
        return events

    def _tell(self, news: list[tuple[Request, list[Event]]]) -> None:
        """Hand events to the event loop, all in one call."""

        def put() -> None:
            for request, events in news:
                for event in events:
                    request.events.put(event)
                if request.events.over:
                    request.cancel()

        try:
            news[0][0].loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("nobody waits for an answer")

    def _refuse(self, error: BaseException) -> None:
        """Fail all commands: the core could not be made, or has failed."""
        while not self._ending:
            given = self._commands.get()
            if given is not None and given[1].set_running_or_notify_cancel():
                given[1].set_exception(error)


def _expected(error: Exception) -> bool:
    return isinstance(error, (MmkvError, ApiError))


class EngineCore:
    """What the engine thread owns: engine, scheduler, and the conversations.

    Args:
        lookahead: what the engine's policy was made with.

    Attributes:
        settings: with the bounds that ``--process-memory`` leaves room for; footprint: what the
            process takes within them.
        facts: what the HTTP routes know of the engine; folder: where idle conversations lie.

    Raises:
        BudgetError: there is no room for a request, or for the process.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, metrics: Metrics, lookahead: float
    ) -> None:
        self.engine, self.metrics = engine, metrics
        running = settings.max_running
        chunk, gap = engine.prefill_chunk, settings.gap
        limits = Limits(settings.max_queue, running, 2 * running, chunk, gap=gap)
        self.scheduler = Scheduler(EngineExecutor(engine), limits, to_files=True)
        most, pool = settings.snapshot_bytes, engine.cache.pool
        self.prefix_cache = PrefixCache(
            self.scheduler, None if most is None else most // pool.page_bytes
        )
        self.folder = _hibernation_folder(settings)
        self.conversations = ConversationStore(engine, self.scheduler, self.folder)
        self.pictures_counted = 0, 0  # in the metrics: asked for, found
        self._require_room()
        _set_aside(engine)
        if settings.warm and engine.device.type == "cuda":
            compile_kernels(engine)
        if settings.warm and engine.processor.sees:
            _show_a_picture(engine)
        self.settings, self.footprint = fitted(engine, settings)
        kept = self.settings.kept_tokens(engine.spec.max_position)
        self.facts = _facts(engine, lookahead, kept)
        bound = self.settings.bounds.contexts is not None
        self.conversations.longest = kept if bound else self.facts.longest

    def job(self, work: ChatWork, admitted: Callable[[], None]) -> ChatJob:
        """Return the job of a request. Raises MmkvError."""
        chunk = self.engine.prefill_chunk
        memories = ConversationLookup(self.engine, work, self.prefix_cache, self.conversations)
        return ChatJob(self.engine, work, memories, chunk, admitted)

    def close(self) -> None:
        """Cancel what is left, and return all pages and files."""
        self.scheduler.close()
        self.folder.close()

    def _require_room(self) -> None:
        """Refuse to start where not even one request has room. Raises BudgetError."""
        limit = self.scheduler.executor.limit()
        job = self.job(ChatWork([], "", Sampling.greedy()), lambda: None)
        if limit is not None and job.reservation().total > limit:
            size = self.engine.cache.pool.page_bytes
            needed, features = job.reservation().total * size, self.engine.vision_cache.limit
            beside = f" beside {features:,} for features of pictures" if features else ""
            raise BudgetError(
                f"a request may take {needed:,} bytes, the memory limit holds "
                f"{limit * size:,} in whole pages{beside}; raise --memory, or lower the budget"
                + (" or --vision-cache" if features else "")
            )

    def report(self) -> None:
        """Update the gauges."""
        pool, scheduler, metrics = self.engine.cache.pool, self.scheduler, self.metrics
        together = self.engine.budgets.fixed_pages  # of all sessions, beside their own
        held = pool.num_pages - pool.free_pages + pool.beside
        committed = scheduler.ledger.committed + together
        metrics.running.set(scheduler.running)
        metrics.waiting.set(scheduler.waiting)
        metrics.kv_pages.labels("held").set(held)
        metrics.kv_pages.labels("reserved").set(max(committed - held, 0))
        if pool.limit is not None:
            metrics.kv_pages.labels("free").set(pool.limit - max(committed, held))
        metrics.kv_bytes_committed.set(committed * pool.page_bytes)
        metrics.snapshot_bytes.set(self.prefix_cache.pages * pool.page_bytes)
        seen, before = self.engine.vision_cache, self.pictures_counted
        self.pictures_counted = seen.queries, seen.hits
        metrics.picture_queries.inc(seen.queries - before[0])
        metrics.picture_hits.inc(seen.hits - before[1])
        metrics.picture_bytes.set(seen.nbytes)
        if (control := self.engine.loss_control) is not None:
            metrics.weighed.set(control.answers)
            metrics.drift.set(control.drift.alarm is not None)
            for outcome, count in control.outcomes.items():
                metrics.escalated.labels(outcome).set(count)
        metrics.sessions.labels("running").set(scheduler.running)
        metrics.sessions.labels("snapshot").set(len(scheduler.residents.copies))
        kept = scheduler.sessions
        idle = sum(one.resident for one in kept)
        metrics.sessions.labels("idle").set(idle)
        metrics.sessions.labels("file").set(len(kept) - idle)
        metrics.process_resident.set(resident_bytes() or 0)
        leaked = 0 if scheduler.running else held - committed
        metrics.page_leaks.set(max(leaked, 0))

    def observe(self, request: Request, events: list[Event]) -> None:
        """Count what has happened to a request."""
        metrics, times, now = self.metrics, request.times, time.perf_counter()
        ticket = request.ticket
        assert ticket is not None
        job: ChatJob = ticket.job
        if times.admitted is None and ticket.state not in ("waiting", "cancelled", "failed"):
            times.admitted = now
            metrics.queue_time.observe(now - times.submitted)
        lengths = [len(writer.token_ids) for writer in job.writers]
        tokens, longest = sum(lengths), max(lengths, default=0)
        new = longest - request.longest  # of one reply: a turn may bring several
        if times.first is None and job.writers:
            times.first = times.latest = now
            metrics.first_token.observe(now - times.submitted)
            metrics.prefill_time.observe(now - (times.admitted or times.submitted))
            metrics.prompt_tokens.inc(job.counts.prefilled)
            metrics.resumed_tokens.inc(job.counts.resumed)
        elif times.latest is not None and new:
            for _ in range(new):
                metrics.inter_token.observe((now - times.latest) / new)
            times.latest = now
        metrics.generated_tokens.inc(tokens - request.counted)
        request.counted, request.longest = tokens, longest
        if ticket.over:
            self._observe_end(ticket, times, now)
        if any(isinstance(event, Done) for event in events):
            for name, count in job.counts.evicted_here(job.replies()).items():
                metrics.evicted.labels(name).inc(count)

    def _observe_end(self, ticket: Ticket[ChatJob], times: RequestTimes, now: float) -> None:
        """Count a request that is over."""
        metrics, job = self.metrics, ticket.job
        if ticket.state == "done":
            metrics.whole_time.observe(now - times.submitted)
            if times.first is not None:
                metrics.decode_time.observe(now - times.first)
        if job.observed:
            metrics.prompt_tokens.inc(job.counts.prefilled)
            metrics.resumed_tokens.inc(job.counts.resumed)
        reasons = [one.finish_reason for one in job.choices] or ["observed"]
        for reason in reasons if ticket.state == "done" else [ticket.state]:
            metrics.finished.labels(FINISH.get(reason, reason)).inc()


def _hibernation_folder(settings: ServerSettings) -> HibernationFolder:
    """Make the folder of idle conversations. Raises SessionError: the one that was named cannot be.

    The default one may be missing: users in containers often have no home, or a read-only one.
    Idle conversations then lie among the temporary files.
    """
    usual = settings.idle_folder
    if settings.session_folder is None and usual is not None:
        try:
            return HibernationFolder(usual)
        except SessionError as error:
            log.warning("%s; until then idle memories lie among the temporary files", error)
    return HibernationFolder(settings.session_folder)


def _set_aside(engine: Engine) -> None:
    """Allocate the whole pool now, so that it is never copied to grow. Raises BudgetError.

    On a CPU the system provides the memory as pages come into use.
    """
    pool = engine.cache.pool
    # On a GPU the states of linear layers take their part of the limit as sessions open.
    if pool.limit is None or (engine.cache.states and engine.device.type == "cuda"):
        return
    try:
        pool.grow(pool.limit)
    except BudgetError as error:
        size = pool.limit * pool.page_bytes
        raise BudgetError(
            f"the cache may take {size / 2**30:,.1f} GiB, which are not free; lower --memory"
        ) from error


def compile_kernels(engine: Runtime) -> None:
    """Read chunks of all sizes and decode bursts, so that no request waits for Triton's compiler.

    Later batches, draws and lengths are compiled no more (tests/engine/backends/test_variants.py).
    Graphs are captured when a batch first needs one: a pool that grows would void them.
    """
    session = engine.session()
    try:
        with contextlib.suppress(MmkvError):
            for count in (engine.prefill_chunk + 70, 3, 20, 40):
                session.prefill({"input_ids": torch.zeros(1, count, dtype=torch.int64)})
            for draws in (None, [Draw()]):  # longer than an interval: one step evicts
                engine.decode_many([session], [0], 20, draws=draws)
    finally:
        session.close()


def _show_a_picture(engine: Engine) -> None:
    """Read a picture, so that the first request with one does not wait for imports.

    Imports take seconds, and the thread decodes for everybody.
    """
    from PIL import Image

    session = engine.session()
    try:
        with contextlib.suppress(MmkvError):
            picture = Image.new("RGB", (64, 64))
            for _ in session.send(
                "?", images=[picture], sampling=Sampling.greedy(max_new_tokens=1)
            ):
                pass
        if note := engine.family.vision_note:
            log.info("%s", note)
    finally:
        session.close()


def _facts(engine: Engine, lookahead: float, kept_tokens: int) -> Facts:
    identity = engine.identity() | {
        "cuts": f"message ends but before a reply, chunks of {engine.prefill_chunk}",
        "template": engine.processor.template.source,
    }
    unbound = why_unbound(engine)
    return Facts(
        base_key=digest_of(identity),
        policy=engine.policy.name,
        budget=engine.budget,
        unbound=unbound,
        lookahead=lookahead,
        context=engine.spec.max_position,
        longest=kept_tokens if engine.endless and unbound is None else None,
        vocabulary=engine.spec.vocab_size,
        sees=engine.processor.sees,
        watches=engine.processor.watches,
        sampling=engine.generation.served,
        shared=engine.shared is not None,
        rules=getattr(engine.processor, "rules", None),
        frame_rule=engine.processor.frame_rule,
        picture_rules=_picture_rules(engine),
        note=BUNDLED_NOTE if engine.is_bundled_model else None,
        template_variables=engine.processor.template.variables,
        call_format=engine.processor.template.call_format,
        thoughts=engine.processor.template.thoughts,
        context_bounds=ContextBounds(engine.processor.tokenizer, engine.spec.max_position),
    )


def _picture_rules(engine: Engine) -> VideoRules | None:
    try:
        return engine.processor.picture_rules
    except MmkvError:  # settings that cannot be used are the first picture's error
        return None
