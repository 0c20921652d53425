"""Qwen3.5's linear layers: what they keep of a sequence wherever it is copied, split or undone."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.budget import Budget
from mmkv.engine.budgets import page_bound
from mmkv.engine.errors import (
    BudgetError,
    ModelError,
    NotFiniteError,
    PolicyError,
    SessionError,
)
from mmkv.engine.model.decoder import Decoder
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


def test_forked_saved_and_loaded_it_goes_on_alike(engine: Runtime, tmp_path: Path) -> None:
    session = engine.session()
    session.prefill(FIRST)
    said(session)
    fork = session.fork()
    session.save(tmp_path / "file")
    loaded, _ = engine.load_session(tmp_path / "file")
    assert_same(session, fork)
    assert_same(session, loaded)
    wanted = torch.stack([session.prefill(LATER), *said(session)])
    for other in (fork, loaded):
        assert torch.equal(torch.stack([other.prefill(LATER), *said(other)]), wanted)
        assert_same(session, other)
        other.close()
    session.close()
    engine.cache.check()
    again = engine.session()  # in a slot that another sequence has used
    assert not any(state.any() for name, state in held(again).items() if "state" in name)


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_prompt_is_taken_back_whole(chunks: int, engine: Runtime) -> None:
    session, untouched = engine.session(), engine.session()
    for each in (session, untouched):
        each.prefill(FIRST)
    prefill = session.begin_prefill(LATER, chunk=7)
    for _ in range(chunks):
        assert not prefill.advance()
    prefill.roll_back()
    assert_same(session, untouched)
    assert torch.equal(session.prefill(LATER), untouched.prefill(LATER))
    assert_same(session, untouched)
    engine.cache.check()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["layer", "logits"])
def test_what_fails_leaves_no_trace(
    at: str, error: type[BaseException], engine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a chunk or a step, and once all layers have run."""
    engine.backends.cpu.switch_off()  # in C a step is one call, which nothing interrupts
    session, untouched = engine.session(), engine.session()
    for each in (session, untouched):
        each.prefill(FIRST)
    whole, calls = getattr(Decoder, at), 0

    def fails(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if at == "logits" or calls == 3:
            raise error
        return whole(*arguments, **named)

    for act in (lambda: session.decode(5), lambda: session.prefill(make_turn(NAME, [4], seed=3))):
        calls = 0
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(Decoder, at, fails)
            act()
        if session.seen == untouched.seen:  # a chunk that is read stands, though logits failed
            assert_same(session, untouched)
            said(session, 2), said(untouched, 2)
            assert_same(session, untouched)
    engine.cache.check()


def test_a_chunk_with_logits_that_are_no_numbers_is_taken_back(
    engine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, untouched = engine.session(64), engine.session(64)
    for each in (session, untouched):
        each.prefill(FIRST)
    logits = Decoder.logits
    with monkeypatch.context() as patch, pytest.raises(NotFiniteError):
        patch.setattr(Decoder, "logits", lambda *given: logits(*given) * torch.nan)
        session.prefill(make_turn(NAME, [4], seed=3))
    assert_same(session, untouched)
    assert torch.equal(session.prefill(LATER), untouched.prefill(LATER))


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
    channels = 2 * 2 * 16 + 4 * 24
    each = 4 * (channels * 3 + 4 * 16 * 24)
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


@pytest.mark.parametrize(
    "count", [30, pytest.param(10_000, marks=pytest.mark.drawn(reason="many more operations"))]
)
def test_drawn_operations_lose_no_page_and_no_state(count: int, tmp_path: Path) -> None:
    """Every session's states are those of one that reads the same tokens alone, at once."""
    engine, draw = load("full"), random.Random(7)
    held: list[tuple[CachedSequence, list[int]]] = []

    def tokens() -> list[int]:
        return [draw.randrange(3, 140) for _ in range(draw.randrange(1, 20))]

    def check(session: CachedSequence, read: list[int]) -> None:
        with engine.session() as alone:
            if read:
                alone.prefill({"input_ids": torch.tensor(read)})
            states, wanted = (engine.cache.export(one.seq) for one in (session, alone))
            for name in wanted:
                if name.startswith("state"):
                    torch.testing.assert_close(states[name], wanted[name], atol=1e-4, rtol=1e-4)

    for _ in range(count):
        kind = draw.choice(["open", "read", "read", "step", "step", "fork", "file", "undo", "shut"])
        if kind == "open" or not held:
            held.append((engine.session(), []))
            continue
        session, read = held.pop(draw.randrange(len(held)))
        if kind == "shut" or len(held) > 5 or len(read) > 300:
            check(session, read)
            session.close()
            continue
        if kind in ("read", "undo"):
            new = tokens()
            prefill = session.begin_prefill({"input_ids": torch.tensor(new)}, draw.randrange(1, 9))
            while not (kind == "undo" and draw.random() < 0.4) and not prefill.advance():
                pass
            if prefill.logits is None:
                prefill.roll_back()
            else:
                read = read + new
        elif kind == "step" and read:
            other = held[0] if held and held[0][1] else None
            new = [draw.randrange(3, 140) for _ in range(1 if other is None else 2)]
            engine.decode([session] + ([] if other is None else [other[0]]), new)
            read = [*read, new[0]]
            if other is not None:
                held[0] = other[0], [*other[1], new[1]]
        elif kind == "fork":
            held.append((session.fork(), list(read)))
        elif kind == "file":
            session.save(tmp_path / "file")
            session.close()
            session, _ = engine.load_session(tmp_path / "file")
        held.append((session, read))
        engine.cache.check()
    for session, read in held:
        check(session, read)
        session.close()
    engine.cache.check()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_trimmed_states_of_closed_sequences_are_gone(engine: Runtime) -> None:
    sessions = [engine.session() for _ in range(4)]
    sessions[1].prefill(FIRST)
    wanted = held(sessions[1])
    for at in (0, 2, 3):
        sessions[at].close()
    free = engine.cache.pool.free_pages * engine.cache.pool.page_bytes
    assert engine.trim() == free + 2 * engine.cache.state_bytes
    assert {len(state) for state in engine.cache.states.values()} == {2}
    assert all(torch.equal(kept, wanted[name]) for name, kept in held(sessions[1]).items())
    others = [engine.session() for _ in range(3)]
    assert torch.equal(others[2].prefill(FIRST), others[0].prefill(FIRST))
    engine.cache.check()


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
