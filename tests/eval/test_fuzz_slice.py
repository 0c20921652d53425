"""A small part of the fuzz program's inputs, the same in every run, under a memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_slice_of_every_class_leads_to_no_failure(tmp_path: Path) -> None:
    counts = tmp_path / "fuzz.json"
    options = ["--inputs", "400", "--seed", "1", "--memory", "6", "--cases", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "mmkv.eval.fuzz", *options, "--output", str(counts)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    classes = json.loads(counts.read_text())["results"]["classes"]
    assert sum(each["inputs"] for each in classes.values()) > 320
    assert all(each["inputs"] >= 3 for each in classes.values())
