"""How models write calls: as they were trained to, which their chat templates show."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from mmkv.calls.parser import (
    MOST_CALLS,
    CallCounter,
    CallReader,
    Event,
    JsonSpan,
    Spell,
    ToolFormat,
    open_tail,
)
from mmkv.calls.tools import exact_schema, read_json

if TYPE_CHECKING:
    from mmkv.calls.tools import Tool

# Of JSON's escapes all but \\u, which could spell a known name so that it counts as another one.
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# JSON as templates write it (json.dumps), so that a call reads alike when it is shown again.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **ESCAPES}


def arguments_rule(tool: Tool, schema: Mapping[str, Any] | None = None) -> str:
    """Return the JSON of a function's arguments, or of one with a schema, for a grammar."""
    own = exact_schema(tool.bound if schema is None else schema)
    if own.get("properties"):  # names that a model makes up would be an error of the function
        own.setdefault("additionalProperties", False)
    settings = _JSON if tool.strict else {**_JSON, "lenient": True}
    return "%json " + json.dumps({**own, "x-guidance": settings})


class JsonReader(CallReader):
    """Reads ``{"name": NAME, "arguments": {...}}``: one behind each opening, or a list of them.

    Args:
        close: the text behind a call; None: nothing. listed: whether the calls are a list.
        begun: what of the object was the opening already.
    """

    _HEAD = re.compile(
        r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    )
    # The beginning of an object, as far as it says that it is no call.
    _BEGUN = re.compile(
        r'\{\s*(?:"(name|type)"\s*:\s*(?:"((?:[^"\\]|\\.){0,999})"|[^\s"])|[^\s"}])'
    )

    def __init__(
        self,
        tools: Mapping[str, Tool],
        calls: CallCounter,
        close: str | None = None,
        listed: bool = False,
        begun: str = "",
    ) -> None:
        super().__init__(tools, calls)
        self._close, self._listed, self._stage = close, listed, "list" if listed else "head"
        self._span, self._quoted = JsonSpan(), False
        self._held = begun
        self._object, self._looked = JsonSpan(), 0

    def _step(self, events: list[Event]) -> bool:
        if self._stage == "list":
            bare = self._held.lstrip()
            if bare.startswith("["):
                self._held, self._stage = bare[1:], "head"
                return True
            self.wrong = bool(bare)
            return False
        if self._stage == "head":
            return self._read_head(events)
        return self._read_value(events) if self._stage == "value" else self._read_tail()

    def _read_head(self, events: list[Event]) -> bool:
        found = self._HEAD.match(self._held)
        if found is not None and found.end() < len(self._held):
            name = _unquoted(found[1])
            if name is None or name not in self.tools:
                self.wrong = True
                return False
            events.append(self.calls.start(name))
            self._held, self._stage = self._held[found.end() :], "value"
            self._span, self._quoted = JsonSpan(), self._held[0] == '"'
            self._object, self._looked = JsonSpan(), 0
            return True
        bare = self._held.lstrip()
        if bare and (bare[0] != "{" or self._is_other(bare)):
            self.wrong = True
        elif found is None and bare:  # in another order, or none of it
            looked, self._looked = self._looked, len(bare)
            end = self._object.end(bare[looked:])
            if end >= 0:
                end += looked + len(self._held) - len(bare)
                return self._take_whole(self._held[:end], end, events)
            self.wrong = self._closed(bare)
        return False

    def _is_other(self, text: str) -> bool:
        """Whether an object that has begun is no call: text is not to be held back for it."""
        found = self._BEGUN.match(text)
        if found is None:
            return False
        if found[1] == "type":
            return found[2] != "function"
        return found[1] is None or found[2] is None or _unquoted(found[2]) not in self.tools

    def _closed(self, text: str) -> bool:
        return self._close is not None and self._close in text

    def _take_whole(self, text: str, end: int, events: list[Event]) -> bool:
        call = whole_call(text)
        if call is None or call[0] not in self.tools:
            self.wrong = True
            return False
        events += [self.calls.start(call[0]), self.calls.piece(call[1]), self.calls.end()]
        self._held, self._stage = "}" + self._held[end:], "tail"
        self._object, self._looked = JsonSpan(), 0
        return True

    def _read_value(self, events: list[Event]) -> bool:
        at = -1 if self._close is None else self._held.find(self._close)
        part = self._held if at < 0 else self._held[:at]
        if at < 0 and self._close is not None:
            part = part[: len(part) - open_tail(part, self._close)]
        if self._quoted:  # JSON in a text: taken out of it when it is whole
            end = JsonSpan().end(self._held)
            if end >= 0:
                text = _unquoted(self._held[1 : end - 1])
                return self._end_value(events, self._held[:end] if text is None else text, end)
            return False
        end = self._span.end(part)
        if end >= 0:
            return self._end_value(events, part[:end], end)
        if at >= 0 and not self._span.quoted:  # no JSON
            return self._end_value(events, part.rstrip(), at)
        if at >= 0:  # the mark is part of a text
            assert self._close is not None
            part += self._close[:1]
            self._span.end(self._close[:1])
        if part:
            events.append(self.calls.piece(part))
        self._held = self._held[len(part) :]
        return at >= 0

    def _end_value(self, events: list[Event], text: str, end: int) -> bool:
        if text:
            events.append(self.calls.piece(text))
        events.append(self.calls.end())
        self._held, self._stage = self._held[end:], "tail"
        return True

    def _read_tail(self) -> bool:
        if self._listed:
            return self._read_tail_of_list()
        if self._close is None:
            bare = self._held.lstrip()
            self.rest = bare.removeprefix("}") if bare else None
            return False
        after = self._held.lstrip(string.whitespace + "}")
        if after.startswith(self._close):
            self.rest = after[len(self._close) :]
        elif not self._close.startswith(after):
            self.rest = after
        return False

    def _read_tail_of_list(self) -> bool:
        _, found, after = self._held.partition("}")
        after = after.lstrip()
        if not found or not after:
            return False
        if after[0] == ",":
            self._held, self._stage = after[1:], "head"
            return True
        self.rest = after.removeprefix("]")
        return False

    def finish(self) -> list[Event]:
        """End where the reply ends."""
        events: list[Event] = []
        if self._stage == "head" and not self.wrong:
            self._take_whole(self._held, len(self._held), events)
        elif self._stage == "list":
            self.wrong = True
        elif self._stage == "value":
            text = _unquoted(self._held[1:]) if self._quoted else self._held
            events += [self.calls.piece(text)] if text else []
        return events


def whole_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON text, of a call; None where it is none."""
    try:
        found = read_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get("arguments", found.get("parameters", {}))
    return found["name"], given if _is_whole(given) else _json_text(given)


def _unquoted(text: str) -> str | None:
    """Return what a JSON text stands for, without its quotes; None where that is no text."""
    try:
        made = str(json.loads(f'"{text}"'))
    except ValueError:
        return None
    return made if _is_whole(made) else None


def _json_text(value: Any) -> str:
    """Return JSON; what UTF-8 cannot hold stays escaped."""
    made = json.dumps(value, ensure_ascii=False)
    return made if _is_whole(made) else json.dumps(value)


def _is_whole(text: Any) -> TypeGuard[str]:
    """Whether it is a text without half a pair of surrogates."""
    return isinstance(text, str) and text == text.encode(errors="ignore").decode()


def _json_rules(
    tools: Sequence[Tool],
    spell: Spell,
    key: str,
    before: str = "",
    around: tuple[str, str] = ("", ""),
    several: bool | None = None,
) -> list[str] | None:
    """Return the rules of ``{"name": ..., key: ...}``.

    Args:
        before: what of it has been written; around: what stands before and behind it, spelled.
        several: whether it stands in a list of several, or of one; None: in no list.
    """
    heads = [f'{{"name": {json.dumps(one.name)}, "{key}": ' for one in tools]
    if not all(head.startswith(before) for head in heads):
        return None
    rules = [
        f"call_{i}: {spell(head[len(before) :])} arguments_{i} {spell('}')}"
        for i, head in enumerate(heads)
    ]
    rules += [f"arguments_{i}: {arguments_rule(one)}" for i, one in enumerate(tools)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    if several is not None:
        more = f" ({spell(', ')} call){{0,{MOST_CALLS - 1}}}" if several else ""
        return [f"body: {spell('[')} call{more} {spell(']')}", *rules]
    return [f"body: {around[0]} call {around[1]}", *rules]


class Hermes(ToolFormat):
    """``<tool_call>`` around JSON: Qwen2.5, Qwen3, Qwen3-VL, Hermes; and models without a form."""

    name = "hermes"
    openings = ("<tool_call>",)
    shown_by = (openings,)
    _close = "</tool_call>"
    special = (*openings, _close)

    def reader(self, tools: Mapping[str, Tool], calls: CallCounter, opening: str) -> CallReader:
        return JsonReader(tools, calls, self._close)

    def body(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> list[str] | None:
        line = spell(chr(10))
        return _json_rules(tools, spell, "arguments", around=(line, f"{line} {spell(self._close)}"))


class Llama3(ToolFormat):
    """JSON with ``parameters`` at the beginning of a reply: Llama 3.1 to 3.3."""

    name = "llama3"
    openings = ('{"name"', "<|python_tag|>", '{ "name"', '{"type"')
    only_first = True
    between = string.whitespace + ";"
    separator = "; "
    special = ("<|python_tag|>",)
    shown_by = (special, ("ipython", '"parameters": '))

    def reader(self, tools: Mapping[str, Tool], calls: CallCounter, opening: str) -> CallReader:
        return JsonReader(tools, calls, begun="" if opening in self.special else opening)

    def body(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> list[str] | None:
        before = "" if opening in self.special else opening
        return _json_rules(tools, spell, "parameters", before)


class Mistral(ToolFormat):
    """``[TOOL_CALLS]`` before a JSON list of calls: Mistral's tokenizers up to version 7."""

    name = "mistral"
    openings = ("[TOOL_CALLS]",)
    listed = True
    special: ClassVar[tuple[str, ...]] = openings
    shown_by: ClassVar[tuple[tuple[str, ...], ...]] = (openings,)

    def reader(self, tools: Mapping[str, Tool], calls: CallCounter, opening: str) -> CallReader:
        return JsonReader(tools, calls, listed=True)

    def body(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> list[str] | None:
        return _json_rules(tools, spell, "arguments", several=parallel)

    def call_id(self, digits: str) -> str:
        """Return the id of a call: nine letters and digits, which Mistral's templates require."""
        return digits[:9]


class MistralNamed(Mistral):
    """``[TOOL_CALLS]NAME[ARGS]{...}`` for each call: Mistral's tokenizers from version 11 on."""

    name = "mistral-named"
    listed = False
    separator = ""
    special = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    shown_by = (("[TOOL_CALLS]", "[ARGS]"),)

    def reader(self, tools: Mapping[str, Tool], calls: CallCounter, opening: str) -> CallReader:
        return _NamedReader(tools, calls)

    def body(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> list[str] | None:
        calls = [
            f"call_{i}: {spell(one.name)} {spell('[ARGS]')} arguments_{i}"
            for i, one in enumerate(tools)
        ]
        rules = [f"arguments_{i}: {arguments_rule(one)}" for i, one in enumerate(tools)]
        return ["body: " + " | ".join(f"call_{i}" for i in range(len(tools))), *calls, *rules]


class _NamedReader(JsonReader):
    """Reads ``NAME[ARGS]{...}``."""

    _HEAD = re.compile(r"\s*([A-Za-z0-9_.:/-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
    _MAY_BE = re.compile(r"\s*[A-Za-z0-9_.:/-]*(\[[^{]*)?\s*")

    def _read_head(self, events: list[Event]) -> bool:
        if self._HEAD.match(self._held) is None:
            self.wrong = self._MAY_BE.fullmatch(self._held) is None
            return False
        return super()._read_head(events)

    def _read_tail(self) -> bool:
        self.rest = self._held
        return False


class QwenXml(ToolFormat):
    """``<function=NAME><parameter=KEY>``: Qwen3-Coder, Qwen3.5."""

    name = "qwen-xml"
    openings = ("<tool_call>",)
    shown_by = (("<function=",),)
    _close = "</tool_call>"
    special = (*openings, _close)

    def reader(self, tools: Mapping[str, Tool], calls: CallCounter, opening: str) -> CallReader:
        return _XmlReader(tools, calls, self._close)

    def body(
        self, tools: Sequence[Tool], opening: str, spell: Spell, parallel: bool
    ) -> list[str] | None:
        end = spell("</function>\n") + " " + spell(self._close)
        rules = []
        for i, tool in enumerate(tools):
            begin, places = spell(f"\n<function={tool.name}>\n"), []
            required = tool.bound.get("required") or ()
            for k, (key, schema) in enumerate(_properties(tool).items()):
                places.append(f"p_{i}_{k}" + ("" if key in required else "?"))
                rules += self._parameter(f"{i}_{k}", tool, key, schema, spell)
            others = tool.bound.get("additionalProperties", "properties" not in tool.bound)
            if others is not False:  # of any name but the known ones, which would come twice
                places.append(f"other_{i}{{0,{MOST_CALLS}}}")
                known = " | ".join(map(json.dumps, _properties(tool)))
                rules.append(f"NAME_{i}: /[^<>\\n]+/" + (f" & ~({known})" if known else ""))
                value = "rest"
                if isinstance(others, Mapping) and others:
                    rule = arguments_rule(tool, {**_definitions(tool), **others})
                    rules.append(f"value_{i}: {rule}")
                    value = f"value_{i} {spell(chr(10) + '</parameter>' + chr(10))}"
                begun = f"{spell('<parameter=')} NAME_{i} {spell('>' + chr(10))}"
                rules.append(f"other_{i}: {begun} {value}")
            rules.append(" ".join([f"call_{i}:", begin, *places, end]))
        # To the first end mark: there the reader ends it, too.
        rules.append(f"rest: text {spell(chr(10))}")
        rules.append('text[suffix="</parameter>"]: /(?s:.*)/')
        return ["body: " + " | ".join(f"call_{i}" for i in range(len(tools))), *rules]

    def unfollowed(self, tool: Tool) -> str | None:
        """Return what a schema asks for that calls of this form do not follow."""
        texts = [one for one in _properties(tool).values() if _is_text(one)]
        found = {key for schema in (tool.schema, *texts) for key in schema.keys() & _NOT_IN_XML}
        if not {*(tool.schema.get("required") or ())} <= _properties(tool).keys():
            found.add("required")
        return min(found, default=None)

    @staticmethod
    def _parameter(number: str, tool: Tool, key: str, schema: Any, spell: Spell) -> list[str]:
        begin, end = spell(f"<parameter={key}>\n"), spell("\n</parameter>\n")
        if not _is_text(schema):
            own = schema if isinstance(schema, Mapping) else {}
            value = arguments_rule(tool, {**_definitions(tool), **own})
            return [f"p_{number}: {begin} v_{number} {end}", f"v_{number}: {value}"]
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if listed is not None:
            values = " | ".join(spell(one) for one in listed if isinstance(one, str))
            return [f"p_{number}: {begin} ({values}) {end}"]
        return [f"p_{number}: {begin} rest"]


# What the arguments as a whole, and texts, which are no JSON, do not follow.
_NOT_IN_XML = frozenset(
    "$ref allOf anyOf dependentRequired dependentSchemas format if maxLength maxProperties "
    "minLength minProperties not oneOf pattern patternProperties propertyNames "
    "unevaluatedProperties".split()
)


def _properties(tool: Tool) -> dict[str, Any]:
    found = tool.bound.get("properties")
    # A name that would end its own mark cannot be written.
    return {k: v for k, v in found.items() if not set(k) & set("<>\n")} if found else {}


def _definitions(tool: Tool) -> dict[str, Any]:
    return {name: tool.bound[name] for name in ("$defs", "definitions") if name in tool.bound}


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


class _XmlReader(CallReader):
    """Reads ``<function=NAME>``, its parameters, and the mark behind them.

    The arguments become JSON: texts as they come, other values once they are whole.
    """

    _HEAD = re.compile(r"\s*<function=([^<>\n]+)>")
    _NEXT = re.compile(r"<parameter=([^<>\n]+)>(?=[^\n])|<parameter=([^<>\n]+)>\n|</function>")
    _END = "</parameter>"

    def __init__(self, tools: Mapping[str, Tool], calls: CallCounter, close: str) -> None:
        super().__init__(tools, calls)
        self._close, self._stage = close, "head"
        self._tool: Tool | None = None
        self._count = 0
        self._texts = False  # whether the value is a text

    def _step(self, events: list[Event]) -> bool:
        if self._stage == "head":
            return self._read_head(events)
        if self._stage == "next":
            return self._read_next(events)
        return self._read_value(events) if self._stage == "value" else self._read_tail()

    def _read_head(self, events: list[Event]) -> bool:
        found, bare = self._HEAD.match(self._held), self._held.lstrip()
        if found is not None and found[1] in self.tools:
            self._tool = self.tools[found[1]]
            events.append(self.calls.start(found[1]))
            self._held, self._stage = self._held[found.end() :], "next"
            return True
        mark = "<function="
        may_be = bare.startswith(mark) or mark.startswith(bare)
        self.wrong = found is not None or not may_be or self._close in bare
        return False

    def _read_next(self, events: list[Event]) -> bool:
        found = self._NEXT.search(self._held)
        if found is None:
            return False
        self._held = self._held[found.end() :]
        key = found[1] or found[2]
        if key is None:
            text = "}" if self._count else "{}"
            events += [self.calls.piece(text), self.calls.end()]
            self._stage = "tail"
            return True
        assert self._tool is not None
        self._texts = _is_text((self._tool.schema.get("properties") or {}).get(key))
        begin = ("{" if not self._count else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        events.append(self.calls.piece(begin + '"' * self._texts))
        self._count, self._stage = self._count + 1, "value"
        return True

    def _read_value(self, events: list[Event]) -> bool:
        text, found, after = self._held.partition(self._END)
        if not found and not self._texts:
            return False
        if not found:
            keep = max(open_tail(text, "\n" + self._END), open_tail(text, self._END))
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
            if text:
                events.append(self.calls.piece(_inside(text)))
            return False
        text = text.removesuffix("\n")
        shown = _inside(text) + '"' if self._texts else _value(text)
        events.append(self.calls.piece(shown))
        self._held, self._stage = after, "next"
        return True

    def _read_tail(self) -> bool:
        after = self._held.lstrip()
        if after.startswith(self._close):
            self.rest = after[len(self._close) :]
        elif not self._close.startswith(after):
            self.rest = after
        return False

    def finish(self) -> list[Event]:
        """End where the reply ends."""
        self.wrong = self._stage == "head"
        return []  # what is held began the mark behind a text, or is half a value


def _inside(text: str) -> str:
    """Return a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str) -> str:
    """Return a value as JSON; what is none is a text."""
    try:
        return _json_text(read_json(text))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


# The first that a template shows: some have the marks of another, and more.
FORMATS: tuple[type[ToolFormat], ...] = (QwenXml, MistralNamed, Mistral, Llama3, Hermes)


def format_of(source: str | None) -> ToolFormat:
    """Return how a chat template's model writes calls; Hermes' form where that shows none."""
    return next((one for one in FORMATS if one.writes(source or "")), Hermes)()
