"""Files that are written whole: what others see while, after and instead of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mmkv.engine.paths import whole_file


@pytest.mark.parametrize("private", [False, True])
def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path, private: bool) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old")
    with whole_file(path, private=private, sync=True) as draft:
        assert draft.parent == tmp_path and draft.name.endswith(".part")
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["kept.json"]
    allowed = stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    assert allowed == (0o600 if private else 0o666 & ~umask)


@pytest.mark.parametrize("private", [False, True])
def test_an_error_leaves_the_old_file_alone(tmp_path: Path, private: bool) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path, private) as draft:
        draft.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["kept.json"]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "a", tmp_path):
        for private in (False, True):
            with pytest.raises(OSError), whole_file(path, private) as draft:
                draft.write_text("x")
    assert os.listdir(tmp_path) == []


def test_two_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with whole_file(path, private=True) as one, whole_file(path, private=True) as two:
        one.write_text("one")
        two.write_text("two")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["kept.json"]
