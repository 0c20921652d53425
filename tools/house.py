"""Count what a reader of this repository has to get through: ``python -m tools.house``.

Files and lines, how much of a file is docstring and imports, files that only one other file of
their folder imports, circles of imports (those for a type checker count), functions with many ways
through them, the files whose code runs for one short reply of the server, and words of the
documents. ``--names`` lists what is behind the figures, ``--json`` prints all for a program.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("engine", "mmkv", "training", "eval")


def tracked(*patterns: str) -> list[str]:
    """Return the paths of files in git that are in the working tree; links are left out."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def module_name(path: str) -> str:
    """Return the dotted name of a file of the four packages, without their common ``mmkv``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: str, known: dict[str, str]) -> set[str]:
    """Return which files of ``known`` (dotted name -> path) a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _own(name) in known else node.module for name in inner]
        else:
            continue
        found |= {known[_own(name)] for name in names if _own(name) in known}
    return found - {path}


def _own(name: str) -> str:
    inner = name.removeprefix("mmkv.")
    return inner if inner.split(".")[0] in TOPS and inner.split(".")[0] != "mmkv" else name


def rings(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(group)

    sys.setrecursionlimit(10_000)
    for node in list(arrows):
        if node not in index:
            visit(node)
    return found


def header_lines(path: str) -> int:
    """Return how many lines of a file lie above its first statement that is no import."""
    tree = ast.parse((ROOT / path).read_text())
    for node in tree.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not text and not checked and not isinstance(node, (ast.Import, ast.ImportFrom)):
            return node.lineno - 1
    return len((ROOT / path).read_text().splitlines())


_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension)


def complex_functions(path: str) -> list[str]:
    """Return the functions of a file with more than 15 ways through them (McCabe)."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = list(ast.walk(node))
            ways = 1 + sum(isinstance(one, _BRANCHES) for one in inner)
            ways += sum(len(one.values) - 1 for one in inner if isinstance(one, ast.BoolOp))
            found += [f"{path} {node.name} {ways}"] if ways > 15 else []
    return found


def lines(paths: Iterable[str]) -> int:
    """Return the lines of files, together."""
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


def words(paths: Iterable[str]) -> int:
    """Return the words of files, together."""
    return sum(len((ROOT / path).read_text().split()) for path in paths)


def files_of_a_reply() -> list[str]:
    """Return the files whose functions run while the server answers a chat with four tokens."""
    from mmkv import Engine
    from mmkv.resources import bundled_model
    from tests.support.servers import serving
    from tools.roads import http_road

    return sorted(http_road(lambda: serving(lambda: Engine.from_pretrained(bundled_model()))))


def _one_neighbour(path: str, arrows: dict[str, set[str]]) -> bool:
    """Return whether one file alone imports a file, and lies in the same folder."""
    users = [Path(other) for other, imports in arrows.items() if path in imports]
    return [user.parent for user in users] == [Path(path).parent]


def _between_folders(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return which folders of ``engine`` import which, from the imports of files.

    A file beside the folders is by itself: errors.py lies below them, runtime.py above.
    """
    folders: dict[str, set[str]] = defaultdict(set)
    for path, others in arrows.items():
        if path.startswith("engine/"):
            here = "/".join(path.split("/")[:2])
            inside = (other for other in others if other.startswith("engine/"))
            folders[here] |= {"/".join(other.split("/")[:2]) for other in inside} - {here}
    return folders


def figures() -> dict[str, Any]:
    """Return all figures by name."""
    python = tracked("*.py")
    product = [path for path in python if not path.startswith(("tests/", "benchmarks/"))]
    packages = [path for path in product if path.split("/")[0] in TOPS]
    known = {module_name(path): path for path in packages}
    arrows = {path: imported(path, known) for path in packages}
    judged = [p for p in packages if not p.startswith("eval/") and not p.endswith("__init__.py")]
    alone = [path for path in judged if _one_neighbour(path, arrows)]
    reply = files_of_a_reply()
    tangled = list(chain.from_iterable(map(complex_functions, packages)))
    return {
        "Python files outside tests and benchmarks": len(product),
        "their lines": lines(product),
        "lines of benchmarks": lines(path for path in python if path.startswith("benchmarks/")),
        "lines of tests": lines(path for path in python if path.startswith("tests/")),
        "files": len(tracked()),
        "header lines a file": round(mean(header_lines(path) for path in packages), 1),
        "files that one neighbour imports (%)": round(100 * len(alone) / len(judged), 1),
        "circles between folders of engine": sum(
            any((ROOT / node).is_dir() for node in ring) for ring in rings(_between_folders(arrows))
        ),
        "circles of files": len(rings(arrows)),
        "files in circles": sum(map(len, rings(arrows))),
        "functions of complexity > 15": len(tangled),
        "files of a reply": len(reply),
        "words of docs": words(tracked("docs/*.md", "README.md")),
        "words of notes": words(tracked("benchmarks/notes/*.md")),
        "_alone": sorted(alone),
        "_rings": sorted(sorted(ring) for ring in rings(arrows)),
        "_reply": reply,
        "_complex": sorted(tangled),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="tools.house", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="as JSON, with the names")
    parser.add_argument("--names", action="store_true", help="also the files behind the figures")
    args = parser.parse_args()
    found = figures()
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        if not name.startswith("_"):
            print(f"{name:40} {value:>8}")
    if args.names:
        for name in filter(lambda name: name.startswith("_"), found):
            print(f"\n{name[1:]}:")
            for value in found[name]:
                print("  ", value if isinstance(value, str) else " ".join(value))


if __name__ == "__main__":
    main()
