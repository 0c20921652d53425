"""The child's end of processes that are timed: answer, and say what time and memory it took."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answering(work: Callable[[Callable[[dict[str, Any]], None]], None]) -> int:
    """Run ``work`` with what writes its answers to stdout, a JSON object a line.

    An error is an answer, too, in one line. Returns the exit code.
    """
    # Libraries print: only our own lines may reach the real stdout.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            work(say)
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
