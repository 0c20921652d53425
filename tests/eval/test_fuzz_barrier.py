"""Inputs of the fuzz program change no file outside its folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The hook stays for as long as its process runs, so it needs one of its own. Not pathlib's names:
# each call goes through another event.
CHANGES = """
import os, pathlib, sys, tempfile
outside, inside = map(pathlib.Path, sys.argv[1:])
tempfile.tempdir = str(inside)
from mmkv.eval.fuzz.worker import write_only_below
write_only_below([inside])
kept = outside / "kept"
changes = [
    lambda at: (at / "new").write_text("x"),
    lambda at: (at / "kept").open("a").close(),
    lambda at: os.open(at / "kept", os.O_RDWR),
    lambda at: (at / "folder").mkdir(),
    lambda at: os.replace(at / "kept", inside / "moved"),
    lambda at: os.replace(inside / "own", at / "kept"),
    lambda at: os.symlink(inside, at / "link"),
    lambda at: os.truncate(at / "kept", 0),
    lambda at: os.remove(at / "kept"),
    lambda at: open(inside / ".." / at.name / "kept", "w"),
    lambda at: (inside / "way" / "kept").write_text("through a link"),
]
for number, change in enumerate(changes):
    try:
        change(outside)
    except PermissionError:
        continue
    print("not refused:", number)
print(kept.read_text())
(inside / "own").write_text("fine")
os.replace(inside / "own", inside / "moved")
print((inside / "moved").read_text())
"""


def test_files_elsewhere_cannot_be_changed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_text("kept")
    (inside / "own").write_text("own")
    (inside / "way").symlink_to(outside)
    done = subprocess.run(
        [sys.executable, "-c", CHANGES, str(outside), str(inside)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["kept", "fine"]
    assert [path.name for path in outside.iterdir()] == ["kept"]
