"""The parent's end of :mod:`eval.bench.peer`: ask a peer to decode, or report why it cannot."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.bench.output import BenchError
from eval.bench.peer import Job
from mmkv.measure.record import ROOT


class PeerProcess:
    """A running peer; a context manager.

    Args:
        python: the interpreter of the peer's environment; patience: seconds to wait for an answer;
            log: a file for what it prints.

    Raises:
        BenchError: it could not start, with the reason in one line.
    """

    def __init__(self, job: Job, python: str, patience: float, log: Path) -> None:
        self.job, self.patience = job, patience
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            try:
                self._process = subprocess.Popen(
                    [python, "-m", "eval.bench.peer", json.dumps(asdict(job))],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | {"PYTHONPATH": path},
                )
            except OSError as error:
                raise BenchError(f"cannot start {python}: {error.strerror}") from error
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        self.peak_bytes: int | None = None

    def seconds(self, tokens: int) -> float:
        """Decode and return the seconds of all steps. Raises BenchError with the reason."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{tokens}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BenchError("the process has ended") from error
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return float(answer["seconds"])

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

    def __enter__(self) -> PeerProcess:
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
