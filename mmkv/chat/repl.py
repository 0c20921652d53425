"""The interactive conversation and its slash commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary

from rich.table import Table

from mmkv.calls.tools import arguments_text
from mmkv.chat.display import (
    OutputClosed,
    answer,
    calls_shown,
    memory_line,
    panel,
    statistics,
)
from mmkv.chat.inputs import LineReader, MessageReader, WatchedFolder, Words
from mmkv.chat.options import SAMPLING, ChatOptions
from mmkv.chat.saved import (
    Autosave,
    chat_extra,
    checked_target,
    export,
    figures_folder,
    is_autosaved,
    is_session,
    is_transcript,
    report_target,
    spoken,
    write_figures,
    write_report,
)
from mmkv.chat.trouble import require_utf8
from mmkv.engine.budget import Budget
from mmkv.engine.errors import STOPS, InputError, MmkvError, as_exception, plain
from mmkv.engine.options import declared
from mmkv.engine.paths import is_folder, user_path
from mmkv.prompt.held import Rewrites
from mmkv.prompt.media import load_image
from mmkv.prompt.video import check_sampling

if TYPE_CHECKING:
    from mmkv.api import Engine, Session
    from mmkv.chat.display import Display


class Leave(Exception):
    """Ends the conversation."""


@dataclass(frozen=True)
class SlashCommand:
    """A command: its arguments, its help text, and the function that runs it."""

    takes: str
    does: str
    run: Callable[[Repl, str], None]


def _image(repl: Repl, source: str) -> None:
    if source == "-":
        repl.images, repl.videos = [], []
    elif source:
        if not repl.engine.processor.sees:
            raise InputError(repl.engine.processor.blind)
        repl.images.append(load_image(source))
    queued = [f"picture {image.width} x {image.height}" for image in repl.images]
    queued += [f"video of {len(clip.frames)} frames" for clip in repl.videos]
    repl.display.say("queued for the next message: " + (", ".join(queued) or "nothing"))


def _video(repl: Repl, source: str) -> None:
    if source:
        if not repl.engine.processor.watches:
            raise InputError("this model takes no videos here; it cannot take this one")
        read = repl.engine.processor.load_clip
        repl.videos.append(read(source, repl.fps, repl.num_frames))
    _image(repl, "")


def _system(repl: Repl, text: str) -> None:
    if text:
        repl.system = text
        if repl.session.history:
            repl.display.say(
                "a system message comes first in a conversation; /clear starts one with it"
            )
            return
    repl.display.say(f"system message: {repl.system or '(none)'}")


def _set(repl: Repl, rest: str) -> None:
    name, _, value = rest.replace("=", " ", 1).partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name in SETTINGS:
        try:
            SETTINGS[name](repl, value)
        except ValueError as error:
            raise InputError(f"{value!r} does not fit {name}; give a number") from error
    elif name:
        raise InputError(f"no setting {name!r}; there are {', '.join(SETTINGS)}")
    values = asdict(repl.sampling) | {"fps": repl.fps, "num_frames": repl.num_frames}
    values["rewrites"] = repl.session.rewrites
    values["stop"], words = list(values["stop"]), values.pop("bad_words")
    values["repeat_penalty"] = values.pop("repetition_penalty")
    values = {name: values[name] for name in SETTINGS}
    if words:
        values["bad_words"] = f"{len(words)} of the model's"
    repl.display.say(", ".join(f"{key} {value}" for key, value in values.items()))


def _sampling_setting(name: str, kind: Any) -> Callable[[Repl, str], None]:
    """Return what changes a setting of sampling; no text for a seed or a thought's length: none."""

    def change(repl: Repl, value: str) -> None:
        nothing = not value and name in ("seed", "thinking_budget")
        changed: dict[str, Any] = {name: None if nothing else kind(value)}
        repl.sampling = replace(repl.sampling, **changed)

    return change


def _set_rewrites(repl: Repl, value: str) -> None:
    choices = get_args(Rewrites)
    if value not in choices:
        raise InputError(f"rewrites is {' or '.join(choices)}, not {value!r}")
    repl.rewrites = repl.session.rewrites = value  # type: ignore[assignment]


