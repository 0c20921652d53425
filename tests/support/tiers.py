"""What make test-fast, or make test, leaves out of a matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import pytest

BROWSER = pytest.mark.long(reason="make test-browser has every part of the page")


def one_in(n: int) -> pytest.MarkDecorator:
    """Have ``make test`` run one in ``n`` of a matrix, spread over it, and the long run all."""
    return pytest.mark.one_in(n)


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark as long what :func:`one_in` leaves out."""
    met = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is None:
            continue
        (n,), name = mark.args, item.nodeid.partition("[")[0]
        at = met[name]
        met[name] += 1
        if (at + at // n) % n:  # along a diagonal: no column of the matrix is left out
            item.add_marker(pytest.mark.long(reason=f"make test runs one in {n} of these"))


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
