"""Run several documents in one batch; when one is done, the next one starts in its slot.

A document is a *script*: a generator that yields requests and is sent the replies, one for a single
question, several for a dialogue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv.engine.errors import MmkvError
from mmkv.eval.lmms.dialogue import Dialogue
from mmkv.eval.lmms.messages import Frames
from mmkv.scheduler.replies import batch_scheduler

if TYPE_CHECKING:
    from mmkv import Engine, Sampling
    from mmkv.prompt.template import Message
    from mmkv.reply import Reply
    from mmkv.scheduler import Scheduler, Ticket
    from mmkv.scheduler.replies import ReplyJob


@dataclass(frozen=True)
class Ask:
    """A request: the whole conversation so far, which the model continues."""

    messages: Sequence[Message]
    sampling: Sampling


Script = Generator[Ask, "Reply", None]


class _Member:
    """A script that runs."""

    def __init__(self, name: str, script: Script, dialogue: Dialogue) -> None:
        self.name, self.script, self.dialogue = name, script, dialogue
        self.ticket: Ticket[ReplyJob] | None = None

    def proceed(self, scheduler: Scheduler) -> bool:
        """Hand over a finished reply and ask the next question; False when all is done."""
        try:
            if self.ticket is None:
                ask = next(self.script)
            elif self.ticket.over:
                ask = self.script.send(self._reply(self.ticket))
            else:
                return True
            job = self.dialogue.turn(ask.messages, ask.sampling, scheduler)
            self.ticket = scheduler.submit(job)
        except StopIteration:
            self.dialogue.close(scheduler)
            return False
        except MmkvError as error:
            raise type(error)(f"{self.name}: {error}") from error
        return True

    def _reply(self, ticket: Ticket[ReplyJob]) -> Reply:
        if ticket.error is not None:
            raise ticket.error
        reply = ticket.job.reply
        assert reply is not None
        self.dialogue.replied(reply)
        return reply


def run(
    engine: Engine,
    scripts: Iterable[tuple[str, Script]],
    batch_size: int,
    frames: Frames,
    done: Callable[[], object],
) -> None:
    """Run named scripts to their ends, up to ``batch_size`` in every decode step.

    ``done`` is called for each that ends. Raises the MmkvError of the first document that cannot
    be answered, with its name in front; no session stays open.
    """
    waiting = deque(scripts)
    running: list[_Member] = []
    scheduler = batch_scheduler(engine, batch_size)
    try:
        while waiting or running:
            while waiting and len(running) < batch_size:
                name, script = waiting.popleft()
                running.append(_Member(name, script, Dialogue(engine, frames)))
            for member in list(running):
                if not member.proceed(scheduler):
                    running.remove(member)
                    done()
            scheduler.turn()
    finally:
        scheduler.close()
