"""Read files of training data: rows of common formats as conversations and plain-text documents.

A conversation has messages of the transformers chat format. A file is indexed once. Every row is
checked then, and unusable rows are counted and reported. Rows of JSONL files are read again on
demand, so that a file may be larger than memory. Parquet files, which hold their pictures, are
never read whole: a row is checked when it is drawn.
"""

from __future__ import annotations

import base64
import csv
import glob
import json
import logging
import re
import sys
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError, plain
from mmkv.engine.paths import user_path
from mmkv.prompt.media import check_source, describe
from mmkv.prompt.messages import Message, is_blank, take_media
from mmkv.prompt.part_settings import taken_apart

KINDS = ("chat", "llava", "mmdu", "pairs", "text")

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_PART_SOURCES = ("image", "video", "url", "path", "image_url", "video_url")


class DataError(InputError):
    """Training data that cannot be used at all; a single bad row is skipped instead."""


class RowError(Exception):
    """The reason why a row is skipped."""


@dataclass(frozen=True)
class Conversation:
    """A chat with at least one message of the assistant.

    Attributes:
        messages: role and content parts in the transformers chat format; a picture or video is
            ``{"type": "image" | "video", <the same word>: absolute path, URL or data: URI}``, a
            video also by a list of its frames, with settings beside it.
        file, row: where it came from, for messages; rows count from 1 (JSONL: the line).
    """

    messages: list[Message]
    file: str
    row: int


@dataclass(frozen=True)
class ConversationDocument:
    """Plain text, every token of which is a target. ``file``, ``row``: as in Conversation."""

    text: str
    file: str
    row: int


@dataclass(frozen=True)
class UnusableRow:
    """A row of a file that is checked row by row, and why it is skipped."""

    reason: str
    file: str
    row: int


Row = Conversation | ConversationDocument

# The two sides of a row of kind "pairs": columns that ask, a column to read (put before a question,
# behind an instruction), columns that may hold the reply. The first form that a row has counts.
_PAIRS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("instruction", ("input",), ("output", "response")),
    ("question", ("extended_context", "context"), ("answer",)),
    ("prompt", (), ("completion", "response")),
    ("problem", (), ("solution",)),
    ("chapter", (), ("summary_text", "summary")),
    ("text", (), ("summary",)),
)
_SUMMARISE = "Summarise this text."
# What a row's columns may be called; a Parquet file's others are not read.
_COLUMNS = frozenset(
    [
        *("messages", "conversations", "image", "images", "video", "videos"),
        *(name for asked, given, replies in _PAIRS for name in (asked, *given, *replies)),
    ]
)


def read_row(value: Any, kind: str, root: Path, file: str, row: int) -> Row:
    """Read one row as a conversation or document, its media looked for but not opened.

    Args:
        value: the row as JSON gives it, or the text itself.
        kind: one of :data:`KINDS`.
        root: what relative paths of media start from.

    Raises:
        RowError: why the row cannot be used.
    """
    if kind == "text":
        text = _text(value)
        _require_unicode(text)
        return ConversationDocument(text, file, row)
    if kind == "chat":
        messages = _from_messages(value)
    else:
        messages = _from_pair(value) if kind == "pairs" else _from_turns(value, kind)
    return Conversation(_checked(messages, root), file, row)


def _require_unicode(text: str) -> None:
    """Raise RowError for text that no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        odd = ascii(text[error.start])
        raise RowError(f"its text holds {odd}, half of a character (a lone surrogate)") from error


def kind_of(value: Any) -> str | None:
    """Recognise the kind a row looks like, None when like none."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "chat"
    if not isinstance(value, dict):
        return None
    if "messages" in value:
        return "chat"
    if isinstance(turns := value.get("conversations"), list):
        if any(isinstance(turn, dict) and "role" in turn for turn in turns):
            return "chat"
        return "mmdu" if "<ImageHere>" in json.dumps(turns) else "llava"
    if _form(value) is not None:
        return "pairs"
    return "text" if isinstance(value.get("text"), str) else None


