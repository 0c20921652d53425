"""Commands that packages register: ours, a foreign one, one that does not load, none at all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from mmkv.cli import app as cli
from mmkv.engine import registry
from tests.support.packages import install

ROOT = Path(__file__).resolve().parents[2]
OURS = ["distill", "bench", "eval", "mmdu"]


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing be registered by the installation that the tests run in."""
    monkeypatch.setattr(registry, "entry_points", lambda: registry.EntryPoints())
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the commands of the help, in its order."""
    assert cli.run(["--help"]) == 0
    return re.findall(r"^\W*(\w+)  ", capsys.readouterr().out.split("Commands")[1], re.M)


def test_the_help_lists_all_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    product = ["chat", "models", "pull", "explain", "serve", "policies", "env"]
    assert listed(capsys) == [*product, *OURS]


def test_ours_are_those_of_pyproject_and_load() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(points["mmkv.commands"]) == OURS
    for name, value in points["mmkv.commands"].items():
        found = registry.EntryPoint(name, value, "mmkv.commands").load()
        assert isinstance(found, typer.Typer)


def test_a_package_adds_a_command_after_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
        import typer
        app = typer.Typer(add_completion=False)

        @app.command()
        def shout(word: str) -> None:
            print(word.upper())
    """
    entry = "[mmkv.commands]\nshout = shouting:app\n"
    monkeypatch.syspath_prepend(install(tmp_path, "shouting-commands", entry, shouting=source))
    assert cli.run(["shout", "hello"]) == 0
    assert capsys.readouterr().out == "HELLO\n"
    assert listed(capsys)[-2:] == ["mmdu", "shout"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module_of_anybody", "No module named 'no_such_module_of_anybody'"),
        ("app = 3", "command 'shout' is int, not a typer.Typer"),
    ],
)
def test_one_that_does_not_load_takes_no_other_down(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = "[mmkv.commands]\nshout = broken_shouting:app\n"
    monkeypatch.syspath_prepend(install(tmp_path, "broken", entry, broken_shouting=source))
    monkeypatch.delitem(__import__("sys").modules, "broken_shouting", raising=False)
    assert listed(capsys)[-1] == "shout"
    assert cli.run(["shout", "hello", "--loud"]) == 1
    written = capsys.readouterr()
    assert written.out == "" and said in written.err
    assert written.err.startswith("mmkv: error: ") and written.err.count("\n") == 1


@pytest.mark.parametrize("name", OURS)
def test_an_installation_older_than_the_entry_points_names_the_remedy(
    name: str, emptied: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([name, "--help"]) == 1
    written = capsys.readouterr()
    assert "pip install --no-deps -e ." in written.err and written.err.count("\n") == 1
    assert listed(capsys)[-4:] == OURS
