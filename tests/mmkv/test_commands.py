"""Registered commands: those of pyproject.toml, one that does not load, none at all."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from mmkv.cli import app as cli

ROOT = Path(__file__).resolve().parents[2]
OURS = ["distill", "bench", "eval", "mmdu"]


def installed_as(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """Let mmkv's installation have these entry points."""
    found = SimpleNamespace(entry_points=EntryPoints(points))
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [found])


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the commands of the help, in its order."""
    assert cli.run(["--help"]) == 0
    return re.findall(r"^\W*(\w+)  ", capsys.readouterr().out.split("Commands")[1], re.M)


def test_the_help_lists_all_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    product = ["chat", "models", "pull", "cache", "explain", "serve", "policies", "env"]
    assert listed(capsys) == [*product, *OURS]


def test_ours_are_those_of_pyproject_and_load() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(points["mmkv.commands"]) == OURS
    for name, value in points["mmkv.commands"].items():
        found = EntryPoint(name, value, "mmkv.commands").load()
        assert isinstance(found, typer.Typer)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module_of_anybody", "No module named 'no_such_module_of_anybody'"),
        ("raise RuntimeError('first [b]\\nsecond')", "(RuntimeError: first [b])"),
        ("app = 3", "AttributeError"),
    ],
)
def test_one_that_does_not_load_takes_no_other_down(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_bench.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_bench", raising=False)
    mmdu = EntryPoint("mmdu", "mmkv.eval.mmdu.command:app", "mmkv.commands")
    installed_as(monkeypatch, EntryPoint("bench", "broken_bench:app", "mmkv.commands"), mmdu)
    assert listed(capsys)[-4:] == OURS
    assert cli.run(["bench", "hello", "--loud"]) == 1
    written = capsys.readouterr()
    assert written.out == "" and said in written.err
    assert written.err.startswith("mmkv: error: bench: ") and written.err.count("\n") == 1
    assert cli.run(["mmdu", "--help"]) == 0


@pytest.mark.parametrize("name", OURS)
def test_an_installation_older_than_the_entry_points_names_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed_as(monkeypatch)
    assert cli.run([name, "--help"]) == 1
    written = capsys.readouterr()
    assert "pip install --no-deps -e ." in written.err and written.err.count("\n") == 1
    assert listed(capsys)[-4:] == OURS
