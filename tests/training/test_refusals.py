"""Runs that cannot end well are refused before they start, and stopped ones can go on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from mmkv.resources import bundled_model
from training.distill import main
from training.settings import Settings

MODEL = str(bundled_model())
NUMBERS = sorted(f.name for f in fields(Settings) if isinstance(f.default, float))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NUMBERS), st.sampled_from(["nan", "inf", "-inf"]))
def test_numbers_that_are_not_finite_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is {value}; give"):
        Settings(MODEL, "out", **{name: float(value)})


@pytest.mark.parametrize(("option", "value"), [("--lr", "inf"), ("--bias", "nan")])
def test_such_a_run_ends_with_an_error_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    out = tmp_path / "gates"
    given = ["--model", MODEL, "--data", "scenes:dense", "--output", str(out), option, value]
    assert main(given) == 1
    assert f"{option} is {value}" in capsys.readouterr().err and not out.exists()
