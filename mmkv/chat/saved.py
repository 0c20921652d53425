"""The chat's files: sessions and what they say of themselves, autosaves, transcripts, reports.

Where they lie (the XDG base directory specification), and which the chat may overwrite. What a
session file says is read without a model and without torch.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mmkv.chat.trouble import one_line
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import (
    STOPS,
    InputError,
    MmkvError,
    PolicyError,
    SessionError,
    as_exception,
    shown,
)
from mmkv.engine.model.source import at_hand
from mmkv.engine.paths import is_folder, user_path, whole_file
from mmkv.resources import state_folder

if TYPE_CHECKING:
    from mmkv.api import Engine, Session
    from mmkv.engine.config import EngineConfig
    from mmkv.explain.trace import Trace
    from mmkv.prompt.messages import Message


_KEY = "mmkv.chat"
# Options of the command line without which a session file cannot go on.
_KEPT = (
    "model",
    "mmproj",
    "adapter",
    "policy",
    "lookahead",
    "evict_every",
    "gates",
    "dtype",
    "weights",
    "kv",
)


def chat_extra(engine: Engine, config: EngineConfig, model: str) -> dict[str, str]:
    """Return what a chat adds to its session files: the options to open them again with."""
    values = {name: getattr(config, name) for name in _KEPT}
    values["model"], values["dtype"] = model, str(engine.dtype).removeprefix("torch.")
    values["kv"] = engine.cache.pool.form.name  # it may have been chosen
    for name in ("model", "mmproj", "adapter", "gates"):
        if values[name] is not None:
            values[name] = _absolute(str(values[name]))
    if isinstance(config.policy, str):
        values["policy"] = _with_paths(config.policy, _absolute)
    elif config.policy is None and not engine.policy.gates:
        values["policy"] = engine.policy.name  # the budget had a say in it, and is not kept
    return {_KEY: json.dumps({name: v for name, v in values.items() if v is not None})}


def is_session(path: Path) -> bool:
    """Return whether ``path`` is a session file by its header."""
    try:
        return _is_session(_metadata(path))
    except SessionError:
        return False


def _is_session(metadata: dict[str, str]) -> bool:
    return metadata.get("format", "").startswith("mmkv-session")


def chat_options(path: Path) -> dict[str, Any]:
    """Return the options that a chat stored in a session file.

    The form of the cache is there whoever wrote it: a file fits no other one.

    Raises:
        SessionError: there is no file, it is no session file, or what it says of options is
            damaged.
    """
    metadata = _metadata(path)
    if not _is_session(metadata):
        raise SessionError(f"{path} is not a session file of mmkv; name another file")
    from mmkv.dialogue_schema import InvalidFile, parse_options

    try:
        return {"kv": _form(metadata), **parse_options(metadata.get("extra", ""), _KEY)}
    except InvalidFile as error:
        raise SessionError(
            f"the options in the session file {path} are damaged ({error}); use a copy, or begin a "
            "new session"
        ) from error


def _form(metadata: dict[str, str]) -> str:
    """Return the form that a session file says it has; ``auto`` is that of files without one."""
    from mmkv.engine.config import KV_FORMS

    try:
        named = json.loads(metadata.get("identity", "{}")).get("kv")
    except (ValueError, AttributeError, RecursionError):  # loading says what is wrong
        named = None
    return named if named in KV_FORMS else "auto"


def elsewhere(options: dict[str, Any]) -> dict[str, str]:
    """Return what ``options`` name that is not on this machine, by option.

    A session file may come from anybody: what it names must not be fetched unless the user names
    it, too.
    """
    paths: list[str] = []

    def collect(path: str) -> str:
        paths.append(path)
        return path

    _with_paths(options.get("policy", ""), collect)
    found: dict[str, str] = {}
    for name in ("model", "mmproj", "adapter", "gates", "policy"):
        named = paths if name == "policy" else [options[name]] if name in options else []
        if not all(map(_is_here, named)):
            found[name] = shown(options[name])
    return found


def _is_here(name: str) -> bool:
    try:
        return name == "random" or user_path(name).exists() or at_hand(name) != name
    except (MmkvError, OSError):
        return False


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name


def _with_paths(policy: str, change: Callable[[str], str]) -> str:
    """Return the text of a policy with ``change`` applied to the paths among its parameters."""
    if "=" not in policy:
        return policy
    from mmkv.engine.policies.preset import PolicyText
    from mmkv.engine.policies.registry import find_preset

    try:
        asked = PolicyText.parse(policy)
        preset = find_preset(asked.name)
    except PolicyError:  # making the policy will say so
        return policy
    given = {} if preset is None else {key: preset.parameters.get(key) for key in asked.given}
    if not any(one is not None and one.path for one in given.values()):
        return policy
    pairs = [
        f"{key}={change(value) if (one := given[key]) is not None and one.path else value}"
        for key, value in asked.given.items()
    ]
    return f"{asked.name}:{','.join(pairs)}"


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            raise SessionError(f"no session file at {path}; check the path")
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        if "incomplete" in str(error):
            raise SessionError(f"{path} is cut off; use a whole copy") from error
        raise SessionError(f"{path} is not a session file of mmkv; name another file") from error


KEPT = 5  # files, of all chats together
# A large cache takes seconds to write. Where that is to be noticed, it may take 1/SHARE of the
# time; the end of the chat saves what was left out.
SHARE, NOTICED_S = 20, 0.1


class Autosave:
    """Writes one session file a conversation, readable by the user alone.

    Args:
        extra: strings to keep in each file.
        warn: shows a line; called once when files cannot be written.
    """

    def __init__(self, extra: dict[str, str], warn: Callable[[str], None]) -> None:
        self._extra, self._warn = extra, warn
        # The file of each conversation, and how that stood when it was written.
        self._written: WeakKeyDictionary[Session, tuple[Path, Any]] = WeakKeyDictionary()
        self._rest_until, self._warned = 0.0, False

    def adopt(self, session: Session, path: Path) -> None:
        """Go on writing ``session`` to the autosaved file that it came from."""
        self._written[session] = path, _version(session)

    def save(self, session: Session, last: bool = False) -> None:
        """Write ``session`` if it has changed; while saving takes too much time only if ``last``.

        Never raises; the first failure is shown.
        """
        if session.closed or not session.history or self.path(session) is not None:
            return
        begun = time.monotonic()
        if begun < self._rest_until and not last:
            return
        try:
            self._write(session)
        except STOPS:
            raise
        except BaseException as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"mmkv: this chat is not kept for --resume: {one_line(as_exception(error))}"
                )
        now = time.monotonic()
        if now - begun > NOTICED_S:
            self._rest_until = now + SHARE * (now - begun)

    def path(self, session: Session) -> Path | None:
        """Return the file that holds ``session`` as it is now, if one does."""
        path, version = self._written.get(session, (None, None))
        return path if version == _version(session) else None

    def _write(self, session: Session) -> None:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, _ = self._written.get(session) or (_new_file(folder), None)
        session.save(path, self._extra)
        self._written[session] = path, _version(session)
        _drop_old(folder)


def latest() -> Path:
    """Return the chat that was written last. Raises SessionError: there is none."""
    found = _newest_first(_folder())
    if not found:
        raise SessionError(f"there is no chat to resume in {_folder()}; begin one with mmkv chat")
    return found[0]


def is_autosaved(path: Path) -> bool:
    """Return whether ``path`` is one of the autosaved files."""
    return path.resolve().parent == _folder().resolve()


def _version(session: Session) -> Any:
    return len(session.history), session.seen, session.evicted, session.budget


def _folder() -> Path:
    return state_folder() / "chats"


def _new_file(folder: Path) -> Path:
    stem, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", 0
    while (path := folder / f"{stem}-{number}.mmkv").exists():
        number += 1
    return path


def _newest_first(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("*.mmkv"):
        with suppress(OSError):  # another chat may have dropped it
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _drop_old(folder: Path) -> None:
    with suppress(OSError):
        for path in _newest_first(folder)[KEPT:]:
            path.unlink(missing_ok=True)


def checked_target(
    name: str,
    kind: str,
    is_own: Callable[[Path], bool],
    agreed: Callable[[Path], bool],
    force: str | None = None,
) -> Path:
    """Return the file that ``name`` may be written to: a new one, or one given up on purpose.

    ``~`` is the home. A link is followed, and only to a file that ``is_own``.

    Args:
        kind: what ``is_own`` recognises, for messages: "a session file".
        agreed: asks whether an existing file of that kind may be overwritten.
        force: None if anything that is a plain file may be overwritten (no link); else the words
            that would force it.

    Raises:
        InputError: a folder, device, pipe or dangling link; a file of another kind; not agreed.
    """
    try:
        path = user_path(name)
        linked = path.is_symlink()
        path = path.resolve() if linked else path
        mode = path.stat().st_mode if path.exists() else None
        parent = path.parent.is_dir()
    except (OSError, InputError) as error:
        raise InputError(f"not a usable file name: {name[:80]!r}; choose another") from error
    if linked and mode is None:
        raise InputError(f"{name} is a link to a file that is not there; choose another name")
    if not parent:
        raise InputError(f"there is no folder {path.parent}; make it, or choose another name")
    if mode is None:
        return path
    if not stat.S_ISREG(mode):
        raise InputError(f"{name} is {_described(mode)}; name a file")
    own = is_own(path)
    if linked and not own:
        raise InputError(f"{name} is a link to {path}, not {kind}; choose another name")
    if force is None:
        return path
    if not own:
        raise InputError(f"{name} is not {kind}; choose another name, or {force}")
    if not agreed(path):
        raise InputError(f"{name} exists and stays as it is; choose another name, or {force}")
    return path


def _described(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


_MARK = b"<title>What the cache kept</title>"


def is_report(path: Path) -> bool:
    """Return whether a file is a page of a trace, by its head."""
    return _MARK in _head(path, 2048)


def _head(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, none of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def report_target(
    name: str,
    agreed: Callable[[Path], bool] = lambda _: True,
    force: str | None = "move that file away first",
) -> Path:
    """Return where a page may be written: nowhere over a file of another kind; see
    :func:`checked_target`. Raises InputError.
    """
    return checked_target(name, "a page of mmkv explain", is_report, agreed, force)


def figures_folder(name: str) -> Path:
    """Return the folder for figures: one that is there, or can be made.

    Raises:
        InputError: nothing can be written there, or there is no matplotlib.
    """
    from mmkv.explain.figures import require_matplotlib

    require_matplotlib()
    path = user_path(name)
    there = os.path.exists(path)  # False, too, where the name is too long to be one
    if there and not path.is_dir():
        raise InputError(f"{name} is no folder; figures are several files, name a folder")
    if not there and not is_folder(path.absolute().parent):
        raise InputError(f"there is no folder {path.parent}; make it, or choose another name")
    return path


def write_report(trace: Trace, path: Path, compare: str | None = None) -> str:
    """Write the page and say so in one line. Raises InputError."""
    written = trace.report(path, compare)
    said = f"wrote {path} ({format_bytes(written.stat().st_size)}); open it in a browser"
    forgetting = trace.snapshot().forgetting()
    return f"{said}; {forgetting}" if forgetting else said


def write_figures(trace: Trace, folder: Path) -> str:
    """Write the PNG files and say so in one line. Raises InputError."""
    names = [path.name for path in trace.figures(folder)]
    return f"wrote {', '.join(names)} to {folder}"


_TITLE = "# Conversation with "
_SPEAKERS = {"system": "System", "user": "You", "assistant": "Reply", "tool": "Result"}


def spoken(message: Message) -> str:
    """Return a message as text; a picture or video is a word in brackets."""
    content: Any = message["content"]
    if isinstance(content, str):
        return content
    words = {"image": "[picture]", "video": "[video]"}
    parts = [words.get(part["type"]) or part.get("text", "") for part in content]
    return " ".join(part for part in parts if part)


def markdown(session: Session, model: str) -> str:
    """Return the whole conversation as a Markdown document."""
    blocks = [f"{_TITLE}{model}"]
    for message in session.history:
        blocks += [f"**{_SPEAKERS[message['role']]}**", spoken(message) or "(nothing)"]
    return "\n\n".join(blocks) + "\n"


def is_transcript(path: Path) -> bool:
    """Return whether a file is one that /export wrote, by its first line."""
    return _head(path, len(_TITLE)) == _TITLE.encode()


def export(session: Session, model: str, path: Path) -> None:
    """Write the conversation to ``path``; the old file stays until the new one is whole.

    Raises:
        InputError: it cannot be written.
    """
    try:
        with whole_file(path, private=True) as draft:
            draft.write_text(markdown(session, model), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another path") from error
