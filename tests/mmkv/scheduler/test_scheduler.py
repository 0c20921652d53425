"""The scheduler on a fake engine: the promises under random operations, and each one by itself."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from mmkv.engine.errors import BudgetError, CapacityError, SessionError
from mmkv.scheduler import Limits, Scheduler, Ticket
from mmkv.scheduler.capacity import Ledger, Reservation
from mmkv.scheduler.loop import DeficitRoundRobin
from tests.mmkv.scheduler.fake import CHUNK, FakeExecutor, FakeJob, FakePool, FakeSession
from tests.mmkv.scheduler.machine import Machine
from tests.support.tiers import long_but


def scheduler_of(pool: FakePool, to_files: bool = True, **limits: int) -> Scheduler:
    return Scheduler(FakeExecutor(pool), Limits(**{"quantum": CHUNK, **limits}), to_files)


def prompt(count: int) -> list[int]:
    return list(range(count))


def test_of_chunks_only_the_largest_is_committed() -> None:
    ledger = Ledger()
    ledger.commit("a", Reservation(4, chunk=3))
    ledger.commit("b", Reservation(5, chunk=2, snapshot=1))
    assert ledger.committed == 4 + 6 + 3
    assert ledger.committed_with("c", Reservation(1, chunk=1)) == 4 + 6 + 1 + 3
    assert ledger.committed_with("a", Reservation(1)) == 1 + 6 + 2
    ledger.release("a")
    assert ledger.committed == 6 + 2


@pytest.mark.parametrize("seed", long_but(range(2), range(6), "2,000 operations each"))
def test_random_operations_keep_every_promise(seed: int) -> None:
    Machine(seed).run(2_000)


def test_nothing_of_it_needs_torch() -> None:
    code = "import sys, mmkv.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_can_never_fit_is_refused_with_its_numbers() -> None:
    scheduler = scheduler_of(FakePool(limit=8))
    with pytest.raises(CapacityError, match="may take 12 pages") as error:
        scheduler.submit(FakeJob(FakePool(None), prompt(20), 4, bound=20))
    assert (error.value.needed, error.value.committed, error.value.limit) == (12, 0, 8)
    assert error.value.final and isinstance(error.value, BudgetError)


def test_a_large_request_is_not_overtaken_forever() -> None:
    """Small requests of others would fit at any time; the large one needs all pages at once."""

    def served(patience: int) -> bool:
        pool = FakePool(limit=12)
        scheduler = scheduler_of(pool, patience=patience)
        for user in "ab":
            scheduler.submit(FakeJob(pool, prompt(4), 9), user)
            scheduler.turn()
        large = scheduler.submit(FakeJob(pool, prompt(20), 4, bound=20), "large")
        for turn in range(200):
            if scheduler.waiting < 4:
                scheduler.submit(FakeJob(pool, prompt(4), 9), "ab"[turn % 2])
            scheduler.turn()
        return large.over

    assert served(patience=8) and not served(patience=10**6)


def test_what_is_read_beside_counts_as_its_users() -> None:
    """Twelve short prompts of one user share passes; another's long one does not wait for them."""
    executor = FakeExecutor(FakePool(limit=None), pass_tokens=CHUNK)
    scheduler = Scheduler(executor, Limits(quantum=CHUNK, running=99))
    for _ in range(12):
        scheduler.submit(FakeJob(executor.pool, prompt(1), 9), "ann")
    job = FakeJob(executor.pool, prompt(CHUNK), 9)
    scheduler.submit(job, "bob")
    for _ in range(2):
        scheduler.turn()
    assert [len(one) for one in executor.passes] == [CHUNK, 1] and executor.passes[1] == [job]


