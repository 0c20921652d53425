"""Names that programs and installed packages add to a built-in table, loaded when asked for.

A package adds a name by an entry point, a program by :meth:`Registry.register`. Built-in names
cannot be taken.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from mmkv.engine.errors import STOPS, MmkvError

T = TypeVar("T")
# What the command line and lmms-eval's name=value,name=value can carry; + is for suffixes.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def offered(group: str) -> EntryPoints:
    """Return a group's entry points of the installed packages, of those added just now, too.

    Reading them opens a file of every package; they are read anew only where ``sys.path`` or a
    folder of it has changed. A package that rewrites the entry points of an installed one in place
    (in an existing ``dist-info``) is not seen before the next start.
    """
    return _entry_points(tuple((path, _changed(path)) for path in sys.path)).select(group=group)


@lru_cache(maxsize=4)
def _entry_points(state: tuple[tuple[str, int], ...]) -> Any:
    return entry_points()  # not EntryPoints before Python 3.12, but as good


def _changed(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


class Registry(Generic[T]):
    """Values by name: built in, registered by a program, or offered by an installed package.

    Args:
        noun: what the values are, for messages.
        group: the entry points' group.
        built_in: the values that need no registration.
        error: what is raised for a name that cannot be had.
    """

    def __init__(
        self, noun: str, group: str, built_in: Mapping[str, T], error: type[MmkvError]
    ) -> None:
        self.noun, self.group, self.built_in, self.error = noun, group, built_in, error
        self.registered: dict[str, T] = {}

    def register(self, name: str, value: T) -> None:
        """Add ``value`` under ``name`` for this process; an earlier one of that name is replaced.

        Raises:
            the registry's error: a built-in name, or one that a command line cannot carry.
        """
        if name in self.built_in:
            raise self.error(
                f"{self.noun} {name!r} is one of mmkv's own; register it under another name"
            )
        if not _NAME.fullmatch(name):
            raise self.error(
                f"{name!r} cannot name a {self.noun}; use letters, digits and _ . - only"
            )
        self.registered[name] = value

    def find(self, name: str) -> T | None:
        """Return the value of ``name``, None where nobody offers one.

        Raises:
            the registry's error: a package's entry point does not load, takes a built-in name, or
            two packages offer one name.
        """
        if name in self.registered:
            return self.registered[name]
        offers = [entry for entry in offered(self.group) if entry.name == name]
        if name in self.built_in:
            if offers:
                raise self.error(self._clash(name, offers[0]))
            return self.built_in[name]
        if not offers:
            return None
        if len({entry.value for entry in offers}) > 1:
            packages = " and ".join(sorted({_package(entry) for entry in offers}))
            raise self.error(
                f"{self.noun} {name!r} is offered by {packages}; uninstall all but one"
            )
        entry = offers[0]
        try:
            value: T = entry.load()
        except STOPS:
            raise
        except BaseException as error:
            raise self.error(
                f"{self.noun} {name!r} of the package {_package(entry)} does not load "
                f"({entry.value}: {_first_line(error)}); mend, update or uninstall it"
            ) from error
        return value

    def names(self) -> list[str]:
        """Return every name that :meth:`find` may know, sorted but for the built-in ones first."""
        added = {*self.registered, *(entry.name for entry in offered(self.group))}
        return [*self.built_in, *sorted(added - set(self.built_in))]

    def describe_added(self) -> list[str]:
        """Return a line for each name that is not built in, and for each that is refused."""
        lines = [f"{self.noun} {name}: registered here" for name in sorted(self.registered)]
        for entry in sorted(offered(self.group), key=lambda entry: entry.name):
            if entry.name in self.built_in:
                lines.append(f"{self.noun} {entry.name}: refused, {self._clash(entry.name, entry)}")
            elif entry.name not in self.registered:
                lines.append(f"{self.noun} {entry.name}: of the package {_package(entry)}")
        return lines

    def _clash(self, name: str, entry: EntryPoint) -> str:
        return (
            f"the package {_package(entry)} offers a {self.noun} {name!r}, which is one of mmkv's "
            "own; uninstall the package or rename its entry point"
        )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(":")[0]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
