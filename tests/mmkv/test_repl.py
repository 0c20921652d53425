"""The interactive conversation: commands, lines, errors, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.chat_models import save_qwen3_vl

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

FEW = ("--max-new-tokens", "6")


BOUND = ("--budget", "256")  # without one, a model without gates evicts nothing


def converse(
    mmkv: Callable[..., Ran], model: str, *lines: str, options: tuple[str, ...] = ()
) -> Ran:
    ran = mmkv("chat", model, "-i", *options, *FEW, stdin="\n".join(lines) + "\n")
    assert ran.code == 0 and "Traceback" not in ran.err
    return ran


def records(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.out.splitlines()]


def test_a_conversation_prints_answers_only(mmkv: Callable[..., Ran], model: str) -> None:
    shown = converse(mmkv, model, "hello", "", "and?")
    report = records(converse(mmkv, model, "hello", "", "and?", options=("--json",)))
    assert shown.out == "".join(reply["text"] + "\n" for reply in report)
    assert report[1]["tokens"]["seen"] > report[0]["tokens"]["seen"]


def test_undo_save_load_and_fork_go_back_to_the_same_state(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.mmkv"
    ran = converse(
        mmkv,
        model,
        "hello",
        f"/save {file}",
        "and?",  # 1
        "/undo",
        "and?",  # 2
        f"/load {file}",
        "/fork other",
        "and?",  # 3
        "/fork main",
        "and?",  # 4
        "/clear",
        "hello",  # 5
        "/exit",
        "never read",
        options=("--json",),
    )
    report = [(reply["text"], reply["tokens"]) for reply in records(ran)]
    assert len(report) == 6
    assert report[1] == report[2] == report[3] == report[4] and report[5] == report[0]


def test_queued_pictures_and_lines(mmkv: Callable[..., Ran], model: str, picture: str) -> None:
    ran = converse(
        mmkv,
        model,
        f'/image "{picture}"',
        "/image /nowhere.png",
        "what\\",
        "is it?",
        '"""several',
        'lines"""',
        "what\\\nis it?",
        options=("--json", "--policy", "full"),
    )
    first, second, third = records(ran)
    assert first["entries"]["by_modality"]["image"] == 6 * 4  # on 2 layers, 2 heads
    assert second["entries"]["by_modality"]["image"] == 6 * 4  # sent once
    # One token a character; <|im_start|> and the other four markers count one each.
    asked = len("user\nwhat\nis it?\nassistant\n")
    assert first["tokens"]["prompt"] == asked + 3 + 2 + 6
    # Before it: the latest reply's last token, its end marker and a line break.
    assert third["tokens"]["prompt"] == asked + 3 + 3
    assert second["tokens"]["prompt"] - third["tokens"]["prompt"] == len("several\nlines") - len(
        "what\nis it?"
    )
    assert "file not found" in ran.err


def test_commands_answer_on_stderr(mmkv: Callable[..., Ran], model: str) -> None:
    ran = converse(
        mmkv,
        model,
        "/help",
        "/set temperature 0.5",
        "/set top_p 7",
        "/set seed abc",
        "/set nonsense 1",
        "/system Be kind.",
        "/budget 8",
        "/budget 0",
        "/budget much",
        "/undo",
        "/load /nowhere.mmkv",
        "/save",
        "/save /nowhere/at/all",
        "/nonsense",
        "/quit",
        options=BOUND,
    )
    assert ran.out == ""
    for says in (
        "/fork",
        "temperature 0.5",
        "top_p is 7",
        "'abc' does not fit seed",
        "no setting 'nonsense'",
        "Be kind.",
        "budget 8 entries per row",
        "'much' is not a budget",
        "no turn to take back",
        "nowhere.mmkv",
        "/save needs a file name",
        "there is no folder /nowhere/at",
        "unknown command /nonsense",
    ):
        assert says in ran.err, says


