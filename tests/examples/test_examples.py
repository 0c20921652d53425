"""Each example prints what its first lines state; the guides to add something, done as they say."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
import runpy
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import mmkv
from mmkv.engine.model import families
from mmkv.engine.policies import names, registry
from mmkv.engine.runtime import Runtime
from tests.support.chat_models import save_llama, save_qwen3_vl
from tests.support.oracle import Oracle
from tests.support.packages import install
from tests.support.sessions import LATER, PICTURES, load, text_ids
from tools.pictures import digest

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is gone after it."""
    monkeypatch.setattr(registry._REGISTRY, "registered", {})
    monkeypatch.setattr(families._REGISTRY, "registered", {})


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run an example as a program. Returns its names."""
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in text for path in EXAMPLES.glob("*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f"Run: python examples/{path.name}" in path.read_text().partition('"""\n\n')[0]


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    run("chat.py")
    printed = capsys.readouterr().out
    assert (
        "policy dbtrimkv, 24 entries per row" in printed
        and "> what is at row 2, column 3?\nfrog" in printed
    )
    # Tokens seen after the first turn, in the copy, and in the session loaded from the file.
    seen = [int(count) for count in re.findall(r"(\d+) tokens seen", printed)]
    kept = [int(count) for count in re.findall(r"(\d+) entries kept", printed)]
    assert seen[1] > seen[0] < seen[2] and kept[0] == kept[2] == 2 * kept[1]


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    run("demo.py")
    row = re.compile(r"^(.+?)  +(.+?)  +(yes|no) +(\d+) KiB$", re.MULTILINE)
    rows = row.findall(capsys.readouterr().out)
    assert [row[1:3] for row in rows] == [("frog", "yes"), ("frog", "yes"), ("nothing and 1", "no")]
    full, kept, window = (int(row[3]) for row in rows)
    assert full > 2.5 * kept and abs(kept - window) < 0.1 * kept


@pytest.mark.long(reason="three minutes of a camera")
def test_an_endless_stream(capsys: pytest.CaptureFixture[str]) -> None:
    run("endless.py", "--minutes", "3", "--speed", "0")
    printed = capsys.readouterr().out
    drawn = {("picture 1", "row 3, column 1"): "yellow triangle"}  # of the seed, seen by eye
    asked = re.findall(r"what was at (.+) of (picture \d)\?\s+mmkv (.+?) [✓✗]", printed)
    assert (drawn[asked[0][1], asked[0][0]], len(asked)) == (asked[0][2], 6)
    assert "144 near-duplicates skipped" in " ".join(printed.split())
    ((mmkv_right, window_right),) = re.findall(r"mmkv (\d) of 6, window (\d) of 6", printed)
    marks = re.findall(
        r"(mmkv|window) [^✓✗]+([✓✗])", printed.partition("drawn.")[2].partition("Right:")[0]
    )
    counts = [sum(one == (name, "✓") for one in marks) for name in ("mmkv", "window")]
    assert counts == [int(mmkv_right), int(window_right)] and counts[0] >= counts[1] + 2


