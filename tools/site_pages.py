"""Which files of the repository are pages of the site (``make docs``), and where their links lead.

mkdocs reads one folder, and what belongs on the site lies in several: README.md is the front page,
eval/notes/ the laboratory. A link between two pages leads to the page; one to any other file of
the repository becomes its name, since the site does not hold it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Beside docs/, whose files stand on the site as they lie there.
_ALSO = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LABORATORY = "eval/notes"
_LINK = re.compile(r"(!?\[([^\]]*)\])\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that do not lie in docs/; mkdocs calls this."""
    found = {name: ROOT / name for name in _ALSO}
    for path in (ROOT / _LABORATORY).rglob("*"):
        if path.is_file():
            found[path.relative_to(ROOT).as_posix()] = path
    for name, path in found.items():
        files.append(File.generated(config, place(name) or name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links of a page lead to places of the site; mkdocs calls this."""
    own = source(page.file.src_uri)

    def linked(found: re.Match[str]) -> str:
        name, hash_, anchor = found[3].partition("#")
        if "://" in name or not name:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(own), name))
        to = place(target)
        if to is None or files.get_file_from_path(to) is None:
            if not (ROOT / target).exists():
                return found[0]  # mkdocs names it
            return found[2]
        here = posixpath.dirname(page.file.src_uri)
        return f"{found[1]}({posixpath.relpath(to, here or '.')}{hash_}{anchor})"

    return _LINK.sub(linked, markdown)


def place(name: str) -> str | None:
    """Return where a file of the repository stands on the site; None: it does not."""
    if name in _ALSO:
        return _ALSO[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name.startswith(f"{_LABORATORY}/"):
        return f"laboratory/{name.removeprefix(f'{_LABORATORY}/')}"
    return None


def source(place_: str) -> str:
    """Return which file of the repository stands at a place of the site."""
    for name, at in _ALSO.items():
        if at == place_:
            return name
    if place_.startswith("laboratory/"):
        return f"{_LABORATORY}/{place_.removeprefix('laboratory/')}"
    return f"docs/{place_}"
