"""A class name means one thing in the whole repository."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Backends that do the same thing have names alike: rows of a cache, for torch's attention and for
# CUDA's stores; and what C and CUDA are given to evict.
ALIKE = {"Eviction", "Rows"}


def defined(folder: str) -> dict[str, set[str]]:
    """Return the files that define each public class at their top, by its name."""
    found = defaultdict(set)
    for path in sorted((ROOT / folder).glob("**/*.py")):
        if path.resolve() != path:
            continue  # by a link in mmkv/
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(path.relative_to(ROOT).as_posix())
    return found


def test_no_class_name_is_defined_twice() -> None:
    files = defaultdict(set)
    for folder in ("engine", "mmkv", "training", "eval"):
        found = defined(folder)
        assert len(found) > 30, folder
        for name, places in found.items():
            files[name] |= places
    twice = {name: places for name, places in files.items() if len(places) > 1}
    assert twice.keys() <= ALIKE, twice
