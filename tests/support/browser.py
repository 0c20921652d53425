"""A headless Chromium for tests of pages: Debian's, driven by playwright; or a skip."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = Path(__file__).parent / "vendor" / "axe.js"
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


def axe_findings(tab: Any, *, width: int, scheme: str) -> list[str]:
    """Return what axe-core calls serious or critical on a page, each with the first place.

    Args:
        width: of the window in pixels; scheme: ``light`` or ``dark``.
    """
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.evaluate(f"{frame}.then(() => {frame})")  # no colour is on its way to another
    if not tab.evaluate("typeof axe !== 'undefined'"):
        tab.evaluate(AXE.read_text("utf-8"))
    found = tab.evaluate("axe.run().then((result) => result.violations)")
    return [
        f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
