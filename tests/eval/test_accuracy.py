"""Programs that count exact answers: what is right is the whole answer, and the intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmkv.eval.accuracy import scenes
from mmkv.training.data.scenes import SceneTurn


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    # Newcombe 1998, table I, method 3 (score without continuity correction).
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_the_published_interval(right: int, total: int, low: float, high: float) -> None:
    assert scenes.wilson(right, total) == pytest.approx((low, high), abs=5e-5)


def test_part_of_an_answer_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "red car" for "red", and the other way round; white space at the ends alone is passed over.

    Six ways to answer by turns, the first two of them right.
    """
    asked: list[SceneTurn] = []

    def answer(turns: list[SceneTurn]) -> list[str]:
        replies = []
        for turn in turns:
            said = turn.question.answer
            ways = [said, f" {said}\n", f"{said} car", f"the {said}", said[:-1], said.upper() + "!"]
            replies.append(ways[len(asked) % 6])
            asked.append(turn)
        return replies

    monkeypatch.setattr(scenes, "transformers_answerer", lambda _: answer)
    output = tmp_path / "scenes.json"
    arguments = ["scenes", "--samples", "18", "--dialogues", "2", "--output", str(output)]
    monkeypatch.setattr("sys.argv", arguments)
    scenes.main()
    assert len(asked) == 18 + 2 * 6
    rows = {row["kind"]: row for row in json.loads(output.read_text())["results"]}
    alone = rows["all single-picture"]
    assert (alone["right"], alone["of"]) == (6, 18) and alone["share"] == pytest.approx(1 / 3)
    assert alone["ci"] == pytest.approx([0.1628, 0.5625], abs=1e-4)
    wanted: dict[str, list[bool]] = {}
    for at, turn in enumerate(asked):
        kind = ("dialogue " if at >= 18 else "") + turn.question.kind
        wanted.setdefault(kind, []).append(at % 6 < 2)
    del rows["all single-picture"]
    assert {kind: (row["right"], row["of"]) for kind, row in rows.items()} == {
        kind: (sum(hits), len(hits)) for kind, hits in wanted.items()
    }
