"""Token ids as text: the bytes of tokens, whole characters, a text without its stop strings."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mmkv.calls.parser import open_tail

# What decoders put in place of bytes that do not (yet) form a character.
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BLANK = "\u2581"  # SentencePiece's mark of a space


def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    found = {chr(byte): byte for byte in shown}
    return found | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _byte_of()


class TokenBytes:
    """What each token of a vocabulary stands for, in bytes: several may make up one character.

    Attributes:
        level: whether the vocabulary's tokens are bytes (byte-level BPE).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token: (str(one), bool(one.special))
            for token, one in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self.level = "ByteLevel" in kinds
        self._fallback = "ByteFallback" in kinds
        self._blanks = any(
            step["type"] == "Metaspace"
            or (step["type"] == "Replace" and step.get("pattern") == {"String": _BLANK})
            for step in steps
        )

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token wherever it stands, of a special one those of its name.

        None where the vocabulary does not tell: half a character of an unknown kind.
        """
        if token in self._added:
            return self._added[token][0].encode()
        raw = self.raw(token)
        if raw is not None:
            return raw
        if self._blanks:
            name = self._tokenizer.convert_ids_to_tokens(token)
            return None if name is None else name.replace(_BLANK, " ").encode()
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return None if _REPLACEMENT in text else text.encode()

    def raw(self, token: int) -> bytes | None:
        """Return the bytes that a token adds to a text, None where its neighbours decide that."""
        if self.level:
            name, special = self._added.get(token) or (self._name(token), False)
            if special:
                return b""  # not shown
            if all(mark in _BYTES for mark in name):
                return bytes(_BYTES[mark] for mark in name)
            return name.encode()  # as the tokenizer does with added tokens
        if self._fallback and token not in self._added:
            found = _BYTE_TOKEN.fullmatch(self._name(token))
            return bytes([int(found[1], 16)]) if found else None
        return None

    def _name(self, token: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(token) or ""


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the steps of a fast tokenizer's decoder; none for another tokenizer."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


_known: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Return what a tokenizer's tokens stand for; made once for each tokenizer."""
    if tokenizer not in _known:
        _known[tokenizer] = TokenBytes(tokenizer)
    return _known[tokenizer]


class Detokenizer:
    """Decodes ids one by one; returns a piece once its characters are complete.

    Tokens that are bytes go through a UTF-8 decoder, so what counts is bytes: a token may end one
    character and begin the next. Of other tokens a short window of ids that were shown already is
    decoded again with each new one, because some tokenizers (SentencePiece) decode a token
    differently at the start of a text.

    Args:
        shown: special tokens whose names are part of the text; others are not shown.
    """

    def __init__(self, tokenizer: Any, shown: Collection[int] = ()) -> None:
        self._tokenizer, self._bytes = tokenizer, token_bytes(tokenizer)
        self._named = frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0  # number of ids of the window whose text was returned

    def follow(self, ids: Sequence[int]) -> None:
        """Decode what comes next as it stands behind the tokens ``ids``."""
        self._window, self._shown = list(ids), len(ids)

    def push(self, token_id: int) -> str:
        """Add one id; return the text that became certain (possibly empty)."""
        if token_id in self._named:
            self._window, self._shown = [], 0
            return self._broken_off() + (self._bytes.of(token_id) or b"").decode()
        raw = self._bytes.raw(token_id)
        if raw is not None:
            if not self._bytes.level:
                self._window, self._shown = [token_id], 1
            return self._utf8.decode(raw)
        self._window.append(token_id)
        before = self._decode(self._window[: self._shown])
        piece = self._decode(self._window)[len(before) :]
        if not piece:
            return ""
        # The ids just shown become the context for the next ones. An id that decodes to
        # nothing (a special token) must not become the whole context, so it is kept waiting.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return self._broken_off() + piece

    def flush(self) -> str:
        """End the text; an unfinished character is dropped."""
        self._utf8.reset()
        return ""

    def _broken_off(self) -> str:
        """Return what stands for a character whose bytes broke off."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Cuts a text stream at the first stop string, also when it spans several pieces.

    Attributes:
        hit: the one that was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """Return the part of the stream that can no longer belong to a stop string."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = max((open_tail(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back in case a stop string had been about to begin."""
        held, self._held = self._held, ""
        return held
