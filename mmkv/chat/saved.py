"""What a session file says about itself, read without a model and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import InputError, PolicyError, SessionError, shown
from mmkv.engine.paths import user_path

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.config import EngineConfig

_KEY = "mmkv.chat"
# Options of the command line without which a session file cannot go on.
_KEPT = ("model", "policy", "lookahead", "evict_every", "gates", "dtype", "weights", "kv")


def chat_extra(engine: Engine, config: EngineConfig, model: str) -> dict[str, str]:
    """Return what a chat adds to its session files: the options to open them again with."""
    values = {name: getattr(config, name) for name in _KEPT}
    values["model"], values["dtype"] = model, str(engine.dtype).removeprefix("torch.")
    values["kv"] = engine.cache.pool.form.name  # it may have been chosen
    for name in ("model", "gates"):
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
        return str(_metadata(path).get("format", "")).startswith("mmkv-session")
    except SessionError:
        return False


def chat_options(path: Path) -> dict[str, Any]:
    """Return the options that a chat stored in a session file.

    The form of the cache is there whoever wrote it: a file fits no other one.

    Raises:
        SessionError: there is no file, it is no session file, or what it says of options is
            damaged.
    """
    if not is_session(path):
        _metadata(path)
        raise SessionError(f"{path} is not a session file of mmkv; name another file")
    from mmkv.dialogue_schema import Damage, parse_options

    try:
        return {"kv": _form(path), **parse_options(_metadata(path).get("extra", ""), _KEY)}
    except Damage as error:
        raise SessionError(
            f"the options in the session file {path} are damaged ({error}); use a copy, or begin a "
            "new session"
        ) from error


def _form(path: Path) -> str:
    """Return the form that a session file says it has; ``auto`` is that of files without one."""
    from mmkv.engine.config import KV_FORMS

    try:
        named = json.loads(_metadata(path).get("identity", "{}")).get("kv")
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
    for name in ("model", "gates", "policy"):
        named = paths if name == "policy" else [options[name]] if name in options else []
        if not all(map(_is_here, named)):
            found[name] = shown(options[name])
    return found


def _is_here(name: str) -> bool:
    try:
        return name == "random" or user_path(name).exists()
    except (InputError, OSError):
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
        raise SessionError(f"{path} is not a session file of mmkv; name another file") from error
