"""``mmkv calibrate``: what it measures, that it goes on, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mmkv.calibration import read_calibration
from mmkv.engine.runtime import Runtime
from mmkv.eval import calibrate
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.teacher_forced import (
    compare_states,
    full_attention_states,
    lay_out_turns,
    read,
)
from tests.support.chat_models import save_llama

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

Run = Callable[..., "Ran"]


def test_an_answer_is_measured_as_the_papers_tables_are() -> None:
    """Beside another program: full attention without a cache, and a session by itself."""
    model = str(bundled_model())
    engine = Runtime.from_pretrained(
        model, policy="dbtrimkv", gates=Path(model) / "gates", budget=16, dtype="float32"
    )
    data, lost, differ = examples(model, ["scenes:dense"], 4, 0, split="heldout"), 0, 0
    for number in range(4):
        found = calibrate.ask(engine, data, number)["answers"]
        inputs = data.encoder(data.mixture[number])[0].inputs()
        labels = inputs.pop("labels")[0]
        turn = engine.family.turn(inputs, 0, engine.device)
        with torch.inference_mode():
            states = full_attention_states(engine, lay_out_turns(engine, [turn]))
            whole = compare_states(engine.decoder, states, states, labels)
        bounded = read(engine, inputs, labels).answers
        assert len(found) == len(whole) == len(bounded)
        for own, full, ours in zip(found, whole, bounded, strict=True):
            assert own["right"] == full.right
            assert own["wrong"] == (ours.wrong[0][0] if ours.wrong else None)
            assert (
                len(own["doubts"]) == ours.tokens
                and len(own["differs"]) == ours.tokens - ours.agree
            )
            lost += own["right"] and own["wrong"] is not None
            differ += len(own["differs"])
    assert lost > 3 and differ > lost


def talks(file: Path, *talks: Sequence[tuple[str, str]]) -> str:
    """Write dialogues of questions and answers; return ``--data`` for them."""
    rows = []
    for each in talks:
        said = [
            {"role": role, "content": text}
            for pair in each
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        rows.append(json.dumps({"messages": said}) + "\n")
    file.write_text("".join(rows))
    return f"chat:{file}"


def test_an_answer_that_the_context_has_no_room_for_is_left_out(tmp_path: Path) -> None:
    """One that begins inside of it, which reading the question does not find out."""
    model = str(save_llama(tmp_path / "llama", max_position_embeddings=100))
    engine = Runtime.from_pretrained(model, policy="keydiff", budget=12, dtype="float32")
    data = talks(tmp_path / "talks.jsonl", [("what?", "frog"), ("and?", "a" * 90)])
    found = calibrate.ask(engine, examples(model, [data], 1, 0, split="heldout"), 0)["answers"]
    assert [len(one["doubts"]) for one in found] == [len("frog") + 1]


def test_a_file_that_has_changed_is_read_again(
    mmkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, ask = str(save_llama(tmp_path / "llama")), list[int](), calibrate.ask

    def counted(engine: Any, data: Any, number: int) -> dict[str, Any]:
        asked.append(number)
        return ask(engine, data, number)

    monkeypatch.setattr(calibrate, "ask", counted)
    given = ("--policy", "keydiff", "--budget", "12", "--lost", "0.5", "--dialogues", "1")
    for answer, count in (("frog", 1), ("frog", 1), ("bird", 2), ("frog", 2)):
        data = talks(tmp_path / "talks.jsonl", [("what?", answer)])
        ran = mmkv("calibrate", model, *given, "--data", data, "-o", str(tmp_path / "made.json"))
        assert ran.code == 0 and len(asked) == count


def test_scores_and_losses_of_an_answer() -> None:
    row = {
        "risk": 0.5,
        "doubts": [0.2, 0.1, 0.6, 0.4],
        "wrong": 1,
        "right": True,
        "differs": [1, 3],
    }
    both = calibrate.answer_of(row, "answers", "both")
    assert both.score == 0.3 and both.losses == [
        (0.1, 1.0)
    ]  # the second token is caught with the first
    tokens = calibrate.answer_of(row, "tokens", "doubt")
    assert tokens.score == 0.6 and tokens.losses == [(0.2, 0.25), (0.6, 0.25)]
    assert calibrate.answer_of(row, "answers", "risk").losses == [(0.5, 1.0)]
    for change in ({"right": False}, {"wrong": None}):
        assert calibrate.answer_of(row | change, "answers", "both").losses == []


DENSE = ("--data", "scenes:dense", "--budget", "16", "--lost", "0.25")


def test_a_run_goes_on_and_a_figure_is_drawn(
    mmkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[int](), calibrate.ask

    def counted(engine: Any, data: Any, number: int) -> dict[str, Any]:
        asked.append(number)
        return ask(engine, data, number)

    monkeypatch.setattr(calibrate, "ask", counted)
    made = tmp_path / "made.json"
    ran = mmkv("calibrate", *DENSE, "--dialogues", "4", "-o", str(made))
    assert ran.code == 0 and asked == [0, 1, 2, 3]
    assert "at most 25 % of the answers are lost" in ran.out and "4 dialogues" in ran.out
    first = read_calibration(made)
    assert first.score == "both" and first.identity["budget"] == "16 entries per row"
    more = ("--dialogues", "5", "--loss", "tokens", "--figure", str(tmp_path / "f.png"))
    assert mmkv("calibrate", *DENSE, *more, "-o", str(made)).code == 0 and asked == [0, 1, 2, 3, 4]
    second = read_calibration(made)
    assert second.loss == "tokens" and len(second.dialogues) == 5
    scores = [
        [[answer.score for answer in one.answers] for one in each.dialogues]
        for each in (first, second)
    ]
    assert scores[1][:4] == scores[0]
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    other = mmkv("calibrate", *DENSE, "--policy", "keydiff", "--dialogues", "3", "-o", str(made))
    assert other.code == 0 and asked[5:] == [0, 1, 2] and read_calibration(made).score == "doubt"
    ran = mmkv(
        "calibrate",
        *DENSE,
        "--policy",
        "keydiff",
        "--score",
        "both",
        "--dialogues",
        "3",
        "-o",
        str(made),
    )
    assert ran.code == 1 and "no retention gates" in ran.err and len(asked) == 8


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (
            ["--lost", "0.05", "--dialogues", "18"],
            1,
            "18 dialogues cannot promise 0.05: that takes 19",
        ),
        (["--lost", "0"], 1, "a share of 0 cannot be promised"),
        (["--score", "luck"], 2, "--score is 'luck'; give both, doubt, risk"),
        (["--policy", "full"], 2, "forgets nothing"),
        (["--lost", "0.5", "-o", "{folder}"], 2, "is a folder; name a file in it with --output"),
        (["--lost", "0.5", "--figure", "{file}/f.png"], 1, "name a folder with --figure"),
        (["--data", "chat:{file}", "--lost", "0.4", "--dialogues", "3"], 1, "has 1 dialogues"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    mmkv: Run, tmp_path: Path, given: list[str], code: int, said: str
) -> None:
    file = tmp_path / "talks.jsonl"
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "what?"},
                {"role": "assistant", "content": "frog"},
            ]
        },
        {"messages": [{"role": "user", "content": "nothing was said"}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [one.format(file=file, folder=tmp_path) for one in given]
    data = [] if "--data" in given else ["--data", "scenes:dense"]
    budget = [] if "full" in given else ["--budget", "16"]
    ran = mmkv("calibrate", *data, *budget, "-o", str(tmp_path / "made.json"), *given)
    assert ran.code == code and said in ran.err.splitlines()[-1]
    assert not (tmp_path / "made.json").exists()