def test_each_user_has_a_prompt_in_the_pass_before_one_has_two() -> None:
    executor = FakeExecutor(FakePool(limit=None), pass_tokens=CHUNK)
    scheduler = Scheduler(executor, Limits(quantum=4 * CHUNK))
    later = [FakeJob(executor.pool, prompt(2), 9) for _ in range(2)]
    for job in later:
        job.missing = 1
        scheduler.submit(job, "ann")
        scheduler.turn()
    first, other = (
        FakeJob(executor.pool, prompt(CHUNK + 1), 9),
        FakeJob(executor.pool, prompt(2), 9),
    )
    scheduler.submit(first, "ann")
    scheduler.turn()
    for job in later:
        job.missing = 0
    scheduler.submit(other, "bob")
    scheduler.turn()
    assert executor.passes == [[first], [first, other]]


def test_what_other_servers_hold_up_takes_no_place() -> None:
    """And is bounded by itself; what has come then goes before what waits."""
    pool = FakePool(limit=None)
    scheduler = scheduler_of(pool, running=2, fetching=3)

    def asked(user: str, fetches: bool, reply: int = 2) -> FakeJob:
        job = FakeJob(pool, prompt(2), reply)
        job.fetches, job.missing = fetches, int(fetches)
        tickets[job] = scheduler.submit(job, user)
        return job

    tickets: dict[FakeJob, Ticket[FakeJob]] = {}
    slow = [asked(f"slow {at}", True) for at in range(5)]
    scheduler.turn()
    assert [tickets[job].state for job in slow] == ["preparing"] * 3 + ["waiting"] * 2
    scheduler.turn()
    assert scheduler.blocked and scheduler.places == 2 and scheduler.running == 3
    quick = asked("quick", False)
    while not tickets[quick].over:
        scheduler.turn()
    long = [asked(f"long {at}", False, 9) for at in range(2)]
    scheduler.turn()
    later = asked("later", False)
    slow[0].missing = 0
    scheduler.turn()
    assert tickets[slow[0]].state == "preparing" and scheduler.places == 0
    long[0].reply = long[0].said + 1
    for _ in range(2):
        scheduler.turn()
    assert tickets[long[0]].state == "done" and tickets[later].state == "waiting"
    assert tickets[slow[0]].state in ("prefill", "decode", "done")
    scheduler.close()


@pytest.mark.parametrize(
    "limit, held, together", [(99, 0, True), (99, 6, True), (99, 8, False), (None, 8, True)]
)
def test_a_pass_takes_pages_that_its_prompts_have_reserved(
    limit: int | None, held: int, together: bool
) -> None:
    """A whole chunk and the end of another prompt, though pages for one chunk are committed."""
    pool = FakePool(limit)
    executor = FakeExecutor(pool, pass_tokens=CHUNK + 2)
    scheduler = Scheduler(executor, Limits(quantum=CHUNK))
    sessions = [FakeSession(pool, bound=3) for _ in "ab"]
    for session in sessions:
        session.open = True
        session.store(prompt(held))
    jobs = [FakeJob(pool, prompt(n), 9, s) for n, s in zip((CHUNK, 2), sessions, strict=True)]
    assert [(one.steady, one.chunk) for one in map(FakeJob.reservation, jobs)] == [(4, 2), (4, 2)]
    for job, user in zip(jobs, "ab", strict=True):
        scheduler.submit(job, user)
    scheduler.turn()
    assert executor.passes == [jobs if together else jobs[:1]]


