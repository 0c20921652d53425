"""The stream that is read beyond the trained context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import endless
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model


def test_a_stream_goes_on_in_a_short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Runtime.from_pretrained(
        bundled_model(), policy="dbtrimkv", budget=16, device="cpu", dtype="float32"
    )
    engine.spec = engine.model.spec = replace(engine.spec, max_position=320)
    monkeypatch.setattr(endless, "_REMEMBER", 5)
    rows = endless.read_stream(engine, 900)
    assert rows[-2]["seen"] < 900 <= rows[-1]["seen"] == sum(row["tokens"] for row in rows)
    assert max(row["position"] for row in rows) <= 320 and rows[-1]["compactions"] >= 2
    assert [i for i, row in enumerate(rows) if "beginning" in row] == [*range(4, len(rows), 5)]
    moved = [i for i, row in enumerate(rows) if i and rows[i - 1]["compactions"]]
    assert [i for i, row in enumerate(rows) if "young" in row] == [i for i in moved if i % 4 == 0]
    parts = endless.parts_of(rows, 320)
    assert parts[0][-1]["seen"] <= 320 < parts[1][0]["seen"]
    assert [row for part in parts for row in part] == rows


def test_what_has_to_hold() -> None:
    pair = {"clips": 10, "difference": {"value": 0.0}, "time": 1.0}
    part = {
        "clips": 10,
        "against_young": pair,
        "beginning": {"value": 0.1},
        "beginning_young": {"value": 0.1},
        "most_bytes": 100,
        "highest_position": 60,
    }
    worse = part | {
        "against_young": pair | {"difference": {"value": -0.04}, "time": 0.94, "clips": 20},
        "beginning": {"value": 0.05},
        "most_bytes": 106,
    }
    assert [row[-1] for row in endless.checks([part, part, part], 64)] == [True] * 5
    found = endless.checks([part, part, worse], 59)
    assert [row[-1] for row in found] == [False] * 5
    assert [row[1] for row in found[:2]] == ["-2.7 points", "-2.5 points"]
