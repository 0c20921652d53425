"""The references of the policies on a small random model: what each promises, at every step."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmkv.training.measure.record import ROOT
from tests.support.factories import Checkpoint
from tests.support.oracle import METHODS, Oracle
from tests.support.oracle.methods import attention
from tests.support.oracle.methods.base import Method
from tests.support.oracle.methods.frozen import PromptKept
from tests.support.policies import EVICTING_KINDS
from tests.support.sessions import save_checkpoint, text_ids
from tests.support.tiers import slow_but

# Small enough that every method has entries to choose from at a budget of 12.
SMALL: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 4, "beta": 4},
    "adakv": {"window": 4},
    "ada-pyramidkv": {"window": 4, "beta": 4},
    "morphkv": {"window": 4},
    "gkv": {"window": 4},
    "rkv": {"window": 4},
    "lagkv": {"sinks": 2, "lag": 3},
    "lag-kv": {"lag": 8},
    "segments-hs": {"segment": 6, "r": 3, "e": 2, "t": 1},
    "wgkv+snapkv": {"observed": 4},
}
# A budget binds nothing in wgkv.
EVICTING = [name for name in METHODS if name not in ("full", "wgkv")]


@cache
def model() -> PreTrainedModel:
    """Three layers of two KV heads, each of two query heads."""
    with tempfile.TemporaryDirectory(prefix="mmkv-references-") as home:
        folder = save_checkpoint(Checkpoint("llama", 4, 2, 32, layers=3), Path(home))
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def gate(layer: int, x: torch.Tensor) -> torch.Tensor:
    """Log betas ``[T, H]`` of states ``[T, d]``, which differ between heads."""
    return torch.nn.functional.logsigmoid(x[:, :2] + layer)


def talk(name: str, budget: float = 12.5) -> Iterator[Oracle]:
    """The conversation after each call: a prompt in chunks, tokens, a new budget, a late turn."""
    oracle = Oracle(model(), gate, name, budget, prefill_chunk=16, **SMALL.get(name, {}))
    ids = text_ids(70, 3)
    oracle.prefill({"input_ids": ids[None, :30]})
    yield oracle
    for token in ids[30:50].tolist():
        oracle.decode(token)
        yield oracle
    oracle.set_budget(9)
    yield oracle
    oracle.prefill({"input_ids": ids[None, 50:60]})
    yield oracle
    for token in ids[60:].tolist():
        oracle.decode(token)
        yield oracle


@pytest.mark.parametrize("name", slow_but(EVICTING_KINDS, EVICTING, "the other presets"))
def test_budgets_hold_and_are_used(name: str) -> None:
    """Groups never hold more than their shares, which are never more than was promised."""
    for oracle in talk(name):
        groups = oracle.method.groups(oracle, oracle.total)
        prompt = int(oracle.prompt.sum()) if isinstance(oracle.method, PromptKept) else 0
        promised = sum(group.share for group in groups) - prompt * oracle.rows
        assert oracle.total - oracle.heads < promised <= oracle.total
        for group in groups:
            held = sum(len(oracle.kept(*row)) for row in group.rows)
            assert held <= group.share
            if oracle.seen * len(group.rows) >= group.share and oracle.evictions:
                assert held == min(group.share, oracle.seen * len(group.rows)), name
        if prompt:
            assert oracle.keep[..., oracle.prompt].all(), "a prompt token went"
        protected = oracle.method.protected(oracle, oracle.total)
        assert oracle.keep[..., protected].all(), "a protected token went"
    assert oracle.evictions > 10


def test_rows_above_their_share_are_cut_while_the_sum_is_below() -> None:
    """A pyramid: the upper layers are cut while the lower ones hold less than they may."""
    oracle = Oracle(model(), None, "pyramidkv", 12, window=4, beta=4)
    oracle.prefill({"input_ids": text_ids(11, 3)[None]})
    assert [len(oracle.kept(layer, 0)) for layer in range(3)] == [11, 11, 6]
    assert int(oracle.keep.sum()) == 56 < oracle.total == 72


def test_rows_of_a_layer_hold_the_same_under_tova() -> None:
    for oracle in talk("tova"):
        assert torch.equal(oracle.keep[:, 0], oracle.keep[:, 1])
    assert not torch.equal(oracle.keep[0], oracle.keep[1])


def test_the_mass_of_a_pass_is_one_for_each_query() -> None:
    for oracle in talk("h2o"):
        got = attention.mass(oracle, "mean").sum(-1)
        torch.testing.assert_close(got, torch.full_like(got, oracle.new))


# EpiKV and those of its controls that add nothing that later steps find.
FROZEN = ["epikv", "hs-variance", "band-adaptive", "kv-key", "kv-val", "lag-kv"]


@pytest.mark.parametrize("name", FROZEN)
def test_epikv_and_its_controls_do_not_change_once_given(name: str) -> None:
    """The paper freezes them: later tokens and evictions change none."""
    first: dict[int, float] = {}
    for oracle in talk(name):
        assert isinstance(oracle.method, PromptKept)
        scores = oracle.method.token_score(oracle).tolist()
        for t, score in enumerate(scores):
            assert first.setdefault(t, score) == pytest.approx(score, abs=1e-9)


def test_gkv_keeps_the_first_scores_as_they_are_and_forgets_none() -> None:
    oracle = Oracle(model(), None, "gkv", 12, window=4, redundancy=False)
    oracle.prefill({"input_ids": text_ids(20, 3)[None]})
    method: Any = oracle.method
    before = method.history.clone()
    assert before[..., :16].amax(-1).eq(1.0).all() and before[..., 16:].isnan().all()
    oracle.decode(5)
    kept = oracle.keep[..., :16]
    assert (method.history[..., :16] >= 0.8 * before[..., :16] - 1e-12)[kept].all()
    assert not method.history[..., 16].isnan().any() and method.history[..., 17:].isnan().all()


def test_the_documents_name_every_method_with_its_defaults() -> None:
    text = (ROOT / "docs" / "reference" / "policies.md").read_text()
    sections = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        for name in title.split(" and "):
            sections[name] = body
    for name, make in METHODS.items():
        if name == "full":
            continue
        method: Method = make()
        known = {f.name.rstrip("_"): getattr(method, f.name) for f in fields(method) if f.init}
        _, _, parameters = sections[name].partition("Parameters:")
        named = dict(re.findall(r"`(\w+)=([\w.-]+)`", parameters)) if parameters else {}
        named.pop("evict_every", None)
        known.pop("write_gates", None)  # a path, which has no default
        if name == "wgkv+dbtrimkv":
            known.pop("recent")  # its local window is in its place
        assert named.keys() == known.keys(), name
        for key, value in named.items():
            default = known[key]
            same = str(default).lower() == value
            assert same or float(default) == float(value), f"{name}: {key}"
