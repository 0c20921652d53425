"""The scheduler: one loop for every request on one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from engine.errors import CapacityError, MmkvError, SessionError
from mmkv.scheduler.contract import Executor, KeptSession, Price, Spare
from mmkv.scheduler.fairness import DeficitRoundRobin, UserQueues
from mmkv.scheduler.ledger import Ledger
from mmkv.scheduler.residents import Residents
from mmkv.scheduler.ticket import J, State, Ticket

S = TypeVar("S", bound=Spare)


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
    all methods; :meth:`Ticket.cancel` may be called from any.

    Attributes:
        waiting: requests that wait for room; turns: those made so far.
    """

    def __init__(
        self, executor: Executor, limits: Limits | None = None, to_files: bool = False
    ) -> None:
        self.executor, self.limits = executor, limits or Limits()
        self.ledger = Ledger()
        self.residents = Residents(self.ledger, to_files)
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
        self._require_possible(job.price(), session)
        self._submitted += 1
        self._moved = True
        ticket = Ticket(job, user, self._submitted, self.turns)
        self.queues.push(ticket)
        self.waiting += 1
        if session is not None:
            self._busy[session] = ticket
            self._sessions.add(session)
        return ticket

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
        limit, residents = self.executor.limit(), self.residents
        free = None if limit is None else limit - self.ledger.committed + residents.spare_pages
        if pages > min((one for one in (free, most) if one is not None), default=pages):
            return None
        self._moved = True
        while most is not None and residents.spare_pages + pages > most:
            residents.drop_oldest_spare()
        while limit is not None and self.ledger.committed + pages > limit:
            residents.drop_oldest_spare()
        spare = make()
        residents.keep_spare(spare, lambda: dropped(spare))
        return spare

    @property
    def sessions(self) -> frozenset[KeptSession]:
        """Return the sessions that are kept, wherever they lie."""
        return frozenset(self._sessions)

    def adopt(self, session: KeptSession) -> None:
        """Count an idle session that was made elsewhere, or another time, as used last."""
        self._moved = True
        self._sessions.add(session)
        self.residents.rest(session)

    def free_up(self, pages: int) -> None:
        """Let spares and idle sessions go until there is room. Raises CapacityError."""
        limit = self.executor.limit()
        if limit is None:
            return
        self._moved = True
        short = self.ledger.committed + pages - limit
        if short > self.residents.movable(None) or not self.residents.make_room(short, None):
            raise self._refusal(Price(pages), limit)

    def hibernate(self, session: KeptSession) -> None:
        """Move an idle session to its file now. Raises SessionError."""
        self._require_idle(session)
        if session.resident:
            self._moved = True
            self.residents.hibernate(session)

    def close_session(self, session: KeptSession) -> None:
        """Close an idle session. Raises SessionError."""
        self._require_idle(session)
        self._moved = True
        session.close()
        self.residents.drop(session)
        self._sessions.discard(session)

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
            except Exception as error:
                self._end(ticket, "failed", error)
                continue
            self.queues.to_the_end(ticket.user)
            for other in refused:
                other.overtaken += other.number < ticket.number
        if self._impatient is None:
            overdue = [one for one in refused if one.overtaken >= self.limits.patience]
            self._impatient = min(overdue, key=lambda one: one.number, default=None)

    def _admit(self, ticket: Ticket[Any]) -> bool:
        """Commit what a request may take, if it fits. Raises CapacityError if it never can."""
        session, limit = ticket.job.session, self.executor.limit()
        price: Price = ticket.job.price()
        if limit is not None:
            short = self.ledger.committed_with(_owner(ticket), price) - limit
            if short > self.residents.movable(session):
                self._require_possible(price, session)
                if self.running:
                    return False
                raise self._refusal(price, limit)
            if not self.residents.make_room(short, session):
                if self.running:
                    return False
                raise self._refusal(price, limit)
        if session is not None:
            self.residents.take(session)
        self.ledger.commit(_owner(ticket), price)
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

    def _require_possible(self, price: Price, session: KeptSession | None) -> None:
        """Refuse what would not fit if everything that ends had ended."""
        limit = self.executor.limit()
        if limit is not None and price.total + self.residents.pinned(session) > limit:
            raise self._refusal(price, limit)

    def _refusal(self, price: Price, limit: int) -> CapacityError:
        committed = self.ledger.committed
        remedy = "lower its budget or its length" if price.total > limit else "close a session"
        return CapacityError(
            f"the request may take {price.total:,} pages, {committed:,} of {limit:,} are "
            f"committed; {remedy}, or raise the memory limit",
            price.total,
            committed,
            limit,
        )

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
        tickets = [first, *self._beside(first, slow)]
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
                self.ledger.commit(_owner(ticket), Price(self.ledger.of(_owner(ticket)).steady))
                self._end_finished(ticket)
        return True

    def _begin(self, ticket: Ticket[Any]) -> bool:
        """Have a job's next chunk ready; whether that worked."""
        try:
            ticket.job.begin()
        except Exception as error:
            self._end(ticket, "failed", error)
            return False
        return True

    def _beside(self, first: Ticket[Any], slow: bool) -> list[Ticket[Any]]:
        """Choose prompts whose next chunks fit into a pass with that of ``first``.

        All of them take no more tokens than a pass has, and no more pages than are committed for
        one chunk. Users who have fewer prompts in the pass go first.

        Args:
            slow: whether a job that was slow to begin has begun in this turn.
        """
        tokens = self.executor.pass_tokens - first.job.next_chunk
        chosen, tried = [first], {first}
        while tokens > 0:
            heads = self.queues.heads(chosen)
            ready = [one for one in heads if one.state == "prefill" and one not in tried]
            if not ready:
                before = self.waiting
                self.admit(chosen)
                if self.waiting == before:
                    break
                continue
            users = Counter(one.user for one in chosen)
            ticket = min(ready, key=lambda one: users[one.user])
            tried.add(ticket)
            if slow and ticket.job.slow_to_begin:
                continue
            slow = slow or ticket.job.slow_to_begin
            if not self._begin(ticket):
                continue
            if ticket.job.next_chunk <= tokens and self._fit([*chosen, ticket]):
                tokens -= ticket.job.next_chunk
                chosen.append(ticket)
        # One that could not begin has taken its pages out of what is committed.
        while len(chosen) > 1 and not self._fit(chosen):
            chosen.pop()
        return chosen[1:]

    def _fit(self, tickets: Sequence[Ticket[Any]]) -> bool:
        """Whether the next chunks of all take no more pages than are committed for one chunk."""
        return sum(map(self._pages, tickets)) <= self.ledger.chunk

    def _pages(self, ticket: Ticket[Any]) -> Fraction:
        """Bound the pages of a job's next chunk beside its steady ones.

        Not rounded up: what is begun of a page is in the steady ones, so that the sum of several
        is bounded by their sum.
        """
        most = self.ledger.of(_owner(ticket)).chunk
        return min(Fraction(most), self.executor.pages_of(ticket.job.next_chunk))

    def _decode(self) -> None:
        tickets = list(self.decoding)
        try:
            self.executor.step([ticket.job for ticket in tickets])
        except MmkvError as error:
            self._decode_alone(tickets, error)
        except Exception as error:
            for ticket in tickets:
                self._end(ticket, "failed", error)
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
            except Exception as cause:
                self._end(ticket, "failed", cause)

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


def _owner(ticket: Ticket[Any]) -> Hashable:
    """Return who commits what a request takes: its session, if that is kept."""
    return ticket if ticket.job.session is None else ticket.job.session
