"""LongMemEval's judge: what it is asked, and the shares that follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmkv.eval.long_text.judge import main
from tests.eval.mmdu.test_judge import FakeJudge
from tests.support.long_text_rows import longmemeval, write_all


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Return a samples file as lmms-eval writes it, over data in the published form."""
    write_all(tmp_path / "data")
    rows = [
        {
            "doc_id": at,
            "input": f"longmemeval_s.json, row {at + 1}",
            "filtered_resps": f"reply {at}\u2028",  # a line's end to str.splitlines, not to JSON
        }
        for at in range(4)
    ]
    path = tmp_path / "1_samples_longmemeval_s_local.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def arguments(samples: Path, url: str) -> list[str]:
    data = str(samples.parent / "data")
    options = ["--data", data, "--base-url", url, "--judge-model", "judge", "--yes"]
    return [str(samples), *options, "--output", str(samples.parent / "judged")]


def test_answers_are_judged_by_type(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first judge fails at one question; the next run asks that one alone."""

    def behave(prompt: str, before: int) -> str:
        if "reply 3" in prompt and not before:
            return "rejected"
        return "no" if "reply 1" in prompt else "yes"

    with FakeJudge(behave) as judge:
        assert main(arguments(samples, judge.url)) == 1
        assert "1 questions have no verdict; run the same" in capsys.readouterr().err
        assert main(arguments(samples, judge.url)) == 0
    first, *_ = judge.bodies
    assert (first["temperature"], first["max_tokens"], first["n"]) == (0, 10, 1)
    prompts = {prompt.split("reply ")[-1][0]: prompt for prompt in judge.asked}
    assert sorted(judge.asked.values()) == [1, 1, 1, 2]
    assert "Correct Answer: 3\n\nModel Response: reply 0" in prompts["0"]
    assert "unanswerable question" in prompts["2"] and "Rubric: The user likes" in prompts["3"]
    page = json.loads((samples.parent / "judged" / "scores.json").read_text())
    assert page["accuracy"] == 3 / 4 and page["abstention"] == 1
    # An abstention counts for its type, too: one of two.
    assert page["by_type"]["single-session-user"] == [0.5, 2]
    assert page["task_averaged"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert "| mean of the types | 83.3 % | 4 |" in capsys.readouterr().out


def test_samples_of_other_data_are_refused(
    samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = longmemeval()
    file = samples.parent / "data" / "longmemeval" / "longmemeval_s.json"
    file.write_text(json.dumps(rows[:2]))
    assert main(arguments(samples, "http://127.0.0.1:9/v1")) == 1
    assert "document 2 differs; check --data" in capsys.readouterr().err
