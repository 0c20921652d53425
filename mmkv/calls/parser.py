"""Read a reply while it grows: its thought, its text, and the functions that it calls.

A reply comes in pieces that end anywhere. What may still turn out to be a marker is held back; no
marker is ever part of a text. A call is one where its function is one of those that the model was
told of: other texts between the markers are text. How a model writes them is a
:class:`ToolFormat`; those that are known stand in :mod:`mmkv.calls.formats`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from mmkv.calls.tools import ToolCall, call_id

if TYPE_CHECKING:
    from mmkv.calls.tools import Tool, ToolUse


@dataclass(frozen=True)
class ThoughtPiece:
    """A piece of the thought before the answer."""

    text: str


@dataclass(frozen=True)
class TextPiece:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; ``index``: the reply's first is 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallPiece:
    """A piece of the latest call's arguments, JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The latest call is complete. One that is cut off has none."""

    index: int


Event = ThoughtPiece | TextPiece | CallStart | CallPiece | CallEnd


@dataclass(frozen=True)
class ThoughtMarks:
    """What stands around a thought at the beginning of a reply."""

    open: str
    close: str


# Those that chat templates are known to use; the first that a template names is it.
THOUGHT_MARKS = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("◁think▷", "◁/think▷"),
)


def thought_marks(source: str | None) -> ThoughtMarks | None:
    """Return the marks of thoughts that a chat template names, None where it names none."""
    return next((one for one in THOUGHT_MARKS if one.close in (source or "")), None)


class JsonSpan:
    """Finds the end of one JSON object, array, text or plain value in a text that grows."""

    _OUTSIDE, _QUOTED = re.compile(r'[{}\[\]"]'), re.compile(r'["\\]')
    _PLAIN = re.compile(r"[\s,}\]]")

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self._plain = self._begun = False

    @property
    def quoted(self) -> bool:
        """Whether it stands inside a text."""
        return self._quoted

    def end(self, text: str) -> int:
        """Take more text; return where in it the value ends, -1 where it does not."""
        if not text:
            return -1
        if not self._begun:
            self._begun, self._plain = True, text[0] not in '{["'
        if self._plain:
            found = self._PLAIN.search(text)
            return -1 if found is None else found.start()
        at, self._escaped = int(self._escaped), False
        while found := (self._QUOTED if self._quoted else self._OUTSIDE).search(text, at):
            at, mark = found.end(), found[0]
            if mark == "\\":
                self._escaped = at == len(text)
                at += 1
                continue
            if mark == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if mark in "{[" else -1
            if not self._quoted and not self._depth:
                return at
        return -1


class CallCounter:
    """Makes the events of a reply's calls: counts them, and gives each an id.

    Args:
        call_id: makes an id of hexadecimal digits; seed: those are made of it, or of chance.
    """

    def __init__(self, call_id: Callable[[str], str], seed: str | None) -> None:
        self._call_id, self._seed, self.count = call_id, seed or secrets.token_hex(16), 0

    def start(self, name: str) -> CallStart:
        """Return the event of another call."""
        digits = hashlib.sha256(f"{self._seed}:{self.count}".encode()).hexdigest()
        self.count += 1
        return CallStart(self.count - 1, self._call_id(digits), name)

    def piece(self, text: str) -> CallPiece:
        """Return the event of a piece of its arguments."""
        return CallPiece(self.count - 1, text)

    def end(self) -> CallEnd:
        """Return the event of its end."""
        return CallEnd(self.count - 1)


