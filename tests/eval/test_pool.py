"""The program that compares one shared budget with equal shares."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from mmkv import bundled_model
from mmkv.engine.model.families.base import Turn
from mmkv.engine.runtime import Runtime
from mmkv.eval import pool
from mmkv.training.data.dialogues import scene_example, scene_turns
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.measure.teacher_forced import read


@pytest.fixture(scope="module")
def engine() -> Runtime:
    return Runtime.from_pretrained(bundled_model(), policy="dbtrimkv", dtype="float32")


def test_a_group_is_read_as_each_dialogue_alone_while_nothing_is_evicted(engine: Runtime) -> None:
    dialogues: list[tuple[Turn, Tensor]] = []
    wanted = []
    for seed in (3, 4):
        example = scene_example(scene_turns("dense", seed, "heldout")[:3], build_tokenizer())
        labels = example.pop("labels")[0]
        run = read(engine, example, labels, 4096)
        wanted.append([answer.right for answer in run.answers])
        dialogues.append((engine.family.turn(example, 0, engine.device), labels))
    equal = pool.read_group(engine, dialogues, 8192, None)
    assert equal["right"] == wanted
    shared = pool.read_group(engine, dialogues, 8192, 0.5)
    assert shared == equal
    tight = pool.read_group(engine, dialogues, 16, 0.5)
    rows = engine.spec.rows
    assert sum(tight["held"]) <= 16 and all(one >= int(4 * rows) / rows for one in tight["held"])
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_the_summary_pairs_each_arm_with_equal_shares() -> None:
    def row(group: int, setting: str, long: int, short: int) -> dict[str, Any]:
        right = [[True] * long + [False] * (4 - long)] * pool.LONG
        right += [[True] * short + [False] * (2 - short)] * (len(pool.KINDS) - pool.LONG)
        return {
            "group": group,
            "budget": "1/8",
            "setting": setting,
            "right": right,
            "held": [1.0] * 8,
        }

    rows = [
        row(group, setting, 1 + (setting == "pool"), 2 - group)
        for group in (0, 1)
        for setting in pool.SETTINGS
    ]
    equal, shared, floored = pool.summarise(rows, ["1/8"])
    assert equal["long"]["value"] == 1 / 4 and shared["long"]["value"] == 2 / 4
    assert equal["short"]["value"] == (2 + 1) / 4 == floored["short"]["value"]
    assert shared["long less equal"]["value"] == 1 / 4 and floored["all less equal"]["value"] == 0
    answers = 4 * pool.LONG + 2 * (len(pool.KINDS) - pool.LONG)
    assert shared["all less equal"]["value"] == pytest.approx(pool.LONG / answers)
    assert shared["held by the long"] == pool.LONG / len(pool.KINDS)
    head, *lines = pool.table_rows([equal, shared, floored])
    assert [len(line) for line in lines] == [len(head)] * 3
