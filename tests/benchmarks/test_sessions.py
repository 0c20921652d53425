"""Sessions and the endless stream: answers checked by text and pixels, stopping and resuming."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import session_stream as dialogue_stream
from benchmarks import session_tasks as dialogue_tasks
from benchmarks.domains import maker
from benchmarks.quality.methods import ComparedMethod, Comparison
from benchmarks.quality.run import ComparisonRuns
from benchmarks.session_tasks import Asked
from benchmarks.sessions import main
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.data.dialogues import scene_example, sparse, stream
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.data.scenes import SceneClip, SceneTurn, render
from mmkv.training.measure.record import Journal
from mmkv.training.measure.teacher_forced import DialogueRun, read, spans
from tests.support.tiers import slow_but
from tests.training.data.test_scenes import read_cells

MODEL = str(bundled_model())
TEXT, SCENES = "sessions:text:6:6:5", "sessions:scenes:6:4:3"
FACT = re.compile(r"The special magic number for (\w+) is: (\d{4})\.")


def made(name: str, index: int) -> Any:
    make = maker(MODEL, name)
    assert make is not None
    return make(index)


def test_text_answers_are_the_values_stated_last() -> None:
    tokenizer = load_processor(MODEL).tokenizer
    kinds: Counter[str] = Counter()
    for index in range(12):
        dialogue = made(TEXT, index)
        ids, labels = (dialogue.example[key][0] for key in ("input_ids", "labels"))
        asked: set[tuple[str, str]] = set()
        for note, cut, (start, stop) in zip(
            dialogue.notes, dialogue.example["cuts"], spans(labels.tolist()), strict=True
        ):
            before = tokenizer.decode(ids[:cut])
            (name,) = re.findall(r"for (\w+) is:$", tokenizer.decode(ids[cut:start]))
            values: list[str] = []
            for who, value in FACT.findall(before):
                if who == name and value not in values:
                    values.append(value)
            answer = tokenizer.decode(ids[start:stop])
            assert answer == f" {values[-1]}" and tokenizer.decode(list(note.answer)) == answer
            # The last of the sessions so far is that in which it is asked.
            new = f"for {name} is: {values[-1]}.\n" in before.split("\nSession ")[-1]
            replaced = len(values) > 1
            assert note.kind == ("updated" if replaced else "new" if new else "kept")
            stale = tokenizer.decode(list(note.stale)) if note.stale else ""
            assert stale == (f" {values[-2]}" if replaced else "")
            assert (name, answer) not in asked
            asked.add((name, answer))
            kinds[note.kind] += 1
        assert len({name for name, _ in FACT.findall(before)} - {name for name, _ in asked}) > 0
    assert min(kinds.values()) > 5 and len(kinds) == 3


def test_scene_answers_match_the_newest_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = load_processor(MODEL).tokenizer, []
    plain = dialogue_tasks.scene_document
    monkeypatch.setattr(
        dialogue_tasks, "scene_document", lambda t, k: seen.append(t) or plain(t, k)
    )
    kinds: Counter[str] = Counter()
    for index in range(12):
        dialogue = made(SCENES, index)
        shown: dict[int, list[list[list[str]]]] = {}
        asked, now = set(), ()
        for turn, note in zip(seen[index], dialogue.notes, strict=True):
            now = turn.captions or now  # of the session in which it is asked
            for words, picture in zip(turn.captions, turn.pictures, strict=True):
                if words != dialogue_tasks.IGNORE:
                    number = int(re.findall(r"\d+", words)[0])
                    shown.setdefault(number, []).append(read_cells(render(picture)))
            row, column, number = map(int, re.findall(r"\d+", turn.question.text))
            answer = shown[number][-1][row - 1][column - 1]
            assert turn.question.answer == answer != "nothing"
            assert tokenizer.decode(list(note.answer)) == f"{answer}<|im_end|>"
            replaced = len(shown[number]) > 1
            new = f"picture {number}:" in now
            assert note.kind == ("updated" if replaced else "new" if new else "kept")
            # A model that remembers nothing says "nothing" too, so that is no old value.
            old = shown[number][-2][row - 1][column - 1] if replaced else "nothing"
            assert bool(note.stale) == (old != "nothing")
            if note.stale:
                assert tokenizer.decode(list(note.stale)) == old
                assert old.split()[0] != answer.split()[0]
            place = (number, len(shown[number]), row, column)
            assert place not in asked
            asked.add(place)
            kinds[note.kind] += 1
        cuts, ids = dialogue.example["cuts"], dialogue.example["input_ids"][0]
        for cut, turn in zip(cuts, [t for t in seen[index] if t.pictures], strict=True):
            assert tokenizer.decode(ids[cut : cut + 60]).startswith(turn.question.text)
    assert min(kinds.values()) > 10 and len(kinds) == 3


def test_stale_answers_turn_to_the_old_value_at_the_first_wrong_token() -> None:
    note = Asked("updated", (1, 2, 3, 9), (1, 7, 5))
    assert note.generated_stale([[1, 7]]) and note.generated_stale([[1, 7], [2, 5]])
    assert not note.generated_stale([]) and not note.generated_stale([[1, 8]])
    assert not note.generated_stale([[2, 5]])  # the old value was left behind at index 1
    assert not note.generated_stale([[3, 7]])
    assert not Asked("new", (1, 2), ()).generated_stale([[0, 4]])


METHODS = ["--method", "streamingllm", "--method", "snapkv", "--name", "d", "--output"]


@pytest.mark.long(reason="as of test_quality.py: the same run twice, once cut short")
def test_killed_sessions_give_the_same_files(tmp_path: Path, capfd: Any) -> None:
    options = [MODEL, "--domain", "scenes", "--budgets", "24", "1/3", *METHODS]
    main([*options, str(tmp_path / "whole"), "--limit", "3"])
    methods = (ComparedMethod.parse("streamingllm"), ComparedMethod.parse("snapkv"))
    journal = tmp_path / "parts" / "d.runs.jsonl"
    journal.parent.mkdir()
    compared = Comparison(MODEL, "float32", methods, ("24", "1/3"))
    ComparisonRuns(compared, Journal(journal)).of(SCENES, 2)
    journal.write_text(journal.read_text() + '{"where": "an unfin')
    main([*options, str(tmp_path / "parts"), "--limit", "3"])
    assert "10 runs are in" in capfd.readouterr().err
    whole, parts = (
        json.loads((tmp_path / name / "d.json").read_text())["results"]
        for name in ("whole", "parts")
    )
    assert whole == parts and (tmp_path / "parts/d.png").stat().st_size > 5000
    # The kinds together are all of the questions.
    for cell, row in whole["kinds"].items():
        method, _, budget = cell.partition(" at ")
        (accuracy,) = (
            r["accuracy"]["value"]
            for r in whole["page"]["rows"]
            if (r["method"], r["budget"]) == (method, budget or "1")
        )
        right = sum(row[kind]["value"] * whole["asked"][kind] for kind in row)
        assert right == pytest.approx(accuracy * sum(whole["asked"].values()))
    assert whole["bytes"]["full"] > 2 * whole["bytes"]["streamingllm at 24"]
    assert "| updated: generated the replaced value | 24 |" in (tmp_path / "whole/d.md").read_text()


def test_the_stream_asks_what_its_frames_show() -> None:
    beginning = read_cells(render(dialogue_stream.first_picture()))
    for index in range(12):
        turn = dialogue_stream.clip_turn(index)
        (clip,) = (p for p in turn.pictures if isinstance(p, SceneClip))
        row, column = map(int, re.findall(r"(?:row|column) (\d+)", turn.question.text))
        frame = clip.frames[0 if turn.question.text.endswith("start?") else -1]
        assert turn.question.answer == read_cells(render(frame))[row - 1][column - 1]
        assert turn == dialogue_stream.clip_turn(index) != dialogue_stream.clip_turn(index + 1)
        asked = dialogue_stream.beginning_turn(index).question
        row, column, number = map(int, re.findall(r"\d+", asked.text))
        assert number == 1 and asked.answer == beginning[row - 1][column - 1]


@pytest.mark.long(reason="as of test_quality.py: the same run twice, once cut short")
def test_a_stopped_stream_continues_with_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second method, after a checkpoint and some clips more."""
    options = [MODEL, *"--domain stream --budgets 24 --limit 20 --full-clips 10".split(), *METHODS]
    monkeypatch.setattr(dialogue_stream, "_SAVE", 8)
    main([*options, str(tmp_path / "whole")])
    plain, calls = dialogue_stream.predicts_answer, []

    def stopping(*arguments: Any) -> bool:
        calls.append(arguments)
        if len(calls) == 45:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(dialogue_stream, "predicts_answer", stopping)
    with pytest.raises(SystemExit, match=r"stopped; the same command continues from .*jsonl"):
        main([*options, str(tmp_path / "parts")])
    assert not (tmp_path / "parts/d.json").exists()
    assert len(list((tmp_path / "parts").glob("*.session"))) == 3
    calls[:] = [None] * 100
    main([*options, str(tmp_path / "parts")])
    # 10 + 20 clips were there, of the last 20 the first 8; and 3 + 1 forks ask at every eighth.
    assert len(calls) - 100 == 12 + 1
    assert not list((tmp_path / "parts").glob("*.session"))
    whole, parts = (
        json.loads((tmp_path / name / "d.json").read_text())["results"]
        for name in ("whole", "parts")
    )
    assert whole == parts
    rows = whole["rows"]
    assert rows["full"]["clips"] == 10 and rows["snapkv at 24"]["clips"] == 20
    # What copies were asked about the beginning is no part of the stream.
    read_dialogues = [
        scene_example([dialogue_stream.clip_turn(index)], load_processor(MODEL).tokenizer)
        for index in range(20)
    ]
    tokens = sum(example["labels"].numel() for example in read_dialogues)
    assert rows["snapkv at 24"]["tokens_seen"] == tokens > 1000
    # The full cache is as old as half of what it read; recency is as old as half its budget.
    assert rows["full"]["median_age"] == pytest.approx(rows["full"]["tokens_seen"] / 2, abs=2)
    assert rows["streamingllm at 24"]["median_age"] == pytest.approx(12, abs=3)
    for method in ("streamingllm", "snapkv"):
        assert rows[f"{method} at 24"]["most_entries"] <= 24 * 18
        assert rows[f"{method} at 24"]["most_bytes"] < rows["full"]["most_bytes"] / 4
    assert (tmp_path / "whole/d.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--domain", "stream", "--budgets", "1/8"], "a stream has no end"),
        (["--domain", "stream", "--workers", "2"], "leave out --workers"),
        (["--sessions", "0"], "at least one session"),
        (["--full-clips", "0"], "are at least 1"),
        (["--domain", "text", "--things", "30"], "at most 20 have names"),
        (["--budgets", "0"], "budget '0': give a share"),
        (["--budgets", "1/0"], "budget '1/0': give a share"),
    ],
)
def test_mistakes_give_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message) as caught:
        main([MODEL, "--output", str(tmp_path), "--limit", "1", *options])
    assert "\n" not in str(caught.value)


