"""``python -m tests.mmkv.scheduler.machine``: random operations on a scheduler of a fake engine.

After each of them everything that the scheduler promises is checked: that it takes on no more than
there is room for, and that whoever waits gets on. The bounds of the latter are stated below.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter

from mmkv.engine.errors import BudgetError, CapacityError, SessionError
from mmkv.scheduler import Limits, Scheduler, Ticket
from tests.mmkv.scheduler.fake import CHUNK, FakeCopy, FakeExecutor, FakeJob, FakePool, FakeSession

USERS = ("ann", "bob", "eve", "joe")
LONGEST_PROMPT, LONGEST_REPLY = 5 * CHUNK, 9
WAITING, RUNNING, FETCHING = 12, 5, 3
# Everything that may be in front of a request: what waits and runs, overtakes it before it is
# its turn, and what all of that takes if every chunk and every token were a turn of its own.
LONGEST_WAIT = (WAITING + RUNNING + FETCHING + 2 * 8) * (LONGEST_PROMPT // CHUNK + LONGEST_REPLY)
LAYERS = 3  # of a pass that is left after each of them

# A request that is its user's next may be passed by a later one of each other user while it is not
# its turn in the row, by ``patience`` of those for which there was room, and by all that come with
# the last of these in one turn; and so again after another one whose patience was over.
MOST_PASSED = 2 * (len(USERS) - 1 + RUNNING) + Limits().patience
# Shreedhar and Varghese, theorem 4.4 (deficit round robin): of two users who both have something
# to be read all the while, one gets at most a quantum and twice the longest chunk more. Where
# short ends are read in one pass, a pass more.
UNEVEN = CHUNK + 2 * CHUNK


class Machine:
    """A scheduler, and what its sessions should hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        # Everything; room for all, so that only the order decides; more requests than there is
        # room for, few of them large, which the others must not pass for ever.
        self.kind = self.random.choice(("mixed", "mixed", "roomy", "crowded"))
        self.pool = FakePool(limit=2000 if self.kind == "roomy" else 24)
        self.pool.watch = self.check_pages
        limits = Limits(
            waiting=WAITING,
            running=RUNNING,
            fetching=FETCHING,
            quantum=CHUNK,
            interleave=self.random.random() < 0.8,
            gap=0.0,
        )
        self.layers = self.random.choice((1, 1, LAYERS))
        self.to_files = self.random.random() < 0.7
        # Passes of more tokens than a chunk, too: then pages alone decide what is read together.
        together = self.random.choice((0, CHUNK, 3 * CHUNK))
        self.executor = FakeExecutor(self.pool, together, self.layers, token=1.0)
        clock = lambda: self.executor.now  # noqa: E731
        self.scheduler = Scheduler(self.executor, limits, self.to_files, clock)
        self.sessions: list[FakeSession] = []
        self.tickets: list[Ticket[FakeJob]] = []
        self.cancelled: dict[Ticket[FakeJob], int] = {}
        self.before: dict[Ticket[FakeJob], tuple[list[int], int]] = {}
        self.copies: list[FakeCopy] = []
        self.same_disks = True  # since the latest turn
        self.seen: Counter[str] = Counter()
        self.longest_wait = self.most_passed = self.most_uneven = 0
        self.passed: Counter[Ticket[FakeJob]] = Counter()  # of those that are their users' next
        # By pair of users: how far apart what they were read has been, since both had something.
        self.apart: dict[tuple[str, str], tuple[int, int, int]] = {}

    def run(self, operations: int) -> None:
        """Do so many operations, then end what is left."""
        doing = [
            (self.submit_new, 20 if self.kind == "crowded" else 5),
            (self.submit_kept, 8),
            (self.cancel, 2),
            (self.finish, 2),
            (self.turn, 24),
            (self.hibernate, 1),
            (self.close, 1),
            (self.open, 2),
            (self.prepare, 6),
            (self.cached, 3),
            (self.use_copy, 1),
        ]
        kinds, weights = zip(*doing, strict=True)
        for _ in range(operations):
            self.random.choices(kinds, weights)[0]()
            self.check()
        for _ in range(self.layers * LONGEST_WAIT):
            self.prepare()
            if not self.scheduler.turn():
                break
            self.check()
        assert all(ticket.over for ticket in self.tickets), "a request is left"
        self.scheduler.close()
        assert self.pool.held == {} and not self.copies and self.scheduler.ledger.committed == 0

    def submit_new(self) -> None:
        bound = self.random.randint(1, 20)
        prompt, reply = self.prompt(), self.reply()
        if self.kind == "crowded" and self.random.random() < 0.9:
            prompt, bound = prompt[:CHUNK], 2
        elif self.kind == "crowded":
            prompt, reply, bound = [1] * LONGEST_PROMPT, LONGEST_REPLY, 20
        job = FakeJob(self.pool, prompt, reply, bound=bound)
        self.submit(job)

    def submit_kept(self) -> None:
        if not self.sessions:
            return
        session = self.random.choice(self.sessions)
        job = FakeJob(self.pool, self.prompt(), self.reply(), session)
        if self.random.random() < 0.05:
            job.fails_at = self.random.randint(0, 3)
            job.fails_reading = self.random.random() < 0.5
        self.submit(job)

    def submit(self, job: FakeJob) -> None:
        session = job.kept
        if self.random.random() < 0.3:
            job.missing = self.random.randint(1, 3)
            job.fetches = self.random.random() < 0.5
        before = session.state() if session else ([], 0)
        try:
            # One user asks for as much as all others together.
            user = self.random.choice((*USERS, "ann", "ann", "ann"))
            ticket = self.scheduler.submit(job, user)
        except CapacityError as error:
            self.seen["full" if error.unit == "requests" else "refused"] += 1
            assert error.needed > 0 and error.committed <= error.limit
            assert error.unit == "pages" or error.committed == WAITING
        except SessionError:
            self.seen["busy"] += 1
        else:
            self.seen["submitted"] += 1
            self.tickets.append(ticket)
            self.before[ticket] = before

    def cancel(self) -> None:
        going = [one for one in self.tickets if not one.over and not one.cancel_asked]
        if going:
            # Often one that may hold the others up, where there is one.
            late = [one for one in going if one.overtaken >= Limits().patience]
            ticket = self.random.choice((late or going) if self.random.random() < 0.5 else going)
            ticket.cancel()
            self.seen[f"cancelled in {ticket.state}"] += 1
            self.cancelled[ticket] = 0

    def finish(self) -> None:
        """Let a reply end early, as the model does."""
        going = [one for one in self.tickets if one.state == "decode"]
        if going:
            job = self.random.choice(going).job
            job.reply = job.said + 1

    def prepare(self) -> None:
        """Let all that is being prepared come nearer."""
        for ticket in self.tickets:
            if ticket.state == "preparing" and ticket.job.missing:
                ticket.job.missing -= 1
                self.seen["became ready"] += ticket.job.ready

    def cached(self) -> None:
        pages = self.random.randint(1, 6)

        def make() -> FakeCopy:
            cached = FakeCopy(self.pool, pages)
            self.copies.append(cached)
            return cached

        def dropped(cached: FakeCopy) -> None:
            assert cached not in self.pool.held
            self.copies.remove(cached)

        oldest, most = list(self.copies), self.random.choice((None, 8))
        stay, limit = list(oldest), self.pool.limit or 0
        room = limit - self.scheduler.ledger.committed - pages
        while stay and (room < 0 or sum(one.pages for one in stay) + pages > (most or limit)):
            room += stay.pop(0).pages
        made = self.scheduler.keep_copy(pages, make, dropped, most)
        if made is None:
            self.seen["no room for a copy"] += 1
            assert room < 0 and self.copies == oldest
            return
        self.pool.set(made, pages)
        self.seen["copies kept"] += 1
        assert self.copies == [*stay, made], "others went than the oldest, or more than had to"

    def use_copy(self) -> None:
        if self.copies:
            cached = self.random.choice(self.copies)
            self.scheduler.residents.touch_copy(cached)
            self.copies.remove(cached)
            self.copies.append(cached)

    def turn(self) -> None:
        blocked = self.scheduler.blocked and self.same_disks
        self.same_disks = True
        moved = Counter(one.state for one in self.tickets)
        before = Before(self)
        reads = sum(one.job.read for one in self.tickets)
        steps = self.executor.steps
        rest = self.scheduler.turn()
        assert self.executor.steps <= steps + 1 and len(self.executor.passes) <= 1
        self.seen["passes taken back"] += self.executor.aborted
        self.executor.aborted = 0
        self.seen["passes left"] += self.executor.left is not None
        self.seen["read beside others"] += sum(len(jobs) - 1 for jobs in self.executor.passes)
        self.executor.passes.clear()
        most = max(CHUNK, self.executor.pass_tokens)
        assert sum(one.job.read for one in self.tickets) <= reads + most
        assert rest == any(not ticket.over for ticket in self.tickets)
        if blocked:
            assert moved == Counter(one.state for one in self.tickets), "a blocked turn did work"
            self.seen["blocked"] += rest
        before.check_progress()
        before.check_fairness()
        for ticket in self.cancelled:
            self.cancelled[ticket] += 1

    def hibernate(self) -> None:
        if self.sessions:
            self.try_on(self.random.choice(self.sessions), "hibernated")

    def close(self) -> None:
        if len(self.sessions) > 6:
            session = self.random.choice(self.sessions)
            if self.try_on(session, "closed"):
                self.sessions.remove(session)

    def open(self) -> None:
        if len(self.sessions) < 10:
            self.sessions.append(FakeSession(self.pool, self.random.randint(1, 6)))
        self.random.choice(self.sessions).disk_full = self.random.random() < 0.05
        self.same_disks = False

    def try_on(self, session: FakeSession, what: str) -> bool:
        try:
            if what == "closed":
                self.scheduler.close_session(session)
            else:
                self.scheduler.hibernate(session)
        except SessionError:
            return False
        self.seen[what] += 1
        return True

    def check_pages(self) -> None:
        """No owner, and not all together, hold more than is committed: also inside a chunk."""
        committed = self.scheduler.ledger.committed
        assert self.pool.total <= committed, f"{self.pool.total} held, {committed} committed"
        assert self.pool.limit is not None and committed <= self.pool.limit
        for owner, pages in self.pool.held.items():
            busy = [one for one in self.tickets if not one.over and owner in (one.job, one.job.own)]
            if owner in self.copies:
                assert self.scheduler.ledger.of(owner).steady == pages
                continue
            assert busy or owner in self.sessions, "pages of nobody"
            if not busy:
                assert pages <= self.scheduler.ledger.of(owner).steady

    def check(self) -> None:
        self.check_pages()
        for session in self.sessions:
            if not session.resident:
                assert session not in self.pool.held
        for ticket in list(self.tickets):
            self.check_ticket(ticket)
        going = [one for one in self.tickets if one.state in ("preparing", "prefill", "decode")]
        assert len(going) == self.scheduler.running
        fetching = [one for one in going if one.state == "preparing" and one.job.fetches]
        assert len(fetching) <= FETCHING and len(going) - len(fetching) <= RUNNING
        assert self.scheduler.places == RUNNING - len(going) + len(fetching)
        waiting = [one for one in self.tickets if one.state == "waiting"]
        assert len(waiting) == self.scheduler.waiting <= WAITING
        self.check_released(going)

    def check_released(self, going: list[Ticket[FakeJob]]) -> None:
        """Nothing is committed for anybody but who runs, rests in memory, or is a copy."""
        ledger, used = self.scheduler.ledger, {one.owner for one in going}
        resting = [one for one in self.sessions if one not in used and one.resident]
        owned = [ledger.of(owner) for owner in used]
        wanted = sum(reservation.steady + reservation.snapshot for reservation in owned)
        wanted += max((reservation.chunk for reservation in owned), default=0)
        wanted += sum(one.resting() for one in resting) + sum(one.pages for one in self.copies)
        assert ledger.committed == wanted, f"{ledger.committed} pages committed for {wanted}"

    def check_ticket(self, ticket: Ticket[FakeJob]) -> None:
        job = ticket.job
        if not ticket.over:
            owned = self.scheduler.ledger.of(ticket.owner)
            if ticket.state == "decode":
                assert not owned.chunk and not owned.snapshot, "kept for a prompt that is read"
            waited = self.scheduler.turns - ticket.turn if ticket.state == "waiting" else 0
            assert waited <= self.layers * LONGEST_WAIT, f"{ticket.user} waits for {waited} turns"
            self.longest_wait = max(self.longest_wait, waited)
            asked = self.cancelled.get(ticket, 0)
            # A pass that others share is read to its end.
            assert asked <= 1 + self.layers, f"cancelled {asked} turns ago, still in {ticket.state}"
            return
        self.tickets.remove(ticket)
        self.cancelled.pop(ticket, None)
        self.passed.pop(ticket, None)
        self.seen[ticket.state] += 1
        tokens, seen = self.before.pop(ticket)
        assert job not in self.pool.held
        if job.kept is None:
            assert job.own not in self.pool.held
            return
        said = [-1] * (job.said - 1) if job.read == len(job.prompt) else []
        if ticket.state == "failed":
            assert isinstance(ticket.error, BudgetError) and not said
            if isinstance(ticket.error, CapacityError):
                self.seen["refused later"] += 1
        if ticket.state == "done" or said or job.said:
            tokens = (tokens + job.prompt + said)[-job.kept.bound * 2 :]
            seen += len(job.prompt) + len(said)
        assert job.kept.state()[1] == seen, f"{ticket.state}: {job.kept.state()[1]} for {seen}"
        # Cut at other places, the newest tokens are the same ones.
        assert job.kept.state()[0] == tokens

    def prompt(self) -> list[int]:
        return [self.random.randrange(1000) for _ in range(self.random.randint(1, LONGEST_PROMPT))]

    def reply(self) -> int:
        return self.random.randint(1, LONGEST_REPLY)


