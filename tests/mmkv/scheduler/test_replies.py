"""The scheduler on a real engine: replies as without it, cancelled, failing, or from files."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv import Budget, Engine, Sampling
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.errors import BudgetError, CapacityError, InputError, SessionError
from mmkv.reply import ReplyWriter
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.capacity import Reservation
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from mmkv.session import Session
from mmkv.turn import Prompt
from tests.support.calibrated import certified
from tests.support.chat_models import picture
from tests.support.replies import CHUNK, LONG, REPLY, ask, load, watch
from tests.support.sessions import assert_same_rows


@pytest.mark.parametrize("policy", ["dbtrimkv", "kv-key"])
def test_sessions_that_share_an_engine_and_a_disk_reply_as_alone(
    policy: str, qwen: Path, tmp_path: Path
) -> None:
    """Four sessions of three turns where not all have room: each hibernates and comes back."""
    engine = load(qwen, policy=policy, evict_every=2)
    alone = [engine.session() for _ in range(4)]
    wanted: list[list[Any]] = []
    for session in alone:
        wanted.append([])
        for turn in range(3):
            list(session.send(**ask(session, turn), sampling=REPLY))
            assert session.last is not None
            wanted[-1].append((session.last.token_ids, session.last.text))
    bounds = ReplyJob(engine, message("?"), session=CachedConversation(engine)).reservation()
    keeping = engine.policy.keeps_prompt
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK), to_files=True)
    stored = [CachedConversation(engine, folder=tmp_path) for _ in alone]
    if not keeping:
        engine.trim()
        engine.cache.pool.limit = engine.cache.pool.num_pages + 3 * bounds.steady + bounds.chunk
    hibernated = 0
    for turn in range(3):
        tickets = [
            scheduler.submit(
                ReplyJob(
                    engine, message(**ask(session, turn)), REPLY, session=each, prompt_tokens=400
                ),
                user,
            )
            for each, session, user in zip(stored, alone, "abca", strict=True)
        ]
        while scheduler.turn():
            hibernated = max(hibernated, len(list(tmp_path.iterdir())))
        assert [ticket.error for ticket in tickets] == [None] * 4
        for ticket, replies in zip(tickets, wanted, strict=True):
            assert ticket.job.reply is not None
            assert (ticket.job.reply.token_ids, ticket.job.reply.text) == replies[turn]
    assert keeping or hibernated
    engine.cache.pool.limit = None
    for each, session in zip(stored, alone, strict=True):
        live = each.wake()
        assert live.history == session.history and live.state() == session.state()
        assert live.last is not None and session.last is not None
        assert live.last.text == session.last.text
        assert_same_rows(live, session)
    for each in (*stored, *alone):
        each.close()
    engine.cache.check()
    assert not list(tmp_path.iterdir())
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_no_more_pages_are_held_than_are_committed(
    engine: Engine, scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [
        CachedConversation(engine, budget, tmp_path) for budget in (24, 9, Budget.bytes(30_000))
    ]
    prices = [ReplyJob(engine, message("?"), session=each).reservation() for each in stored]
    steady = sorted(reservation.steady for reservation in prices)
    limit = steady[0] + 2 * steady[-1] + prices[0].chunk  # and a copy to return to
    engine.cache.pool.limit = limit
    held = watch(monkeypatch, engine, scheduler)
    for turn in range(3):
        for each in stored:
            scheduler.submit(
                ReplyJob(engine, message(**ask(each.live, turn)), REPLY, session=each), str(turn)
            )
        inputs = engine.inputs([{"role": "user", "content": LONG}])
        scheduler.submit(ReplyJob(engine, Prompt(inputs), REPLY, budget=5), "one")
        while scheduler.turn():
            assert scheduler.ledger.committed <= limit
    # The bound is not far off: worst cases of rows do not all happen at once.
    assert max(held) > limit / 3


@pytest.mark.parametrize("policy", ["full", "streamingllm"])
def test_a_turn_that_may_be_undone_pays_for_the_copy_it_goes_back_to(
    policy: str, qwen: Path, tmp_path: Path
) -> None:
    """And none of them less than what its pages are in the end, counted in the cache."""
    options: dict[str, Any] = {"policy": policy, "budget": 30, "dtype": "float32"}
    engine = Engine.from_pretrained(qwen, page_size=8, prefill_chunk=CHUNK, **options)
    stored = CachedConversation(engine, folder=tmp_path)
    session = stored.wake()
    list(session.send(LONG, sampling=REPLY))
    tokens = engine.inputs([{"role": "user", "content": "why?"}])["input_ids"].shape[-1] + 8

    def reservation(undo: bool, most: int = tokens) -> Reservation:
        given = {"session": stored, "prompt_tokens": most, "undo": undo}
        return ReplyJob(engine, message("why?"), REPLY, **given).reservation()  # type: ignore[arg-type]

    held = stored.pages
    assert held == engine.cache.pool.num_pages - engine.cache.pool.free_pages > 0
    # A prompt of one chunk has nothing to go back to before it is read.
    copies = [reservation(False, most).snapshot for most in (CHUNK, CHUNK + 1)]
    assert copies == [0, held] and reservation(True, CHUNK + 1).snapshot == 0
    plain, undone = reservation(False), reservation(True)
    assert undone.steady == plain.steady + held and undone.chunk == plain.chunk
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))
    job = ReplyJob(engine, message("why?"), REPLY, session=stored, prompt_tokens=tokens, undo=True)
    ticket, most = scheduler.submit(job), 0
    while scheduler.turn():
        most = max(most, engine.cache.pool.num_pages - engine.cache.pool.free_pages)
    assert ticket.error is None and plain.total < most + held and most <= undone.total
    stored.close()


def test_a_batch_waits_for_room_and_says_the_same(engine: Engine) -> None:
    talks = [[{"role": "user", "content": f"{number} {LONG}"}] for number in range(5)]
    wanted = [reply.token_ids for reply in engine.generate(talks, REPLY)]
    bound = ReplyJob(engine, Prompt(engine.inputs(talks[0])), REPLY).reservation()
    engine.trim()
    engine.cache.pool.limit = 2 * bound.total
    assert [reply.token_ids for reply in engine.generate(talks, REPLY)] == wanted
    assert engine.cache.pool.num_pages <= 2 * bound.total
    engine.trim()
    engine.cache.pool.limit = bound.total - 1
    with pytest.raises(CapacityError, match="may take") as error:
        engine.generate(talks, REPLY)
    assert (error.value.needed, error.value.limit) == (bound.total, bound.total - 1)


def test_pictures_are_not_read_before_there_is_room(engine: Engine, scheduler: Scheduler) -> None:
    reservation = ReplyJob(engine, message("?"), session=CachedConversation(engine)).reservation()
    engine.cache.pool.limit = reservation.total
    prepared: list[int] = []

    def job(number: int) -> ReplyJob:
        def prepare(session: Session) -> Prompt:
            prepared.append(number)
            return message("what is it?", images=[picture()])(session)

        return ReplyJob(engine, prepare, REPLY)

    first, second = (scheduler.submit(job(number), str(number)) for number in range(2))
    while not first.over:
        scheduler.turn()
        assert prepared == [0] or first.over
    assert second.state == "waiting"
    while scheduler.turn():
        pass
    assert prepared == [0, 1] and second.state == "done"


def test_what_has_no_bound_is_refused(qwen: Path) -> None:
    engine = load(qwen, kv_limit=10**6)
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))
    with pytest.raises(InputError, match="give prompt_tokens"):
        scheduler.submit(ReplyJob(engine, message("?"), budget=Budget.fraction(0.5)))
    engine = load(qwen, policy="full", kv_limit=10**6)
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))
    with pytest.raises(InputError, match="give prompt_tokens"):
        scheduler.submit(ReplyJob(engine, message("?")))
    for budget in (25, Budget.fraction(0.5)):
        for make in (
            lambda budget: ReplyJob(engine, message("?"), budget=budget),
            lambda budget: CachedConversation(engine, budget),
        ):
            with pytest.raises(BudgetError, match="'full' evicts nothing"):
                make(budget)
    ticket = scheduler.submit(ReplyJob(engine, message(LONG), REPLY, prompt_tokens=30))
    scheduler.turn()
    assert ticket.state == "failed" and "announced with 30" in str(ticket.error)
    ticket = scheduler.submit(ReplyJob(engine, message(LONG), REPLY, prompt_tokens=300))
    while scheduler.turn():
        pass
    assert ticket.state == "done" and engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_a_file_that_is_gone_fails_its_request_alone(
    engine: Engine, scheduler: Scheduler, tmp_path: Path
) -> None:
    stored = CachedConversation(engine, folder=tmp_path)
    scheduler.submit(ReplyJob(engine, message("first"), REPLY, session=stored))
    while scheduler.turn():
        pass
    scheduler.hibernate(stored)
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages
    assert scheduler.ledger.committed == 0
    (file,) = tmp_path.iterdir()
    file.unlink()
    lost = scheduler.submit(ReplyJob(engine, message("second"), REPLY, session=stored))
    other = scheduler.submit(ReplyJob(engine, message("another"), REPLY), "other")
    while scheduler.turn():
        pass
    assert isinstance(lost.error, SessionError) and other.state == "done"


def test_sessions_that_share_a_budget_stay_within_its_bound(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven sessions where not all have room beside the shared pages: some move to files."""
    engine = load(qwen, evict_every=2, page_size=16)
    engine.share(24, floor=4)
    shared, pool, rows = engine.shared, engine.cache.pool, engine.spec.rows
    assert shared is not None
    with pytest.raises(BudgetError, match="share a budget of 24"):
        engine.session(8)
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK), to_files=True)
    stored = [CachedConversation(engine, folder=tmp_path) for _ in range(7)]
    reservation = ReplyJob(engine, message("?"), session=stored[0]).reservation()
    assert reservation.steady == rows
    # Room for three, a chunk, and the copy that one of them may go back to.
    pool.limit = shared.fixed_pages + 3 * rows + reservation.chunk + shared.fixed_pages + rows
    held = watch(monkeypatch, engine, scheduler, shared.fixed_pages)
    moved = 0
    for turn in range(2):
        tickets = [
            scheduler.submit(ReplyJob(engine, message(**ask(None, turn)), REPLY, session=each), "u")
            for each in stored
        ]
        tickets[turn].cancel()
        while scheduler.turn():
            moved += sum(one.path is not None and one.path.exists() for one in stored)
            assert shared.held <= shared.entries + rows + 7 * rows
        assert [one.state for one in tickets if one is not tickets[turn]] == ["done"] * 6
    assert moved and max(held) <= pool.limit
    asleep = next(one for one in stored if not one.resident and one.pages)
    short = ReplyJob(engine, message("?"), session=asleep, prompt_tokens=1)
    assert short.reservation().snapshot == asleep.pages  # until all are cut
    scheduler.close()
    assert pool.free_pages == pool.num_pages and shared.held == 0


