"""Hide an installed but broken torchvision from transformers.

torchvision built for another torch raises RuntimeError when it is imported. transformers only
looks whether the package is there, and then cannot import its vision models at all. mmkv needs
nothing of torchvision, so a broken one is made to look absent. This has to happen before
transformers is imported; importing this module does it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec


def hide_broken_torchvision() -> bool:
    """Return whether torchvision was found broken and hidden."""
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return False
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError, OSError, AttributeError):
        # None makes further imports fail with ImportError and find_spec return None.
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        return True
    return False


hide_broken_torchvision()
