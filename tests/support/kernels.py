"""Helpers of the kernel tests: both forms of a kernel, the device, and the compiler's report."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv.eval.bench.kernel_code import Code, CompiledCase

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_CUDA and not INTERPRETED else "cpu")


# Triton 3.7 and later let one register of some kernels wait in memory, out and in: 4 bytes each.
ONE_SPILL = 8


def needs_compiler(test: Any) -> Any:
    """Mark a test that compiles a kernel."""
    reason = "needs Triton (the compiler works without a GPU)"
    return pytest.mark.triton(pytest.mark.skipif(not HAS_TRITON, reason=reason)(test))


def triton_form(launch: Callable[..., Any]) -> Any:
    """Return a parameter for a test of both forms: a Triton launch function, where it can run."""
    runs = HAS_TRITON and (INTERPRETED or DEVICE.type == "cuda")
    reason = "needs Triton, and TRITON_INTERPRET=1 on a CPU (the interpreter)"
    marks = [pytest.mark.triton, pytest.mark.skipif(not runs, reason=reason)]
    return pytest.param(launch, id="triton", marks=marks)


def forms(idea: str, name: str) -> list[Any]:
    """Return the torch reference and the Triton launch function of ``kernels.{idea}.{name}``."""

    def reference(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"mmkv.engine.backends.cuda.kernels.{idea}")
        return getattr(module, f"{name}_reference")(*args, **kwargs)

    def triton(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"mmkv.engine.backends.cuda.kernels.{idea}_triton")
        return getattr(module, name)(*args, **kwargs)

    return [pytest.param(reference, id="torch"), triton_form(triton)]


def is_triton(form: Callable[..., Any]) -> bool:
    """Return which of :func:`forms` this is."""
    return form.__name__ == "triton"


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """Start one process for all kernels; it loads torch and Triton once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.hopper_compiler"]
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def compile_for_hopper(
    module: str,
    kernel: str,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    folder: Path,
    aligned: bool = True,
) -> Code:
    """Compile a kernel for sm_90a, as the launcher would; see :class:`CompiledCase`."""
    case = CompiledCase(kernel, module, kernel, types, constants, num_warps, aligned=aligned)
    return compile_case(case, folder)


def compile_case(case: CompiledCase, folder: Path, arch: int = 90) -> Code:
    """Compile a kernel for an architecture, in a process where it is no interpreter's."""
    process = _compiler()
    assert process.stdin is not None and process.stdout is not None
    request = dataclasses.asdict(case) | {"arch": arch, "folder": str(folder)}
    print(json.dumps(request), file=process.stdin, flush=True)
    reply = json.loads(process.stdout.readline())
    assert "error" not in reply, reply["error"]
    code = Code(**reply)
    print(
        f"{case.name} {case.constants}: {code.registers} registers, {code.spills} B spilled, "
        f"{code.shared} B shared"
    )
    return code