# A reply whose writer raises among others in one step: it fails, and they go on as if alone.


TEXTS = ("one", "two", "three")


def fail(monkeypatch: pytest.MonkeyPatch, writer: ReplyWriter, what: str, error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(writer, what, fails)


def in_bursts(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Decode by the static step that a GPU captures; here it runs as it is."""
    runner = GraphRunner(engine.model, engine.cache)
    monkeypatch.setattr(type(engine), "many_path", "graph")
    monkeypatch.setattr(engine.backends.cuda, "decode_many", runner.decode)


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), InputError("a refusal")])
@pytest.mark.parametrize("what", ["choose", "put", "take_burst"])
def test_the_others_go_on(
    what: str, error: Exception, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "take_burst":
        in_bursts(monkeypatch, engine)
    wanted = []
    for text in TEXTS:
        with engine.session() as session:
            list(session.send(text, sampling=REPLY))
            assert session.last is not None
            wanted.append(session.last.token_ids)
    limits = Limits(quantum=CHUNK, interleave=False)  # until all are in the same step
    with closing(Scheduler(EngineExecutor(engine), limits)) as scheduler:
        stored = [CachedConversation(engine) for _ in TEXTS]
        tickets = [
            scheduler.submit(ReplyJob(engine, message(text), REPLY, session=each), text)
            for text, each in zip(TEXTS, stored, strict=True)
        ]
        while any(ticket.state in ("waiting", "prefill") for ticket in tickets):
            scheduler.turn()
        broken = tickets[1].job.writer
        assert broken is not None
        fail(monkeypatch, broken, what, error)
        while scheduler.turn():
            pass
        assert [ticket.state for ticket in tickets] == ["done", "failed", "done"]
        assert tickets[1].error is error
        for at in (0, 2):
            reply = tickets[at].job.reply
            assert reply is not None and reply.token_ids == wanted[at]
        assert stored[1].live is not None and stored[1].live.history == []
    engine.cache.check()


# Prompts and replies that are cancelled: what their sessions hold then.


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_cancelled_prompt_leaves_no_trace(
    chunks: int, engine: Engine, scheduler: Scheduler
) -> None:
    reference, stored = engine.session(), CachedConversation(engine)
    scheduler.submit(ReplyJob(engine, message("first"), REPLY, session=stored))
    while scheduler.turn():
        pass
    list(reference.send("first", sampling=REPLY))
    ticket = scheduler.submit(ReplyJob(engine, message(LONG * 2), REPLY, session=stored))
    for _ in range(chunks):
        scheduler.turn()
    assert ticket.state == "prefill"
    ticket.cancel()
    scheduler.turn()
    assert ticket.state == "cancelled" and stored.live is not None
    assert stored.live.history == reference.history
    assert_same_rows(stored.live, reference)
    again = scheduler.submit(ReplyJob(engine, message("second"), REPLY, session=stored))
    while scheduler.turn():
        pass
    list(reference.send("second", sampling=REPLY))
    assert again.job.reply is not None and reference.last is not None
    assert again.job.reply.token_ids == reference.last.token_ids
    assert_same_rows(stored.live, reference)
    reference.close()


def test_a_cancelled_reply_ends_where_it_stands(engine: Engine, scheduler: Scheduler) -> None:
    stored = CachedConversation(engine)
    ticket = scheduler.submit(ReplyJob(engine, message("first"), REPLY, session=stored))
    while len(ticket.job.writer.token_ids if ticket.job.writer else ()) < 3:
        scheduler.turn()
    ticket.cancel()
    scheduler.turn()
    reply = ticket.job.reply
    assert reply is not None and reply.finish_reason == "interrupted" and len(reply.token_ids) == 3
    assert stored.live is not None and stored.live.history[-1]["role"] == "assistant"
    assert list(stored.live.unfed) == reply.token_ids[-1:]


@pytest.mark.parametrize("turns", [1, 4, 9])
def test_a_turn_is_taken_back_whole_where_that_was_asked(
    turns: int, engine: Engine, scheduler: Scheduler
) -> None:
    stored = CachedConversation(engine)

    def job(text: str) -> ReplyJob:
        return ReplyJob(engine, message(text), REPLY, session=stored, undo=True)

    scheduler.submit(job("first"))
    while scheduler.turn():
        pass
    assert stored.live is not None
    before, held, live = stored.live.fork(), stored.pages, stored.live
    ticket = scheduler.submit(job(LONG))
    for _ in range(turns):
        scheduler.turn()
        # The test holds one copy more.
        pages = engine.cache.pool.num_pages - engine.cache.pool.free_pages
        assert pages - held <= scheduler.ledger.committed
    assert ticket.state == ("decode" if turns == 9 else "prefill")
    ticket.cancel()
    scheduler.turn()
    assert ticket.state == "cancelled" and stored.live is live and stored.pages == held
    assert live.history == before.history and live.unfed == before.unfed
    assert_same_rows(live, before)
    before.close()
    again = scheduler.submit(job("second"))
    while scheduler.turn():
        pass
    assert again.state == "done" and len(live.history) == 4
    assert engine.cache.pool.num_pages - engine.cache.pool.free_pages == stored.pages


def test_a_session_that_is_closed_takes_its_file_with_it(
    engine: Engine, scheduler: Scheduler, tmp_path: Path
) -> None:
    stored = CachedConversation(engine, folder=tmp_path)

    def ask(text: str) -> None:
        ticket = scheduler.submit(ReplyJob(engine, message(text), REPLY, session=stored))
        while scheduler.turn():
            pass
        assert ticket.error is None

    ask("first")
    held, seen, live = stored.pages, stored.extent, stored.live
    assert live is not None
    beside = {"last": live.last, "undo_depth": 3, "rewrites": "keep", "forget_thoughts": True}
    beside |= {"note": "n", "cache_salt": "s"}  # what no session file holds
    live.__dict__.update(beside)
    stored.hibernate()
    assert len(list(tmp_path.iterdir())) == 1 and not stored.resident
    assert (stored.pages, stored.extent) == (held, seen) and held > 0
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages
    assert vars(stored.wake()).items() >= beside.items()
    assert not list(tmp_path.iterdir()) and stored.pages == held
    stored.hibernate()
    stored.close()
    assert not list(tmp_path.iterdir()) and stored.pages == 0
    ask("begins anew")
    assert stored.live is not None and len(stored.live.history) == 2
    stored.close()


# A conversation in memory and in its file: the session itself, copies, and what is lost.


def test_copies_are_what_the_session_was_wherever_it_lies(engine: Engine, tmp_path: Path) -> None:
    held = CachedConversation(engine, folder=tmp_path)
    assert not held.resident and held.pages == 0
    list(held.wake().send("first", sampling=REPLY))
    with engine.session() as reference:
        list(reference.send("first", sampling=REPLY))
        pages = held.pages
        for resident in (True, False, False):  # a copy leaves the file where it is
            assert held.resident == resident
            with held.fork() as copy:
                list(copy.send("second", sampling=REPLY))
            with held.fork() as copy:
                assert_same_rows(copy, reference)
            held.hibernate()
            assert held.pages == pages
        assert [path.name for path in tmp_path.iterdir()] == [held.path and held.path.name]
        assert_same_rows(held.wake(), reference)
    assert held.resident and not list(tmp_path.iterdir())
    held.close()


def test_a_conversation_whose_file_is_removed_is_lost(engine: Engine, tmp_path: Path) -> None:
    held = CachedConversation(engine, folder=tmp_path)
    list(held.wake().send("first", sampling=REPLY))
    held.hibernate()
    assert held.path is not None and not held.lost
    held.path.write_bytes(b"no session")
    with pytest.raises(SessionError) as damaged:
        held.fork()
    assert str(tmp_path) not in str(damaged.value)
    held.path.unlink()
    assert held.lost
    with pytest.raises(SessionError, match="begin a new one"):
        held.fork()
    held.close()


def test_without_a_folder_it_stays_in_memory(engine: Engine) -> None:
    held = CachedConversation(engine)
    held.wake()
    with pytest.raises(SessionError, match="name one"):
        held.hibernate()
    assert held.resident
    held.close()


def test_conversations_are_read_again_within_what_is_committed(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where there is no room, replies go on as they are."""
    greedy = Sampling(max_new_tokens=9)

    def run(on_risk: str, limit: float, room: int | None = None) -> tuple[Engine, list[ReplyJob]]:
        engine = certified(load(qwen), tmp_path, on_risk, limit=limit, score="doubt")
        jobs = [
            ReplyJob(engine, message(**ask(None, turn)), greedy, prompt_tokens=200)
            for turn in range(6)
        ]
        scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))
        if room is not None:
            bound = jobs[0].reservation()
            engine.cache.pool.limit = 6 * bound.steady + bound.chunk + room
        held = watch(monkeypatch, engine, scheduler)
        with closing(scheduler):
            tickets = [scheduler.submit(job, str(at)) for at, job in enumerate(jobs)]
            while scheduler.turn():
                pass
            assert [ticket.error for ticket in tickets] == [None] * 6
        engine.cache.check()
        assert held and engine.cache.pool.free_pages == engine.cache.pool.num_pages
        return engine, jobs

    def outcomes(engine: Engine) -> list[int]:
        assert engine.loss_control is not None
        return [engine.loss_control.outcomes[name] for name in ("reread", "not_reread")]

    def texts(jobs: list[ReplyJob]) -> list[list[int]]:
        return [job.reply.token_ids for job in jobs if job.reply is not None]

    _, plain = run("say", math.inf)
    lives = [job.live for job in plain if job.live is not None]
    scores = sorted(live.weighing.score for live in lives if live.weighing is not None)
    engine, again = run("reread", scores[2])
    own, whole = texts(plain), texts(again)
    assert outcomes(engine) == [4, 0] and own != whole
    short, found = run("reread", scores[2], 120)
    assert min(outcomes(short)) > 0 and sum(outcomes(short)) == 4
    assert all(one in each for one, *each in zip(texts(found), own, whole, strict=True))


