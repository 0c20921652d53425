"""Judging MMDU with a fake judge that answers, refuses, stalls, limits and misreports."""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mmkv.eval.mmdu import client
from mmkv.eval.mmdu.data import AnswerFolder, Dialogue, read_benchmark
from mmkv.eval.mmdu.rubric import SCORES, judge_prompt
from mmkv.resources import bundled_dialogues
from tests.support.fake_judge import FakeJudge, grades

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

FOLDER = bundled_dialogues()
DIALOGUES, _ = read_benchmark(FOLDER / "benchmark.json", limit=5)
QUESTIONS = sum(len(dialogue.questions) for dialogue in DIALOGUES)
FIVE = ("--limit", "5")
HANGS = 600  # seconds after which nothing can be waited for any more, however busy a machine is


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long waits, and no proxy between this process and its own server."""
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.02)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Return the answers that some model could have given."""
    folder = tmp_path / "answers"
    for dialogue in DIALOGUES:
        AnswerFolder(folder).save(dialogue, answers_of(dialogue), [])
    return folder


def answers_of(dialogue: Dialogue) -> list[str]:
    # No two alike, for the fake judge knows a question by its text alone.
    return [f"{answer} ({dialogue.id}, {n})" for n, answer in enumerate(dialogue.references)]


def prompts() -> list[tuple[str, int, str]]:
    return [
        (d.id, turn, judge_prompt(question, reference, answer))
        for d in DIALOGUES
        for turn, (question, reference, answer) in enumerate(
            zip(d.questions, d.references, answers_of(d), strict=True)
        )
    ]


def judge_arguments(answers: Path, url: str, *more: str) -> list[str]:
    return [
        "mmdu",
        "judge",
        "--answers",
        str(answers),
        "--base-url",
        url,
        "--judge-model",
        "fake/judge-1",
        *FIVE,
        *more,
    ]


def scores(answers: Path) -> dict[str, Any]:
    return json.loads((answers / "judge-fake-judge-1" / "scores.json").read_text())


