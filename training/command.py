"""What commands that train share: options made of settings, one line for what goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import typer

from mmkv.cli import arguments
from mmkv.engine.errors import MmkvError, one_line
from mmkv.engine.options import declared

_RESUME = "the same command with --resume continues from the last checkpoint in --output"


def options_of(
    name: str,
    holder: type[Any],
    build: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None,
    names: Sequence[str] = (),
    helps: Mapping[str, str] | None = None,
) -> arguments.Decorator:
    """Give a command the options of a dataclass; it gets that as its parameter ``name``.

    The model is the first of a command's options, and others follow what the command had before.

    Args:
        build: makes it of the options' values and those of the command's others; None: by its
            constructor.
        names: of the options; none: all.
        helps: another help of some.
    """
    known = declared(holder)
    known = {each: known[each] for each in names or known}
    added = {
        each: arguments.parameter(
            each, replace(made, help=(helps or {}).get(each, made.help)), bounded=False
        )
        for each, made in known.items()
    }
    first = [added[each] for each in ("model",) if each in added]
    rest = [each for each in added.values() if each not in first]
    made = build or partial(arguments.held, holder)
    return arguments.options_as(name, added, made, lambda own: [*first, *own, *rest])


def run_program(program: typer.Typer, name: str, given: Sequence[str] | None) -> int:
    """Run a program that trains, with one line for what goes wrong; return the exit code."""
    try:
        code = _run(program, name, given)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:  # typer makes this of a KeyboardInterrupt
        print(f"mmkv.training.{name}: interrupted; {_RESUME}", file=sys.stderr)
    return code


def _run(program: typer.Typer, name: str, given: Sequence[str] | None) -> int:
    from safetensors import SafetensorError

    try:
        shown = "mmkv distill" if name == "distill" else f"python -m mmkv.training.{name}"
        code = program(args=given, prog_name=shown, standalone_mode=False)
    except MmkvError as error:
        return _fail(name, str(error), 1)
    except arguments.CLICK_USAGE_ERROR as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        return _fail(name, f"{text.rstrip('.')}; see --help", 2)
    except (OSError, SafetensorError) as error:
        # A disk that is full, most of all; torch and safetensors have errors of their own for it.
        reason = getattr(error, "strerror", None) or error
        text = f"cannot read or write a file: {reason}; free space, then {_RESUME}"
        return _fail(name, text, 1)
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        return _fail(name, f"a checkpoint cannot be written; free space, then {_RESUME}", 1)
    return code if isinstance(code, int) else 0


def _fail(name: str, message: str, code: int) -> int:
    print(f"mmkv.training.{name}: error: {one_line(message)}", file=sys.stderr)
    return code
