"""An engine with its scheduler and snapshots; all of it belongs to the engine's thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmkv.engine.budgets import why_unbound
from mmkv.engine.errors import BudgetError, MmkvError, SessionError
from mmkv.engine.memory import keep_freed, resident_bytes
from mmkv.sampling import Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.replies import EngineExecutor
from mmkv.server.conversation import digest_of
from mmkv.server.grammar import Grammars
from mmkv.server.hibernation import HibernationFolder
from mmkv.server.job import ChatJob
from mmkv.server.kept import Shelf
from mmkv.server.lengths import Lengths
from mmkv.server.memories import Memories
from mmkv.server.reply_json import FINISH
from mmkv.server.settings import Facts
from mmkv.server.snapshots import Snapshots
from mmkv.server.work import ChatWork
from mmkv.server.worker import Done, Event

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.prompt.qwen_vision import VideoRules
    from mmkv.server.metrics import Metrics
    from mmkv.server.settings import Settings
    from mmkv.server.worker import Request

log = logging.getLogger("mmkv.server")


class Machine:
    """What the engine's thread works with.

    Args:
        lookahead: what the engine's policy was made with.

    Attributes:
        facts: what the HTTP routes know of the engine; folder: where idle memories hibernate.
    """

    def __init__(
        self, engine: Engine, settings: Settings, metrics: Metrics, lookahead: float
    ) -> None:
        self.engine, self.metrics = engine, metrics
        running = settings.max_running
        limits = Limits(settings.max_queue, running, 2 * running, engine.prefill_chunk)
        self.scheduler = Scheduler(EngineExecutor(engine), limits, to_files=True)
        most, pool = settings.snapshot_bytes, engine.cache.pool
        self.snapshots = Snapshots(
            self.scheduler, None if most is None else most // pool.page_bytes
        )
        tokenizer = engine.processor.tokenizer
        self.grammars = Grammars(tokenizer, engine.spec.vocab_size, engine.eos_token_ids)
        self.folder = _hibernation_folder(settings)
        self.shelf = Shelf(engine, self.scheduler, self.folder)
        self.facts = _facts(engine, lookahead)
        self._require_room()
        _set_aside(engine)
        if engine.device.type == "cpu":
            keep_freed()
        if settings.warm and engine.processor.sees:
            _show_a_picture(engine)

    def job(self, work: ChatWork, admitted: Callable[[], None]) -> ChatJob:
        """Return the job of a request. Raises MmkvError."""
        chunk = self.engine.prefill_chunk
        memories = Memories(self.engine, work, self.snapshots, self.shelf)
        return ChatJob(self.engine, work, memories, self.grammars, chunk, admitted)

    def close(self) -> None:
        """Cancel what is left, and return all pages and files."""
        self.scheduler.close()
        self.folder.close()

    def _require_room(self) -> None:
        """Refuse to start where not even one request has room. Raises BudgetError."""
        limit = self.scheduler.executor.limit()
        job = self.job(ChatWork([], "", Sampling.greedy()), lambda: None)
        if limit is not None and job.price().total > limit:
            size = self.engine.cache.pool.page_bytes
            raise BudgetError(
                f"a request may take {job.price().total * size:,} bytes, the memory limit holds "
                f"{limit * size:,} in whole pages; raise --memory, or lower the budget"
            )

    def report(self) -> None:
        """Set the metrics that show a state."""
        pool, scheduler, metrics = self.engine.cache.pool, self.scheduler, self.metrics
        together = self.engine.budgets.fixed_pages  # of all sessions, beside their own
        held = pool.num_pages - pool.free_pages
        committed = scheduler.ledger.committed + together
        metrics.running.set(scheduler.running)
        metrics.waiting.set(scheduler.waiting)
        metrics.kv_pages.labels("held").set(held)
        metrics.kv_pages.labels("reserved").set(max(committed - held, 0))
        if pool.limit is not None:
            metrics.kv_pages.labels("free").set(pool.limit - max(committed, held))
        metrics.kv_bytes_committed.set(committed * pool.page_bytes)
        metrics.snapshot_bytes.set(self.snapshots.pages * pool.page_bytes)
        metrics.sessions.labels("running").set(scheduler.running)
        metrics.sessions.labels("snapshot").set(len(scheduler.residents.spares))
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
        if not ticket.over:
            return
        if ticket.state == "done":
            assert times.first is not None
            metrics.whole_time.observe(now - times.submitted)
            metrics.decode_time.observe(now - times.first)
        reasons = [one.finish_reason for one in job.choices] or [ticket.state]
        for reason in reasons if ticket.state == "done" else [ticket.state]:
            metrics.finished.labels(FINISH.get(reason, reason)).inc()
        if any(isinstance(event, Done) for event in events):
            for name, count in job.evicted_here().items():
                metrics.evicted.labels(name).inc(count)


def _hibernation_folder(settings: Settings) -> HibernationFolder:
    """Make the folder where idle memories lie. Raises SessionError: the one that was named cannot.

    Nobody has named the usual one: a user without a home, or with one that is read-only, as in many
    containers, can be served without it.
    """
    usual = settings.idle_folder
    if settings.session_folder is None and usual is not None:
        try:
            return HibernationFolder(usual)
        except SessionError as error:
            log.warning("%s; until then idle memories lie among the temporary files", error)
    return HibernationFolder(settings.session_folder)


def _set_aside(engine: Engine) -> None:
    """Make the pool as large as it may become, so that it is never copied to grow.

    On a CPU it takes the memory as pages come into use. Raises BudgetError.
    """
    pool = engine.cache.pool
    if pool.limit is None:
        return
    try:
        pool.grow(pool.limit)
    except BudgetError as error:
        size = pool.limit * pool.page_bytes
        raise BudgetError(
            f"the cache may take {size / 2**30:,.1f} GiB, which are not free; lower --memory"
        ) from error


def _show_a_picture(engine: Engine) -> None:
    """Read a picture, so that the first request with one does not wait for imports.

    They take seconds, in the thread that decodes for everybody.
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
    finally:
        session.close()


def _facts(engine: Engine, lookahead: float) -> Facts:
    identity = engine.identity() | {
        "cuts": f"message ends but before a reply, chunks of {engine.prefill_chunk}",
        "template": engine.processor.template.source,
    }
    return Facts(
        root=digest_of(identity),
        policy=engine.policy.name,
        budget=engine.budget,
        unbound=why_unbound(engine.policy) is not None,
        lookahead=lookahead,
        context=engine.spec.max_position,
        vocabulary=engine.spec.vocab_size,
        sees=engine.processor.sees,
        watches=engine.processor.watches,
        sampling=engine.generation.served,
        shared=engine.shared is not None,
        rules=getattr(engine.processor, "rules", None),
        frame_rule=engine.processor.frame_rule,
        picture_rules=_picture_rules(engine),
        lengths=Lengths(engine.processor.tokenizer, engine.spec.max_position),
    )


def _picture_rules(engine: Engine) -> VideoRules | None:
    try:
        return engine.processor.picture_rules
    except MmkvError:  # settings that cannot be used are the first picture's error
        return None
