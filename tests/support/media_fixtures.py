"""A resolver of media whose decoding process the tests of a file share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmkv.server.media.fetch import is_public
from mmkv.server.media.limits import MediaLimits
from mmkv.server.media.resolver import MediaResolver


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner) -> Iterator[MediaResolver]:
    """Yield a resolver whose decoding process the tests share."""
    made = MediaResolver()
    yield made
    runner.run(made.aclose())


@pytest.fixture
def resolver(shared: MediaResolver) -> Callable[..., MediaResolver]:
    """Return what makes resolvers with the shared decoding process."""

    def make(folder: Path | None = None, rules: Any = None, **limits: Any) -> MediaResolver:
        names, allowed = limits.pop("names", None), limits.pop("allowed", is_public)
        pictures = limits.pop("picture_rules", None)
        made = MediaResolver(MediaLimits(**limits), folder, rules, names, allowed, pictures)
        made.pool = shared.pool
        return made

    return make
