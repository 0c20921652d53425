"""Failures in the middle of a call: nothing changes and no page is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.errors import BudgetError, ContextError, InputError, SessionError
from mmkv.engine.runtime import Runtime
from tests.support.policies import EVICTING_KINDS
from tests.support.sessions import PICTURES, assert_same_rows, load, run, state, text_ids, turn


def test_a_prompt_over_the_context_changes_nothing(folders: dict[str, Path]) -> None:
    engine = load(folders["text"])
    session = engine.session()
    with pytest.raises(ContextError, match="64"):
        session.prefill(turn(65))
    session.prefill(turn(60))
    before, free = state(session), engine.cache.pool.free_pages
    with pytest.raises(ContextError):
        session.prefill(turn(5))
    assert state(session) == before and engine.cache.pool.free_pages == free
    run(session, text_ids(4, 0))
    with pytest.raises(ContextError):
        session.decode(5)
    engine.cache.check()
    session.close()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_empty_and_malformed_prompts_change_nothing(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(PICTURES)
    before = state(session)
    for bad in (
        {"input_ids": torch.empty(1, 0, dtype=torch.int64)},
        {"input_ids": torch.tensor([[5, 10_000]])},
        {"input_ids": torch.tensor([[5, -2]])},
        {"input_ids": torch.tensor([[5, 6], [7, 8]])},
        {},
    ):
        with pytest.raises(InputError):
            session.prefill(bad)
        assert state(session) == before


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000])
def test_a_name_that_no_file_can_have_opens_no_session(engine: Runtime, name: str) -> None:
    with pytest.raises(SessionError, match="too long"):
        engine.load_session(name)


def test_a_pool_limit_refuses_before_anything_changes(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy="full", kv_limit=60_000)
    session = engine.session()
    session.prefill(turn(10))
    before = state(session)
    with pytest.raises(BudgetError) as error:
        session.prefill(turn(500))
    assert any(char.isdigit() for char in str(error.value))
    assert state(session) == before
    engine.cache.check()


@pytest.mark.slow(reason="interrupts each of five ways to run, layer by layer")
@pytest.mark.parametrize("policy", EVICTING_KINDS)
@pytest.mark.parametrize("where", ["prefill", "decode", "native", "batch", "native batch"])
def test_an_interrupted_pass_is_undone(
    where: str, policy: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside a layer: as if the call (or the chunk) had never been made.

    In the native step it is seen when C returns: then the step is whole, and so is its eviction.
    """
    engine = load(folders["vl"], policy=policy, budget=28)
    if where.startswith("native") and engine.decode_path != "native":
        pytest.skip(f"runs on {engine.decode_path}")
    session, reference, other = engine.session(), engine.session(), engine.session()
    for each in (session, reference, other):
        each.prefill(PICTURES)
        each.prefill(turn(40, seed=9))
    other.prefill(turn(10))  # tables do not grow below, which memory() would show
    before, kept = state(session), session.retained()
    forward = engine.decoder.forward

    def interrupted(hidden: Tensor, rope: Any, step: Any, *more: Any, **named: Any) -> Any:
        def stop(layer: int, *args: Any) -> Tensor:
            if layer == 1:
                raise KeyboardInterrupt
            return attend(layer, *args)

        attend = step.attend
        step.attend = step.attend_last = stop  # a prompt ends with the second
        return forward(hidden, rope, step, *more, **named)

    def interrupted_step(*args: Any) -> Tensor:
        native_step(*args)
        raise KeyboardInterrupt

    if where.startswith("native"):
        native_step = engine.backends.cpu.decoder.step
        monkeypatch.setattr(engine.backends.cpu.decoder, "step", interrupted_step)
    elif where in ("decode", "batch"):
        monkeypatch.setattr(engine.backends.cpu, "decoder", None)
    monkeypatch.setattr(engine.decoder, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if where == "prefill":
            session.prefill(turn(10))
        elif where in ("decode", "native"):
            session.decode(5)
        else:
            engine.decode([session, other], [5, 6])
    monkeypatch.undo()
    engine.cache.check()
    if where.startswith("native"):
        reference.decode(5)
        before, kept = state(reference), reference.retained()
    assert state(session) == before
    for left, right in zip(session.retained(), kept, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
    for token in text_ids(20, 3).tolist():
        assert torch.equal(session.decode(token), reference.decode(token))
        assert_same_rows(session, reference)


def test_an_interrupt_between_chunks_keeps_whole_chunks(engine: Runtime) -> None:
    """The progress callback raises after the second chunk: the session holds 2 x 12 tokens."""
    session = engine.session()

    def stop(done: int, total: int) -> None:
        assert total == 40
        if done >= 24:
            raise KeyboardInterrupt

    prompt = turn(40)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(prompt, stop)
    assert session.seen == session.next_position == session.memory().tokens_seen == 24
    rest = {"input_ids": prompt["input_ids"][:, 24:]}
    assert torch.equal(session.prefill(rest), engine.session().prefill(prompt))


def test_ctrl_c_while_a_chunk_is_stored_leaves_no_uncounted_entry(
    engine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object) -> int:
        raise KeyboardInterrupt

    session = engine.session()
    with monkeypatch.context() as patch:
        patch.setattr("mmkv.engine.backends.torch.step.PrefillChunk.finish", press)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(PICTURES)
    held = int(engine.cache.length[session.seq].sum())
    assert (session.seen, session.entries, held) == (0, 0, 0)
