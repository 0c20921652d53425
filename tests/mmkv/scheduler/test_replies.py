"""The scheduler on a real engine: replies as without it, within its bound, from files and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import BudgetError, CapacityError, InputError, NotFiniteError, SessionError
from mmkv import Budget, Engine, Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.chunk_length import LENGTHS, chunk_length, longest_within
from mmkv.scheduler.replies import EngineExecutor, Prompt, ReplyJob, message
from mmkv.scheduler.stored import StoredSession
from mmkv.session import Session
from tests.support.chat_models import picture, save_qwen3_vl
from tests.support.sessions import assert_same_rows

CHUNK = 16
REPLY = Sampling(max_new_tokens=9, temperature=1.5, seed=3)
LONG = "a question that is long enough to be read in several chunks of sixteen tokens"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


def load(qwen: Path, **options: Any) -> Engine:
    given = {"policy": "dbtrimkv", "gates": "random", "budget": 24, "page_size": 4} | options
    return Engine.from_pretrained(qwen, dtype="float32", prefill_chunk=CHUNK, **given)


@pytest.fixture(scope="module")
def small(qwen: Path) -> Engine:
    return load(qwen)


@pytest.fixture
def engine(small: Engine) -> Iterator[Engine]:
    """Yield an engine that every test leaves as it was."""
    yield small
    small.cache.pool.limit = None
    small.trim()
    assert small.cache.pool.num_pages == 0, "pages are held"


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    """Yield a scheduler that interleaves, and lets sessions hibernate."""
    made = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK), to_files=True)
    yield made
    made.close()


def watch(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, scheduler: Scheduler, beside: int = 0
) -> list[int]:
    """Check at each taking of pages that no more are held than committed; what was held.

    ``beside``: pages that the scheduler's limit leaves out.
    """
    held: list[int] = []
    take, pool = type(engine.cache.pool).take, engine.cache.pool

    def watched(self: Any, count: int) -> torch.Tensor:
        pages = take(self, count)
        if self is pool:
            held.append(pool.num_pages - pool.free_pages)
            assert held[-1] <= scheduler.ledger.committed + beside
        return pages

    monkeypatch.setattr(type(pool), "take", watched)
    return held


def ask(session: Session | None, turn: int) -> dict[str, Any]:
    """Return what is asked in a turn: pictures in some."""
    images = [picture("red", (40 + 8 * turn, 24))] if turn % 2 == 0 else []
    return {"text": f"turn {turn}: {LONG if turn != 1 else 'short'}?", "images": images}


@pytest.mark.parametrize("policy", ["dbtrimkv", "gkv", "kv-key"])
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
    bounds = ReplyJob(engine, message("?"), session=StoredSession(engine)).price()
    keeping = engine.policy.keeps_prompt
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK), to_files=True)
    stored = [StoredSession(engine, folder=tmp_path) for _ in alone]
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
    stored = [StoredSession(engine, budget, tmp_path) for budget in (24, 9, Budget.bytes(30_000))]
    prices = [ReplyJob(engine, message("?"), session=each).price() for each in stored]
    steady = sorted(price.steady for price in prices)
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


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_cancelled_prompt_leaves_no_trace(
    chunks: int, engine: Engine, scheduler: Scheduler
) -> None:
    reference, stored = engine.session(), StoredSession(engine)
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
    stored = StoredSession(engine)
    ticket = scheduler.submit(ReplyJob(engine, message("first"), REPLY, session=stored))
    while len(ticket.job.writer.token_ids if ticket.job.writer else ()) < 3:
        scheduler.turn()
    ticket.cancel()
    scheduler.turn()
    reply = ticket.job.reply
    assert reply is not None and reply.finish_reason == "interrupted" and len(reply.token_ids) == 3
    assert stored.live is not None and stored.live.history[-1]["role"] == "assistant"
    assert stored.live._unfed == reply.token_ids[-1:]


@pytest.mark.parametrize("turns", [1, 4, 9])
def test_a_turn_is_taken_back_whole_where_that_was_asked(
    turns: int, engine: Engine, scheduler: Scheduler
) -> None:
    stored = StoredSession(engine)

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
    assert live.history == before.history and live._unfed == before._unfed
    assert_same_rows(live, before)
    before.close()
    again = scheduler.submit(job("second"))
    while scheduler.turn():
        pass
    assert again.state == "done" and len(live.history) == 4
    assert engine.cache.pool.num_pages - engine.cache.pool.free_pages == stored.pages


def test_a_batch_waits_for_room_and_says_the_same(engine: Engine) -> None:
    talks = [[{"role": "user", "content": f"{number} {LONG}"}] for number in range(5)]
    wanted = [reply.token_ids for reply in engine.generate(talks, REPLY)]
    bound = ReplyJob(engine, Prompt(engine.inputs(talks[0])), REPLY).price()
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
    price = ReplyJob(engine, message("?"), session=StoredSession(engine)).price()
    engine.cache.pool.limit = price.total
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
    engine = load(qwen, policy="full", kv_limit=10**6)
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))
    for budget in (24, Budget.fraction(0.5)):
        with pytest.raises(InputError, match="give prompt_tokens"):
            scheduler.submit(ReplyJob(engine, message("?"), budget=budget))
    ticket = scheduler.submit(ReplyJob(engine, message(LONG), REPLY, prompt_tokens=30))
    scheduler.turn()
    assert ticket.state == "failed" and "announced with 30" in str(ticket.error)
    ticket = scheduler.submit(ReplyJob(engine, message(LONG), REPLY, prompt_tokens=300))
    while scheduler.turn():
        pass
    assert ticket.state == "done" and engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_a_chunk_takes_no_longer_than_asked(engine: Engine) -> None:
    tried: list[int] = []

    def seconds_of(length: int) -> float:
        tried.append(length)
        return length / 1000

    assert longest_within(0.1, seconds_of, LENGTHS) == 64 and tried == [16, 32, 64, 128]
    assert longest_within(0.001, seconds_of, LENGTHS) == 16
    assert chunk_length(engine, 0.0) == 16
    assert chunk_length(engine, 1e9) == max(one for one in LENGTHS if one * 3 <= 2048)
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_a_file_that_is_gone_fails_its_request_alone(
    engine: Engine, scheduler: Scheduler, tmp_path: Path
) -> None:
    stored = StoredSession(engine, folder=tmp_path)
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
    stored = [StoredSession(engine, folder=tmp_path) for _ in range(7)]
    price = ReplyJob(engine, message("?"), session=stored[0]).price()
    assert price.steady == rows
    # Room for three, a chunk, and the copy that one of them may go back to.
    pool.limit = shared.fixed_pages + 3 * rows + price.chunk + shared.fixed_pages + rows
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
            assert shared.held <= shared.entries + engine.slack + 7 * rows
        assert [one.state for one in tickets if one is not tickets[turn]] == ["done"] * 6
    assert moved and max(held) <= pool.limit
    scheduler.close()
    assert pool.free_pages == pool.num_pages and shared.held == 0


def read_by(engine: Engine, pass_tokens: int | None) -> tuple[list[Any], list[int]]:
    """Read six prompts of one user and two of others, twice; replies, memories, jobs of passes.

    Args:
        pass_tokens: of the executor; None: its own.
    """
    executor, passes = EngineExecutor(engine), []
    assert executor.pass_tokens == CHUNK * 5 // 4
    if pass_tokens is not None:
        executor._pass_tokens = pass_tokens
    read = executor.read
    executor.read = lambda jobs: passes.append(len(jobs)) or read(jobs)  # type: ignore[method-assign, func-returns-value]
    scheduler = Scheduler(executor, Limits(quantum=CHUNK))
    found: list[Any] = []
    kept = [StoredSession(engine) for _ in range(8)]
    for turn in range(2):
        jobs = [
            ReplyJob(
                engine, Prompt({"input_ids": ids(count, seed=10 * turn + at)}), REPLY, None, each
            )
            for at, (count, each) in enumerate(zip((3, 5, 40, 7, 1, 22, 9, 4), kept, strict=True))
        ]
        tickets = [scheduler.submit(*each) for each in zip(jobs, "aaaaaabc", strict=True)]
        while scheduler.turn():
            pass
        assert [ticket.error for ticket in tickets] == [None] * 8
        for job, each in zip(jobs, kept, strict=True):
            assert job.reply is not None
            memory = engine.cache.export(each.wake().seq)
            found.append((job.reply.token_ids, memory))
    scheduler.close()
    return found, passes


def ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 200, (1, count), generator=generator)


@pytest.mark.parametrize(
    "policy, weights",
    [("dbtrimkv", "bf16"), ("dbtrimkv", "int8"), ("snapkv:window=4", "bf16"), ("h2o", "bf16")],
)
def test_prompts_that_share_a_pass_are_read_as_alone(policy: str, weights: str, qwen: Path) -> None:
    """The same replies and the same memories, bit for bit, in fewer passes."""
    engine = load(qwen, policy=policy, weights=weights, budget=6)
    shared, passes = read_by(engine, None)
    alone, each = read_by(engine, 0)
    assert max(passes) >= 3 and max(each) == 1 and len(passes) <= len(each) - 8
    for (tokens, memory), (others, other) in zip(shared, alone, strict=True):
        assert tokens == others and memory.keys() == other.keys()
        assert all(torch.equal(part, other[name]) for name, part in memory.items())
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_a_pass_holds_no_more_than_is_committed(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where eight small sessions and the pages of one chunk, shorter than a pass, are all there is.

    A check that fails in a pass is in the log: each prompt reads alone then.
    """
    engine, chunk = load(qwen, weights="bf16", budget=6), CHUNK // 2
    kept = [StoredSession(engine) for _ in range(8)]
    price = ReplyJob(engine, message("?"), session=kept[0], chunk=chunk).price()
    engine.cache.pool.limit = 8 * price.steady + price.chunk
    executor, passes = EngineExecutor(engine), []
    read, scheduler = executor.read, Scheduler(executor, Limits(quantum=CHUNK))

    def counted(jobs: Any) -> Any:
        new = executor.held() + sum(map(executor.pages_for, jobs))
        passes.append((len(jobs), new <= scheduler.ledger.committed))
        return read(jobs)

    executor.read = counted  # type: ignore[method-assign]
    held, tickets = watch(monkeypatch, engine, scheduler), []
    for turn in range(3):
        for at, session in enumerate(kept):
            prompt = Prompt({"input_ids": ids(1 + (5 * at + turn) % chunk, seed=at)})
            job = ReplyJob(engine, prompt, REPLY, session=session, chunk=chunk)
            tickets.append(scheduler.submit(job))
        while scheduler.turn():
            pass
    assert held and max(passes)[0] > 1 and all(fits for _, fits in passes)
    assert [one.error for one in tickets] == [None] * 24
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    scheduler.close()


