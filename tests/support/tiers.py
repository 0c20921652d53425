"""What make test-fast, or make test, leaves out of a matrix."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

BROWSER = pytest.mark.long(reason="make test-browser has every part of the page")


def slow_but(quick: Container[Any], values: Iterable[Any], reason: str) -> list[Any]:
    """Parameters for ``values``, of which all but ``quick`` are marked slow.

    A value that is a tuple sets several arguments.
    """
    return _marked_but(quick, values, pytest.mark.slow(reason=reason))


def long_but(quick: Container[Any], values: Iterable[Any], reason: str) -> list[Any]:
    """As :func:`slow_but`, with the mark of what only ``make test-drawn`` runs."""
    return _marked_but(quick, values, pytest.mark.long(reason=reason))


def _marked_but(quick: Container[Any], values: Iterable[Any], mark: pytest.MarkDecorator) -> Any:
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=mark)
        for value in values
    ]
