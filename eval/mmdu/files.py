"""The folder of a run: one file of answers per dialogue, and the run's settings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.engine.paths import whole_file
from mmkv.eval.mmdu.data import RESERVED, Dialogue

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
