"""The bundled model answers correctly over thousands of tokens with few entries."""

from __future__ import annotations

import pytest

from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from mmkv.training.data.dialogues import scene_example, sparse, stream
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.data.scenes import SceneTurn
from mmkv.training.measure.teacher_forced import DialogueRun, read
from tests.support.tiers import slow_but


def run(turns: list[SceneTurn], policy: str, budget: float | None) -> DialogueRun:
    engine = Runtime.from_pretrained(bundled_model(), policy=policy, dtype="float32", device="cpu")
    example = scene_example(turns, build_tokenizer())
    labels = example.pop("labels")[0]
    return read(engine, example, labels, budget)


def latest(turns: list[SceneTurn], found: DialogueRun) -> float:
    """Return the share of the questions about the newest pictures that were answered right."""
    right = [
        answer.right for turn, answer in zip(turns, found.answers, strict=True) if turn.pictures
    ]
    return sum(right) / len(right)


# Answers come from the synthetic scenes, whose rules are tested against pixels (test_dialogues).
@pytest.mark.parametrize(
    ("policy", "budget"),
    slow_but(
        [("dbtrimkv+48", 64.0)], [("full", None), ("dbtrimkv+48", 64.0)], "reads 2,000 tokens"
    ),
)
def test_a_stream_of_2000_tokens_is_followed(policy: str, budget: float | None) -> None:
    turns = stream(3, "heldout", 32)
    found = run(turns, policy, budget)
    assert found.tokens_seen > 2000 and latest(turns, found) >= 0.9
    if budget is not None:
        assert found.evicted > 20 * found.entries
        assert found.entries <= budget * len(found.per_row) * len(found.per_row[0])


@pytest.mark.slow(reason="reads 2,000 tokens")
def test_one_of_2000_tokens_of_distractors_is_remembered() -> None:
    turns = sparse(5, "heldout", 160, 2, 8, search=False)
    found = run(turns, "full", None)
    assert found.tokens_seen > 2000
    assert sum(answer.right for answer in found.answers) >= 7
