"""Fixtures of the command-line tests: a model, a picture, the command itself, and a chat."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from PIL import Image

from mmkv import Engine
from mmkv.chat.repl import Repl
from mmkv.cli.app import run
from tests.support.chat_models import new_repl, save_qwen3_vl


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_qwen3_vl(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("picture") / "red.png"
    Image.new("RGB", (48, 32), "red").save(path)  # 3 x 2 visual tokens
    return str(path)


@dataclass
class Ran:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    def error_line(self) -> str:
        """Return the error, after checking that it is one line and that stdout is clean."""
        lines = [line for line in self.err.splitlines() if "error" in line]
        assert len(lines) == 1 and lines[0].startswith("mmkv: error: "), self.err
        assert "Traceback" not in self.err and self.out == ""
        return lines[0]


@pytest.fixture
def mmkv(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process: ``mmkv("chat", ..., stdin="...")``."""

    def call(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        code = run(list(arguments))
        out, err = capfd.readouterr()
        return Ran(code=code, out=out, err=err)

    return call


@pytest.fixture(scope="module")
def small_engine(model: str) -> Engine:
    return Engine.from_pretrained(model, policy="snapkv", budget=16)


@pytest.fixture
def repl(small_engine: Engine, model: str) -> Iterator[Repl]:
    made = new_repl(small_engine, model)
    yield made
    for session in made.branches.values():
        session.close()
    small_engine.cache.check()
