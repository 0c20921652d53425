"""MMDU's sums by hand: both aggregations, exact answers, summaries, runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.data import Dialogue
from mmkv.eval.mmdu.judge import compare
from mmkv.eval.mmdu.rubric import UnreadableScoresError, read_scores
from mmkv.eval.mmdu.scores import (
    Verdict,
    Verdicts,
    aggregate,
    as_rows,
    exact_table,
    is_right,
    memory_table,
    overall_sums,
    score_table,
    shares,
    summarize,
)

# In the order of MMDU's tables: C, R, VP, LC, AA, IRU, and the overall score.
NAMES = (
    "Creativity",
    "Richness",
    "Visual Perception",
    "Logical Coherence",
    "Answer Accuracy",
    "Image Relationship Understanding",
    "Overall Score",
)


def dialogue(name: str, questions: int, exact: tuple[str, ...] = ()) -> Dialogue:
    references = tuple(f"answer {n}" for n in range(questions))
    return Dialogue(name, {}, ("why?",) * questions, references, (), exact)


def verdict(name: str, turn: int, *scores: int, failure: str = "") -> Verdict:
    found = dict(zip(NAMES, scores, strict=True)) if scores else None
    return Verdict(name, turn, "prompt", found, failure)


def judged() -> dict[str, Any]:
    """Return the scores of three dialogues: 2 answers judged, 1 refused, 1 lost, 2 not given."""
    verdicts = [
        verdict("a", 0, 1, 2, 3, 4, 5, 6, 10),
        verdict("a", 1, 3, 4, 1, 2, 9, 8, 2),
        verdict("b", 0, failure="refused"),
        verdict("c", 0, 9, 9, 9, 9, 9, 9, 9),  # of a dialogue without answers: not counted
    ]
    dialogues = [dialogue("a", 2), dialogue("b", 2), dialogue("c", 2)]
    return aggregate(dialogues, {"c"}, {one.key: one for one in verdicts})


def test_both_aggregations_by_hand() -> None:
    found = judged()
    assert found["headings"] == list(NAMES)
    assert (found["questions"], found["judged"]) == (6, 2)
    assert found["failures"] == {"no answer": 2, "not judged": 1, "refused": 1}
    assert found["scores"] == {
        "a": [[1, 2, 3, 4, 5, 6, 10], [3, 4, 1, 2, 9, 8, 2]],
        "b": ["refused", "not judged"],
        "c": ["no answer", "no answer"],
    }
    # Ten times the sum over 2 judged questions, or over all 6.
    sums = dict(zip(NAMES, (4, 6, 4, 6, 14, 14, 12), strict=True))
    for name, total in sums.items():
        assert found["without_failures"][name] == pytest.approx(10 * total / 2)
        assert found["failures_as_0"][name] == pytest.approx(10 * total / 6)
    # The average is that of the six headings; the overall score is none of them.
    assert found["without_failures"]["Average"] == pytest.approx(10 * 48 / 2 / 6)
    assert found["failures_as_0"]["Average"] == pytest.approx(10 * 48 / 6 / 6)
    # Dialogues are resampled: 8 of 27 times the first is not among them, once all three are it.
    assert found["overall_ci"] == [0.0, 60.0]
    assert overall_sums(found["scores"]) == [12, 0, 0]


def test_the_table_has_the_columns_of_the_paper() -> None:
    table = score_table(judged(), "a run")
    assert table.columns[:9] == ("aggregation", *"C R VP LC AA IRU Avg Overall".split())
    zero, without = table.rows
    means = "6.7 10.0 6.7 10.0 23.3 23.3 13.3 20.0".split()
    assert zero[:9] == ["failures as 0", *means]
    assert zero[9:] == ["0.0 .. 60.0", "6", "4"]
    means = "20.0 30.0 20.0 30.0 70.0 70.0 40.0 60.0".split()
    assert without[:9] == ["without failures", *means]
    assert without[10:] == ["2", "0"]


def test_a_run_without_a_verdict_has_no_mean() -> None:
    found = aggregate([dialogue("a", 1)], {"a"}, {})
    assert found["without_failures"] is None and found["overall_ci"] == [0.0, 0.0]
    assert found["failures_as_0"]["Average"] == 0.0
    assert score_table(found, "t").rows[1][1:9] == ["-"] * 8
    assert aggregate([], set(), {})["overall_ci"] is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("red car", True),
        ("  red\n car ", True),
        ("red", False),
        ("redcar", False),
        ("Red car", False),
        ("red car.", False),
        ("car red", False),
    ],
)
def test_an_exact_answer_is_the_whole_reference(answer: str, right: bool) -> None:
    assert is_right(answer, "red car") is right
    assert is_right("red car", answer) is right


def test_shares_count_questions_by_kind_and_resample_dialogues() -> None:
    dialogues = [
        dialogue("a", 3, ("cell", "count", "cell")),
        dialogue("b", 2, ("cell", "cell")),
        dialogue("c", 1, ("count",)),
        dialogue("gone", 1, ("count",)),
    ]
    answers = {
        "a": ["answer 0", "wrong", "answer 2"],
        "b": ["answer 1", "answer 1"],
        "c": ["answer  0"],
    }
    found = as_rows(shares(dialogues, answers))
    assert [(row["kind"], row["right"], row["of"]) for row in found] == [
        ("cell", 3, 4),
        ("count", 1, 2),
        ("all", 4, 6),
    ]
    assert [row["share"] for row in found] == [0.75, 0.5, pytest.approx(2 / 3)]
    # Of two dialogues with 2 and 1 of 2, a quarter of resamples is either twice.
    assert found[0]["ci"] == [0.5, 1.0] and found[1]["ci"] == [0.0, 1.0]
    assert exact_table(found, "t").rows[0] == ["cell", "3", "4", "0.750", "0.500 .. 1.000"]
    assert shares([dialogue("a", 1)], {"a": ["answer 0"]}) == []


def turn(**changes: Any) -> dict[str, Any]:
    usual = {"finish_reason": "eos", "generated": 4, "tokens_seen": 10, "entries_kept": 8}
    return {**usual, "entries_evicted": 2, "kv_bytes": 1024, **changes}


def test_a_run_is_summed_up_at_the_end_of_each_dialogue() -> None:
    def row(answers: list[str], turns: list[dict[str, Any]] | None) -> dict[str, Any]:
        talk = [{"value": text} for answer in answers for text in ("why?", answer)]
        return {"conversations": talk} | ({} if turns is None else {"mmkv": {"turns": turns}})

    dialogues = [dialogue(n, q, ("cell",) * q) for n, q in (("a", 2), ("b", 1), ("c", 1), ("d", 3))]
    rows = {
        "a": row(
            ["answer 0", "no"],
            [
                turn(kv_bytes=9216, finish_reason="length"),
                turn(generated=8, tokens_seen=30, entries_kept=12, entries_evicted=18),
            ],
        ),
        "b": row(
            ["answer 0"], [turn(generated=6, tokens_seen=20, kv_bytes=3072, finish_reason="stop")]
        ),
        "c": row(["answer 0"], None),  # another program's, with answers and no numbers
    }
    found = summarize(dialogues, rows, failed=1)
    assert (found["dialogues"], found["failed"], found["questions"]) == (3, 1, 4)
    assert found["cut_at_max_new_tokens"] == 1 and found["answer_tokens_mean"] == 6.0
    assert (found["tokens_seen_mean"], found["tokens_seen_max"]) == (25.0, 30)
    assert (found["entries_kept_mean"], found["entries_evicted_mean"]) == (10.0, 10.0)
    assert (found["kv_bytes_mean"], found["kv_bytes_max"]) == (2048.0, 9216)
    assert [(s["kind"], s["right"], s["of"]) for s in found["exact"]] == [
        ("cell", 3, 4),
        ("all", 3, 4),
    ]
    table = memory_table(found, "t").rows
    assert table[0] == ["tokens seen", "25.0", "30"] and table[1][1] == table[2][1] == "10.0"
    assert table[3][1:] == ["2.0 KiB", "9.0 KiB"]
    empty = summarize([], {}, 0)
    assert empty["tokens_seen_mean"] == 0.0 and empty["tokens_seen_max"] == 0


def run_folder(folder: Path, scores: dict[str, list[Any]], **more: Any) -> Path:
    """Write the scores of a judged run whose overall means are given beside its table."""
    place = folder / "judge-x"
    place.mkdir(parents=True)
    cells = [cell for row in scores.values() for cell in row]
    good = [cell for cell in cells if not isinstance(cell, str)]

    def means(count: int) -> dict[str, float]:
        made = {n: 10 * sum(c[i] for c in good) / count for i, n in enumerate(NAMES)}
        return {**made, "Average": 1.0}

    page = {
        "judge": "x",
        "questions": len(cells),
        "judged": len(good),
        "failures_as_0": means(len(cells)),
        "without_failures": means(len(good)),
        "scores": scores,
        **more,
    }
    (place / "scores.json").write_text(json.dumps(page))
    return folder


def test_runs_are_compared_with_the_first_over_dialogues_that_both_have(tmp_path: Path) -> None:
    def cell(overall: int) -> list[int]:
        return [1] * 6 + [overall]

    whole = {f"d{n}": [cell(8)] for n in range(5)} | {"other": [cell(8)] * 2}
    first = run_folder(tmp_path / "first", whole)
    lower = {f"d{n}": [cell(6)] for n in range(4)} | {"d4": ["refused"], "other": [cell(1)]}
    second = run_folder(
        tmp_path / "second",
        lower,
        run={"policy": "snapkv", "budget": {"value": 64.0, "unit": "entries"}},
    )
    table = compare([first, second])
    assert table.title == "MMDU, failures as 0"
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert rows[0]["vs first"] == "100.0 %" and rows[0]["p"] == "-" and rows[0]["failures"] == "0"
    # (4 x 6 + 0 + 1) / 6 of 8.
    assert rows[1]["Overall"] == "41.7" and rows[1]["vs first"] == "52.1 %"
    assert rows[1]["policy"] == "snapkv" and rows[1]["budget"] == "64 entries"
    assert rows[1]["failures"] == "1"
    # All five differences have one sign: 2 arrangements of 32.
    assert float(rows[1]["p"]) == pytest.approx(2 / 32, abs=0.01)
    without = compare([first, second], without_failures=True)
    assert without.title == "MMDU, without failures"
    found = dict(zip(without.columns, without.rows[1], strict=True))
    assert found["Overall"] == "50.0" and found["vs first"] == "62.5 %"  # (4 x 6 + 1) / 5 of 8
    with pytest.raises(InputError, match=r"holds no scores\.json"):
        compare([tmp_path])


def test_judges_that_differ_are_named(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", {"d": [[5] * 7]})
    two = run_folder(tmp_path / "two", {"e": [[5] * 7]}, judge="y")
    table = compare([one, two])
    assert "different judges" in table.title
    assert table.rows[1][-1] == "-"  # no dialogue in common


FIVES = dict.fromkeys(NAMES, 5)


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        ("I'm sorry, I can't help with that.", "no scores", "holds no dictionary"),
        ("7 7 } {'Creativity': 1", "no scores", "holds no dictionary"),
        ("{1, 2}", "bad scores", "no dictionary"),
        ("{[]: 1}", "bad scores", "cannot be read"),
        ("{'Creativity': __import__('os').abort()}", "bad scores", "cannot be read"),
        ("{" + "(" * 5000 + "}", "bad scores", "no dictionary"),
        ("{" + "-" * 1900 + "1: 1}", "bad scores", "cannot be read"),
        (f"{FIVES} {{}}", "bad scores", "Creativity is missing"),
        (str(dict.fromkeys(NAMES[:-1], 5)), "bad scores", "Overall Score is missing"),
        (str(FIVES | {"Richness": 0}), "bad scores", "Richness is '0', no integer from 1 to 10"),
        (str(FIVES | {"Richness": 11}), "bad scores", "Richness is '11'"),
        (str(FIVES | {"Richness": True}), "bad scores", "Richness is 'True'"),
        (str(FIVES | {"Richness": 5.0}), "bad scores", r"Richness is '5\.0'"),
        (str(FIVES | {"Richness": "9"}), "bad scores", "Richness is '9'"),
        (str(FIVES).replace("}", " " * 2000 + "}"), "bad scores", "no dictionary"),
    ],
)
def test_replies_without_usable_scores(reply: str, kind: str, says: str) -> None:
    with pytest.raises(UnreadableScoresError, match=says) as error:
        read_scores(reply)
    assert error.value.kind == kind and "(" not in str(error.value)  # words, not arguments


def test_the_last_dictionary_of_a_reply_counts_whatever_its_spelling() -> None:
    given = dict(zip(NAMES, (1, 10, 3, 4, 5, 6, 7), strict=True))
    early = dict.fromkeys(NAMES, 2)
    assert read_scores(f"At first {early}, then {given}.") == given
    assert read_scores(f"```json\n{json.dumps(given, indent=2)}\n```") == given
    spelled = {name.replace(" ", "_").upper(): value for name, value in given.items()}
    assert read_scores(json.dumps(spelled)) == given


def test_verdicts_come_back_and_a_damaged_line_is_asked_again(tmp_path: Path) -> None:
    path, judge = tmp_path / "journal.jsonl", {"model": "x"}
    made = Verdicts(path, judge)
    made.add(verdict("a", 1, *[5] * 7))
    made.add(verdict("a", 2, failure="refused"))
    path.write_text(path.read_text() + '{"dialogue": "a", "odd": 1}\n')
    again = Verdicts(path, judge)
    assert set(again.by_key) == set(made.by_key) == {("a", 1), ("a", 2)}
    assert again.by_key["a", 1].scores == dict.fromkeys(NAMES, 5)
    assert again.by_key["a", 2].failure == "refused"
    with pytest.raises(InputError, match="another judge"):
        Verdicts(path, {"model": "y"})
    path.write_text(path.read_text().partition("\n")[2])  # nobody says who judged
    with pytest.raises(InputError, match="another judge"):
        Verdicts(path, judge)
