"""Read the user's input, with history and messages of several lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_BLOCK = '"""'


class LineReader:
    """Reads messages from stdin.

    A line ending in a backslash continues in the next one; three double quotes open and close a
    block of lines. On a terminal there is editing and a history that outlives the program (where
    Python has readline).
    """

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()
        # readline writes its prompt to stdout, where only answers belong once it is redirected.
        self._editing = self._terminal and sys.stdout.isatty() and self._load_history()

    def read(self) -> str:
        """Read the next message. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        lines = [self._line(">>> ")]
        if lines[0].strip().startswith(_BLOCK):
            return self._block(lines[0].strip()[len(_BLOCK) :])
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("... "))
        return "\n".join(lines)

    def agrees(self, question: str) -> bool:
        """Ask for a yes; False without a terminal, where nobody was asked."""
        if not self._terminal:
            return False
        try:
            return self._line(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(_BLOCK):
            lines.append(line)
            line = self._line("... ")
        lines.append(line.rstrip()[: -len(_BLOCK)])
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._editing:
            return input(prompt)
        if self._terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        # Bytes that are no UTF-8 become surrogates: the whole message is read before it is refused.
        line = sys.stdin.buffer.readline().decode(errors="surrogateescape")
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _load_history(self) -> bool:
        try:
            import readline
        except ImportError:  # Python without readline: input() still edits a little
            return True
        with suppress(OSError):
            readline.read_history_file(_history_file())
        return True

    def close(self) -> None:
        """Store the history; a home that cannot be written to does not matter."""
        if not self._editing:
            return
        with suppress(ImportError, OSError):
            import readline

            file = _history_file()
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(file)


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mmkv" / "history"
