"""The lowest versions that pyproject.toml allows are those that make test-oldest installs."""

from __future__ import annotations

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
