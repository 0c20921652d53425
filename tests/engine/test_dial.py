"""A budget that follows the risk: bounds, what it keeps r at, what is saved, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkv.engine.budget import TURN, Dial
from mmkv.engine.budgets import page_bound
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import BudgetError, MmkvError, PolicyError, SessionError
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.sessions import (
    LATER,
    PICTURES,
    advance,
    assert_same_rows,
    load,
    qwen3_vl,
    save_checkpoint,
    text_ids,
    turn,
    without_risk,
)

RISK = 0.1
SCRIPT = [PICTURES, text_ids(40, 1), turn(30, seed=3), LATER, text_ids(40, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(qwen3_vl(), tmp_path_factory.mktemp("dial"))


def dialled(folder: Path, **settings: Any) -> Runtime:
    return load(folder, **{"budget": 4, "risk": RISK, "budget_max": 20, **settings})


def forgotten(session: CachedSequence) -> float:
    """Return r from the record of every eviction."""
    record = session.record().read(session)
    dead, seen = record.deaths, session.seen
    gone = np.exp(dead["log_beta"].astype(float) * (seen - dead["position"])).sum()
    held = np.exp(record.log_beta.astype(float) * (seen - record.position)).sum()
    return float(gone / (gone + held))


@given(
    st.integers(1, 40),
    st.integers(0, 60),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=12),
)
def test_a_dial_keeps_its_bounds_and_stands_still(
    least: int, more: int, page: int, asked: list[tuple[int, int]]
) -> None:
    dial = Dial(RISK, least, least + more, page)
    for enough, further in asked:
        dial.turn(enough, enough + further, room=5)  # in a reply
        assert least <= dial.allowed <= least + more
        assert dial.allowed >= min(enough + 5, least + more)
        before = dial.allowed - dial.room
        dial.turn(enough, enough + further)
        assert dial.allowed == before  # the room goes with the reply, and nothing else has changed
        assert least <= dial.allowed <= least + more
        assert dial.allowed >= min(enough, least + more)  # as few as are needed are always there
        assert dial.full == (enough > least + more)
        again = replace(dial)
        again.turn(dial.allowed - min(further, 3), dial.allowed + further)
        assert again.allowed == dial.allowed  # between the two marks it does not move
        again.turn(0, (dial.allowed - 1) // page * page + 1)
        assert again.allowed == dial.allowed  # nor within a page


def test_the_risk_stays_at_its_target_while_there_is_room(folder: Path) -> None:
    """Every cut leaves r at the target at most, with few entries more than that takes."""
    for target, most in ((0.3, 1000), (RISK, 1000), (0.02, 1000), (0.02, 5)):
        engine = dialled(folder, risk=target, budget_max=most)
        rows, page = engine.spec.rows, engine.cache.pool.page_size
        session, full = engine.session(), []
        session.record()
        for step in SCRIPT:
            advance(session, step)
            dial = session.dial
            assert dial is not None
            allowed, _, _, stuck = dial
            full.append(stuck)
            assert 4 * rows <= allowed <= most * rows and session.entries <= allowed
            if most == 1000:
                assert forgotten(session) <= target and not stuck
            if isinstance(step, dict) and 4 * rows < allowed < most * rows:
                session.set_budget((allowed - page - 1) / rows)  # a page less forgets too much
                assert forgotten(session) > target / 2
                break
        assert session.evicted and any(full) == (most == 5)
        session.close()


@pytest.mark.parametrize("policy", ["dbtrimkv", "trimkv", "balanced:free=2"])
def test_a_reply_to_a_short_prompt_forgets_no_more(folder: Path, policy: str) -> None:
    """The first token of a reply gets room, and rows with shares of their own are counted so."""
    session = dialled(folder, policy=policy, budget=2, budget_max=200, risk=0.3).session()
    session.record()
    for seed in range(3):
        session.prefill({"input_ids": text_ids(10, seed)[None]})
        assert forgotten(session) <= 0.3
        for token in text_ids(6, seed + 9).tolist():
            session.decode(token)
            assert forgotten(session) <= 0.3
    assert session.evicted
    session.close()


def test_a_bound_in_bytes_holds_at_every_step(folder: Path) -> None:
    rows = qwen3_vl().layers * 2
    engine = dialled(folder, budget=None, budget_max="24KiB", risk=0.01)
    pool, most = engine.cache.pool, 24 * 1024
    assert engine.budget == Budget("bytes", most / 8, 0.01, Budget.bytes(most))
    session = engine.session()
    bound = page_bound(engine, engine.budget, 500, 500)
    assert bound.steady <= most // pool.page_bytes + rows  # and what a step adds
    moved = set()
    for seed in range(6):
        session.prefill(turn(20, ("image", 16, 24), seed=seed))
        assert session.memory().pages * pool.page_bytes <= most
        for token in text_ids(20, seed).tolist():
            session.decode(token)
            assert session.memory().pages * pool.page_bytes <= most
            moved.add(session.allowed_entries)
    assert len(moved) > 1
    session.close()


def test_a_reply_turns_the_dial_every_few_tokens(folder: Path) -> None:
    session, stood = dialled(folder).session(), []
    session.prefill(PICTURES)
    begin = session.seen
    for token in text_ids(2 * TURN + 3, 1).tolist():
        session.decode(token)
        assert session.dial is not None
        stood.append(session.dial[2])
    assert stood == [begin + step // TURN * TURN for step in range(len(stood))]
    session.cut_back(stood[-1] - 5, session.next_position, begin)
    assert session.dial[2] == session.seen == stood[-1] - 5  # not ahead of what is left
    session.cut_back(begin + 1, session.next_position, begin)
    session.decode(7)
    assert session.dial[2] == begin + 1


def test_files_and_forks_keep_where_the_dial_stands(folder: Path, tmp_path: Path) -> None:
    engine = dialled(folder)
    session = engine.session()
    for step in SCRIPT[:3]:
        advance(session, step)
    session.decode(5)
    assert session.dial is not None and session.dial[0] > 4 * engine.spec.rows
    session.save(tmp_path / "one.mmkv")
    loaded, _ = dialled(folder).load_session(tmp_path / "one.mmkv")
    fork = session.fork()
    assert loaded.dial == fork.dial == session.dial and loaded.budget == session.budget
    for step in SCRIPT[3:]:
        for one in (session, fork):
            advance(one, step)
        assert fork.dial == session.dial
        assert_same_rows(fork, session)
    held = fork.entries
    fork.set_budget(Budget("entries", 4, RISK, Budget.of(40)))
    assert fork.entries == held > 4 * engine.spec.rows  # no more goes than the risk allows
    before = session.state()
    session.cut_back(0, 0, 0)
    assert session.dial == (4 * engine.spec.rows, 0, 0, False)
    session.restore(before)
    assert session.dial == before["dial"]
    session.set_budget(6)
    assert session.dial is None and session.allowed_entries == 6 * engine.spec.rows
    # A file that says it may hold more than its bound is cut to it.
    assert loaded.dial is not None
    loaded.dial = (10**9, 0, 0, False)
    assert loaded.allowed_entries == 20 * engine.spec.rows


def test_a_dial_says_that_it_stands_still_without_a_risk(folder: Path, tmp_path: Path) -> None:
    session = dialled(folder, policy="dbtrimkv").session(4)
    session.prefill(PICTURES)
    session.save(tmp_path / "older")
    without_risk(tmp_path / "older")
    older, _ = dialled(folder).load_session(tmp_path / "older")
    assert older.memory().risk is None and not older.memory().risk_unknown  # it follows nothing
    for one, unknown in ((older, True), (session, False)):
        one.set_budget(Budget("entries", 4, RISK, Budget.of(20)))
        one.prefill(LATER)
        assert one.memory().risk_unknown == one.fork().memory().risk_unknown == unknown
    assert older.dial == (4 * older.engine.spec.rows, 0, 0, False) != session.dial
    older.cut_back(0, 0, 0)
    assert not older.memory().risk_unknown and older.memory().risk is not None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget_max": None}, "budget_max, which is missing; give it"),
        ({"risk": None}, "there is no risk; give one, such as 0.02, or a budget in place of"),
        ({"budget": None, "budget_max": "8KiB"}, r"1,024 bytes \(an eighth of budget_max, unless"),
        ({"budget": "1100B", "budget_max": "8KiB"}, "budget of 1,100 bytes leaves 0 entries"),
        ({"risk": 0}, "between 0 and 1"),
        ({"risk": 1.0}, "between 0 and 1"),
        ({"budget_max": 3}, "below the budget of 4 entries"),
        ({"budget_max": "4KiB", "budget": 64}, "below the budget of 64 entries"),
        ({"budget_max": "50%"}, "cannot follow a risk"),
        ({"budget": "50%"}, "cannot follow a risk"),
        ({"policy": "streamingllm"}, "'streamingllm' does not predict"),
        ({"policy": "full"}, "'full' does not predict"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises((BudgetError, PolicyError), match=said) as caught:
        dialled(folder, **settings)
    assert "\n" not in str(caught.value) and isinstance(caught.value, MmkvError)
    dialled(folder, budget_max=4)  # both ends may be one


def test_a_config_folds_the_dial_into_its_budget() -> None:
    config = EngineConfig(budget=64, risk=0.02, budget_max="64MiB")
    assert replace(config, device="cpu").budget == config.budget
    assert isinstance(config.budget, Budget)
    assert config.budget.describe() == "64 entries per row to 67,108,864 bytes at risk 0.02"
    assert Budget.of_list(*config.budget.as_list()) == config.budget


def test_a_damaged_dial_is_told(folder: Path, tmp_path: Path) -> None:
    session = dialled(folder).session()
    session.prefill(PICTURES)
    session.budget = Budget("entries", 4, RISK, Budget.of(3))  # as no engine makes it
    session.save(tmp_path / "bad.mmkv")
    with pytest.raises(SessionError, match="damaged"):
        dialled(folder).load_session(tmp_path / "bad.mmkv")
