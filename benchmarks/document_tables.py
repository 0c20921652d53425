"""Copy the tables of result files into README.md, docs/ and benchmarks/notes/.

A result file carries its tables under ``tables``: by name, a list of rows of cells, the heading
first. The program that wrote the file made them
(:func:`mmkv.training.measure.record.write_results`). A document marks the place of a table and
names the files: ``<!-- table: NAME:FILE,FILE -->`` and ``<!-- end -->``. ``python -m
benchmarks.document_tables`` writes the table between them; ``--check`` writes nothing and fails
when a table is not what the files carry.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from mmkv.training.measure.record import RESULTS, ROOT
from mmkv.training.measure.tables import pipe_table

Rows = list[list[str]]

_BLOCK = re.compile(
    r"(<!-- table: (?P<name>[\w-]+):(?P<files>[\w.,-]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def documents(root: Path = ROOT) -> list[Path]:
    """Return every document that may mark a table."""
    folders = (root / "docs", root / "benchmarks" / "notes")
    return [root / "README.md", *sorted(page for one in folders for page in one.rglob("*.md"))]


def sources(text: str) -> set[str]:
    """Return the result files, without ``.json``, that the tables of a document come from."""
    return {file for block in _BLOCK.finditer(text) for file in block["files"].split(",")}


def fill(text: str, results: Path) -> str:
    """Return the document ``text`` with its tables made from the files in ``results``.

    Raises:
        OSError, ValueError: a result file that cannot be read, that has no such table, or whose
            table does not go with those of the other files; a mark that names no file.
    """

    def block(found: re.Match[str]) -> str:
        parts = [carried(results, file, found["name"]) for file in found["files"].split(",")]
        columns, *rows = joined(parts)
        return f"{found[1]}{pipe_table(columns, rows)}\n{found[4]}"

    made = _BLOCK.sub(block, text)
    if len(re.findall("^<!-- table: ", made, re.MULTILINE)) != len(_BLOCK.findall(made)):
        raise ValueError("a mark is not <!-- table: NAME:FILE,FILE --> with <!-- end --> below")
    return made


def carried(results: Path, file: str, name: str) -> Rows:
    """Return the table ``name`` of a result file.

    Raises:
        OSError, ValueError: as :func:`fill`.
    """
    tables = json.loads((results / f"{file}.json").read_text()).get("tables", {})
    if name not in tables:
        raise ValueError(f"{file}.json has no table {name!r}; it has {', '.join(tables) or 'none'}")
    return [list(row) for row in tables[name]]


def joined(parts: Sequence[Rows]) -> Rows:
    """Join tables: below each other under one heading, or beside each other by the first column.

    Raises:
        ValueError: neither the headings nor the first columns are the same.
    """
    whole, *others = parts
    for part in others:
        if part[0] == whole[0]:
            whole = whole + part[1:]
        elif [row[0] for row in part] == [row[0] for row in whole]:
            whole = [[*row, *more[1:]] for row, more in zip(whole, part, strict=True)]
        else:
            raise ValueError(f"no table has both {whole[0]} and {part[0]} above it")
    return whole


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill or check the tables of every document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.document_tables", description=__doc__
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    args = parser.parse_args(arguments)
    for path in documents():
        text = path.read_text()
        try:
            made = fill(text, args.results)
        except (ValueError, OSError) as error:
            cause = f"the tables of {path} cannot be made: {error}"
            raise SystemExit(f"benchmarks.document_tables: error: {cause}") from error
        if made == text:
            continue
        if args.check:
            raise SystemExit(f"{path} is stale; run python -m benchmarks.document_tables")
        path.write_text(made)
        print(path)


if __name__ == "__main__":
    main()
