"""The files that the pages share: the libraries are those of the list, the colours can be read."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import product

import pytest

from mmkv.web import web_file
from tools.vendor import LIST, folder_of


def test_the_libraries_are_those_that_are_pinned_and_have_their_licences() -> None:
    packages = json.loads(LIST.read_text())
    for folder in {folder_of(one) for one in packages}:
        files = [one["files"] for one in packages if folder_of(one) == folder]
        pinned = {name: about["sha256"] for each in files for name, about in each.items()}
        found = {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert found == pinned, "run `make vendor`"
    for one in packages:
        assert re.fullmatch(r"sha512-[\w+/]{86}==", one["integrity"])
        assert re.fullmatch(r"\d+\.\d+\.\d+", one["version"])
        assert any(name.startswith("LICENSE.") for name in one["files"]), one["package"]


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast_on_every_surface(scheme: int) -> None:
    found = re.findall(
        r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", web_file("base.css").decode()
    )
    colours = {name: pair[scheme] for name, *pair in found}

    def contrast(one: str, other: str) -> float:
        low, high = sorted(luminance(colours[name]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    surfaces = ("page", "surface", "raised", "hover", "tint")
    pairs = [*product(("text", "muted", "accent", "danger"), surfaces)]
    pairs += [("on-accent", "accent"), ("danger", "danger-tint"), ("good", "page")]
    assert [pair for pair in pairs if contrast(*pair) < 4.5] == []
    edges = product(("edge", "of-text", "of-image", "of-video"), surfaces[:3])
    assert [pair for pair in edges if contrast(*pair) < 3] == []
