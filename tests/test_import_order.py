"""The packages import in one order: engine <- mmkv <- training <- eval; nothing imports tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Folders at the top; mmkv/ has links to the others, and their names are mmkv.engine and so on.
ORDER = ("engine", "mmkv", "training", "eval")


def imported(path: Path) -> Iterator[list[str]]:
    """Yield the dotted names that a file imports, in parts; inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            yield (node.module or "").split(".")


def package_of(parts: list[str]) -> str:
    """Return the folder at the top of the repository that a dotted name lies in."""
    return parts[1] if parts[0] == "mmkv" and parts[1:2] and parts[1] in ORDER else parts[0]


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    later = {"tests", *ORDER[ORDER.index(package) + 1 :]}
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(name)}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imported(path)
        if package_of(name) in later
    ]
    assert not wrong, "\n".join(wrong)


# What holds sequences and runs them: backends get values instead.
CORE = ("budgets", "prefill", "runtime", "sequence", "session_file", "steps", "trace")


def test_no_backend_imports_the_core_not_even_for_types() -> None:
    core = {f"mmkv.engine.{name}" for name in CORE}
    assert all((ROOT / "engine" / f"{name}.py").is_file() for name in CORE)
    wrong, files = [], sorted((ROOT / "engine" / "backends").rglob("*.py"))
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in names if name in core]
    assert not wrong and len(files) > 30, wrong
