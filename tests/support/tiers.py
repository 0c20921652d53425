"""What make test-fast leaves out of a matrix."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], values: Iterable[Any], reason: str) -> list[Any]:
    """Parameters for ``values``, of which all but ``quick`` are marked slow.

    A value that is a tuple sets several arguments.
    """
    mark = pytest.mark.slow(reason=reason)
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=mark)
        for value in values
    ]