@pytest.mark.parametrize(
    "asked", [("--minutes", "0"), ("--budget", "0"), ("--svg", "/no/such/folder/a.svg")]
)
def test_a_stream_that_cannot_be_is_refused_at_once(
    asked: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("endless.py", *asked)
    printed = capsys.readouterr()
    assert "error: " in printed.err and printed.out == ""


def test_a_custom_policy(capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_policy.py")
    ours, theirs = capsys.readouterr().out.splitlines()
    assert ours.startswith("mean-key: frog (") and theirs.startswith("streamingllm: ")
    assert len((EXAMPLES / "custom_policy.py").read_text().splitlines()) <= 40


def test_a_custom_family(capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_family.py")
    whole, cut = capsys.readouterr().out.splitlines()
    assert whole == "budget 64: 156 entries kept, 16 of 16 tokens as in transformers"
    assert cut.startswith("budget 8: 32 entries kept")


def test_a_custom_layer(capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_layer.py")
    whole, cut = capsys.readouterr().out.splitlines()
    state = "and 2048 bytes of state kept"
    assert whole == f"budget 64: 78 entries {state}, 16 of 16 tokens as in transformers"
    assert cut.startswith(f"budget 8: 16 entries {state}")
    lines = (EXAMPLES / "custom_layer.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 80


def test_transformers_generate(capsys: pytest.CaptureFixture[str]) -> None:
    run("transformers_generate.py")
    alone, retained, bytes_held, second, after = capsys.readouterr().out.splitlines()
    assert alone.startswith("transformers alone: frog (")
    assert retained == "policy dbtrimkv, 8 entries per row: frog"
    whole, held, later = (
        int(re.findall(r"(\d+) KiB", line)[0]) for line in (alone, bytes_held, second)
    )
    assert 2 * held < whole and 2 * later < whole and "more tokens" in second
    assert after.startswith("afterwards: 0 bytes")


@pytest.mark.long(reason="a process that loads torch and a model")
def test_serving(capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself: it answers, goes on with the second question, and ends at SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run("serve.py", str(port))
    lines = capsys.readouterr().out.splitlines()
    first, second = (json.loads(lines[at]) for at in (1, 3))
    assert lines[0] == "frog" and lines[4] == "the server ended with exit code 0"
    assert first["mmkv"]["resumed"] == 0 < first["mmkv"]["by_modality"]["image"]
    read = second["prompt_tokens"] - second["mmkv"]["resumed"]
    assert 0 < read < 30 < second["mmkv"]["resumed"]


def test_the_notebook(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From top to bottom, as a notebook runs it: a cell's last expression is shown."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "tour.ipynb", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), names))
    printed = capsys.readouterr().out
    assert "> what is at row 2, column 3?\nfrog\n" in printed and "\npineapple\n" in printed
    held = [int(count) for count in re.findall(r"^  (\d+) of \d+ entries", printed, re.MULTILINE)]
    assert held == [144, 144, 72] and "[patch]" in printed
    assert printed.endswith("within 8 entries per row, policy dbtrimkv:\nfrog\n")
    frame = next(one for one in shown if hasattr(one, "retained"))._repr_html_()
    assert frame.startswith("<iframe ") and "&lt;!doctype html&gt;" in frame
    assert "looked most at row 2, column 3 of picture 1: no head holds it now." in frame
    names["session"].close()
    # What a viewer of repositories shows, which runs nothing: replies, and two pictures.
    assert notebook["metadata"]["outputs_of"] == digest(notebook), "python -m tools.pictures tour"
    outputs = [output for cell in cells for output in cell["outputs"]]
    replies = re.compile(r"^> .*\n.*$", re.MULTILINE)
    texts = "".join(line for output in outputs for line in output.get("text", []))
    assert replies.findall(texts) == replies.findall(printed) != []
    pictures = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert len(pictures) == 2 == sum(value is not None for value in shown)
    assert all(base64.b64decode(one).startswith(b"\x89PNG") for one in pictures)


@pytest.mark.long(reason="test_distill.py trains some")
def test_training_gates(capsys: pytest.CaptureFixture[str]) -> None:
    run("train_gates.py", "3")
    printed = capsys.readouterr().out
    assert (
        "loss" in printed and "of 3 steps" in printed and "dbtrimkv with the new gates: " in printed
    )


@pytest.mark.parametrize("native", ["1", "0"])
def test_the_custom_policy_keeps_what_a_dense_computation_keeps(
    native: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks, decoding and a later turn, in C and in torch."""
    from transformers import AutoModelForImageTextToText

    monkeypatch.setenv("MMKV_NATIVE", native)
    policy = runpy.run_path(str(EXAMPLES / "custom_policy.py"))["POLICY"]
    assert isinstance(policy, mmkv.Policy)
    engine: Runtime = load(folders["vl"], policy=policy, budget=9)
    model = AutoModelForImageTextToText.from_pretrained(folders["vl"], dtype=torch.float32).eval()
    oracle = Oracle(model, None, "keydiff", budget=9, prefill_chunk=12)
    with engine.session() as session:
        for part in (PICTURES, text_ids(6, 1), LATER, text_ids(5, 2)):
            if isinstance(part, Tensor):
                for token in part.tolist():
                    got, wanted = session.decode(token), oracle.decode(token)
                    oracle.follow(session.retained())
            else:
                got, wanted = session.prefill(part), oracle.prefill(part)
                oracle.follow(session.retained())
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    assert oracle.evictions >= 15 and oracle.swaps == 0


# The guides to add a policy, a family and a server option, done as they say.


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


def test_what_the_guide_to_server_options_shows_is_there() -> None:
    """Where the setting acts, and its test; its option is the guide's to add."""
    text = (ROOT / "docs" / "how-to" / "add-a-server-option.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for shown, name in zip(code[1:], ("mmkv/server/checked.py", HTTP_TESTS), strict=True):
        source = (ROOT / name).read_text()
        lines = [line.strip() for line in shown.strip().splitlines()]
        assert "\n".join(lines) in re.sub(r"^ +", "", source, flags=re.MULTILINE), name


@pytest.mark.long(reason="a process that loads torch and a model")
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
