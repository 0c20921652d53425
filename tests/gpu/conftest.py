"""The card of these tests: the machine's own, or the one of :mod:`tests.support.fake_cuda`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.support.fake_cuda import Device, fake_cuda


@pytest.fixture
def card() -> Iterator[Device | None]:
    """A GPU; None: a real one, which counts nothing."""
    real = torch.cuda.is_available()
    with contextlib.nullcontext() if real else fake_cuda() as made:
        yield made
