"""A method that is timed in a process of its own, and the process that asks it.

The child's end: a :class:`Method` obeys orders that :func:`serve` reads from stdin, one JSON object
a line, and answers each with the time it took. The parent's end is :class:`Child`.

At its top this module imports nothing but Python's own and mmkv's errors: a peer may need another
interpreter, without torch, and the runtime of another checkout may be measured.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from mmkv.engine.errors import MmkvError


class BenchError(MmkvError):
    """Wrong arguments of a speed program, or a method that cannot be timed."""


class Method(ABC):
    """A method that is timed.

    Attributes:
        packages: those whose versions decide its speed.
    """

    packages: tuple[str, ...] = ()

    @abstractmethod
    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an order asks for.

        Returns:
            the seconds of what is timed, under ``wall`` and ``cpu`` or one of them, and whatever
            else it says.
        """

    def about(self) -> dict[str, Any]:
        """Return versions and settings."""
        found = {}
        for name in self.packages:
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found


def serve(make: Callable[[], Method]) -> int:
    """Make a method, say that it is ready, and obey every line of stdin; return the exit code.

    Every answer is a line of stdout and says the memory of the process. An error is an answer, too,
    in one line.
    """
    # Libraries print: only our own lines may reach the real stdout.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            method = make()
            say({"ready": True, "versions": method.about(), "memory": memory()})
            for line in sys.stdin:
                say({**method.obey(json.loads(line)), "memory": memory()})
        except BaseException as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            say({"failed": f"{type(error).__name__}: {first}"[:240]})
            return 1
    return 0


def memory() -> dict[str, int | None]:
    """Return bytes of this process: resident now and at most, and its share of what it shares."""
    found: dict[str, int | None] = {"rss": None, "peak_rss": None, "pss": None}
    for path, names in (
        ("/proc/self/status", {"VmRSS": "rss", "VmHWM": "peak_rss"}),
        ("/proc/self/smaps_rollup", {"Pss": "pss"}),
    ):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) * 1024
    return found


def timed(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Run ``call``: its seconds on the clock and of all threads of this process, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = call()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}, made


def decoding_press(budget: int) -> Any:
    """Return kvpress's cheapest decoding press: it cuts to the budget again every 16 steps."""
    kvpress = importlib.import_module("kvpress")
    return kvpress.DecodingPress(
        base_press=kvpress.KnormPress(), compression_interval=16, target_size=budget
    )


class Child:
    """A process that answers one line of JSON to each line it is sent; a context manager.

    Args:
        command: what to run; patience: seconds to wait for an answer; log: a file for what it
            prints; path: folders to import from, before those of the environment; env: variables
            beside this process's own.

    Raises:
        BenchError: it could not start, with the reason in one line.
    """

    def __init__(
        self,
        command: Sequence[str],
        patience: float,
        log: Path,
        path: Path | None = None,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        from mmkv.training.measure.record import ROOT

        self.patience, path = patience, path or ROOT
        imports = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=path,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | {"PYTHONPATH": imports} | dict(env),
                )
            except OSError as error:
                raise BenchError(f"cannot start {command[0]}: {error.strerror}") from error
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready = self.last = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def versions(self) -> dict[str, str]:
        """Return what the process said of its packages."""
        found: dict[str, str] = self.ready["versions"]
        return found

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order and return the answer. Raises BenchError with the reason there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BenchError("the process has ended") from error
        self.last = self._answer()
        return self.last

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # input for a process that has ended
                    continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._answers.put(line)
        except ValueError:  # closed
            pass
        self._answers.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self.patience)
        except queue.Empty:
            raise BenchError(f"no answer within {self.patience:g} s") from None
        if not line:
            raise BenchError(f"ended with exit code {self._process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise BenchError(answer["failed"])
        return answer
