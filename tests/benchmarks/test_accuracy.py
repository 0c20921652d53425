"""Programs that count exact answers: what is right is the whole answer, and the intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.accuracy import llava as accuracy
from benchmarks.accuracy import scenes
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.training.data.scenes import Question, SceneTurn
from mmkv.training.llava.pictures import EasyVQA, PictureTurn, Shown, talk
from mmkv.training.measure.teacher_forced import FullCache

pytest_plugins = ("tests.support.llava_fixtures",)


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


# ``python -m benchmarks.accuracy.llava``: how many questions about pictures a LLaVA answers.


def test_accuracy_is_counted_by_picture_and_budget(
    joined: Path, easy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    given = f"{joined} --easy-vqa {easy} --talks 3 --turns 2 --method snapkv --budgets 1/2 1/4"
    given += f" --dtype float32 --output {file}"
    monkeypatch.setattr("sys.argv", ["llava", *given.split()])
    accuracy.main()
    rows = json.loads(file.read_text())["results"]
    runs = ["pictures", "blank pictures", "other pictures", "most frequent answer"]
    runs += ["snapkv at 1/2", "snapkv at 1/4"]
    assert list(dict.fromkeys(row["run"] for row in rows)) == runs
    held = EasyVQA.of(easy, "heldout")
    turns = [turn for n in range(3) for turn in talk(10**6 + n, "heldout", held, 2)]
    counts = {row["run"]: row["of"] for row in rows if row["kind"] == "all"}
    assert counts == dict.fromkeys(runs, len(turns))


def test_a_talk_is_fed_as_the_checkpoints_processor_makes_it(joined: Path, easy: Path) -> None:
    processor: Any = load_processor(joined)
    turns = talk(0, "heldout", EasyVQA.of(easy, "heldout"), 3)
    shown = accuracy.pictures_of(turns)
    inputs, labels = accuracy.inputs_of(processor, turns, shown)
    first = turns[0]
    assert first.shown is not None
    asked = [{"type": "image"}, {"type": "text", "text": first.question.text}]
    text = processor.template.render([{"role": "user", "content": asked}], opening=True)
    theirs = processor.encode(text, shown[:1])
    length = theirs["input_ids"].shape[1]
    assert torch.equal(inputs["input_ids"][:, :length], theirs["input_ids"])
    assert torch.equal(inputs["pixel_values"][:1], theirs["pixel_values"])
    assert labels[:length].max() == -100 and labels[length] >= 0


def test_answers_are_right_as_transformers_generates_them(joined: Path, easy: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(joined, dtype=torch.float32)
    processor: Any = load_processor(joined)
    turns = talk(0, "heldout", EasyVQA.of(easy, "heldout"), 3)
    inputs, labels = accuracy.inputs_of(processor, turns, accuracy.pictures_of(turns))
    with torch.no_grad():
        best = model(**inputs).logits[0].argmax(-1)
    starts = [at for at in range(1, len(labels)) if labels[at] >= 0 > labels[at - 1]]
    # Answers that this model gives, and one that it does not.
    given = torch.where(labels >= 0, best.roll(1), labels)
    given[starts[1]] = (given[starts[1]] + 1) % 256
    engine = Runtime.from_pretrained(str(joined), policy="full", dtype="float32", device="cpu")
    made = engine.family.turn(inputs, 0, engine.device)
    rights = accuracy.rights_of(FullCache.of(engine, made, given), given)
    assert rights == [index != 1 for index in range(len(starts))]


def test_other_pictures_come_from_a_talk_with_as_many() -> None:
    one, two = ([PictureTurn(Question("cell", "?", "a"), Shown(("frog",)))] * n for n in (1, 2))
    assert accuracy.partners([one, two, two, one, two]) == [3, 2, 4, 0, 1]
    assert accuracy.partners([one, two]) == [0, 1]
    counted = accuracy.by_kind(two, [True, False])
    assert counted == {"cell": [1, 2], "all": [1, 2]}
    three = [PictureTurn(Question("cell", "?", answer)) for answer in ("a", "b", "a")]
    assert accuracy.constant([three, three[:1]]) == [
        {"cell": [2, 3], "all": [2, 3]},
        {"cell": [1, 1], "all": [1, 1]},
    ]
