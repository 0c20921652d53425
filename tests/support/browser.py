"""A headless Chromium for tests of pages: Debian's, driven by playwright; or a skip."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browsing(offline: bool = False) -> Iterator[Any]:
    """Yield a context of playwright, in a browser of its own; ``offline``: without a network."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright here; pip install 'mmkv[browser]'"
    )
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser here ({', '.join(NAMES)}); apt-get install chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        made = browser.new_context(offline=offline)
        made.set_default_timeout(30_000)
        yield made
        browser.close()
