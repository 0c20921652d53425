"""MMDU as a task of lmms-eval: whole dialogues, answered round by round (eval/notes/mmdu.md).

lmms-eval carries no history from round to round. So the messages of every round hold the dialogue
so far with the model's own answers, and the adapter finds that its session already holds them.
Reading, placing of pictures and exact scoring are those of ``mmkv mmdu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.media import FOLDER
from mmkv.eval.mmdu.data import Dialogue, find_pictures, interleave, read_benchmark, read_row
from mmkv.eval.mmdu.exact import is_right


def messages(
    doc: dict[str, Any],
    lmms_eval_specific_kwargs: dict[str, Any] | None = None,
    round_idx: int | None = None,
    previous_output: Sequence[str] = (),
    previous_round_info: Any = None,
) -> Any:
    """Return the messages of the first round.

    For later rounds return (messages, over, outputs, info). Raises InputError.
    """
    dialogue, answers = _dialogue(doc), list(previous_output)
    folder = Path((lmms_eval_specific_kwargs or {}).get(FOLDER, "."))
    if round_idx is None:
        return _history(dialogue, [], folder)
    over = round_idx >= len(dialogue.questions)
    return None if over else _history(dialogue, answers, folder), over, answers, None


def no_visual(doc: dict[str, Any]) -> list[Any]:
    """Return no visuals: the pictures are in the messages."""
    return []


def first_question(doc: dict[str, Any], kwargs: dict[str, Any] | None = None) -> str:
    """Return the dialogue's input as the samples file shows it."""
    return _dialogue(doc).questions[0]


def references(doc: dict[str, Any]) -> list[str]:
    """Return the reference answers, in order."""
    return list(_dialogue(doc).references)


def score(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """Count the answered questions, and the right answers where exact ones are known."""
    dialogue, answers = _dialogue(doc), results[0]
    pairs = list(zip(answers, dialogue.references, strict=True))
    found = {"answered": _count([bool(answer.strip()) for answer, _ in pairs])}
    if dialogue.exact:
        found["exact_match"] = _count([is_right(*pair) for pair in pairs])
    return found


def share(results: Sequence[dict[str, Any]]) -> float:
    """Compute the share of the questions of all dialogues together."""
    return sum(r["right"] for r in results) / sum(r["of"] for r in results)


def check(files: Sequence[str], folder: Path) -> Path:
    """Find the folder of the pictures: ``folder`` or one directly below, where all of them are
    found.

    Raises InputError for a row or picture that would end the evaluation half-way.
    """
    dialogues: list[Dialogue] = []
    for file in files:
        if not Path(file).read_bytes().lstrip().startswith(b"["):
            raise InputError(f"{file} holds no list; lmms-eval reads dialogues from [row, row]")
        found, problems = read_benchmark(Path(file), unused_images=True)
        if problems:
            first, more = problems[0], len(problems) - 1
            others = f" ({more} more have problems)" if more else ""
            raise InputError(f"{file}: dialogue {first.dialogue}: {first.cause}{others}")
        dialogues += found
    refused: InputError | None = None
    for place in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        try:
            for dialogue in dialogues:
                find_pictures(dialogue, place)
            return place
        except InputError as error:
            refused = refused or error
    raise InputError(str(refused).split("; ")[0] + f"; put MMDU's pictures into {folder}")


def _dialogue(doc: dict[str, Any]) -> Dialogue:
    """Return the row as it was written: the datasets library fills keys that other rows have with
    None.
    """
    row = {key: value for key, value in doc.items() if value is not None}
    if isinstance(row.get("image"), dict):
        row["image"] = {key: name for key, name in row["image"].items() if name is not None}
    return read_row(row, unused_images=True)


def _history(dialogue: Dialogue, answers: list[str], folder: Path) -> list[Any]:
    pictures = iter(find_pictures(dialogue, folder))
    made: list[Any] = []
    for index, question in enumerate(dialogue.questions[: len(answers) + 1]):
        parts = [
            part if part["type"] == "text" else {"type": "image", "url": str(part["image"])}
            for part in interleave(question, pictures)
        ]
        made.append({"role": "user", "content": parts})
        if index < len(answers):
            own = [{"type": "text", "text": answers[index]}]
            made.append({"role": "assistant", "content": own})
    return made


def _count(right: Sequence[bool]) -> dict[str, Any]:
    return {"right": sum(right), "of": len(right), "score": sum(right) / len(right)}