class Before:
    """What a scheduler had to do before a turn, to be compared with what it did."""

    def __init__(self, machine: Machine) -> None:
        self.machine, scheduler = machine, machine.scheduler
        reading = scheduler.reading  # to the end, but where all of them are cancelled
        shared = set() if all(one.cancel_asked for one in reading) else set(reading)
        going = [one for one in machine.tickets if not one.cancel_asked or one in shared]
        self.state = {one: one.state for one in machine.tickets}
        self.read = {one: one.job.read for one in machine.tickets}
        self.said = {one: one.job.said for one in machine.tickets}
        firsts: dict[str, Ticket[FakeJob]] = {}
        # What is being read stands before what waits, whoever came first.
        order = sorted(going, key=lambda one: (one.state != "prefill", one.number))
        for one in order:
            if one.state in ("waiting", "prefill"):
                firsts.setdefault(one.user, one)
        self.next = [one for one in firsts.values() if one.state == "waiting"]
        self.reading = {one.user for one in machine.tickets if one.state == "prefill"}
        self.layers = machine.executor.layers_read
        self.free_places = scheduler.places - sum(
            one.job.fetches and one.job.ready for one in going if one.state == "preparing"
        )
        self.fits = [one for one in self.next if self._fits(one)]
        late = [one for one in self.next if one.overtaken >= Limits().patience]
        self.held_up = late and not set(late) & set(self.fits)

    def _fits(self, ticket: Ticket[FakeJob]) -> bool:
        """Whether a request has room beside all that is committed and does not make way."""
        machine, job = self.machine, ticket.job
        fetching = sum(one.state == "preparing" and one.job.fetches for one in machine.tickets)
        if job.fetches and fetching >= FETCHING:
            return False
        # Its own pages are in both sums, and chunks are counted one after the other: no less.
        taken = machine.scheduler.ledger.committed - self._gives_way(job.kept)
        return taken + job.reservation().total <= (machine.pool.limit or 0)

    def _gives_way(self, besides: FakeSession | None) -> int:
        """Count the pages of copies, and of idle sessions that can be written to files."""
        machine = self.machine
        pages = sum(cached.pages for cached in machine.copies)
        if machine.to_files:
            used = {besides, *(one.job.kept for one in machine.tickets)}
            idle = [one for one in machine.sessions if one.resident and one not in used]
            pages += sum(one.resting() for one in idle if not one.disk_full)
        return pages

    def check_progress(self) -> None:
        """A turn does what can be done: reads, decodes, takes up, admits."""
        scheduler = self.machine.scheduler
        for one, state in self.state.items():
            if one.over or one.cancel_asked:
                continue
            if state == "decode" and scheduler.limits.interleave:
                assert one.job.said > self.said[one], "a reply that stands still"
            if state == "preparing" and not one.job.fetches and one.job.ready:
                assert one.state != "preparing", "ready, and left where it was"
        if self.reading:
            moved = [one for one, read in self.read.items() if one.over or one.job.read > read]
            assert moved or self.machine.executor.layers_read > self.layers, "nothing is read"
        moved = [one for one, s in self.state.items() if s == "waiting" and one.state != s]
        if self.fits and self.free_places > 0 and not self.held_up:
            assert moved, "there is room and a place, and nobody is admitted"
        if set(self.state.values()) == {"waiting"}:
            assert moved, "all wait, and nobody for anything"

    def check_fairness(self) -> None:
        """Nobody is passed again and again, and users get equal numbers of tokens."""
        machine = self.machine
        waited = [one for one, state in self.state.items() if state == "waiting"]
        admitted = [one for one in waited if one.state not in ("waiting", "failed", "cancelled")]
        for one in self.next:
            if one.state == "waiting":
                later = [other for other in admitted if other.number > one.number]
                machine.passed[one] += sum(other.user != one.user for other in later)
                machine.most_passed = max(machine.most_passed, machine.passed[one])
                assert machine.passed[one] <= MOST_PASSED, f"{machine.passed[one]} went first"
                if machine.kind == "roomy" and not one.job.fetches:
                    assert machine.passed[one] < len(USERS), "an admitted user goes first again"
        if machine.executor.pass_tokens > CHUNK:
            return  # a pass reads of everybody, more of those who ask more at once
        got = Counter[str]()
        for one, read in self.read.items():
            got[one.user] += max(one.job.read - read, 0)
        for pair in itertools.combinations(USERS, 2):
            if not self.reading.issuperset(pair):
                machine.apart.pop(pair, None)
                continue
            now, low, high = machine.apart.get(pair, (0, 0, 0))
            now += got[pair[0]] - got[pair[1]]
            low, high = min(low, now), max(high, now)
            machine.apart[pair] = now, low, high
            machine.most_uneven = max(machine.most_uneven, high - low)
            most = UNEVEN + machine.executor.pass_tokens
            assert high - low <= most, f"{pair}: {high - low} tokens apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--machine", type=int, default=2_000, help="operations on one scheduler")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    started, seen, longest, passed, uneven = time.process_time(), Counter[str](), 0, 0, 0
    for at in range(-(-args.operations // args.machine)):
        machine = Machine(seed + at)
        machine.run(args.machine)
        seen += machine.seen
        longest = max(longest, machine.longest_wait)
        passed, uneven = max(passed, machine.most_passed), max(uneven, machine.most_uneven)
    seconds = time.process_time() - started
    print(f"{args.operations:,} operations, {seconds:.1f} s of CPU, longest wait {longest} turns")
    print(f"passed by {passed} later ones at most, {uneven} tokens between two users at most")
    print(", ".join(f"{count:,} {name}" for name, count in seen.most_common()))


if __name__ == "__main__":
    main()
