"""Compiles the native decode step. Optional: without a C compiler mmkv installs and runs on torch.

The same sources become one library per level of the instruction set, and binding.py loads the best
that the CPU can run: a wheel built here also runs on an older CPU. levels.c asks for what a level
is compiled with. A level that the compiler does not know is left out.

Sums may be reordered only where the source says so (``omp simd reduction``); no -ffast-math, which
would lose infinities.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
# Apple's clang has no OpenMP runtime; the step then uses one thread.
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
FOLDER = "engine/backends/cpu"
NAMES = (
    "step",
    "linear",
    "elementwise",
    "bf16",
    "int8",
    "int8_forms",
    "attention",
    "chunk",
    "delta",
    "forms",
    "pages",
    "evict",
    "window",
    "levels",
)

# What vector code uses of x86-64-v3 and x86-64-v4: older compilers know these, but not the levels.
V3 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
# Vectors of 256 bits with AVX-512's registers and masks: a tenth faster than 512 bits on Zen 4.
V4 = [*V3, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]
V4 += ["-mprefer-vector-width=256"]
SVE = ["-march=armv8.2-a+sve"]


def levels() -> dict[str, list[str]]:
    """Level -> its compiler flags, on this kind of machine."""
    machine, found = platform.machine().lower(), {"baseline": []}
    if machine in ("x86_64", "amd64"):
        found |= {"v3": V3, "v4": V4}
    elif machine in ("aarch64", "arm64") and sys.platform == "linux":
        found |= {"sve": SVE}
    return found


class BuildLevels(build_ext):
    """Compiles what it can, a source a core, and says when that is nothing."""

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_together(sources: list[str], **given: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **given), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_together
        super().build_extensions()

    def run(self) -> None:
        super().run()
        if not any(Path(self.get_ext_fullpath(one.name)).is_file() for one in self.extensions):
            print(
                "mmkv: nothing was compiled, so replies on the CPU run in torch, several times "
                "slower; install a C compiler and then mmkv again (`mmkv env` says what runs)",
                file=sys.stderr,
            )


# Levels share the names of their object files, so they are compiled one after the other.
setup(
    cmdclass={"build_ext": BuildLevels},
    ext_modules=[
        Extension(
            f"mmkv.engine.backends.cpu._step_{level}",
            [f"{FOLDER}/{name}.c" for name in NAMES],
            depends=[
                "setup.py",
                *(f"{FOLDER}/{name}.h" for name in ("native", "int8", "vectors", "vmath")),
            ],
            extra_compile_args=FLAGS + flags + (OPENMP or ["-fopenmp-simd"]),
            extra_link_args=OPENMP,
            libraries=["m"],
            optional=True,
        )
        for level, flags in levels().items()
    ],
)
