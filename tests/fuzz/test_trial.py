"""A trial finds each kind of failure, lets mmkv's own refusals pass, and nothing writes outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmkv.engine.errors import InputError
from tests.fuzz import trial


def empty() -> None:
    raise InputError("")


class Panic(BaseException):
    pass


def panics() -> None:
    raise Panic("of a library")


def hangs() -> None:
    while True:
        with contextlib.suppress(Exception):  # a hang is none
            time.sleep(60)


def swallowed() -> None:
    try:
        time.sleep(60)
    except BaseException:
        return


@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        (empty, InputError, "^$"),
        (lambda: {}["x"], KeyError, "x"),
        (lambda: int("x"), ValueError, "invalid literal"),
        (panics, trial.Wrong, "Panic: of a library"),
        (hangs, trial.Wrong, "over the time limit"),
        (swallowed, trial.Wrong, "caught on its way"),
        (lambda: Path("picture.png").write_text("lost"), trial.Wrong, r"changed: picture\.png"),
        (lambda: Path("x").unlink(), trial.Wrong, "changed: x"),
    ],
)
def test_each_kind_of_failure_is_found(
    does: Callable[[], Any], error: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "HANG_SECONDS", 0.1)
    with pytest.raises(error, match=words), trial.trial():
        does()
    assert Path("picture.png").read_text() == Path("x").read_text() == "keep me"


def test_files_elsewhere_cannot_be_changed(tmp_path: Path) -> None:
    outside = Path(Path.cwd().anchor, "never-written")
    for change in (
        lambda: outside.write_text("x"),
        lambda: outside.mkdir(),
        lambda: os.rename(tmp_path, outside),
        lambda: os.symlink(tmp_path, outside),
        lambda: os.utime(outside.parent),
    ):
        with pytest.raises(PermissionError, match="outside the folders"), trial.trial():
            change()
    assert not outside.exists() and tmp_path.exists()
    with trial.trial():
        (tmp_path / "ours").write_text("x")
