"""The program behind the table of eval/notes/mmdu.md, on the first dialogue of the set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv.eval.mmdu import small as mmdu_small
from mmkv.resources import bundled_dialogues, bundled_model


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
def test_rows_are_counted_as_a_session_answers(tmp_path: Path, monkeypatch: Any) -> None:
    folder = bundled_dialogues()
    [dialogue, *_] = json.loads((folder / "benchmark.json").read_text())
    spoken = [turn["value"] for turn in dialogue["conversations"]]
    pictures = iter(dialogue["image"])
    engine = mmkv.Engine.from_pretrained(str(bundled_model()), policy="streamingllm", budget=16)
    session, right = engine.session(), 0
    for question, reference in zip(spoken[::2], spoken[1::2], strict=True):
        before, *after = question.split("<ImageHere>")
        parts = [{"type": "text", "text": before}]
        for text in after:
            parts.append({"type": "image", "image": str(folder / next(pictures))})
            parts.append({"type": "text", "text": text})
        answer = "".join(session.send(parts))
        right += answer.split() == reference.split()

    monkeypatch.setattr(mmdu_small, "ROWS", (("full", None), ("streamingllm", 16)))
    mmdu_small.main(["--limit", "1", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "mmdu-small.json").read_text())
    full, evicting = written["results"]
    assert (full["policy"], full["budget"]) == ("full", None)
    assert full["of"] == evicting["of"] == len(spoken) // 2
    assert evicting["right"] == right < full["right"]
    rows = engine.spec.num_layers * engine.spec.num_kv_heads
    assert evicting["entries_kept_mean"] <= 16 * rows < full["entries_kept_mean"]


def test_a_failed_command_ends_the_program(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        mmdu_small.answered("streamingllm", 0, 1)
    assert ended.value.code and "budget" in capsys.readouterr().err
