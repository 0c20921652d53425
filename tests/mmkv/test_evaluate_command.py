"""``mmkv eval`` before and after its child: where it writes, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmkv.cli.app import run
from mmkv.eval.lmms.command import _CHILD_IGNORES_CTRL_C


def started(monkeypatch: pytest.MonkeyPatch, behave: Any) -> list[Any]:
    """Replace the child process; return the list of its starts."""
    starts: list[Any] = []

    def child(command: list[str], **options: Any) -> Any:
        starts.append((command, options))
        return behave()

    monkeypatch.setattr("mmkv.eval.lmms.command.subprocess.run", child)
    return starts


@pytest.mark.parametrize("bad", ["file", "below a file", "full"])
def test_the_output_is_checked_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    starts = started(monkeypatch, lambda: None)
    file = tmp_path / "file"
    file.write_text("keep me")
    output = {"file": file, "below a file": file / "x", "full": tmp_path / "out"}[bad]
    if bad == "full":
        usage = type("usage", (), {"free": 2**20})
        monkeypatch.setattr("mmkv.training.measure.record.shutil.disk_usage", lambda _: usage)
    assert run(["eval", "--tasks", "mme", "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--output" in said
    assert not starts and file.read_text() == "keep me"


def test_ctrl_c_ends_with_130_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = started(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    assert run(["eval", "--tasks", "mme", "--output", str(tmp_path)]) == 130
    assert starts[0][1]["preexec_fn"] is _CHILD_IGNORES_CTRL_C
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_child_does_not_see_ctrl_c() -> None:
    """A terminal sends it to both; the child's own traceback must not show."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('went on')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=_CHILD_IGNORES_CTRL_C,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and ran.stdout == "went on\n" and not ran.stderr