def _text(value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise RowError("it has no text")
    if not text.strip():
        raise RowError("its text is blank")
    return text


def _from_messages(value: Any) -> list[Message]:
    """Read the messages of a chat row.

    Parts without a source take the row's ``images`` and ``videos``.
    """
    messages = value
    if isinstance(value, dict):
        messages = value["messages"] if "messages" in value else value.get("conversations")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RowError("it has no list of messages")
    aside = value if isinstance(value, dict) else {}
    waiting = {kind: iter(_listed(aside, kind)) for kind in ("image", "video")}
    made = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "tool" or message.get("tool_calls"):
            raise RowError("it calls tools, which training does not read")
        if isinstance(content, list):
            content = [_with_source(part, waiting) for part in content]
        elif not isinstance(content, str):
            raise RowError(f"a message's content is {type(content).__name__}, not text or parts")
        made.append({"role": message.get("role"), "content": content})
    _put_first(made, waiting)
    _require_used(waiting)
    return made


def _form(value: dict[str, Any]) -> tuple[str, str | None, str] | None:
    """Return the columns of a row of kind "pairs": what asks, what is read, what is replied."""
    for asked, given, replies in _PAIRS:
        reply = next((name for name in replies if value.get(name) is not None), None)
        if value.get(asked) is not None and reply is not None:
            return asked, next((name for name in given if value.get(name)), None), reply
    return None


def _from_pair(value: Any) -> list[Message]:
    """Read a row of a question and its reply, or of a text and its summary.

    Prompt and completion may also be lists of messages.
    """
    form = _form(value) if isinstance(value, dict) else None
    if form is None:
        known = ", ".join(f"{asked} and {replies[0]}" for asked, _, replies in _PAIRS)
        raise RowError(f"it has no two columns of a pair; known are {known}")
    name, given, answer = form
    asked, reply = value[name], value[answer]
    if isinstance(asked, list) and isinstance(reply, list):
        return _from_messages({**value, "messages": asked + reply})
    if isinstance(reply, list):
        reply = _first_text(reply)
    parts = [asked] if given is None else [asked, value[given]]
    if name == "question":
        parts.reverse()
    elif name in ("chapter", "text"):
        parts.insert(0, _SUMMARISE)
    for text in (*parts, reply):
        if not isinstance(text, str):
            raise RowError(f"its {name} or {answer} is {type(text).__name__}, not text")
    if not asked.strip():
        raise RowError(f"its {name} is blank")
    messages: list[Message] = [
        {"role": "user", "content": "\n\n".join(parts)},
        {"role": "assistant", "content": reply},
    ]
    return _from_messages({**value, "messages": messages})


def _first_text(summaries: list[Any]) -> str:
    """Return the first text of summaries by several hands, or nothing."""
    found = (one.get("text") for one in summaries if isinstance(one, dict))
    return next((text for text in found if isinstance(text, str) and text.strip()), "")


def _put_first(messages: list[Message], waiting: dict[str, Iterator[Any]]) -> None:
    """Put media that no placeholder stands for first in what the user says first."""
    contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
    if any(isinstance(p, dict) and p.get("type") != "text" for parts in contents for p in parts):
        return
    for message in messages:
        if message["role"] == "user":
            media = [{"type": kind, kind: one} for kind, rest in waiting.items() for one in rest]
            if media:
                content = message["content"]
                said = [{"type": "text", "text": content}] if isinstance(content, str) else content
                message["content"] = [*media, *said]
            return


def _with_source(part: Any, waiting: dict[str, Iterator[Any]]) -> Any:
    if not isinstance(part, dict):
        raise RowError("a content part is not an object with a type")
    kind = part.get("type")
    if (
        isinstance(kind, str)
        and kind in waiting
        and not any(part.get(key) for key in _PART_SOURCES)
    ):
        return {**part, kind: _next(waiting, kind)}
    return part


def _from_turns(value: Any, kind: str) -> list[Message]:
    """Read the messages of a LLaVA or MMDU row, whose media fill placeholders in the order of the
    text.

    In rows with a video and no picture ``<image>`` stands for the video (LLaVA-Video-178K).
    """
    turns = value.get("conversations") if isinstance(value, dict) else None
    if not isinstance(turns, list):
        raise RowError("it has no list of conversations")
    listed = {each: _listed(value, each) for each in ("image", "video")}
    waiting = {each: iter(found) for each, found in listed.items()}
    if listed["video"] and not listed["image"]:
        waiting["image"] = waiting["video"]
    messages: list[Message] = []
    for turn in turns:
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise RowError("a turn has no text under 'value'")
        role = _ROLES.get(str(turn.get("from")))
        if role is None:
            raise RowError(f"a turn is from {turn.get('from')!r}; known are {', '.join(_ROLES)}")
        messages.append({"role": role, "content": list(_parts(text, kind, waiting))})
    if waiting["image"] is waiting["video"]:
        waiting.pop("image")
        _name_videos(messages)
    _put_first(messages, waiting)
    _require_used(waiting)
    return messages


def _name_videos(messages: list[Message]) -> None:
    """Make videos of what was put in the places of pictures."""
    for part in (part for message in messages for part in message["content"]):
        if part["type"] == "image":
            part.update(type="video", video=part.pop("image"))


def _parts(text: str, kind: str, waiting: dict[str, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Yield text and media of a turn.

    LLaVA rows set a placeholder apart by a newline, which belongs to it: chat templates write what
    their model expects there. MMDU's stand inside sentences (``Image1: <ImageHere>.``).
    """
    if kind == "mmdu":
        pieces = re.split("(<ImageHere>)", text)
    else:
        pieces = re.split(r"(<image>|<video>)\n?", re.sub(r"\n(<image>|<video>)$", r"\1", text))
    for piece in pieces:
        if piece in ("<ImageHere>", "<image>", "<video>"):
            medium = "video" if piece == "<video>" else "image"
            yield {"type": medium, medium: _next(waiting, medium)}
        elif piece:
            yield {"type": "text", "text": piece}


def _listed(value: dict[str, Any], kind: str) -> list[Any]:
    """List a row's media of one kind: under ``image`` or ``images``.

    The value may be one, a list, or a dict of them; each a path or URL, or the content of a file:
    bytes, base64, or what ``datasets`` makes of a picture, ``{"bytes": ..., "path": ...}``.
    """
    found = value.get(kind) or value.get(f"{kind}s") or []
    if isinstance(found, dict) and not found.keys() <= {"bytes", "path"}:
        found = list(found.values())
    listed = found if isinstance(found, list) else [found]
    return [_content(one, kind) for one in listed if one is not None]


_BASE64 = ("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD", "Qk0")  # JPEG, PNG, WebP, GIF, BMP


def _content(found: Any, kind: str) -> Any:
    """Return a path or URL as it is, and content as a data: URI."""
    if isinstance(found, dict) and found.keys() <= {"bytes", "path"}:
        found = found.get("bytes") or found.get("path")
    if isinstance(found, str) and len(found) > 64 and found.startswith(_BASE64):
        return f"data:image;base64,{found}"
    if not isinstance(found, bytes):
        return found
    if kind == "video":
        raise RowError("it holds a video itself; only videos named by a path or URL are read")
    return f"data:image;base64,{base64.b64encode(found).decode()}"


def _next(waiting: dict[str, Iterator[Any]], kind: str) -> Any:
    for found in waiting[kind]:
        return found
    raise RowError(f"it has more {kind} placeholders than {kind}s")


def _require_used(waiting: dict[str, Iterator[Any]]) -> None:
    for kind, rest in waiting.items():
        if left := len(list(rest)):
            raise RowError(f"it has {left} {kind}(s) more than placeholders")


def _checked(messages: list[Message], root: Path) -> list[Message]:
    """Find the media of the messages, or the reason why they cannot be trained on."""
    made = _with_media(messages, root)
    for part in (part for message in made for part in message["content"]):
        found = part[part["type"]]
        for text in found if isinstance(found, list) else [found]:
            _require_unicode(text)
    answers = [message for message in made if message["role"] == "assistant"]
    if not answers:
        raise RowError("the assistant says nothing in it")
    if any(is_blank(message) for message in answers):
        raise RowError("a message of the assistant is blank")
    if any(part["type"] != "text" for message in answers for part in message["content"]):
        raise RowError("a message of the assistant holds a picture or video")
    if next(m["role"] for m in made if m["role"] != "system") == "assistant":
        raise RowError("the assistant speaks before the user")
    return made


def _with_media(messages: list[Message], root: Path) -> list[Message]:
    """Return the messages as lists of parts, those of media with absolute paths."""
    try:
        plain, images, videos = take_media(messages)
        waiting = {"image": iter(images), "video": iter(videos)}
        made: list[Message] = []
        for message in plain:
            parts = [
                part
                if part["type"] == "text"
                else _found(next(waiting[part["type"]]), part["type"], root)
                for part in message["content"]
            ]
            made.append({"role": message["role"], "content": parts})
    except InputError as error:
        raise RowError(str(error)) from error
    return made


def _found(source: Any, kind: str, root: Path) -> dict[str, Any]:
    """Return a part with the absolute path of its medium, its settings as they are."""
    bare, settings = taken_apart(source)
    several = kind == "video" and isinstance(bare, list)
    found = [_resolved(one, kind, root) for one in bare] if several else _resolved(bare, kind, root)
    return {"type": kind, kind: found, **settings.given()}


def _resolved(source: Any, kind: str, root: Path) -> str:
    if not isinstance(source, str):
        raise RowError(f"a {kind} is named by {type(source).__name__}, not by a path or URL")
    if source.startswith(("data:", "http://", "https://")):
        return source
    try:
        path = (root / user_path(source.removeprefix("file://"))).absolute()
        check_source(str(path))
    except InputError as error:
        raise RowError(f"{kind} {describe(source)}: {error}") from error
    return str(path)


Report = Callable[[str], None]

_SOURCE = re.compile(
    r"(?:(?P<weight>\d+(?:\.\d+)?|\.\d+)\*)?+(?:(?P<kind>[a-z]+):)?+(?P<path>.+)", re.DOTALL
)
_JSON, _PLAIN = (".json", ".jsonl"), (".txt", ".md")
_REASONS = 8  # different reasons per file that are reported with a row; the rest only as a count


class Reasons:
    """Counts why rows are left out or changed, and reports the first row of each reason."""

    def __init__(self, report: Report) -> None:
        self.counts: Counter[str] = Counter()
        self._report = report

    def add(self, reason: str, line: str) -> None:
        """Count one; ``line`` is reported when the reason is new.

        Reasons are alike that differ in numbers, names of files and what is quoted.
        """
        alike = re.sub(r"""\S*[\d/\\.'":]\S*""", "", reason)
        self.counts[alike] += 1
        if self.counts[alike] == 1 and len(self.counts) <= _REASONS:
            self._report(plain(line))


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
    """The usable rows of a file, in the order of the file.

    Args:
        path: JSONL, a JSON list, CSV, Parquet, or plain text; several of one kind as a list, or as
            a pattern with ``*``.
        kind: what the rows are; None decides by their content.
        media_root: what relative paths of pictures and videos start from; None: the file's folder.
        separator: the line that stands between the documents of a plain-text file; None: the
            whole file is one document.
        report: gets the first broken row of each reason, and their count; None: the log of this
            module, as warnings.

    Attributes:
        kind: what the rows are.
        broken: how many rows were skipped; a row of a Parquet file that cannot be used is an
            :class:`UnusableRow` instead, because its check needs all of the file.
        groups: of Parquet files, where each block of rows that is read at once begins, else None.

    Raises:
        DataError: no such file, an unrecognised format, no usable row.
    """

    def __init__(
        self,
        path: str | Path | Sequence[Path],
        kind: str | None = None,
        media_root: str | Path | None = None,
        separator: str | None = None,
        report: Report | None = None,
    ) -> None:
        if kind not in (None, *KINDS):
            raise DataError(f"{kind!r} is no kind of data; choose one of {', '.join(KINDS)}")
        paths = [Path(path)] if isinstance(path, str | Path) else list(path)
        self.path = paths[0]
        if len(paths) == 1:
            paths = _matching(self.path)
        self._root = None if media_root is None else Path(media_root)
        self._raw: _Parquet | _Joined
        if all(each.suffix.lower() == ".parquet" for each in paths):
            self._raw = _Parquet(paths)
        else:
            self._raw = _Joined([_open(each, kind, separator) for each in paths])
        self.kind = kind or self._recognise()
        self._good, self.broken = array("q"), 0
        self.groups = self._raw.groups if isinstance(self._raw, _Parquet) else None
        if self.groups is None:
            self._check_all(report or logging.getLogger(__name__).warning)

    def _check_all(self, report: Report) -> None:
        """Find the usable rows. Raises DataError: there is none."""
        reasons = Reasons(report)
        for index in range(len(self._raw)):
            try:
                self._row(index)
            except RowError as error:
                self.broken += 1
                file, number = self._raw.place(index)
                reasons.add(str(error), f"{file}:{number}: skipped: {error}")
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
        return len(self._good) if self.groups is None else len(self._raw)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self.groups is not None:
            try:
                return self._row(index)
            except RowError as error:
                return UnusableRow(str(error), *self._raw.place(index))
        try:
            return self._row(self._good[index])
        except RowError as error:  # it was usable when the file was indexed
            raise DataError(f"{self.path} changed while it was in use: {error}") from error

    def _row(self, index: int) -> Row:
        assert self.kind is not None
        file, number = self._raw.place(index)
        root = Path(file).parent if self._root is None else self._root
        return read_row(self._raw[index], self.kind, root, file, number)

    def _recognise(self) -> str:
        """Recognise the kind of the first row that is of any."""
        several = isinstance(self._raw, _Parquet)  # their rows have the same columns
        for index in range(min(len(self._raw), 8) if several else len(self._raw)):
            try:
                kind = kind_of(self._raw[index])
            except RowError:
                continue
            if kind is not None:
                return kind
        raise DataError(
            f"{self.path}: no row has messages, conversations, text, or a question and its reply; "
            f"give one of these formats: {', '.join(KINDS)}"
        )


def _matching(path: Path) -> list[Path]:
    """Return the files that fit a pattern with ``*``, or the one that is named."""
    if "*" not in path.name or path.exists():
        return [path]
    return [Path(found) for found in sorted(glob.glob(str(path)))] or [path]


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

    def place(self, index: int) -> tuple[str, int]:
        return str(self._path), self._numbers[index]

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

    def __init__(self, path: Path, values: list[Any]) -> None:
        self._path, self._values = path, values

    def __len__(self) -> int:
        return len(self._values)

    def place(self, index: int) -> tuple[str, int]:
        return str(self._path), index + 1

    def __getitem__(self, index: int) -> Any:
        return self._values[index]


class _Joined:
    """Rows of several files, one file after the other."""

    def __init__(self, files: list[_Lines | _Values]) -> None:
        self._files = files
        self._starts = [0, *accumulate(map(len, files))]

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[_Lines | _Values, int]:
        file = bisect_right(self._starts, index) - 1
        return self._files[file], index - self._starts[file]

    def place(self, index: int) -> tuple[str, int]:
        file, row = self._find(index)
        return file.place(row)

    def __getitem__(self, index: int) -> Any:
        file, row = self._find(index)
        return file[row]


class _Parquet:
    """Rows of Parquet files, read by row groups, of which the last few stay in memory.

    pyarrow reads any row group of a file; ``datasets`` streams from the beginning only, and the
    rows of a resumed run must be those of the uninterrupted one.

    Attributes:
        groups: index of the first row of each row group.
    """

    KEPT = 4  # row groups in memory, and how many of them an epoch's order mixes

    def __init__(self, paths: list[Path]) -> None:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError(
                f"{paths[0]} is a Parquet file, which needs the train extra: "
                "pip install 'mmkv[train]'"
            ) from error
        self._open = parquet.ParquetFile
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, its first row in the file
        self._starts = [0]
        for path in paths:
            within = 0
            try:
                metadata = self._open(path).metadata
            except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
                raise DataError(f"cannot read {path}: {error}") from error
            for group in range(metadata.num_row_groups):
                self._groups.append((path, group, within))
                within += metadata.row_group(group).num_rows
                self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)
        self.groups = self._starts[:-1]
        self._tables: OrderedDict[int, Any] = OrderedDict()
        if not len(self):
            raise DataError(f"{paths[0]} has no rows; check that it is whole")

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> tuple[str, int]:
        group = bisect_right(self._starts, index) - 1
        path, _, first = self._groups[group]
        return str(path), first + index - self._starts[group] + 1

    def __getitem__(self, index: int) -> Any:
        group = bisect_right(self._starts, index) - 1
        if group not in self._tables:
            path, number, _ = self._groups[group]
            try:
                file = self._open(path)
                columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
                self._tables[group] = file.read_row_group(number, columns=columns)
            except (OSError, ValueError) as error:
                raise RowError(f"not readable as Parquet: {error}") from error
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        (row,) = self._tables[group].slice(index - self._starts[group], 1).to_pylist()
        return row


def _open(path: Path, kind: str | None, separator: str | None) -> _Lines | _Values:
    with _reading(path):
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        suffix = path.suffix.lower()
        plain = suffix in _PLAIN or (kind == "text" and suffix not in _JSON)
        if plain and kind in (None, "text"):
            return _Values(path, _pieces(path.read_text(encoding="utf-8-sig"), separator))
        if suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                csv.field_size_limit(sys.maxsize)  # a column may hold a book
                return _Values(path, list(csv.DictReader(file)))
        if head.startswith(b"[") and suffix != ".jsonl":
            return _Values(path, _whole(path))
        if head.startswith(b"{") and suffix == ".json":
            try:
                return _Values(path, [_whole(path)])
            except ValueError:  # several objects, one a line
                return _Lines(path)
        if suffix in _JSON or head.startswith(b"{"):
            return _Lines(path)
    raise DataError(
        f"{path} is neither JSON, CSV, Parquet nor .txt; write text:{path} to read it as plain text"
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise a DataError of one line for whatever reading a file raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"data file not found: {path}; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; name the files in it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}; check that it is UTF-8 and whole") from error


def _whole(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8-sig"))


def _pieces(text: str, separator: str | None) -> list[str]:
    """Return the documents of a plain-text file, without those that are blank."""
    if separator is None:
        return [text]
    parts = re.split(rf"^{re.escape(separator)}[ \t]*(?:\n|\Z)", text, flags=re.MULTILINE)
    return [part for part in parts if part.strip()]
