"""Launches of Triton kernels without a GPU: recorded, and compiled for a card that is not there.

Inside :func:`recording` launch functions run on CPU tensors. Triton binds their arguments as it
would on a GPU, and stops where it would compile: so types, constants, warps, and what it takes from
values and addresses (1, divisible by 16) are those of the product.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_OF_AMPERE = 80


@dataclass(frozen=True)
class Variant:
    """A kernel with all that Triton compiles it anew for.

    Attributes:
        name: of its module and its own, such as ``evict.plan_kernel``.
        key: Triton's, which differs from those of all other variants of the kernel.
        source: a ``triton.compiler.ASTSource``; options: of the compiler.
    """

    name: str
    key: str
    source: Any = field(compare=False, repr=False)
    options: dict[str, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Code:
    """What ptxas says of a kernel: registers a thread, bytes spilled and of shared memory."""

    kernel: str
    warps: int
    registers: int
    spills: int
    shared: int
    ptx: str


@contextlib.contextmanager
def recording() -> Iterator[Counter[Variant]]:
    """Count the launches of each variant instead of running them, in the order of the first ones.

    Not where ``TRITON_INTERPRET=1`` was set: there is nothing to compile then.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    class NoCard(DriverBase):
        """As much of a card as a launch asks for before it compiles."""

        is_active = map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> str:
            return "none"  # Triton's own caches of real devices stay apart

        def get_current_stream(self, device: object) -> int:
            return 0

    seen: Counter[Variant] = Counter()

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        (attributes,) = compile["configs"]
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], attributes)
        names = ("num_warps", "num_stages", "enable_fp_fusion")
        module = fn.module.rpartition(".")[2].removesuffix("_triton")
        options = {name: compile[name] for name in names}
        seen[Variant(f"{module}.{fn.name}", key, source, options)] += 1
        return True  # nothing is compiled then, and nothing launched

    before = driver._active, knobs.runtime.jit_cache_hook
    driver.set_active(NoCard())
    knobs.runtime.jit_cache_hook = hook
    try:
        yield seen
    finally:
        driver.set_active(before[0])
        knobs.runtime.jit_cache_hook = before[1]


def compiled(variant: Variant, arch: int) -> Code:
    """Compile a variant for an architecture, such as 90 for sm_90a."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    # Triton 3.6 makes the same code for sm_80, 86 and 89 (27 launches were compared); ptxas chooses
    # registers for each.
    first = FIRST_OF_AMPERE if arch // 10 == 8 else arch
    target = GPUTarget("cuda", first, 32)
    built = triton.compile(variant.source, target=target, options=variant.options)
    ptx = built.asm["ptx"].replace(f".target sm_{first}", f".target sm_{arch}")
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"-arch={name}", path, "-o", f"{path}.cubin"]
        command += [] if variant.options["enable_fp_fusion"] else ["--fmad=false"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Code(
        variant.name,
        variant.options["num_warps"],
        max(int(n) for n in re.findall(r"Used (\d+) registers", printed)),
        sum(int(n) for n in re.findall(r"(\d+) bytes spill", printed)),
        built.metadata.shared,
        ptx,
    )
