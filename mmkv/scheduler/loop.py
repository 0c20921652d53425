"""The scheduler: one loop for every request on one engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mmkv.engine.errors import STOPS, CapacityError, MmkvError, SessionError, as_exception
from mmkv.engine.interrupts import whole
from mmkv.scheduler.capacity import Capacity, S
from mmkv.scheduler.contract import Executor, KeptSession, Price
from mmkv.scheduler.fairness import DeficitRoundRobin, UserQueues
from mmkv.scheduler.shared_pass import SharedPass
from mmkv.scheduler.ticket import J, State, Ticket


@dataclass(frozen=True)
class Limits:
    """Bounds on what the scheduler takes on.

    Attributes:
        waiting: most requests that wait; one more is refused.
        running: most requests that are read or decoded at a time, or prepare for it here.
        fetching: most requests beside those that wait for other servers, or for a place after that.
        quantum: tokens of prompts that each user is granted in turn; a chunk's length at least.
        patience: later requests that may be admitted before one for which there is no room; then
            nothing is admitted until there is.
        interleave: whether every turn decodes. If not, replies wait while a prompt can be read:
            for a batch that nobody watches.
    """

    waiting: int = 64
    running: int = 8
    fetching: int = 16
    quantum: int = 256
    patience: int = 8
    interleave: bool = True


class Scheduler:
    """Runs requests together so that their sessions never hold more pages than there are.

    A request is admitted when the pages that it and all other open sessions may come to hold are
    within the executor's limit: it then runs to its end, whatever the others do. One thread calls
    all methods; :meth:`Ticket.cancel` may be called from any. Ctrl-C waits for their end.

    Attributes:
        waiting: requests that wait for room; turns: those made so far.
    """

    def __init__(
        self, executor: Executor, limits: Limits | None = None, to_files: bool = False
    ) -> None:
        self.executor, self.limits = executor, limits or Limits()
        self.capacity = Capacity(executor, to_files)
        self.ledger, self.residents = self.capacity.ledger, self.capacity.residents
        self.queues = UserQueues()
        self.preparing: list[Ticket[Any]] = []
        self.decoding: list[Ticket[Any]] = []
        self._round_robin = DeficitRoundRobin(self.limits.quantum)
        self._busy: dict[KeptSession, Ticket[Any]] = {}
        self._sessions: set[KeptSession] = set()
        self._impatient: Ticket[Any] | None = None
        self._submitted = 0
        self.turns, self.waiting = 0, 0
        self._moved = False  # whether the next turn may admit what the latest one did not

    @property
    def running(self) -> int:
        """Count the requests that are prepared, read or decoded."""
        return len(self.queues) - self.waiting + len(self.preparing) + len(self.decoding)

    @property
    def places(self) -> int:
        """Count the requests that may be read or decoded beside those that are."""
        return self.limits.running - self.running + len(self._fetching())

    @property
    def blocked(self) -> bool:
        """Whether a turn would do nothing until a request is ready, cancelled or submitted."""
        reading = any(one.state == "prefill" for one in self.queues.heads())
        asked = any(one.cancel_asked for one in self._open())
        ready = any(one.job.ready for one in self._taking_up())
        return not (self._moved or reading or self.decoding or asked or ready)

    @whole
    def submit(self, job: J, user: str = "") -> Ticket[J]:
        """Take on a request.

        Raises:
            CapacityError: the queue is full, or there cannot be room for the request.
            SessionError: its session has a request under way.
            MmkvError: what :meth:`Job.price` raises.
        """
        session = job.session
        if session is not None and session in self._busy:
            raise SessionError("the session is busy with another request; wait for it or cancel it")
        if self.waiting >= self.limits.waiting:
            raise queue_is_full(self.waiting, self.limits.waiting)
        self.capacity.require_possible(job.price(), session)
        self._submitted += 1
        self._moved = True
        ticket = Ticket(job, user, self._submitted, self.turns)
        self.queues.push(ticket)
        self.waiting += 1
        if session is not None:
            self._busy[session] = ticket
            self._sessions.add(session)
        return ticket

    @whole
    def turn(self) -> bool:
        """Read chunks in at most one pass, then decode once for all; whether work is left."""
        self.turns += 1
        self._moved = False
        self._end_cancelled()
        self.admit()
        self._take_up_ready()
        read = self._read_chunks()
        self._end_cancelled()
        if self.decoding and (self.limits.interleave or not read):
            self._decode()
        return bool(len(self.queues) or self.preparing or self.decoding)

    @whole
    def keep_spare(
        self, pages: int, make: Callable[[], S], dropped: Callable[[S], None], most: int | None
    ) -> S | None:
        """Keep a copy of a session for as long as nobody needs its pages.

        Spares that were used longest ago give way to it.

        Args:
            pages: what it will hold; make: makes it, when there is room.
            dropped: called with it once it has been closed to make room.
            most: pages that all spares may hold together; None: no limit but the executor's.

        Returns:
            the spare, None where there is no room for it.
        """
        if not self.capacity.spare_fits(pages, most):
            return None
        self._moved = True
        return self.capacity.keep_spare(pages, make, dropped, most)

    @property
    def sessions(self) -> frozenset[KeptSession]:
        """Return the sessions that are kept, wherever they lie."""
        return frozenset(self._sessions)

    @whole
    def adopt(self, session: KeptSession) -> None:
        """Count an idle session that was made elsewhere, or another time, as used last."""
        self._moved = True
        self._sessions.add(session)
        self.residents.rest(session)

    @whole
    def free_up(self, pages: int) -> None:
        """Let spares and idle sessions go until there is room. Raises CapacityError."""
        self._moved = True
        self.capacity.free_up(pages)

    @whole
    def hibernate(self, session: KeptSession) -> None:
        """Move an idle session to its file now. Raises SessionError."""
        self._require_idle(session)
        if session.resident:
            self._moved = True
            self.residents.hibernate(session)

    @whole
    def close_session(self, session: KeptSession) -> None:
        """Close an idle session. Raises SessionError."""
        self._require_idle(session)
        self._moved = True
        session.close()
        self.residents.drop(session)
        self._sessions.discard(session)

    @whole
    def close(self) -> None:
        """Cancel every request and close every session."""
        for ticket in self._open():
            ticket.cancel()
        self._end_cancelled()
        for session in list(self._sessions):
            self.close_session(session)
        while self.residents.spares:
            self.residents.drop_oldest_spare()

    def _end_cancelled(self) -> None:
        for ticket in self._open():
            if ticket.cancel_asked:
                self._end(ticket, "cancelled")

    def _open(self) -> list[Ticket[Any]]:
        return [*self.queues, *self.preparing, *self.decoding]

    def _take_up_ready(self) -> None:
        """Let prompts that have become ready be read next among their users' requests."""
        for ticket in self._taking_up():
            self.preparing.remove(ticket)
            self.queues.push_first(ticket)
            ticket.state = "prefill"

    def _fetching(self) -> list[Ticket[Any]]:
        return [one for one in self.preparing if one.job.fetches]

    def _taking_up(self) -> list[Ticket[Any]]:
        """Return the prompts that have become ready, as far as there are places."""
        ready = [one for one in self.preparing if one.job.ready]
        fetched = [one for one in ready if one.job.fetches][: max(self.places, 0)]
        return [one for one in ready if not one.job.fetches or one in fetched]

    def admit(self, beside: Collection[Ticket[Any]] = ()) -> None:
        """Admit what has room, as each turn does, so that it does not stand in the queue.

        Args:
            beside: requests that are being read, and do not hold up their users' others.
        """
        refused: list[Ticket[Any]] = []
        for ticket in self.queues.heads(beside):
            fetching = self._fetching()
            # What was fetched has a place before others.
            if self.places <= sum(one.job.ready for one in fetching):
                break
            full = len(fetching) >= self.limits.fetching
            late = self._impatient
            if late is not None and late.job.fetches and full:
                late = None  # it waits for other servers, not for room
            if ticket.state != "waiting" or late not in (None, ticket):
                continue
            if full and ticket.job.fetches:
                continue
            try:
                if not self._admit(ticket):
                    refused.append(ticket)
                    continue
            except STOPS:
                raise
            except BaseException as error:
                self._end(ticket, "failed", as_exception(error))
                continue
            self.queues.to_the_end(ticket.user)
            for other in refused:
                other.overtaken += other.number < ticket.number
        if self._impatient is None:
            overdue = [one for one in refused if one.overtaken >= self.limits.patience]
            self._impatient = min(overdue, key=lambda one: one.number, default=None)

    def _admit(self, ticket: Ticket[Any]) -> bool:
        """Commit what a request may take, if it fits. Raises CapacityError if it never can."""
        job, wait = ticket.job, self.running > 0
        if not self.capacity.commit(ticket.owner, job.price(), job.session, wait):
            return False
        self.waiting -= 1
        self._moved = True
        if ticket is self._impatient:
            self._impatient = None
        self._prepare(ticket)
        return True

    def _prepare(self, ticket: Ticket[Any]) -> None:
        """Let the job prepare; what takes longer does not hold up its user's other requests."""
        ticket.state = "prefill"
        ticket.job.prepare()
        if not ticket.job.ready:
            self.queues.remove(ticket)
            self.preparing.append(ticket)
            ticket.state = "preparing"

    def _read_chunks(self) -> bool:
        """Read the next chunk of one prompt, and others beside it; whether there was one."""
        reading = {one.user: one for one in self.queues.heads() if one.state == "prefill"}
        if not reading:
            return False
        costs = {user: one.job.next_chunk for user, one in reading.items()}
        first = reading[self._round_robin.next(costs)]
        slow = first.job.slow_to_begin
        if not self._begin(first):
            self._round_robin.charge(first.user, costs[first.user])
            return True
        tickets = self._sharing(first, slow)
        for ticket in tickets:
            self._round_robin.charge(ticket.user, ticket.job.next_chunk)
        found = self.executor.read([ticket.job for ticket in tickets])
        for ticket, complete in zip(tickets, found, strict=True):
            if isinstance(complete, Exception):
                self._end(ticket, "failed", complete)
            elif complete:
                self.queues.remove(ticket)
                self.decoding.append(ticket)
                ticket.state = "decode"
                self.ledger.commit(ticket.owner, Price(self.ledger.of(ticket.owner).steady))
                self._end_finished(ticket)
        return True

    def _begin(self, ticket: Ticket[Any]) -> bool:
        """Have a job's next chunk ready; whether that worked."""
        try:
            ticket.job.begin()
        except STOPS:
            raise
        except BaseException as error:
            self._end(ticket, "failed", as_exception(error))
            return False
        return True

    def _sharing(self, first: Ticket[Any], slow: bool) -> list[Ticket[Any]]:
        """Choose the prompts that are read in one pass with ``first``, and begin their chunks.

        Args:
            slow: whether a job that was slow to begin has begun in this turn.
        """
        shared = SharedPass(self.executor, self.ledger, first, slow)
        while shared.tokens > 0:
            ticket = shared.candidate(self.queues.heads(shared.tickets))
            if ticket is None:
                before = self.waiting
                self.admit(shared.tickets)
                if self.waiting == before:
                    break
            elif shared.may_begin(ticket) and self._begin(ticket):
                shared.add(ticket)
        shared.shrink()
        return shared.tickets

    def _decode(self) -> None:
        tickets = list(self.decoding)
        try:
            self.executor.step([ticket.job for ticket in tickets])
        except MmkvError as error:
            self._decode_alone(tickets, error)
        except STOPS:
            raise
        except BaseException as error:
            for ticket in tickets:
                self._end(ticket, "failed", as_exception(error))
        for ticket in tickets:
            if not ticket.over:
                self._end_finished(ticket)

    def _end_finished(self, ticket: Ticket[Any]) -> None:
        if ticket.job.finished:
            error = ticket.job.failure
            self._end(ticket, "done" if error is None else "failed", error)

    def _decode_alone(self, tickets: list[Ticket[Any]], error: MmkvError) -> None:
        """Find out which of the requests cannot be decoded, and end those."""
        for ticket in tickets:
            try:
                if len(tickets) == 1:
                    raise error
                self.executor.step([ticket.job])
            except STOPS:
                raise
            except BaseException as cause:
                self._end(ticket, "failed", as_exception(cause))

    def _end(self, ticket: Ticket[Any], state: State, error: Exception | None = None) -> None:
        """Return what a request holds, and set its session to rest."""
        job = ticket.job
        self._moved = True
        if ticket.state == "decode":
            self.decoding.remove(ticket)
            if state != "done":
                job.interrupt()
            job.end()
        else:
            held = self.preparing if ticket.state == "preparing" else self.queues
            held.remove(ticket)
            if ticket.state != "waiting":
                job.roll_back()
        if ticket is self._impatient:
            self._impatient = None
        admitted, session = ticket.state != "waiting", job.session
        self.waiting -= not admitted
        ticket.state, ticket.error = state, error
        if session is None:
            self.ledger.release(ticket)
            return
        del self._busy[session]
        if admitted:
            self.residents.rest(session)

    def _require_idle(self, session: KeptSession) -> None:
        if session in self._busy:
            raise SessionError("the session is busy with a request; wait for it or cancel it")


def queue_is_full(waiting: int, limit: int) -> CapacityError:
    """Return the error of one more request while ``waiting`` of at most ``limit`` wait."""
    message = f"{waiting} requests wait already, the limit is {limit}; try later"
    return CapacityError(message, 1, waiting, limit, "requests")