# The bundled model answers correctly over thousands of tokens with few entries.


def run(turns: list[SceneTurn], policy: str, budget: float | None) -> DialogueRun:
    engine = Runtime.from_pretrained(bundled_model(), policy=policy, dtype="float32", device="cpu")
    example = scene_example(turns, build_tokenizer())
    labels = example.pop("labels")[0]
    return read(engine, example, labels, budget)


def latest(turns: list[SceneTurn], found: DialogueRun) -> float:
    """Return the share of the questions about the newest pictures that were answered right."""
    right = [
        answer.right for turn, answer in zip(turns, found.answers, strict=True) if turn.pictures
    ]
    return sum(right) / len(right)


# Answers come from the synthetic scenes, whose rules are tested against pixels (test_dialogues).
@pytest.mark.parametrize(
    ("policy", "budget"),
    slow_but(
        [("dbtrimkv+48", 64.0)], [("full", None), ("dbtrimkv+48", 64.0)], "reads 2,000 tokens"
    ),
)
def test_a_stream_of_2000_tokens_is_followed(policy: str, budget: float | None) -> None:
    turns = stream(3, "heldout", 32)
    found = run(turns, policy, budget)
    assert found.tokens_seen > 2000 and latest(turns, found) >= 0.9
    if budget is not None:
        assert found.evicted > 20 * found.entries
        assert found.entries <= budget * len(found.per_row) * len(found.per_row[0])


@pytest.mark.slow(reason="reads 2,000 tokens")
def test_one_of_2000_tokens_of_distractors_is_remembered() -> None:
    turns = sparse(5, "heldout", 160, 2, 8, search=False)
    found = run(turns, "full", None)
    assert found.tokens_seen > 2000
    assert sum(answer.right for answer in found.answers) >= 7