def _set_fps(repl: Repl, value: str) -> None:
    fps = float(value) if value else None
    check_sampling(fps, None)
    repl.fps, repl.num_frames = fps, None


def _set_num_frames(repl: Repl, value: str) -> None:
    count = int(value) if value else None
    check_sampling(None, count)
    repl.fps, repl.num_frames = None, count


def _sampling_settings() -> dict[str, Callable[[Repl, str], None]]:
    """Return the settings that are options of ``mmkv chat``, by name."""
    made = {}
    for name, option in declared(ChatOptions).items():
        if option.panel == SAMPLING and option.type is not bool:
            kind = option.type if name != "stop" else lambda value: (value,) if value else ()
            field = "repetition_penalty" if name == "repeat_penalty" else name
            made[name] = _sampling_setting(field, kind)
    return made


SETTINGS: dict[str, Callable[[Repl, str], None]] = {
    **_sampling_settings(),
    "thinking_budget": _sampling_setting("thinking_budget", int),
    "fps": _set_fps,
    "num_frames": _set_num_frames,
    "rewrites": _set_rewrites,
}


def _stats(repl: Repl, _: str) -> None:
    repl.display.show(statistics(repl.session))


def _memory(repl: Repl, _: str) -> None:
    repl.display.say(memory_line(repl.session))
    if repl.engine.loss_control is not None:
        control = repl.engine.loss_control
        repl.display.say(f"{control.calibration.promise}; {control.describe()}")
    if differs := repl.session.memory().differs:
        repl.display.say(differs)


def _budget(repl: Repl, value: str) -> None:
    if value:
        followed = repl.session.dial is not None
        repl.session.set_budget(Budget.parse(value))
        if followed:
            repl.display.say("this budget is fixed: it does not follow --risk any more")
    repl.display.say(memory_line(repl.session))


def _undo(repl: Repl, _: str) -> None:
    message = repl.undo()
    if message is None:
        repl.display.say("there is no turn to take back")
        return
    repl.display.say("took back the latest turn")
    if message.images or message.videos:
        _image(repl, "")


def _retry(repl: Repl, _: str) -> None:
    if not repl.retry():
        repl.display.say("there is no turn to try again")


def _results(repl: Repl, _: str) -> None:
    repl.declined = None
    if not repl.calls:
        raise InputError("the latest reply calls no function")


def _history(repl: Repl, _: str) -> None:
    for message in repl.session.history:
        marks = {"user": ">>> ", "system": "system: ", "tool": f"{message.get('name')}: "}
        mark = marks.get(message["role"], "")
        repl.display.say(f"{mark}{spoken(message)}")
    if not repl.session.history:
        repl.display.say("nothing has been said yet")


def _clear(repl: Repl, _: str) -> None:
    repl.switch(repl.new_session())
    repl.images, repl.videos = [], []
    repl.display.say("started a new conversation")


def _save(repl: Repl, name: str, force: bool = False) -> None:
    name = _named(name, "/save", "talk.mmkv")
    words = None if force else f"/save! {name} overwrites it"
    path = checked_target(name, "a session file", is_session, repl.may_overwrite, words)
    repl.session.save(path, repl.extra)
    repl.display.say(f"saved to {path}")


def _load(repl: Repl, path: str) -> None:
    repl.load(user_path(_named(path, "/load", "talk.mmkv")))


def _export(repl: Repl, name: str, force: bool = False) -> None:
    name = _named(name, "/export", "talk.md")
    words = None if force else f"/export! {name} overwrites it"
    what = "an exported conversation"
    path = checked_target(name, what, is_transcript, repl.may_overwrite, words)
    export(repl.session, Path(repl.options.model).name, path)
    repl.display.say(f"exported to {path}")


