"""Names that are none, streams that are closed, models without a chat: one line each."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mmkv.cli.app import run
from mmkv.engine.errors import MmkvError
from mmkv.engine.model.source import locate
from mmkv.training.data.conversations import DataSource
from tests.support.chat_models import save_llama

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

NAMES = ["~nobody/x", "a" * 5000, "/" + "a" * 300, "x\0y", "https://[::1", "\ud800", "../" * 2000]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "NAME", "-p", "x"),
        ("chat", "-p", "x", "--gates", "NAME"),
        ("chat", "-p", "x", "--image", "NAME"),
        ("chat", "-p", "x", "--video", "NAME"),
        ("chat", "-p", "x", "--load", "NAME"),
        ("chat", "-p", "x", "--save", "NAME"),
        ("mmdu", "--data", "NAME"),
        ("bench", "NAME"),
        ("eval", "--tasks", "mme", "--model", "NAME", "--output", "NAME"),
        ("eval", "--tasks", "NAME", "--output", "out"),
        ("eval", "--tasks", "NAME,mme_local", "--data", "NAME", "--output", "out"),
        ("distill", "--model", "NAME", "--data", "text:x", "--output", "out"),
        ("distill", "--model", "MODEL", "--data", "text:NAME", "--output", "out"),
    ],
)
def test_names_that_are_no_path_are_refused_in_one_line(
    mmkv: Callable[..., Ran],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1))
    monkeypatch.setattr("mmkv.eval.lmms.command.subprocess", ended)
    given = [each.replace("NAME", name).replace("MODEL", model) for each in arguments]
    if given[:2] == ["eval", "--tasks"] and given[2] == name and name != "a" * 5000:
        pytest.skip("lmms-eval's own folder is searched for each, which takes a second")
    if name == "../" * 2000 and given[0] in ("eval", "distill"):
        pytest.skip("a folder that is there")
    ran = mmkv(*given)
    lines = [line for line in ran.err.splitlines() if "error: " in line]
    assert ran.code in (1, 2) and len(lines) == 1 and len(lines[0]) < 700
    assert "Traceback" not in ran.err and ran.out == ""


def test_a_model_name_that_is_too_long_is_cut_in_the_message() -> None:
    for name in ("a" * 5000, "./" + "a" * 5000):
        with pytest.raises(MmkvError) as error:
            locate(name)
        assert len(str(error.value)) < 400


def test_a_data_file_of_nobody_is_named() -> None:
    with pytest.raises(MmkvError, match="no such user"):
        DataSource.parse("text:~nobody-at-all/x.txt")


@pytest.mark.parametrize("streams", [("stdin",), ("stdout",), ("stdin", "stdout", "stderr")])
@pytest.mark.parametrize("arguments", [("-p", "x"), ("-p", "x", "--json"), ("-i",), ()])
def test_closed_streams_are_empty_or_lead_nowhere(
    model: str, monkeypatch: pytest.MonkeyPatch, streams: tuple[str, ...], arguments: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    for stream in streams:
        monkeypatch.setattr(sys, stream, None)
    code = run(["chat", model, "--max-new-tokens", "2", "--no-autosave", *arguments])
    assert code == (1 if arguments == () and "stdin" in streams else 0)


class Gone(io.RawIOBase):
    """A pipe whose reader has gone."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("arguments", [("--help",), ("policies",), ("env",), ("chat", "--help")])
def test_a_reader_that_has_gone_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    gone = io.TextIOWrapper(Gone(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(gone, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", gone)
    assert run(list(arguments)) == 1
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--rounds", "--steps"])
def test_a_bench_without_end_is_refused(mmkv: Callable[..., Ran], model: str, option: str) -> None:
    ran = mmkv("bench", model, option, "9" * 20)
    assert ran.code == 2 and option in ran.error_line()


def test_a_base_model_is_offered_raw(mmkv: Callable[..., Ran], tmp_path: Path) -> None:
    base = str(save_llama(tmp_path, template=None))
    refused = mmkv("chat", base, "-p", "once upon a")
    assert refused.code == 1 and "no chat template" in refused.error_line()
    assert "--raw" in refused.err
    ran = mmkv("chat", base, "-p", "once upon a", "--raw", "--max-new-tokens", "2", "--json")
    assert ran.code == 0 and '"prompt": 11' in ran.out and "template" not in ran.err
    both = mmkv("chat", base, "-p", "x", "--raw", "--system", "be short")
    assert both.code == 2 and "--raw" in both.error_line()


def test_raw_leaves_a_template_out(mmkv: Callable[..., Ran], model: str) -> None:
    ran = mmkv("chat", model, "-p", "abc", "--raw", "--max-new-tokens", "1", "--json")
    assert ran.code == 0 and '"prompt": 3' in ran.out
