"""Tokens with log probabilities, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.reply import token_bytes

if TYPE_CHECKING:
    from mmkv.server.writer import Scored

_LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Spelled:
    """A token as text with its log probability.

    Attributes:
        bytes: of the token; those of several may make up one character. None: not known.
    """

    text: str
    logprob: float
    bytes: list[int] | None
    top: tuple[Spelled, ...] = ()


def spell(tokenizer: Any, scored: Sequence[Scored]) -> list[Spelled]:
    """Return tokens as text."""
    return [
        _spelled(
            tokenizer, one.token, one.logprob, tuple(_spelled(tokenizer, *two) for two in one.top)
        )
        for one in scored
    ]


def _spelled(tokenizer: Any, token: int, logprob: float, top: tuple[Spelled, ...] = ()) -> Spelled:
    raw = token_bytes(tokenizer).of(token)
    if raw is None:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    else:
        text = raw.decode("utf-8", errors="replace")
    return Spelled(text, max(logprob, _LOWEST), None if raw is None else list(raw), top)
