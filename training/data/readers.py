"""Read files of training data as conversations and plain-text documents.

A file is indexed once. Every row is checked then, and unusable rows are counted and reported. Rows
of JSONL files are read again on demand, so that a file may be larger than memory.
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError, plain
from mmkv.engine.paths import user_path
from mmkv.training.data.conversations import KINDS, DataError, Row, RowError, kind_of, read_row

Report = Callable[[str], None]

_SOURCE = re.compile(
    r"(?:(?P<weight>\d+(?:\.\d+)?|\.\d+)\*)?+(?:(?P<kind>[a-z]+):)?+(?P<path>.+)", re.DOTALL
)
_JSON, _PLAIN = (".json", ".jsonl"), (".txt", ".md")
_REPORTED = 5  # rows per file that are reported one by one; the rest only as a count


@dataclass(frozen=True)
class DataSource:
    """One ``--data`` argument. ``kind``: one of :data:`KINDS`, None to decide by content."""

    path: Path
    weight: float = 1.0
    kind: str | None = None

    @classmethod
    def parse(cls, text: str) -> DataSource:
        """Read ``[WEIGHT*][KIND:]PATH``, e.g. ``0.5*llava:pairs.json`` or ``chats.jsonl``.

        A path that itself begins like a weight or a kind is written with ``./`` before it.

        Raises:
            DataError: an unknown kind, a weight that is not above 0, no path.
        """
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise DataError(f"--data {text!r} names no file; write [WEIGHT*][KIND:]PATH")
        if match["kind"] not in (None, *KINDS):
            raise DataError(
                f"--data {text!r}: {match['kind']!r} is no kind of data; choose one of "
                f"{', '.join(KINDS)} (or write ./ before a path with a colon)"
            )
        weight = float(match["weight"] or 1)
        if weight == 0:
            raise DataError(f"--data {text!r} has weight 0; leave it out or give more than 0")
        try:
            return cls(user_path(match["path"]), weight, match["kind"])
        except InputError as error:
            raise DataError(f"--data: {error}") from error


class RowFile(Sequence[Row]):
    """The usable rows of one file, in the order of the file.

    Args:
        path: JSONL, a JSON list, or plain text.
        kind: what the rows are; None decides by their content.
        media_root: what relative paths of pictures and videos start from; None: the file's folder.
        separator: the line that stands between the documents of a plain-text file; None: the
            whole file is one document.
        report: gets the first few broken rows, each with its reason, and their count; None: the
            log of this module, as warnings.

    Attributes:
        kind: what the rows are.
        broken: how many rows were skipped.

    Raises:
        DataError: no such file, an unrecognised format, no usable row.
    """

    def __init__(
        self,
        path: str | Path,
        kind: str | None = None,
        media_root: str | Path | None = None,
        separator: str | None = None,
        report: Report | None = None,
    ) -> None:
        if kind not in (None, *KINDS):
            raise DataError(f"{kind!r} is no kind of data; choose one of {', '.join(KINDS)}")
        self.path = Path(path)
        self._root = self.path.parent if media_root is None else Path(media_root)
        self._raw = _open(self.path, kind, separator)
        self.kind = kind or self._recognise()
        self._good, self.broken = array("q"), 0
        report = report or logging.getLogger(__name__).warning
        for index in range(len(self._raw)):
            try:
                self._row(index)
            except RowError as error:
                self.broken += 1
                if self.broken <= _REPORTED:
                    report(plain(f"{self.path}:{self._raw.number(index)}: skipped: {error}"))
            else:
                self._good.append(index)
        if not self._good:
            raise DataError(
                f"{self.path} has no usable row of kind {self.kind} among {self.broken}; "
                "see the reasons above"
            )
        if self.broken:
            report(f"{self.path}: skipped {self.broken} of {len(self._raw)} rows")

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        try:
            return self._row(self._good[index])
        except RowError as error:  # it was usable when the file was indexed
            raise DataError(f"{self.path} changed while it was in use: {error}") from error

    def _row(self, index: int) -> Row:
        assert self.kind is not None
        return read_row(
            self._raw[index], self.kind, self._root, str(self.path), self._raw.number(index)
        )

    def _recognise(self) -> str:
        """Recognise the kind of the first row that is of any."""
        for index in range(len(self._raw)):
            try:
                kind = kind_of(self._raw[index])
            except RowError:
                continue
            if kind is not None:
                return kind
        raise DataError(
            f"{self.path}: no row has messages, conversations or text; "
            f"give one of these formats: {', '.join(KINDS)}"
        )


class _Lines:
    """Lines of a JSONL file, found again by their offsets."""

    def __init__(self, path: Path) -> None:
        self._path, self._offsets, self._numbers = path, array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def number(self, index: int) -> int:
        return self._numbers[index]

    def __getitem__(self, index: int) -> Any:
        try:
            # Opened anew each time: a file object shared by forked workers shares its position.
            with self._path.open("rb") as file:
                file.seek(self._offsets[index])
                return json.loads(file.readline().decode("utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise RowError(f"not readable as JSON: {error}") from error


class _Values:
    """Rows held in memory."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def number(self, index: int) -> int:
        return index + 1

    def __getitem__(self, index: int) -> Any:
        return self._values[index]


def _open(path: Path, kind: str | None, separator: str | None) -> _Lines | _Values:
    try:
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        suffix = path.suffix.lower()
        plain = suffix in _PLAIN or (kind == "text" and suffix not in _JSON)
        if plain and kind in (None, "text"):
            return _Values(_pieces(path.read_text(encoding="utf-8-sig"), separator))
        if head.startswith(b"[") and suffix != ".jsonl":
            return _Values(_whole(path))
        if head.startswith(b"{") and suffix == ".json":
            try:
                return _Values([_whole(path)])
            except ValueError:  # several objects, one a line
                return _Lines(path)
        if suffix in _JSON or head.startswith(b"{"):
            return _Lines(path)
    except FileNotFoundError as error:
        raise DataError(f"data file not found: {path}; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; name the files in it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}; check that it is UTF-8 and whole") from error
    raise DataError(f"{path} is neither JSON nor .txt; write text:{path} to read it as plain text")


def _whole(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8-sig"))


def _pieces(text: str, separator: str | None) -> list[str]:
    """Return the documents of a plain-text file, without those that are blank."""
    if separator is None:
        return [text]
    parts = re.split(rf"^{re.escape(separator)}[ \t]*(?:\n|\Z)", text, flags=re.MULTILINE)
    return [part for part in parts if part.strip()]
