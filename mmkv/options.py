"""Options of commands that are fields of a dataclass: each is declared once, beside its value.

Nothing here imports torch: ``mmkv --help`` is made of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CommandOption:
    """How a command line gives a field its value.

    Attributes:
        kind: the type of its text, as typer takes it; default: where it is not given.
        name: of the option; None: the field's. flags: how it is written, where that differs.
        panel: the heading of the help that it stands under; None: the command's own.
        least, most: bounds of a number; variable: of the environment, which gives it, too.
        read: makes the field's value of it. Raises MmkvError.
    """

    help: str
    kind: Any
    default: Any = None
    name: str | None = None
    flags: tuple[str, ...] = ()
    panel: str | None = None
    least: float | None = None
    most: float | None = None
    variable: str | None = None
    read: Callable[[Any], Any] = lambda value: value


def option(help: str, kind: Any, default: Any = None, shown: bool = True, **more: Any) -> Any:
    """Return a field with an option; the field's default is made of the option's by ``read``.

    Args:
        shown: whether a repr shows the value; not of a secret.
        more: as :class:`CommandOption` has it.
    """
    made = CommandOption(help, kind, default, **more)
    return dataclasses.field(
        default_factory=lambda: made.read(default), repr=shown, metadata={"option": made}
    )


def declared(holder: type[Any]) -> dict[str, tuple[str, CommandOption]]:
    """Return the options that the fields of a dataclass have.

    Returns:
        name of the option -> name of the field and the option, in the order of the fields.
    """
    found = {}
    for field in dataclasses.fields(holder):
        made = field.metadata.get("option")
        if made is not None:
            found[made.name or field.name] = (field.name, made)
    return found
