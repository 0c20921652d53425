"""Edit messages at a terminal: several lines, pasted blocks, history, completion."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from mmkv.chat.inputs import BLOCK, MessageReader, Words
from mmkv.resources import state_folder

HISTORY_SIZE = 1000  # messages


class Editor(MessageReader):
    """Reads messages from a terminal.

    Enter sends. Alt-Enter, or Enter after a backslash, begins a new line; so does Enter in a block
    that three double quotes have opened. A pasted text is put in whole and sent with Enter. The
    history outlives the program.

    Args:
        words: what Tab completes.
        screen: the stream of the terminal.
    """

    def __init__(self, words: Words, screen: TextIO) -> None:
        self._output = create_output(screen)
        self._session: PromptSession[str] = PromptSession(
            ">>> ",
            multiline=True,
            prompt_continuation=continuation,
            key_bindings=_bindings(),
            completer=_Completions(words),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            history=open_history(state_folder() / "history"),
            enable_open_in_editor=False,
            output=self._output,
        )

    def read(self) -> str:
        text = self._session.prompt()
        bare = text.strip()
        if bare.startswith(BLOCK) and _closes(bare):
            return bare[len(BLOCK) : -len(BLOCK)].strip("\n")
        return text

    def ask(self, question: str) -> str:
        """Read a line, which stays out of the history. Raises as :meth:`read`."""
        asked: PromptSession[str] = PromptSession(output=self._output)
        return asked.prompt(question)


def continuation(width: int, line: int, wraps: int) -> str:
    """Return what stands before a line: dots for one of the message, nothing for a wrapped one.

    Args:
        wraps: how often the terminal's edge has broken this line before.
    """
    return " " * width if wraps else "... "


def _closes(block: str) -> bool:
    """Return whether the first quotes after the opening ones are the end of ``block``."""
    return block.find(BLOCK, len(BLOCK)) == len(block) - len(BLOCK)


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        bare = buffer.text.strip()
        opened = bare.startswith(BLOCK) and BLOCK not in bare[len(BLOCK) :]
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif opened:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _Completions(Completer):
    """Completes names of commands, and what a command takes: paths, settings, conversations."""

    def __init__(self, words: Words) -> None:
        self._paths, self._words = PathCompleter(expanduser=True), words

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Yield what may stand at the cursor."""
        text, words = document.text_before_cursor, self._words
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            yield from _beginning(name, (f"{known} " for known in words.commands))
        elif name in words.values:
            yield from _beginning(rest, words.values[name]())
        elif "PATH" in (words.commands.get(name) or words.hidden.get(name, "")):
            yield from self._files(rest, event)

    def _files(self, path: str, event: CompleteEvent) -> Iterator[Completion]:
        for found in self._paths.get_completions(Document(path), event):
            # The folder's slash stands only in what is displayed.
            slash = "/" if found.display_text.endswith("/") else ""
            yield Completion(found.text + slash, found.start_position, found.display)


def _beginning(start: str, names: Iterable[str]) -> Iterator[Completion]:
    for name in names:
        if name.startswith(start):
            yield Completion(name, -len(start), FormattedText([("", name.strip())]))


def open_history(file: Path) -> History:
    """Return the history that ``file`` keeps, readable by the user alone, its latest part.

    A file that cannot be read or written gives a history of this run.
    """
    history = _PrivateHistory(file)
    history.shorten()
    return history


class _PrivateHistory(FileHistory):
    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._file = file

    def load_history_strings(self) -> list[str]:
        """Return the messages of the file, the latest first."""
        with suppress(OSError):
            return list(super().load_history_strings())
        return []

    def store_string(self, string: str) -> None:
        """Append a message; one that is no UTF-8 is left out."""
        with suppress(OSError, UnicodeError):
            string.encode()
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600))
            self._file.chmod(0o600)
            super().store_string(string)

    def shorten(self) -> None:
        """Leave the KEPT latest messages once there are twice as many."""
        found = self.load_history_strings()
        if len(found) < 2 * HISTORY_SIZE:
            return
        with suppress(OSError):
            new = self._file.with_suffix(f".{os.getpid()}")
            new.unlink(missing_ok=True)
            short = _PrivateHistory(new)
            for string in reversed(found[:HISTORY_SIZE]):
                short.store_string(string)
            new.replace(self._file)
