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
    from mmkv.detokenizer import TokenBytes


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
        over: whether it stays as it is: nothing more is looked for. Until the answer's first word
            a mark that is repeated opens or closes it again.
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
        self.over = False
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
        if self.over:
            return
        self._text += self._bytes(token)
        while self._step():
            pass

    def _step(self) -> bool:
        """Read the next mark; return whether there may be another one."""
        if self.state == "open":
            _, found, after = self._text.partition(self._close)
            if found:
                self.state, self.stop, self._text = "closed", self._count, after
            else:
                self._text = self._text[-len(self._close) :]
            return bool(found)
        bare = self._text.lstrip()
        if bare.startswith(self._open):
            if self.state == "begin":
                # Its first byte came with the latest token that held any but blanks before.
                self._first = self._count
            self.state, self._text = "open", bare[len(self._open) :]
        elif bare.startswith(self._close):
            if self.state == "closed":
                self.stop = self._count
            self._text = bare[len(self._close) :]
        elif self._open.startswith(bare) or self._close.startswith(bare):
            if not bare and self.state == "begin":
                self.start = self._count
            return False
        else:
            self.state = "none" if self.state == "begin" else self.state
            self.over = True
        return not self.over

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
