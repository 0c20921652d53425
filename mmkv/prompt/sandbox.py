"""Render chat templates in transformers' sandbox, within limits of time and size.

A template is a program that comes with a checkpoint. The sandbox keeps it from Python's objects.
Here the clock is read at every loop step, call, filter, test and operator, and none of these makes
a value above a bound: what could make one at a stroke is computed ahead, by a change in the
template's syntax tree. So neither a thread, nor a signal, nor a process of its own is needed to
stop a template.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Environment, Template, meta, nodes, pass_context, pass_eval_context
from jinja2.runtime import LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from mmkv.engine.errors import InputError
from mmkv.prompt.messages import Unknown
from mmkv.prompt.resuming import READERS, Messages, TemplateReading, loops_of, rounds_of

# The filters that are put in. EACH reads the clock at each item of a loop, JOIN computes the
# length of ``~`` ahead, KEEP bounds a list. AT and END print nothing: they note where the text
# stands at an item, and before the opening of a reply (:class:`Marks`). ROUNDS stands in for EACH,
# and ROUND prints nothing, where a loop can be gone on with (:mod:`mmkv.prompt.resuming`).
JOIN, EACH, KEEP = "mmkv_join", "mmkv_each", "mmkv_keep"
AT, END = "mmkv_at", "mmkv_end"
ROUNDS, ROUND = "mmkv_rounds", "mmkv_round"
_OPENING = "add_generation_prompt"


def mark_end(tree: nodes.Template) -> None:
    """Have the length noted before the opening of a reply, if that is the template's last word."""
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return
    names = [name for name in tree.find_all(nodes.Name) if name.name == _OPENING]
    hidden = any(macro.name == _OPENING for macro in tree.find_all(nodes.Macro))
    if len(names) == 1 and names[0] is last.test and not hidden:
        # Of a name: what is constant is computed when the template is compiled.
        noted = nodes.Filter(
            nodes.Name(_OPENING, "load"), END, [], [], None, None, lineno=last.lineno
        )
        tree.body.insert(-1, nodes.Output([noted], lineno=last.lineno))


def guard(tree: nodes.Template) -> None:
    """Lead loops, ``~`` and computed lists through filters that look at them."""

    loops = {id(loop): number for number, loop in enumerate(loops_of(tree))}

    def through(name: str, value: Any, *more: Any) -> nodes.Filter:
        args = [nodes.Const(one, lineno=value.lineno) for one in more]
        return nodes.Filter(value, name, args, [], None, None, lineno=value.lineno)

    def guard_fields(node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                setattr(
                    node, field, [guarded(v) if isinstance(v, nodes.Node) else v for v in value]
                )
            elif isinstance(value, nodes.Node):
                setattr(node, field, guarded(value))

    def guarded(node: nodes.Node) -> nodes.Node:
        """Return what stands in a node's place: itself, or led through a filter."""
        guard_fields(node)
        if isinstance(node, nodes.For):
            number = loops.get(id(node))
            each = through(EACH, node.iter)
            node.iter = each if number is None else through(ROUNDS, node.iter, number)
            if isinstance(node.target, nodes.Name):
                # AT prints nothing; it notes where the text stands.
                named = nodes.Name(node.target.name, "load", lineno=node.lineno)
                noted = [through(AT, named)]
                noted += [] if number is None else [through(ROUND, named, number)]
                node.body.insert(0, nodes.Output(noted, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return through(JOIN, nodes.List(node.nodes, lineno=node.lineno))
        elif isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)):
            # A tuple of names can be what is assigned to.
            stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
            if not stored and node.find(nodes.Name) is not None:
                return through(KEEP, node)
        return node

    guard_fields(tree)
    tree.set_environment(tree.environment)  # type: ignore[arg-type]


SECONDS = 5.0
_SOURCE = 2**20  # characters of a template
_OUTPUT = 2**20  # characters or items of a value, beside eight times the messages
_MADE = 2**26  # of all values together, beside a thousand times the messages
_WIDTH = 10_000  # columns, digits: to pad or format to
_BITS = 4096  # of a whole number
_SLOW_INPUT = 2**14
_PIECES = 64  # of a text, after which the clock is read; loops and calls read it, too
# Filters whose time or output grows faster than their input.
_SLOW = frozenset(("pprint", "striptags", "sum", "urlize", "wordwrap", "xmlattr"))
_LONG_WIDTH = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\d{5,}|\*)")
_OF_DICTS = frozenset(dir(dict))  # methods, which Jinja's checked way looks up
_OF_LOOPS = frozenset(("first", "last", "index", "index0", "revindex", "revindex0", "length"))


