"""Read MMDU's files: dialogues, their pictures, and where a picture stands in a question.

A run has a folder: one file of answers per dialogue, and the settings of the run.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.engine.paths import is_file, is_folder, whole_file

PLACEHOLDER = "<ImageHere>"
# A dialogue's id names its file; the prefix is kept for the files that describe a whole run.
RESERVED = "mmkv-"
_LONGEST_NAME = 4096  # of a path on Linux
_FILE_NAME = re.compile(r"(?!\.)[^/\\:*?\"<>|\x00-\x1f]{1,200}")


@dataclass(frozen=True)
class Dialogue:
    """One dialogue of a benchmark file.

    Attributes:
        row: as it was read. id: its name, also that of its file of answers.
        questions, references: what the user says, and what should be answered, turn by turn.
        images: the pictures' names in the order in which the questions use them.
        exact: per question a word for its kind, when the reference is the only right answer
            (our own sets; empty otherwise).
    """

    id: str
    row: dict[str, Any]
    questions: tuple[str, ...]
    references: tuple[str, ...]
    images: tuple[str, ...]
    exact: tuple[str, ...] = ()

    @property
    def shown(self) -> int:
        """Count the pictures that the questions place."""
        return sum(question.count(PLACEHOLDER) for question in self.questions)


@dataclass(frozen=True)
class Problem:
    """Why a dialogue cannot be used: ``cause`` names the remedy too."""

    dialogue: str
    cause: str


def read_benchmark(
    path: Path, limit: int | None = None, unused_images: bool = False
) -> tuple[list[Dialogue], list[Problem]]:
    """Read a ``benchmark.json`` (a list of rows, or an object whose values are the rows).

    Args:
        limit: the first so many rows only. unused_images: accept a row with more pictures than
            its questions place.

    Returns:
        The usable dialogues and, apart from them, what is wrong with the other rows.

    Raises:
        InputError: the file as a whole cannot be used.
    """
    rows = _rows(path)[:limit]
    dialogues: list[Dialogue] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, (key, row) in enumerate(rows, 1):
        name = f"number {number}"
        try:
            dialogue = read_row(row, key, unused_images)
            name = dialogue.id
            if dialogue.id.casefold() in seen:
                raise InputError("an earlier dialogue has the same id; give each its own")
        except InputError as error:
            if isinstance(row, dict) and row.get("id") is not None:
                name = str(row["id"])[:80].encode("utf-8", "backslashreplace").decode()
            problems.append(Problem(name, str(error)))
            continue
        # Some file systems ignore case, and two dialogues must never share a file.
        seen.add(dialogue.id.casefold())
        dialogues.append(dialogue)
    return dialogues, problems


def _rows(path: Path) -> list[tuple[str | None, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"file not found: {path}; name MMDU's benchmark.json") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; name a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); name a JSON file in UTF-8") from error
    if isinstance(content, dict):
        # The answering scripts of the benchmark read an object, its judging script a list.
        rows: list[tuple[str | None, Any]] = list(content.items())
    elif isinstance(content, list):
        rows = [(None, row) for row in content]
    else:
        raise InputError(f"{path} holds no list of dialogues; name MMDU's benchmark.json")
    if not rows:
        raise InputError(f"{path} holds no dialogues; name another file")
    return rows


def read_row(row: Any, key: str | None = None, unused_images: bool = False) -> Dialogue:
    """Read one row as a dialogue; ``key`` stands in for a missing id. Raises InputError."""
    if not isinstance(row, dict):
        raise InputError("the row is not an object with id, image and conversations; correct it")
    _require_text(row)
    name = row.get("id", key)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError("the row has no id (a text or a number); give it one")
    name = str(name)
    if not _FILE_NAME.fullmatch(name) or name.startswith(RESERVED):
        raise InputError(f"the id {name[:80]!r} cannot name a file; use letters and digits")
    questions, references = _turns(row.get("conversations"))
    dialogue = Dialogue(
        name, row, questions, references, _images(row.get("image")), _exact(row, len(questions))
    )
    missing = dialogue.shown - len(dialogue.images)
    if missing > 0 or (missing < 0 and not unused_images):
        remedy = (
            "correct the row" if missing > 0 else "correct the row or pass --allow-unused-images"
        )
        raise InputError(
            f"its questions place {dialogue.shown} pictures ({PLACEHOLDER}) and it lists "
            f"{len(dialogue.images)}; {remedy}"
        )
    return dialogue


def _require_text(row: dict[str, Any]) -> None:
    """Raise InputError for a row that could not be written or shown again."""
    try:
        json.dumps(row, ensure_ascii=False, indent=1).encode()
    except UnicodeEncodeError as error:
        odd = ascii(error.object[error.start])
        raise InputError(
            f"the row holds {odd}, half of a character and no text; correct the row"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError("the row is nested too deeply; correct it") from error


def _turns(conversations: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(conversations, list) or not conversations:
        raise InputError("the row has no conversations (a list of turns); correct it")
    values: list[str] = []
    for index, turn in enumerate(conversations):
        wanted = ("user", "assistant")[index % 2]
        if not isinstance(turn, dict) or turn.get("from") != wanted:
            raise InputError(f'conversations[{index}] is not from "{wanted}"; turns must alternate')
        if not isinstance(turn.get("value"), str):
            raise InputError(f"conversations[{index}] has no value (a text); correct the row")
        values.append(turn["value"])
    if len(values) % 2:
        raise InputError("the last question has no reference answer; add one, it may be empty")
    return tuple(values[::2]), tuple(values[1::2])


def _images(images: Any) -> tuple[str, ...]:
    """Read the names of pictures from a list, a single name, or an object such as {"image1":
    name}.
    """
    if isinstance(images, str):
        images = [images]
    if isinstance(images, dict):
        numbers = {key: re.search(r"\d+$", key) for key in images}
        if all(numbers.values()):
            # By number, so that image10 does not come before image2.
            ordered = sorted(images, key=lambda key: int(numbers[key][0]))  # type: ignore[index]
            images = [images[key] for key in ordered]
        else:
            images = list(images.values())
    if images is None:
        return ()
    if not isinstance(images, list) or not all(isinstance(name, str) and name for name in images):
        raise InputError("image is not a list of paths (nor an object of them); correct the row")
    return tuple(images)


def _exact(row: dict[str, Any], questions: int) -> tuple[str, ...]:
    kinds = row.get("exact", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise InputError("exact is not a list of texts, one per question; correct the row")
    if kinds and len(kinds) != questions:
        raise InputError(
            f"exact names {len(kinds)} kinds for {questions} questions; correct the row"
        )
    return tuple(kinds)


def require_folder(folder: Path) -> None:
    """Raise InputError when the folder of pictures is not there."""
    if not is_folder(folder):
        raise InputError(f"no folder of pictures at {folder}; name it with --images")


def find_pictures(dialogue: Dialogue, folder: Path) -> list[Path]:
    """Find the dialogue's pictures under ``folder``, in order. Raises InputError for a missing
    one.

    The benchmark names its pictures with the folders of its authors, so the longest ending of
    a name that exists under ``folder`` is taken. Nothing outside ``folder`` is: a data file must
    not be able to have some other file of this machine sent to a judge.
    """
    return [_find(name, folder) for name in dialogue.images]


def _find(name: str, folder: Path) -> Path:
    parts = [part for part in re.split(r"[/\\]+", name) if part not in ("", ".")]
    if ".." not in parts and len(name) <= _LONGEST_NAME:
        for start in range(len(parts)):
            path = folder.joinpath(*parts[start:])
            if is_file(path):
                return path
    raise InputError(f"the picture {name[:200]} is not under {folder}; check --images")


def interleave(question: str, pictures: Iterator[Path]) -> list[dict[str, Any]]:
    """Split a question into chat parts, each placeholder replaced by the next picture."""
    texts = question.split(PLACEHOLDER)
    parts: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        if index:
            parts.append({"type": "image", "image": next(pictures)})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


RUN, SUMMARY = f"{RESERVED}run.json", f"{RESERVED}summary.json"


class OutputError(InputError):
    """A file of results cannot be written."""


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` whole: a kill leaves the old file or the new one. Raises OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, sync=True) as draft:
            draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; free space or name another --output"
        ) from error


def read_json(path: Path) -> Any:
    """Read the content of a JSON file, None when there is none.

    Raises InputError when it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read ({reason}); remove it or repair it") from error


