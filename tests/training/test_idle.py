"""A run that teaches its gates nothing says so, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from mmkv.training.run import _idle
from mmkv.training.settings import TrainingSettings
from tests.training.test_distill import settings, train


@pytest.mark.parametrize(
    ("norms", "said"),
    [([1e-6] * 5, 1), ([1e-6, 1e-6], 1), ([1e-6, 0.2, 1e-6], 0), ([], 0)],
    ids=["idle", "idle and short", "moves", "nothing logged"],
)
def test_gradients_next_to_nothing_are_said_once(
    norms: list[float], said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Any = None
    state = TrainerState(is_world_process_zero=True)
    callback = _idle(TrainingSettings(model="m", output="o"))
    for norm in norms:
        callback.on_log(given, state, given, {"grad_norm": norm})
    callback.on_train_end(given, state, given)
    err = capsys.readouterr().err
    assert err.count("learn next to nothing") == said
    assert ("--bias 10 --lr 3e-3 --lambda-cap 16 --d-gate 96" in err) == bool(said)


def test_a_run_shorter_than_its_log_lines_says_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias of 20 is a gate of 1 - 2e-9: whatever the data, next to nothing moves it."""
    run: dict[str, Any] = {"bias": 20.0, "lambda_cap": 0.0, "loss": "ntp", "log_every": 10}
    train(settings(tmp_path, steps=1, **run))
    assert "mmkv: these gates learn next to nothing: up to step 1" in capsys.readouterr().err
