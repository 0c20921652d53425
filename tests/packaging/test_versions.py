"""The lowest versions that pyproject.toml allows are those that make test-oldest installs; torch is
a build without CUDA where no NVIDIA card is."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = {"dependencies": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(
    "group", ["dependencies", "eval-light", "serve", "test", "explain", "train"]
)
def test_pins_are_the_lower_bounds(group: str) -> None:
    pinned = {canonicalize_name(pin.name): pin for pin in PINS}
    bounds = [Requirement(text) for text in GROUPS[group] if not text.startswith("mmkv[")]
    assert bounds
    for bound in bounds:
        (lowest,) = (Version(one.version) for one in bound.specifier if one.operator == ">=")
        (pin,) = (Version(one.version) for one in pinned[canonicalize_name(bound.name)].specifier)
        # Some first releases are missing or withdrawn: httptools 0.7.1 is the first of 0.7.
        assert pin.release[: len(lowest.release)] == lowest.release, bound
        assert bound.specifier.contains(pin), bound


def test_every_pin_is_of_something_that_pyproject_names() -> None:
    named = {
        canonicalize_name(Requirement(text).name) for texts in GROUPS.values() for text in texts
    }
    assert {canonicalize_name(pin.name) for pin in PINS} <= named


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FROM_FOLDER, FROM_INDEX = "--no-index --no-deps torch==", "--retries 2 --index-url"


@pytest.mark.skipif(
    platform.system() != "Linux" or not shutil.which("make"), reason="the rule is that of Linux"
)
@pytest.mark.parametrize(
    ("given", "fails", "asked"),
    [
        ((), "nothing", [FROM_FOLDER]),
        ((), "--no-index", [FROM_FOLDER, f"{FROM_INDEX} {CPU_INDEX} --no-deps torch=="]),
        (("TORCH_INDEX=http://own/",), "--no-index", [FROM_FOLDER, f"{FROM_INDEX} http://own/ "]),
        (("TORCH_INDEX=",), "nothing", []),  # as where a card is
    ],
)
def test_make_takes_a_torch_without_cuda(
    given: tuple[str, ...], fails: str, asked: list[str], tmp_path: Path
) -> None:
    ran = make_ready(tmp_path, fails, *given)
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "asked").read_text().splitlines()
    assert len(lines) == len(asked) + 1 and lines[-1].endswith("--editable .[serve]")
    for line, wanted in zip(lines, asked, strict=False):
        assert wanted in line


@pytest.mark.skipif(
    platform.system() != "Linux" or not shutil.which("make"), reason="the rule is that of Linux"
)
def test_an_index_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    ran = make_ready(tmp_path, "torch==")
    said = [line for line in ran.stderr.splitlines() if not line.startswith("make")]
    assert ran.returncode and len(said) == 1, ran.stderr
    assert f"{CPU_INDEX} gave no torch (ERROR: no route)" in said[0]
    assert "TORCH_INDEX=URL" in said[0]
    assert "--editable" not in (tmp_path / "asked").read_text()


def make_ready(folder: Path, fails: str, *given: str) -> subprocess.CompletedProcess[str]:
    """Make what the demo needs on a machine without a card, with a pip that only notes its words.

    Args:
        fails: calls with this word fail.
    """
    pip = folder / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        f'case "$*" in *"{fails}"*) echo "ERROR: no route" >&2; exit 1;; esac\n'
    )
    pip.chmod(0o755)
    names = (f"PIP={pip}", f"VENV={folder}", "PYTHON=true", "CARD=")
    made = ["make", f"{folder}/.mmkv-demo", *names, *given]
    return subprocess.run(made, cwd=ROOT, capture_output=True, text=True, timeout=60)
