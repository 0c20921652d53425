"""A batch of requests, answered together while the caller waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv.engine.interrupts import CtrlC, whole
from mmkv.reply import Reply
from mmkv.scheduler.loop import Limits, Scheduler
from mmkv.scheduler.replies import EngineExecutor, ReplyJob

if TYPE_CHECKING:
    from mmkv.api import Engine


def batch_scheduler(engine: Engine, most: int) -> Scheduler:
    """Return a scheduler for up to ``most`` requests that reads prompts before it decodes."""
    limits = Limits(waiting=most, running=most, quantum=engine.prefill_chunk, interleave=False)
    return Scheduler(EngineExecutor(engine), limits)


@whole
def answer_all(engine: Engine, jobs: Sequence[ReplyJob]) -> list[Reply]:
    """Answer all, in one batch as far as there is room.

    No session of a job's own stays open. Raises the error of the first job that fails. Ctrl-C is
    delivered between two turns.
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
