"""What a killed server left in its folder goes with the next start, and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import SessionError
from mmkv.server.hibernation import HibernationFolder

CHILD = """
import pathlib, sys
from mmkv.server.hibernation import HibernationFolder
made = HibernationFolder(pathlib.Path(sys.argv[1]))
(made.path / "memory.mmkv").write_text("idle")
print(made.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_server_left_goes_with_the_next_start(tmp_path: Path) -> None:
    here = HibernationFolder(tmp_path)
    saved = tmp_path / "public"
    saved.mkdir()
    (tmp_path / ".hibernated-link").symlink_to(saved)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        other = Path(child.stdout.readline().strip())
        assert other.is_dir() and other != here.path and here.path.is_dir()
        HibernationFolder(tmp_path).close()
        assert (other / "memory.mmkv").exists(), "of a server that lives"
        child.send_signal(signal.SIGKILL)
    third = HibernationFolder(tmp_path)
    assert not other.exists() and here.path.is_dir() and saved.is_dir()
    for one in (third, here):
        one.close()
        assert not one.path.exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="name another --session-folder"):
        HibernationFolder(tmp_path / "file")
