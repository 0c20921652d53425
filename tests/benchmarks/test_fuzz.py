"""The fuzz program finds what it is to find, no input fails, and none writes outside."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.fuzz import mutate, worker
from benchmarks.fuzz.__main__ import Report, main
from benchmarks.fuzz.target import Case, Target, failure_of
from mmkv.engine.errors import InputError
from mmkv.training.measure.record import write_results


class Scripted(Target):
    """Does what its cases say."""

    name = "scripted"
    held = None

    def make(self, rng: Random) -> Case:
        return {"what": self.whats.pop(0), "noise": "x" * 1000, "more": [1, 2, 3]}

    def run(self, case: Case) -> None:
        what, self.held = case["what"], None
        if what == "refused":
            raise InputError("no; give another")
        if what == "raised":
            raise KeyError("x" if "xx" in case["noise"] else "y")
        if what == "slow":
            time.sleep(60)
        if what == "leaking":
            self.held = "3 pages are held"
        if what == "overwriting":
            Path("picture.png").write_text("lost")

    def leaked(self) -> str | None:
        return self.held


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, io.StringIO]]:
    """Yield a worker with the scripted class, and what it reports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(worker.TARGETS, "scripted", Scripted)
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF)}
    answer = io.StringIO()
    plan = {
        "seed": 1,
        "hang_seconds": 0.2,
        "cases": str(tmp_path / "cases"),
        "current": str(tmp_path / "current.json"),
        "classes": ["scripted"],
    }
    runner = worker.FuzzWorker(plan, answer)
    try:
        runner.prepare()
        yield runner, answer
    finally:
        runner.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_every_kind_of_failure_is_found(made: tuple[Any, io.StringIO]) -> None:
    runner, answer = made
    whats = ["fine", "refused", "raised", "slow", "leaking", "overwriting", "fine"]
    Scripted.whats = list(whats)
    runner.go({"scripted": 0}, {"scripted": len(whats)}, time.monotonic() + 60)
    lines = [json.loads(line) for line in answer.getvalue().splitlines()]
    kinds = [line.get("kind") for line in lines]
    assert kinds == [None, None, "traceback", "hang", "leak", "harm", None]
    assert Path("picture.png").read_text() == "keep me"
    kept = json.loads(Path(lines[2]["file"]).read_text())["case"]
    assert kept["what"] == "raised" and len(kept["noise"]) < 10 and kept["more"] == []


def test_runs_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for seed, kinds in ((1, (None, "leak")), (2, ("leak", "hang", None))):
        report = Report(seed, ["gates"])
        for number, kind in enumerate(kinds):
            line = {"class": "gates", "number": number, "seconds": seed, "file": "case.json"}
            report.add(line | ({} if kind is None else {"kind": kind, "place": "p", "message": ""}))
        files.append(tmp_path / f"{seed}.json")
        write_results(files[-1], {"seed": seed, "memory_gib": 1.0}, report.as_json())
    assert main(["--join", *map(str, files), "--output", str(tmp_path / "all.json")]) == 1
    page = json.loads((tmp_path / "all.json").read_text())
    counts = page["results"]["classes"]["gates"]
    assert (counts["inputs"], counts["leaks"], counts["hangs"], counts["tracebacks"]) == (
        5,
        2,
        1,
        0,
    )
    assert [run["seed"] for run in page["settings"]["runs"]] == [1, 2]
    assert {f["kind"]: f["times"] for f in page["results"]["failures"]} == {"leak": 2, "hang": 1}
    assert "| gates | 5 | 0 | 1 | 2 | 0 | 2.0 s |" in capsys.readouterr().out


def test_a_folder_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):  # before anything is tried
        main(["--inputs", "1", "--output", str(tmp_path)])
    assert "is a folder" in capsys.readouterr().err


def test_only_an_own_refusal_is_none() -> None:
    def raised(make: Any) -> Any:
        try:
            make()
        except BaseException as error:
            return failure_of(error)

    from mmkv.sampling import Sampling

    assert raised(lambda: Sampling(max_new_tokens=0)) is None
    assert raised(lambda: int("x")).kind == "traceback"
    assert raised(lambda: {}["x"]).place.startswith("KeyError")
    assert raised(lambda: worker._too_long(0, None)).kind == "hang"


@pytest.mark.parametrize("seed", range(3))
def test_cases_depend_on_the_seed_alone_and_are_json(seed: int) -> None:
    tree = {"a": [1, {"b": "text"}], "c": None}
    made = [mutate.edit(Random(f"{seed}/{n}"), tree) for n in range(200)]
    again = [mutate.edit(Random(f"{seed}/{n}"), tree) for n in range(200)]
    assert json.dumps(made) == json.dumps(again) and tree == {"a": [1, {"b": "text"}], "c": None}
    assert len({json.dumps(each) for each in made}) > 150


@pytest.mark.long(reason="of the program, whose runs show it")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process addresses")
def test_the_limit_of_memory_is_for_the_inputs_and_not_for_libraries() -> None:
    code = """
import mmap
from benchmarks.fuzz.worker import limit_memory
libraries = mmap.mmap(-1, 8 << 30, mmap.MAP_PRIVATE, mmap.PROT_READ)
limit_memory(1 << 30)
bytes(512 << 20)
try:
    bytes(3 << 29)
except MemoryError:
    print("refused")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "refused\n"), ran.stderr


# Inputs of the fuzz program change no file outside its folders.


# The hook stays for as long as its process runs, so it needs one of its own. Not pathlib's names:
# each call goes through another event.
CHANGES = """
import os, pathlib, sys, tempfile
outside, inside = map(pathlib.Path, sys.argv[1:])
tempfile.tempdir = str(inside)
from benchmarks.fuzz.worker import write_only_below
write_only_below([inside])
kept = outside / "kept"
changes = [
    lambda at: (at / "new").write_text("x"),
    lambda at: (at / "kept").open("a").close(),
    lambda at: os.open(at / "kept", os.O_RDWR),
    lambda at: (at / "folder").mkdir(),
    lambda at: os.replace(at / "kept", inside / "moved"),
    lambda at: os.replace(inside / "own", at / "kept"),
    lambda at: os.symlink(inside, at / "link"),
    lambda at: os.truncate(at / "kept", 0),
    lambda at: os.remove(at / "kept"),
    lambda at: open(inside / ".." / at.name / "kept", "w"),
    lambda at: (inside / "way" / "kept").write_text("through a link"),
]
for number, change in enumerate(changes):
    try:
        change(outside)
    except PermissionError:
        continue
    print("not refused:", number)
print(kept.read_text())
(inside / "own").write_text("fine")
os.replace(inside / "own", inside / "moved")
print((inside / "moved").read_text())
"""


def test_files_elsewhere_cannot_be_changed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_text("kept")
    (inside / "own").write_text("own")
    (inside / "way").symlink_to(outside)
    done = subprocess.run(
        [sys.executable, "-c", CHANGES, str(outside), str(inside)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["kept", "fine"]
    assert [path.name for path in outside.iterdir()] == ["kept"]


# A small part of the fuzz program's inputs, the same in every run, under a memory limit.


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_slice_of_every_class_leads_to_no_failure(tmp_path: Path) -> None:
    counts = tmp_path / "fuzz.json"
    options = ["--inputs", "440", "--seed", "1", "--memory", "6", "--cases", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", *options, "--output", str(counts)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    classes = json.loads(counts.read_text())["results"]["classes"]
    assert sum(each["inputs"] for each in classes.values()) > 360
    assert all(each["inputs"] >= 3 for each in classes.values())
