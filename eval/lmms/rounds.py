"""A multi-round task: dialogues in MMDU's form whose answers can be compared exactly.

A row is {"id", "image": [paths], "conversations": [{"from": "user", "value": question with
<ImageHere> marks}, {"from": "assistant", "value": reference}, ...]}. lmms-eval carries no history
from round to round, so every round's messages hold the dialogue so far, with the model's own
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import InputError
from eval.lmms.media import FOLDER

MARK = "<ImageHere>"


def messages(
    doc: dict[str, Any],
    lmms_eval_specific_kwargs: dict[str, Any] | None = None,
    round_idx: int | None = None,
    previous_output: Sequence[str] = (),
    previous_round_info: Any = None,
) -> Any:
    """The messages of the first round; later (messages, over, outputs, info). Raises InputError."""
    kwargs = lmms_eval_specific_kwargs or {}
    if round_idx is None:
        return _history(doc, [], kwargs)
    over = round_idx >= len(_turns(doc))
    asked = None if over else _history(doc, list(previous_output), kwargs)
    return asked, over, list(previous_output), None


def no_visual(doc: dict[str, Any]) -> list[Any]:
    """Nothing: the pictures stand inside the messages."""
    return []


def first_question(doc: dict[str, Any], kwargs: dict[str, Any] | None = None) -> str:
    """What the samples file shows as the dialogue's input."""
    return _turns(doc)[0][0]


def references(doc: dict[str, Any]) -> list[str]:
    """The right answers, in order."""
    return [answer for _, answer in _turns(doc)]


def score(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """How many of the dialogue's answers are exactly right, up to case and blanks."""
    given = results[0]
    right = [_plain(a) == _plain(b) for a, b in zip(given, references(doc), strict=True)]
    return {
        "exact_match": {"right": sum(right), "of": len(right), "score": sum(right) / len(right)}
    }


def share(results: Sequence[dict[str, Any]]) -> float:
    """Share of the right answers of all dialogues together."""
    return sum(r["right"] for r in results) / sum(r["of"] for r in results)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")


def _turns(doc: dict[str, Any]) -> list[tuple[str, str]]:
    said = doc["conversations"]
    users, own = said[::2], said[1::2]
    roles = {("user", "assistant"), ("human", "gpt")}
    if len(users) != len(own) or not all(
        (u["from"], a["from"]) in roles for u, a in zip(users, own, strict=True)
    ):
        raise InputError(
            f"dialogue {doc.get('id')}: user and assistant must take turns; correct the file"
        )
    return [(u["value"], a["value"]) for u, a in zip(users, own, strict=True)]


def _history(doc: dict[str, Any], answers: list[str], kwargs: dict[str, Any]) -> list[Any]:
    pictures = iter(_pictures(doc, kwargs))
    made: list[Any] = []
    for index, (question, _) in enumerate(_turns(doc)[: len(answers) + 1]):
        pieces = question.split(MARK)
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            if number:
                path = next(pictures, None)
                if path is None:
                    raise InputError(
                        f"dialogue {doc.get('id')} marks more pictures than it names; correct it"
                    )
                parts.append({"type": "image", "url": path})
            if piece.strip():
                parts.append({"type": "text", "text": piece.strip("\n")})
        made.append({"role": "user", "content": parts})
        if index < len(answers):
            own = [{"type": "text", "text": answers[index]}]
            made.append({"role": "assistant", "content": own})
    return made


def _pictures(doc: dict[str, Any], kwargs: dict[str, Any]) -> list[str]:
    named = doc["image"]
    if isinstance(named, dict):
        named = [path for path in named.values() if path is not None]
    folder = Path(kwargs.get(FOLDER, "."))
    return [str(folder / path) for path in named]
