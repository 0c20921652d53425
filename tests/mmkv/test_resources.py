"""The bundled assets are found, and the archive of pictures is unpacked once and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import InputError, ModelError
from mmkv.resources import asset, bundled_dialogues, bundled_model, bundled_model_name


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


def test_a_folder_of_the_users_goes_before_the_packages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = asset("scene.png")
    (tmp_path / "tiny-vlm").mkdir()
    (tmp_path / "tiny-vlm" / "config.json").write_text("{}")
    monkeypatch.setenv("MMKV_ASSETS", str(tmp_path))
    assert bundled_model() == tmp_path / "tiny-vlm"
    assert asset("scene.png") == own, "what the user's folder lacks is mmkv's own"


def test_an_asset_that_is_missing_is_named() -> None:
    with pytest.raises(ModelError, match=r"gone\.png was not found in .*MMKV_ASSETS"):
        asset("gone.png")


def test_records_name_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundled_model().parents[1])
    assert bundled_model_name() == "assets/tiny-vlm"
    monkeypatch.chdir("/")
    assert Path(bundled_model_name()) == bundled_model().relative_to("/")
