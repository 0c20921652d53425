"""Options that several commands share, for typer, and the user's file with defaults of them.

Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, replace
from functools import partial, wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from mmkv.chat.options import ChatOptions
from mmkv.engine.budget import Budget, parse_bytes
from mmkv.engine.config import DEFAULT_BUDGET, EngineConfig, options
from mmkv.engine.errors import BudgetError, InputError, MmkvError, SessionError, one_line
from mmkv.engine.options import Option, declared
from mmkv.engine.paths import open_regular, user_path
from mmkv.loading import UsageError
from mmkv.resources import (
    BUNDLED_MODEL,
    bundled_model,
    config_file,
    fitted_gates,
    gates_source,
)
from mmkv.server.settings import ServerSettings

CACHE, SERVER = "Model and cache", "Server"

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes or progress.")]

# typer carries its own copy of click in some versions and uses the package in others; the class
# that both derive usage mistakes from is the base of typer's own public one.
CLICK_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

# The budget has an option for each unit; kv_limit is for programs.
_BUDGETS = {
    "budget": Annotated[
        float | None,
        typer.Option(
            help="Entries to keep per layer and KV head, on average "
            f"(default {DEFAULT_BUDGET}; no bound without gates and policy).",
            rich_help_panel=CACHE,
        ),
    ],
    "budget_bytes": Annotated[
        str | None,
        typer.Option(
            help="Budget as memory, for example 64MiB; recommended, as it also picks --kv.",
            rich_help_panel=CACHE,
        ),
    ],
    "budget_fraction": Annotated[
        float | None,
        typer.Option(help="Budget as a share of the tokens seen.", rich_help_panel=CACHE),
    ],
}
_NOT_HERE = ("kv_limit",)
_LATEST, _ELSEWHERE = "mmkv.latest", "mmkv.elsewhere"


def take_saved_options(context: typer.Context, path: str | None) -> str | None:
    """Take model, policy and gates of a session file as defaults of what is not given."""
    if path is not None:
        from mmkv.chat.saved import chat_options, elsewhere

        stored = chat_options(user_path(path))
        context.meta[_ELSEWHERE] = elsewhere(stored)
        context.default_map = {**(context.default_map or {}), **stored}
    return path


def take_latest_options(context: typer.Context, wanted: bool) -> bool:
    """Do as :func:`take_saved_options` for the conversation that was written last."""
    if wanted:
        from mmkv.chat.saved import latest

        context.meta[_LATEST] = str(latest())
        take_saved_options(context, context.meta[_LATEST])
        del context.meta[_ELSEWHERE]  # the user's own chat: its model was named then
    return wanted


def require_named(context: typer.Context, path: str) -> None:
    """Check that the user names what a session file names and this machine does not have.

    Raises:
        SessionError: a model or gates that would be fetched because a file says so.
    """
    for name, value in context.meta.get(_ELSEWHERE, {}).items():
        if on_command_line(context, name):
            continue
        option = value if name == "model" else f"--{name} {value}"
        raise SessionError(
            f"{path} names the {name} {value}, which is not on this machine, and a file does not "
            f"decide what is fetched; if you trust it, name it: mmkv chat {option} --load {path}"
        )


def latest_chat(context: typer.Context) -> str:
    """Return the file that ``--resume`` found. Raises UsageError beside ``--load``."""
    if context.params.get("load") is not None:
        raise UsageError("--load and --resume exclude each other; give one")
    return str(context.meta[_LATEST])


def budget_given(context: typer.Context) -> bool:
    """Return whether the command line itself names a budget."""
    return any(on_command_line(context, name) for name in (*_BUDGETS, "risk", "budget_max"))


def on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether an option was given there, not in a file and not by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Placed = Callable[[list[inspect.Parameter]], list[inspect.Parameter]]


def engine_options(model: str = "argument") -> Decorator:
    """Give a command an option for each field of EngineConfig; it gets them as ``engine``.

    Args:
        model: ``argument`` (the command's first) or ``option`` (``--model``).
    """
    added: dict[str, inspect.Parameter] = {}
    for name, setting in options().items():
        if name == "budget":
            for unit, annotation in _BUDGETS.items():
                added[unit] = _parameter(unit, annotation, None)
        elif name not in _NOT_HERE:
            added[name] = parameter(name, setting, CACHE, bounded=False)
    first = []
    if model == "argument":
        taken = typer.Argument(help=options()["model"].help)
        added["model"] = _parameter("model", Annotated[str | None, taken], None)
        first = [added["model"]]
    rest = [one for one in added.values() if one not in first]
    return options_as("engine", added, _config, lambda own: [*first, *own, *rest])


def chat_options(*names: str) -> Decorator:
    """Give a command options of ChatOptions, these or all; it gets them as ``options``."""
    known = _declared(ChatOptions)
    added = {name: known[name] for name in names or known}
    return options_as("options", added, partial(held, ChatOptions), _behind_engine(added))


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of ServerSettings; it gets them as ``settings``."""
    added = _declared(ServerSettings, SERVER)
    build = partial(held, ServerSettings)
    return options_as("settings", added, build, _behind_engine(added))(command)


def _behind_engine(added: dict[str, inspect.Parameter]) -> Placed:
    """Return what puts options behind the context and the engine of a command."""

    def placed(own: list[inspect.Parameter]) -> list[inspect.Parameter]:
        first = [one for one in own if one.name in ("context", "engine")]
        return [*first, *added.values(), *(one for one in own if one not in first)]

    return placed


def _declared(holder: type[Any], panel: str | None = None) -> dict[str, inspect.Parameter]:
    """Return typer's parameter of each option that a dataclass declares."""
    return {name: parameter(name, made, panel) for name, made in declared(holder).items()}


def parameter(
    name: str, made: Option, panel: str | None = None, bounded: bool = True
) -> inspect.Parameter:
    """Return typer's parameter for an option.

    Args:
        panel: the heading of the help, where the option names none.
        bounded: whether typer checks the bounds of numbers; otherwise what reads the value does.
    """
    flags, dashed = made.flags, name.replace("_", "-")
    if made.kind is bool and not flags:
        flags = (f" /--no-{dashed}",) if made.default else (f"--{dashed}",)
    given = typer.Option(
        *flags,
        help=made.help,
        min=made.least if bounded else None,
        max=made.most if bounded else None,
        envvar=made.variable,
        rich_help_panel=made.panel or panel,
    )
    needed = made.default is MISSING
    default = inspect.Parameter.empty if needed else made.default
    return _parameter(name, Annotated[made.kind, given], default)


def options_as(
    name: str,
    added: dict[str, inspect.Parameter],
    build: Callable[[dict[str, Any], dict[str, Any]], Any],
    placed: Placed,
) -> Decorator:
    """Return what gives a command options in place of its parameter ``name``.

    Args:
        build: makes of their values, and those of the command's other options, what the command
            gets for that parameter.
        placed: puts them among the command's other parameters.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        """Return it with the options ``added`` in place of its parameter ``name``, for typer."""
        # Evaluated here: typer would look the names up in the module of the wrapper.
        signature = inspect.signature(command, eval_str=True)
        own = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != name
        ]
        parameters = placed(own)

        @wraps(command)
        def wrapper(**given: Any) -> Any:
            built = build({name: given.pop(name) for name in added}, given)
            return command(**{name: built}, **given)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        del wrapper.__wrapped__  # or inspect would show the signature of what is wrapped
        return wrapper

    return decorate


def option(name: str) -> Any:
    """Return typer's option for a field of EngineConfig."""
    return typer.Option(help=options()[name].help, rich_help_panel=CACHE)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _config(given: dict[str, Any], others: dict[str, Any]) -> EngineConfig:
    """Return the config of what was given. Raises UsageError, GateError, what EngineConfig does."""
    if others.get("shared_budget") is not None and budget_given(others["context"]):
        raise UsageError(
            "--shared-budget takes the place of --budget, --budget-bytes, --budget-fraction and "
            "--budget-max; give one of them, and --shared-by-risk instead of --risk"
        )
    units = [name for name in _BUDGETS if given[name] is not None]
    if len(units) > 1:
        raise UsageError(
            "--budget, --budget-bytes and --budget-fraction exclude each other; give one"
        )
    named = {unit: given.pop(unit) for unit in _BUDGETS}
    budget: Budget | float | str | None = None
    if named["budget_bytes"] is not None:
        try:
            budget = Budget.bytes(parse_bytes(named["budget_bytes"]))
        except BudgetError as error:
            raise UsageError(str(error)) from error
    elif named["budget_fraction"] is not None:
        budget = Budget.fraction(named["budget_fraction"])
    elif named["budget"] is not None:
        budget = named["budget"]
    if given.get("gates") is not None:
        given["gates"] = gates_source(given["gates"])
    if given.get("model") == BUNDLED_MODEL and not os.path.exists(BUNDLED_MODEL):
        given["model"] = str(bundled_model())
    made = EngineConfig(**given, budget=budget)
    if made.gates == "fit" and not os.path.exists("fit"):
        made = replace(made, gates=fitted_gates(made.checkpoint()))
    return made


def held(holder: type[Any], given: dict[str, Any], _: dict[str, Any]) -> Any:
    """Return the dataclass of what was given. Raises UsageError."""
    read, known = {}, declared(holder)
    for name, value in given.items():
        made = known[name]
        try:
            read[made.field] = value if made.read is None else made.read(value)
        except MmkvError as error:
            flag = f"--{name.replace('_', '-')}"
            said = str(error)
            raise UsageError(said if said.startswith(flag) else f"{flag}: {said}") from error
    return holder(**read)


# Defaults of ``mmkv chat`` from a file of the user: ``~/.config/mmkv.toml``.

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
