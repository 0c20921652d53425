"""A row of training data that no tokenizer reads is skipped, counted and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv.resources import bundled_model
from mmkv.training.data.conversations import RowFile
from mmkv.training.data.examples import examples

GOOD: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "red"},
        ]
    },
    "llava": {
        "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "red"}]
    },
    "mmdu": {
        "conversations": [{"from": "user", "value": "what?"}, {"from": "assistant", "value": "red"}]
    },
    "text": {"text": "red and blue"},
}


def texts_of(row: Any) -> list[tuple[Any, Any]]:
    """Return (holder, key) of every text that a model would read."""
    if isinstance(row, list):
        return [found for inner in row for found in texts_of(inner)]
    return [
        found
        for key, inner in row.items()
        for found in ([(row, key)] if isinstance(inner, str) else texts_of(inner))
        if not isinstance(inner, str) or key in ("text", "value", "content")
    ]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(sorted(GOOD)),
    st.characters(categories=["Cs"]),
    st.text(max_size=4),
    st.sampled_from([".jsonl", ".json"]),
    st.data(),
)
def test_half_a_character_costs_one_row(
    tmp_path: Path, kind: str, odd: str, around: str, suffix: str, data: st.DataObject
) -> None:
    row = json.loads(json.dumps(GOOD[kind]))
    holder, key = data.draw(st.sampled_from(texts_of(row)))
    holder[key] = around + odd + around
    rows = [GOOD[kind], row, GOOD[kind]]
    file = tmp_path / f"rows{suffix}"
    lines = [json.dumps(each) for each in rows]
    file.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    said: list[str] = []
    read = RowFile(file, kind, report=said.append)
    assert len(read) == 2 and read.broken == 1
    assert f"{file}:2: skipped" in said[0] and "half of a character" in said[0]
    assert "skipped 1 of 3 rows" in said[1]
    "".join(said).encode()


def test_a_run_goes_on_without_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    odd = json.loads(json.dumps(GOOD["chat"]))
    odd["messages"][1]["content"] = "\udc80"
    file.write_text("\n".join(json.dumps(row) for row in (odd, GOOD["chat"])))
    said: list[str] = []
    made = examples(str(bundled_model()), [str(file)], 4, 0, report=said.append)
    assert all(made[n]["input_ids"].numel() for n in range(4))
    assert any("skipped" in line for line in said)


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_whole_rows_are_kept(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    row = json.dumps(GOOD[kind], ensure_ascii=False).replace("red", "\U0001f600 ä 漢")
    file.write_text(row, encoding="utf-8")
    assert RowFile(file, kind).broken == 0


@pytest.mark.parametrize("odd", [["image"], {"image": 1}])
def test_a_part_whose_type_is_no_text_costs_one_row(tmp_path: Path, odd: Any) -> None:
    row = json.loads(json.dumps(GOOD["chat"]))
    row["messages"][0]["content"][0]["type"] = odd
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (GOOD["chat"], row)))
    said: list[str] = []
    made = examples(str(bundled_model()), [str(file)], 4, 0, report=said.append)
    assert all(made[n]["input_ids"].numel() for n in range(4))
    assert any("skipped" in line for line in said)
