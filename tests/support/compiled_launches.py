"""Compiles launches: one JSON request a line on stdin, one reply a line on stdout.

A process of its own, for under TRITON_INTERPRET=1 there is nothing to compile. The compiler and
ptxas are in Triton's wheel and need no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from typing import Any

from benchmarks.bench.kernel_code import Case
from benchmarks.bench.recorded_launches import compiled


def made(launch: str, arch: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Compile each variant that a launch of ``kernel_code`` takes."""
    variants = Case(launch, settings).variants()
    return [dataclasses.asdict(compiled(variant, arch)) for variant in variants]


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"made": made(**json.loads(line))}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)
