"""The age of an entry: the papers', and that of the authors' released code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv.engine.errors import PolicyError
from mmkv.engine.model.gates import load_gates, make_random_gates, save_gates, trained_age
from mmkv.engine.policies import make_policy
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.runtime import Runtime
from mmkv.eval.quality.methods import Cell
from mmkv.resources import asset
from tests.engine.test_gates import published, write
from tests.engine.test_policies import make_view
from tests.support.factories import checkpoint
from tests.support.sessions import load, text_ids


@pytest.mark.parametrize(
    ("text", "lookahead", "newest"),
    [
        ("dbtrimkv", 2, 1),
        ("dbtrimkv", 1, 1),
        ("dbtrimkv:age=released", 1, 2),
        ("dbtrimkv:age=released", 2, 3),
        ("dbtrimkv:age=released", math.inf, 3),
        ("trimkv", 2, 0),
        ("trimkv:age=released", 2, 2),
    ],
)
def test_ages_of_the_presets(
    text: str, lookahead: float, newest: int, generator: torch.Generator
) -> None:
    """Each score is the sum of powers of beta that its source writes, from that age on."""
    scoring = make_policy(text, lookahead).scoring
    assert isinstance(scoring, Retention) and scoring.newest_age == newest
    # Away from 0: a beta near 1 would need more terms than the 4,000 that stand for infinity.
    log_beta = -0.01 - 3 * torch.rand(60, generator=generator)
    view = replace(make_view([[40, 20]], seen=40), log_beta=log_beta)
    steps = scoring.lookahead if math.isfinite(scoring.lookahead) else 4000
    age = (newest + 39 - view.position)[:, None] + torch.arange(int(steps))
    terms = (view.log_beta.double()[:, None] * age).exp().sum(1).log()
    torch.testing.assert_close(scoring.score(view).double(), terms, rtol=1e-5, atol=1e-5)


def test_an_age_is_named_unless_it_is_equation_9s() -> None:
    assert make_policy("dbtrimkv").identity().startswith("dbtrimkv: Retention(lookahead=2), Glob")
    assert "Retention(lookahead=1, newest_age=0)" in make_policy("trimkv").identity()
    made = make_policy("dbtrimkv:age=released")
    assert made.name == "dbtrimkv:age=released" and "newest_age=3" in made.identity()
    # Where released is the default, the papers' is what has to be said.
    assert make_policy("dbtrimkv", age="released").name == "dbtrimkv"
    assert make_policy("dbtrimkv:age=paper", age="released").name == "dbtrimkv:age=paper"
    assert make_policy("dbtrimkv:age=paper", age="released").scoring == Retention(2)
    for bad in (-1, 0.5):
        with pytest.raises(PolicyError, match="whole number of at least 0"):
            Retention(2, bad)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="give paper or released"):
        make_policy("trimkv:age=1")


@pytest.mark.parametrize("worst", [-math.inf, math.nan, -1e30])
def test_the_newest_of_trimkv_outlives_its_own_step(worst: float) -> None:
    """Algorithm 1 scores it beta^0 = 1, whatever its beta; ties with 1 fall on older ones."""
    policy = make_policy("trimkv")
    for others in (-0.5, 0.0):
        view = make_view([[9, 9]], seen=9)
        newest = view.position == 8
        view = replace(view, log_beta=torch.where(newest, worst, torch.full((18,), others)))
        for budget in range(2, 18):
            assert not newest[policy.victims(view, budget)].any()
        assert bool(newest[policy.victims(view, 1)].any())  # a row of no share keeps nothing


def test_gates_of_the_authors_layout_bring_their_age(tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    spec = load(folder).spec
    theirs = write(published(spec, "rg"), tmp_path / "theirs")
    save_gates(load_gates(theirs, spec), tmp_path / "ours", spec)  # trained here: the paper's age
    save_gates(make_random_gates(spec), tmp_path / "tied", spec)
    found = {
        name: trained_age(tmp_path / name if name != "random" else name)
        for name in ("theirs", "ours", "tied", "random")
    }
    assert found == {"theirs": "released", "ours": "paper", "tied": "paper", "random": "paper"}

    def newest(gates: Path, **options: Any) -> int:
        engine = Runtime.from_pretrained(folder, gates=gates, device="cpu", **options)
        scoring = engine.policy.scoring
        assert isinstance(scoring, Retention)
        return scoring.newest_age

    assert (newest(theirs), newest(tmp_path / "ours")) == (3, 1)
    assert newest(theirs, lookahead=1) == 2
    assert newest(theirs, policy="trimkv") == 2
    assert newest(tmp_path / "ours", policy="trimkv") == 0
    assert newest(theirs, policy="dbtrimkv:age=paper") == 1
    assert newest(theirs, policy=make_policy("trimkv")) == 0  # an object is taken as it is


def test_a_session_does_not_go_on_under_another_age(tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    with load(folder).session() as session:
        session.prefill({"input_ids": text_ids(9, 1)[None]})
        session.save(tmp_path / "kept.mmkv")
    load(folder).load_session(tmp_path / "kept.mmkv")[0].close()
    with pytest.raises(Exception, match="newest_age=3"):
        load(folder, policy="dbtrimkv:age=released").load_session(tmp_path / "kept.mmkv")


def test_runs_of_eval_quality_with_other_ages_are_other_runs() -> None:
    gates = str(asset("gates/smollm2-135m-trimkv-0"))
    cells = {
        text: Cell(text, None, gates, "1/8").key()
        for text in ("dbtrimkv", "trimkv", "dbtrimkv:age=released")
    }
    assert "age" not in cells["dbtrimkv"]  # runs of old journals stay
    assert " age 0 at" in cells["trimkv"] and " age 3 at" in cells["dbtrimkv:age=released"]