def _explain(repl: Repl, name: str, force: bool = False) -> None:
    name = _named(name, "/explain", "report.html")
    recorder = repl.session.recorder
    trace = repl.session.trace()
    if recorder is None:
        repl.display.say("recording begins now: ask something, then give /explain again")
        return
    if name.endswith("/") or is_folder(user_path(name)):
        repl.display.say(write_figures(trace, figures_folder(name)))
        return
    words = None if force else f"/explain! {name} overwrites it"
    path = report_target(name, repl.may_overwrite, words)
    repl.display.say(write_report(trace, path))


def _watch(repl: Repl, _: str) -> None:
    if not repl.display.animated:
        raise InputError("/watch needs a terminal, and stderr is not one; /stats shows the same")
    repl.watching = not repl.watching
    if repl.watching:
        repl.display.show(panel(repl.session, 0.0))
        repl.display.say("shown while replies are made; /watch again hides it")
    else:
        repl.display.say("hidden")


def _watch_folder(repl: Repl, name: str) -> None:
    if name == "off":
        repl.display.say("the folder is no longer read" if repl.folder else "no folder was read")
        repl.folder = None
    elif name:
        processor = repl.engine.processor
        if not processor.sees:
            raise InputError(processor.blind)
        repl.folder = WatchedFolder(user_path(name))
        left = f"; the {repl.folder.there} in it are left out" if repl.folder.there else ""
        repl.display.say(
            f"pictures that come into {name} are read before each of your inputs{left}"
        )
    elif repl.folder is None:
        raise InputError("/watch-folder needs a folder; for example /watch-folder camera")
    else:
        repl.display.say(f"pictures that come into {repl.folder.path} are read")


def _fork(repl: Repl, name: str) -> None:
    if name and name in repl.branches:
        repl.branch, repl.session = name, repl.branches[name]
    elif name:
        repl.branches[name] = repl.session.fork()
        repl.branch, repl.session = name, repl.branches[name]
    names = [f"[{name}]" if name == repl.branch else name for name in repl.branches]
    repl.display.say("conversations: " + ", ".join(names))


def _help(repl: Repl, _: str) -> None:
    table = Table.grid(padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.takes}", command.does)
    repl.display.show(table)
    repl.display.say(
        'Alt-Enter, or Enter after \\, begins a new line; """ opens and closes a block of lines.'
    )


def _exit(repl: Repl, _: str) -> None:
    raise Leave


def _named(path: str, command: str, example: str) -> str:
    if not path:
        raise InputError(f"{command} needs a file name; for example {command} {example}")
    return path


COMMANDS = {
    "image": SlashCommand("PATH|URL", "queue a picture for the next message (- drops all)", _image),
    "video": SlashCommand("PATH|URL", "queue a video for the next message", _video),
    "system": SlashCommand("[TEXT]", "system message of the next conversation", _system),
    "set": SlashCommand("[NAME VALUE]", "show or change sampling settings", _set),
    "stats": SlashCommand("", "tokens, entries by modality, memory, entries per layer", _stats),
    "memory": SlashCommand("", "what is kept, and how it differs from a fresh reading", _memory),
    "budget": SlashCommand("[256|25%|64MiB]", "show or change the budget", _budget),
    "undo": SlashCommand("", "take back the latest turn; its pictures are queued again", _undo),
    "retry": SlashCommand("", "take back the latest reply and ask for another", _retry),
    "results": SlashCommand(
        "", "give the results of the latest calls, if you postponed them", _results
    ),
    "history": SlashCommand("", "show the conversation", _history),
    "clear": SlashCommand("", "start a new conversation", _clear),
    "save": SlashCommand("PATH", "save the conversation with its cache (/save! overwrites)", _save),
    "load": SlashCommand("PATH", "continue a saved conversation", _load),
    "export": SlashCommand("PATH.md", "write the conversation as Markdown", _export),
    "explain": SlashCommand(
        "PATH.html", "write a page that shows what was kept, when and why", _explain
    ),
    "watch": SlashCommand("", "show the memory while replies are made; again: hide it", _watch),
    "watch-folder": SlashCommand(
        "PATH|off", "read pictures that come into a folder, before each input", _watch_folder
    ),
    "fork": SlashCommand(
        "[NAME]", "copy the conversation under a new name, or go to one of that name", _fork
    ),
    "help": SlashCommand("", "this list", _help),
    "exit": SlashCommand("", "leave (also /quit, Ctrl-D)", _exit),
}
# Known, and not in the list of /help.
HIDDEN = {
    "quit": SlashCommand("", "leave", _exit),
    "save!": SlashCommand("PATH", "save over any file", partial(_save, force=True)),
    "explain!": SlashCommand("PATH.html", "write over any file", partial(_explain, force=True)),
    "export!": SlashCommand("PATH.md", "export over any file", partial(_export, force=True)),
}


