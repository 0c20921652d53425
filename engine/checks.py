"""Check the types of arguments that programs give: TypeError in one sentence."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any


def require_real(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a number (bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {_a(value)}")


def require_whole(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a whole number (bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {_a(value)}")


def require_type(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError unless ``value`` is of ``kinds``, in words ``wanted``."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, not {_a(value)}")


def require_list(name: str, value: Any, of: str) -> None:
    """Raise TypeError unless ``value`` is a list, tuple or other sequence that is no text."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of {of}, not {_a(value)}")


def shown(value: Any, most: int = 80) -> str:
    """Return text from a file as part of one line: its start, with odd characters escaped."""
    text = str(value)[:most]
    return text if text.isprintable() else ascii(text)[1:-1]


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
