"""Ctrl-C while the vision side of a checkpoint is read ends the wait, and harms nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmkv.api import Engine
from mmkv.chat.display import Display
from mmkv.cli.app import run
from mmkv.engine.model.families import loading, vision
from mmkv.sampling import Sampling
from tests.support.chat_models import picture, save_qwen3_vl

FEW = Sampling(max_new_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Press Ctrl-C as soon as the modules are being imported, which lasts until the test ends."""
    end, names = threading.Event(), []

    def importing(family: Any, config: Any) -> None:
        names.append(threading.current_thread().name)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        end.wait()

    monkeypatch.setattr(vision, "_import_vision", importing)
    yield names
    end.set()
    vision._imports.wait()


def test_ctrl_c_while_modules_are_imported(folder: Path, stuck: list[str], tmp_path: Path) -> None:
    picture().save(tmp_path / "red.png")
    named = ["--image", str(tmp_path / "red.png"), "-p", "hi", "--max-new-tokens", "2"]
    assert run(["chat", str(folder), *named]) == 130
    assert stuck == ["import vision"]


def test_ctrl_c_while_the_first_picture_waits_for_them(folder: Path, stuck: list[str]) -> None:
    engine = Engine.from_pretrained(folder)
    session = engine.session()
    list(session.send("hello", sampling=FEW))
    with pytest.raises(KeyboardInterrupt):
        session.send("what is it?", images=[picture()], sampling=FEW)
    assert stuck == ["import vision"] and len(session.history) == 2


def test_ctrl_c_while_the_vision_side_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(folder)
    build = loading.build_vision
    went_on = []

    def pressing(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        return build(*arguments)

    monkeypatch.setattr(loading, "build_vision", pressing)
    with engine.session() as session, engine.session() as other:
        with pytest.raises(KeyboardInterrupt):
            session.send("what is it?", images=[picture()], sampling=FEW)
        assert not went_on and session.history == [] and not engine.family.vision_loaded
        monkeypatch.setattr(loading, "build_vision", build)
        replies = [
            "".join(s.send("what is it?", images=[picture()], sampling=FEW))
            for s in (session, other)
        ]
        assert replies[0] == replies[1] and engine.family.vision_loaded


def test_reading_the_vision_side_is_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextmanager
    def loading_bar(self: Display, name: str) -> Iterator[Any]:
        yield shown.append

    monkeypatch.setattr(Display, "loading", loading_bar)
    picture().save(tmp_path / "red.png")
    few = ["-p", "hi", "--max-new-tokens", "2"]
    assert run(["chat", str(folder), *few]) == 0
    assert "what reads pictures" not in shown
    assert run(["chat", str(folder), "--image", str(tmp_path / "red.png"), *few]) == 0
    assert shown[-1] == "what reads pictures"