def of_32_streams(
    gap: float | None, rounds: int = 3
) -> tuple[list[float], list[list[float]], float]:
    """Answer 32 users, who ask again when they have a reply; gaps, times to first tokens, time.

    SmolLM2 on a CPU, about: 30 layers, 2.5 ms for a token of a prompt, 10 ms and 4 ms for each
    reply of a step; 16 are served at a time.
    """
    executor = FakeExecutor(FakePool(None), CHUNK, layers=30, token=0.16, step=0.01, stream=0.004)
    limits = Limits(running=16, quantum=CHUNK, gap=gap)
    scheduler = Scheduler(executor, limits, clock=lambda: executor.now)
    gaps: list[float] = []
    firsts: list[list[float]] = [[] for _ in range(rounds)]
    asked: dict[Ticket[FakeJob], tuple[int, float]] = {}
    latest: dict[Ticket[FakeJob], tuple[int, float]] = {}

    def ask(user: str, number: int) -> None:
        ticket = scheduler.submit(FakeJob(executor.pool, prompt(CHUNK), 32), user)
        asked[ticket] = number, executor.now

    for user in range(32):
        ask(str(user), 0)
    while scheduler.turn():
        for ticket, (number, when) in list(asked.items()):
            said, (before, at) = ticket.job.said, latest.get(ticket, (0, when))
            if said > before:
                if not before:
                    firsts[number].append(executor.now - when)
                gaps += [executor.now - at] if before else []
                latest[ticket] = said, executor.now
            if ticket.over:
                del asked[ticket]
                if number + 1 < rounds:
                    ask(ticket.user, number + 1)
    return gaps, firsts, executor.now


def test_the_time_between_tokens_holds_while_prompts_wait() -> None:
    """A chunk takes 0.64 s, a step of 16 replies 0.074 s, a layer of a chunk 0.021 s."""
    gaps, firsts, seconds = of_32_streams(gap=0.2)
    assert max(gaps) <= 0.2 + 0.021 and statistics.median(gaps) >= 0.15
    for each in firsts[1:]:  # of users who are served in turn
        assert len(each) == 32 and max(each) <= 1.05 * min(each)
    whole_gaps, _, whole_seconds = of_32_streams(gap=None)
    assert len(gaps) == len(whole_gaps) and max(whole_gaps) > 0.7
    assert seconds <= 1.2 * whole_seconds


def test_prompts_get_a_share_of_the_time_however_long_steps_are() -> None:
    """A target that a step alone misses: prompts get as much as replies."""
    executor = FakeExecutor(FakePool(None), CHUNK, layers=64, token=1.0, step=0.5)
    scheduler = Scheduler(executor, Limits(quantum=CHUNK, gap=0.1), clock=lambda: executor.now)
    first = scheduler.submit(FakeJob(executor.pool, prompt(1), 10**6), "a")
    scheduler.turn()
    scheduler.turn()
    assert first.job.said == 3
    second = scheduler.submit(FakeJob(executor.pool, prompt(CHUNK), 9), "b")
    began, turns = executor.now, scheduler.turns
    while not second.job.said:
        scheduler.turn()
    assert scheduler.turns - turns == 64 / 8  # layers of 1/16 s
    assert executor.now - began == 4.0 + 0.5 * (scheduler.turns - turns)
    first.cancel()


def test_a_cancelled_prompt_leaves_a_pass_that_was_left() -> None:
    """At once where it is alone; otherwise when the pass is over, and the others are read on."""
    pool = FakePool(limit=99)
    executor = FakeExecutor(pool, 2 * CHUNK, layers=4, token=1.0)
    scheduler = Scheduler(executor, Limits(quantum=CHUNK, gap=1.0), clock=lambda: executor.now)
    going = scheduler.submit(FakeJob(pool, prompt(1), 99), "a")
    scheduler.turn()
    alone = scheduler.submit(FakeJob(pool, prompt(CHUNK), 9), "b")
    scheduler.turn()
    assert scheduler.reading == [alone]
    alone.cancel()
    scheduler.turn()
    assert alone.state == "cancelled" and executor.aborted == 1 and not scheduler.reading
    both = [scheduler.submit(FakeJob(pool, prompt(CHUNK), 9), user) for user in "cd"]
    scheduler.turn()
    assert set(scheduler.reading) == set(both)
    both[0].cancel()
    scheduler.turn()
    assert both[0].state == both[1].state == "prefill"
    while scheduler.reading:
        scheduler.turn()
    assert [one.state for one in both] == ["cancelled", "decode"] and executor.aborted == 1
    assert going.job.said == scheduler.turns + 1
    scheduler.close()
    assert not pool.held