@dataclass
class Marks:
    """Where in a text its parts begin, in characters; filled in while it is rendered.

    Attributes:
        begins: by the id of an object, what stood before it when a loop came to it, the last time;
            for the ids that it has.
        end: what stands before the opening of a reply, if all that the template does with the
            wish for one is to write it at the very end; else None.
    """

    begins: dict[int, int]
    end: int | None = None


def render(
    source: str,
    given: int,
    values: Mapping[str, Any],
    marks: Marks | None = None,
    reading: TemplateReading | None = None,
) -> str:
    """Render the template ``source`` with ``values``.

    Args:
        given: characters and items of the messages and tools in ``values``.
        marks: filled in. reading: of the messages that stand in for a list in ``values``.

    Raises:
        InputError: a limit was passed. Otherwise whatever the template leads to.
    """
    template = _compiled(source)
    environment = template.environment
    assert isinstance(environment, _Limited)
    with environment.meter.started(given, marks, reading):
        return template.render(**values)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    if len(source) > _SOURCE:
        raise _stopped(f"it has more than {_SOURCE:,} characters")
    environment = _Limited()
    with environment.meter.started(0):  # constant expressions are computed here
        tree = environment.parse(source)
        mark_end(tree)
        guard(tree)
        return Template.from_code(environment, environment.compile(tree), environment.globals)


@lru_cache(maxsize=16)
def variables(source: str) -> frozenset[str]:
    """Return the names that a template reads and nothing of it sets, functions left out.

    Raises:
        InputError: a limit was passed. Otherwise whatever reading the template leads to.
    """
    if len(source) > _SOURCE:
        raise _stopped(f"it has more than {_SOURCE:,} characters")
    environment = _Limited()
    with environment.meter.started(0):
        read = meta.find_undeclared_variables(environment.parse(source))
    return frozenset(read - environment.globals.keys())


@lru_cache(maxsize=16)
def opens_within(source: str) -> bool:
    """Return whether a template asks in a loop or macro whether a reply is to be opened."""
    environment = _Limited()
    with environment.meter.started(0):
        tree = environment.parse(source)
    parts = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
    return any(name.name == _OPENING for part in parts for name in part.find_all(nodes.Name))


class _Meter(threading.local):
    """What the rendering on this thread may still take."""

    end = float("inf")
    largest = made = given = 0
    depth = written = 0  # texts that are being put together, one in another; of the outer one
    marks: Marks | None = None
    reading: TemplateReading | None = None
    kept: Sequence[str] = ()  # the outer text

    def started(
        self, given: int, marks: Marks | None = None, reading: TemplateReading | None = None
    ) -> _Meter:
        self.largest, self.made = _OUTPUT + 8 * given, _MADE + 1024 * given
        self.given = given
        self.marks, self.depth, self.written = marks, 0, 0
        self.reading, self.kept = reading, ()
        return self

    def __enter__(self) -> None:
        self.end = time.monotonic() + SECONDS

    def __exit__(self, *_: object) -> None:
        self.end = float("inf")
        self.marks, self.reading, self.kept = None, None, ()

    def tick(self) -> None:
        if time.monotonic() > self.end:
            raise _stopped(f"it takes more than {SECONDS:g} s")

    def expect(self, size: float) -> None:
        """Raise InputError when a value of ``size`` would be too large."""
        if size > self.largest:
            raise _stopped(f"it makes more than {self.largest:,} characters")

    def keep(self, value: Any) -> Any:
        """Return a value that was made, when time and size allow it."""
        self.tick()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if value.bit_length() > _BITS:
                raise _stopped("it computes a number without end")
            return value
        length = len(value) if isinstance(value, str) else extent(value, self.largest)
        self.expect(length)
        self.made -= length
        if self.made < 0:
            raise _stopped("it makes texts without end")
        return value


