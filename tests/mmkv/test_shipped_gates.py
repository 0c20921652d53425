"""Gates that ship for a checkpoint are found by its weights, where nothing else is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoModelForImageTextToText

from mmkv import Budget, BudgetError, Engine, GateError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import make_random_gates, make_random_write_gates, save_gates
from mmkv.engine.runtime import Runtime
from mmkv.eval.quality.methods import ComparedMethod
from mmkv.hf import retain
from mmkv.resources import gates_made_for
from tests.support.chat_models import save_qwen3_vl
from tests.support.factories import checkpoint

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


@pytest.fixture
def shipped(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of sets of gates, three of them for ``model``."""
    folder, spec = tmp_path / "assets" / "gates", Runtime.from_pretrained(model, policy="full").spec
    ours = {"base_model": "m", "base_fingerprint": fingerprint(model)}
    retention, write = make_random_gates(spec), make_random_write_gates(spec)
    for name, gates, facts in (
        ("a-other", retention, {"base_fingerprint": "0" * 64, "settings": {"scope": "global"}}),
        ("b-unknown", retention, {"settings": {"scope": "global"}}),
        ("c-head", retention, ours | {"settings": {"scope": "head"}}),
        ("d-global", retention, ours | {"settings": {"scope": "global"}}),
        ("e-write", write, ours | {"settings": {"method": "wgkv"}}),
    ):
        save_gates(gates, folder / name, spec, None, **facts)
    monkeypatch.setenv("MMKV_ASSETS", str(tmp_path / "assets"))
    return folder


def note(name: str) -> str:
    return f"running with the gates {name}, which were trained for this checkpoint"


def test_the_policy_decides_which_set_is_taken(model: str, shipped: Path) -> None:
    assert [folder.name for folder in gates_made_for(model)] == ["c-head", "d-global", "e-write"]
    for policy, name in ((None, "d-global"), ("trimkv", "c-head"), ("wgkv", "e-write")):
        engine = Engine.from_pretrained(model, policy=policy)
        assert engine.policy_note == note(name)
        assert engine.policy.name == (policy or "dbtrimkv")
        named = Engine.from_pretrained(model, policy=policy, gates=shipped / name)
        assert engine.identity() == named.identity() and named.policy_note is None
    assert Engine.from_pretrained(model, policy="snapkv").policy_note is None


def test_what_is_named_or_lies_in_the_checkpoint_goes_before(
    model: str, shipped: Path, tmp_path: Path
) -> None:
    assert Engine.from_pretrained(model, gates="random").policy_note is None
    copied = shutil.copytree(model, tmp_path / "copy")
    assert Engine.from_pretrained(copied).policy_note == note("d-global")
    shutil.copytree(shipped / "c-head", copied / "gates")
    assert Engine.from_pretrained(copied).policy_note is None


