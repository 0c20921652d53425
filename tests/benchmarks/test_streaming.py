"""Observing a stream beside sending its last pictures again."""

from __future__ import annotations

import pytest

from benchmarks import streaming
from mmkv.training.data.scenes import render
from tests.training.data.test_scenes import read_cells


def test_questions_ask_what_the_pictures_show() -> None:
    shown = streaming.stream("test")
    asked = [
        (shown[index], question)
        for index in range(len(shown))
        for question in streaming.questions(shown[: index + 1], "test")
    ]
    kinds = [question.kind for _, question in asked]
    assert {kind: kinds.count(kind) for kind in streaming.KINDS} == {
        "now": 18,
        "a minute ago": 18,
        "ten minutes ago": 16,
        "the beginning": 21,
    }
    for now, question in asked:
        (scene,) = [one for one in shown if one.number == question.number]
        assert now.at - scene.at == question.age
        cells = read_cells(render(scene.scene))
        row, column = question.text.partition(" at row ")[2].partition(" of ")[0].split(", column ")
        assert cells[int(row) - 1][int(column) - 1] == question.answer


def test_ways_read_the_same_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KINDS", {"now": (0, 1), "a minute ago": (60, 1)})
    row = streaming.read(streaming.engines_for(64), [2], "test", 2)
    assert [one["kind"] for one in row["asked"]] == ["now", "a minute ago"]
    now, later = row["asked"]
    assert all(now[way]["right"] for way in row["reading"])
    assert later["observe"]["right"] and not later["again 2"]["right"]
    # The whole of what is sent is read again, or the question alone; but for the prompt's ends.
    assert later["again 2"]["tokens"] > later["observe"]["tokens"]
    assert later["again 2, prefix"]["tokens"] == later["observe"]["tokens"]
    assert row["reading"]["again 2"][0] == 0 < row["reading"]["observe"][0]
    assert 0 < later["observe"]["held"] <= now["observe"]["held"] <= 1
    found = streaming.summarise([row], 2)
    assert found["questions"] == {"now": 1, "a minute ago": 1}
    assert "| observe | 1.000" in streaming.markdown(found)


def test_what_tells_wrong_from_right() -> None:
    assert streaming.separation([0.9, 0.8, 0.2, 0.8], [True, True, False, False]) == 0.875
