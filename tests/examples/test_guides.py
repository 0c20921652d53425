"""The guides to add a policy, a family and a server option, done as they say."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmkv.engine.model import families
from mmkv.engine.policies import names, registry
from tests.support.chat_models import save_llama, save_qwen3_vl
from tests.support.packages import install

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

ROOT = Path(__file__).resolve().parents[2]
HTTP_TESTS = "tests/mmkv/server/test_http.py"


def blocks(guide: str) -> dict[str, str]:
    """Return code by the file that the sentence before it names; other code by its language."""
    text = (ROOT / "docs" / "how-to" / guide).read_text()
    found = {}
    for before, language, code in re.findall(r"([^\n]*)\n\n```(\w+)\n(.*?)```", text, re.DOTALL):
        named = re.findall(r"`([\w.]+\.(?:py|toml))`", before)
        found[named[0] if named else language] = code
    return found


@pytest.fixture
def guide(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where the guide's package is installed, as its pyproject.toml says."""
    code = blocks(request.param)
    project = tomllib.loads(code["pyproject.toml"])
    modules = project["tool"]["setuptools"]["py-modules"]
    lines = []
    for group, offered in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in offered.items())]
    sources = {name: code[f"{name}.py"] for name in modules}
    install(tmp_path / "site", project["project"]["name"], "\n".join(lines), **sources)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for name in ("mmkv_keynorm", "mmkv_keynorm_preset", "mmkv_nano", "scratch_other"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("guide", ["add-a-policy.md"], indirect=True)
def test_the_policy_of_the_guide_runs(guide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "keynorm" in names()
    assert "policy keynorm: of the package mmkv-keynorm" in registry.describe_added()
    (guide / "try.py").write_text(blocks("add-a-policy.md")["python"])
    made = runpy.run_path(str(guide / "try.py"))
    printed = capsys.readouterr().out
    assert "Memory(tokens_seen=" in printed and made["engine"].policy.name == "keynorm"
    assert made["session"].closed


@pytest.mark.parametrize("guide", ["add-a-policy.md"], indirect=True)
def test_the_preset_of_the_guide_has_its_parameter(
    guide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "mmkv_keynorm_preset"
    (guide / f"{module}.py").write_text(blocks("add-a-policy.md")[f"{module}.py"])
    monkeypatch.syspath_prepend(guide)
    preset = importlib.import_module(module).PRESET
    plain, wider = preset.policy("keynorm", {}), preset.policy("keynorm", {"recent": "8"})
    assert (plain.name, plain.protect_recent) == ("keynorm", 4)
    assert (wider.name, wider.protect_recent) == ("keynorm+8", 8)


@pytest.mark.parametrize("guide", ["add-a-policy.md"], indirect=True)
def test_the_policy_of_the_guide_chats(guide: Path, mmkv: Callable[..., Ran]) -> None:
    scene = str(ROOT / "assets" / "scene.png")
    asked = ["--image", scene, "-p", "what is at row 2, column 3?"]
    ran = mmkv("chat", "--policy", "keynorm", "--budget", "12", *asked)
    assert ran.code == 0 and ran.out.strip(), ran.err
    assert "kept 216 of " in ran.err and "policy keynorm" in ran.err
    assert "\npolicy keynorm: of the package mmkv-keynorm\n" in mmkv("env").out


def test_the_oracle_of_the_guide_is_the_tests_own() -> None:
    (shown,) = ast.parse(blocks("add-a-policy.md")["keys.py"]).body
    source = ast.parse((ROOT / "tests" / "support" / "oracle" / "methods" / "keys.py").read_text())
    assert ast.unparse(shown) in [ast.unparse(node) for node in source.body]


def test_what_the_guide_to_server_options_shows_is_there() -> None:
    """Where the setting acts, and its test; its option is the guide's to add."""
    text = (ROOT / "docs" / "how-to" / "add-a-server-option.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for shown, name in zip(code[1:], ("mmkv/server/chat.py", HTTP_TESTS), strict=True):
        source = (ROOT / name).read_text()
        lines = [line.strip() for line in shown.strip().splitlines()]
        assert "\n".join(lines) in re.sub(r"^ +", "", source, flags=re.MULTILINE), name


@pytest.mark.slow(reason="a process that loads torch and a model")
@pytest.mark.parametrize("guide", ["add-a-family.md"], indirect=True)
def test_the_family_of_the_guide_chats(guide: Path) -> None:
    """In a process of its own: transformers does not know its type until it is imported."""
    folder = retype(save_llama(guide / "model"), "llama", "nano")
    command = [sys.executable, "-m", "mmkv", "chat", folder, "--budget", "8", "-p", "hello"]
    ran = subprocess.run(
        [*command, "--max-new-tokens", "4"], capture_output=True, text=True, cwd=guide
    )
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    assert "model family nano: of the package mmkv-nano" in families.describe_added()


SEES = """
    import transformers
    from mmkv.engine.model.families import Qwen3VLFamily

    class OtherConfig(transformers.Qwen3VLConfig):
        model_type = "other_vl"

    class OtherModel(transformers.Qwen3VLForConditionalGeneration):
        config_class = OtherConfig

    transformers.AutoConfig.register("other_vl", OtherConfig, exist_ok=True)
    transformers.AutoModelForImageTextToText.register(OtherConfig, OtherModel, exist_ok=True)

    class OtherFamily(Qwen3VLFamily):
        model_types = ("other_vl",)
"""


def retype(folder: Path, old: str, new: str) -> str:
    """Give a checkpoint another model type."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace(f'"{old}"', f'"{new}"'))
    return str(folder)


def test_a_family_derived_from_one_that_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmkv: Callable[..., Ran]
) -> None:
    """Model and processor are found by the family, not by the name of the type."""
    entry_points = "[mmkv.families]\nother_vl = scratch_other:OtherFamily\n"
    site = install(tmp_path / "site", "scratch-other", entry_points, scratch_other=SEES)
    monkeypatch.syspath_prepend(site)
    scene = str(ROOT / "assets" / "scene.png")
    texts = []
    for model_type in ("qwen3_vl", "other_vl"):
        folder = retype(save_qwen3_vl(tmp_path / model_type), "qwen3_vl", model_type)
        asked = ["--image", scene, "-p", "what?", "--max-new-tokens", "6"]
        ran = mmkv("chat", folder, "--budget", "8", *asked)
        assert ran.code == 0, ran.err
        texts.append(ran.out)
    assert texts[0] == texts[1] and texts[0].strip()


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("gone", "model family 'gone' of the package scratch-gone does not load"),
        ("llama", "scratch-gone offers a model family 'llama', which is one of mmkv's own"),
        ("odd", "model type 'odd'"),
    ],
)
def test_families_that_cannot_be_had(
    model_type: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mmkv: Callable[..., Ran],
) -> None:
    entry_points = "[mmkv.families]\ngone = scratch_gone:One\nllama = scratch_gone:Two\n"
    monkeypatch.syspath_prepend(install(tmp_path / "site", "scratch-gone", entry_points))
    ran = mmkv("chat", retype(save_llama(tmp_path / "model"), "llama", model_type), "-p", "hello")
    assert ran.code == 1 and says in ran.error_line()
