"""Pages and evictions of a decode step in C where the pool or a budget has an end."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from mmkv.engine.cache import COLUMNS
from mmkv.engine.errors import BudgetError
from tests.support.bursts import grow_one_column
from tests.support.native import assert_close, content, needs_native, open_both
from tests.support.policies import EVICTING_STATIC
from tests.support.sessions import state, text_ids


@needs_native
def test_a_pool_that_has_been_outgrown_is_let_go() -> None:
    session, _ = open_both("qwen3_vl")
    pool = session.engine.cache.pool
    session.decode(5)
    outgrown = weakref.ref(pool.keys)
    pool.reserve(pool.num_pages + 100)
    session.decode(6)
    gc.collect()
    assert outgrown() is None


@needs_native
def test_c_reads_the_columns_that_stand_after_interrupted_growths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, plain = open_both("odd", "full", kv="int8", page_size=64)  # its pages have room
    cache = session.engine.cache
    session.decode(5), plain.decode(5)
    for token in range(6, 5 + len(COLUMNS)):
        grow_one_column(cache.pool, monkeypatch)
        assert_close(session.decode(token), plain.decode(token))
        (view,) = session.engine.backends.cpu.decoder._views._each
        shown = [getattr(view, name) or 0 for name in COLUMNS]
        assert shown == [column.data_ptr() for column in cache.pool.columns()]


@needs_native
def test_a_full_pool_refuses_the_step_and_loses_nothing() -> None:
    session, plain = open_both("odd", "full")  # 21 tokens: three pages of 8 in each of two rows
    pool = session.engine.cache.pool
    for token in text_ids(3, 1).tolist():
        assert_close(session.decode(token), plain.decode(token))
    pool.limit = 7
    before, pages = state(session), content(session.engine.cache)
    with pytest.raises(BudgetError, match="limit is 7"):
        session.decode(6)
    assert state(session) == before and content(session.engine.cache) == pages
    session.engine.cache.check()
    pool.limit = 8
    assert_close(session.decode(6), plain.decode(6))


@needs_native
@pytest.mark.parametrize("policy", EVICTING_STATIC)
def test_budgets_beyond_what_c_counts_with(policy: str) -> None:
    """``sys.maxsize`` for no limit, as a budget and as steps between evictions."""
    for options in ({"budget": sys.maxsize}, {"budget": 1e40}, {"evict_every": sys.maxsize}):
        native, plain = open_both("qwen3_vl", policy, **options)
        for token in text_ids(5, 1).tolist():
            native.decode(token), plain.decode(token)
        assert state(native) == state(plain)
        assert content(native.engine.cache) == content(plain.engine.cache)


@needs_native
def test_a_refused_eviction_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step in C refuses goes to torch at once; elsewhere C is asked one time."""
    session, plain = open_both("qwen3_vl")
    evictor, asked = session.engine.backends.cpu.evictor, []
    evict = evictor.evict
    monkeypatch.setattr(evictor, "evict", lambda *args: asked.append(args) or evict(*args))
    evictor._policy.most = 0  # room for no victim
    evictor._each = []  # requests are made anew
    for token in text_ids(5, 1).tolist():
        assert_close(session.decode(token), plain.decode(token))
    assert state(session) == state(plain) and session.evicted > 0
    assert content(session.engine.cache) == content(plain.engine.cache)
    assert not asked
    session.set_budget(9), plain.set_budget(9)
    assert state(session) == state(plain)
    assert len(asked) == 1
