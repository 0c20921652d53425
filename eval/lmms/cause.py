"""Report why an evaluation ended to ``mmkv eval``: lmms-eval's exit code does not say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmkv.engine.errors import MmkvError

# Names the file for the cause; mmkv eval sets it for lmms-eval's process.
VARIABLE = "MMKV_EVAL_CAUSE"


@contextmanager
def reported_to_parent() -> Iterator[None]:
    """Keep a copy of what ends the block for :func:`cause`; also a decorator."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(VARIABLE):
            text = (
                str(error) if isinstance(error, MmkvError) else f"{type(error).__name__}: {error}"
            )
            Path(path).write_text(text, encoding="utf-8")
        raise


def cause(path: Path) -> str | None:
    """Return what ended the evaluation, None when nothing inside the model did."""
    return path.read_text(encoding="utf-8") if path.is_file() else None
