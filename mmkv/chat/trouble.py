"""Word an error in a chat's turn: one line with its cause and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path

from mmkv.engine.errors import STOPS, InputError, MmkvError, plain

_LONGEST = 300


def one_line(error: Exception) -> str:
    """Describe ``error``: its cause and the remedy. Never raises."""
    if isinstance(error, MmkvError):
        return _text(error, None)
    if _lacks_memory(error):
        return (
            f"out of memory ({_text(error)}); nothing has changed: send less at once, or give "
            "the cache less with /budget"
        )
    if isinstance(error, OSError):
        file = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or _text(error)
        return f"the system refused: {reason}{file}; nothing has changed: mend that and try again"
    return (
        f"unexpected {type(error).__name__} in {_place(error)}: {_text(error)}; nothing has "
        "changed: go on, or try again, and report this line if it stays"
    )


def require_utf8(text: str) -> None:
    """Raise InputError for bytes that are no UTF-8, which readers turn into lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        shown = f"0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise InputError(
            f"the message is not UTF-8 ({shown} at character {error.start + 1}); nothing was sent: "
            "type it again, or convert the text (iconv -t UTF-8)"
        ) from error


def _lacks_memory(error: Exception) -> bool:
    # torch raises a RuntimeError of its own on the CPU and a subclass of it on a GPU.
    words = ("out of memory", "not enough memory", "can't allocate", "cannot allocate")
    return isinstance(error, MemoryError) or any(word in _text(error).lower() for word in words)


def _text(error: Exception, longest: int | None = _LONGEST) -> str:
    try:
        words = plain(" ".join(str(error).split()))
    except STOPS:
        raise
    except BaseException:
        words = ""
    return words[:longest] or type(error).__name__


def _place(error: Exception) -> str:
    """Name file and line: the innermost of ours, or else of whoever raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    root = Path(__file__).resolve().parents[2]
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(root) and path.relative_to(root).parts[0] == "mmkv":
            return f"{path.relative_to(root)}:{frame.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "mmkv"
