"""What a start imports, and how the program ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from benchmarks.bench.shape_files import write_text_model
from tests.support.chat_models import save_llama

# Runs commands in turn within one process; prints what each has imported of a list of names.
PROBE = """
import sys
from mmkv.cli.app import run
heavy = sys.argv[1].split(",")
for command in sys.stdin.read().splitlines():
    sys.stderr.write(f"{run(command.split('|'))} {[m for m in heavy if m in sys.modules]}\\n")
"""
# The modelling stack of transformers, what it pulls in, and packages that only training needs.
MODELLING = (
    "transformers.modeling_utils,transformers.core_model_loading,transformers.integrations.hub_kernels,"
    "torch._dynamo,torch._inductor,torch.distributed.tensor,torch.distributed.fsdp,sympy,triton,"
    "kernels,accelerate,scipy,sklearn,pandas,datasets,matplotlib"
)

# transformers 5.17 imports its modelling code for the docstring of a configuration, 5.23 not.
needs_light_settings = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="needs transformers 5.23"
)


def imported(heavy: str, *commands: tuple[str, ...]) -> list[str]:
    """Return a line per command: its exit code and what it imported of ``heavy``."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, heavy],
        input="\n".join("|".join(command) for command in commands),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.splitlines()
    return [line for line in lines if line.endswith("]") and line[0].isdigit()]


def test_help_and_mistakes_import_nothing_heavy() -> None:
    found = imported(
        "torch,transformers,prompt_toolkit",
        ("--help",),
        ("chat", "--help"),
        ("--version",),
        ("chat", "--fps", "x"),
        ("chat", "--fps", "1", "--num-frames", "2"),
        ("chat", "--image", "missing.png", "-p", "hi"),
        ("chat", "./missing", "-p", "hi"),
        ("models",),
        ("pull", "owner/name"),
        ("mmdu", "--help"),
        ("bench", "--help"),
        ("eval", "--help"),
        ("chat", "--budget", "1", "--budget-bytes", "5"),
        ("bench", "--evict-every", "0"),
        ("chat", "--lookahead", "0.5"),
    )
    assert found == [f"{code} []" for code in (0, 0, 0, 2, 2, 1, 1, 0, 1, 0, 0, 0, 2, 1, 1)]


@needs_light_settings
@pytest.mark.slow(reason="a process that starts torch")
def test_no_model_needs_modelling_code_before_its_first_picture(tmp_path: Path) -> None:
    """The bundled model, which sees, and two text models."""
    qwen, llama = write_text_model(tmp_path / "qwen"), save_llama(tmp_path / "llama")
    few = ("-p", "hi", "--max-new-tokens", "2")
    answers = [("chat", *few), *(("chat", str(folder), *few) for folder in (qwen, llama))]
    heavy = f"{MODELLING},transformers.processing_utils"
    assert imported(heavy, *answers) == ["0 []"] * 3


def test_the_program_ends_with_the_exit_code_and_all_output(tmp_path: Path) -> None:
    """Through the entry point, which skips the teardown: what atexit holds has run, too."""
    left = tmp_path / "left"
    code = (
        "import atexit, pathlib, sys; from mmkv.cli import entry\n"
        f"atexit.register(pathlib.Path({str(left)!r}).write_text, 'ran')\n"
        "sys.stdout.write('x' * 100000); entry.leave(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, len(done.stdout), done.stderr) == (3, 100000, "")
    assert left.read_text() == "ran"
