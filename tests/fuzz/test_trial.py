"""A trial finds each kind of failure, lets mmkv's own refusals pass, and nothing writes outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine, bundled_model
from mmkv.engine.errors import InputError
from mmkv.sampling import Sampling
from tests.fuzz import trial


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(bundled_model(), budget=8)


def refused_by_us() -> None:
    raise InputError("no; give another")


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


def test_work_and_refusals_pass() -> None:
    with trial.trial() as made:
        pass
    assert made.refusal is None
    for does, kind in (
        (refused_by_us, InputError),
        (lambda: Sampling(max_new_tokens=0), InputError),
        (lambda: Sampling(max_new_tokens="x"), TypeError),
    ):
        with trial.trial() as made:
            does()
        assert isinstance(made.refusal, kind)


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


def test_pages_that_are_held_are_found(engine: Engine) -> None:
    session = engine.session()
    with pytest.raises(trial.Wrong, match="pages are held"), trial.trial(engine):
        "".join(session.send("hello", sampling=Sampling(max_new_tokens=2)))
    session.close()
    with trial.trial(engine):
        pass


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


def test_memory_is_limited() -> None:
    # Of the kernel: malloc may hold as much that earlier tests gave back.
    with trial.limited_memory(2**28), pytest.raises(OSError, match="allocate"):
        mmap(-1, 2**29)
    mmap(-1, 2**29).close()
