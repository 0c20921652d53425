"""Compiles kernels for sm_90a: one JSON request a line on stdin, one reply a line on stdout.

A process of its own, for under TRITON_INTERPRET=1 there is nothing to compile. The compiler and
ptxas are in Triton's wheel and need no GPU.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the compiler says of a kernel: registers, spilled and shared bytes, PTX.

    The request has the fields of :func:`tests.support.kernels.compile_for_hopper`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
    signature = {name: request["types"].get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if request["aligned"] and (kind.startswith("*") or kind == "i32")
    }
    constants = {
        name: request["constants"][name] for name, kind in signature.items() if kind == "constexpr"
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": request["num_warps"]}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    target = Path(request["folder"]) / "kernel.ptx"
    target.write_text(built.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [ptxas, "-v", "-arch=sm_90a", target, "-o", target.with_suffix(".cubin")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", printed)),
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", printed)),
        "shared": built.metadata.shared,
        "ptx": built.asm["ptx"],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            reply = compiled(json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)
