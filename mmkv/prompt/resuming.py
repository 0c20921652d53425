"""Go on with the rendering of a chat template behind messages that it has shown before.

A template is a program that reads a list of messages and writes text. What it will write for the
messages from number f on, given more behind them, is known without the earlier ones if

- each of its loops over the messages is begun with the same text before it and the same variables
  as last time, and its rounds before f have read nothing of messages from f on, nor how many there
  are, nor a clock: they would write the same again;
- what a round leaves for later ones, which Jinja has in namespaces alone, is as it was before f.

Both are looked at while the template runs, by stand-ins for the list (:class:`Messages`), for its
loops (:class:`MessageRounds`), and by filters that :mod:`mmkv.prompt.sandbox` puts in.
Whatever else is done with the list, or reads a message that is left out, raises :class:`Unknown`:
all messages are rendered then. So a template that looks back or ahead, that counts, or that shows
the last question in another way is slower, and never another text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.runtime import LoopContext, Macro

from mmkv.prompt.messages import Message, Unknown

# Filters that may be given the list itself: what they do with it is what they read of it.
READERS = frozenset(
    "count d default first last length list map reject rejectattr reverse select selectattr".split()
)
_SCALARS = (str, int, float, bool, type(None))
_ODD = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)
_MOST = 64  # items of a list or dict among a template's variables


@dataclass(frozen=True)
class Start:
    """How a loop over the messages was begun.

    Attributes:
        first: number of the first message that it comes to.
        text: that the template had written. state: its variables (:meth:`TemplateReading._state`).
    """

    first: int
    text: str
    state: Any


@dataclass(frozen=True)
class Boundary:
    """The beginning of a loop's round: characters written, and what the namespaces held."""

    written: int
    spaces: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Boundaries:
    """Where all loops of a template can be gone on from: before message number ``at``."""

    at: int
    loops: Mapping[int, tuple[Start, Boundary]]

    @property
    def written(self) -> int:
        """Characters of the text before it."""
        return [boundary.written for _, boundary in self.loops.values()][-1]


@dataclass
class _Loop:
    """A loop of the present rendering."""

    start: Start
    boundaries: dict[int, Boundary] = field(default_factory=dict)


class TemplateReading:
    """One rendering of a template, by what it reads of its messages.

    Args:
        items: messages by their numbers; count: of all of them, which may be more.
        wanted: numbers before which the rendering may be gone on from later.
        known: where this one goes on from; None: from the beginning.
        tools: the list that the template is given.

    Attributes:
        cut: how many characters of the text stood before the messages that were gone on from; None:
            it did not come to a loop over them.
    """

    def __init__(
        self,
        items: Mapping[int, Message],
        count: int,
        wanted: Collection[int] = (),
        known: Boundaries | None = None,
        tools: Any = None,
    ) -> None:
        self.items, self.count, self._wanted, self._known = items, count, wanted, known
        self._tools = tools
        self.messages = Messages(self, 0)
        self.spaces: list[Any] = []  # the template's namespaces, in the order of their making
        self.cut: int | None = None
        self._loops: dict[int, _Loop] = {}
        self._active: MessageRounds | None = None
        self._reach = 0.0  # how many messages the rounds so far have to do with
        self._broken = False

    def item(self, at: int) -> Message:
        """Return a message that the template reads. Raises Unknown: it is left out."""
        self.reads(at + 1)
        if at not in self.items:
            raise Unknown
        return self.items[at]

    def reads(self, messages: float) -> None:
        """Note that a round has to do with the first ``messages``, inf: all."""
        if self._active is not None:
            self._reach = max(self._reach, messages)

    def begin(self, ordinal: int, values: Messages, variables: Mapping[str, Any], text: str) -> Any:
        """Return what a loop goes through.

        Args:
            ordinal: which of the template's loops; variables: those at its top level;
                text: written so far.
        """
        if self._active is not None:  # the loop before was left half way
            self._broken = True
        if self._broken or ordinal in self._loops:
            return iter([*values])
        start = Start(values.start, text, self._state(variables))
        loop = self._loops[ordinal] = _Loop(start)
        first = start.first
        if self._known is not None:
            found = self._known.loops.get(ordinal)
            if found is None or start.state is None or found[0] != start:
                raise Unknown
            boundary, first = found[1], self._known.at
            for space, held in zip(self.spaces, boundary.spaces, strict=True):
                _held(space).clear()
                _held(space).update(held)
            self.cut = len(text)
        self._reach = 0.0
        self._active = MessageRounds(self, loop, first)
        return self._active

    def end(self) -> None:
        """Note that the loop is over."""
        self._active = None

    def round(self, ordinal: int, written: int) -> None:
        """Note that a round of a loop begins, after ``written`` characters."""
        loop = self._loops.get(ordinal)
        if self._active is None or self._active.loop is not loop:
            return
        at, state = self._active.at, loop.start.state
        if at in self._wanted and at >= self._reach and state is not None:
            # Namespaces that a round has made are gone with it.
            spaces = _plain(self.spaces[: len(state[0])])
            if spaces is not None:
                loop.boundaries[at] = Boundary(written, spaces)
        self.reads(at + 1)

    def boundaries(self) -> Boundaries | None:
        """Return where another rendering can go on from, the latest such place; None: nowhere.

        Raises:
            Unknown: this one has left out a loop with which it should have gone on.
        """
        if self._known is not None and self._loops.keys() != self._known.loops.keys():
            raise Unknown
        loops = [set(loop.boundaries) for loop in self._loops.values()]
        common = set.intersection(*loops) if loops else set()
        if self._broken or not common:
            return None
        at = max(common)
        made = {number: (loop.start, loop.boundaries[at]) for number, loop in self._loops.items()}
        # What is left out has to stand in one place: the last loop's.
        if any(len(start.text) != one.written for start, one in [*made.values()][:-1]):
            return None
        return Boundaries(at, made)

    def _state(self, variables: Mapping[str, Any]) -> Any:
        """Return namespaces and variables so that equal ones mean the same; None: not known."""
        spaces = _plain(self.spaces)
        found = {name: self._told(value) for name, value in variables.items()}
        if spaces is None or None in found.values():
            return None
        # With their types: True is not 1.
        typed = [{k: (type(v), v) for k, v in one.items()} for one in spaces]
        return typed, found

    def _told(self, value: Any) -> Any:
        """Return a value so that equal ones mean the same; None: that is not known."""
        if type(value) in _SCALARS:
            return type(value).__name__, value
        if isinstance(value, Messages):
            return "messages", value.start
        if isinstance(value, Macro):
            return "macro", value._func.__code__  # of one name there may be two
        if isinstance(value, Undefined):
            return ("undefined",)
        if value is self._tools:
            return ("tools",)
        if value is self.items.get(0):
            return ("first",)
        for number, space in enumerate(self.spaces):
            if space is value:
                return "namespace", number
        if type(value) in (list, tuple, dict) and len(value) <= _MOST:
            parts = [*value.items()] if isinstance(value, dict) else value
            told = [self._told(part) for part in parts]
            return None if None in told else (type(value).__name__, told)
        return None


