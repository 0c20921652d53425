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
    found = [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no browser here ({', '.join(NAMES)}); apt-get install chromium")
    with api.sync_playwright() as play:
        browser, reasons = None, []
        for path in found:  # Ubuntu's may be a script that wants another package
            try:
                browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
                break
            except api.Error as error:
                reasons.append(f"{path} does not start: {str(error).splitlines()[0]}")
        if browser is None:
            pytest.skip("; ".join(reasons))
        made = browser.new_context(offline=offline)
        made.set_default_timeout(30_000)
        yield made
        browser.close()
