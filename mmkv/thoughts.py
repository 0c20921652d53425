"""The thought at the beginning of a reply: where its tokens are, and its end when it is too long.

Tokens count, not text: a budget is a number of tokens, and the cache drops entries of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from mmkv.prompt.special import tokenize

if TYPE_CHECKING:
    from mmkv.calls.parser import ThoughtMarks
    from mmkv.reply import TokenBytes


# Tokens at the end of a prompt that may open a thought, or hold an empty one.
PROMPT_END = 48


def marks_if_first(marks: ThoughtMarks | None, prefix: str) -> ThoughtMarks | None:
    """Return ``marks`` where a thought can still begin behind a reply's ``prefix``, or just has."""
    return None if marks is None or prefix.strip() not in ("", marks.open) else marks


class Thought:
    """Follows the tokens of one reply.

    Args:
        known: what tokens stand for; before: the prompt's latest tokens.

    Attributes:
        state: ``begin``: it may still be opened; ``none``: there is none; ``open``; ``closed``.
        start, stop: its tokens, marks included, as offsets from the reply's first token: below 0
            where the prompt opens it. ``stop`` means something once it is closed.
        marks: those that it looks for.
        tokens: how many the thought has so far, marks not counted.
    """

    def __init__(self, known: TokenBytes, marks: ThoughtMarks, before: Sequence[int]) -> None:
        self._known, self.marks, self._count = known, marks, 0
        self._open, self._close = marks.open.encode(), marks.close.encode()
        self.state: Literal["begin", "none", "open", "closed"] = "begin"
        self.start = self.stop = self._first = 0
        self._text = b""  # of the reply, as far as marks are looked for in it
        self._read_prompt(before[-PROMPT_END:])

    @property
    def tokens(self) -> int:
        """See the class."""
        return self._count - self._first

    @property
    def at_line_start(self) -> bool:
        """Whether the next token begins a line."""
        return self._text.endswith(b"\n")

    def push(self, token: int) -> None:
        """Take the next token of the reply."""
        self._count += 1
        if self.state in ("none", "closed"):
            return
        self._text += self._bytes(token)
        if self.state == "begin":
            bare = self._text.lstrip()
            if bare.startswith(self._open):
                self.state, self._first = "open", self._count
                # Its first byte came with the latest token that held any but blanks before.
                self._text = bare[len(self._open) :]
            elif not self._open.startswith(bare):
                self.state = "none"
            elif not bare:
                self.start = self._count
        if self.state == "open" and self._close in self._text:
            self.state, self.stop = "closed", self._count
        if self.state == "open":
            self._text = self._text[-len(self._close) :]

    def _bytes(self, token: int) -> bytes:
        return self._known.of(token) or b"\0"

    def _read_prompt(self, before: Sequence[int]) -> None:
        parts = [self._bytes(token) for token in before]
        text = b"".join(parts)
        opened, closed = map(re.escape, (self._open, self._close))
        found = re.search(rb"%s\s*(%s)?\s*$" % (opened, closed), text)
        if found is None:
            return
        ends = [sum(map(len, parts[: at + 1])) for at in range(len(parts))]
        self.start = sum(end <= found.start() for end in ends) - len(parts)
        if found[1]:
            self.state, self.stop = "closed", sum(end < found.end(1) for end in ends) + 1
            self.stop -= len(parts)
        else:
            self.state, self._text = "open", text[found.start() + len(self._open) :]


def closing(tokenizer: Any, marks: ThoughtMarks, at_line_start: bool) -> list[int]:
    """Return the tokens that end a thought, as templates write it: a line of its own."""
    text = f"{'' if at_line_start else chr(10)}{marks.close}\n\n"
    anchor = tokenize(tokenizer, "a\n" if at_line_start else "a")
    ids = tokenize(tokenizer, ("a\n" if at_line_start else "a") + text)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else tokenize(tokenizer, text)
