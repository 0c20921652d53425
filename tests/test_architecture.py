"""The pictures of docs/how-it-works/overview.md show the imports; packages import in one order."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Modules that a picture leaves out, as its text says, and arrows that it leaves out.
APART = {
    "packages": {"mmkv/__main__"},
    "engine": {
        f"engine/{name}"
        for name in (
            "backends/base budget config errors options paths read_ids registry scorer_state system"
        ).split()
    },
}
UNDRAWN = {"packages": {"engine"}, "engine": set()}


def pictures() -> dict[str, tuple[set[str], set[tuple[str, str]]]]:
    """Return per picture its nodes (paths) and its arrows."""
    text = (ROOT / "docs" / "how-it-works" / "overview.md").read_text()
    found = {}
    for name, body in re.findall(r"```mermaid\n%% (\w+)\n(.*?)```", text, re.DOTALL):
        nodes = {key: path for key, path in re.findall(r'^ *(\w+)\["([\w/]+)', body, re.MULTILINE)}
        arrows = re.findall(r"^ *(\w+) --> ([\w &]+)$", body, re.MULTILINE)
        edges = {(nodes[one], nodes[two]) for one, many in arrows for two in many.split(" & ")}
        found[name] = set(nodes.values()), edges
    return found


def imports(path: Path, for_types: bool = True) -> list[str]:
    """Return what a file imports, inside functions, too, as paths from the top of the repository.

    Args:
        for_types: also what only a type checker reads.
    """
    return [name for name, typed in all_imports(path) if for_types or not typed]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def all_imports(path: Path) -> list[tuple[str, bool]]:
    """Return what a file imports, and whether only a type checker reads it."""
    found: list[tuple[str, bool]] = []
    nodes: list[tuple[ast.AST, bool]] = [(parsed(path), False)]
    while nodes:
        node, typed = nodes.pop()
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: a relative import"
            # ``from mmkv.engine import hub`` imports a module, too.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, (ast.stmt, ast.Module, ast.ExceptHandler, ast.match_case)):
            inside = isinstance(node, ast.If) and any(
                isinstance(part, ast.Name) and part.id == "TYPE_CHECKING"
                for part in ast.walk(node.test)
            )
            body = node.body if inside else ()  # type: ignore[attr-defined]
            for part in ast.iter_child_nodes(node):
                nodes.append((part, typed or part in body))
        # Folders at the top, to which mmkv/ has links.
        linked = r"^mmkv\.(?=(engine|eval|training)\b)"
        found += [(re.sub(linked, "", name).replace(".", "/"), typed) for name in names]
    return found


def place(path: str, nodes: set[str]) -> str | None:
    """Return the innermost node that holds ``path``.

    A file of its own beside the nodes is itself.
    """
    held = [node for node in nodes if path == node or path.startswith(f"{node}/")]
    return max(held, key=len, default=None)


@pytest.mark.parametrize("name", APART)
def test_a_picture_has_the_arrows_of_the_code(name: str) -> None:
    nodes, drawn = pictures()[name]
    known = nodes | APART[name] | UNDRAWN[name]
    ends = APART[name] | UNDRAWN[name]
    wanted = set()
    for package in {node.split("/")[0] for node in nodes}:
        for file in sorted((ROOT / package).rglob("*.py")):
            one = place(file.relative_to(ROOT).with_suffix("").as_posix(), known)
            for two in (place(module, known) for module in imports(file, for_types=False)):
                if one and two and one != two and not {one, two} & ends:
                    wanted.add((one, two))
    assert drawn == wanted, f"missing: {wanted - drawn}; too many: {drawn - wanted}"


# Made on the host on purpose: shares of rows, and a mask that is moved where it is used.
ON_THE_HOST = {"engine/policies/allocation.py", "engine/policies/pruning.py"}
FACTORIES = set("arange as_tensor empty eye full linspace ones rand randint tensor zeros".split())


def test_tensors_of_cache_and_policies_are_made_where_they_are_used() -> None:
    """A factory without ``device=`` makes a tensor of the CPU, which only a GPU would show."""
    checked = 0
    for path in sorted(ROOT.glob("engine/cache/*.py")) + sorted(ROOT.glob("engine/policies/*.py")):
        if str(path.relative_to(ROOT)) in ON_THE_HOST:
            continue
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            checked += 1
            named = {keyword.arg for keyword in node.keywords}
            assert "device" in named, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
    assert checked > 20


# The packages import in one order: engine <- mmkv <- training <- eval <- benchmarks; none imports
# tests.


ORDER = ("engine", "mmkv", "training", "eval", "benchmarks")


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    later = {"tests", *ORDER[ORDER.index(package) + 1 :]}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imports(path)
        if name.split("/")[0] in later
    ]
    assert not wrong, "\n".join(wrong)


# What holds sequences and runs them: backends get values instead.
CORE = ("budgets", "prefill", "runtime", "sequence", "session_file", "steps", "trace")


def test_no_backend_imports_the_core_not_even_for_types() -> None:
    core = {f"engine/{name}" for name in CORE}
    assert all((ROOT / f"{name}.py").is_file() for name in core)
    files = sorted((ROOT / "engine" / "backends").rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports(path)
        if place(name, core)
    ]
    assert not wrong and len(files) > 30, wrong


# A class name means one thing in the whole repository.


# Backends that do the same thing have names alike: rows of a cache, for torch's attention and for
# CUDA's stores; and what C and CUDA are given to evict.
ALIKE = {"Eviction", "Rows"}


def defined(folder: str) -> dict[str, set[str]]:
    """Return the files that define each public class at their top, by its name."""
    found = defaultdict(set)
    for path in sorted((ROOT / folder).glob("**/*.py")):
        if path.resolve() != path:
            continue  # by a link in mmkv/
        for node in parsed(path).body:
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