class CallReader(ABC):
    """Reads the calls behind one opening marker.

    Args:
        tools: the functions that may be called, by name.

    Attributes:
        text: all that it was given.
        rest: what follows the calls, once they are over; None before.
        wrong: whether what was given is no call after all.
    """

    def __init__(self, tools: Mapping[str, Tool], calls: CallCounter) -> None:
        self.tools, self.calls = tools, calls
        self.text = self._held = ""
        self.rest: str | None = None
        self.wrong = False

    def push(self, text: str) -> list[Event]:
        """Take more of the reply."""
        self.text += text
        self._held += text
        events: list[Event] = []
        while self.rest is None and not self.wrong and self._step(events):
            pass
        return events

    @abstractmethod
    def _step(self, events: list[Event]) -> bool:
        """Read on in what is held; whether there is more to read in it now."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """End where the reply ends; ``wrong`` if no call has begun."""


# Writes a text in a grammar of llguidance: quoted, or as a special token by its number.
Spell = Callable[[str], str]
MOST_CALLS = 16  # in one reply that has to call


class ToolFormat(ABC):
    """One way to write calls.

    Attributes:
        openings: texts that begin a call, the usual one first; only_first: whether they do so only
            at the beginning of a reply.
        between: characters that stand between calls; separator: the text that does.
        listed: whether one opening is followed by all calls.
        special: of its marks, those that some tokenizers have as special tokens, which are not
            shown otherwise.
        shown_by: marks, of which a chat template has all of one group.
    """

    name: ClassVar[str]
    openings: ClassVar[tuple[str, ...]]
    only_first: ClassVar[bool] = False
    between: ClassVar[str] = string.whitespace
    separator: ClassVar[str] = "\n"
    listed: ClassVar[bool] = False
    special: ClassVar[tuple[str, ...]] = ()
    shown_by: ClassVar[tuple[tuple[str, ...], ...]]

    @classmethod
    def writes(cls, source: str) -> bool:
        """Whether a chat template's calls look so."""
        return any(all(mark in source for mark in marks) for marks in cls.shown_by)

    @abstractmethod
    def reader(self, tools: Mapping[str, Tool], calls: CallCounter, opening: str) -> CallReader:
        """Return what reads on behind ``opening``."""

    @abstractmethod
    def body(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> list[str] | None:
        """Return rules of a grammar: ``body`` is what stands behind ``opening``.

        None where that opening is followed by what has no grammar.
        """

    def call_id(self, digits: str) -> str:
        """Return the id of a call, of at least 24 hexadecimal digits."""
        return call_id(digits)

    def unfollowed(self, tool: Tool) -> str | None:
        """Return what a function's schema asks for that a call of this form may ignore."""
        return None

    def grammar_behind(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> str | None:
        """Return the grammar of what follows an opening, as :meth:`body` does."""
        rules = self.body(tools, opening, spell, parallel)
        return None if rules is None else "\n".join(["start: body", *rules])

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """Return the grammar of a reply that is one call, or several."""
        rules = self.body(tools, self.openings[0], spell, parallel)
        assert rules is not None
        call = f"{spell(self.openings[0])} body"
        more = f" ({spell(self.separator)} {call}){{0,{MOST_CALLS - 1}}}"
        several = parallel and not self.listed
        return "\n".join([f"start: {call}{more if several else ''}", *rules])


class ReplyParser:
    """Takes a reply apart: thought, text, calls.

    Models repeat the marks of thoughts, also where the prompt has written them: up to the first
    word of the answer an opening begins the thought or goes on with it, a closing ends it.

    Args:
        format: how the model writes calls; use: what it may call; either may be None.
        marks: of thoughts; None: the model has none.
        opened: whether the prompt ends with the opening of a thought.
        seed: text that the ids of its calls are made of; None: chance.
        begun: text of the reply that stands in the prompt, before what is taken apart.
    """

    def __init__(
        self,
        format: ToolFormat | None = None,
        use: ToolUse | None = None,
        marks: ThoughtMarks | None = None,
        opened: bool = False,
        seed: str | None = None,
        begun: str = "",
    ) -> None:
        tools = () if format is None or use is None else use.callable
        self._format, self._tools = format, {one.name: one for one in tools}
        self._openings = format.openings if format is not None and tools else ()
        self._calls = CallCounter(call_id if format is None else format.call_id, seed)
        self._marks, self._reader = marks, cast("CallReader | None", None)
        self._mode: Literal["begin", "thought", "text", "call"] = "text"
        if marks is not None:
            self._mode = "thought" if opened else "begin"
        self._held = self._gap = ""
        self._skips = opened  # blank space that comes next
        self._said = self._thought = False  # text that is not blank; anything of a thought
        if begun:
            if marks is not None:
                opened |= begun.lstrip().startswith(marks.open)
                over: Literal["begin", "text"]
                over = "begin" if begun.rstrip().endswith(marks.close) else "text"
                self._mode = "thought" if opened and marks.close not in begun else over
                self._skips = begun.rstrip().endswith((marks.open, marks.close))
            self._said = self._mode == "text"

    @property
    def thinks(self) -> bool:
        """Whether it stands in a thought."""
        return self._mode == "thought"

    def push(self, text: str) -> list[Event]:
        """Take more of the reply; return what is certain now."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self, cut: bool = False, stopped_by: str | None = None) -> list[Event]:
        """End the reply.

        Args:
            cut: whether it was cut off, so that a call may be incomplete.
            stopped_by: the stop text that cut it off, which may lie in a mark: what of the mark
                stands before it is no text.
        """
        events: list[Event] = []
        held, self._held = self._without_mark(stopped_by or ""), ""
        if self._mode == "thought":
            self._say(events, held, ThoughtPiece)
        elif self._reader is not None:
            events += self._reader.finish()
            if self._reader.wrong and not cut:
                self._say(events, self._gap + self._reader.text)
            elif self._reader.rest:
                self._say(events, self._reader.rest)
            self._reader = None
        else:
            self._say(events, held)
        return events

    def _without_mark(self, stopped_by: str) -> str:
        """Return what is held, without the beginning of a mark that a stop text goes on with."""
        marks = list(self._openings if self._mode != "thought" else ())
        if self._marks is not None and self._mode != "text":
            marks.append(self._marks.close if self._mode == "thought" else self._marks.open)
        for mark in marks if stopped_by and self._reader is None else ():
            begun = open_tail(self._held, mark)
            rest = mark[begun:]
            if begun and (rest.startswith(stopped_by) or stopped_by.startswith(rest)):
                return self._held[:-begun].rstrip()
        return self._held

    def _step(self, events: list[Event]) -> bool:
        if not self._held:
            return False
        if self._reader is not None:
            return self._read_call(self._reader, events)
        if self._skips:
            self._held = self._held.lstrip(self._between if self._calls.count else None)
            self._skips = not self._held
        if self._mode == "begin":
            return self._begin()
        return self._read_thought(events) if self._mode == "thought" else self._read_text(events)

    @property
    def _between(self) -> str | None:
        return None if self._format is None else self._format.between

    def _begin(self) -> bool:
        assert self._marks is not None
        bare = self._held.lstrip()
        for mark in (self._marks.open, self._marks.close):
            if bare.startswith(mark):
                self._held, self._skips = bare[len(mark) :], True
                if mark == self._marks.open:
                    self._mode, self._skips = "thought", not self._thought
                    self._held = "\n" * self._thought + self._held
                return True
            if mark.startswith(bare):
                return False
        self._mode = "text"
        return True

    def _read_thought(self, events: list[Event]) -> bool:
        assert self._marks is not None
        marks = (self._marks.open, self._marks.close)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            self._say(events, self._certain(marks, True), ThoughtPiece)
            return False
        at, mark = min(found)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        if mark == self._marks.open:
            self._say(events, before, ThoughtPiece)
            self._skips = not self._thought
        else:
            self._say(events, before.rstrip(), ThoughtPiece)
            self._mode, self._skips = "begin", True
        return True

    def _read_text(self, events: list[Event]) -> bool:
        found = [(at, one) for one in self._openings if (at := self._held.find(one)) >= 0]
        if found and self._format is not None and self._format.only_first:
            found = [(at, one) for at, one in found if not (self._said or self._held[:at].strip())]
        if not found:
            self._say(events, self._certain(self._openings, bool(self._openings)))
            return False
        assert self._format is not None
        at, opening = min(found, key=lambda one: (one[0], -len(one[1])))
        text = self._held[:at].rstrip()
        self._gap = self._held[len(text) : at] + opening
        self._say(events, text)
        self._held = self._held[at + len(opening) :]
        self._reader = self._format.reader(self._tools, self._calls, opening)
        return True

    def _read_call(self, reader: CallReader, events: list[Event]) -> bool:
        text, self._held = self._held, ""
        events += reader.push(text)
        if reader.wrong:
            self._say(events, self._gap)
            self._held, self._reader = reader.text, None
            return True
        if reader.rest is not None:
            self._held, self._reader, self._skips = reader.rest, None, True
            return True
        return False

    def _certain(self, marks: Iterable[str], blanks: bool) -> str:
        """Take what is held and cannot be the beginning of a mark, or blank space before one."""
        text = self._held
        keep = max((open_tail(text, mark) for mark in marks), default=0)
        certain = text[: len(text) - keep]
        if blanks:
            certain = certain.rstrip()
        self._held = text[len(certain) :]
        return certain

    def _say(
        self, events: list[Event], text: str, kind: type[TextPiece | ThoughtPiece] = TextPiece
    ) -> None:
        if text:
            events.append(kind(text))
            self._said |= kind is TextPiece and not text.isspace()
            self._thought |= kind is ThoughtPiece


def open_tail(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``mark``."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


@dataclass
class ParsedReply:
    """A whole reply.

    Attributes:
        thought: None where the reply has none; text: without thought and calls.
        calls: in order; complete: whether the last one is.
    """

    text: str = ""
    thought: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    complete: bool = True

    def add(self, events: Iterable[Event]) -> None:
        """Take more of it."""
        for event in events:
            if isinstance(event, TextPiece):
                self.text += event.text
            elif isinstance(event, ThoughtPiece):
                self.thought = (self.thought or "") + event.text
            elif isinstance(event, CallStart):
                self.calls.append(ToolCall(event.name, "", event.id))
                self.complete = False
            elif isinstance(event, CallPiece):
                last = self.calls[-1]
                self.calls[-1] = ToolCall(last.name, last.arguments + event.text, last.id)
            else:
                self.complete = True


class CallFilter:
    """Shows a reply without its calls while it grows: the thought between its marks, and the text.

    Args:
        marks, opened: as :class:`ReplyParser` takes them.
    """

    def __init__(
        self, parser: ReplyParser, marks: ThoughtMarks | None = None, opened: bool = False
    ) -> None:
        self._parser, self._marks = parser, marks
        self._opened, self._thinks = opened, False

    def push(self, text: str) -> str:
        """Take more of the reply; return what of it can be shown now."""
        return self._shown(self._parser.push(text))

    def finish(self, cut: bool, stopped_by: str | None = None) -> str:
        """End the reply; see :meth:`ReplyParser.finish`."""
        return self._shown(self._parser.finish(cut, stopped_by))

    def _shown(self, events: Sequence[Event]) -> str:
        made = ""
        for event in events:
            thinks = isinstance(event, ThoughtPiece)
            if self._marks is not None and thinks and not (self._thinks or self._opened):
                made += f"{self._marks.open}\n"
            elif self._marks is not None and self._thinks and not thinks:
                made += f"\n{self._marks.close}\n\n"
            self._thinks = thinks
            made += event.text if isinstance(event, (ThoughtPiece, TextPiece)) else ""
        return made


def parse(
    parser: ReplyParser, text: str, cut: bool = False, stopped_by: str | None = None
) -> ParsedReply:
    """Take a whole reply apart; see :meth:`ReplyParser.finish`."""
    made = ParsedReply()
    made.add(parser.push(text))
    made.add(parser.finish(cut, stopped_by))
    return made
