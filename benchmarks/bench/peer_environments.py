"""Make the environments of the peers: ``python -m benchmarks.bench.peer_environments DIR [NAME
...]``.

``python -m benchmarks.bench.peers_cpu --peers DIR`` runs each peer with ``DIR/NAME``, since they
want other versions than mmkv does. Packages come from the package index, torch in its CPU build
where the index or the ``--torch`` requirement gives one; llama.cpp is compiled for this CPU. An
environment that is complete is left alone; to make one anew, remove its folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench.child import BenchError

TORCH = "torch==2.13.0"
# All that importing mmkv's modules for the peers takes.
OWN = "lazy_loader"


@dataclass(frozen=True)
class Environment:
    """What pip installs, in this order.

    Attributes:
        steps: arguments of one ``pip install`` each; TORCH stands for the requirement of torch.
        variables: of pip's process.
        probe: modules that must import when it is complete.
    """

    steps: tuple[tuple[str, ...], ...]
    probe: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    "llama.cpp": Environment(
        (
            (OWN, "numpy", "gguf"),
            # Not what pip has kept: another CPU may have compiled it.
            ("--no-cache-dir", "--no-binary", "llama-cpp-python", "llama-cpp-python"),
        ),
        ("llama_cpp", "gguf"),
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
    ),
    # optimum-intel 2.2 exports Qwen3-VL with transformers 5.0 and no later one.
    "openvino": Environment(
        ((TORCH, OWN), (TORCH, "optimum-intel", "nncf", "transformers==5.0.0", "openvino-genai")),
        ("openvino_genai", "nncf", "transformers"),
    ),
    "kvpress": Environment(
        ((TORCH, OWN), (TORCH, "kvpress==0.5.5", "transformers<5.3")), ("kvpress", "torch")
    ),
}


def interpreter(folder: Path, name: str) -> Path:
    """Return the interpreter of an environment."""
    return folder / name / "bin" / "python"


def complete(folder: Path, name: str) -> bool:
    """Return whether what an environment is for can be imported in it."""
    python = interpreter(folder, name)
    code = "; ".join(f"import {module}" for module in ENVIRONMENTS[name].probe)
    return (
        python.is_file()
        and not subprocess.run([python, "-c", code], capture_output=True, check=False).returncode
    )


def make(folder: Path, name: str, torch: str = TORCH) -> None:
    """Make one environment.

    Raises:
        BenchError: a step failed; its output has been shown.
    """
    about = ENVIRONMENTS[name]
    python = str(interpreter(folder, name))
    commands = [[sys.executable, "-m", "venv", str(folder / name)]]
    for step in about.steps:
        wanted = [torch if word == TORCH else word for word in step]
        commands.append([python, "-m", "pip", "install", "--quiet", *wanted])
    for command in commands:
        print(" ".join(command), file=sys.stderr)
        if subprocess.run(command, env={**os.environ, **about.variables}, check=False).returncode:
            raise BenchError(f"{name}: {' '.join(command)} failed; its reason is above")
    if not complete(folder, name):
        raise BenchError(f"{name}: installed, but {', '.join(about.probe)} cannot all be imported")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make those that are missing; one that fails does not keep the others from being made."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench.peer_environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where they lie; made if missing")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--torch", default=TORCH, help="pip's requirement of torch")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.names) - set(ENVIRONMENTS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(ENVIRONMENTS)}")
    failed = 0
    for name in args.names or ENVIRONMENTS:
        try:
            if complete(args.folder, name):
                print(f"{name} is complete")
                continue
            make(args.folder, name, args.torch)
            print(f"{name} is ready")
        except (BenchError, OSError) as error:
            failed = 1
            print(error, file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
