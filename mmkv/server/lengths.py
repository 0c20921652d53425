"""Refuse texts that cannot fit into the model's context, before they are rendered.

Rendering and tokenizing run on the engine's thread and hold Python's lock, so that everybody's next
token waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mmkv.engine.errors import ContextError
from mmkv.prompt.special import reading, require_no_long_run

# Characters a position up to which a text is not counted: prompts that fit have about as many.
_USUAL = 4
_PIECE = 2**16  # characters that are tokenized at once: a few MB
# Tokens that cutting a text at one place may add: those of the word that is cut.
_CUT = 64
_PROBES = ("\ue000", " ", "\n")  # a character that no vocabulary has, and some that may be dropped
_PROBED = 2**12


class Lengths:
    """Bounds on the texts of a request by the model's context.

    Args:
        tokenizer: the model's, which is used here beside the engine's thread, to read alone.

    Attributes:
        longest: characters of the longest token, added ones too; None where a token may stand for
            any number of characters.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.context = context
        self._inner: Any = getattr(tokenizer, "backend_tokenizer", None)
        most = max(map(len, tokenizer.get_vocab()), default=0)
        counts = [
            len(tokenizer(one * _PROBED, add_special_tokens=False, verbose=False)["input_ids"])
            for one in _PROBES
        ]
        self.longest = most if min(counts) * most >= _PROBED else None

    def require_possible(self, characters: int) -> None:
        """Raise ContextError if so many characters have more tokens than there are positions."""
        most = None if self.longest is None else self.context * self.longest
        if most is not None and characters > most:
            raise ContextError(
                f"the conversation has {characters:,} characters; the model's context of "
                f"{self.context:,} positions holds {most:,} at most; shorten them"
            )

    async def count(self, texts: Sequence[str]) -> None:
        """Count the tokens of long texts, in a thread. Raises ContextError, InputError.

        What a template adds is not counted, so that the engine's thread has the last word.
        """
        for text in texts:
            require_no_long_run(text)
        usual = sum(map(len, texts)) <= _USUAL * self.context
        if self._inner is not None and not usual:
            await asyncio.to_thread(self._count, texts)

    def _count(self, texts: Sequence[str]) -> None:
        # Only this call of tokenizers lets other threads run meanwhile.
        left = self.context
        for text in texts:
            for start in range(0, len(text), _PIECE):
                left += _CUT * (start > 0)
                piece = text[start : start + _PIECE].encode("utf-8", "replace").decode()
                with reading(piece):
                    (found,) = self._inner.encode_batch_fast([piece], add_special_tokens=False)
                left -= len(found)
                if left < 0:
                    raise ContextError(
                        f"the conversation has more tokens than the model's context of "
                        f"{self.context:,} positions; shorten them"
                    )
