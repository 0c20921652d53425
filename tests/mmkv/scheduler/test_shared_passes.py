"""Prompts that are read in one pass: as alone, within the bound, and when one of them fails."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv import Engine
from mmkv.engine.errors import BudgetError, NotFiniteError
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from mmkv.turn import Prompt
from tests.support.replies import CHUNK, REPLY, ids, load, watch


def read_by(
    engine: Engine, pass_tokens: int | None, gap: float | None = None
) -> tuple[list[Any], list[int]]:
    """Read six prompts of one user and two of others, twice; replies, memories, jobs of passes.

    Args:
        pass_tokens: of the executor; None: its own.
        gap: see Limits; a pass that goes on counts once more.
    """
    executor, passes = EngineExecutor(engine), []
    assert executor.pass_tokens == CHUNK * 5 // 4
    if pass_tokens is not None:
        executor._pass_tokens = pass_tokens
    read = executor.read
    executor.read = lambda jobs, *more: passes.append(len(jobs)) or read(jobs, *more)  # type: ignore[method-assign, func-returns-value, assignment, misc]
    scheduler = Scheduler(executor, Limits(quantum=CHUNK, gap=gap), clock=lambda: 0.0)
    found: list[Any] = []
    kept = [CachedConversation(engine) for _ in range(8)]
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


@pytest.mark.parametrize(
    "model, policy, weights",
    [
        ("qwen", "dbtrimkv", "int8"),
        ("qwen", "snapkv:window=4", "bf16"),
        ("hybrid", "h2o", "bf16"),
    ],
)
def test_prompts_that_share_a_pass_are_read_as_alone(
    model: str, policy: str, weights: str, request: pytest.FixtureRequest
) -> None:
    """The same replies and memories, bit for bit, in fewer passes, also where these are left."""
    engine = load(request.getfixturevalue(model), policy=policy, weights=weights, budget=6)
    shared, passes = read_by(engine, None)
    left, parts = read_by(engine, None, gap=0.0)
    alone, each = read_by(engine, 0)
    assert max(passes) >= 3 and max(each) == 1 and len(passes) <= len(each) - 8
    assert len(parts) > 2 * len(passes)
    for (tokens, memory), *copies in zip(alone, shared, left, strict=True):
        for others, other in copies:
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
    kept = [CachedConversation(engine) for _ in range(8)]
    reservation = ReplyJob(engine, message("?"), session=kept[0], chunk=chunk).reservation()
    engine.cache.pool.limit = 8 * reservation.steady + reservation.chunk
    executor, passes = EngineExecutor(engine), []
    read, scheduler = executor.read, Scheduler(executor, Limits(quantum=CHUNK))

    def counted(jobs: Any, _: float | None) -> Any:
        held = engine.cache.pool.num_pages - engine.cache.pool.free_pages
        own = sum(job.held_pages for job in jobs)
        new = held - own + sum(map(executor.pages_for, jobs))
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


def test_ctrl_c_takes_back_a_pass_that_is_left(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(qwen, weights="bf16")
    executor, read = EngineExecutor(engine), engine.decoder.gate_input
    job = ReplyJob(engine, Prompt({"input_ids": ids(9, seed=1)}), REPLY)
    job.begin()

    def pressed(*given: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return read(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine.decoder, "gate_input", pressed)
        executor.read([job], 0.0)
    assert job.live is not None and engine.cache.held_pages(job.live.seq) == 0
    assert executor.read([job], 0.0) is None and executor.read([job]) == [True]
    job.live.close()


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
