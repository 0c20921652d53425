"""All results in one page: ``python -m eval.report`` writes docs/results.md from eval/results.

Each result stands with its command, commit, machine and versions, its figures, and its tables:
those of the Markdown file beside it, or else those of the JSON itself. The page is a function of
the files alone. The tables that other documents mark (:mod:`eval.document_tables`) are written as
well. ``--check`` writes nothing and fails when a page is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.document_tables import filled
from mmkv.measure.record import RESULTS

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "results.md"
_ROWS = 48  # of a table taken from a JSON file
_TABLES = 8  # of one JSON file
_CUT = "Paired differences"  # the tests of the programs that compare are left to their own pages


class ReportError(Exception):
    """A result file that cannot be read."""


def page(results: Path, output: Path) -> str:
    """The whole page.

    Args:
        results: folder of the result files; output: where the page will stand, for its links.

    Raises:
        ReportError: for a broken result file.
    """
    found = {path.stem: _load(path) for path in sorted(results.glob("*.json"))}
    link = Path(os.path.relpath(results, output.parent)).as_posix()
    lines = [
        "# Results",
        "",
        f"`python -m eval.report` wrote this from {len(found)} files of `eval/results/`.",
        "",
        "| result | date | commit | machine |",
        "|---|---|---|---|",
    ]
    for stem, held in found.items():
        where = _machine(held.get("machine", {}))
        lines.append(
            f"| [{stem}](#{stem}) | {str(held.get('date', '-'))[:10]} | {_commit(held)} | {where} |"
        )
    names = sorted(found, key=len, reverse=True)
    figures: dict[str, list[str]] = {stem: [] for stem in found}
    for path in sorted(results.glob("*.png")):
        # A figure belongs to the result with the longest name that its own begins with.
        owner = next((stem for stem in names if path.stem.startswith(stem)), None)
        if owner is not None:
            figures[owner].append(path.name)
    for stem, held in found.items():
        lines += ["", *_section(stem, held, figures[stem], results, link)]
    return "\n".join(lines) + "\n"


def documents(results: Path) -> dict[Path, str]:
    """What the documents that mark tables should be.

    Raises:
        ReportError: a table nobody knows, or a result file that is missing or broken.
    """
    made = {}
    for path in [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]:
        if path != PAGE:
            try:
                made[path] = filled(path.read_text(), results)
            except (KeyError, ValueError, OSError) as error:
                raise ReportError(f"the tables of {path} cannot be made: {error!r}") from error
    return made


def _section(
    stem: str, held: Mapping[str, Any], figures: Sequence[str], results: Path, link: str
) -> Iterator[str]:
    yield f"## {stem}"
    yield ""
    yield "```sh"
    yield str(held.get("command", "(no command was recorded)"))
    yield "```"
    yield ""
    versions = ", ".join(f"{name} {what}" for name, what in held.get("versions", {}).items())
    yield (
        f"{held.get('date', 'no date')}, commit {_commit(held)}; "
        f"{_machine(held.get('machine', {}))}; {versions or 'no versions'}. "
        f"[All figures]({link}/{stem}.json)"
    )
    for name in figures:
        yield ""
        yield f"![{Path(name).stem}]({link}/{name})"
    tables = results / f"{stem}.md"
    if tables.is_file():
        yield ""
        yield from _own_tables(tables)
        yield ""
        yield f"[Paired tests and all tables]({link}/{stem}.md)"
    else:
        yield from _tables(held.get("results"))


def _own_tables(path: Path) -> Iterator[str]:
    """The tables of a Markdown file, their headings made part of the text, without the tests."""
    cutting = False
    kept: list[str] = []
    for line in path.read_text().rstrip().splitlines():
        if line.startswith("#"):
            cutting = False
            line = f"**{line.lstrip('#').strip()}**"
        elif line.startswith(_CUT):
            cutting = True
        if not cutting and not (line == "" and kept and kept[-1] == ""):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    yield from kept


def _tables(value: Any) -> Iterator[str]:
    """What can be shown of a JSON value as tables, the rest named."""
    made = list(_walk(value, ()))
    for title, head, rows in made[:_TABLES]:
        yield ""
        if title:
            yield f"*{title}*"
            yield ""
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        for row in rows[:_ROWS]:
            yield f"| {' | '.join(row)} |"
        if len(rows) > _ROWS:
            yield ""
            yield f"{len(rows) - _ROWS} more rows are in the file."
    if len(made) > _TABLES:
        yield ""
        yield f"{len(made) - _TABLES} more tables are in the file."


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    title = ", ".join(path)
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        head = list(dict.fromkeys(key for row in value for key in row if _short(row[key])))
        if head:
            yield title, head, [[_text(row.get(key)) for key in head] for row in value]
        left = list(dict.fromkeys(key for row in value for key in row if key not in head))
        if left:
            yield ", ".join([*path, "not shown"]), ["in the file only"], [[name] for name in left]
    elif isinstance(value, dict):
        plain = {key: item for key, item in value.items() if _short(item)}
        if plain:
            yield title, ["", "value"], [[key, _text(item)] for key, item in plain.items()]
        for key, item in value.items():
            if key not in plain:
                yield from _walk(item, (*path, str(key)))


def _short(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 4 and all(not isinstance(item, (dict, list)) for item in value)
    return not isinstance(value, dict)


def _text(value: Any) -> str:
    """A value in a table cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " .. ".join(map(_text, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _commit(held: Mapping[str, Any]) -> str:
    full = str(held.get("commit") or "unknown")
    head, plus, rest = full.partition("+")
    return head[:10] + plus + rest


def _machine(held: Mapping[str, Any]) -> str:
    if not held:
        return "-"
    parts = [str(held.get("gpu") or held.get("cpu", "-")), f"{held.get('cores', '?')} cores"]
    if "memory_gib" in held:
        parts.append(f"{held['memory_gib']} GiB")
    return ", ".join(parts)


def _load(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read {path}: {error}; run its program again") from error
    if not isinstance(held, dict) or "results" not in held:
        raise ReportError(f"{path} is no result file of mmkv.measure.record; move it elsewhere")
    return held


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it is stale")
    args = parser.parse_args(arguments)
    try:
        wanted = {args.output: page(args.results.resolve(), args.output.resolve())}
        if args.output == PAGE:
            wanted |= documents(args.results)
        for path, text in wanted.items():
            if args.check:
                if not path.is_file() or path.read_text() != text:
                    raise ReportError(f"{path} is stale; run python -m eval.report")
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"{path}: {len(text.splitlines())} lines")
    except (ReportError, OSError) as error:
        raise SystemExit(f"eval.report: error: {error}") from error


if __name__ == "__main__":
    main()
