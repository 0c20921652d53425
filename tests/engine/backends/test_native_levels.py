"""The library of every level of the instruction set that this CPU runs, and which one is loaded."""

from __future__ import annotations

import platform
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmkv.engine.backends.cpu import binding, level, levels, reason
from mmkv.engine.backends.cpu.binding import LEVELS
from mmkv.environment import describe
from tests.support.native import MODELS, POLICIES, compare, needs_native
from tests.support.tiers import slow_but


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(
    "model", slow_but({"qwen3_vl", "odd"}, MODELS, "the other models, at each level")
)
def test_every_level_agrees_with_torch(
    model: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    assert compare(model).backends.cpu.decoder._library.level == level


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(("policy", "lookahead"), POLICIES)
def test_every_level_evicts_what_torch_evicts(
    policy: str, lookahead: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    engine = compare("odd", policy, lookahead)
    evictor = engine.backends.cpu.evictor
    assert evictor is None or evictor._library.level == level


@needs_native
def test_the_environment_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels()[-1] == "baseline" and level() == levels()[0]
    monkeypatch.setenv("MMKV_NATIVE", "baseline")
    assert "decode step on the CPU: native (level baseline)" in describe().splitlines()
    monkeypatch.setenv("MMKV_NATIVE", "fastest")
    assert level() == "" and "MMKV_NATIVE=fastest is none of v4, v3" in reason()


@needs_native
def test_a_level_beyond_the_cpu_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that runs the baseline alone; loading would end in an illegal instruction."""
    load = binding._load.__wrapped__
    baseline, asked = load("baseline"), []
    assert baseline.mmkv_runs(b"baseline") and not baseline.mmkv_runs(b"v5")

    def runs(level: bytes) -> int:
        asked.append(level.decode())
        return 0

    monkeypatch.setattr(baseline, "mmkv_runs", runs)
    monkeypatch.setattr(
        binding, "_load", lambda name: baseline if name == "baseline" else load(name)
    )
    assert levels() == ["baseline"] and binding._best.__wrapped__() is baseline
    assert set(asked) == {name for name in LEVELS if compiled(name)} - {"baseline"}
    for name in list(asked):
        monkeypatch.setenv("MMKV_NATIVE", name)
        assert level() == "" and reason() == f"this CPU cannot run level {name}"


def compiled(name: str) -> bool:
    return find_spec(f"{binding.__package__}._step_{name}") is not None


@needs_native
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads what Linux says of the CPU")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_levels_are_those_that_linux_reports() -> None:
    flags = set(re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    needs = {"v3": {"avx2", "fma", "bmi1", "bmi2"}}
    needs["v4"] = needs["v3"] | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
    baseline = binding._load("baseline")
    for name, wanted in needs.items():
        assert bool(baseline.mmkv_runs(name.encode())) == (wanted <= flags)
