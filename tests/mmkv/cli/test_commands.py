"""Registered commands, the user's defaults, ``mmkv env``, ``mmkv policies``, ``mmkv cache``."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import typer
from torch import Tensor

from mmkv import policies
from mmkv.cli import app as cli
from mmkv.cli.app import chat
from mmkv.cli.arguments import described
from mmkv.engine.policies import (
    PRESETS,
    CacheView,
    Needs,
    Policy,
    make_policy,
    register_policy,
    registry,
)
from mmkv.engine.policies.preset import show
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model, config_file, state_folder

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


ROOT = Path(__file__).resolve().parents[3]
OURS = ["distill", "calibrate", "bench", "eval", "mmdu"]


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
        ("raise OSError", "(OSError: )"),
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
    assert listed(capsys)[-len(OURS) :] == OURS
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
    assert listed(capsys)[-len(OURS) :] == OURS


# Defaults of the chat from the user's file, and what ``mmkv env`` says of it.


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
        ("nonsense = 1", "no option 'nonsense'; there are adapter, autosave,"),
        ('prompt = "x"', "no option 'prompt'"),
        ("[chat]\nbudget = 3", "no option 'chat'"),
        ('top_k = "x"', "top_k is 'x'; give a whole number"),
        ("top_k = true", "top_k is True; give a whole number"),
        ("quiet = 1", "quiet is 1; give true or false"),
        ('stop = "x"', 'give a list of texts, such as ["###"]'),
        ("budget = true", "budget is True; give a number"),
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


# ``mmkv policies``: what it says of each policy is what the engine does.


def test_every_preset_is_listed_with_its_parameters(mmkv: Callable[..., Ran]) -> None:
    ran = mmkv("policies", "--json")
    assert ran.code == 0
    rows = {row["name"]: row for row in json.loads(ran.out)}
    assert list(rows)[: len(PRESETS)] == list(PRESETS)
    for name, preset in PRESETS.items():
        row, policy = rows[name], make_policy(name)
        assert {one["name"]: one["default"] for one in row["parameters"]} == {
            key: show(one.default) for key, one in preset.parameters.items()
        }
        assert all(one["help"] and one["takes"] for one in row["parameters"])
        assert row["title"] and row["source"] == preset.source and not row["problem"]
        reads = policy.scoring.needs != Needs() or policy.pruner is not None
        reads |= policy.admission is not None
        assert bool(row["needs"]) == reads
    graph = "CUDA graph, Triton eviction"
    assert rows["balanced"]["gpu"] == graph
    assert rows["adakv"]["gpu"] == f"{graph}; its own formulas in torch: scores"
    assert rows["h2o"]["gpu"] == f"{graph}; its own formulas in torch: states of entries"
    for name in ("dbtrimkv", "snapkv"):  # as an engine that is loaded with them says
        engine = Runtime.from_pretrained(bundled_model(), policy=name, dtype="float32")
        assert ("C eviction" in rows[name]["cpu"]) == engine.evict_path.startswith("native")
        assert ("C step" in rows[name]["cpu"]) == (engine.decode_path == "native")


def test_the_table_has_papers_needs_and_places(mmkv: Callable[..., Ran]) -> None:
    shown = mmkv("policies").out
    for words in ("dbtrimkv", "2605.09649", "sinks=4", "16 queries", "CUDA graph"):
        assert words in shown


def test_policies_of_others_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = dict(registry._REGISTRY.registered)
    monkeypatch.setattr(registry._REGISTRY, "registered", registered)
    register_policy("mine", make_policy("streamingllm:sinks=2"))
    register_policy("broken", lambda steps: None)  # type: ignore[arg-type,return-value]
    rows = {row.name: row for row in policies.listed()}
    assert rows["mine"].source == "arXiv 2309.17453" and not rows["mine"].parameters
    assert "must be a Policy" in rows["broken"].problem
    assert policies.table(list(rows.values())).row_count == len(rows)


def test_needs_are_said_in_words() -> None:
    def words(**needs: Any) -> list[str]:
        return policies.needs_of(Policy("x", Reads(Needs(**needs)), None))

    assert words() == []
    merging = ["pictures of prompts", "CLIP's tower (LLaVA)"]
    assert policies.needs_of(make_policy("visionzip")) == merging
    assert policies.needs_of(make_policy("fastv")) == merging[:1]
    assert words(gates="retention", queries=1) == ["retention gates", "1 query"]
    assert words(queries=16, keys=True, values=True) == ["16 queries", "keys", "values"]
    assert words(queries=16, positions=True) == ["16 queries", "their positions"]
    assert words(state=1, mass="mean") == ["1 number an entry", "attention mass (mean of a group)"]
    assert words(state=2, taps=(0.3, 0.7)) == ["2 numbers an entry", "hidden states"]


@dataclass(frozen=True)
class Reads:
    """A scorer that is only asked for its needs."""

    needs: Needs

    def score(self, view: CacheView) -> Tensor:
        return view.position.float()


def test_the_cache_command_lists_and_clears(
    model: str, tmp_path: Path, mmkv: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_PANELS", "1GiB")
    monkeypatch.setattr("mmkv.engine.model.panel_files.LEAST_BYTES", 0)
    folder = tmp_path / "cache" / "mmkv" / "panels"
    assert mmkv("cache").out == f"0 B held in {folder} (0 files)\n"
    for form in ("int8", "bf16"):
        ran = mmkv("chat", model, "--raw", "--max-new-tokens", "1", "-p", "a", "--weights", form)
        assert ran.code == 0 and f"packed weights are kept in {folder}" in ran.err.replace("\n", "")
    rows = json.loads(mmkv("cache", "--json").out)
    assert [(row["model"], row["form"]) for row in rows] == [(model, "bf16"), (model, "int8")]
    first = mmkv("cache", Path(model).name).out.splitlines()[0]
    assert re.fullmatch(rf" *[\d.]+ MiB  bf16  text    last used [-\d]+ [\d:]+  {model}", first)
    assert mmkv("cache", "other", "--clear").error_line().endswith("lists what is")
    assert len(list(folder.iterdir())) == 2
    assert mmkv("cache", "--clear", model).out.endswith(f"deleted in {folder} (2 files)\n")
    assert list(folder.iterdir()) == []
