"""Real runs of lmms-eval in their own processes, and the files they write.

A start of lmms-eval reads all of its 2,000 task files, which takes longer than these runs. They see
its own code with the folders of the tasks that have a local form and no others, as links;
``tests/packaging/test_wheel.py`` runs it whole, with ``make test-drawn``.
"""

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

from mmkv.eval.lmms.tasks import local_form, local_names, shipped_folder

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "tiny-vlm"

needs_lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None,
    reason="lmms-eval is not installed; see benchmarks/notes/lmms-eval.md",
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


def few_tasks(modules: Path) -> None:
    """Write ``lmms_eval`` below a folder: links to the installed one, with few tasks."""
    installed = shipped_folder().parent
    local = [local_form(name).get("include", "") for name in local_names()]
    wanted = {include.split("/")[0] for include in local}
    (modules / "lmms_eval" / "tasks").mkdir(parents=True)
    for path in (*installed.iterdir(), *(installed / "tasks").iterdir()):
        of_task = path.parent != installed and path.is_dir() and path.name[0] != "_"
        if path.name not in ("tasks", "__pycache__") and (not of_task or path.name in wanted):
            (modules / "lmms_eval" / path.relative_to(installed)).symlink_to(path)


def run(arguments: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ...`` offline, on one thread, with its own cache folder."""
    return run_python(["-m", *arguments], home)


def run_python(arguments: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as :func:`run` does."""
    modules = home / "modules"
    if not modules.exists():
        few_tasks(modules)
        if importlib.util.find_spec("cv2") is None:
            # Video-MME's task file imports OpenCV (60 MB) at its top, for subtitles alone.
            (modules / "cv2.py").touch()
    paths = [str(modules), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)


def written(output: Path) -> Written:
    """Return the one results file below a folder."""
    (found,) = output.rglob("*_results.json")
    return Written(found)
