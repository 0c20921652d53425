"""The interactive conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmkv.chat.answer import OutputClosed, answer
from mmkv.chat.commands import COMMANDS, Leave
from mmkv.chat.lines import LineReader
from mmkv.chat.trouble import require_utf8
from mmkv.prompt.video import load_video

if TYPE_CHECKING:
    from mmkv.api import Engine, Session
    from mmkv.chat.display import Display
    from mmkv.chat.options import ChatOptions

# Turns that /undo can take back; each holds a copy of the (bounded) cache.
UNDO_DEPTH = 4


class Repl:
    """State of an interactive run: the conversation, its branches, and media queued for sending."""

    def __init__(
        self,
        engine: Engine,
        options: ChatOptions,
        display: Display,
        images: Sequence[Any],
        videos: Sequence[Any],
    ) -> None:
        self.engine, self.options, self.display = engine, options, display
        self.sampling = options.sampling()
        self.fps, self.num_frames = options.fps, options.num_frames
        self.system = options.system
        self.images, self.videos = list(images), list(videos)
        self.session = self.new_session()
        self.branches: dict[str, Session] = {"main": self.session}
        self.branch = "main"

    def run(self, first: str | None = None) -> int:
        """Converse until /exit or the end of input; returns the exit code."""
        reader = LineReader()
        self.display.note("/help lists commands; Ctrl-D leaves")
        try:
            if first is not None:
                self.handle(first)
            while True:
                try:
                    text = reader.read()
                except KeyboardInterrupt:
                    self.display.say("\n(Ctrl-D or /exit leaves)")
                    continue
                if text.strip():
                    self.handle(text)
        except (EOFError, Leave):
            return 0
        finally:
            reader.close()
            for session in self.branches.values():
                session.close()

    def handle(self, text: str) -> None:
        """Run a command or send a message; an error of any kind is shown and changes nothing."""
        try:
            require_utf8(text)
            if text.startswith("/") and not text.startswith("//"):
                self.command(text)
            else:
                self.send(text.removeprefix("/") if text.startswith("//") else text)
        except (OutputClosed, Leave):
            raise
        except Exception as error:
            self.display.error(error)
        except KeyboardInterrupt:
            self.display.say("(stopped)")

    def command(self, text: str) -> None:
        """Run the slash command in ``text``."""
        name, _, rest = text[1:].partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            self.display.say(f"unknown command /{name}; /help lists them, // sends a slash")
            return
        command.run(self, _unquoted(rest.strip()))

    def send(self, text: str) -> None:
        """Send a message with what is queued; the queue is emptied once it has been sent."""
        system = self.system if not self.session.history else None
        before = len(self.session.history)
        try:
            finished = answer(
                self.engine,
                self.session,
                self.options,
                self.display,
                text,
                self.images,
                self.videos,
                system,
                self.sampling,
            )
        except Exception:
            if len(self.session.history) > before:
                self.session.undo()
            if queued := len(self.images) + len(self.videos):
                self.display.note(f"{queued} queued item(s) stay; /image - drops them")
            raise
        finally:
            if len(self.session.history) > before:
                self.images, self.videos = [], []
        if not finished:
            taken_back = len(self.session.history) == before
            self.display.say("(stopped; nothing was sent)" if taken_back else "(stopped)")

    def add_video(self, source: str) -> None:
        """Queue a video's frames for the next message. Raises InputError."""
        rule = self.engine.processor.size_rule
        self.videos.append(load_video(source, self.fps, self.num_frames, rule))

    def new_session(self) -> Session:
        """Open an empty conversation under the present budget."""
        current = getattr(self, "session", None)
        session = self.engine.session(None if current is None else current.budget)
        session.undo_depth = UNDO_DEPTH
        return session

    def switch(self, session: Session) -> None:
        """Put ``session`` in the place of the present conversation, which is closed."""
        session.undo_depth = UNDO_DEPTH
        old, self.session = self.session, session
        self.branches[self.branch] = session
        old.close()

    def set_sampling(self, **changes: Any) -> None:
        """Change sampling settings. Raises InputError; they stay as they were then."""
        self.sampling = replace(self.sampling, **changes)


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
