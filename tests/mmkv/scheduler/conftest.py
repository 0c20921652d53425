"""A small engine and its scheduler, for the tests that need a real one.

What is heavy is imported where it is used: others have a fake engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mmkv import Engine
    from mmkv.scheduler import Scheduler


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.chat_models import save_qwen3_vl

    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.chat_models import save_qwen3_vl

    return save_qwen3_vl(tmp_path_factory.mktemp("hybrid"), kind="qwen3_5")


@pytest.fixture(scope="session")
def small(qwen: Path) -> Engine:
    from tests.support.replies import load

    return load(qwen)


@pytest.fixture
def engine(small: Engine) -> Iterator[Engine]:
    """Yield an engine that every test leaves as it was."""
    yield small
    small.cache.pool.limit = None
    small.trim()
    assert small.cache.pool.num_pages == 0, "pages are held"


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    """Yield a scheduler that interleaves, and lets sessions hibernate."""
    from mmkv.scheduler import Limits, Scheduler
    from mmkv.scheduler.replies import EngineExecutor
    from tests.support.replies import CHUNK

    made = Scheduler(EngineExecutor(engine), Limits(quantum=CHUNK), to_files=True)
    yield made
    made.close()
