"""Run inputs in this process, under a memory limit, and report every failure as a line of JSON.

The parent reads the lines. What runs at the moment stands in a file, so that the parent can name it
when this process dies or no longer answers.

The process is kept from changing files outside its own folders. An input may hold any path, and the
program may run as root: what mmkv does when it is asked to save to ``/etc/passwd`` is to be seen,
not to be suffered.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TextIO

import torch
from transformers.utils import logging

from benchmarks.fuzz import mutate
from benchmarks.fuzz.target import Case, Failure, Files, Hang, Target, failure_of
from benchmarks.fuzz.targets import TARGETS
from mmkv.prompt import sandbox

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit hooks that change the file system, and how many paths they begin with.
_CHANGES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
}


def write_only_below(folders: Iterable[Path]) -> None:
    """Refuse every change of files elsewhere from now on, for as long as this process runs.

    Devices and the folder for temporary files are open, too. Native code that opens files by itself
    is not seen.

    Args:
        folders: where files may change.

    Raises:
        PermissionError: later, in the call that would change a file elsewhere.
    """
    allowed = [*folders, Path(tempfile.gettempdir()), Path("/dev"), Path("/proc/self")]
    roots = [os.path.realpath(folder) for folder in allowed]

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changed = [path] if isinstance(flags, int) and flags & _WRITES else []
        else:
            changed = list(arguments[: _CHANGES.get(event, 0)])
        for path in changed:
            if isinstance(path, (str, bytes, os.PathLike)) and not _inside(path, roots):
                raise PermissionError(13, "outside the folders of this run", os.fsdecode(path))

    sys.addaudithook(check)


def _inside(path: str | bytes | os.PathLike[str], roots: list[str]) -> bool:
    try:
        real = os.path.realpath(os.fsdecode(path))
    except ValueError:  # a NUL byte: the system refuses it, too
        return True
    return any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)


_SHRINKING = 60  # runs to make a failing case smaller
_KEPT = 2  # cases of the same failure that are written
_TEMPLATE_SECONDS = 0.2  # in place of 5, so that a run gets further


class FuzzWorker:
    """Tries inputs, class after class in turn.

    Args:
        plan: what ``benchmarks.fuzz.__main__`` asks for; counts: per class the number of the first
            input.
        answer: gets the lines.
    """

    def __init__(self, plan: dict[str, Any], answer: TextIO) -> None:
        self.seed, self.limit = plan["seed"], plan["hang_seconds"]
        self.kept, self.current = Path(plan["cases"]), Path(plan["current"])
        self._answer, self._places = answer, Counter[str]()
        self._root = Path(tempfile.mkdtemp(prefix="mmkv-fuzz-"))
        self._devnull = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as this)
        self._targets = {name: TARGETS[name]() for name in plan["classes"]}
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, _too_long)

    def prepare(self) -> None:
        """Make what the classes' inputs share."""
        self.files = Files(self._root)
        for number, target in enumerate(self._targets.values()):
            folder = self._root / f"class-{number}"
            folder.mkdir()
            target.prepare(folder)
        # Loading a checkpoint collects garbage, which takes longer the more there is.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Remove every file that was made here."""
        os.chdir("/")
        shutil.rmtree(self._root, ignore_errors=True)

    def case(self, name: str, number: int) -> Case:
        """Return input ``number`` of a class; it depends on the seed and the number only."""
        return self._targets[name].make(Random(f"{self.seed}/{name}/{number}"))

    def go(self, counts: dict[str, int], wanted: dict[str, int], until: float) -> None:
        """Try inputs until every class has as many as ``wanted``, or the time is over."""
        counts = dict(counts)
        while time.monotonic() < until:
            open_classes = [name for name in counts if counts[name] < wanted[name]]
            if not open_classes:
                return
            # The class that is furthest behind its share.
            name = min(open_classes, key=lambda each: counts[each] / wanted[each])
            self.one(name, counts[name])
            counts[name] += 1

    def one(self, name: str, number: int) -> None:
        """Try one input and report it."""
        target, case = self._targets[name], self.case(name, number)
        self.current.write_text(json.dumps({"class": name, "number": number, "case": case}))
        started = time.process_time()
        failure = self._tried(target, case)
        seconds = time.process_time() - started
        line: dict[str, Any] = {"class": name, "number": number, "seconds": round(seconds, 3)}
        if failure is not None:
            line |= vars(failure) | {"file": self._keep(target, case, failure, number)}
        print(json.dumps(line), file=self._answer, flush=True)

    def _tried(self, target: Target, case: Case) -> Failure | None:
        failure = None
        out, err = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self._devnull
        _limit_time(self.limit)
        _late.clear()
        try:
            target.run(case)
        except BaseException as error:
            _limit_time(0)
            failure = failure_of(error)
            traceback.clear_frames(error.__traceback__)
        finally:
            _limit_time(0)
            sys.stdout, sys.stderr = out, err
        if _late and (failure is None or failure.kind != "hang"):  # somebody caught it
            failure = Failure("hang", "caught on its way", "over the time limit")
        if failure is None and (held := target.leaked()):
            failure = Failure("leak", held, held)
        if harmed := self.files.harmed():
            failure = failure or Failure("harm", harmed, harmed)
        if failure is not None and failure.kind == "leak":
            target.prepare(_emptied(target.folder))
        return failure

    def _keep(self, target: Target, case: Case, failure: Failure, number: int) -> str | None:
        """Write a small case that fails in the same way; None when there are enough."""
        self._places[failure.place] += 1
        if self._places[failure.place] > _KEPT:
            return None
        if failure.kind == "traceback":

            def same(tried: Case) -> bool:
                found = self._tried(target, tried)
                return found is not None and found.place == failure.place

            case = mutate.shrink(case, same, _SHRINKING)
        self.kept.mkdir(parents=True, exist_ok=True)
        file = self.kept / f"{target.name.replace(' ', '-')}-{self.seed}-{number}.json"
        file.write_text(json.dumps({"class": target.name, "case": case}, indent=1) + "\n")
        return str(file)


def _limit_time(seconds: float) -> None:
    """Allow so much time of the processor, and three times as much by the clock; 0: any."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 3 * seconds)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


_late: list[int] = []


def _too_long(number: int, frame: FrameType | None) -> None:
    _late.append(number)
    raise Hang("over the time limit")


def limit_memory(size: int) -> None:
    """Let this process address ``size`` bytes more than now: CUDA maps 3 GB."""
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        taken = 0
    resource.setrlimit(resource.RLIMIT_AS, (taken + size, resource.RLIM_INFINITY))


def main() -> None:
    """Read the plan from stdin; the lines go to stdout, which inputs do not see."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    faulthandler.enable()
    plan = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sandbox.SECONDS = _TEMPLATE_SECONDS
    limit_memory(plan["memory"])
    worker = FuzzWorker(plan, answer)
    write_only_below((worker.kept.absolute(), worker.current.absolute().parent))
    try:
        worker.prepare()
        print(json.dumps({"ready": True}), file=answer, flush=True)
        if "case" in plan:
            failure = worker._tried(worker._targets[plan["classes"][0]], plan["case"])
            print(json.dumps(None if failure is None else vars(failure)), file=answer, flush=True)
            return
        worker.go(plan["counts"], plan["wanted"], time.monotonic() + plan["seconds"])
    finally:
        worker.close()


if __name__ == "__main__":
    main()