@pytest.fixture
def judge(mmkv: Callable[..., Ran], answers: Path) -> Callable[..., Ran]:
    return lambda url, *more: mmkv(*judge_arguments(answers, url, "--yes", "--quiet", *more))


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("denied", "check the key"),
        ("lost", "--base-url"),
        ("redirect", "refuses: HTTP 302"),
        ("quota", "account is empty"),
        ("come back tomorrow", "86,400 s"),
    ],
)
def test_permanent_errors_end_the_run(
    judge: Callable[..., Ran], problem: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret\n")
    with FakeJudge(lambda *_: problem) as fake:
        ran = judge(fake.url, "--api-key-env", "MY_KEY", "--workers", "1")
        assert says in ran.error_line() and ran.code == 1
        assert fake.keys == ["Bearer sk-secret"] and "sk-secret" not in ran.err + ran.out


def test_requests_hold_the_prompt_and_all_pictures_of_the_dialogue(
    judge: Callable[..., Ran], answers: Path
) -> None:
    extra = '{"temperature": 0, "max_tokens": null, "max_completion_tokens": 99}'
    with FakeJudge() as fake:
        assert judge(fake.url, "--extra-body", extra).code == 0
    assert sorted(fake.asked) == sorted(text for _, _, text in prompts())
    assert set(fake.asked.values()) == {1} and fake.keys == [None] * QUESTIONS
    by_prompt = {text: next(d for d in DIALOGUES if d.id == name) for name, _, text in prompts()}
    for body in fake.bodies:
        assert body["model"] == "fake/judge-1" and body["max_completion_tokens"] == 99
        assert body["temperature"] == 0 and "max_tokens" not in body
        text, *images = body["messages"][-1]["content"]
        sent = [image["image_url"]["url"].partition(",") for image in images]
        assert {start for start, _, _ in sent} == {"data:image/png;base64"}
        names = by_prompt[text["text"]].images
        assert [base64.b64decode(s) for *_, s in sent] == [(FOLDER / n).read_bytes() for n in names]


def test_both_aggregations_and_the_failures_between_them(
    judge: Callable[..., Ran], answers: Path
) -> None:
    """A judge that fails one in two questions for good, in every way that is a verdict."""
    ways = (
        "garbage",
        "plain refusal",
        "filter",
        "filter 400",
        "too high",
        "fraction",
        "missing",
        "code",
    )
    place = {text: index for index, (_, _, text) in enumerate(prompts())}
    with FakeJudge(lambda p, _: ways[place[p] // 2 % 8] if place[p] % 2 else "ok") as fake:
        ran = judge(fake.url, "--asks", "2")
    assert ran.code == 0, ran.err
    result = scores(answers)
    kinds = dict(zip(ways, ["no scores"] * 2 + ["refused"] * 2 + ["bad scores"] * 4, strict=True))
    assert result["failures"] == dict(
        sorted(Counter(kinds[ways[i // 2 % 8]] for i in place.values() if i % 2).items())
    )
    good = [grades(text) for text, index in place.items() if index % 2 == 0]
    assert result["judged"] == len(good) == QUESTIONS - 22
    for name in SCORES:
        total = 10 * sum(grade[name] for grade in good)
        assert result["without_failures"][name] == pytest.approx(total / len(good))
        assert result["failures_as_0"][name] == pytest.approx(total / QUESTIONS)
    lines = ran.out.splitlines()
    assert lines[2].startswith("| aggregation | C | R | VP | LC | AA | IRU | Avg | Overall |")
    assert lines[4].endswith(f"| {QUESTIONS} | 22 |") and "failures: 10 bad scores, " in ran.err
    # The benchmark's own statistics, over the files in its own form.
    cells = [
        cell
        for path in sorted((answers / "judge-fake-judge-1" / "dialogues").glob("*.json"))
        for cell in json.loads(path.read_text())
    ]
    official = {name: sum(cell[name] for cell in cells) / len(cells) for name in SCORES}
    assert official == pytest.approx({n: result["without_failures"][n] / 10 for n in SCORES})
    # An unreadable reply is asked for again, a filtered one is not.
    counts = [fake.asked[text] for text in place]
    assert counts[0::2] == [1] * (QUESTIONS - 22)
    assert counts[1:17:2] == [2, 2, 1, 1, 2, 2, 2, 2]
    with FakeJudge() as fake:
        assert judge(fake.url, "--asks", "2").code == 0 and not fake.bodies
        assert judge(fake.url, "--asks", "2", "--retry-failed").code == 0
    assert len(fake.bodies) == 22 and scores(answers)["failures"] == {}


@pytest.fixture
def uninterrupted(judge: Callable[..., Ran], answers: Path) -> Iterator[tuple[str, bytes]]:
    """Yield what a run without problem prints and writes; its verdicts are then taken away."""
    with FakeJudge() as fake:
        out = judge(fake.url).out
    folder = answers / "judge-fake-judge-1"
    written = (folder / "scores.json").read_bytes()
    folder.rename(answers.parent / "kept")
    yield out, written
    assert json.loads(written)["judged"] == QUESTIONS


def test_killed_and_resumed_gives_the_same_table(
    judge: Callable[..., Ran], answers: Path, uninterrupted: tuple[str, bytes]
) -> None:
    journal = answers / "judge-fake-judge-1" / "journal.jsonl"
    # The judge then holds every reply back, so that no run is quick enough to end.
    replies = itertools.count()
    with FakeJudge(lambda *_: "ok" if next(replies) < 20 else "stall") as fake:
        command = [sys.executable, "-m", "mmkv", *judge_arguments(answers, fake.url, "--yes")]
        environment = {**os.environ, "no_proxy": "127.0.0.1"}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + HANGS
            while not journal.exists() or journal.read_bytes().count(b"\n") < 12:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        lines = journal.read_bytes().count(b"\n")
        assert 12 <= lines < QUESTIONS
        with journal.open("a") as file:
            file.write('{"dialogue": "dense-4-0", "turn": 3, "pro')  # a line cut short
    with FakeJudge() as fake:
        ran = judge(fake.url)
        assert ran.code == 0 and len(fake.bodies) == QUESTIONS - (lines - 1)
    assert (ran.out, journal.with_name("scores.json").read_bytes()) == uninterrupted


def test_a_judge_that_goes_down_leaves_its_verdicts(
    judge: Callable[..., Ran], answers: Path, uninterrupted: tuple[str, bytes]
) -> None:
    served = iter(["ok"] * 15)
    with FakeJudge(lambda *_: next(served, "fault")) as fake:
        ran = judge(fake.url, "--retries", "1", "--workers", "2")
    assert ran.code == 1 and ran.err.splitlines()[-1].startswith("mmkv: error: the judge gave no")
    assert scores(answers)["failures"] == {"not judged": QUESTIONS - 15}
    ran = judge(fake.url, "--retries", "1")  # nothing listens there any more
    assert "the judge is down" in ran.error_line() and ran.code == 1
    assert scores(answers)["judged"] == 15
    with FakeJudge() as fake:
        ran = judge(fake.url)
    assert len(fake.bodies) == QUESTIONS - 15
    written = (answers / "judge-fake-judge-1" / "scores.json").read_bytes()
    assert (ran.out, written) == uninterrupted


def test_a_question_the_judge_refuses_counts_as_a_failure(
    judge: Callable[..., Ran], answers: Path
) -> None:
    """It is named, the others are judged, and the next run asks it again."""
    poison = prompts()[9][2]  # the second question of the second dialogue
    with FakeJudge(lambda p, _: "rejected" if p == poison else "ok") as fake:
        ran = judge(fake.url)
        assert ran.code == 1 and scores(answers)["judged"] == QUESTIONS - 1
        assert (
            f"failed: dialogue {DIALOGUES[1].id}, question 2: " in ran.err and "HTTP 400" in ran.err
        )
        assert "| failures as 0 |" in ran.out and "have no verdict" in ran.err.splitlines()[-1]
        fake.behaviour = lambda *_: "ok"
        assert judge(fake.url).code == 0 and fake.asked[poison] == 2
        # Another answer is another question.
        AnswerFolder(answers).save(DIALOGUES[0], ["new"] * len(DIALOGUES[0].questions), [])
        fake.bodies.clear()
        assert judge(fake.url).code == 0 and len(fake.bodies) == len(DIALOGUES[0].questions)


def test_dialogues_without_answers_or_pictures_count_as_failures(
    judge: Callable[..., Ran], answers: Path, tmp_path: Path
) -> None:
    first, second, third = (dialogue.id for dialogue in DIALOGUES[:3])
    (answers / f"{first}.json").unlink()
    (answers / f"{second}.json").write_text("{")
    pictures = tmp_path / "elsewhere" / "pictures"
    pictures.mkdir(parents=True)
    for path in (FOLDER / "pictures").glob("*.png"):
        if not path.name.startswith(third):
            (pictures / path.name).symlink_to(path)
    with FakeJudge() as fake:
        ran = judge(fake.url, "--images", str(tmp_path / "elsewhere"))
    assert ran.code == 1 and "3 dialogues could not be judged" in ran.err.splitlines()[-1]
    for name, says in ((first, "no answers yet"), (second, "cannot be read"), (third, "--images")):
        assert sum(f"dialogue {name}: " in line and says in line for line in ran.err.splitlines())
    assert scores(answers)["failures"] == {"no answer": 16, "not judged": 8}


def test_nothing_is_sent_before_confirmation(
    mmkv: Callable[..., Ran], answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeJudge() as fake:
        prices = ("--input-price", "2.5", "--output-price", "10")
        ran = mmkv(*judge_arguments(answers, fake.url, *prices))
        assert ran.code == 1 and "add --yes" in ran.err.splitlines()[-1]
        assert f"judging takes {QUESTIONS} calls, about " in ran.err and "about $" in ran.err
        somebody = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("mmkv.eval.mmdu.judge.sys", somebody)
        monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
        assert mmkv(*judge_arguments(answers, fake.url)).code == 1 and not fake.bodies
        monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
        assert mmkv(*judge_arguments(answers, fake.url)).code == 0


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (("--answers", "nowhere"), 1, "no folder of answers at nowhere"),
        (("--base-url", "ftp://x"), 1, "no http(s) address"),
        (("--images", "nowhere"), 1, "no folder of pictures"),
        (("--rubric", "nowhere"), 1, "cannot read the rubric"),
        (("--extra-body", "{"), 2, "not JSON"),
        (("--extra-body", "[]"), 2, "not a JSON object"),
        (("--input-price", "1"), 2, "give both"),
        (("--timeout", "0"), 2, "above 0"),
        (("--workers", "0"), 2, "workers"),
    ],
)
def test_bad_arguments(
    judge: Callable[..., Ran], more: tuple[str, ...], code: int, says: str
) -> None:
    ran = judge("http://127.0.0.1:9/v1", *more)
    assert says in ran.error_line() and ran.code == code


def test_another_judge_needs_another_folder(judge: Callable[..., Ran], answers: Path) -> None:
    with FakeJudge() as fake:
        assert judge(fake.url).code == 0
        ran = judge(fake.url, "--asks", "1")
        assert "another --output" in ran.error_line()
        own = answers.parent / "own.txt"
        own.write_text("my words")
        fake.bodies.clear()
        assert judge(fake.url, "--rubric", str(own)).code == 0
        assert (
            all(b["messages"][-1]["content"][0]["text"].startswith("my words") for b in fake.bodies)
            and len(fake.bodies) == QUESTIONS
        )


def test_runs_side_by_side(
    mmkv: Callable[..., Ran], judge: Callable[..., Ran], answers: Path
) -> None:
    with FakeJudge() as fake:
        assert judge(fake.url).code == 0
        better = answers.parent / "better"
        for dialogue in DIALOGUES:
            AnswerFolder(better).save(dialogue, list(dialogue.references), [])
        AnswerFolder(better)
        (better / "mmkv-run.json").write_text(
            '{"settings": {"policy": "snapkv", "budget": {"unit": "entries", "value": 64}}}'
        )
        assert judge(fake.url, "--answers", str(better)).code == 0
    ran = mmkv("mmdu", "table", str(answers), str(better))
    first, second = (line.split(" | ") for line in ran.out.splitlines()[4:6])
    assert ran.code == 0 and first[-2] == "100.0 %" and first[1] == "-"
    assert second[1:3] == ["snapkv", "64 entries"] and 0 < float(second[-1].strip(" |")) <= 1
    assert "no scores.json" in mmkv("mmdu", "table", str(answers.parent)).error_line()
