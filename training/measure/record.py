"""Write result files with their machine, versions, commit and command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

# The folder of the packages: a checkout, whose results are kept, or an installation.
ROOT = Path(str(resources.files("mmkv"))).resolve().parent
RESULTS = (ROOT if (ROOT / "pyproject.toml").is_file() else Path()) / "eval" / "results"
_CHANGES = ("status", "--porcelain", "--", ".", ":!eval/results", ":!docs", ":!*.md")
_PACKAGES = ("torch", "transformers", "triton", "numpy", "mmkv")


def write_results(path: str | Path, settings: Mapping[str, Any], results: Any) -> Path:
    """Write ``results`` beside all that is needed to judge and repeat them.

    Args:
        path: the JSON file; its folder is made. settings: what the run was asked to do.
        results: anything JSON can hold.

    Returns:
        The path written. The file is replaced whole, never left half written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = {**provenance(), "settings": dict(settings), "results": results}
    draft = target.with_name(target.name + ".part")
    draft.write_text(page_text(page))
    os.replace(draft, target)
    return target


def page_text(page: Mapping[str, Any]) -> str:
    """Return ``page`` as JSON: what a run was on lines of its own, each list item on one line.

    Rows stay comparable line by line, in half the bytes of a fully indented file.
    """
    return _lines(page, 0) + "\n"


def _lines(value: Any, depth: int) -> str:
    """Return JSON of ``value``: mappings indented, and lists whose items are mappings."""
    spread = isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value)
    )
    if not (spread and value):
        return json.dumps(value, default=str)
    inside, outside = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, Mapping):
        parts = [
            f"{json.dumps(str(name))}: {_lines(item, depth + 1)}" for name, item in value.items()
        ]
        return "{" + inside + ("," + inside).join(parts) + outside + "}"
    parts = [json.dumps(item, default=str) for item in value]
    return "[" + inside + ("," + inside).join(parts) + outside + "]"


def provenance() -> dict[str, Any]:
    """Collect date, command, commit, versions and machine of this process."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def command() -> str:
    """Return the command line of this process, with the interpreter's own path left out."""
    return " ".join(["python", *sys.orig_argv[1:]])


def commit() -> str | None:
    """Commit of mmkv's working tree, with ``+changes`` if what runs differs; None outside of one.

    Results and documents decide no figure.
    """
    head = _git("rev-parse", "HEAD") if _in_own_repository() else ""
    if not head:
        return None
    return head + ("+changes" if _git(*_CHANGES) else "")


def _in_own_repository() -> bool:
    """Return whether git's folder is mmkv's own, not that of a project mmkv was installed into."""
    try:
        ours = 'name = "mmkv"' in (ROOT / "pyproject.toml").read_text()
    except OSError:
        return False
    top = _git("rev-parse", "--show-toplevel")
    return ours and bool(top) and Path(top).resolve() == ROOT


def versions() -> dict[str, str]:
    """Return Python and the packages that decide speed and numbers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        # Unlike the package metadata it names the build (+cpu, +cu128).
        found["torch"] = torch.__version__
    return found


def machine() -> dict[str, Any]:
    """Return processor, cores this process may use, threads of torch, memory, and GPU if any."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": usable, "system": platform.platform()}
    if hasattr(os, "sysconf"):
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found["memory_gib"] = round(pages / 2**30, 1)
    if hasattr(os, "getloadavg"):
        found["load_1min"] = round(os.getloadavg()[0], 2)
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