def test_an_answer_goes_on_where_its_second_reading_fails(qwen: Path, tmp_path: Path) -> None:
    """Another thread's session takes the pages meanwhile."""
    greedy, talk = Sampling(max_new_tokens=9), [{"role": "user", "content": LONG}]
    want = load(qwen, kv_limit=2**20).generate(talk, sampling=greedy)[0].token_ids
    engine = certified(load(qwen, kv_limit=2**20), tmp_path, "reread")
    pool, scheduler = engine.cache.pool, Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))
    job, taken = ReplyJob(engine, message(LONG), greedy, prompt_tokens=200), None
    with closing(scheduler), torch.inference_mode():
        ticket = scheduler.submit(job)
        while scheduler.turn():
            if taken is None and job.reads_again and job.prefill.done:
                taken, pool.limit = pool.take(pool.free_pages), pool.num_pages
        assert ticket.error is None and taken is not None
        pool.give(taken)
    assert job.reply is not None and job.reply.token_ids == want
    assert engine.loss_control is not None
    assert engine.loss_control.outcomes["not_reread"] == engine.loss_control.escalated == 1
    assert pool.free_pages == pool.num_pages


def test_a_conversation_from_its_file_is_no_other_one_for_the_drift(
    qwen: Path, tmp_path: Path
) -> None:
    engine = certified(load(qwen), tmp_path, "say")
    stored = CachedConversation(engine, folder=tmp_path)
    with closing(Scheduler(EngineExecutor(engine))) as scheduler:
        for turn in range(3):
            if turn:
                with stored.fork() as copy:
                    assert copy.watched is not None and copy.watched[1:] == (0, turn)
            scheduler.submit(ReplyJob(engine, message(**ask(None, turn)), REPLY, session=stored))
            while scheduler.turn():
                pass
            scheduler.hibernate(stored)
    control = engine.loss_control
    assert control is not None and (control.answers, control.drift.conversations) == (3, 1)
