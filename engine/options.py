"""Options that are fields of a dataclass: each is declared once, with its default, bounds and help.

Engine, server, chat, training and evaluation declare theirs so; commands are built from the fields.
Nothing here imports torch: ``mmkv --help`` is made of it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args


@dataclass(frozen=True)
class Option:
    """What a field has beside its name and type.

    Attributes:
        help: one line.
        default: the field's, or the text of which ``read`` makes it; MISSING: it has to be given.
        kind: the type of its text on a command line, as typer takes it; None: the field's type.
        read: makes the field's value of that text. Raises MmkvError.
        name: of the option; None: the field's. flags: how it is written, where that differs.
        panel: the heading of the help that it stands under; None: the command's own.
        least, most: bounds of a number; above: a bound that it may not reach.
        choices: the texts that it may be; asked: what a message asks for, in place of these bounds.
        variable: of the environment, which gives it, too.
        field: the name of its field, once :func:`declared` has read it.
    """

    help: str
    default: Any = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    name: str | None = None
    flags: tuple[str, ...] = ()
    panel: str | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    asked: str = ""
    variable: str | None = None
    field: str = ""

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return NoneType in get_args(self.kind)

    @property
    def type(self) -> Any:
        """The type of its text where it is not None."""
        kinds = {*get_args(self.kind)} - {NoneType} if self.optional else {self.kind}
        return kinds.pop()


def option(help: str, default: Any = None, shown: bool = True, **more: Any) -> Any:
    """Return a field with an option.

    Args:
        shown: whether a repr shows the value; not of a secret.
        more: as :class:`Option` has it.
    """
    made = Option(help, default, **more)
    about: dict[str, Any] = {"repr": shown, "metadata": {"option": made}}
    if (read := made.read) is None:
        return dataclasses.field(default=default, **about)
    return dataclasses.field(default_factory=lambda: read(default), **about)


def declared(holder: type[Any]) -> dict[str, Option]:
    """Return the options that the fields of a dataclass have, by name, in the fields' order.

    Each has its ``field`` and ``kind``.
    """
    found = {}
    for field in dataclasses.fields(holder):
        made: Option | None = field.metadata.get("option")
        if made is None:
            continue
        kind = made.kind
        if kind is None:  # annotations are texts; those that name what is not imported have a kind
            kind = eval(str(field.type), vars(sys.modules[holder.__module__]))
        found[made.name or field.name] = dataclasses.replace(made, field=field.name, kind=kind)
    return found
