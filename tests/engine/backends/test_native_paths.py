"""When a decode step runs in C, and sessions that change between C and torch."""

from __future__ import annotations

import itertools
import shutil

import pytest

from mmkv.engine.backends.cpu import binding, levels
from mmkv.engine.runtime import Runtime
from mmkv.environment import describe
from tests.support.factories import checkpoint
from tests.support.native import assert_close, content, engine_for, needs_native, open_both, prompt
from tests.support.sessions import state, text_ids


@needs_native
def test_paths_take_turns_on_one_session() -> None:
    """Each step and each eviction on either side; pages end up as with torch alone."""
    session, plain = open_both("qwen3_vl")
    mixed, cpu = session.engine, session.engine.backends.cpu
    turns = [*itertools.product((cpu.decoder, None), (cpu.evictor, None))]
    for number in range(3):
        for token, turn in zip(text_ids(25, number).tolist(), itertools.cycle(turns)):
            cpu.decoder, cpu.evictor = turn
            assert_close(session.decode(token), plain.decode(token))
            assert content(mixed.cache) == content(plain.engine.cache)
        for each in (session, plain):
            each.prefill(prompt("qwen3_vl", seed=number))
    assert state(session) == state(plain)


@needs_native
def test_what_runs_on_torch_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("odd")
    assert engine.decode_path == engine.session().decode_path == "native"
    assert f"decode step on the CPU: native (level {levels()[0]})" in describe().splitlines()
    assert engine_for("odd", "full").backends.cpu.evictor is None
    engine.decoder.on_gate_input = lambda layer, hidden: None
    assert engine.decode_path == "torch: on_gate_input is set"
    assert engine_for("odd", "snapkv").decode_path == "native"
    half = Runtime.from_pretrained(checkpoint("qwen2"), device="cpu", dtype="bfloat16")
    assert half.decode_path == "torch: bfloat16 weights" and half.backends.cpu.evictor is None
    native, plain = open_both("mistral")
    paths = []
    for token in text_ids(6, 1).tolist():  # 21 tokens before, a window of 24
        paths.append(native.decode_path)
        assert_close(native.decode(token), plain.decode(token))
    assert paths == ["native"] * 3 + ["torch: a sliding window is in effect"] * 3
    monkeypatch.setenv("MMKV_NATIVE", "0")
    assert engine_for("odd").decode_path == "torch: switched off by MMKV_NATIVE=0"
    assert "torch (switched off by MMKV_NATIVE=0)" in describe()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on PATH")
def test_a_machine_with_a_compiler_has_the_library() -> None:
    assert not isinstance(binding._load("baseline"), str), binding._load("baseline")
