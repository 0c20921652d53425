"""Real runs of lmms-eval in their own processes, and the files they write."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "tiny-vlm"

needs_lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None,
    reason="lmms-eval is not installed; see docs/lmms-eval.md",
)


@dataclass(frozen=True)
class Written:
    """The files of one run."""

    results_file: Path

    @property
    def results(self) -> dict[str, Any]:
        return json.loads(self.results_file.read_text())["results"]

    def samples(self, task: str) -> list[dict[str, Any]]:
        stamp = self.results_file.name.removesuffix("results.json")
        path = self.results_file.with_name(f"{stamp}samples_{task}.jsonl")
        made = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(made, key=lambda sample: sample["doc_id"])

    def texts(self, task: str) -> list[Any]:
        return [sample["filtered_resps"] for sample in self.samples(task)]


def run(arguments: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ...`` offline, on one thread, with its own cache folder."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("cv2") is None:
        # Video-MME's task file imports OpenCV (60 MB) at its top and needs it for subtitles alone.
        stand_in = home / "modules"
        stand_in.mkdir(parents=True, exist_ok=True)
        (stand_in / "cv2.py").touch()
        paths.insert(0, str(stand_in))
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run(
        [sys.executable, "-m", *arguments], env=env, cwd=ROOT, capture_output=True, text=True
    )


def written(output: Path) -> Written:
    """Return the one results file below a folder."""
    (found,) = output.rglob("*_results.json")
    return Written(found)
