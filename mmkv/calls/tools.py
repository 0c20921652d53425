"""The functions that a reply may call."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from mmkv.engine.errors import STOPS, InputError, first_line

MOST_TOOLS = 128
# Characters of JSON of one function's parameters.
LONGEST_SCHEMA = 64 * 2**10
LONGEST_SCHEMAS = 512 * 2**10  # of all functions of a request
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# What the fields of a function may be, beside null.
_FIELDS: dict[str, tuple[type, str]] = {
    "description": (str, "the description of {} has to be a text"),
    "parameters": (Mapping, "the parameters of {} have to be a JSON schema"),
    "strict": (bool, "strict of {} has to be true or false"),
}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: a JSON schema of its arguments, an object's; None: it takes none.
        strict: whether a schema that cannot be followed to the letter is refused.
        followed: the schema without the parts that calls cannot be bound to; None: there are none.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    followed: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: Any, where: str = "tools") -> Tool:
        """Return the function that OpenAI's JSON names, in the form of chats or of responses.

        A function of Python has to have type hints, and a docstring that says what it does and
        what its arguments are.

        Raises:
            InputError: it is none of these.
        """
        if isinstance(given, Tool):
            return given
        if callable(given):
            return cls.of(_described(given, where), where)
        if not isinstance(given, Mapping) or given.get("type", "function") != "function":
            kind = given.get("type") if isinstance(given, Mapping) else type(given).__name__
            raise InputError(f"{where}: a tool of type {_shown(kind)} is not known; use function")
        own = given.get("function", given)
        name = own.get("name") if isinstance(own, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"{where}: a function's name is 1 to 128 letters, digits and _ . : / -, "
                f"not {_shown(name)}"
            )
        for key, (kind, wrong) in _FIELDS.items():
            if not isinstance(own.get(key), (kind, type(None))):
                raise InputError(f"{where}: {wrong.format(name)}")
        schema = own.get("parameters")
        if schema and schema.get("type", "object") != "object":
            raise InputError(f"{where}: the parameters of {name} have to be of type object")
        if len(json.dumps(schema)) > LONGEST_SCHEMA:
            raise InputError(
                f"{where}: the schema of {name} is longer than {LONGEST_SCHEMA:,} characters; "
                "shorten it"
            )
        return cls(name, **{key: own[key] for key in _FIELDS if own.get(key)})

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema of its arguments, an object's."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    @property
    def bound(self) -> dict[str, Any]:
        """Return the schema that calls are bound to."""
        return self.schema if self.followed is None else {"type": "object", **self.followed}

    def as_json(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        own = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**own, "parameters": self.schema}}

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        own = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": own}


def _described(function: Callable[..., Any], where: str) -> Any:
    """Return a function of Python in OpenAI's form. Raises InputError."""
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", type(function).__name__)
    try:
        return get_json_schema(function)
    except STOPS:
        raise
    except BaseException as error:  # whatever its hints are made of
        raise InputError(
            f"{where}: the function {name} cannot be described ({first_line(error)}); give it type "
            "hints and a docstring with a line for each argument, or give its JSON schema"
        ) from error


def _shown(value: Any) -> str:
    return ascii(value)[:60]


# Keys of a JSON schema whose values are data, and those whose values are schemas by name.
SCHEMA_DATA = {"const", "default", "enum", "examples"}
SCHEMA_NAMES = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"(\d{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP}-02-29)"
_TIME = r"\d\d:\d\d:[0-5]"
_STRICTER = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}.*[Tt]{_TIME}"}


