"""The program that measures whether risk says how far answers go off."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import risk
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model_name


def test_one_dialogue_with_enough_memory_and_with_little() -> None:
    """With all entries kept nothing is forgotten, and answers are the full cache's."""
    model = bundled_model_name()
    engine = Runtime.from_pretrained(
        model, policy="dbtrimkv", gates=Path(model) / "gates", dtype="float32", device="cpu"
    )
    rows = risk.ask(engine, "sparse", 3, [8, 4000])
    little, enough = rows[:8], rows[8:]
    assert [row["question"] for row in rows] == [*range(8), *range(8)]
    assert all(row["risk"] == 0 and row["kl"] < 1e-6 and not row["lost"] for row in enough)
    assert all(row["risk"] > 0.05 for row in little) and max(row["kl"] for row in little) > 0.01


def test_correlations_within_a_budget_differ_from_those_across(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each budget alone: the higher the risk, the lower KL; together: the higher."""
    monkeypatch.setattr(risk, "_DRAWS", 20)
    rows = []
    for dialogue in range(12):
        for budget in (1.0, 2.0):
            known = dict.fromkeys(risk.KNOWN, 20 * budget + dialogue)
            row = {"source": "a", "dialogue": dialogue, "question": 0, "budget": budget}
            found = {"kl": 100 * budget - dialogue, "wrong": budget > 1, "lost": budget > 1}
            rows.append({"kind": "k", **row, **known, **found})
    found = risk.summarise(rows)
    assert found["questions"] == found["dialogues"] == 12
    assert found["within"]["risk / kl / all"] == [-1, -1, -1]
    assert found["each_budget"]["risk / kl / M = 1"][0] == -1
    assert found["across"]["risk / kl"][0] == pytest.approx(1 - 6 * 2 * 572 / (24 * 575), abs=1e-4)
    assert found["tenths"]["risk"][-1]["lost"] == [1, 1, 1]
    assert "12 questions in 12 dialogues" in risk.markdown(found)
