"""Which files of the repository are pages of the site (``make docs``), and where their links lead.

mkdocs reads one folder, and what belongs on the site lies in several: README.md is the front page,
benchmarks/notes/ the laboratory. A link between two pages leads to the page; one to any other file
of the repository becomes its name, since the site does not hold it.

Nothing is loaded from elsewhere: the graphs of Mermaid's blocks are drawn here.
"""

from __future__ import annotations

import posixpath
import re
from graphlib import TopologicalSorter
from html import escape
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
_LABORATORY = "benchmarks/notes"
_LINK = re.compile(r"(!?\[([^\]]*)\])\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?([\w.]+)</code>")
_ROW, _LABEL = 30, 200  # height of a node, and the width of its name


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

    drawn = re.sub(
        r"```mermaid\n(.*?)```", lambda found: graph(found[1]), markdown, flags=re.DOTALL
    )
    return _LINK.sub(linked, drawn)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Make links of Sphinx's roles, as docstrings write them; mkdocs calls this."""
    places = re.findall(r'\bid="(mmkv\.[\w.]+)"', html)

    def linked(found: re.Match[str]) -> str:
        name = found[1].rpartition(".")[2]
        there = {one for one in places if f".{one}".endswith(f".{found[1]}")}
        code = f"<code>{name}</code>"
        return f'<a href="#{there.pop()}">{code}</a>' if len(there) == 1 else code

    return _ROLE.sub(linked, html)


def graph(source: str) -> str:
    """Draw a graph of Mermaid's, ``A --> B & C`` a line; all arrows lead down."""
    names = dict(re.findall(r'^\s*(\w+)\["(.*)"\]$', source, re.MULTILINE))
    leads = {
        one: [other.strip() for other in others.split("&")]
        for one, others in re.findall(r"^\s*(\w+) --> (.+)$", source, re.MULTILINE)
    }
    order = [*TopologicalSorter(leads).static_order()][::-1]
    at = {one: (number + 0.5) * _ROW for number, one in enumerate(order)}
    parts = [
        f'<text x="{_LABEL - 12}" y="{at[one] + 5:g}" text-anchor="end">{escape(names[one])}</text>'
        f'<circle cx="{_LABEL}" cy="{at[one]:g}" r="3"/>'
        for one in order
    ]
    for one, others in leads.items():
        for other in others:
            top, foot = at[one] + 3, at[other] - 3
            far = _LABEL + 8 + 0.6 * (foot - top)
            curve = f"M{_LABEL + 4} {top:g}C{far:g} {top:g} {far:g} {foot:g} {_LABEL + 9} {foot:g}"
            tip = f"M{_LABEL + 4} {foot:g}l7-3v6z"
            parts.append(f'<path d="{curve}" fill="none" stroke="currentColor"/><path d="{tip}"/>')
    high = len(order) * _ROW
    wide = _LABEL + 0.5 * high
    told = ", ".join(f"{names[one]} to {names[to]}" for one, tos in leads.items() for to in tos)
    return (
        f'<svg viewBox="0 0 {wide:g} {high}" width="{wide:g}" role="img" fill="currentColor" '
        f'font-size="14"><title>Arrows lead from {escape(told)}</title>{"".join(parts)}</svg>'
    )


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
