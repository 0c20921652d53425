"""Count exact answers of sets whose references are the only right answers (``exact`` rows)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmkv.eval.mmdu.data import Dialogue

ALL = "all"


@dataclass(frozen=True)
class Share:
    """Right answers of one kind of question; ``low``, ``high``: 95 % interval over dialogues."""

    kind: str
    right: int
    of: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Return right answers per question."""
        return self.right / self.of


def is_right(answer: str, reference: str) -> bool:
    """Return whether an answer says the same as its reference, white space aside."""
    return " ".join(answer.split()) == " ".join(reference.split())


def shares(dialogues: Sequence[Dialogue], answers: Mapping[str, Sequence[str]]) -> list[Share]:
    """Count the right answers per kind, ``all`` last; ``answers`` by dialogue id, missing ones left
    out.

    Questions of one dialogue share a memory, so intervals resample dialogues
    (mmkv.eval.measure.stats.mean). Empty when no answered dialogue has exact references.
    """
    from mmkv.eval.measure.stats import mean

    hits: dict[str, dict[str, list[bool]]] = {}
    for dialogue in dialogues:
        for kind, reference, answer in zip(
            dialogue.exact, dialogue.references, answers.get(dialogue.id, ()), strict=False
        ):
            for name in (kind, ALL):
                hit = is_right(answer, reference)
                hits.setdefault(name, {}).setdefault(dialogue.id, []).append(hit)
    found: list[Share] = []
    for kind in sorted(hits, key=lambda name: (name == ALL, name)):
        groups = list(hits[kind].values())
        right, of = [sum(group) for group in groups], [len(group) for group in groups]
        interval = mean(right, of)
        found.append(Share(kind, sum(right), sum(of), interval.low, interval.high))
    return found


def as_rows(found: Sequence[Share]) -> list[dict[str, Any]]:
    """Return the shares as JSON holds them."""
    return [
        {"kind": s.kind, "right": s.right, "of": s.of, "share": s.share, "ci": [s.low, s.high]}
        for s in found
    ]