def test_statistics_count_the_entries(mmkv: Callable[..., Ran], model: str, picture: str) -> None:
    ran = converse(
        mmkv, model, f"/image {picture}", "what?", "/stats", options=("--policy", "full")
    )
    seen = int(re.search(r"tokens seen\s+(\d+)", ran.err)[1])  # type: ignore[index]
    assert re.search(
        rf"entries kept\s+{seen * 4} of {seen * 4} \({seen * 4 - 24} text, 24 image", ran.err
    )
    assert re.search(rf"layer 1 .*{seen * 2} \({seen}\.0 per head\)", ran.err)


def test_a_picture_that_is_mostly_gone_is_said_once_in_each_conversation(
    mmkv: Callable[..., Ran], model: str, picture: str
) -> None:
    seen = (f"/image {picture}", "what is this?")
    options = ("--policy", "streamingllm", "--budget", "8")
    ran = converse(mmkv, model, *seen, "and?", "/clear", *seen, "and?", options=options)
    assert ran.err.count("most of what was read of these pictures is gone") == 2


def test_an_error_keeps_the_conversation(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.mmkv"
    broken.write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    ran = converse(
        mmkv,
        model,
        "hello",
        "x" * 3000,
        f"/load {broken}",
        "/budget 0.1",
        "/image -",
        "and?",
        options=("--json", *BOUND),
    )
    plain = converse(mmkv, model, "hello", "and?", options=("--json", *BOUND))
    assert [r["text"] for r in records(ran)] == [r["text"] for r in records(plain)]
    assert ran.err.count("mmkv: error: ") == 3


def test_a_smaller_budget_in_mid_conversation_evicts(mmkv: Callable[..., Ran], model: str) -> None:
    ran = converse(mmkv, model, "hello", "/budget 8", "and?", options=("--json", *BOUND))
    first, second = records(ran)
    assert first["entries"]["evicted"] == 0 and second["entries"]["kept"] == 32
    ran = converse(mmkv, model, "/budget 8")
    assert "policy 'full' evicts nothing" in ran.err and "load the model with a budget" in ran.err


# --- Ctrl-C ---

# Tokens that no machine generates before the signal comes, and seconds that none needs to stop.
ENDLESS, HANGS = 200_000, 600


@pytest.fixture(scope="module")
def patient_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose context has room for ENDLESS tokens."""
    return str(save_qwen3_vl(tmp_path_factory.mktemp("patient"), positions=2 * ENDLESS))


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mmkv", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def interrupt_after_output(process: subprocess.Popen[str]) -> str:
    """Send SIGINT once the reply has begun; return what was read until then."""
    assert process.stdout is not None
    begun = process.stdout.read(1)
    assert begun, "no reply came"
    process.send_signal(signal.SIGINT)
    return begun


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_ctrl_c_stops_the_reply_and_the_conversation_goes_on(patient_model: str) -> None:
    long = ("--max-new-tokens", str(ENDLESS))
    process = start("chat", patient_model, "-i", *long, "--policy", "streamingllm")
    assert process.stdin is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    interrupt_after_output(process)
    _, err = process.communicate("/set max_new_tokens 2\nagain\n/stats\n", timeout=HANGS)
    assert process.returncode == 0 and "Traceback" not in err
    assert "(stopped)" in err and "tokens seen" in err
    assert int(re.search(r"tokens seen\s+([\d,]+)", err)[1].replace(",", "")) < ENDLESS  # type: ignore[index]


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_ctrl_c_ends_a_single_answer_with_code_130(patient_model: str) -> None:
    process = start("chat", patient_model, "-p", "hello", "--max-new-tokens", str(ENDLESS))
    interrupt_after_output(process)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.slow(reason="a process that loads torch and a model")
def test_a_closed_pipe_gives_no_traceback(patient_model: str) -> None:
    process = start("chat", patient_model, "-p", "hello", "--max-new-tokens", str(ENDLESS))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=HANGS) != 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
