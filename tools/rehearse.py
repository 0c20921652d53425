"""``make rehearse``: every stage of the papers' tables on tiny data of the published forms.

Data, training, gates in their published form, each benchmark by the command of its table, speed:
the bundled model, two documents each, on two cores without a network. Prints a table of stages,
seconds and what came out, and ends with 1 where a stage failed; the others run all the same.
Nothing here says how good a method is.

To add a stage, write a function with ``@stage("name")``. It gets the :class:`Rehearsal` and returns
a few words; what it raises is its failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.engine.errors import MmkvError
from mmkv.eval.papers.reproduce import (
    PaperTable,
    TableChoice,
    TableRow,
    commands,
    row_folder,
    tables,
)

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets" / "tiny-vlm"
Stage = Callable[["Rehearsal"], str]
STAGES: dict[str, Stage] = {}
# Scorers that read layers 10 and 21, which the small model lacks.
_TOO_DEEP = ("epikv", "hs-variance", "band-adaptive", "segments-hs")
_DATA, _GATES = "data", "gates in the published form"


class StageError(MmkvError):
    """A stage of the rehearsal failed."""


def stage(name: str) -> Callable[[Stage], Stage]:
    """Add a function to the stages, which run in the order in which they are written."""

    def added(function: Stage) -> Stage:
        STAGES[name] = function
        return function

    return added


class Rehearsal:
    """The folders of one rehearsal.

    Attributes:
        data: what ``mmkv eval --data`` is given; gates: by policy, once a stage has made them.
    """

    def __init__(self, work: Path) -> None:
        self.work, self.data = work, work / "data"
        self.gates = {
            policy: work / "gates" / policy for policy in ("trimkv", "dbtrimkv", "wgkv")
        } | {"wgkv+snapkv": work / "gates" / "wgkv"}
        self.data.mkdir(parents=True, exist_ok=True)
        sys.path.append(str(self._stand_ins()))  # tasks are checked in this process, too

    def run(self, words: Sequence[str]) -> str:
        """Run a command offline; its output. Raises StageError with its last line."""
        if words[0] == "mmkv":
            words = ["python", "-P", "-m", *words]
        done = subprocess.run(
            [sys.executable, *words[1:]],
            env=self._environment(),
            cwd=ROOT,
            input="Name every cell.",
            capture_output=True,
            text=True,
        )
        (self.work / "log.txt").open("a").write(f"{words}\n{done.stdout}\n{done.stderr}\n")
        if done.returncode:
            last = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise StageError(f"exit code {done.returncode}: {last[-1] if last else 'no message'}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        modules = self.work / "modules"
        if not modules.exists():
            from tests.support.lmms_runs import few_tasks

            few_tasks(modules)  # lmms-eval reads 2,000 task files otherwise, at every start
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.work / "home"),
            "PYTHONPATH": os.pathsep.join([str(modules), str(self._stand_ins()), str(ROOT)]),
        }

    def _stand_ins(self) -> Path:
        """Return a folder for what tasks import at their top alone: subtitles, LaTeX."""
        made = self.work / "stand-ins"
        made.mkdir(exist_ok=True)
        (made / "cv2.py").touch()
        (made / "latex2sympy2.py").write_text("def latex2sympy(text):\n    return text\n")
        return made


# --- Data of the published forms ------------------------------------------------------------------


@stage(f"{_DATA}: pictures, videos, dialogues")
def pictures(rehearsal: Rehearsal) -> str:
    """Write rows of lmms-eval's shipped tasks, and MMDU."""
    from tests.support.lmms_data import write_all

    write_all(rehearsal.data, 2, lambda picture, text: "cake")
    return f"{len(list(rehearsal.data.iterdir()))} data sets"


