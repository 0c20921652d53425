"""Qwen3.5's linear layers: what they keep of a sequence wherever it is copied, split or undone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.budget import Budget
from mmkv.engine.budgets import page_bound
from mmkv.engine.errors import (
    BudgetError,
    ModelError,
    PolicyError,
    SessionError,
)
from mmkv.engine.prefill import extend_together
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import checkpoint, make_turn
from tests.support.sessions import text_ids

NAME = "qwen3_5"
FIRST = make_turn(NAME, [6, ("image", 16, 24), 20], seed=1)
LATER = make_turn(NAME, [3, ("image", 24, 16), 13], seed=2)
# Of the largest logit: sums of a chunk's tokens in other orders, in float32.
TOLERANCE = 2e-5


@functools.cache
def base() -> Runtime:
    exact = {"device": "cpu", "dtype": "float32", "kv": "auto"}
    return Runtime.from_pretrained(checkpoint(NAME), policy="full", **exact)


def load(policy: str = "streamingllm", budget: Any = 9, **options: Any) -> Runtime:
    """An engine over shared weights, which evicts; chunks of 12."""
    made = base()
    parts = (made.family, made.spec, made.decoder.weights, None)
    from mmkv.engine.policies import make_policy

    options = {"prefill_chunk": 12, "page_size": 8, "kv": "auto", **options}
    return Runtime(*parts, make_policy(policy), budget, **options)


def held(session: CachedSequence) -> dict[str, Tensor]:
    """All that a sequence has in the cache."""
    return session.engine.cache.export(session.seq)


def assert_same(one: CachedSequence, two: CachedSequence) -> None:
    ours, theirs = held(one), held(two)
    assert ours.keys() == theirs.keys() and "state.layers.0.delta" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def said(session: CachedSequence, count: int = 6, seed: int = 5) -> Tensor:
    return torch.stack([session.decode(token) for token in text_ids(count, seed).tolist()])


@pytest.fixture
def engine() -> Runtime:
    return load()


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_equal_one_pass(chunk: int) -> None:
    engine = load("full", prefill_chunk=512)
    with engine.session() as whole, engine.session() as parts:
        wanted = whole.prefill(FIRST)
        prefill = parts.begin_prefill(FIRST, chunk=chunk)
        while not prefill.advance():
            pass
        assert prefill.logits is not None
        after = torch.stack([prefill.logits, *said(parts)]), torch.stack([wanted, *said(whole)])
        assert float((after[0] - after[1]).abs().max() / after[1].abs().max()) < TOLERANCE


def test_together_as_alone(engine: Runtime) -> None:
    """Prompts read in one pass, and steps of a batch: each sequence has its own state."""
    prompts = [make_turn(NAME, [size], seed=size) for size in (5, 17, 9)]
    alone = [engine.session() for _ in prompts]
    together = [engine.session() for _ in prompts]
    wanted = torch.stack([one.prefill(turn) for one, turn in zip(alone, prompts, strict=True)])
    turns = [engine.turn(prompt, 0) for prompt in prompts]
    found = extend_together(together, turns)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for token in text_ids(5, 3).tolist():
        found = engine.decode(together, [token, token + 1, token + 2])
        wanted = torch.stack([one.decode(token + index) for index, one in enumerate(alone)])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for one, two in zip(alone, together, strict=True):
        for name, state in held(one).items():
            torch.testing.assert_close(state, held(two)[name], rtol=1e-4, atol=1e-4)
    engine.cache.check()


def test_states_grow_by_half_on_a_gpu_and_shrink_when_trimmed(engine: Runtime) -> None:
    """A graph has their address: each that is new costs a capture."""
    cache = engine.cache
    cache.pool.doubles = True

    def rows() -> int:
        (count,) = {len(kept) for kept in cache.states.values()}
        return count

    sessions, seen = [], set()
    for count in range(1, 20):
        sessions.append(engine.session())
        seen.add(rows())
        assert count <= rows() <= max(1.5 * count, 1)
    assert len(seen) < 9
    for session in sessions[1:]:
        session.close()
    had = rows()
    assert cache.trim() >= (had - 1) * cache.state_bytes and rows() == 1
    sessions[0].prefill(FIRST)
    engine.session().prefill(FIRST)
    cache.check()


def test_what_has_been_read_cannot_be_cut_out_of_a_state(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(FIRST)
    before = session.state()
    said(session, 2)
    assert not session.can_cut_back and not session.rewind(before)
    with pytest.raises(SessionError, match="linear layers cannot go back"):
        session.cut_back(4, 4, 4)
    session.cut_back(0, 0, 0)
    assert session.seen == 0
    with engine.session() as fresh:
        assert torch.equal(session.prefill(FIRST), fresh.prefill(FIRST))
        assert_same(session, fresh)


def test_states_are_counted() -> None:
    """In memory(), in what a request may take, and against the limit."""
    engine = load()
    cache, sizes = engine.cache, engine.spec.delta
    assert sizes is not None
    channels = 2 * 2 * 16 + 6 * 24
    each = 4 * (channels * 3 + 6 * 16 * 24)
    assert cache.state_bytes == 2 * each == engine.spec.state_bytes(torch.float32)
    with engine.session() as session:
        assert session.memory().state_bytes == 2 * each
    pages = -(-2 * each // cache.pool.page_bytes)
    assert cache.state_pages == pages > 0
    bound, rows = page_bound(engine, Budget.of(9), 40, 10), engine.spec.rows
    assert bound.steady >= pages + 9 * rows // 8
    whole = bound.steady + bound.chunk
    tight = load(kv_limit=(2 * whole - 1) * cache.pool.page_bytes)
    one = tight.session()
    one.prefill(make_turn(NAME, [40], seed=4))
    said(one, 10)
    others = []
    with pytest.raises(BudgetError, match="states of linear layers"):
        while len(others) < 2 * whole:
            others.append(tight.session())
    used = tight.cache.pool.num_pages - tight.cache.pool.free_pages
    limit = tight.cache.pool.limit
    assert limit is not None and used + (len(others) + 1) * pages <= limit
    for other in others:
        other.close()
    one.close()
    tight.cache.check()
    tight.session().prefill(make_turn(NAME, [40], seed=4))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(PolicyError, match="linear layers that must see them all"):
        load("fastv", budget=None)
    with pytest.raises(ModelError, match="no cache to bound"):
        linear = base().family.config.get_text_config().to_dict() | {
            "layer_types": ["linear_attention"] * 4
        }
        import transformers

        from mmkv.engine.model.spec import DecoderSpec

        config = transformers.CONFIG_MAPPING["qwen3_5_text"](**linear)
        DecoderSpec.from_config(config, lambda: base().spec.rope)
