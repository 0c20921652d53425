"""Runs that cannot end well are refused before they start, and stopped ones can go on."""

from __future__ import annotations

import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from mmkv.cli.app import run
from mmkv.engine.errors import InputError
from mmkv.resources import bundled_model
from mmkv.training.distill import main
from mmkv.training.folder import Stopping, begin, history, resume
from mmkv.training.run import History
from mmkv.training.settings import TrainingSettings

MODEL = str(bundled_model())
NUMBERS = sorted(f.name for f in fields(TrainingSettings) if isinstance(f.default, float))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NUMBERS), st.sampled_from(["nan", "inf", "-inf"]))
def test_numbers_that_are_not_finite_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is {value}; give"):
        TrainingSettings(MODEL, "out", **{name: float(value)})


@pytest.mark.parametrize(("option", "value"), [("--lr", "inf"), ("--bias", "nan")])
def test_such_a_run_ends_with_an_error_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    out = tmp_path / "gates"
    given = ["--model", MODEL, "--data", "scenes:dense", "--output", str(out), option, value]
    assert main(given) == 1
    assert f"{option} is {value}" in capsys.readouterr().err and not out.exists()


def run_of(folder: Path, *more: str) -> list[str]:
    """Return the arguments of a run of three short steps."""
    sizes = "--d-gate 24 --steps 3 --budget 24 --log-every 1 --save-every 100 --device cpu".split()
    data = ["--data", "scenes:dense", "--output", str(folder)]
    return ["--model", MODEL, *data, *sizes, "--max-length", "512", *more]


def press_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Press Ctrl-C while the line of this step is logged."""
    log = History.on_log

    def pressing(self: History, args: Any, state: Any, control: Any, **more: Any) -> None:
        log(self, args, state, control, **more)
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(History, "on_log", pressing)


def test_ctrl_c_keeps_a_checkpoint_and_ends_with_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mmkv distill && mmkv chat`` must not go on to chat."""
    with monkeypatch.context() as context:
        press_at(context, 1)
        assert run(["distill", *run_of(tmp_path)]) == 130
    shown = capsys.readouterr().err
    assert "--resume" in shown and "Traceback" not in shown
    (kept,) = tmp_path.glob("checkpoint-*")
    assert (kept / "trainer_state.json").is_file() and int(kept.name[11:]) <= 2
    assert not (tmp_path / "gates.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(["distill", *run_of(tmp_path), "--resume"]) == 0
    assert [line["step"] for line in history(tmp_path) if "loss" in line] == [1, 2, 3]
    assert (tmp_path / "gates.safetensors").is_file()


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Stopping() as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping.pressed
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second press was held back")
    with pytest.raises(KeyboardInterrupt), Stopping():
        signal.raise_signal(signal.SIGINT)
    with Stopping():
        pass


def test_ctrl_c_before_the_first_step_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "mmkv.training.run.load_backbone", lambda _: signal.raise_signal(signal.SIGINT)
    )
    assert main(run_of(tmp_path)) == 130 and run(["distill", *run_of(tmp_path)]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("left", [[], ["config.json"], ["model.safetensors", "optimizer.pt"]])
def test_a_kill_inside_the_first_checkpoint_is_no_dead_end(tmp_path: Path, left: list[str]) -> None:
    """What --resume advises works: a run without it begins anew over what is left."""
    asked = {"model": "m"}
    begin(tmp_path, asked)
    cut = tmp_path / "checkpoint-100"
    cut.mkdir()
    for name in left:
        (cut / name).write_bytes(b"cut")
    with pytest.raises(InputError, match="leave --resume out"):
        resume(tmp_path, asked)
    begin(tmp_path, asked)
    (cut / "trainer_state.json").write_text("{}")
    assert resume(tmp_path, asked) == cut
    with pytest.raises(InputError, match="continue it with --resume"):
        begin(tmp_path, asked)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_a_full_disk_gets_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("mmkv.training.run.load_backbone", full)
    assert main(run_of(tmp_path)) == 1
    shown = capsys.readouterr().err
    assert "free space" in shown and "--resume" in shown and shown.count("\n") == 1


def test_other_errors_are_not_taken_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mmkv.training.run.load_backbone", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(run_of(tmp_path))
