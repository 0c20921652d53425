"""``make first-hour``: it ends no step with another, and leaves none out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools import first_hour
from tools.first_hour import CHECKS, Step, main, run, steps


def test_every_check_is_a_step(tmp_path: Path) -> None:
    made = steps(tmp_path)
    assert len({step.name for step in made}) == len(made)
    assert {step.name for step in made if step.check is not None} == set(CHECKS)
    files = [part for step in made for part in step.command if part.endswith(".py")]
    assert files and all((first_hour.ROOT / name).exists() for name in files)


@pytest.mark.parametrize(
    ("code", "verdict", "found"),
    [
        ("print('12 passed in 3 s'); print('last')", "good", "12 passed in 3 s"),
        ("print('7 ms')", "good", "7 ms"),
        ("raise ValueError('a reason')", "FAILED", "ValueError: a reason"),
        ("import time; time.sleep(60)", "not over after 1 s", "nothing"),
    ],
)
def test_a_step_has_a_verdict(
    code: str, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_hour, "PATIENCE", 1 if "sleep" in code else 60)
    made = run(Step("one", "", ["-c", code]))
    assert (made["verdict"], made["found"]) == (verdict, found)


def test_what_is_not_installed_is_left_out() -> None:
    made = run(Step("one", "", ["-c", "1"], needs="no-such-sanitizer memcheck"))
    assert made["verdict"] == "left out" and "no-such-sanitizer" in made["found"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "torch finds no GPU here; --fake" in capsys.readouterr().err
