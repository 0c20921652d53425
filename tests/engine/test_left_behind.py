"""Nothing of a session is left for the next one, and no page is lost or beyond the limit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mmkv.engine.errors import BudgetError, SessionError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.policies import EVICTING_KINDS
from tests.support.sessions import PICTURES, load, run, text_ids, turn


def free(engine: Runtime) -> bool:
    """Whether every page is free, once somebody has taken the lock."""
    with engine.lock:
        engine.cache.check()
        pool = engine.cache.pool
        return pool.free_pages == pool.num_pages and engine.cache.open_count == 0


@pytest.mark.parametrize("policy", EVICTING_KINDS)
def test_a_session_after_another_is_one_on_a_fresh_engine(
    policy: str, folders: dict[str, Path]
) -> None:
    used = load(folders["vl"], policy=policy, budget=14)
    with used.session() as before:
        before.prefill(PICTURES)
        run(before, text_ids(30, 1))
    fresh = load(folders["vl"], policy=policy, budget=14)
    with used.session() as second, fresh.session() as first:
        for session in (second, first):
            session.prefill(turn(25, seed=3))
        made, wanted = (run(session, text_ids(30, 2)) for session in (second, first))
        assert torch.equal(made, wanted)
        assert second.memory() == first.memory()


def test_a_pool_never_grows_beyond_its_limit(folders: dict[str, Path]) -> None:
    """Also where an eighth more would: many sessions, until one has no room."""
    engine = load(folders["vl"], policy="full", kv_limit=1_000_000, vision_cache=0, page_size=4)
    pool = engine.cache.pool
    assert pool.limit == 1_000_000 // pool.page_bytes
    sessions = []
    with pytest.raises(BudgetError):
        while len(sessions) < 1000:
            sessions.append(engine.session())
            sessions[-1].prefill(turn(20 + len(sessions) % 7))
            run(sessions[-1], text_ids(3, len(sessions)))
            assert pool.num_pages <= pool.limit
    assert len(sessions) > 5 and pool.num_pages <= pool.limit
    assert pool.num_pages * pool.page_bytes <= 1_000_000
    for session in sessions:
        session.close()
    assert free(engine)


def test_three_recorded_sessions_of_a_shared_budget_add_up(folders: dict[str, Path]) -> None:
    """Every entry that was born died once or is retained, in each of them."""
    engine = load(folders["vl"], policy="dbtrimkv", budget=24)
    engine.share(24)
    sessions = [engine.session() for _ in range(3)]
    recorders = [session.record() for session in sessions]
    for at, session in enumerate(sessions):
        session.prefill(turn(20 + at, seed=at))
    for token in text_ids(25, 5).tolist():
        engine.decode(sessions, [token, token + 1, token + 2])
    for session, recorder in zip(sessions, recorders, strict=True):
        record = recorder.read(session)
        born = {
            (row, position) for row in range(engine.spec.rows) for position in range(session.seen)
        }
        died = list(
            zip(record.deaths["row"].tolist(), record.deaths["position"].tolist(), strict=True)
        )
        heads = engine.spec.num_kv_heads
        held = {
            (layer * heads + head, position)
            for layer, rows in enumerate(session.retained())
            for head, row in enumerate(rows)
            for position in row.tolist()
        }
        assert len(died) == len(set(died)) > 0
        assert set(died) | held == born and not set(died) & held


def test_the_next_position_inside_a_picture_follows_its_highest(folders: dict[str, Path]) -> None:
    """M-RoPE: rows and columns of a picture are positions, too, and its last token is not last."""
    engine = load(folders["vl"], policy="full")
    positions = engine.family.turn(PICTURES, 0, engine.device).positions
    tokens, chunk = positions.shape[1], 3
    assert bool((positions.amax(0).diff() < 0).any()), "no picture is cut where it matters"
    with engine.session() as session:
        prefill = session.begin_prefill(PICTURES, chunk)
        while not prefill.advance():
            read = positions[:, : session.seen]
            assert session.next_position == int(read.max()) + 1
        assert session.seen == tokens and session.next_position == int(positions.max()) + 1


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_turn_of_whole_chunks_is_taken_back(chunks: int, folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy="streamingllm", budget=9)
    with engine.session() as session, engine.session() as other:
        for each in (session, other):
            each.prefill(turn(30, seed=1))
        prefill = session.begin_prefill(turn(8 * chunks, seed=2), 8)
        for _ in range(chunks - 1):
            prefill.advance()
        prefill.roll_back()
        assert session.state() == other.state()
        assert torch.equal(run(session, text_ids(9, 4)), run(other, text_ids(9, 4)))


@pytest.mark.parametrize("column", ["keys", "values", "position", "log_beta", "modality", "length"])
def test_a_flipped_byte_of_any_column_is_found(
    column: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = load(folders["vl"], policy="dbtrimkv", budget=9)
    path = tmp_path / "saved.mmkv"
    with engine.session() as session:
        session.prefill(PICTURES)
        session.save(path)
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    with safe_open(path, framework="np") as file:
        first = np.ascontiguousarray(file.get_tensor(column)).tobytes()
    at = content.index(first, 8 + header)
    assert content.count(first, 8 + header) == 1 or column in ("log_beta", "modality", "length")
    content[at + len(first) // 2] ^= 1  # the lowest bit of a byte
    path.write_bytes(content)
    with pytest.raises(SessionError, match="damaged"):
        engine.load_session(path)
    assert free(engine)


def forget_one(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(PICTURES)


def forget_half_a_prompt(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(PICTURES)
    prefill = session.begin_prefill(turn(20), 6)
    prefill.advance()  # holds a copy of the session to return to


def forget_in_a_thread(engine: Runtime) -> None:
    thread = threading.Thread(target=forget_one, args=(engine,))
    thread.start()
    thread.join()


def forget_in_a_ring(engine: Runtime) -> None:
    session: Any = engine.session()
    session.prefill(PICTURES)
    session.ring = session
    del session
    gc.collect()


@pytest.mark.parametrize(
    "forget", [forget_one, forget_half_a_prompt, forget_in_a_thread, forget_in_a_ring]
)
@pytest.mark.parametrize("shared", [False, True])
def test_what_nobody_refers_to_returns_its_pages(
    forget: Callable[[Runtime], None], shared: bool, folders: dict[str, Path]
) -> None:
    engine = load(folders["vl"], policy="dbtrimkv", budget=20)
    if shared:
        engine.share(20)
    forget(engine)
    assert free(engine)
    forget_one(engine)
    with engine.session() as session:  # an engine call is enough
        session.prefill(PICTURES)
        pool = engine.cache.pool
        assert pool.num_pages - pool.free_pages == engine.cache.held_pages(session.seq)


def test_pages_that_come_free_in_the_middle_of_a_call_wait_for_its_end(
    folders: dict[str, Path],
) -> None:
    """The collector may run anywhere: also between two steps that count pages."""
    engine = load(folders["vl"], policy="dbtrimkv", budget=20)
    lost: list[CachedSequence] = [engine.session()]
    lost[0].prefill(PICTURES)
    with engine.lock:
        before = engine.cache.pool.free_pages
        lost.clear()
        assert engine.cache.pool.free_pages == before and len(engine.cache.lost) == 1
        with engine.lock:  # of the same thread: still in the middle
            assert engine.cache.pool.free_pages == before
    assert free(engine)
