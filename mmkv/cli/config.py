"""Defaults of ``mmkv chat`` from a file of the user: ``~/.config/mmkv.toml``."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from typer.core import TyperCommand

from mmkv.cli.arguments import on_command_line
from mmkv.engine.errors import InputError, one_line
from mmkv.engine.paths import open_regular
from mmkv.resources import config_file

# What belongs to one call alone.
_CALL = {
    *("prompt", "interactive", "image", "video", "load", "resume", "save", "cost", "raw", "help")
}
# Options of which a call has one; the command line's replaces the file's.
_EITHER = (("budget", "budget_bytes", "budget_fraction"), ("fps", "num_frames"))


class ChatCommand(TyperCommand):
    """A command whose defaults the user's file changes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line over the file's values. Raises InputError for a broken file."""
        if "--help" not in args:
            ctx.default_map = {**(ctx.default_map or {}), **defaults(self.callback)}
        rest = super().parse_args(ctx, args)
        for names in _EITHER:
            if any(on_command_line(ctx, name) for name in names):
                for name in names:
                    if not on_command_line(ctx, name):
                        ctx.params[name] = None
        return rest


def defaults(chat: Callable[..., Any] | None) -> dict[str, Any]:
    """Read the user's file: option -> value, checked against the parameters of ``mmkv chat``.

    Raises:
        InputError: it cannot be read, or names or values are none of these options.
    """
    file, known = config_file(), _options(chat)
    found = {}
    for key, value in _read(file).items():
        name = key.replace("-", "_")
        if name not in known:
            raise InputError(f"{file}: no option {key!r}; there are {', '.join(sorted(known))}")
        if not _fits(value, known[name]):
            raise InputError(f"{file}: {key} is {value!r}; give {_WORDS[known[name]]}")
        found[name] = value
    return found


def described(chat: Callable[..., Any]) -> str:
    """Say what the file holds, or what is wrong with it, for ``mmkv env``."""
    file = config_file()
    try:
        held = defaults(chat)
    except InputError as error:
        return f"config file: {one_line(str(error))}"
    if not file.exists():
        return f"config file: {file} (absent)"
    values = ", ".join(f"{name} {value}" for name, value in held.items())
    return f"config file: {file} ({values or 'empty'})"


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    list: 'a list of texts, such as ["###"]',
}


def _options(chat: Callable[..., Any] | None) -> dict[str, type]:
    """Return what the file may name, with the type of each value."""
    assert chat is not None
    found = {}
    for name, parameter in inspect.signature(chat).parameters.items():
        kinds = parameter.annotation
        if get_origin(kinds) is Annotated:
            kinds = get_args(kinds)[0]
        (kind,) = {*(get_args(kinds) or (kinds,))} - {NoneType}
        kind = get_origin(kind) or kind
        if kind in _WORDS and name not in _CALL:
            found[name] = kind
    return found


def _fits(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _read(file: Path) -> dict[str, Any]:
    try:
        with open_regular(file) as opened:
            return tomllib.load(opened)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; mend or remove it") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise InputError(f"{file} is not valid TOML ({error}); mend that line") from error
