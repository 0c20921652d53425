"""``mmkv policies``: what it says of each policy is what the engine does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

from mmkv import policies
from mmkv.engine.policies import (
    PRESETS,
    CacheView,
    Needs,
    Policy,
    make_policy,
    register_policy,
    registry,
)
from mmkv.engine.policies.preset import show
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


def test_every_preset_is_listed_with_its_parameters(mmkv: Callable[..., Ran]) -> None:
    ran = mmkv("policies", "--json")
    assert ran.code == 0
    rows = {row["name"]: row for row in json.loads(ran.out)}
    assert list(rows)[: len(PRESETS)] == list(PRESETS)
    for name, preset in PRESETS.items():
        row, policy = rows[name], make_policy(name)
        assert {one["name"]: one["default"] for one in row["parameters"]} == {
            key: show(one.default) for key, one in preset.parameters.items()
        }
        assert all(one["help"] and one["takes"] for one in row["parameters"])
        assert row["title"] and row["source"] == preset.source and not row["problem"]
        reads = policy.scoring.needs != Needs() or policy.pruner is not None
        reads |= policy.admission is not None
        assert bool(row["needs"]) == reads
    for name in ("dbtrimkv", "snapkv"):  # as an engine that is loaded with them says
        engine = Runtime.from_pretrained(bundled_model(), policy=name, dtype="float32")
        assert ("C eviction" in rows[name]["cpu"]) == engine.evict_path.startswith("native")
        assert ("C step" in rows[name]["cpu"]) == (engine.decode_path == "native")


def test_the_table_has_papers_needs_and_places(mmkv: Callable[..., Ran]) -> None:
    shown = mmkv("policies").out
    for words in ("dbtrimkv", "2605.09649", "sinks=4", "16 queries", "CUDA graph"):
        assert words in shown


def test_policies_of_others_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = dict(registry._REGISTRY.registered)
    monkeypatch.setattr(registry._REGISTRY, "registered", registered)
    register_policy("mine", make_policy("streamingllm:sinks=2"))
    register_policy("broken", lambda steps: None)  # type: ignore[arg-type,return-value]
    rows = {row.name: row for row in policies.listed()}
    assert rows["mine"].source == "arXiv 2309.17453" and not rows["mine"].parameters
    assert "must be a Policy" in rows["broken"].problem
    assert policies.table(list(rows.values())).row_count == len(rows)


def test_needs_are_said_in_words() -> None:
    def words(**needs: Any) -> list[str]:
        return policies.needs_of(Policy("x", Reads(Needs(**needs)), None))

    assert words() == []
    assert words(gates="retention", queries=1) == ["retention gates", "1 query"]
    assert words(queries=16, keys=True, values=True) == ["16 queries", "keys", "values"]
    assert words(state=1, mass="mean") == ["1 number an entry", "attention mass (mean of a group)"]
    assert words(state=2, taps=(0.3, 0.7)) == ["2 numbers an entry", "hidden states"]


@dataclass(frozen=True)
class Reads:
    """A scorer that is only asked for its needs."""

    needs: Needs

    def score(self, view: CacheView) -> Tensor:
        return view.position.float()