def exact_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that llguidance follows where it lets too much through in the given one.

    In 1.9.1 an exclusive bound that is whole lets itself through beside a second bound with the
    same integer part (``{"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}``, 0); it becomes the next
    number of 15 digits. Dates may be 29 February in any year, times have a second 60 in any minute.
    """
    made = json.loads(json.dumps(schema))
    left = [made]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key in SCHEMA_NAMES and isinstance(inner, dict):
                    left += inner.values()
                elif key not in SCHEMA_DATA:
                    left.append(inner)
            _sharpen(value)
    return made


def _sharpen(schema: dict[str, Any]) -> None:
    for sign, exclusive, inclusive in (
        (1, "exclusiveMinimum", "minimum"),
        (-1, "exclusiveMaximum", "maximum"),
    ):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        if _is_number(bound) and 0 <= sign * bound < 1e14 and bound == int(bound):
            del schema[exclusive]
            bound += sign * 10.0 ** (len(str(abs(int(bound)))) - 15)
            schema[inclusive] = sign * max(sign * bound, sign * other if _is_number(other) else 0)
    pattern, others = _STRICTER.get(str(schema.get("format"))), schema.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        schema["allOf"] = [*others, {"pattern": pattern}]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class ToolUse:
    """The functions that a reply may or has to call.

    Attributes:
        tools: those offered to the model.
        choice: whether it may call some (``auto``), has to (``required``), or may not (``none``).
        only: the names of those that it may call; None: all.
        parallel: whether it may call several.
        notes: on the parts of the schemas that are not followed.
    """

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required", "none"] = "auto"
    only: frozenset[str] | None = None
    parallel: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise InputError for names that are not there, or there twice."""
        names = [one.name for one in self.tools]
        if len(names) > MOST_TOOLS:
            raise InputError(f"there are {len(names)} tools; the limit is {MOST_TOOLS}")
        size = sum(len(json.dumps(one.parameters)) for one in self.tools)
        if size > LONGEST_SCHEMAS:
            raise InputError(
                f"the schemas of the tools have {size:,} characters; the limit is "
                f"{LONGEST_SCHEMAS:,}; shorten them, or send fewer tools"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"two tools are named {twice!r}; rename one")
        missing = sorted((self.only or frozenset()) - {*names})
        if missing:
            raise InputError(f"tool_choice names {_shown(missing[0])}, which is no tool")
        if self.choice == "required" and not self.callable:
            raise InputError("tool_choice requires a call, and there is no tool to call")

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Return the functions that may be called."""
        if self.choice == "none":
            return ()
        return tuple(one for one in self.tools if self.only is None or one.name in self.only)

    def for_template(self) -> list[dict[str, Any]]:
        """Return the functions as chat templates take them."""
        return [one.for_template() for one in self.tools]


def tool_use(
    tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None
) -> ToolUse | None:
    """Return what OpenAI's fields ``tools``, ``tool_choice``, ``parallel_tool_calls`` ask for.

    Returns:
        None where there are no tools.

    Raises:
        InputError: they cannot be, or do not fit together.
    """
    made = tuple(Tool.of(one, f"tools[{index}]") for index, one in enumerate(tools or ()))
    mode, only = _chosen(choice)
    if not made:
        if mode == "required":
            raise InputError("tool_choice requires a call, and there are no tools; send some")
        return None
    # A function that is named is called once.
    once = mode == "required" and only is not None and len(only) == 1
    return ToolUse(made, mode, only, parallel is not False and not once)


def _chosen(choice: Any) -> tuple[Literal["auto", "required", "none"], frozenset[str] | None]:
    """Return the mode of a ``tool_choice``, and the names that it allows."""
    if choice is None:
        return "auto", None
    if choice in ("auto", "required", "none"):
        return choice, None
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            own = choice.get("function", choice)
            name = own.get("name") if isinstance(own, Mapping) else None
            if isinstance(name, str):
                return "required", frozenset({name})
        if choice.get("type") == "allowed_tools":
            own = choice.get("allowed_tools", choice)
            own = own if isinstance(own, Mapping) else {}
            mode, listed = own.get("mode"), own.get("tools")
            if mode in ("auto", "required") and isinstance(listed, list):
                parts = [one.get("function", one) for one in listed if isinstance(one, Mapping)]
                names = [str(one.get("name")) for one in parts if isinstance(one, Mapping)]
                if len(names) == len(listed):
                    return mode, frozenset(names)
    raise InputError(
        "tool_choice is auto, required, none, a function "
        '({"type": "function", "function": {"name": ...}}) or allowed_tools'
    )


def call_id(digits: str) -> str:
    """Return the id of a call, of at least 24 hexadecimal digits."""
    return f"call_{digits[:24]}"


def new_call_id() -> str:
    """Return another id of a call."""
    return call_id(secrets.token_hex(12))


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by a model.

    Attributes:
        arguments: JSON text as the model wrote it; not valid JSON if it was cut off.
    """

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id)

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments, read. Raises InputError: they are no JSON object."""
        found = parsed_arguments(self.arguments)
        if isinstance(found, str):
            raise InputError(
                f"the arguments of the call of {self.name} are no JSON object: {_shown(found)}; "
                "send that back as its result"
            )
        return found

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates take it: arguments as an object where they are one."""
        own = {"name": self.name, "arguments": parsed_arguments(self.arguments)}
        return {"id": self.id, "type": "function", "function": own}

    def as_json(self) -> dict[str, Any]:
        """Return it as OpenAI's chats show it."""
        own = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": own}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no JSON can be written with {text[:20]}")
    return number


def read_json(text: str) -> Any:
    """Return a value that can be written as JSON again.

    Raises:
        ValueError: it is no JSON, or holds NaN or a number beyond floats (1e999).
        RecursionError: it is nested too deep.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def parsed_arguments(arguments: str) -> dict[str, Any] | str:
    """Return arguments as an object; the text itself where they are none that can be read."""
    try:
        found = read_json(arguments if arguments.strip() else "{}")
        if "\\u" in arguments:  # may be half a pair of surrogates, which no tokenizer reads
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def arguments_text(given: Any) -> str:
    """Return arguments, an object or JSON text, as JSON text."""
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
