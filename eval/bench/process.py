"""The parent's end of processes that are timed: ask one, or report why it cannot answer."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from mmkv.eval.bench.output import BenchError
from mmkv.eval.bench.peer import Job
from mmkv.training.measure.record import ROOT


class Child:
    """A process that answers one line of JSON to each line it is sent; a context manager.

    Args:
        command: what to run; patience: seconds to wait for an answer; log: a file for what it
            prints; path: folders to import from, before those of the environment.

    Raises:
        BenchError: it could not start, with the reason in one line.
    """

    def __init__(
        self, command: Sequence[str], patience: float, log: Path, path: Path = ROOT
    ) -> None:
        self.patience = patience
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
                    env=os.environ | {"PYTHONPATH": imports},
                )
            except OSError as error:
                raise BenchError(f"cannot start {command[0]}: {error.strerror}") from error
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def versions(self) -> dict[str, str]:
        """Return what the process said of its packages."""
        found: dict[str, str] = self.ready["versions"]
        return found

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and return the answer. Raises BenchError with the reason there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BenchError("the process has ended") from error
        return self._answer()

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


class PeerProcess(Child):
    """A running peer of the decode benchmark.

    Args:
        python: the interpreter of the peer's environment; patience, log: see :class:`Child`.
    """

    def __init__(self, job: Job, python: str, patience: float, log: Path) -> None:
        self.job = job
        command = [python, "-m", "mmkv.eval.bench.peer", json.dumps(asdict(job))]
        super().__init__(command, patience, log)
        self.peak_bytes: int | None = None

    def seconds(self, tokens: int) -> float:
        """Decode and return the seconds of all steps. Raises BenchError with the reason."""
        answer = self.ask(str(tokens))
        self.peak_bytes = answer["peak_bytes"]
        return float(answer["seconds"])