def _rescued(name: str, row: dict[str, Any]) -> str:
    """Write a finished row where there is room, at last to stdout; say where."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="mmkv-answers-"))
        write_json(folder / f"{name}.json", row)
    except (OSError, OutputError):
        print(json.dumps(row), flush=True)
        return f"the answers to dialogue {name} stand on stdout"
    return f"the answers to dialogue {name} are in {folder}: copy them to --output"


class AnswerFolder:
    """Reads and writes ``<id>.json`` files: rows of the benchmark with the model's answers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: dict[str, Any], about: dict[str, Any]) -> None:
        """Claim the folder for a run, or go on with one of the same ``settings``.

        ``about`` is noted beside them (versions, names) and not compared. Raises InputError when
        the folder holds the answers of another run: two runs mixed would be a score of neither.
        """
        found = read_json(self.path / RUN)
        if found is None:
            if any(self.path.glob("*.json")):
                raise InputError(
                    f"{self.path} holds answers but no {RUN} that says how they were made; "
                    "name another --output"
                )
            write_json(self.path / RUN, {"settings": settings, **about})
            return
        before = found.get("settings") if isinstance(found, dict) else None
        # As JSON returns it: tuples become lists.
        now = json.loads(json.dumps(settings))
        if before != now:
            old = before if isinstance(before, dict) else {}
            other = sorted(key for key in {*old, *now} if old.get(key) != now.get(key))
            change = ", ".join(f"{key} {old.get(key)!r}, now {now.get(key)!r}" for key in other)
            raise InputError(
                f"{self.path} holds a run with other settings ({change}); name another --output"
            )

    def settings(self) -> dict[str, Any] | None:
        """Return what the run was asked to do; None for answers that another program wrote."""
        found = read_json(self.path / RUN)
        return found.get("settings") if isinstance(found, dict) else None

    def save(self, dialogue: Dialogue, answers: list[str], turns: list[dict[str, Any]]) -> None:
        """Write a finished dialogue: its row with the answers put in, and ``turns`` beside them.

        Raises OutputError, which names another file that holds the row then.
        """
        conversations = [dict(turn) for turn in dialogue.row["conversations"]]
        for turn, answer in zip(conversations[1::2], answers, strict=True):
            turn["value"] = answer
        row = {**dialogue.row, "conversations": conversations, "mmkv": {"turns": turns}}
        try:
            write_json(self._file(dialogue), row)
        except OutputError as error:
            raise OutputError(f"{error}; {_rescued(dialogue.id, row)}") from error

    def load(self, dialogue: Dialogue) -> dict[str, Any] | None:
        """Read the row with answers, None when the dialogue is not finished.

        Raises InputError when the file is damaged or asks something else than ``dialogue``.
        """
        row = read_json(self._file(dialogue))
        if row is None:
            return None
        turns = row.get("conversations") if isinstance(row, dict) else None
        values = turns if isinstance(turns, list) else []
        texts = [turn.get("value") for turn in values if isinstance(turn, dict)]
        fits = len(texts) == 2 * len(dialogue.questions) and texts[::2] == [*dialogue.questions]
        if not fits or not all(isinstance(text, str) for text in texts):
            raise InputError(
                f"{self._file(dialogue)} does not answer this dialogue's questions; remove it and "
                "run mmkv mmdu again"
            )
        return row

    def answers(self, dialogue: Dialogue) -> list[str] | None:
        """Return the answers in order, None when the dialogue is not finished.

        Raises InputError.
        """
        row = self.load(dialogue)
        return None if row is None else [turn["value"] for turn in row["conversations"][1::2]]

    def _file(self, dialogue: Dialogue) -> Path:
        return self.path / f"{dialogue.id}.json"
