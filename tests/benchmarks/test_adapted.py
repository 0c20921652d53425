"""What training under compression is said to give: by hand, from records of dialogues."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adapted import adapters_of, markdown, summarise
from mmkv.engine.errors import InputError


def dialogues(*right: list[bool]) -> list[dict[str, Any]]:
    return [{"right": rows, "tokens": [2] * len(rows), "kl": [0.5] * len(rows)} for rows in right]


def test_gains_are_paired_and_seeds_averaged() -> None:
    """Of 3 questions 1 is right before; 2 and 3 after two seeds: 5/6, a gain of 1/2."""
    before = dialogues([True, False], [False])
    seeds = [dialogues([True, True], [False]), dialogues([True, True], [True])]
    raw = {
        "before": {"bounded": [before], "full": [dialogues([True, True], [True])]},
        "distill": {"bounded": seeds, "full": [dialogues([True, True], [True])] * 2},
    }
    found = summarise(raw)
    assert (found["dialogues"], found["questions"]) == (2, 3)
    first, _, after, full = found["rows"]
    assert first["accuracy"]["value"] == pytest.approx(1 / 3) and "gain" not in first
    assert after["accuracy_by_seed"] == pytest.approx([2 / 3, 1])
    assert after["accuracy"]["value"] == pytest.approx(5 / 6)
    assert after["gain"]["value"] == pytest.approx(1 / 2) and full["gain"]["value"] == 0
    assert after["kl_per_token"]["value"] == pytest.approx(0.25)
    assert "| distill | bounded | 0.833 [" in markdown(found)


def test_adapters_have_names() -> None:
    asked = adapters_of(["a=x,y", "b=z"])
    assert asked == {"before": [None], "a": ["x", "y"], "b": ["z"]}
    for wrong in ("x", "=x", "before=x"):
        with pytest.raises(InputError, match="write another NAME=FOLDER"):
            adapters_of([wrong])
