"""The bundled assets are found, and the archive of pictures is unpacked once and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import InputError
from mmkv.resources import bundled_dialogues


def test_the_bundled_dialogues_are_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = bundled_dialogues()
    assert folder.is_relative_to(tmp_path)
    named = {
        name for row in json.loads((folder / "benchmark.json").read_text()) for name in row["image"]
    }
    assert named == {f"pictures/{path.name}" for path in (folder / "pictures").iterdir()}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in named)
    assert [path.name for path in folder.parent.iterdir()] == ["mmdu"], "no draft is left"
    seen = (folder / "benchmark.json").stat().st_mtime_ns
    assert bundled_dialogues() == folder
    assert (folder / "benchmark.json").stat().st_mtime_ns == seen


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        bundled_dialogues()
