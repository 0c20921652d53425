"""Defaults of the chat from the user's file, and what ``mmkv env`` says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmkv.cli.app import chat
from mmkv.cli.config import described
from mmkv.resources import config_file, state_folder

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "mmkv.toml"


def test_the_file_sets_defaults_and_the_command_line_counts_more(
    mmkv: Callable[..., Ran], model: str, config: Path
) -> None:
    config.write_text(
        f'model = "{model}"\npolicy = "snapkv"\nbudget = 12\nmax-new-tokens = 4\njson = true\n'
    )
    held = json.loads(mmkv("chat", "-p", "hello").out)
    assert held["model"] == model and held["policy"] == "snapkv"
    assert held["budget"] == {"unit": "entries", "value": 12} and held["tokens"]["generated"] <= 4
    held = json.loads(mmkv("chat", "-p", "hello", "--policy", "tova", "--budget", "9").out)
    assert held["policy"] == "tova" and held["budget"]["value"] == 9
    # Units of the budget exclude each other; here one is of the file.
    held = json.loads(mmkv("chat", "-p", "hello", "--budget-fraction", "0.5").out)
    assert held["budget"] == {"unit": "fraction", "value": 0.5}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense = 1", "no option 'nonsense'; there are autosave, budget,"),
        ('prompt = "x"', "no option 'prompt'"),
        ("[chat]\nbudget = 3", "no option 'chat'"),
        ('top_k = "x"', "top_k is 'x'; give a whole number"),
        ("top_k = true", "top_k is True; give a whole number"),
        ("quiet = 1", "quiet is 1; give true or false"),
        ('stop = "x"', 'give a list of texts, such as ["###"]'),
        ("budget = [1]", "budget is [1]; give a number"),
        ("budget = 1979-05-27", "give a number"),
        ("seed = 1.5", "give a whole number"),
        ("system = 3", "give a text in quotes"),
        ("x = ", "is not valid TOML"),
        ("\x00", "is not valid TOML"),
        ('x = "\udcff"', "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    mmkv: Callable[..., Ran], config: Path, line: str, says: str
) -> None:
    config.write_bytes(line.encode(errors="surrogateescape"))
    ran = mmkv("chat", "-p", "hello")
    assert ran.code == 1 and says in ran.error_line() and str(config) in ran.error_line()
    assert says in described(chat)


def test_a_folder_in_its_place_is_one_line(mmkv: Callable[..., Ran], config: Path) -> None:
    config.mkdir()
    assert "cannot read" in mmkv("chat", "-p", "hello").error_line()
    assert mmkv("chat", "--help").code == 0 and "cannot read" in mmkv("env").out


def test_env_shows_the_file(mmkv: Callable[..., Ran], config: Path) -> None:
    assert described(chat) == f"config file: {config} (absent)"
    config.write_text("budget = 12\ntop_p = 1\n")
    assert f"config file: {config} (budget 12, top_p 1)" in mmkv("env").out


def test_a_user_without_a_home_can_run_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without HOME, of a user that the system does not know, as containers have them."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()
    assert (config_file(), state_folder()) == (
        Path("/.config/mmkv.toml"),
        Path("/.local/state/mmkv"),
    )
