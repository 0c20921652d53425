"""What each input of a fuzz test runs under: little memory, files that it cannot change, and short
patience with templates. ``--hypothesis-profile=long`` draws fifty times as many inputs, and others
in each run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import mmkv.api
import mmkv.engine.runtime
from mmkv.prompt import sandbox
from tests.fuzz import trial

settings.register_profile("long", max_examples=5000)


@pytest.fixture(scope="package")
def limited() -> Iterator[None]:
    """Let the process address 6 GiB more than now: an input that asks for more is found."""
    with trial.limited_memory(6 * 2**30):
        yield


@pytest.fixture(autouse=True)
def surroundings(
    limited: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[trial.Files]:
    """Stand in a folder, and have a home, whose files no input may change."""
    kept = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", kept)  # the compiled kernels
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    files = trial.Files(tmp_path)
    monkeypatch.setenv("HOME", str(files.home))
    monkeypatch.chdir(files.here)
    with trial.guarded(files):
        yield files


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Load weights, tokenizer and picture processing of each checkpoint once.

    Every engine is still built anew, with all checks of its options.
    """
    made: dict[Any, Any] = {}

    def once(make: Callable[..., Any]) -> Callable[..., Any]:
        def known(*arguments: Any, **named: Any) -> Any:
            given = (*arguments, *(value for name, value in named.items() if name != "kernels"))
            key = (make.__name__, *(str(each) for each in given if not callable(each)))
            if key not in made:
                made[key] = make(*arguments, **named)
            return made[key]

        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmkv.engine.runtime, "load", once(mmkv.engine.runtime.load))
        patch.setattr(mmkv.api, "load_processor", once(mmkv.api.load_processor))
        yield
