"""Treat special tokens that a user wrote as plain text.

A tokenizer finds ``<|im_end|>`` wherever it stands, so a user could end a turn or name a picture
by writing so. Each such text is cut after its first character before the template is rendered; the
pieces on both sides of a cut are tokenized apart, and neither holds the whole token.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmkv.engine.errors import STOPS, InputError, first_line

# Stands at each cut, in rendered text. 128 random bits a process: nobody can write it.
CUT = secrets.token_hex(16)
# Text before a piece, so that SentencePiece puts no space there; it merges with no letter or sign.
_ANCHOR = "\n"
# Tokenizers split texts by expressions that give up after 10 million steps in one match, and a run
# of n characters of one kind takes about n. The ids of its parts are not those of the whole.
LONGEST_RUN = 1_000_000
# Texts that a Cutter knows by heart, and their characters: 4 MiB at most, as Python has ASCII.
_MOST_KNOWN, _SHORT = 2**13, 256
_KINDS = {
    "blanks": re.compile(r"\s+"),
    "letters": re.compile(r"[^\W\d_]+"),
    "digits": re.compile(r"\d+"),
    "signs": re.compile(r"(?:[^\w\s]|_)+"),
}


def require_no_long_run(text: str) -> None:
    """Raise InputError for a run of :data:`LONGEST_RUN` blanks, letters, digits or signs."""
    half = LONGEST_RUN // 2  # any such run covers one of these blocks; most end at once
    for start in range(0, len(text) - half + 1, half):
        for kind, run in _KINDS.items():
            if run.fullmatch(text, start, start + half) is None:
                continue
            before = run.match(text[max(start - half, 0) : start][::-1])
            first = start - (0 if before is None else before.end())
            whole = run.match(text, first)
            if whole is not None and whole.end() - first >= LONGEST_RUN:
                raise InputError(
                    f"the text has {whole.end() - first:,} {kind} in a row at character "
                    f"{first + 1:,}, which tokenizers do not read; break them up, or send fewer"
                )


@contextmanager
def reading(text: str) -> Iterator[None]:
    """Have a tokenizer read ``text`` in the block. Raises InputError where it gives up.

    The tokenizers library then raises what is no Exception.
    """
    require_no_long_run(text)
    try:
        yield
    except (Exception, *STOPS):
        raise
    except BaseException as error:
        raise InputError(
            f"the model's tokenizer gives up on this text ({first_line(error)}); shorten it, or "
            "break up what repeats in it"
        ) from error


def new_marker() -> str:
    """Return text to find a place in a rendered template by, which no message can hold."""
    return secrets.token_hex(16)


class Cutter:
    """Cuts the special tokens of one tokenizer out of texts.

    Args:
        more: texts beside them that the model reads as tokens, such as placeholders of pictures.
    """

    def __init__(self, tokenizer: Any, more: Iterable[str] = ()) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {token.content for token in added if token.special}
        names |= {*map(str, getattr(tokenizer, "all_special_tokens", ()))}
        names |= {*more}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        # A name of one character has no place for a cut, which goes behind the first.
        # Looks ahead: the beginnings of tokens may overlap.
        self._found = re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))")
        self._any = bool(longest_first)
        self._beginnings = {name[:n] for name in longest_first for n in range(2, len(name))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._known: dict[str, str] = {}  # short texts, as they are cut

    def finds(self, text: str) -> bool:
        """Whether a special token stands in ``text``."""
        return self._any and self._found.search(text) is not None

    def begins(self, text: str) -> str:
        """Return the special token that ``text`` begins with; empty: none."""
        found = self._found.match(text) if self._any else None
        return "" if found is None else found[1]

    def count(self, text: str) -> Counter[str]:
        """Return how often each special token stands in ``text``."""
        return Counter(match[1] for match in self._found.finditer(text) if self._any)

    def cut(self, texts: Sequence[str], kept: Sequence[Iterable[str]] = ()) -> list[str]:
        """Cut texts that may be rendered side by side, so that a token may begin in one of them
        and end in the next.

        Args:
            kept: per text, special tokens that stay tokens where they stand in it whole.
        """
        whole = "".join(texts)
        found = list(self._found.finditer(whole)) if self._any else []
        start = 0
        for text, names in zip(texts, kept, strict=bool(kept)):
            stop = start + len(text)
            found = [
                match
                for match in found
                if not (start <= match.start(1) and match.end(1) <= stop and match[1] in names)
            ]
            start = stop
        places = [match.start() + 1 for match in found]
        if not places:
            return list(texts)
        made, start = [], 0
        for text in texts:
            stop = start + len(text)
            inside = [at - start for at in places if start < at <= stop]
            made.append(CUT.join(_split(text, inside)))
            start = stop
        return made

    def cut_all(self, value: Any) -> Any:
        """Return a JSON value with the special tokens in its texts cut, names of fields too.

        A template may write signs of its own right behind such a text, so the beginning of a token
        at its end is cut as well.
        """
        if isinstance(value, str):
            if len(value) > _SHORT:
                return self._cut_apart(value)
            # A conversation is rendered at each of its turns, and its names and ids come again.
            if (cut := self._known.get(value)) is None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                cut = self._known[value] = self._cut_apart(value)
            return cut
        if isinstance(value, dict):
            return {self.cut_all(key): self.cut_all(item) for key, item in value.items()}
        return [self.cut_all(item) for item in value] if isinstance(value, list) else value

    def _cut_apart(self, text: str) -> str:
        """Return a text with special tokens cut, and the beginning of one at its end."""
        (cut,) = self.cut([text])
        for length in range(min(self._longest, len(text)), 1, -1):
            if text[-length:] in self._beginnings:
                whole = cut[-length:] == text[-length:]
                return f"{cut[: 1 - length]}{CUT}{cut[1 - length :]}" if whole else cut
        return cut


def tokenize(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Return the ids of rendered text; its pieces between cuts are tokenized apart."""

    def ids(piece: str, special: bool = False) -> list[int]:
        with reading(piece):
            return list(tokenizer(piece, add_special_tokens=special, verbose=False)["input_ids"])

    first, *rest = text.split(CUT)
    if not rest:
        return ids(text, add_special_tokens)
    made = ids(first)
    before, after = _around(made, ids(first, True)) if add_special_tokens else ([], [])
    anchor = ids(_ANCHOR)
    for piece in rest:
        continued = ids(_ANCHOR + piece)
        kept = continued[: len(anchor)] == anchor
        made += continued[len(anchor) :] if kept else ids(piece)
    return before + made + after


class CuttingTokenizer:
    """Stands in for a fast tokenizer in transformers' processors, and minds cuts in the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, text: Sequence[str], add_special_tokens: bool = True, **_: Any
    ) -> dict[str, list[list[int]]]:
        """Tokenize texts without padding, as lists."""
        rows = [tokenize(self._tokenizer, each, add_special_tokens) for each in text]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


def _split(text: str, places: Sequence[int]) -> Iterator[str]:
    for start, stop in zip([0, *places], [*places, len(text)], strict=True):
        yield text[start:stop]


def _around(bare: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Return what a tokenizer put before and after the ids of a text."""
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []
