"""Helpers of the kernel tests: both forms of a kernel, the device, and the compiler's report."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_CUDA and not INTERPRETED else "cpu")

needs_compiler = pytest.mark.skipif(
    not HAS_TRITON, reason="needs Triton (the compiler works without a GPU)"
)


def forms(idea: str, name: str) -> list[Any]:
    """The torch reference and the Triton launch function of ``kernels.{idea}.{name}``."""

    def reference(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"engine.backends.cuda.kernels.{idea}")
        return getattr(module, f"{name}_reference")(*args, **kwargs)

    def triton(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"engine.backends.cuda.kernels.{idea}_triton")
        return getattr(module, name)(*args, **kwargs)

    runs = HAS_TRITON and (INTERPRETED or DEVICE.type == "cuda")
    mark = pytest.mark.skipif(
        not runs, reason="needs Triton, and TRITON_INTERPRET=1 on a CPU (the interpreter)"
    )
    return [pytest.param(reference, id="torch"), pytest.param(triton, id="triton", marks=mark)]


def is_triton(form: Callable[..., Any]) -> bool:
    """Which of :func:`forms` this is."""
    return form.__name__ == "triton"


@dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel: per thread, and bytes of shared memory per program."""

    registers: int
    spills: int
    shared: int
    ptx: str


def compile_for_hopper(
    module: str,
    kernel: str,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    folder: Path,
) -> Report:
    """Compile a kernel for sm_90a as the launcher would: pointers and strides divisible by 16.

    Args:
        types: Triton types of the arguments that are not constants, in any order.
        constants: values of the constexpr arguments.
    """
    target = folder / f"{kernel}.ptx"
    asked = {
        "module": module,
        "kernel": kernel,
        "types": types,
        "constants": constants,
        "num_warps": num_warps,
        "target": str(target),
    }
    # In a process of its own: under TRITON_INTERPRET=1 there is nothing to compile.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE, json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = int(done.stdout.split()[-1])
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", str(target), "-o", str(folder / "kernel.cubin")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", printed))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", printed))
    report = Report(registers, spills, shared, target.read_text())
    print(f"{kernel} {constants}: {registers} registers, {spills} B spilled, {shared} B shared")
    return report


_COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

asked = json.loads(sys.argv[1])
kernel = getattr(importlib.import_module(asked["module"]), asked["kernel"])
signature, attributes = {}, {}
for index, name in enumerate(kernel.arg_names):
    kind = asked["types"].get(name, "constexpr")
    signature[name] = kind
    if kind.startswith("*") or kind == "i32":
        attributes[(index,)] = [["tt.divisibility", 16]]
constants = {name: asked["constants"][name] for name in signature if signature[name] == "constexpr"}
source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
options = {"num_warps": asked["num_warps"]}
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
open(asked["target"], "w").write(built.asm["ptx"])
print(built.metadata.shared)
"""
