"""Read the user's messages: from a terminal with editing, from a pipe line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

BLOCK = '"""'


@dataclass(frozen=True)
class Words:
    """What Tab completes.

    Attributes:
        commands: name -> its arguments as the help shows them; hidden: the same of commands that
            are not offered.
        values: command -> gives the names that may follow it.
    """

    commands: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Callable[[], Iterable[str]]] = field(default_factory=dict)


class MessageReader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """Read the next message. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        ...

    def agrees(self, question: str) -> bool:
        """Ask for a yes; False where nobody can answer."""
        ...

    def ask(self, question: str) -> str:
        """Read a line. Raises as :meth:`read`."""
        ...


class LineReader:
    """Reads messages from stdin.

    A line ending in a backslash continues in the next one; three double quotes open and close a
    block of lines.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()

    def read(self) -> str:
        """Read the next message. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        lines = [self._line(">>> ")]
        if lines[0].strip().startswith(BLOCK):
            return self._block(lines[0].strip()[len(BLOCK) :])
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("... "))
        return "\n".join(lines)

    def agrees(self, question: str) -> bool:
        """Ask for a yes; False without a terminal, where nobody was asked."""
        if not self._terminal:
            return False
        try:
            return is_yes(self._line(f"{question} [y/N] "))
        except EOFError:
            return False

    def ask(self, question: str) -> str:
        """Read a line. Raises as :meth:`read`."""
        return self._line(question)

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._line("... ")
        lines.append(line.rstrip()[: -len(BLOCK)])
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        # Bytes that are no UTF-8 become surrogates: the whole message is read before it is refused.
        try:
            line = sys.stdin.buffer.readline().decode(errors="surrogateescape")
        except KeyboardInterrupt:
            if self._terminal:
                print(file=sys.stderr)
            raise
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


def is_yes(answer: str) -> bool:
    """Return whether an answer to a question is a yes."""
    return answer.strip().lower() in ("y", "yes")
