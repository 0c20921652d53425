"""A small model, and a server for tests of what requests may say; others start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mmkv import Engine
    from tests.support.servers import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Qwen3-VL."""
    from tests.support.chat_models import save_qwen3_vl

    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Yield a server of a small Qwen3-VL that keeps the newest entries."""
    from mmkv import Engine
    from tests.support.servers import serving

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=64, dtype="float32")

    with serving(load) as made:
        yield made
