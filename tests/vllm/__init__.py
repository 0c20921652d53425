"""Tests of mmkv inside vLLM; all but test_rows.py want vLLM itself: ``make test-vllm``."""

import importlib.util

import pytest


def _torchvision_works() -> bool:
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # of another build of torch
        return False
    return True


reads_pictures = pytest.mark.skipif(
    not _torchvision_works(), reason="vLLM reads pictures with torchvision, which is not here"
)
