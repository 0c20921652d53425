"""A request on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Literal, TypeVar

from mmkv.scheduler.contract import Job

State = Literal["waiting", "preparing", "prefill", "decode", "done", "cancelled", "failed"]
J = TypeVar("J", bound=Job)


class Ticket(Generic[J]):
    """What :meth:`Scheduler.submit` returns.

    Attributes:
        job: the request; user: whose it is.
        state: ``waiting`` for room, ``preparing`` what is not ready yet, in ``prefill`` or
            ``decode``, or over: ``done``, ``cancelled``, ``failed``.
        error: why it failed.
        turn: the scheduler's turn in which it was submitted.
        overtaken: later requests that were admitted while there was no room for this one.
    """

    def __init__(self, job: J, user: str, number: int, turn: int = 0) -> None:
        self.job, self.user, self.number, self.turn = job, user, number, turn
        self.state: State = "waiting"
        self.error: Exception | None = None
        self.overtaken = 0
        self.cancel_asked = False

    @property
    def owner(self) -> Hashable:
        """Return who commits what the request takes: its session, if that is kept."""
        return self if self.job.session is None else self.job.session

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ("done", "cancelled", "failed")

    def cancel(self) -> None:
        """Ask for the end; the scheduler looks between steps, so any thread may call this.

        A prompt that is not yet complete is taken back. A reply ends where it stands.
        """
        self.cancel_asked = True
