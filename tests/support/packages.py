"""Installed packages for tests: a module and its metadata in a folder on ``sys.path``."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def install(folder: Path, package: str, entry_points: str, **modules: str) -> Path:
    """Write modules and the metadata of ``package`` as an installer would.

    Args:
        entry_points: the content of entry_points.txt.
        modules: name -> source.

    Returns:
        ``folder``, to be put on ``sys.path``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(dedent(source))
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(dedent(entry_points))
    return folder
