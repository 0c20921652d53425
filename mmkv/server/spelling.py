"""Tokens with log probabilities, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmkv.server.writer import Scored

_LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Spelled:
    """A token as text with its log probability; ``bytes``: None for half a character."""

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
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    whole = None if "\ufffd" in text else list(text.encode())
    return Spelled(text, max(logprob, _LOWEST), whole, top)