class Messages(Sequence[Message]):
    """The messages from number ``start`` on, as a template sees them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, reading: TemplateReading, start: int) -> None:
        self._reading, self.start = reading, start

    def __len__(self) -> int:
        self._reading.reads(math.inf)
        return max(self._reading.count - self.start, 0)

    def __bool__(self) -> bool:
        some = self._reading.count > self.start
        self._reading.reads(self.start + 1 if some else math.inf)
        return some

    def __getitem__(self, at: Any) -> Any:
        reading = self._reading
        if isinstance(at, slice):
            if at.stop is None and at.step in (None, 1) and (at.start or 0) >= 0:
                return Messages(reading, self.start + (at.start or 0))
            return [*self][at]
        if at < 0 or self.start + at >= reading.count:
            at = range(len(self))[at]  # which says that it is read
        return reading.item(self.start + at)

    def __iter__(self) -> Iterator[Message]:
        self._reading.reads(math.inf)
        return iter([self._reading.item(at) for at in range(self.start, self._reading.count)])

    def __eq__(self, other: object) -> bool:
        return [*self] == ([*other] if isinstance(other, Messages) else other)

    def __repr__(self) -> str:
        return repr([*self])


class MessageRounds(Iterator[Message]):
    """A loop over the messages from number ``first`` on."""

    def __init__(self, reading: TemplateReading, loop: _Loop, first: int) -> None:
        self._reading, self.loop, self.at = reading, loop, first - 1

    def __next__(self) -> Message:
        if self.at + 1 >= self._reading.count:
            self._reading.end()
            raise StopIteration
        self.at += 1
        if self.at not in self._reading.items:
            raise Unknown
        return self._reading.items[self.at]  # which is read when its round begins

    def told(self, attribute: str, undefined: Any) -> Any:
        """Return what ``loop`` says of the round, as a loop over all messages would."""
        reading, index = self._reading, self.at - self.loop.start.first
        last = self.at + 1 == reading.count
        match attribute:
            case "first":
                return index == 0
            case "index":
                return index + 1
            case "index0":
                return index
            case "previtem":
                return (
                    reading.item(self.at - 1) if index else undefined("there is no previous item")
                )
            # What the last round is told is no other rendering's: it never goes on behind it.
            case "last":
                return last
            case "nextitem":
                return undefined("there is no next item") if last else reading.item(self.at + 1)
            case "depth" | "depth0":
                return 1 if attribute == "depth" else 0
        raise Unknown


def loops_of(tree: nodes.Template) -> list[nodes.For]:
    """Return the loops of a template that can be gone on with, if all that it does allows that.

    They stand at its top level, or in a choice there: what they can see and change is known.
    """
    named = sum(node.name == "loop" for node in tree.find_all(nodes.Name))
    of_loops = sum(
        isinstance(node.node, nodes.Name) and node.node.name == "loop"
        for node in tree.find_all(nodes.Getattr)
    )
    drawn = any(node.name == "random" for node in tree.find_all(nodes.Filter))
    odd = any(tree.find(kind) for kind in _ODD)
    if odd or drawn or named > of_loops:
        return []
    return [*_at_top(tree.body)]


def _at_top(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.If):
            for part in (node.body, *(one.body for one in node.elif_), node.else_):
                yield from _at_top(part)
        elif isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
            yield from () if node.test or node.recursive or node.else_ else (node,)


def rounds_of(value: Any) -> MessageRounds | None:
    """Return what a template's ``loop`` goes through, if it is over the messages."""
    found = value._iterable if type(value) is LoopContext else None
    return found if isinstance(found, MessageRounds) else None


def _held(space: Any) -> dict[str, Any]:
    return space._Namespace__attrs


def _plain(spaces: Sequence[Any]) -> tuple[dict[str, Any], ...] | None:
    """Return what namespaces hold; None: more than plain values."""
    found = tuple(dict(_held(space)) for space in spaces)
    plain = all(type(value) in _SCALARS for one in found for value in one.values())
    return found if plain else None