class _Limited(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with guards."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        theirs = _theirs()
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(each) for each in theirs.extensions.values()],
            cache_size=0,
        )
        self.meter = _Meter()
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals = dict(theirs.globals)
        self.globals.pop("lipsum", None)
        self.globals["namespace"] = _namespace(theirs.globals["namespace"], self.meter)
        self.filters = {name: self._filter(name, use) for name, use in theirs.filters.items()}
        self.filters |= {JOIN: self._join, EACH: self._each, KEEP: self._literal}
        self.filters |= {AT: self._at, END: self._end, ROUNDS: self._rounds, ROUND: self._round}
        tests: dict[str, Any] = theirs.tests
        self.tests = {name: self._ticking(test) for name, test in tests.items()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``message.role`` or ``loop.first`` at once: what Jinja finds by a longer way."""
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext:
            if (rounds := rounds_of(obj)) is not None:
                return rounds.told(attribute, self.undefined)
            if attribute in _OF_LOOPS:
                return getattr(obj, attribute)
        if type(obj) is Messages:
            raise Unknown
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return ``messages[0]`` of the messages' stand-in, and of others what Jinja finds."""
        if type(obj) is Messages and type(argument) is not int:
            raise Unknown
        return super().getitem(obj, argument)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function; methods of texts and numbers only if what they make is bounded."""
        self.meter.tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            if function.__name__ == "join":
                args = tuple(self._listed(each) for each in args)
            self._expect_of_method(owner, function.__name__, args, kwargs)
        elif getattr(function, "__name__", "") == "strftime_now":
            self._expect_width(*(len(each) for each in args if isinstance(each, str)))
            if self.meter.reading is not None:
                self.meter.reading.reads(math.inf)
        if type(function) is not Macro:
            _without_messages((*args, *kwargs.values()))
        return self.meter.keep(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, unless the result is too large."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                    each = len(one) if isinstance(one, (str, bytes)) else extent(one, 2**62)
                    self.meter.expect(each * max(0, other))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _BITS:
                raise _stopped("it computes a power without end")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._expect_format(left)
        return self.meter.keep(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return str.format's stand-in, which formats to no huge width."""
        if super().wrap_str_format(value) is None:
            return None
        if type(value.__self__) is not str:
            raise _stopped("it formats a text that is marked up")
        formatter = _Formatter(self)

        @wraps(value)
        def formatted(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), dict(*args, **kwargs)
            return formatter.vformat(value.__self__, args, kwargs)

        return formatted

    def _concat(self, pieces: Iterable[str]) -> str:
        kept, size, meter = list[str](), 0, self.meter
        outer, largest = not meter.depth, meter.largest
        meter.depth += 1
        if outer:
            meter.kept = kept
        for count, piece in enumerate(pieces):
            size += len(piece)
            if outer:
                meter.written = size
            if size > largest:
                meter.expect(size)
            if count % _PIECES == 0:
                meter.tick()
            kept.append(piece)
        meter.depth -= 1
        return meter.keep("".join(kept))

    def _at(self, value: Any) -> str:
        marks = self.meter.marks
        if marks is not None and id(value) in marks.begins:
            marks.begins[id(value)] = self.meter.written
        return ""

    def _end(self, _: Any) -> str:
        if self.meter.marks is not None:
            self.meter.marks.end = self.meter.written
        return ""

    @pass_context
    def _rounds(self, context: Any, values: Iterable[Any], number: int) -> Iterator[Any]:
        reading, meter = self.meter.reading, self.meter
        if reading is None or not isinstance(values, Messages):
            return self._each(values)
        return reading.begin(number, values, context.vars, "".join(meter.kept))

    def _round(self, _: Any, number: int) -> str:
        if self.meter.reading is not None:
            self.meter.tick()
            self.meter.reading.round(number, self.meter.written)
        return ""

    def _literal(self, value: Any) -> Any:
        _without_messages(value.values() if isinstance(value, dict) else value)
        return self.meter.keep(value)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.meter.tick()
            yield value

    @pass_eval_context
    def _join(self, context: Any, values: list[Any]) -> str:
        self.meter.expect(extent(values, self.meter.largest))
        return self.meter.keep((markup_join if context.autoescape else str_join)(values))

    def _listed(self, values: Any) -> Any:
        """Return what is joined with a length, read once."""
        if hasattr(values, "__len__"):
            return values
        kept, size = [], 0
        for value in self._each(values):
            size += 1 + (len(value) if isinstance(value, str) else 0)
            self.meter.expect(size)
            kept.append(value)
        return kept

    def _ticking(self, test: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(test)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            return test(*args, **kwargs)

        return ticking

    def _filter(self, name: str, use: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if getattr(use, "jinja_pass_arg", None) is not None else 0

        @wraps(use)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            before, (value, *rest) = args[:first], args[first:]
            if name not in READERS:
                _without_messages((value,))
            if name not in ("d", "default"):
                _without_messages((*rest, *kwargs.values()))
            if name == "join":
                value = self._listed(value)
            self._expect_of_filter(name, value, [*rest, *kwargs.values()])
            return self.meter.keep(use(*before, value, *rest, **kwargs))

        return guarded

    def _expect_of_filter(self, name: str, value: Any, rest: list[Any]) -> None:
        if name == "tojson" and rest:
            # What is given, such as tools, may be shown with indents.
            most = max(_SLOW_INPUT, self.meter.given)
            size = self._bounded_input(name, value, most)
            self._expect_width(*rest)
            self.meter.expect(size + _width(rest) * _indents(value, most))
        elif name in _SLOW:
            self._bounded_input(name, value, _SLOW_INPUT)
            self._expect_width(*rest)
        elif name == "join":
            between = _width(each for each in rest if isinstance(each, str))
            self.meter.expect(extent(value, self.meter.largest) + between * len(value))
        elif name == "indent":
            self._expect_width(*rest)
            self.meter.expect((str(value).count("\n") + 1) * max(4, _width(rest)))
        elif name in ("batch", "center", "round", "slice"):
            self._expect_width(*rest)
        elif name == "format":
            self._expect_format(str(value))
        elif name == "replace" and rest:
            self._expect_replaced(str(value), *map(str, rest[:2]))

    def _bounded_input(self, name: str, value: Any, most: int) -> int:
        """Return the extent of what a slow filter is given. Raises InputError above ``most``."""
        size = extent(value, most)
        if size > most:
            raise _stopped(f"it gives {name} more than {most:,} characters")
        return size

    def _expect_of_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        rest = [*args, *kwargs.values()]
        if name in ("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"):
            self._expect_width(*rest)
            size = len(owner) if isinstance(owner, (str, bytes)) else 1
            widths = [each for each in rest if isinstance(each, int)] or [8]
            self.meter.expect(size * max(1, *widths) if name == "expandtabs" else 0)
        elif name == "join" and args:
            self.meter.expect(extent(args[0], self.meter.largest) + len(owner) * len(args[0]))
        elif name == "replace":
            self._expect_replaced(owner, *args[:2])
        elif name == "translate":
            table = args[0] if args and isinstance(args[0], Mapping) else {}
            longest = max(
                [len(each) for each in table.values() if isinstance(each, str)], default=1
            )
            self.meter.expect(len(owner) * max(1, longest))

    def _expect_replaced(self, text: Any, old: Any = None, new: Any = None) -> None:
        if isinstance(old, type(text)) and isinstance(new, type(text)):
            self.meter.expect(len(text) + text.count(old) * len(new))

    def _expect_width(self, *values: Any) -> None:
        if any(isinstance(each, int) and abs(each) > _WIDTH for each in values):
            raise _stopped("it pads or formats to a huge width")

    def _expect_format(self, text: Any) -> None:
        text = text if isinstance(text, str) else text.decode("latin-1")
        if _LONG_WIDTH.search(text):
            raise _stopped("it pads or formats to a huge width")


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5,}", format_spec):
            raise _stopped("it pads or formats to a huge width")
        return super().format_field(value, format_spec)


def _theirs() -> Environment:
    """Return transformers' environment for chat templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


def _namespace(kind: Any, meter: _Meter) -> Any:
    def begin(self: Any, /, *args: Any, **values: Any) -> None:
        kind.__init__(self, *args, **values)
        if meter.reading is not None:
            meter.reading.spaces.append(self)

    # The text of one that holds itself, or others many times over, has no end.
    return type("Namespace", (kind,), {"__init__": begin, "__repr__": lambda self: "<Namespace>"})


def _without_messages(values: Iterable[Any]) -> None:
    """Raise Unknown if the messages' stand-in is among values: others could tell it from a list."""
    if Messages in map(type, values):
        raise Unknown


def extent(value: Any, most: int) -> int:
    """Count a value's characters and items, up to about ``most``."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        value = waiting.pop()
        total += 1
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, (dict, Mapping)):  # to ask for Mapping takes long
            waiting += value.keys()
            waiting += value.values()
    return total


def _width(values: Iterable[Any]) -> int:
    """Return the widest indent or separator of those that texts and numbers name."""
    widths = [len(each) if isinstance(each, str) else each for each in values]
    return max([0, *(each for each in widths if isinstance(each, int))])


def _indents(value: Any, most: int) -> int:
    """Count how deep each item of a value stands, in all, up to about ``most`` items."""
    total, seen, waiting = 0, 0, [(value, 1)]
    while waiting and seen <= most:
        value, depth = waiting.pop()
        total, seen = total + depth, seen + 1
        within = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, (Mapping, list, tuple)):
            waiting += [(item, depth + 1) for item in within]
    return total


def _stopped(why: str) -> InputError:
    return InputError(f"the model's chat template was stopped: {why}; use another model, or --raw")
