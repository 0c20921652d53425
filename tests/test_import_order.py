"""The packages import in one order: engine <- mmkv <- training <- eval; nothing imports tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("engine", "mmkv", "training", "eval")


def imported(path: Path) -> Iterator[str]:
    """Yield dotted names that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    later = {"tests", *ORDER[ORDER.index(package) + 1 :]}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.is_relative_to(ROOT / "mmkv" / "cli")
        for name in imported(path)
        if name.split(".")[0] in later
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_may_import_everything_and_does_so_inside_functions() -> None:
    for path in sorted((ROOT / "mmkv" / "cli").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in ("training", "eval", "tests"), path