def test_a_prompt_without_numbers_leaves_its_pass_alone(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(qwen, weights="bf16")
    scheduler, logits = (
        Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK)),
        engine.decoder.logits,
    )

    def with_a_hole(hidden: torch.Tensor) -> torch.Tensor:
        made = logits(hidden)
        made[1:2] = torch.nan
        return made

    tickets = [
        scheduler.submit(ReplyJob(engine, Prompt({"input_ids": ids(4, seed=at)}), REPLY))
        for at in range(3)
    ]
    with monkeypatch.context() as patched:
        patched.setattr(engine.decoder, "logits", with_a_hole)
        scheduler.turn()
    while scheduler.turn():
        pass
    assert [ticket.state for ticket in tickets] == ["done", "failed", "done"]
    assert isinstance(tickets[1].error, NotFiniteError)
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("error", [BudgetError("no room for all of them"), TypeError("a mistake")])
def test_where_a_pass_fails_each_reads_alone(
    error: Exception,
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is no error of ours is in the log, too."""
    engine = load(qwen, weights="bf16")
    scheduler = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK))

    def no_room(prefills: Any) -> None:
        raise error

    monkeypatch.setattr("mmkv.scheduler.replies.reserve_together", no_room)
    tickets = [
        scheduler.submit(ReplyJob(engine, Prompt({"input_ids": ids(4, seed=at)}), REPLY))
        for at in range(3)
    ]
    scheduler.turn()
    assert [ticket.state for ticket in tickets] == ["decode"] * 3
    warned = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == isinstance(error, TypeError)
    scheduler.close()
