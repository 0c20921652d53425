"""The scheduler: one loop for every request on one engine.

Requests wait in queues per user, served by deficit round robin; some prompts share a pass.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from mmkv.engine.errors import STOPS, CapacityError, MmkvError, SessionError, as_exception
from mmkv.engine.interrupts import whole
from mmkv.scheduler.capacity import Capacity, Ledger, PersistentSession, Reservation, S
from mmkv.scheduler.contract import Executor, Job

State = Literal["waiting", "preparing", "prefill", "decode", "done", "cancelled", "failed"]
J = TypeVar("J", bound=Job)


class Ticket(Generic[J]):
    """What :meth:`Scheduler.submit` returns.

    Attributes:
        job: the request; user: whose it is.
        owner: of its reservation: the session if it is kept, else the ticket.
        state: ``waiting`` for room, ``preparing`` what is not ready yet, in ``prefill`` or
            ``decode``, or over: ``done``, ``cancelled``, ``failed``.
        error: why it failed.
        turn: the scheduler's turn in which it was submitted.
        overtaken: later requests that were admitted while there was no room for this one.
    """

    def __init__(self, job: J, user: str, number: int, turn: int = 0) -> None:
        self.job, self.user, self.number, self.turn = job, user, number, turn
        self.owner: Hashable = self if job.session is None else job.session
        self.state: State = "waiting"
        self.error: Exception | None = None
        self.overtaken = 0
        self.cancel_asked = False

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ("done", "cancelled", "failed")

    def cancel(self) -> None:
        """Ask for the end; the scheduler looks between steps, so any thread may call this.

        A prompt that is not yet complete is taken back. A reply ends where it stands.
        """
        self.cancel_asked = True


class UserQueues:
    """Requests that wait or are being read: first in, first out for each user.

    The first of each user, its head, is served; later ones only beside it, in the same pass. Users
    take turns: a new user comes last, and so does one whose head was just admitted.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue

    def push(self, ticket: Ticket) -> None:
        """Put a request at the end of its user's queue."""
        self._queues.setdefault(ticket.user, deque()).append(ticket)

    def push_first(self, ticket: Ticket) -> None:
        """Put a request at the front of its user's queue, behind those that are being read."""
        queue = self._queues.setdefault(ticket.user, deque())
        queue.insert(sum(other.state == "prefill" for other in queue), ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take a request out, wherever it stands."""
        queue = self._queues[ticket.user]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.user]

    def heads(self, state: State, behind: Collection[Ticket] = ()) -> list[Ticket]:
        """Return the first request of each user that is not among ``behind``, in their order.

        Args:
            state: of the requests wanted; a user whose first one is in another has none.
        """
        firsts = (next((t for t in q if t not in behind), None) for q in self._queues.values())
        return [ticket for ticket in firsts if ticket is not None and ticket.state == state]

    def to_the_end(self, user: str) -> None:
        """Let all other users go first the next time."""
        if user in self._queues:
            self._queues.move_to_end(user)


class DeficitRoundRobin:
    """Chooses whose chunk is next, so that users get equal numbers of tokens.

    At each visit a user is granted ``quantum`` tokens, and is served while what it was granted
    lasts; what is left, or owed, carries over to the next visit while it has requests.
    (Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", 1995.)
    """

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self._deficit: OrderedDict[str, int] = OrderedDict()
        self._visited: str | None = None

    def next(self, costs: Mapping[str, int]) -> str:
        """Return the user to serve; the caller then calls :meth:`charge`.

        Args:
            costs: by user, the tokens of its next chunk; at least one user.
        """
        for user in [user for user in self._deficit if user not in costs]:
            del self._deficit[user]
        for user in costs:
            self._deficit.setdefault(user, 0)
        while True:
            user = next(iter(self._deficit))
            if user != self._visited:
                self._visited = user
                self._deficit[user] += self.quantum
            if self._deficit[user] >= costs[user]:
                return user
            self._deficit.move_to_end(user)
            self._visited = None

    def charge(self, user: str, tokens: int) -> None:
        """Charge a user for tokens that were read, in its turn or in another's pass."""
        if user in self._deficit:
            self._deficit[user] -= tokens


class SharedPass:
    """Prompts whose next chunks are read together.

    Together they take at most the tokens of a pass, and at most the pages that they have reserved,
    with those of one chunk: a pass may be left, and others then take all of theirs.

    Args:
        first: the prompt whose turn it is; its chunk has begun.
        slow: whether its job was slow to begin: no other such job begins in this turn then.

    Attributes:
        tickets: ``first``, and those beside it.
        tokens: how many more fit into the pass.
    """

    def __init__(self, executor: Executor, ledger: Ledger, first: Ticket[Any], slow: bool) -> None:
        self.executor, self.ledger = executor, ledger
        self.tickets = [first]
        self.tokens = executor.pass_tokens - first.job.next_chunk
        # On a GPU, where nothing is shared, counting them would wait for the device.
        self._pages = executor.pages_for(first.job) if self.tokens > 0 else 0
        self._tried, self._slow = {first}, slow

    def candidate(self, heads: Collection[Ticket[Any]]) -> Ticket[Any] | None:
        """Choose the prompt to try next; None where all were tried.

        Users who have fewer prompts in the pass go first.

        Args:
            heads: the first request of each user that is not in the pass and can be read.
        """
        ready = [one for one in heads if one not in self._tried]
        users = Counter(one.user for one in self.tickets)
        ticket = min(ready, key=lambda one: users[one.user], default=None)
        if ticket is not None:
            self._tried.add(ticket)
        return ticket

    def may_begin(self, ticket: Ticket[Any]) -> bool:
        """Whether a candidate's chunk may begin in this turn; if so, the caller begins it."""
        slow = ticket.job.slow_to_begin
        if slow and self._slow:
            return False
        self._slow = self._slow or slow
        return True

    def add(self, ticket: Ticket[Any]) -> None:
        """Add a prompt whose chunk has begun, if it fits."""
        chunk, pages = ticket.job.next_chunk, self._pages + self.executor.pages_for(ticket.job)
        if chunk <= self.tokens and self._fit([*self.tickets, ticket], pages):
            self.tokens -= chunk
            self.tickets.append(ticket)
            self._pages = pages

    def _fit(self, tickets: Sequence[Ticket[Any]], pages: int) -> bool:
        """Whether these have reserved so many pages; always, where there is no limit."""
        if self.executor.limit() is None:
            return True
        reserved = [self.ledger.of(one.owner) for one in tickets]
        own = sum(one.steady + one.snapshot for one in reserved)
        return pages <= own + max(one.chunk for one in reserved)


# The least time of a pass in every turn, in that of the latest step: prompts get on as replies do.
_LEAST_SHARE = 1.0


@dataclass(frozen=True)
class Limits:
    """Bounds on what the scheduler takes on.

    Attributes:
        waiting: most requests that wait; one more is refused.
        running: most requests that are prepared, read or decoded at a time.
        fetching: most requests, beside those, that wait for media from other servers.
        quantum: tokens of prompts that each user is granted in turn; a chunk's length at least.
        patience: later requests that may be admitted before one for which there is no room; then
            nothing is admitted until there is.
        interleave: whether every turn decodes. If not, replies wait while a prompt can be read,
            which suits a batch that nobody watches.
        gap: seconds between two tokens of a reply, as far as they can be kept while prompts are
            read: a pass is left then, and goes on in the next turn. None: passes are read whole.
    """

    waiting: int = 64
    running: int = 8
    fetching: int = 16
    quantum: int = 256
    patience: int = 8
    interleave: bool = True
    gap: float | None = None


class Scheduler:
    """Runs requests together so that their sessions never hold more pages than there are.

    A request is admitted when its reservation and those of all other sessions are within the
    executor's limit: it then runs to its end, whatever the others do. One thread calls
    all methods; :meth:`Ticket.cancel` may be called from any. Ctrl-C waits for their end.

    Args:
        to_files: whether sessions can hibernate.
        clock: tells the time in seconds.

    Attributes:
        waiting: requests that wait for room; turns: those made so far.
        reading: those of a pass that was left, which goes on in the next turn.
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits | None = None,
        to_files: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor, self.limits = executor, limits or Limits()
        self.capacity = Capacity(executor.limit, to_files)
        self.ledger, self.residents = self.capacity.ledger, self.capacity.residents
        self.queues = UserQueues()
        self.preparing: list[Ticket[Any]] = []
        self.decoding: list[Ticket[Any]] = []
        self.reading: list[Ticket[Any]] = []
        self._clock = clock
        self._step_seconds = 0.0  # of the latest step
        self._stepped: float | None = None  # when it ended; None: nothing was decoded since
        self._round_robin = DeficitRoundRobin(self.limits.quantum)
        self._busy: dict[PersistentSession, Ticket[Any]] = {}
        self._sessions: set[PersistentSession] = set()
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
        reading = self.queues.heads("prefill")
        asked = any(one.cancel_asked for one in self._open())
        return not (self._moved or reading or self.decoding or asked or self._taking_up())

    @whole
    def submit(self, job: J, user: str = "") -> Ticket[J]:
        """Take on a request.

        Raises:
            CapacityError: the queue is full, or there cannot be room for the request.
            SessionError: its session has a request under way.
            MmkvError: what :meth:`Job.reservation` raises.
        """
        session = job.session
        if session is not None and session in self._busy:
            raise SessionError("the session is busy with another request; wait for it or cancel it")
        if self.waiting >= self.limits.waiting:
            raise queue_is_full(self.waiting, self.limits.waiting)
        self.capacity.require_possible(job.reservation(), session)
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
        """Read chunks in at most one pass, or a part of it, then decode once for all.

        Returns:
            whether work is left.
        """
        self.turns += 1
        self._moved = False
        self._end_cancelled()
        self.admit()
        if self.preparing:
            self._take_up_ready()
        read = self._read_chunks()
        self._end_cancelled()
        if self.decoding and (self.limits.interleave or not read):
            self._decode()
        if not self.decoding:
            self._stepped = None
        return bool(len(self.queues) or self.preparing or self.decoding)

    @whole
    def keep_copy(
        self, pages: int, make: Callable[[], S], dropped: Callable[[S], None], most: int | None
    ) -> S | None:
        """Keep a copy of a session for as long as nobody needs its pages.

        The least recently used copies are dropped for it.

        Args:
            pages: what it will hold; make: makes it, when there is room.
            dropped: called with it once it has been closed to make room.
            most: pages that all copies may hold together; None: no limit but the executor's.

        Returns:
            the copy, None where there is no room for it.
        """
        self._moved = True
        return self.capacity.keep_copy(pages, make, dropped, most)

    @property
    def sessions(self) -> frozenset[PersistentSession]:
        """Return the sessions that are kept, wherever they lie."""
        return frozenset(self._sessions)

    @whole
    def adopt(self, session: PersistentSession) -> None:
        """Take in an idle session that was made elsewhere, or make it the most recently used."""
        self._moved = True
        self._sessions.add(session)
        self.residents.rest(session)

    @whole
    def free_up(self, pages: int) -> None:
        """Drop copies and move idle sessions to files until there is room. Raises CapacityError."""
        self._moved = True
        self.capacity.free_up(pages)

    @whole
    def hibernate(self, session: PersistentSession) -> None:
        """Move an idle session to its file now. Raises SessionError."""
        self._require_idle(session)
        if session.resident:
            self._moved = True
            self.residents.hibernate(session)

    @whole
    def close_session(self, session: PersistentSession) -> None:
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
        while self.residents.copies:
            self.residents.drop_oldest_copy()

    def _end_cancelled(self) -> None:
        """End what was cancelled; a prompt in a pass that others share, when that is over."""
        if self.reading and all(ticket.cancel_asked for ticket in self.reading):
            self.executor.abort()
            self.reading = []
        for ticket in self._open():
            if ticket.cancel_asked and ticket not in self.reading:
                self._end(ticket, "cancelled")

    def _open(self) -> list[Ticket[Any]]:
        return [*self.queues, *self.preparing, *self.decoding]

    def _take_up_ready(self) -> None:
        """Move prompts that have become ready to the front of their users' queues."""
        for ticket in self._taking_up():
            self.preparing.remove(ticket)
            self.queues.push_first(ticket)
            ticket.state = "prefill"

    def _fetching(self) -> list[Ticket[Any]]:
        return [one for one in self.preparing if one.job.fetches]

    def _taking_up(self) -> list[Ticket[Any]]:
        """Return the prepared prompts that are ready, as many as there are places for."""
        ready = [one for one in self.preparing if one.job.ready]
        fetched = [one for one in ready if one.job.fetches][: max(self.places, 0)]
        return [one for one in ready if not one.job.fetches or one in fetched]

    def admit(self, beside: Collection[Ticket[Any]] = ()) -> None:
        """Admit the requests that have room, as each turn does.

        Args:
            beside: requests that are being read; the next of the same users are admitted, too.
        """
        refused: list[Ticket[Any]] = []
        for ticket in self.queues.heads("waiting", beside):
            fetching = self._fetching()
            # What was fetched has a place before others.
            if self.places <= sum(one.job.ready for one in fetching):
                break
            full = len(fetching) >= self.limits.fetching
            late = self._impatient
            if late is not None and late.job.fetches and full:
                late = None  # it waits for other servers, not for room
            if late not in (None, ticket) or (full and ticket.job.fetches):
                continue
            if self._admit(ticket):
                self.queues.to_the_end(ticket.user)
                for other in refused:
                    other.overtaken += other.number < ticket.number
            elif not ticket.over:
                refused.append(ticket)
        if self._impatient is None:
            overdue = [one for one in refused if one.overtaken >= self.limits.patience]
            self._impatient = min(overdue, key=lambda one: one.number, default=None)

    def _admit(self, ticket: Ticket[Any]) -> bool:
        """Reserve the pages of a request, if they fit, and let it prepare; one that fails ends."""
        job, wait = ticket.job, self.running > 0
        try:
            if not self.capacity.commit(ticket.owner, job.reservation(), job.session, wait):
                return False
            self.waiting -= 1
            self._moved = True
            if ticket is self._impatient:
                self._impatient = None
            ticket.state = "prefill"
            job.prepare()
        except STOPS:
            raise
        except BaseException as error:
            self._end(ticket, "failed", as_exception(error))
            return False
        if not job.ready:  # others of its user need not wait for it
            self.queues.remove(ticket)
            self.preparing.append(ticket)
            ticket.state = "preparing"
        return True

    def _read_chunks(self) -> bool:
        """Read the next chunks of a pass, or go on with it; whether there was one."""
        tickets = self.reading or self._next_pass()
        if tickets is None:
            return False
        if not tickets:
            return True
        found = self.executor.read([ticket.job for ticket in tickets], self._seconds_to_read())
        self.reading = [] if found is not None else tickets
        for ticket, complete in zip(tickets, found or (), strict=found is not None):
            if isinstance(complete, Reservation):
                complete = self._grant(ticket, complete)
            if isinstance(complete, Exception):
                self._end(ticket, "failed", complete)
            elif complete:
                self.queues.remove(ticket)
                self.decoding.append(ticket)
                ticket.state = "decode"
                self.ledger.commit(ticket.owner, Reservation(self.ledger.of(ticket.owner).steady))
                self._end_finished(ticket)
        return True

    def _grant(self, ticket: Ticket[Any], asked: Reservation) -> bool | Exception:
        """Give a request more room if there is some now: it never waits for that."""
        more: bool | Reservation = asked
        while isinstance(more, Reservation):
            own = self.ledger.of(ticket.owner)
            both = Reservation(own.steady + more.steady, max(own.chunk, more.chunk), own.snapshot)
            try:
                fits = self.capacity.commit(ticket.owner, both, ticket.job.session, wait=True)
            except CapacityError:
                fits = False
            try:
                more = ticket.job.grant(fits)
            except STOPS:
                raise
            except BaseException as error:
                return as_exception(error)
        return more

    def _step(self, tickets: Sequence[Ticket[Any]]) -> None:
        """Decode for some requests; those that have to read more go back to reading."""
        asked = self.executor.step([ticket.job for ticket in tickets])
        for ticket, more in zip(tickets, asked or (), strict=bool(asked)):
            complete = True if more is None else self._grant(ticket, more)
            if isinstance(complete, Exception):
                self._end(ticket, "failed", complete)
            elif not complete:
                self.decoding.remove(ticket)
                self.queues.push_first(ticket)
                ticket.state = "prefill"

    def _next_pass(self) -> list[Ticket[Any]] | None:
        """Choose one prompt and others beside it, whose chunks have begun.

        Returns:
            none where the one that was chosen could not begin; None where there is none.
        """
        reading = {one.user: one for one in self.queues.heads("prefill")}
        if not reading:
            return None
        costs = {user: one.job.next_chunk for user, one in reading.items()}
        first = reading[self._round_robin.next(costs)]
        slow = first.job.slow_to_begin
        if not self._begin(first):
            self._round_robin.charge(first.user, costs[first.user])
            return []
        tickets = self._sharing(first, slow)
        for ticket in tickets:
            self._round_robin.charge(ticket.user, ticket.job.next_chunk)
        return tickets

    def _seconds_to_read(self) -> float | None:
        """Return how long the pass may go on before the next step, as the target has it."""
        target = self.limits.gap
        if target is None or not self.decoding or not self.limits.interleave:
            return None
        since = 0.0 if self._stepped is None else self._clock() - self._stepped
        left = target - self._step_seconds - since
        return max(left, _LEAST_SHARE * self._step_seconds)

    def _begin(self, ticket: Ticket[Any]) -> bool:
        """Let a job begin its next chunk; return whether that worked."""
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
        if len(self.queues) == 1:  # as mostly: nothing else waits or is read
            return [first]
        shared = SharedPass(self.executor, self.ledger, first, slow)
        while shared.tokens > 0:
            ticket = shared.candidate(self.queues.heads("prefill", shared.tickets))
            if ticket is None:
                before = self.waiting
                self.admit(shared.tickets)
                if self.waiting == before:
                    break
            elif shared.may_begin(ticket) and self._begin(ticket):
                shared.add(ticket)
        return shared.tickets

    def _decode(self) -> None:
        tickets, started = list(self.decoding), self._clock()
        try:
            self._step(tickets)
        except MmkvError as error:
            self._decode_alone(tickets, error)
        except STOPS:
            raise
        except BaseException as error:
            for ticket in tickets:
                self._end(ticket, "failed", as_exception(error))
        self._stepped = self._clock()
        self._step_seconds = self._stepped - started
        for ticket in tickets:
            if ticket.state == "decode":
                self._end_finished(ticket)

    def _end_finished(self, ticket: Ticket[Any]) -> None:
        if ticket.job.finished:
            error = ticket.job.failure
            self._end(ticket, "done" if error is None else "failed", error)

    def _decode_alone(self, tickets: list[Ticket[Any]], error: MmkvError) -> None:
        """Decode one by one, and end the requests that fail."""
        for ticket in tickets:
            try:
                if len(tickets) == 1:
                    raise error
                self._step([ticket])
            except STOPS:
                raise
            except BaseException as cause:
                self._end(ticket, "failed", as_exception(cause))

    def _end(self, ticket: Ticket[Any], state: State, error: Exception | None = None) -> None:
        """Release the reservation of a request; its session, if kept, becomes idle."""
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

    def _require_idle(self, session: PersistentSession) -> None:
        if session in self._busy:
            raise SessionError("the session is busy with a request; wait for it or cancel it")


def queue_is_full(waiting: int, limit: int) -> CapacityError:
    """Return the error of one more request while ``waiting`` of at most ``limit`` wait."""
    message = f"{waiting} requests wait already, the limit is {limit}; try later"
    return CapacityError(message, 1, waiting, limit, "requests")