def test_a_full_chunk_takes_no_more_places_of_its_user() -> None:
    """Who comes later finds one, as long as the first prompts are being read."""
    pool = FakePool(limit=None)
    scheduler = Scheduler(FakeExecutor(pool, pass_tokens=CHUNK), Limits(quantum=CHUNK, running=4))
    for _ in range(8):
        scheduler.submit(FakeJob(pool, prompt(3 * CHUNK), 9), "greedy")
    scheduler.turn()
    assert scheduler.running == 1
    modest = scheduler.submit(FakeJob(pool, prompt(2), 1), "modest")
    for _ in range(2):
        scheduler.turn()
    assert modest.over


def test_a_turn_encodes_the_pictures_of_one_prompt() -> None:
    pool = FakePool(limit=None)
    scheduler = Scheduler(FakeExecutor(pool, pass_tokens=CHUNK), Limits(quantum=CHUNK))
    jobs = [FakeJob(pool, prompt(1), 9) for _ in range(3)]
    for job, user in zip(jobs, "abc", strict=True):
        job.slow_to_begin = user != "c"
        scheduler.submit(job, user)
    scheduler.turn()
    assert [job.read for job in jobs] == [1, 0, 1]
    scheduler.turn()
    assert [job.read for job in jobs] == [1, 1, 1]


def test_users_are_admitted_in_turn() -> None:
    """There is room for one request at a time, and one user has asked for 30."""
    pool = FakePool(limit=None)
    scheduler = scheduler_of(pool, waiting=99, running=1)
    greedy = [scheduler.submit(FakeJob(pool, prompt(4), 3), "greedy") for _ in range(30)]
    scheduler.turn()
    modest = [scheduler.submit(FakeJob(pool, prompt(4), 3), user) for user in ("a", "b", "a")]
    while not all(ticket.over for ticket in modest):
        scheduler.turn()
    assert sum(ticket.over for ticket in greedy) <= 3


@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_deficits_make_up_for_unequal_chunks(beside: int, comes_and_goes: bool) -> None:
    """By a visit's quantum, a quantum and a chunk not got yet, and what was read beside a chunk."""
    robin, served = DeficitRoundRobin(quantum=10), {"long": 0, "short": 0, "third": 0}
    costs = {"long": 10, "short": 3 if not beside else 10}
    for at in range(1000):
        there = comes_and_goes and at % 5 < 2
        user = robin.next(costs | ({"third": 7} if there else {}))
        robin.charge(user, costs.get(user, 7))
        served[user] += costs.get(user, 7)
        if user == "long":
            robin.charge("short", beside)
            served["short"] += beside
        assert abs(served["long"] - served["short"]) <= 10 + (10 + 10) + beside
    assert robin.next({"short": 3}) == "short" and robin.next({"new": 9}) == "new"


def test_a_user_is_served_while_what_it_was_granted_lasts() -> None:
    robin, costs, order = DeficitRoundRobin(quantum=10), {"a": 6, "b": 4}, ""
    for _ in range(10):
        order += robin.next(costs)
        robin.charge(order[-1], costs[order[-1]])
    assert order == "abbaabbbaa"  # a has 10, 4; 14, 8, 2; 12, 6, 0, b 10, 6, 2; 12, 8, 4, 0
    pool = FakePool(limit=None)
    scheduler = scheduler_of(pool)
    for user in "aaab":  # a prompt that cannot begin is paid for, too
        job = FakeJob(pool, prompt(4), 1)
        job.fails_at = 0 if user == "a" else None
        last = scheduler.submit(job, user)
    for _ in range(2):
        scheduler.turn()
    assert last.over


