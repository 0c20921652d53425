"""A batch in one decode step in C: what torch makes of it, and each as if alone."""

from __future__ import annotations

import pytest
import torch

from mmkv.engine.errors import BudgetError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.native import MODELS, assert_close, content, engine_for, needs_native
from tests.support.sessions import state, text_ids


def several(engine: Runtime) -> list[CachedSequence]:
    """Sessions of different lengths and budgets; a closed one left a gap between their slots."""
    made = [engine.session(budget) for budget in (12, 9, 1, 40, 12)]
    for index, session in enumerate(made):
        session.prefill({"input_ids": text_ids(5 + 9 * index, index)[None]})
    made.pop(1).close()
    return made


@needs_native
@pytest.mark.parametrize("model", [model for model in MODELS if model != "phi3_long"])
def test_a_batch_is_what_torch_makes_of_it_and_each_is_as_if_alone(model: str) -> None:
    """Logits and memory against torch in one batched step; every bit against sessions alone."""
    ours, reference, single = (engine_for(model) for _ in range(3))
    reference.backends.cpu.switch_off()
    batch, plain, alone = several(ours), several(reference), several(single)
    for index in range(14):
        tokens = text_ids(len(batch), index).tolist()
        logits = ours.decode(batch, tokens)
        assert_close(logits, reference.decode(plain, tokens))
        assert content(ours.cache) == content(reference.cache)
        for row, session, token in zip(logits, alone, tokens, strict=True):
            assert torch.equal(row, session.decode(token))
        if index == 6:  # another order, and fewer
            batch, plain, alone = ([x[i] for i in (2, 0, 3)] for x in (batch, plain, alone))
    assert min(session.evicted for session in batch) > 0
    assert [state(x) for x in batch] == [state(x) for x in plain] == [state(x) for x in alone]
    ours.cache.check()


@needs_native
def test_a_batch_of_short_and_long_rope() -> None:
    ours, reference = (engine_for("phi3_long", "full") for _ in range(2))
    reference.backends.cpu.decoder = None
    both = []
    for engine in (ours, reference):
        both.append([engine.session(), engine.session()])
        for session, length in zip(both[-1], (6, 30), strict=True):  # trained for 16, then more
            session.prefill({"input_ids": text_ids(length, 1)[None]})
        assert [session.long_rope for session in both[-1]] == [False, True]
    for token in range(3, 8):
        logits = [
            engine.decode(sessions, [token, token + 1])
            for engine, sessions in zip((ours, reference), both, strict=True)
        ]
        assert_close(*logits)


@needs_native
def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    engine = engine_for("odd", "full")
    batch = [engine.session() for _ in range(3)]
    for session in batch:  # two rows of 3 full pages of 8: each needs two pages more
        session.prefill({"input_ids": text_ids(24, 1)[None]})
    pool = engine.cache.pool
    pool.limit = pool.num_pages
    assert 2 <= pool.free_pages < 6
    before, pages = [state(s) for s in batch], content(engine.cache)
    with pytest.raises(BudgetError, match="the limit is"):
        engine.decode(batch, [5, 6, 7])
    assert [state(s) for s in batch] == before and content(engine.cache) == pages
    engine.decode(batch[:1], [5])
    engine.cache.check()
