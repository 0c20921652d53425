"""Counts what makes the host wait for a GPU, or what a graph cannot hold: on a CPU, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.bench.policies import HostReads, counting

__all__ = ["HostReads", "host_reads"]


@pytest.fixture
def host_reads() -> Iterator[HostReads]:
    """What each static step of a test reads back, as it is first run."""
    with counting() as reads:
        yield reads