# Turns that /undo can take back; each holds a copy of the (bounded) cache.
UNDO_DEPTH = 4


def open_reader(words: Words) -> MessageReader:
    """Return an editor where somebody sits at a terminal, else a reader of lines."""
    # The prompt belongs on stderr: stdout is for answers, and may be a file.
    screen = next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), None)
    if screen is None or not sys.stdin.isatty():
        return LineReader()
    from mmkv.chat.editor import Editor

    return Editor(words, screen)


@dataclass
class Sent:
    """A message as it was sent, for /undo and /retry; ``results``: of calls, None: it has none."""

    text: str
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    results: list[tuple[str, Any]] | None = None


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
        self.folder: WatchedFolder | None = None
        self.rewrites: Rewrites = "reread"
        self.sent: WeakKeyDictionary[Session, list[Sent]] = WeakKeyDictionary()
        self.declined: Any = None  # the reply whose calls were put off
        self.retold: Session | None = None  # a loaded one, which may get other tools
        self.session = self.new_session()
        self.branches: dict[str, Session] = {"main": self.session}
        self.branch = "main"
        self.reader: MessageReader | None = None

    def run(self, first: str | None = None) -> int:
        """Converse until /exit or the end of input; returns the exit code."""
        try:
            if self.options.load is not None:
                self.load(user_path(self.options.load))
                self.retold = self.session
            self.reader = open_reader(
                Words(
                    {name: command.takes for name, command in COMMANDS.items()},
                    {name: command.takes for name, command in HIDDEN.items()},
                    {"set": lambda: SETTINGS, "fork": lambda: self.branches},
                )
            )
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
                if self.calls:
                    if not self._safely(self.give_results):
                        self.display.say("(stopped)")
                    continue
                try:
                    text = self.reader.read()
                except KeyboardInterrupt:
                    self.display.say("(Ctrl-D or /exit leaves)")
                    continue
                if not text.strip():
                    continue
                if self._safely(self.look) or _is_command(text):
                    self.handle(text)
                else:
                    self.display.say("(stopped; nothing was sent)")
        except (EOFError, Leave):
            return

    def handle(self, text: str) -> None:
        """Run a command or send a message; an error of any kind is shown and changes nothing."""
        if not self._safely(lambda: self._take(text)):
            self.display.say("(stopped)")

    def look(self) -> None:
        """Read the pictures that have come into the watched folder, if there is one."""
        folder, read = self.folder, []
        # Functions are named with the first question, before all that is read.
        if folder is None or (self.options.functions and self._unanswered):
            return
        timed = self.engine.processor.writes_times and self.engine.processor.watches
        try:
            for name, seconds, picture in folder.look():
                system = self.system if not self.session.history else None
                at = seconds if timed else None
                try:
                    # /undo takes back a turn with what came after it.
                    self.session.observe(picture, at=at, system=system, undoable=False)
                    read.append(name)
                except MmkvError as error:
                    self.display.say(f"{plain(name)} is not read: {error}")
        except InputError:
            self.folder = None
            raise
        finally:
            for trouble in folder.trouble:
                self.display.say(trouble)
            if read:
                few = [plain(name, "") for name in (read if len(read) < 4 else (read[0], read[-1]))]
                self.display.say(f"read {(', ' if len(read) < 4 else ' to ').join(few)}")

    @property
    def _unanswered(self) -> bool:
        """Whether the conversation has no reply yet."""
        return all(message["role"] != "assistant" for message in self.session.history)

    def _take(self, text: str) -> None:
        require_utf8(text)
        if _is_command(text):
            self.command(text)
        else:
            self.send(text.removeprefix("/") if text.startswith("//") else text)

    def _safely(self, act: Callable[[], None]) -> bool:
        """Do something and show what goes wrong; False: Ctrl-C has stopped it."""
        stopped = False
        try:
            act()
        except KeyboardInterrupt:
            stopped = True
        except (OutputClosed, Leave, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            self.display.error(as_exception(error))
        self._keep()
        return not stopped

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

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of the latest reply, as the history has them, unless they were put off."""
        last = self.session.history[-1] if self.session.history else {}
        return [] if last is self.declined else last.get("tool_calls", [])

    def give_results(self) -> None:
        """Ask for what the latest calls return and send it; Ctrl-C puts that off.

        A command is run instead.
        """
        calls, self.declined = self.calls, self.session.history[-1]
        results: list[tuple[str, Any]] = []
        try:
            for call in calls:
                said = self._result(call["function"])
                if isinstance(said, str):
                    self.declined = None  # asked again, unless the command changes that
                    self.command(said)
                    return
                results.append((call["id"], said))
        except KeyboardInterrupt:
            self.display.say("(postponed; /results asks again)")
            return
        except EOFError as error:
            raise Leave from error
        self._send(Sent("", results=results))

    def _result(self, function: dict[str, Any]) -> list[dict[str, Any]] | str:
        """Ask for what one call returns: lines of pictures, and a line of text; or a command."""
        assert self.reader is not None
        self.display.show(calls_shown([(function["name"], arguments_text(function["arguments"]))]))
        parts: list[dict[str, Any]] = []
        while True:
            line = self.reader.ask("result (@FILE adds a picture): ")
            try:
                require_utf8(line)
                if line.startswith("@") and not line.startswith("@@"):
                    if not self.engine.processor.sees:
                        raise InputError(self.engine.processor.blind)
                    parts.append({"type": "image", "image": load_image(line[1:].strip())})
                    continue
            except InputError as error:
                self.display.error(error)
                continue
            if _is_command(line):
                return line
            text = line[1:] if line.startswith(("@", "/")) else line
            return [*parts, {"type": "text", "text": text}] if text or not parts else parts

    def send(self, text: str) -> None:
        """Send a message with what is queued; the queue is emptied once it has been sent."""
        self._send(Sent(text, self.images, self.videos))

    def _send(self, message: Sent) -> None:
        new = self._unanswered
        system = None if self.session.history else self.system
        before = len(self.session.history)
        try:
            finished = answer(
                self.session,
                self.options,
                self.display,
                message.text,
                message.images,
                message.videos,
                system,
                self.sampling,
                watching=self.watching,
                tools=self.options.functions if new or self.session is self.retold else None,
                results=message.results,
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
                if message.results is None:
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
                self._send(message)
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

    def may_overwrite(self, path: Path) -> bool:
        """Ask whether a file may be overwritten; False where nobody can answer."""
        return self.reader is not None and self.reader.agrees(f"{path} exists; overwrite it?")

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
        self.display.said = set()
        if self.engine.device.type == "cpu":
            session.record()
        return session

    def switch(self, session: Session) -> None:
        """Put ``session`` in the place of the present conversation, which is closed."""
        old, self.session = self.session, self._prepared(session)
        self.branches[self.branch] = session
        old.close()


def _latest(session: Session) -> str:
    """Return the latest question, shortened, to recognise a conversation by."""
    asked = [spoken(message) for message in session.history if message["role"] == "user"]
    words = " ".join(asked[-1].split()) if asked else ""
    return f'; latest: "{words[:60]}{"..." if len(words) > 60 else ""}"' if words else ""


def _is_command(text: str) -> bool:
    """Whether a line begins with one slash."""
    return text.startswith("/") and not text.startswith("//")


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
