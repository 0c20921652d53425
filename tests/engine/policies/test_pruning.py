"""Pruning of visual tokens at prefill, against a dense model that masks what was dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies import HeadAllocation, Policy, make_policy
from mmkv.engine.policies.base import ChunkStates
from mmkv.engine.policies.pruning import (
    ConditionallyDiverse,
    LeastAttended,
    LeastDuplicated,
    MostDiverse,
)
from mmkv.engine.policies.scoring import Recency, Retention
from mmkv.engine.runtime import Runtime
from tests.support.factories import make_model, make_turn
from tests.support.model_configs import Checkpoint
from tests.support.oracle import Pruned
from tests.support.sessions import load, save_checkpoint, text_ids
from tests.support.tiers import one_in

FAMILIES = {
    "qwen3_vl": Checkpoint("qwen3_vl", 4, 2, 32, layers=3),
    "llava": Checkpoint("llava", 4, 2, 32, layers=3, text_type="llama"),
}
# Parameters that the matrix of test_oracle.py does not have.
METHODS: dict[str, dict[str, Any]] = {
    "fastv": {},
    "fastv:layer=1,attention=last": {"layer": 1, "attention": "last"},
    "divprune:keep=0.4": {"keep": 0.4},
    "dart:layer=1,tokens=5,visual_pivots=2,text_pivots=1": {
        "layer": 1,
        "tokens": 5,
        "visual_pivots": 2,
        "text_pivots": 1,
    },
    "cdpruner:keep=0.4": {"keep": 0.4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of three layers, so that a default layer of 2 leaves one to be pruned."""
    root = tmp_path_factory.mktemp("pruning")
    return {name: save_checkpoint(spec, root / name) for name, spec in FAMILIES.items()}


def turns(family: str) -> list[Mapping[str, Tensor]]:
    """A turn with a picture, one with two, one without."""
    return [
        make_turn(family, (5, ("image", 24, 32), 4), 1),
        make_turn(family, (2, ("image", 16, 24), 1, ("image", 24, 24), 3), 2),
        make_turn(family, (6,), 3),
    ]


# Every method with both families and both chunks, but not each of four.
CASES = [
    (family, method, (512, 7)[(at + other) % 2])
    for at, family in enumerate(FAMILIES)
    for other, method in enumerate(METHODS)
]


@one_in(3)
@pytest.mark.parametrize(("family", "method", "chunk"), CASES)
def test_a_pruned_dialogue_is_that_of_a_masked_model(
    family: str, method: str, chunk: int, models: dict[str, Path]
) -> None:
    engine = load(models[family], policy=method, prefill_chunk=chunk)
    name = method.partition(":")[0]
    oracle = Pruned(make_model(FAMILIES[family]), name, prefill_chunk=chunk, **METHODS[method])
    session = engine.session()
    for turn in turns(family):
        torch.testing.assert_close(
            session.prefill(turn), oracle.prefill(turn), rtol=1e-3, atol=1e-4
        )
        for token in text_ids(3, 5).tolist():
            torch.testing.assert_close(
                session.decode(token), oracle.decode(token), rtol=1e-3, atol=1e-4
            )
    for got, want in zip(session.retained(), oracle.retained(), strict=True):
        for row, wanted in zip(got, want, strict=True):
            assert torch.equal(row, wanted)
    held = sum(row.numel() for layer in session.retained() for row in layer)
    memory = session.memory()
    assert memory.entries == held
    assert memory.evicted == session.seen * engine.spec.rows - held > 0
    engine.cache.check()


@pytest.mark.parametrize("method", ["fastv", "divprune"])
def test_pruned_sessions_are_saved_forked_and_rolled_back(
    method: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(models["qwen3_vl"], policy=method, prefill_chunk=9)
    session, (first, second, _) = engine.session(), turns("qwen3_vl")
    session.prefill(first)
    fork = session.fork()
    session.save(tmp_path / "s")
    copy, _ = load(models["qwen3_vl"], policy=method, prefill_chunk=9).load_session(tmp_path / "s")
    before = session.memory()

    def fail(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.policy.pruner), "keep", fail)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(second)
    assert session.memory().entries == before.entries
    engine.cache.check()
    out = [one.prefill(second) for one in (fork, copy)]
    assert torch.equal(out[0], out[1])


def test_a_text_prompt_is_not_pruned(models: dict[str, Path]) -> None:
    engine = load(models["qwen3_vl"], policy="fastv")
    session = engine.session()
    session.prefill(turns("qwen3_vl")[2])
    assert session.memory().evicted == 0 and session.memory().entries == 6 * engine.spec.rows


def test_single_and_equal_tokens() -> None:
    same = torch.ones(5, 4)
    every = ChunkStates(same, torch.arange(5), torch.tensor([0.1, 0.3, 0.3, 0.0, 0.3]), same)
    two = [True, True, False, False, False]
    for pruner in (MostDiverse(0.4), ConditionallyDiverse(0.4), LeastDuplicated(share=0.4)):
        assert pruner.keep(every).tolist() == two
        one = ChunkStates(same[:1], torch.arange(1), keys=same[:1])
        assert pruner.keep(one).tolist() == [True]
        fewer = replace(pruner, tokens=9).keep(every)
        assert fewer.all(), "no more than there are"
    told = ChunkStates(torch.eye(5)[[0, 0, 1, 2, 4]], torch.arange(4))  # all as near to the text
    assert ConditionallyDiverse(0.5).keep(told).tolist() == [True, False, True, False]
    assert LeastAttended(1, 0.5).keep(every).tolist() == [False, True, True, False, False]


def test_what_cannot_be_pruned_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(PolicyError, match="this model has 3 layers, give 0 to 2"):
        load(models["qwen3_vl"], policy="fastv:layer=3")
    gated = Policy("mine", Retention(1), HeadAllocation(), pruner=LeastAttended())
    with pytest.raises(PolicyError, match="may read keys, values and positions only"):
        load(models["qwen3_vl"], policy=gated)
    both = Policy("mine", Recency(), HeadAllocation(), pruner=MostDiverse(0.5))
    engine = load(models["qwen3_vl"], policy=both, budget=6)
    session = engine.session()
    session.prefill(turns("qwen3_vl")[0])
    assert session.memory().entries <= 6 * engine.spec.rows
    with pytest.raises(PolicyError, match="sliding-window"):
        Runtime.from_pretrained(
            save_checkpoint(
                Checkpoint("mistral", 4, 2, 32, text={"sliding_window": 24}),
                models["llava"].parent / "windowed",
            ),
            policy=make_policy("divprune"),
            device="cpu",
        )