@stage(f"{_DATA}: mathematics, LongProc")
def texts(rehearsal: Rehearsal) -> str:
    """Write rows of the text benchmarks."""
    from datasets import Dataset

    def lines(name: str, *rows: dict[str, Any]) -> None:
        path = rehearsal.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))

    def parquet(name: str, *rows: dict[str, Any]) -> None:
        path = rehearsal.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(list(rows)).to_parquet(path)

    sum_of = {"problem": "What is $1 + 1$?", "solution": r"It is $\boxed{2}$.", "answer": "2"}
    math500 = {**sum_of, "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"}
    lines("math500/test.jsonl", math500)
    parquet("aime24/data/train-00000-of-00001.parquet", {"id": 60, **sum_of, "year": "2024"})
    lines("aime25/test.jsonl", {"problem": "What is $1 + 1$?", "answer": "2", "id": "0"})
    parquet(
        "amc23/data/test-00000-of-00001.parquet",
        {"id": 0, "question": "What is $1 + 1$?", "answer": "2.0", "url": "u"},
    )
    parquet(
        "gsm8k/main/test-00000-of-00001.parquet",
        {"question": "One and one?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    )
    about: dict[str, dict[str, Any]] = {
        "countdown": {"nums": [40, 19, 23, 7], "target": 37},
        "travel_planning": {"ground_truth_cities": "Rome**Oslo", "ground_truth_durations": "3**5"},
    }
    for task in ("html_to_tsv", "path_traversal", "tom_tracking", "countdown", "travel_planning"):
        for size in ("0.5k", "2k", "8k"):
            row = {"id": "0", "input_prompt": "Name every cell.", "reference_output": "a\tb\nc\td"}
            parquet(
                f"longproc/{task}_{size}/test-00000-of-00001.parquet",
                {**row, "metadata": json.dumps(about.get(task, {}))},
            )
    return "5 data sets, 14 tasks"


@stage(f"{_DATA}: long texts")
def long_texts(rehearsal: Rehearsal) -> str:
    """Write rows of the long-text benchmarks, those that there are makers for."""
    from tests.support.long_text_rows import write_all

    write_all(rehearsal.data)
    return f"{len(list(rehearsal.data.iterdir()))} data sets in all"


# --- Training and gates ---------------------------------------------------------------------------


def _train(rehearsal: Rehearsal, policy: str, recipe: str, *more: str) -> str:
    output = rehearsal.work / "trained" / policy
    rehearsal.run(
        [
            *("python", "-m", "mmkv.training.distill", "--model", str(MODEL)),
            *("--data", f"mmdu:{rehearsal.data}/mmdu/benchmark.json", "--recipe", recipe),
            *("--media-root", f"{rehearsal.data}/mmdu", "--steps", "1", "--accumulate", "1"),
            *("--max-length", "256", "--output", str(output), *more),
        ]
    )
    return "one step"


STAGES["training: dbtrimkv"] = partial(_train, policy="dbtrimkv", recipe="dbtrimkv")
STAGES["training: trimkv"] = partial(_train, policy="trimkv", recipe="trimkv")


@stage("training: wgkv")
def write_gates(rehearsal: Rehearsal) -> str:
    """Train write gates, which later stages use as they are."""
    import shutil

    _train(rehearsal, "wgkv", "wgkv", "--method", "wgkv")
    shutil.copytree(rehearsal.work / "trained" / "wgkv", rehearsal.gates["wgkv"])
    return "one step"


@stage(_GATES)
def published(rehearsal: Rehearsal) -> str:
    """Write random gates as ``trimkv_weights.pth`` and talk with them."""
    import mmkv
    from tests.engine.model.test_gates import published as weights
    from tests.engine.model.test_gates import write

    spec = mmkv.Engine.from_pretrained(MODEL, policy="full").spec
    for policy, kind in (("trimkv", "rg"), ("dbtrimkv", "rg10")):
        rehearsal.gates[policy].parent.mkdir(exist_ok=True)
        folder = write(weights(spec, kind), rehearsal.gates[policy])
        engine = mmkv.Engine.from_pretrained(MODEL, gates=str(folder), policy=policy, budget=16)
        (reply,) = engine.generate(
            [{"role": "user", "content": "name every cell. " * 8}], mmkv.Sampling(max_new_tokens=8)
        )
        if reply.memory is None or not reply.memory.evicted:
            raise StageError(f"{policy}: nothing was evicted")
    return "rg and rg10"


# --- The tables -----------------------------------------------------------------------------------


def _row(table: PaperTable) -> TableRow:
    """Return the row to rehearse: a learned policy's where there is one."""
    usable = [row for row in table.rows if row.name not in _TOO_DEEP]
    learned = [row for row in usable if row.name in table.gates]
    evicting = [row for row in usable if row.budget]
    return (learned or evicting or usable)[0]


def _table(rehearsal: Rehearsal, name: str) -> str:
    """Run one row by the table's own command; with fewer tasks where some have no rows here."""
    from mmkv.eval.papers.reproduce import without_data

    table = tables()[name]
    row = _row(table)
    choice: dict[str, Any] = {
        "data": str(rehearsal.data),
        "output": str(rehearsal.work / "results"),
        "model": str(MODEL),
        "gates": str(rehearsal.gates[row.name]) if row.name in table.gates else None,
        "limit": 2,  # MME scores pairs
        "samples": 2 if table.samples else None,
        "device": "cpu",
        "gen_kwargs": "max_new_tokens=8" if table.evaluates else None,
    }
    lacking = [task for task in table.tasks if without_data([task], rehearsal.data)]
    if len(lacking) == len(table.tasks):
        raise StageError(f"no rows of {', '.join(lacking)}")
    if lacking:
        for words in commands(table, row, TableChoice(**choice)):
            here = [task for task in table.tasks if task not in lacking]
            words[words.index("--tasks") + 1] = ",".join(here)
            rehearsal.run(words)
        return f"{row.folder}; {len(lacking)} of {len(table.tasks)} tasks have no rows here"
    asked = {"policy": row.policy, "budget": row.budget, **choice}
    given = {f"--{key.replace('_', '-')}": value for key, value in asked.items() if value}
    options = [str(word) for pair in given.items() for word in pair]
    rehearsal.run(["mmkv", "eval", "--reproduce", name, *options])
    return row.folder


# What a program's options become; it runs on the bundled model or a tiny shape.
_SMALL = {
    "--shape": ["tiny"],
    "--cases": ["2:64:16"],
    "--peers": [],
    "--limit": ["1"],
    "--lengths": ["1024"],
    "--length": ["256"],
    "--budgets": ["32"],
    "--most": ["256"],
    "--top": ["16"],
    "--device": ["cpu"],
}
_SCENES = {"deepscaler": "scenes:dense"}  # the bundled model knows no mathematics


def _program(rehearsal: Rehearsal, name: str) -> str:
    """Run a row of a table that is not made by ``mmkv eval``, small."""
    from PIL import Image

    table = tables()[name]
    row = table.rows[0]
    gates = str(rehearsal.gates[row.name]) if row.name in table.gates else None
    choice = TableChoice(str(rehearsal.data), str(rehearsal.work / "results"), str(MODEL), gates)
    Image.new("RGB", (64, 64), "red").save(rehearsal.data / "picture.png")
    row_folder(table, row, choice).mkdir(parents=True, exist_ok=True)
    for words in commands(table, row, choice):
        at = [index for index, word in enumerate(words) if word.startswith("--")]
        made = words[: at[0]]
        for start, stop in zip(at, [*at[1:], len(words)], strict=True):
            values = _SMALL.get(words[start], words[start + 1 : stop])
            made += [words[start], *(_SCENES.get(value, value) for value in values)]
        if "benchmarks.bench.decode" in made:
            made += ["--device", "cpu", "--dtype", "float32", "--rounds", "1", "--steps", "2"]
        rehearsal.run(made)
    return row.folder


for _name, _one in tables().items():
    STAGES[f"table {_name}"] = partial(_table if _one.columns else _program, name=_name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and print what came of each."""
    parser = argparse.ArgumentParser(prog="python -m tools.rehearse", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="stages whose names begin so")
    parser.add_argument("--work", type=Path, help="folder to keep; default: one that is removed")
    parser.add_argument("--list", action="store_true", help="print the stages")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(STAGES))
        return 0
    with tempfile.TemporaryDirectory(prefix="mmkv-rehearsal-") as removed:
        rehearsal, failed = Rehearsal(args.work or Path(removed)), 0
        width = max(map(len, STAGES))
        for name, function in STAGES.items():
            needed = name.startswith((_DATA, _GATES)) and args.work is None
            if args.only and not needed and not name.startswith(tuple(args.only)):
                continue
            started = time.monotonic()
            try:
                said, mark = function(rehearsal), "ok"
            except (MmkvError, OSError, ImportError, AssertionError) as error:
                said, mark, failed = str(error).strip(), "FAILED", failed + 1
            seconds = time.monotonic() - started
            print(f"{name:{width}} {seconds:6.0f} s  {mark:6}  {said}", flush=True)
    print(f"{failed} failed" if failed else "all stages ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
