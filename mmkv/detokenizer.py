"""Turn a stream of token ids into text: whole characters only, without stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What decoders put in place of bytes that do not (yet) form a character.
_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, hence at most four byte tokens: text that is still
# unfinished after that will never become one and is shown as it is.
_LONGEST_CHARACTER = 4


class Detokenizer:
    """Decodes ids one by one; returns a piece once its characters are complete.

    A short window of already shown ids is decoded again with each new one, because some
    tokenizers (SentencePiece) decode a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # number of ids of the window whose text was returned
        self._unfinished = 0  # ids in a row that left the text ending in half a character

    def push(self, token_id: int) -> str:
        """Add one id; return the text that became certain (possibly empty)."""
        self._window.append(token_id)
        piece = self._unshown()
        self._unfinished = self._unfinished + 1 if piece.endswith(_REPLACEMENT) else 0
        if 0 < self._unfinished < _LONGEST_CHARACTER:
            return ""
        return self._hand_out(piece)

    def flush(self) -> str:
        """Return what was held back; an unfinished character is dropped."""
        piece = self._unshown()
        self._hand_out(piece)
        return piece.rstrip(_REPLACEMENT)

    def _unshown(self) -> str:
        before = self._decode(self._window[: self._shown])
        return self._decode(self._window)[len(before) :]

    def _hand_out(self, piece: str) -> str:
        if piece:
            # The ids just shown become the context for the next ones. An id that decodes to
            # nothing (a special token) must not become the whole context, so it is kept waiting.
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
            self._unfinished = 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Cuts a text stream at the first stop string, also when it spans several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Return the part of the stream that can no longer belong to a stop string."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = self._open_tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back in case a stop string had been about to begin."""
        held, self._held = self._held, ""
        return held

    def _open_tail(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins one of the stop strings."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
