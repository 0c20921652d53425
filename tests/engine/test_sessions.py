"""Sessions: independence, budgets, and the memory they report."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from mmkv.engine.errors import BudgetError, InputError, SessionError
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from tests.support.policies import ALL, EVICTING, EVICTING_KINDS
from tests.support.sessions import (
    LATER,
    PICTURES,
    advance,
    assert_same_rows,
    load,
    run,
    text_ids,
    turn,
)
from tests.support.tiers import slow_but


@pytest.mark.parametrize("policy", slow_but(("dbtrimkv",), ALL, "the other policies"))
def test_interleaved_sessions_are_bit_equal(policy: str, folders: dict[str, Path]) -> None:
    """Two dialogues taking turns on one engine give the very bits each gives alone.

    Their M-RoPE offsets differ (one holds pictures first, the other later): a process-wide
    offset, as in other code, would break this.
    """
    engine = load(folders["vl"], policy=policy, budget=20)
    scripts = [
        [PICTURES, text_ids(7, 1), LATER, text_ids(5, 2)],
        [turn(30, seed=3), text_ids(4, 3), PICTURES, text_ids(6, 4)],
    ]
    alone = []
    for script in scripts:
        with engine.session() as session:
            alone.append([advance(session, part) for part in script])
    sessions = [engine.session(), engine.session()]
    for index in range(4):
        for which, session in enumerate(sessions):
            assert torch.equal(advance(session, scripts[which][index]), alone[which][index])
    for session in sessions:
        session.close()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("policy", slow_but(("dbtrimkv",), EVICTING, "the other policies"))
def test_a_batch_equals_its_sessions_alone(policy: str, folders: dict[str, Path]) -> None:
    """Different budgets, lengths and M-RoPE offsets in one step; sessions join and leave.

    Within 1e-5 of the largest logit, not bit-equal: a matrix product over B rows may sum in
    another order than one over a single row. The retained sets are equal.
    """
    engine = load(folders["vl"], policy=policy)
    budgets = [20, Budget.fraction(0.5), 25.5, Budget.bytes(120_000)]
    prompts = [PICTURES, turn(41, seed=5), LATER, turn(3, seed=6)]
    batch = [engine.session(budget) for budget in budgets]
    single = [engine.session(budget) for budget in budgets]
    for together, alone, prompt in zip(batch, single, prompts, strict=True):
        assert torch.equal(together.prefill(prompt), alone.prefill(prompt))
    tokens = text_ids(4 * 12, 7).view(12, 4)
    for step, row in enumerate(tokens.tolist()):
        # The second half of the steps runs a different mixture, in another order.
        members = [0, 1, 2, 3] if step < 6 else [3, 1]
        got = engine.decode([batch[i] for i in members], [row[i] for i in members])
        want = torch.stack([single[i].decode(row[i]) for i in members])
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
        for together, alone in zip(batch, single, strict=True):
            assert_same_rows(together, alone)
            assert together.memory() == alone.memory()


def test_a_batch_refuses_mistakes_before_anything_changes(
    engine: Runtime, folders: dict[str, Path]
) -> None:
    a, b = engine.session(), engine.session()
    a.prefill(PICTURES), b.prefill(PICTURES)
    before = (a.memory(), b.memory())
    stranger = load(folders["vl"]).session()
    for sessions, tokens, kind in (
        ([a, a], [5, 6], InputError),
        ([a, b], [5], InputError),
        ([], [], InputError),
        ([a, b], [5, 10_000], InputError),
        ([a, b], [5, -1], InputError),
        ([a, stranger], [5, 6], SessionError),
    ):
        with pytest.raises(kind):
            engine.decode(sessions, tokens)
    assert (a.memory(), b.memory()) == before
    b.close()
    with pytest.raises(SessionError, match="closed"):
        engine.decode([a, b], [5, 6])
    assert a.memory() == before[0]


def test_set_budget_acts_at_once_and_frees_pages(engine: Runtime) -> None:
    session, rows = engine.session(30), engine.spec.rows
    session.prefill(turn(60, seed=8))
    assert session.memory().entries == 30 * rows
    pages = session.memory().pages
    session.set_budget(5)
    assert session.memory().entries == 5 * rows and session.memory().pages < pages
    run(session, text_ids(3, 9))
    assert session.memory().entries == 5 * rows
    session.set_budget(9)
    assert session.memory().entries == 5 * rows, "what is gone stays gone"
    run(session, text_ids(10, 9))
    assert session.memory().entries == 9 * rows
    kept = session.memory()
    for bad in (0, -3, 0.4, math.nan, Budget.bytes(10), Budget.fraction(2)):
        with pytest.raises(BudgetError):
            session.set_budget(bad)
        with pytest.raises(BudgetError):
            engine.session(bad)
    assert session.memory() == kept and session.budget == Budget.of(9)


def test_evict_every_bounds_the_peak(folders: dict[str, Path]) -> None:
    """Entries stay within M L H + (s - 1) L H after a step, and are cut to exactly M L H."""
    engine = load(folders["vl"], evict_every=4)
    session, rows = engine.session(), engine.spec.rows
    session.prefill(turn(30))
    seen = [session.memory().entries]
    for token in text_ids(13, 3).tolist():
        session.decode(token)
        seen.append(session.memory().entries)
    cycle = [10 * rows, 11 * rows, 12 * rows, 13 * rows]
    assert seen == [*cycle, *cycle, *cycle, *cycle[:2]]


@pytest.mark.slow(reason="long dialogues at several budgets")
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_fraction_budget(engine: Runtime, share: float) -> None:
    session, rows = engine.session(Budget.fraction(share)), engine.spec.rows
    session.prefill(turn(37))
    for seen in range(38, 50):
        session.decode(5)
        entries = session.memory().entries
        # Eviction cuts back when above, so entries never pass the share of what was seen.
        assert entries <= max(rows, math.floor(share * seen * rows))
        assert entries >= max(rows, math.floor(share * (seen - 1) * rows))


def test_byte_budget_holds_physically(engine: Runtime) -> None:
    pool = engine.cache.pool
    for count in (30_000, 77_777):
        with engine.session(Budget.bytes(count)) as session:
            session.prefill(turn(200))
            for token in text_ids(20, 1).tolist():
                session.decode(token)
                pages = session.memory().pages
                assert pages * pool.page_bytes <= count
            assert session.memory().pages * pool.page_bytes > 0.5 * count


def test_full_never_evicts(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy="full", budget=1)
    session = engine.session()
    session.prefill(PICTURES)
    run(session, text_ids(9, 0))
    memory = session.memory()
    assert memory.evicted == 0
    assert memory.entries == memory.tokens_seen * engine.spec.rows
    assert all(
        torch.equal(row, torch.arange(memory.tokens_seen))
        for layer in session.retained()
        for row in layer
    )


def test_memory_equals_a_count_of_pages(engine: Runtime) -> None:
    other = engine.session(15)
    other.prefill(turn(50))
    session = engine.session()
    session.prefill(PICTURES)
    run(session, text_ids(5, 0))
    session.prefill(LATER)
    memory, cache, pool = session.memory(), engine.cache, engine.cache.pool
    lengths = [row.numel() for layer in session.retained() for row in layer]
    pages = sum(math.ceil(n / pool.page_size) for n in lengths)
    element = torch.empty((), dtype=engine.dtype).element_size()
    assert memory.pages == pages
    assert memory.kv_bytes == pages * pool.page_size * engine.spec.head_dim * 2 * element
    per_page = sum(getattr(pool, name)[0].nbytes for name in ("log_beta", "position", "modality"))
    tables = cache.length[session.seq].nbytes + cache.table[session.seq].nbytes
    assert memory.metadata_bytes == pages * per_page + tables
    assert pool.num_pages - pool.free_pages == pages + other.memory().pages
    tokens = sum(prompt["input_ids"].shape[1] for prompt in (PICTURES, LATER)) + 5
    assert memory.tokens_seen == tokens == session.seen
    assert memory.entries == sum(lengths) and sum(memory.by_modality.values()) == sum(lengths)
    assert memory.entries + memory.evicted == tokens * engine.spec.rows
    assert sum(session.entries_per_layer()) == memory.entries
    assert pool.keys.nbytes + pool.values.nbytes == pool.num_pages * pool.kv_page_bytes


def test_closing_returns_every_page(engine: Runtime) -> None:
    pool = engine.cache.pool
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        session.prefill(PICTURES)
    sessions[1].close()
    sessions.append(engine.session())
    sessions[-1].prefill(turn(90))
    for session in sessions:
        session.close()
        session.close()
    assert pool.free_pages == pool.num_pages
    for action in (
        lambda: sessions[0].decode(5),
        lambda: sessions[0].prefill(PICTURES),
        sessions[0].retained,
        sessions[0].memory,
        sessions[0].fork,
        lambda: sessions[0].set_budget(5),
    ):
        with pytest.raises(SessionError, match="closed"):
            action()


@pytest.mark.slow(reason="long dialogues at several budgets")
@pytest.mark.parametrize("policy", EVICTING_KINDS)
def test_a_long_prompt_leaves_no_reference_cycles(policy: str, folders: dict[str, Path]) -> None:
    """Tensors caught in a reference cycle would pile up with the length of the prompt."""
    engine = load(folders["vl"], policy=policy, budget=20, prefill_chunk=16)
    session = engine.session()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        session.prefill(turn(64, seed=8))
        run(session, text_ids(3, 9))
        gc.collect()
        caught = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert not caught
