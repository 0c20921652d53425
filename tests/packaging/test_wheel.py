"""A wheel, built from a source archive, in an environment of its own and far from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmkv import __version__
from tests.support.lmms_runs import few_tasks, needs_lmms_eval

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
SOURCES += ("assets", "engine", "eval", "mmkv", "training")
# Folders at the top that a wheel holds as mmkv.engine and so on; users have folders of these names.
LINKED = ("engine", "eval", "training")
MOST_BYTES = 12 * 10**6
LEFT_OUT = ("/results/", "/assets/gates/", "/assets/smollm2-llava/")
pytestmark = [
    pytest.mark.slow(reason="compiles the C sources; each command starts torch"),
    pytest.mark.skipif(find_spec("setuptools") is None, reason="builds with setuptools"),
]


def run(*command: str | Path, cwd: Path, modules: Path | None = None) -> str:
    """Return the output of a command, which must succeed and may import from ``modules``."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    for name in ("PYTHONPATH", "MMKV_ASSETS"):
        env.pop(name, None)
    if modules is not None:
        env["PYTHONPATH"] = str(modules)
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source archive of this checkout."""
    folder = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "results", "build", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, folder)
    build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    run(sys.executable, "-c", build, cwd=folder)
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """Return the wheel of the source archive.

    Its lowest level is compiled from the archive, without optimisation; the others, which take
    longest, are this checkout's where it has them.
    """
    folder = archive.parent
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    setup = source / "setup.py"
    flags = setup.read_text("utf-8")
    assert '"-O3"' in flags
    setup.write_text(flags.replace('"-O3"', '"-O0"'), "utf-8")
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = source / "build" / platform / "mmkv/engine/backends/cpu"
    built.mkdir(parents=True)
    for level in ("v3", "v4", "sve"):
        for file in (ROOT / "engine/backends/cpu").glob(f"_step_{level}.*.so"):
            shutil.copy(file, built)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    run(sys.executable, "-c", build, cwd=source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ``bin/`` of an environment with the wheel and this one's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    run(*pip, "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheel), cwd=folder)
    (site,) = folder.glob("lib/*/site-packages")
    # A path in a .pth file: the .pth files at that path, an editable mmkv's too, are not read.
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(paths))
    return python.parent


@pytest.fixture
def traps(tmp_path: Path) -> None:
    """Write packages of common names into the folder where commands run."""
    for name in (*LINKED, "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('not the {name} of mmkv')")


@pytest.fixture
def mmkv(installed: Path, traps: None, tmp_path: Path) -> Callable[..., str]:
    """Return the command, in that folder."""

    def command(*arguments: str) -> str:
        return run(installed / "mmkv", *arguments, cwd=tmp_path)

    return command


def test_the_wheel_holds_what_commands_need_and_no_more(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mmkv"}
    assert {"mmkv/py.typed", *(f"mmkv/{name}/py.typed" for name in LINKED)} <= set(names)
    needed = ("tiny-vlm/model.safetensors", "tiny-vlm/gates/gates.safetensors", "scene.png")
    needed += ("sprites.png", "SPRITES-LICENSE.txt", "mmdu/benchmark.json")
    assert {f"mmkv/assets/{name}" for name in needed} <= set(names)
    for one in json.loads((ROOT / "mmkv/web/vendor.json").read_text()):
        if "folder" not in one:  # the others are for tests
            assert {f"mmkv/web/vendor/{name}" for name in one["files"]} <= set(names)
    assert {"mmkv/web/base.css", "mmkv/web/theme.js"} <= set(names)
    assert {"mmkv/eval/long_text/benchmarks.yaml", "mmkv/eval/lmms_tasks/mme.yaml"} <= set(names)
    assert "mmkv/eval/papers/tables.yaml" in names
    assert [name for name in names if any(part in name for part in LEFT_OUT)] == []
    assert [name for name in names if name.endswith((".c", ".h"))] == []


def test_a_build_without_a_compiler_says_so(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/no/compiler")
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib"]
    ran = subprocess.run(
        [*build, "--build-temp", tmp_path / "temp"],
        cwd=archive.parents[1],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("mmkv: nothing was compiled") == 1, ran.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_the_version_is_the_wheels(wheel: Path, mmkv: Callable[..., str]) -> None:
    assert wheel.name.split("-")[1] == mmkv("--version").split()[-1] == __version__


# Runs commands in turn within one process, which imports torch once; prints what each wrote.
COMMANDS = """
import contextlib, io, json, sys
from mmkv.cli.app import run
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as wrote:
        code = run(arguments)
    print(json.dumps([code, wrote.getvalue()]))
"""


def test_chat_bench_mmdu_and_what_is_there(installed: Path, traps: None, tmp_path: Path) -> None:
    """With that folder first on the path, as a notebook in it has it."""
    shutil.copy(ROOT / "assets" / "scene.png", tmp_path / "picture.png")
    chat = [*"chat --image picture.png --budget 256 -p".split(), "what is at row 2, column 3?"]
    bench = ["bench", "--steps", "2", "--rounds", "1", "--context", "64", "--json"]
    mmdu = ["mmdu", "--limit", "1", "--output", "answers"]
    commands = json.dumps([chat, bench, mmdu, ["distill", "--help"], ["env"]])
    wrote = run(installed / "python", "-c", COMMANDS, commands, cwd=tmp_path)
    codes, (answer, report, _, usage, env) = zip(*map(json.loads, wrote.splitlines()), strict=True)
    assert codes == (0,) * 5
    assert answer.strip() and json.loads(report)["model"] == "tiny-vlm"
    assert any((tmp_path / "answers").iterdir())
    assert "--output" in usage
    lines = dict(line.split(": ", 1) for line in env.splitlines())
    assert lines["mmkv"] == __version__
    assert Path(lines["bundled model"]).is_relative_to(installed.parent.resolve())
    if shutil.which("cc"):
        assert lines["decode step on the CPU"].startswith("native (level")


@needs_lmms_eval
@pytest.mark.long(reason="lmms-eval twice; test_lmms_eval.py has it from the checkout")
@pytest.mark.parametrize("whole", [False, True])
def test_eval(installed: Path, traps: None, tmp_path: Path, whole: bool) -> None:
    """With lmms-eval's tasks that have a local form, or with all of them."""
    if not whole:
        few_tasks(tmp_path / "modules")
    modules = None if whole else tmp_path / "modules"
    arguments = "eval --tasks mmdu --limit 1 --output results".split()
    run(installed / "mmkv", *arguments, cwd=tmp_path, modules=modules)
    assert list((tmp_path / "results").rglob("*_results.json"))
