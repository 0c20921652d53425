"""Calibrations that are made up, and engines whose answers are weighed against them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv import Engine
from mmkv.calibration import (
    FORMAT,
    CalibratedAnswer,
    CalibratedDialogue,
    Calibration,
    identity_of,
)


def calibration(
    scores: Sequence[Sequence[float]],
    lost: float = 0.0,
    identity: dict[str, Any] | None = None,
    score: Any = "risk",
) -> Calibration:
    """Return one of dialogues with these scores, each of whose answers loses so much."""
    dialogues = [
        CalibratedDialogue(
            answers=[CalibratedAnswer(score=at, losses=[(at, lost)] if lost else []) for at in one]
        )
        for one in scores
    ]
    return Calibration(
        format=FORMAT,
        identity=identity or {},
        data=["drawn"],
        loss="answers",
        score=score,
        alpha=0.5,
        dialogues=dialogues,
    )


def certified(
    engine: Engine, folder: Path, on_risk: str, limit: float = 0.0, score: str = "risk", **more: Any
) -> Engine:
    """Have all answers that score ``limit`` or more be doubtful."""
    some = math.isfinite(limit)
    made = calibration([[limit if some else 0.0]] * 3, float(some), identity_of(engine), score)
    assert made.limit == limit
    (folder / "made.json").write_text(made.model_dump_json())
    engine.certify(folder / "made.json", on_risk, **more)
    return engine