@pytest.mark.parametrize("end", ["cancelled", "admitted"])
def test_a_request_whose_patience_is_over_holds_nobody_up_after_its_end(end: str) -> None:
    """Neither once its client has gone, nor once it was admitted itself."""
    pool = FakePool(limit=13)
    scheduler = scheduler_of(pool, patience=2)
    first = scheduler.submit(FakeJob(pool, prompt(4), 99), "first")
    scheduler.turn()
    large = scheduler.submit(FakeJob(pool, prompt(20), 9, bound=9), "large")
    for user in "ab":
        scheduler.submit(FakeJob(pool, prompt(1), 1, bound=1), user)
    for _ in range(2):
        scheduler.turn()
    assert large.state == "waiting" and large.overtaken == 2
    small = scheduler.submit(FakeJob(pool, prompt(1), 1, bound=1), "c")
    scheduler.turn()
    assert small.state == "waiting", "nothing else is admitted until the large one fits"
    (large if end == "cancelled" else first).cancel()
    for _ in range(2):
        scheduler.turn()
    assert small.over and large.over == (end == "cancelled")


def test_idle_sessions_hibernate_the_one_used_longest_ago_first() -> None:
    pool = FakePool(limit=14)
    scheduler = scheduler_of(pool)
    first, second, third = (FakeSession(pool, bound=4) for _ in range(3))
    for session in (first, second, first):
        scheduler.submit(FakeJob(pool, prompt(4), 2, session))
        while scheduler.turn():
            pass
    before = second.state()
    ticket = scheduler.submit(FakeJob(pool, prompt(4), 2, third))
    while scheduler.turn():
        pass
    assert ticket.state == "done" and first.resident and not second.resident
    scheduler.submit(FakeJob(pool, prompt(4), 2, second))
    scheduler.turn()
    assert second.state()[0] == [*before[0], *prompt(4), -1][-8:] and not first.resident


def test_without_files_a_pinned_session_is_named() -> None:
    pool = FakePool(limit=14)
    scheduler = scheduler_of(pool, to_files=False)
    sessions = [FakeSession(pool, bound=6) for _ in range(2)]
    scheduler.submit(FakeJob(pool, prompt(4), 2, sessions[0]))
    while scheduler.turn():
        pass
    with pytest.raises(CapacityError, match="close a session") as error:
        scheduler.submit(FakeJob(pool, prompt(4), 2, sessions[1]))
    assert (error.value.needed, error.value.committed, error.value.final) == (9, 6, False)
    scheduler.close_session(sessions[0])
    scheduler.submit(FakeJob(pool, prompt(4), 2, sessions[1]))
    with pytest.raises(SessionError, match="busy"):
        scheduler.close_session(sessions[1])


def test_a_reply_that_cannot_be_decoded_leaves_the_others_alone() -> None:
    pool = FakePool(limit=None)
    scheduler = scheduler_of(pool)
    tickets = [scheduler.submit(FakeJob(pool, prompt(4), 5), user) for user in "abc"]
    step = scheduler.executor.step

    def refusing(jobs: list[FakeJob]) -> None:
        if tickets[1].job in jobs:
            raise BudgetError("no room")
        step(jobs)

    scheduler.executor.step = refusing  # type: ignore[assignment, method-assign]
    while scheduler.turn():
        pass
    assert [ticket.state for ticket in tickets] == ["done", "failed", "done"]
    assert not pool.held


def test_replies_wait_for_prompts_where_nobody_watches() -> None:
    pool = FakePool(limit=None)
    scheduler = Scheduler(FakeExecutor(pool), Limits(quantum=CHUNK, interleave=False))
    for _ in range(3):
        scheduler.submit(FakeJob(pool, prompt(8), 4))
    for _ in range(6):
        scheduler.turn()
        assert scheduler.executor.steps == 0  # type: ignore[attr-defined]
    for turn in range(3):
        assert scheduler.turn() == (turn < 2)
    assert scheduler.executor.steps == 3  # type: ignore[attr-defined]
