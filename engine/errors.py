"""Errors a user can cause, each one line that names cause and remedy, and checks of arguments."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from typing import Any

_LONGEST_WORD = 250
# What moves a terminal's cursor, changes its colours, or turns the direction of what it shows.
_CODES = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# What ends the program or a generator. All else that foreign code raises is the failure of what was
# asked for, also what is no Exception: the PanicException of libraries in Rust.
STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
# Steps that scores look ahead, where nobody says how many: of an engine, and of a policy by itself.
DEFAULT_LOOKAHEAD = 2


class MmkvError(Exception):
    """Base of every error that is the user's to mend; anything else is a bug in mmkv."""


class ModelError(MmkvError):
    """A checkpoint cannot be found, read, or run by this engine."""


class GateError(MmkvError):
    """Retention gates are missing, malformed, or belong to another model."""


class PolicyError(MmkvError):
    """An unknown policy, or a policy setting outside its range."""


class BudgetError(MmkvError):
    """A KV budget that cannot be met: below one entry per row, or above the memory limit."""


class CapacityError(BudgetError):
    """No room for a request now, or ever.

    Attributes:
        needed, committed, limit: the amounts that it asks for, that others may take, and in all.
        unit: ``pages``, or ``requests`` where a queue is full.
    """

    def __init__(
        self, message: str, needed: int, committed: int, limit: int, unit: str = "pages"
    ) -> None:
        super().__init__(message)
        self.needed, self.committed, self.limit, self.unit = needed, committed, limit, unit

    @property
    def final(self) -> bool:
        """Whether it would not fit if it were alone; a full queue has room later."""
        return self.unit == "pages" and self.needed > self.limit


class ContextError(MmkvError):
    """The tokens asked for do not fit the positions the checkpoint was trained for."""


class SessionError(MmkvError):
    """A closed session, or a session file that is unreadable or belongs to another model."""


class InputError(MmkvError):
    """Malformed model inputs: pictures, videos, token ids, messages, requests."""


class ForgottenError(MmkvError):
    """An answer is refused, since too much of what it may need has been forgotten."""

    status, code = 409, "forgotten"  # over HTTP


def plain(text: str, keep: str = "\n\t") -> str:
    """Return text of others as a terminal may show it: codes that steer it become escapes.

    Args:
        keep: those that stay as they are.
    """
    return _CODES.sub(lambda m: m[0] if m[0] in keep else ascii(m[0])[1:-1], text)


def without_codes(text: str) -> str:
    """Return a model's text for a terminal: codes that steer it are left out."""
    return _CODES.sub(lambda m: m[0] if m[0] in "\n\t" else "", text)


def one_line(message: str) -> str:
    """Return a message as plain text without line breaks, long words (names of files) cut."""
    words = (w if len(w) <= _LONGEST_WORD else f"{w[:_LONGEST_WORD]}..." for w in message.split())
    return plain(" ".join(words))


BROKEN = -2  # stands for a token where the logits were not finite


class NotFiniteError(MmkvError):
    """The model's logits hold NaN or infinity, so no token can be chosen.

    Attributes:
        generated: of a burst, per session the tokens up to there; :data:`BROKEN` ends those that
            cannot go on.
    """

    def __init__(self, generated: Sequence[list[int]] = ()) -> None:
        super().__init__(
            "the model's logits are not finite numbers, so no token can be chosen; load it with "
            "dtype='float32', or get the complete checkpoint again"
        )
        self.generated = [list(row) for row in generated]


class ForeignError(RuntimeError):
    """Stands for what a library raised that is no Exception; that is its ``__cause__``."""


def as_exception(error: BaseException) -> Exception:
    """Return ``error``, or a :class:`ForeignError` where it is no Exception."""
    if isinstance(error, Exception):
        return error
    made = ForeignError(f"{type(error).__name__}: {first_line(error)}")
    made.__cause__ = error
    return made


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters, or else its type.

    The text is often that of a file, a template or a library: codes in it become escapes.
    """
    text = str(error).strip()
    return plain(text.splitlines()[0])[:200] if text else type(error).__name__


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


def check_lookahead(steps: float) -> None:
    """Check that ``steps`` is a whole number of at least 1, or inf.

    Raises:
        PolicyError: it is not. TypeError: it is no number.
    """
    require_real("lookahead", steps)
    if not (steps == float("inf") or (steps >= 1 and steps % 1 == 0)):
        raise PolicyError(f"lookahead is {steps:g}; give a whole number of at least 1, or inf")
