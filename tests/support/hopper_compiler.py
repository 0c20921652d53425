"""Compiles kernels: one JSON request a line on stdin, one reply a line on stdout.

A process of its own, for under TRITON_INTERPRET=1 there is nothing to compile. The compiler and
ptxas are in Triton's wheel and need no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path

from benchmarks.bench.kernel_code import CompiledCase, compile_kernel

if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        try:
            arch, folder = request.pop("arch"), Path(request.pop("folder"))
            reply = dataclasses.asdict(compile_kernel(CompiledCase(**request), arch, folder))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)
