"""The comparison with trimkv's caches, as far as it runs without the package."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import pytest
import torch

from benchmarks.trimkv_sets import _append, run_engine, run_trimkv, trimkv_caches
from mmkv.engine.policies import Budget, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model


class Oldest:
    """A cache with trimkv's interface that keeps the newest entries of each row."""

    def __init__(self, memory_size: int, **_: Any) -> None:
        self.memory, self.kv_positions = memory_size, [torch.empty(1, 2, 0)] * 3

    def update(self, key: Any, value: Any, layer: int, given: dict[str, torch.Tensor]) -> None:
        new = given["cache_position"].expand_as(given["retention_weights"])
        self.kv_positions[layer] = torch.cat([self.kv_positions[layer], new], -1)

    def compress(self) -> None:
        self.kv_positions = [held[..., -self.memory :] for held in self.kv_positions]


def test_new_entries_go_behind_those_of_their_head() -> None:
    flat = torch.tensor([[1.0], [2], [3]])
    new = torch.tensor([[[[4.0], [5]], [[6], [7]], [[8], [9]]]])
    lengths = torch.tensor([1, 0, 2])
    found = _append(flat, new, lengths, torch.tensor([0, 1, 1, 3])).flatten().tolist()
    assert found == [1, 4, 5, 6, 7, 2, 3, 8, 9]


def test_a_cache_is_given_the_prompt_and_then_token_by_token() -> None:
    caches = types.SimpleNamespace(TrimKVCache=Oldest)
    kept = run_trimkv(caches, "trimkv", 4, 1, torch.zeros(3, 2, 9), prompt=6)
    assert len(kept) == 4 and all(len(entries) == 3 * 2 * 4 for entries in kept)
    assert {position for _, _, position in kept[0]} == {2, 3, 4, 5}
    assert {position for _, _, position in kept[-1]} == {5, 6, 7, 8}


def test_the_rates_are_those_of_the_cache() -> None:
    """Nothing is evicted, so that the session still holds every log_beta."""
    base = Runtime.from_pretrained(bundled_model(), device="cpu", dtype="float32")
    engine = Runtime(
        base.family,
        base.spec,
        base.decoder.weights,
        base.decoder.gates,
        make_policy("dbtrimkv"),
        Budget.of(64),
    )
    ids = torch.arange(3, 33)
    rates, kept = run_engine(engine, ids, steps=4)
    assert rates.shape == (base.spec.num_layers, base.spec.num_kv_heads, 34)
    assert [len(entries) for entries in kept] == [base.spec.rows * n for n in range(30, 35)]
    with engine.session() as session:
        session.prefill({"input_ids": ids[None]})
        view = session.view()
        torch.testing.assert_close(
            view.log_beta, rates.flatten(0, 1)[view.row, view.position], rtol=1e-4, atol=1e-7
        )


@pytest.mark.skipif(importlib.util.find_spec("trimkv") is not None, reason="trimkv is installed")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(SystemExit, match=r"install trimkv==0\.1\.5 into an environment of its own"):
        trimkv_caches()
