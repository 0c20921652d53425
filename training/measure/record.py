"""Write result files that say where they come from, and a journal that a killed run resumes.

A result file names its machine, versions, commit and command. A journal has one JSON object a line,
and a killed run continues from it. :func:`require_output` checks a folder before a long run starts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.engine.paths import whole_file

# The folder of the packages: a checkout, whose results are kept, or an installation.
ROOT = Path(str(resources.files("mmkv"))).resolve().parent
RESULTS = (ROOT if (ROOT / "pyproject.toml").is_file() else Path()) / "benchmarks" / "results"
_CHANGES = ("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!*.md")
_PACKAGES = ("torch", "transformers", "triton", "numpy", "mmkv")


def write_results(
    path: str | Path,
    settings: Mapping[str, Any],
    results: Any,
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> Path:
    """Write ``results`` beside all that is needed to judge and repeat them.

    Args:
        path: the JSON file; its folder is made. settings: what the run was asked to do.
        results: anything JSON can hold. tables: what documents show of them, by name: rows of
            cells, the heading first.

    Returns:
        The path written. The file is replaced whole, never left half written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shown = {"tables": dict(tables)} if tables else {}
    page = {**provenance(), "settings": dict(settings), **shown, "results": results}
    with whole_file(target) as draft:
        draft.write_text(page_text(page))
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


LEAST_FREE = 16 * 2**20
_PROBE = 64 * 2**10


def require_output(folder: Path, option: str = "--output") -> None:
    """Make a folder, and write and remove a file of 64 KiB in it.

    Args:
        option: what the message tells the user to change.

    Raises:
        InputError: it is a file, cannot be made or written, or its disk has under 16 MiB left.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; name a folder with {option}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".mmkv-") as probe:
            probe.write(bytes(_PROBE))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot write to {str(folder)[:200]!r} ({reason}); free space or name another {option}"
        ) from error
    if free < LEAST_FREE:
        raise InputError(
            f"the disk of {folder} has {free / 2**20:.1f} MiB left; free at least "
            f"{LEAST_FREE >> 20} MiB or name another {option}"
        )


Row = dict[str, Any]


class Journal:
    """The rows of a JSONL file, read once, and the rows that are added.

    A line that is not a whole JSON object (a kill can cut the last one short) is ignored, and its
    work is done again.

    Raises:
        InputError: the file cannot be read, or its folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"cannot use {path}: {error.strerror}; name an --output") from error
        self._cut_off = bool(content) and not content.endswith(b"\n")
        self._rows = list(whole_rows(content.decode("utf-8", errors="replace")))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def rows(self, key: str, value: str) -> list[Row]:
        """Return the rows that have ``value`` under ``key``."""
        return [row for row in self._rows if row.get(key) == value]

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Write rows at once, so that they are kept together; they are on the disk on return.

        Returns:
            the rows as the file gives them back.

        Raises:
            InputError: they cannot be written.
        """
        lines = [json.dumps(row) for row in rows]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._cut_off + "\n".join(lines) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}; free space") from error
        self._cut_off = False
        added = [json.loads(line) for line in lines]
        self._rows += added
        return added


def whole_rows(text: str) -> Iterator[Row]:
    """Yield the rows of JSONL; a line that a kill has cut off is left out."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
