"""Engine options: checked once, and the same wherever an engine is asked for."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.main import get_command

from mmkv.cli.app import app
from mmkv.engine.budget import Budget
from mmkv.engine.config import DEFAULT_BUDGET, DEFAULT_POLICY, EngineConfig, options
from mmkv.engine.errors import BudgetError, InputError, MmkvError, ModelError, PolicyError
from mmkv.engine.policies import Policy, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.eval.lmms.settings import LmmsSettings
from tests.support.sessions import load

# Budgets have an option for each unit; the limit of the pool is for programs.
ON_THE_COMMAND_LINE = [name for name in options() if name not in ("budget", "kv_limit")]


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"evict_every": 0}, PolicyError, "evict_every is 0; give a whole number of at least 1"),
        ({"prefill_chunk": -1}, PolicyError, "prefill_chunk is -1"),
        ({"page_size": 0}, PolicyError, "page_size is 0"),
        ({"kv_limit": -1}, PolicyError, "kv_limit is -1"),
        ({"threads": 0}, PolicyError, "threads is 0; give a whole number of at least 1"),
        ({"lookahead": 0}, PolicyError, "lookahead is 0; give a whole number"),
        ({"lookahead": 1.5}, PolicyError, "lookahead is 1.5; give"),
        ({"lookahead": float("nan")}, PolicyError, "lookahead is nan; give"),
        ({"kv": "int2"}, PolicyError, "kv is 'int2'; give auto, bf16, int8, k8v4 or int4"),
        ({"weights": "int3"}, ModelError, "weights is 'int3'; give auto, bf16, int8 or int4"),
        ({"budget": 0}, BudgetError, "positive"),
        ({"budget": "lots"}, BudgetError, "'lots' is not a budget"),
        ({"budget": "150%"}, BudgetError, "above 1"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], error: type[MmkvError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        EngineConfig(**wrong)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InputError, match="no option 'budgets'; did you mean 'budget'"):
        Runtime.from_pretrained("anywhere", budgets=3)


@pytest.mark.parametrize(
    "loading",
    [
        {"gates": "random"},
        {"gates": Path("gates")},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"lookahead": 5},
        {"threads": 2},
        {"model": "somewhere"},
        {"device": "cpu", "gates": "random", "lookahead": 5},
    ],
    ids="+".join,
)
def test_a_runtime_refuses_what_only_loading_reads(loading: dict[str, Any]) -> None:
    parts = dict.fromkeys(("family", "spec", "weights", "gates")) | {"policy": make_policy("full")}
    with pytest.raises(InputError, match=r"Runtime\.from_pretrained") as caught:
        Runtime(**(parts | loading))
    line = str(caught.value)
    assert "\n" not in line and f"cannot read {', '.join(sorted(loading))};" in line


def test_a_config_names_a_model() -> None:
    with pytest.raises(ModelError, match="no model is named"):
        Runtime.from_config(EngineConfig())


def test_the_defaults_are_those_of_the_documents() -> None:
    """benchmarks/notes/lmms-eval.md, and docs/reference/glossary.md."""
    made = EngineConfig()
    assert (made.lookahead, made.evict_every, made.page_size) == (2, None, 16)
    assert (made.device, made.dtype, made.weights) == ("auto", "auto", "auto")
    assert (made.gates, made.kv, made.kv_limit) == (None, None, None)
    assert (made.prefill_chunk, Policy.interval) == (2048, 1)
    assert (DEFAULT_BUDGET, DEFAULT_POLICY) == (256, "dbtrimkv")


def test_an_engine_takes_its_options_from_the_config(folders: dict[str, Path]) -> None:
    """Keywords and a config give the same engine; none of the options is lost."""
    given: dict[str, Any] = {"budget": "25%", "evict_every": 3, "prefill_chunk": 5, "page_size": 8}
    given |= {"kv": "k8v4", "vision_cache": "100KiB"}
    made = load(folders["vl"], policy="dbtrimkv", lookahead=5, kv_limit=10**6, **given)
    loading = {"model": folders["vl"], "gates": "random", "device": "cpu", "dtype": "float32"}
    config = EngineConfig(policy="dbtrimkv", lookahead=5, kv_limit=10**6, **loading, **given)
    for engine in (made, Runtime.from_config(config)):
        assert engine.budget == Budget.fraction(0.25)
        assert (engine.interval.named, engine.prefill_chunk) == (3, 5)
        assert engine.cache.pool.page_size == 8
        assert engine.cache.pool.form.name == "k8v4"
        pool = engine.cache.pool
        assert pool.limit == (10**6 - 100 * 2**10) // pool.page_bytes
        assert engine.vision_cache.limit == 100 * 2**10
        assert engine.policy == make_policy("dbtrimkv", 5)


def test_an_engine_runs_on_as_many_threads_as_it_is_told(folders: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            load(folders["vl"], threads=threads)
            assert torch.get_num_threads() == threads
        with pytest.raises(InputError, match="threads is 1000; give at most"):
            load(folders["vl"], threads=1000)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("command", ["chat", "mmdu", "bench", "serve"])
def test_commands_offer_every_option_with_its_default(command: str) -> None:
    made: Any = get_command(app)
    found = made.get_command(None, command)
    parameters = {parameter.name: parameter for parameter in found.params}
    assert {"budget", "budget_bytes", "budget_fraction"} <= set(parameters)
    for name in ON_THE_COMMAND_LINE:
        assert parameters[name].default == options()[name].default, name
        assert isinstance(parameters[name], typer.core.TyperArgument) == (
            name == "model" and command != "mmdu"
        )


def test_lmms_eval_takes_every_option_as_text() -> None:
    texts = {
        "mmproj": "tower.gguf",
        "adapter": "tuned",
        "policy": "trimkv",
        "budget": "25",
        "risk": "0.02",
        "budget_max": "64",
        "lookahead": "3",
        "evict_every": "4",
        "prefill_chunk": "64",
        "page_size": "32",
        "weights": "int8",
        "kv": "k8v4",
        "gates": "random",
        "device": "cpu",
        "dtype": "float32",
        "vision_cache": "1GiB",
        "endless": "False",
        "lossless": "True",
        "threads": "1",
    }
    assert set(texts) == set(options()) - {"model", "kv_limit"}
    made = LmmsSettings.of({"pretrained": "here.gguf", **texts}).engine
    read: dict[str, Any] = {"risk": 0.02, "lookahead": 3.0, "evict_every": 4, "prefill_chunk": 64}
    read |= {"page_size": 32, "endless": False, "lossless": True, "threads": 1}
    assert made == EngineConfig(model="here.gguf", **texts | read)
    assert LmmsSettings.of({"pretrained": "here"}).engine == EngineConfig(
        model="here", endless=False
    )


def test_the_keywords_of_from_pretrained_are_the_fields() -> None:
    """Documented where the signature cannot say it."""
    text = inspect.getdoc(Runtime.from_pretrained)
    assert text is not None
    assert all(name in text for name in options() if name != "model")