def test_the_checkpoints_own_gates_are_none_for_a_policy_of_the_other_kind(
    model: str, shipped: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(model, tmp_path / "copy")
    shutil.copytree(shipped / "c-head", copied / "gates")
    engine = Engine.from_pretrained(copied, policy="wgkv")
    assert engine.policy_note == note("e-write")
    assert Engine.from_pretrained(copied, policy="snapkv").gates is not None
    shutil.rmtree(copied / "gates")
    shutil.copytree(shipped / "e-write", copied / "gates")
    own = Runtime.from_pretrained(str(copied), policy="wgkv")
    assert own.identity() == engine.identity()
    assert Engine.from_pretrained(copied).policy.name == "wgkv"


def test_a_policy_of_both_kinds_gets_both(model: str, shipped: Path) -> None:
    both = "d-global and e-write"
    wanted = Engine.from_pretrained(
        model,
        policy=f"wgkv+dbtrimkv:write_gates={shipped / 'e-write'}",
        gates=shipped / "d-global",
    )
    for policy in ("wgkv+dbtrimkv", "wgkv+dbtrimkv:window=0", "wgkv+dbtrimkv[threshold=0.1]"):
        engine = Engine.from_pretrained(model, policy=policy)
        assert engine.policy_note == note(both) and engine.identity() == wanted.identity()


def test_retain_takes_the_gates_that_the_engine_takes(
    model: str, shipped: Path, tmp_path: Path
) -> None:
    hosted = AutoModelForImageTextToText.from_pretrained(model)
    for policy in (None, "trimkv", "wgkv", "wgkv+dbtrimkv", "snapkv"):
        engine = Engine.from_pretrained(model, policy=policy, budget=8)
        with retain(hosted, policy=policy, budget=8) as handle:
            assert handle.engine.identity() == engine.identity()
            assert handle.note == engine.policy_note
    with retain(hosted, gates="random") as handle:
        assert handle.note is None
    with retain(hosted, gates=make_random_gates(Runtime.from_pretrained(model).spec)) as handle:
        assert handle.note is None
    copied = shutil.copytree(model, tmp_path / "copy")
    shutil.copytree(shipped / "c-head", copied / "gates")
    with retain(AutoModelForImageTextToText.from_pretrained(copied)) as handle:
        own = Engine.from_pretrained(copied)
        assert handle.note is None and handle.engine.identity() == own.identity()


def test_names_that_are_listed_are_names_everywhere(
    mmkv: Callable[..., Ran], model: str, shipped: Path
) -> None:
    """--gates, gates=, write_gates=, retain and eval's methods; the kind decides the policy."""
    wanted = Engine.from_pretrained(model, policy="wgkv", gates=shipped / "e-write").identity()
    assert Engine.from_pretrained(model, policy="wgkv", gates="e-write").identity() == wanted
    assert Engine.from_pretrained(model, gates="e-write").identity() == wanted
    both = "wgkv+dbtrimkv:write_gates=e-write"
    assert Engine.from_pretrained(model, policy=both, gates="c-head").policy.name == "wgkv+dbtrimkv"
    hosted = AutoModelForImageTextToText.from_pretrained(model)
    with retain(hosted, gates="e-write") as handle:
        assert handle.engine.identity()["gates"] == wanted["gates"]
    assert ComparedMethod.parse("wgkv:e-write").gates == (str(shipped / "e-write"),)
    ran = mmkv("chat", model, "-p", "hi", "--max-new-tokens", "2", "--gates", "e-write", "--json")
    assert ran.code == 0 and json.loads(ran.out)["policy"].startswith("wgkv"), ran.err
    with pytest.raises(GateError, match="a name that `mmkv models` lists"):
        Engine.from_pretrained(model, gates="f-none")


def test_other_weights_of_the_same_shape_take_none(shipped: Path, tmp_path: Path) -> None:
    other = str(save_qwen3_vl(tmp_path / "other", seed=1))
    assert gates_made_for(other) == {}
    engine = Engine.from_pretrained(other)
    assert engine.policy.name == "full" and "nothing is evicted" in str(engine.policy_note)


def test_the_engine_alone_takes_none(model: str, shipped: Path) -> None:
    """Programs that measure build on it, and name their gates."""
    assert Runtime.from_pretrained(model).policy.name == "full"


def test_without_gates_a_budget_decides_whether_anything_is_evicted(tmp_path: Path) -> None:
    """What reads pictures runs what answered best about pictures, text what reads it best."""
    sees, reads = (checkpoint(name) for name in ("qwen2_5_vl", "llama"))
    for model, best in ((sees, "rkv"), (reads, "streamingllm")):
        free = Engine.from_pretrained(model)
        assert free.policy.name == "full" and "nothing is evicted" in str(free.policy_note)
        with free.session() as session, pytest.raises(BudgetError, match="evicts nothing"):
            session.set_budget(8)
        for given in (8, Budget.fraction(0.5)):  # nothing would come of them
            with pytest.raises(BudgetError, match=r"evicts nothing.*load the model with a budget"):
                free.session(given)
        free.session(free.budget).close()
        for budget in (8, "25%", "64KiB"):
            engine = Engine.from_pretrained(model, budget=budget)
            assert engine.policy.name == best and best in str(engine.policy_note)
    assert Engine.from_pretrained(sees, policy="snapkv").budget == Budget.of(256)


def test_a_chat_that_was_saved_goes_on_whatever_its_budget_was(
    mmkv: Callable[..., Ran], tmp_path: Path
) -> None:
    model = str(save_qwen3_vl(tmp_path / "m"))
    ask = ("-p", "hello", "--max-new-tokens", "2")
    for name, budget in (("free", ()), ("bound", ("--budget", "12"))):
        file = str(tmp_path / name)
        assert mmkv("chat", model, *ask, *budget, "--save", file).code == 0
        assert mmkv("chat", *ask, "--load", file).code == 0


def test_the_chat_says_which_it_took_and_warns_of_foreign_ones(
    mmkv: Callable[..., Ran], model: str, shipped: Path
) -> None:
    few = ("-p", "hello", "--max-new-tokens", "2")
    assert mmkv("chat", model, *few).err.count(note("d-global")) == 1
    for name, policy in (("a-other", "dbtrimkv"), ("e-write", "wgkv")):
        gates = shipped / name
        info = (gates / "gates.json").read_text().replace(str(fingerprint(model)), "0" * 64)
        (gates / "gates.json").write_text(info)
        ran = mmkv("chat", model, *few, "--gates", str(gates), "--policy", policy)
        assert ran.code == 0 and ran.err.count("with other weights") == 1
