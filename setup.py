"""Compiles the native decode step. Optional: without a C compiler mmkv installs and runs on torch.

``-march=native``: the library is built on the machine that runs it. Sums may be reordered only
where the source says so (``omp simd reduction``); no -ffast-math, which would lose infinities.
"""

import sys

from setuptools import Extension, setup

FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden"]
# Apple's clang has no OpenMP runtime; the step then uses one thread.
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
FOLDER = "engine/native"
NAMES = ("step", "linear", "attention", "pages", "evict", "near")

setup(
    ext_modules=[
        Extension(
            "engine.native._step",
            [f"{FOLDER}/{name}.c" for name in NAMES],
            depends=[f"{FOLDER}/{name}.h" for name in ("native", "evict", "vmath")],
            extra_compile_args=FLAGS + (OPENMP or ["-fopenmp-simd"]),
            extra_link_args=OPENMP,
            libraries=["m"],
            optional=True,
        )
    ]
)
