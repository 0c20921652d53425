"""The pictures of docs/how-it-works/overview.md show the imports; tensors name their device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Modules that a picture leaves out, as its text says, and arrows that it leaves out.
APART = {
    "packages": {"mmkv/__main__"},
    "engine": {
        f"engine/{name}"
        for name in (
            "backends/base budget checks config device errors hub memory paths read_ids registry "
            "scorer_state"
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


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, as paths from the top of the repository.

    What only a type checker reads is no import.
    """
    for name in _imports(path):
        linked = re.match(r"mmkv[./](engine|eval|training)\b", name)
        yield (name[5:] if linked else name).replace(".", "/")


def _imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ``from mmkv.engine import hub`` imports a module, too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
            for two in (place(module, known) for module in imports(file)):
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
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            checked += 1
            named = {keyword.arg for keyword in node.keywords}
            assert "device" in named, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
    assert checked > 20
