"""Ctrl-C while a command is still importing: exit code 130, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmkv.engine.interrupts import quiet_imports

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@posix
@pytest.mark.parametrize("module", ["mmkv", "mmkv.training.distill"])
@pytest.mark.parametrize("during", ["typer", "mmkv.engine.errors"])
def test_ctrl_c_in_the_first_imports_ends_with_130(
    tmp_path: Path, module: str, during: str
) -> None:
    # A finder that is asked first presses Ctrl-C when the import of a module begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {during!r} and '__main__' in sys.modules:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(tmp_path), str(root)])
    ran = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 130 and "Traceback" not in ran.stderr and not ran.stdout
    assert ran.stderr.count("\n") <= 1


@posix
def test_a_handler_of_somebody_else_stays() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        with quiet_imports():
            signal.raise_signal(signal.SIGINT)
        assert pressed == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@posix
def test_afterwards_ctrl_c_is_an_exception_again() -> None:
    with quiet_imports():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
