"""The slash commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from mmkv.chat.display import memory_line, statistics
from mmkv.chat.explained import figures_folder, report_target, write_figures, write_report
from mmkv.chat.saved import is_session
from mmkv.chat.targets import checked_target
from mmkv.chat.transcript import export, is_transcript, spoken
from mmkv.chat.watch import panel
from mmkv.engine.budget import Budget
from mmkv.engine.errors import InputError
from mmkv.engine.paths import user_path
from mmkv.prompt.held import Rewrites
from mmkv.prompt.media import load_image
from mmkv.prompt.video import check_sampling

if TYPE_CHECKING:
    from mmkv.chat.repl import Repl


class Leave(Exception):
    """Ends the conversation."""


@dataclass(frozen=True)
class Command:
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
        repl.add_video(source)
    _image(repl, "")


def _system(repl: Repl, text: str) -> None:
    if text:
        repl.system = text
        if repl.session.history:
            repl.display.say("a system message opens a conversation: /clear starts one with it")
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


def _sampling_setting(name: str, parse: Callable[[str], Any]) -> Callable[[Repl, str], None]:
    def change(repl: Repl, value: str) -> None:
        repl.set_sampling(**{name: parse(value)})

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


SETTINGS: dict[str, Callable[[Repl, str], None]] = {
    "max_new_tokens": _sampling_setting("max_new_tokens", int),
    "temperature": _sampling_setting("temperature", float),
    "top_p": _sampling_setting("top_p", float),
    "top_k": _sampling_setting("top_k", int),
    "min_p": _sampling_setting("min_p", float),
    "repeat_penalty": _sampling_setting("repetition_penalty", float),
    "presence_penalty": _sampling_setting("presence_penalty", float),
    "frequency_penalty": _sampling_setting("frequency_penalty", float),
    "seed": _sampling_setting("seed", lambda value: int(value) if value else None),
    "stop": _sampling_setting("stop", lambda value: (value,) if value else ()),
    "fps": _set_fps,
    "num_frames": _set_num_frames,
    "rewrites": _set_rewrites,
}


def _stats(repl: Repl, _: str) -> None:
    repl.display.show(statistics(repl.engine, repl.session))


def _memory(repl: Repl, _: str) -> None:
    repl.display.say(memory_line(repl.engine, repl.session))
    if differs := repl.session.memory().differs:
        repl.display.say(differs)


def _budget(repl: Repl, value: str) -> None:
    if value:
        repl.session.set_budget(Budget.parse(value))
    repl.display.say(memory_line(repl.engine, repl.session))


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


def _history(repl: Repl, _: str) -> None:
    for message in repl.session.history:
        mark = {"user": ">>> ", "system": "system: "}.get(message["role"], "")
        repl.display.say(f"{mark}{spoken(message)}")
    if not repl.session.history:
        repl.display.say("nothing has been said yet")


def _clear(repl: Repl, _: str) -> None:
    repl.switch(repl.new_session())
    repl.images, repl.videos = [], []
    repl.display.say("started a new conversation")


def _save(repl: Repl, name: str, force: bool = False) -> None:
    name = _named(name, "/save", "talk.mmkv")
    path = checked_target(
        name,
        "a session file",
        is_session,
        lambda path: repl.agrees(f"{path} exists; overwrite it?"),
        None if force else f"/save! {name} overwrites it",
    )
    repl.session.save(path, repl.extra)
    repl.display.say(f"saved to {path}")


def _load(repl: Repl, path: str) -> None:
    repl.load(user_path(_named(path, "/load", "talk.mmkv")))


def _export(repl: Repl, name: str, force: bool = False) -> None:
    name = _named(name, "/export", "talk.md")
    path = checked_target(
        name,
        "an exported conversation",
        is_transcript,
        lambda path: repl.agrees(f"{path} exists; overwrite it?"),
        None if force else f"/export! {name} overwrites it",
    )
    export(repl.session, Path(repl.options.model).name, path)
    repl.display.say(f"exported to {path}")


def _explain(repl: Repl, name: str, force: bool = False) -> None:
    name = _named(name, "/explain", "report.html")
    recorder = repl.session.recorder
    trace = repl.session.trace()
    if recorder is None:
        repl.display.say("recording begins now: ask something, then give /explain again")
        return
    if name.endswith("/") or user_path(name).is_dir():
        repl.display.say(write_figures(trace, figures_folder(name)))
        return
    path = report_target(
        name,
        lambda path: repl.agrees(f"{path} exists; overwrite it?"),
        None if force else f"/explain! {name} overwrites it",
    )
    repl.display.say(write_report(trace, path))


def _watch(repl: Repl, _: str) -> None:
    if not repl.display.animated:
        raise InputError("/watch draws on a terminal, and stderr is none; /stats shows the same")
    repl.watching = not repl.watching
    if repl.watching:
        repl.display.show(panel(repl.engine, repl.session, 0.0))
        repl.display.say("shown while replies are made; /watch again hides it")
    else:
        repl.display.say("hidden")


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
    "image": Command("PATH|URL", "queue a picture for the next message (- drops all)", _image),
    "video": Command("PATH|URL", "queue a video for the next message", _video),
    "system": Command("[TEXT]", "system message of the next conversation", _system),
    "set": Command("[NAME VALUE]", "show or change sampling settings", _set),
    "stats": Command("", "tokens, entries by modality, memory, entries per layer", _stats),
    "memory": Command("", "what is kept, and how it differs from a fresh reading", _memory),
    "budget": Command("[256|25%|64MiB]", "show or change the budget", _budget),
    "undo": Command("", "take back the latest turn; its pictures are queued again", _undo),
    "retry": Command("", "take back the latest reply and ask for another", _retry),
    "history": Command("", "show the conversation", _history),
    "clear": Command("", "start a new conversation", _clear),
    "save": Command("PATH", "save the conversation with its cache (/save! overwrites)", _save),
    "load": Command("PATH", "continue a saved conversation", _load),
    "export": Command("PATH.md", "write the conversation as Markdown", _export),
    "explain": Command("PATH.html", "write a page of what was kept, when and why", _explain),
    "watch": Command("", "show the memory while replies are made; again: hide it", _watch),
    "fork": Command("[NAME]", "copy the conversation under a name, or go to that one", _fork),
    "help": Command("", "this list", _help),
    "exit": Command("", "leave (also /quit, Ctrl-D)", _exit),
}
# Known, and not in the list of /help.
HIDDEN = {
    "quit": Command("", "leave", _exit),
    "save!": Command("PATH", "save over any file", partial(_save, force=True)),
    "explain!": Command("PATH.html", "write over any file", partial(_explain, force=True)),
    "export!": Command("PATH.md", "export over any file", partial(_export, force=True)),
}
