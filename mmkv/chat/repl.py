"""The interactive conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mmkv.chat.answer import OutputClosed, answer
from mmkv.chat.autosave import Autosave, is_autosaved
from mmkv.chat.commands import COMMANDS, HIDDEN, Leave
from mmkv.chat.lines import Reader, open_reader
from mmkv.chat.saved import chat_extra
from mmkv.chat.transcript import spoken
from mmkv.chat.trouble import require_utf8
from mmkv.engine.errors import STOPS, as_exception
from mmkv.engine.paths import user_path

if TYPE_CHECKING:
    from mmkv.api import Engine, Session
    from mmkv.chat.display import Display
    from mmkv.chat.options import ChatOptions
    from mmkv.prompt.held import Rewrites

# Turns that /undo can take back; each holds a copy of the (bounded) cache.
UNDO_DEPTH = 4


@dataclass
class Sent:
    """A message as it was sent, for /undo and /retry."""

    text: str
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)


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
        self.sampling = options.sampling().settled(engine.default_sampling)
        self.fps, self.num_frames = options.fps, options.num_frames
        self.system = options.system
        self.images, self.videos = list(images), list(videos)
        self.extra = chat_extra(engine, options.engine, options.model)
        self.autosave = Autosave(self.extra, display.say) if options.autosave else None
        self.watching = False
        self.rewrites: Rewrites = "reread"
        self.sent: WeakKeyDictionary[Session, list[Sent]] = WeakKeyDictionary()
        self.session = self.new_session()
        self.branches: dict[str, Session] = {"main": self.session}
        self.branch = "main"
        self.reader: Reader | None = None

    def run(self, first: str | None = None) -> int:
        """Converse until /exit or the end of input; returns the exit code."""
        try:
            if self.options.load is not None:
                self.load(user_path(self.options.load))
            self.reader = open_reader(lambda: self.branches)
            self.display.note("/help lists commands; Ctrl-D leaves")
            self._converse(first)
            if self.options.save is not None:
                self.session.save(self.options.save, self.extra)
                self.display.note(f"saved to {self.options.save}")
            return 0
        finally:
            self._keep(last=True)
            for session in self.branches.values():
                session.close()

    def _converse(self, first: str | None) -> None:
        assert self.reader is not None
        try:
            if first is not None:
                self.handle(first)
            while True:
                try:
                    text = self.reader.read()
                except KeyboardInterrupt:
                    self.display.say("(Ctrl-D or /exit leaves)")
                    continue
                if text.strip():
                    self.handle(text)
        except (EOFError, Leave):
            return

    def handle(self, text: str) -> None:
        """Run a command or send a message; an error of any kind is shown and changes nothing."""
        try:
            require_utf8(text)
            if text.startswith("/") and not text.startswith("//"):
                self.command(text)
            else:
                self.send(text.removeprefix("/") if text.startswith("//") else text)
        except KeyboardInterrupt:
            self.display.say("(stopped)")
        except (OutputClosed, Leave, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            self.display.error(as_exception(error))
        self._keep()

    def _keep(self, last: bool = False) -> None:
        """Autosave the present conversation, or at the end all."""
        if self.autosave is None:
            return
        for session in self.branches.values() if last else (self.session,):
            self.autosave.save(session, last)
        if last and self.autosave.path(self.session) is not None:
            self.display.note("mmkv chat --resume continues this conversation")

    def command(self, text: str) -> None:
        """Run the slash command in ``text``."""
        name, _, rest = text[1:].partition(" ")
        command = COMMANDS.get(name) or HIDDEN.get(name)
        if command is None:
            self.display.say(f"unknown command /{name}; /help lists them, // sends a slash")
            return
        command.run(self, _unquoted(rest.strip()))

    def send(self, text: str) -> None:
        """Send a message with what is queued; the queue is emptied once it has been sent."""
        system = self.system if not self.session.history else None
        before = len(self.session.history)
        message = Sent(text, self.images, self.videos)
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
                watching=self.watching,
            )
        except STOPS:
            raise
        except BaseException:
            if len(self.session.history) > before:
                self.session.undo()
            if queued := len(self.images) + len(self.videos):
                self.display.note(f"{queued} queued item(s) stay; /image - drops them")
            raise
        finally:
            if len(self.session.history) > before:
                self.images, self.videos = [], []
                # As many as the session can take back.
                self.sent[self.session] = [*self.sent.get(self.session, []), message][-UNDO_DEPTH:]
        if not finished:
            taken_back = len(self.session.history) == before
            self.display.say("(stopped; nothing was sent)" if taken_back else "(stopped)")

    def undo(self) -> Sent | None:
        """Take back the latest turn and queue its media again; None when there is no such turn."""
        if not self.session.undo():
            return None
        message = self.sent[self.session].pop()
        self.images, self.videos = message.images + self.images, message.videos + self.videos
        return message

    def retry(self) -> bool:
        """Send the latest message again; the old reply comes back if that fails.

        Returns:
            False when there is no turn to take back.
        """
        session, queued = self.session, (self.images, self.videos)
        taken = session.fork()
        answered = False
        try:
            self.images, self.videos = [], []
            message = self.undo()
            if message is None:
                return False
            before = len(session.history)
            try:
                self.send(message.text)
            finally:
                answered = len(session.history) > before
                if not answered:
                    session.put_back(taken)
                    self.sent[session].append(message)
            return True
        finally:
            self.images, self.videos = queued
            if answered or not taken.closed:
                taken.close()

    def load(self, path: Path) -> None:
        """Go on with a session file in the place of the present conversation."""
        session, _ = self.engine.load_session(path)
        self.switch(session)
        if self.options.rebudget and self.engine.policy.evicts:
            session.set_budget(self.engine.budget)
        if self.autosave is not None and is_autosaved(path):
            self.autosave.adopt(session, path)
        turns = sum(message["role"] == "user" for message in session.history)
        self.display.say(
            f"loaded {path}: {turns} turn(s), {session.seen:,} tokens{_latest(session)}"
        )

    def agrees(self, question: str) -> bool:
        """Ask at the terminal; False where nobody can answer."""
        return self.reader is not None and self.reader.agrees(question)

    def add_video(self, source: str) -> None:
        """Queue a video's frames for the next message. Raises InputError."""
        read = self.engine.processor.load_clip
        self.videos.append(read(source, self.fps, self.num_frames))

    def new_session(self) -> Session:
        """Open an empty conversation under the present budget."""
        current = getattr(self, "session", None)
        session = self.engine.session(None if current is None else current.budget)
        return self._prepared(session)

    def _prepared(self, session: Session) -> Session:
        """Let turns be taken back, and /explain show them from here on.

        On a GPU a record costs bursts of steps, so that there /explain has to ask for it.
        """
        session.undo_depth, session.rewrites = UNDO_DEPTH, self.rewrites
        self.display.faded_said = False
        if self.engine.device.type == "cpu":
            session.record()
        return session

    def switch(self, session: Session) -> None:
        """Put ``session`` in the place of the present conversation, which is closed."""
        old, self.session = self.session, self._prepared(session)
        self.branches[self.branch] = session
        old.close()

    def set_sampling(self, **changes: Any) -> None:
        """Change sampling settings. Raises InputError; they stay as they were then."""
        self.sampling = replace(self.sampling, **changes)


def _latest(session: Session) -> str:
    """Return the latest question, shortened, to recognise a conversation by."""
    asked = [spoken(message) for message in session.history if message["role"] == "user"]
    words = " ".join(asked[-1].split()) if asked else ""
    return f'; latest: "{words[:60]}{"..." if len(words) > 60 else ""}"' if words else ""


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
