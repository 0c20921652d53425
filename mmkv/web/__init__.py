"""What the pages of ``mmkv serve`` and ``mmkv explain`` share: a style sheet and libraries.

``base.css`` has the colours, sizes and controls. ``vendor/`` holds files of npm packages as they
were published; ``vendor.json`` pins them, and ``make vendor`` fetches them again. No page loads
anything from elsewhere.
"""

from __future__ import annotations

from importlib import resources


def web_file(name: str) -> bytes:
    """Return a file of this package: ``base.css``, or ``vendor/preact.js``."""
    return resources.files(__name__).joinpath(*name.split("/")).read_bytes()
