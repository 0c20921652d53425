"""The bundled assets are found, and the archive of pictures is unpacked once and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmkv.engine.errors import GateError, InputError, ModelError
from mmkv.resources import (
    asset,
    bundled_dialogues,
    bundled_gates,
    bundled_model,
    bundled_model_name,
    gates_source,
)

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


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


def test_gates_are_found_by_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmkv: Callable[..., Ran]
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = bundled_gates()
    assert sets["tiny-vlm"] == asset("tiny-vlm/gates")
    assert sets["smollm2-135m"] == asset("gates/smollm2-135m")
    for name in ("random", "owner/gates", "./tiny-vlm", "a\0b"):
        assert gates_source(name) == name
    assert gates_source("tiny-vlm-trimkv-0") == str(asset("gates/tiny-vlm-trimkv-0"))
    ask = ("-p", "hi", "--max-new-tokens", "2", "--no-autosave", "--json")
    own = mmkv("chat", *ask, "--gates", "tiny-vlm")
    assert own.code == 0 and json.loads(own.out)["policy"].startswith("dbtrimkv"), own.err
    assert "num_layers 30" in mmkv("chat", *ask, "--gates", "smollm2-135m").error_line()
    ran = mmkv("chat", *ask, "--gates", "smollm3")
    assert ran.code == 1 and "no gates 'smollm3'" in (line := ran.error_line())
    assert "smollm2-135m-trimkv-0" in line
    (tmp_path / "tiny-vlm").mkdir()  # what the user has goes before
    assert gates_source("tiny-vlm") == "tiny-vlm"


def test_without_assets_there_are_no_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise ModelError(name)

    monkeypatch.setattr("mmkv.resources.asset", missing)
    assert bundled_gates() == {}
    with pytest.raises(GateError, match="at hand: none"):
        gates_source("tiny-vlm")
