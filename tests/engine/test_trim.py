"""The pool gives back what a prefill's peak took, and every backend goes on with what is left."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from mmkv.engine.steps import decode_burst
from tests.support.bursts import Bursts
from tests.support.policies import STATIC
from tests.support.sessions import PICTURES, assert_same_rows, load, run, text_ids, turn
from tests.support.tiers import slow_but

PATHS = [
    (path, policy)
    for path in ("native", "torch", "static")
    for policy in ("dbtrimkv", "snapkv", "full")
    if path != "static" or policy in STATIC
]


@pytest.mark.parametrize(
    ("path", "policy"),
    slow_but([path for path in PATHS if "dbtrimkv" in path], PATHS, "the other policies"),
)
def test_a_trimmed_pool_changes_no_bit(path: str, policy: str, folders: dict[str, Path]) -> None:
    """Between steps of two sessions and after a third was closed; the pool ends up smaller."""
    engine, plain = (load(folders["vl"], policy=policy) for _ in range(2))
    both = []
    for each in (engine, plain):
        if path != "native":
            each.backends.cpu.switch_off()
        sessions = [each.session(), each.session(), each.session()]
        for index, session in enumerate(sessions):
            session.prefill(turn(70 + index, seed=index))
        sessions.pop(0).close()
        both.append(sessions)
    runner, other = Bursts(engine), Bursts(plain)
    pool = engine.cache.pool
    for number in range(3):
        unused, before = pool.free_pages, pool.num_pages
        outgrown = weakref.ref(pool.keys)
        assert engine.trim() == unused * pool.page_bytes
        assert pool.num_pages == before - unused > 0 and pool.free_pages == 0
        engine.cache.check()
        runner._steps.clear()  # graphs of the old pool, which Runtime.trim drops with its runner
        gc.collect()
        assert unused == 0 or outgrown() is None, "the old pool is still alive"
        assert engine.trim() == 0
        if path == "static":
            assert runner.decode(both[0], [3, 4], 5) == other.decode(both[1], [3, 4], 5)
        else:
            for token in text_ids(5, number).tolist():
                ours, theirs = (
                    each.decode(sessions, [token, token + 1])
                    for each, sessions in zip((engine, plain), both, strict=True)
                )
                assert torch.equal(ours, theirs)
        for ours, theirs in zip(*both, strict=True):
            assert_same_rows(ours, theirs)
            assert ours.state() == theirs.state()
    forked, saved = both[0][0].fork(), both[1][0].fork()
    assert torch.equal(forked.prefill(turn(9)), saved.prefill(turn(9)))


def test_an_empty_pool_can_be_trimmed(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"])
    assert engine.trim() == 0
    session = engine.session()
    expected = load(folders["vl"]).session().prefill(PICTURES)
    session.prefill(PICTURES)
    session.close()
    assert engine.trim() > 0 and engine.cache.pool.num_pages == 0
    assert torch.equal(engine.session().prefill(PICTURES), expected)


def test_a_trim_drops_the_graphs(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"])
    session = engine.session()
    session.prefill(turn(70))
    decode_burst(engine, engine.backends.cuda.decode_many, [session], [3], 2)
    assert engine.backends.cuda.runner is not None
    engine.trim()
    assert engine.backends.cuda.runner is None
    run(session, text_ids(3, 1))
