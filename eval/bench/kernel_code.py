"""What Triton's compiler makes of the kernels: registers, spills, shared memory, per architecture.

``python -m eval.bench.kernel_code`` compiles every kernel in the sizes of an 8B model (and the
largest that a policy may ask for) for every architecture that PyTorch's wheels support, and adds
the figures of the installed Triton to ``eval/results/kernel-code.json``, beside those of other
versions. It needs no GPU: the compiler and ptxas are in Triton's wheel. Other versions:
``pip install --target DIR --no-deps triton==3.7.1``, then ``PYTHONPATH=DIR python -m ...``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmkv.measure.record import RESULTS

# Bytes of shared memory that a program may take: CUDA C++ Programming Guide, technical
# specifications per compute capability, less the 1 KiB that the system keeps.
SHARED_LIMITS = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
_KERNELS = "engine.backends.cuda.kernels"
_TARGET = RESULTS / "kernel-code.json"


@dataclass(frozen=True)
class Case:
    """A kernel in one size.

    Attributes:
        types: Triton types of the arguments that are not constants, in any order.
        constants: values of the constexpr arguments.
        aligned: pointers and strides are divisible by 16.
    """

    name: str
    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    aligned: bool = field(default=True)


@dataclass(frozen=True)
class Code:
    """What ptxas says of a kernel: registers a thread, bytes spilled and of shared memory."""

    registers: int
    spills: int
    shared: int
    ptx: str


def compile_kernel(case: Case, arch: int = 90) -> Code:
    """Compile for an architecture, as the launcher would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    signature = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if case.aligned and (kind.startswith("*") or kind == "i32")
    }
    constants = {name: case.constants[name] for name, k in signature.items() if k == "constexpr"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": True,
    }
    with contextlib.redirect_stdout(None):
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.ptx"
        target.write_text(built.asm["ptx"])
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [get_ptxas(arch).path, "-v", f"-arch={name}", target, "-o", f"{target}.cubin"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Code(
        max(int(n) for n in re.findall(r"Used (\d+) registers", printed)),
        sum(int(n) for n in re.findall(r"(\d+) bytes spill", printed)),
        built.metadata.shared,
        built.asm["ptx"],
    )


def window(kernel: str, queries: int, dtype: torch.dtype, head_dim: int = 128) -> Case:
    """Scores by the last 64 queries of each head (or 16), G heads a KV head: ``queries`` rows."""
    from engine.backends.cuda.kernels import window_scores_triton as ours

    kind = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    types = {"query": kind, "keys": kind, "position": "*i32"}
    types |= dict.fromkeys(("query_position", "length", "table", "seqs"), "*i64")
    types |= {"partial": "*fp32", "out": "*fp32", "scale": "fp32"}
    constants = ours.sizes(queries, head_dim, dtype)
    warps = constants.pop("num_warps")
    constants |= {"ROWS": 288, "QUERIES": queries, "WINDOW": 16 if queries <= 128 else 64}
    constants |= {"DIM": head_dim, "PAGE": 16, "PAGES": 64, "SPLITS": 4}
    name = f"window {kernel} {queries} {str(dtype).removeprefix('torch.')}"
    return Case(name, ours.__name__, f"{kernel}_kernel", types, constants, warps)
