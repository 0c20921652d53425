"""Replies that follow a grammar, as a mask over the next tokens (llguidance).

``response_format`` has a reply be JSON; functions that may be called have their calls be as their
schemas say.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmkv.calls.formats import ESCAPES
from mmkv.calls.tools import LONGEST_SCHEMA, SCHEMA_DATA, SCHEMA_NAMES, exact_schema
from mmkv.detokenizer import token_bytes
from mmkv.engine.errors import STOPS, InputError

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLTokenizer

    from mmkv.calls.parser import Spell, ThoughtMarks, ToolFormat
    from mmkv.calls.tools import Tool, ToolUse

_TYPES = {
    "name": (str, "a text"),
    "description": (str, "a text"),
    "strict": (bool, "true or false"),
}


@dataclass(frozen=True)
class ReplyRules:
    """What a reply has to follow.

    Attributes:
        answer: a JSON schema of its text; None: any text.
        format: how it writes calls; use: what it may call, and whether it has to.
        notes: on the parts of the schemas that are not followed.
    """

    answer: Mapping[str, Any] | None = None
    format: ToolFormat | None = None
    use: ToolUse | None = None
    notes: tuple[str, ...] = ()

    @property
    def bind(self) -> bool:
        """Whether they forbid any reply."""
        return self.answer is not None or (self.use is not None and bool(self.use.callable))

    def grammar(self, spell: Spell) -> str | None:
        """Return the grammar of the whole reply; None where it may begin with any text."""
        use, answer = self.use, self.answer
        if use is None or not use.callable:
            return None if answer is None else _json_grammar(answer)
        must = use.choice == "required"
        if answer is None and not must:
            return None
        assert self.format is not None
        rules = self.format.grammar(use.callable, spell, use.parallel)
        if answer is None or must:
            return rules
        shown = json.dumps({"x-guidance": _COMPACT, **exact_schema(answer)})
        first, _, others = rules.partition("\n")
        return f"start: calls | answer\n{first.replace('start', 'calls', 1)}\n{others}\n" + (
            f"answer: %json {shown}"
        )


def reply_rules(response_format: Any, format: ToolFormat, use: ToolUse | None) -> ReplyRules:
    """Return what a reply has to follow. Raises InputError: :func:`answer_schema` says when."""
    answer, notes = answer_schema(response_format)
    if use is None:
        return ReplyRules(answer, notes=notes)
    return ReplyRules(answer, format, use, (*notes, *use.notes))


def answer_schema(response_format: Any) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the schema that a request's ``response_format`` asks for, None for plain text.

    Returns:
        it, without what llguidance cannot follow of one that is not strict, and which parts of it
        are not followed.

    Raises:
        InputError: it is none of OpenAI's, or llguidance cannot follow the schema.
    """
    if response_format is None:
        return None, ()
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError("response_format has to be of type text, json_object or json_schema")
    named = response_format.get("json_schema") if kind == "json_schema" else None
    own = {"json_schema"} if kind == "json_schema" else set()
    _require_known(response_format, {"type", *own}, "")
    if kind == "text":
        return None, ()
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        schema = _schema_of(named)
    if not isinstance(schema, dict):
        raise InputError("response_format.json_schema.schema has to be an object")
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    if len(text := json.dumps(schema)) > LONGEST_SCHEMA:
        raise InputError(f"the schema is longer than {LONGEST_SCHEMA:,} characters; shorten it")
    if named is not None and named.get("strict"):
        _require_bearable(schema)
        _require_followed(_json_grammar(schema))
        return schema, ()
    schema["x-guidance"] = _LENIENT
    wrong, ignored = _tried(schema)
    if not wrong:
        return schema, _notes("the answer", ignored)
    schema, left_out = without_unfollowed(text)
    schema["x-guidance"] = _LENIENT
    wrong, ignored = _tried(schema)
    if wrong:
        raise _cannot_follow(wrong)
    return schema, _notes("the answer", (*left_out, *ignored))


def _schema_of(named: Any) -> Any:
    if not isinstance(named, dict):
        return None
    _require_known(named, {"schema", *_TYPES}, ".json_schema")
    for name, (kind, wanted) in _TYPES.items():
        if not isinstance(named.get(name), (kind, type(None))):
            raise InputError(f"response_format.json_schema.{name} has to be {wanted}")
    return named.get("schema")


def _require_known(given: dict[str, Any], known: Collection[str], where: str) -> None:
    for name in given:
        if name not in known and given[name] is not None:
            shown = ascii(name[:60])[1:-1]
            raise InputError(f"response_format{where}.{shown} is not a known field; leave it out")


# Small models would go on with blank space; there is none between JSON's marks.
_COMPACT = {"whitespace_flexible": False, **ESCAPES}
# What llguidance does not know is not followed, and no error.
_LENIENT = {**_COMPACT, "lenient": True}


def _json_grammar(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema({"x-guidance": _COMPACT, **exact_schema(schema)})
    except STOPS:
        raise
    except BaseException as error:
        raise _cannot_follow(str(error)) from error


# Numbers up to this one end the process in llguidance 1.9: it makes -2**63 of them, whose absolute
# value is beyond its integers, and looks for that for ever.
_FATAL = -(2**63) + 512


def _require_bearable(schema: Any) -> None:
    """Raise InputError for a number that llguidance dies of, or names that it counts twice."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.values()
            if _counts_twice(value):
                least = value["minProperties"]
                raise _cannot_follow(f"minProperties {least} needs names that properties lacks")
        elif isinstance(value, (list, tuple)):
            left += value
        elif isinstance(value, int | float) and value <= _FATAL:
            raise _cannot_follow(f"the number {value} is too far below zero")


def _counts_twice(schema: Mapping[str, Any]) -> bool:
    """Whether ``minProperties`` asks for several names that the model makes up."""
    least, known = schema.get("minProperties"), schema.get("properties")
    return isinstance(least, int) and least > 1 + (len(known) if isinstance(known, Mapping) else 0)


def _require_followed(grammar: str) -> None:
    """Raise InputError for a grammar that llguidance cannot follow."""
    if wrong := _wrong_in(grammar)[0]:
        raise _cannot_follow(wrong)


@functools.lru_cache(maxsize=16)  # an agent sends the same tools with each of its steps
def _wrong_in(grammar: str) -> tuple[str, tuple[str, ...]]:
    """Return why llguidance cannot follow a grammar, "" where it can, and what it ignores."""
    from llguidance import LLMatcher

    try:
        failed, said = LLMatcher.validate_grammar_with_warnings(grammar)
    except STOPS:
        raise
    except BaseException as error:  # a panic, where it cuts a long value inside a letter
        return str(error) or "llguidance gave up", ()
    return (said[0], ()) if failed else ("", tuple(dict.fromkeys(said)))


def _tried(schema: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Do as :func:`_wrong_in` for a schema."""
    try:
        _require_bearable(schema)
        return _wrong_in(_json_grammar(schema))
    except InputError as error:
        return str(error), ()


def _notes(whose: str, parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"not followed of the schema of {whose}: {part[:200]}" for part in parts[:_TOLD])


_TOLD = 8  # parts that are not followed
# Keywords whose values llguidance reads and cannot always follow: expressions with look-around,
# numbers beyond its own. What else it does not know it leaves out by itself.
_NUMBERS = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MOST_TRIED = 64  # values of a schema, of which each takes a millisecond


@functools.lru_cache(maxsize=256)
def _fails(keyword: str, value: Any, kind: str) -> bool:
    """Whether llguidance cannot follow a keyword by itself."""
    if isinstance(value, int | float) and value <= _FATAL:
        return True
    return bool(_wrong_in(f"start: %json {json.dumps({'type': kind, keyword: value})}")[0])


def without_unfollowed(schema: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a schema, given as JSON, without the keywords that llguidance cannot follow.

    Returns:
        it, and where they stand.

    Raises:
        InputError: too many would have to be tried.
    """
    bare = _Bare()
    return bare.schema(json.loads(schema), ""), tuple(bare.left_out)


class _Bare:
    """Goes through a schema and leaves out what llguidance cannot follow."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._tried: set[tuple[str, Any, str]] = set()

    def schema(self, value: Any, place: str) -> Any:
        """Return a schema, or what holds some."""
        if isinstance(value, list):
            return [self.schema(one, f"{place}[{at}]") for at, one in enumerate(value)]
        if not isinstance(value, dict):
            return value
        made: dict[str, Any] = {}
        unknown_names = False  # of patterns that are left out
        for name, inner in value.items():
            where = f"{place}.{name}".removeprefix(".")
            if self._is_beyond(name, inner, value):
                self.left_out.append(f"{where} ({str(inner)[:60]})")
            elif name in SCHEMA_NAMES and isinstance(inner, dict):
                made[name] = self._named(name, inner, where)
                unknown_names |= len(made[name]) < len(inner)
            else:
                made[name] = inner if name in SCHEMA_DATA else self.schema(inner, where)
        if unknown_names:
            made.pop("additionalProperties", None)
        return made

    def _named(self, keyword: str, schemas: dict[str, Any], place: str) -> dict[str, Any]:
        """Return schemas by name, without those of patterns that cannot be followed."""
        made = {}
        for name, inner in schemas.items():
            if keyword == "patternProperties" and self._fails("pattern", name, "string"):
                self.left_out.append(f"{place} ({name[:60]})")
            else:
                made[name] = self.schema(inner, f"{place}.{name}")
        return made

    def _is_beyond(self, name: str, inner: Any, schema: dict[str, Any]) -> bool:
        """Whether a keyword of a schema has to be left out."""
        if name == "minProperties":
            return _counts_twice(schema)
        if name in _NUMBERS and type(inner) in (int, float):
            kind = "integer" if schema.get("type") == "integer" else "number"
            return self._fails(name, inner, kind)
        if not isinstance(inner, str):
            return False
        if name == "pattern":
            return self._fails("pattern", inner, "string")
        return name == "$ref" and not inner.startswith("#")

    def _fails(self, keyword: str, value: Any, kind: str) -> bool:
        self._tried.add((keyword, value, kind))
        if len(self._tried) > MOST_TRIED:
            raise _cannot_follow("it has very many patterns and bounds")
        return _fails(keyword, value, kind)


def require_tools(format: ToolFormat, use: ToolUse) -> ToolUse:
    """Return what may be called, bound to what llguidance can follow of the schemas.

    Raises:
        InputError: names a function whose schema cannot be followed, though it is strict, or at
            all.
    """
    tools, notes = list(use.tools), list[str]()
    for tool in tools:
        if (part := format.unfollowed(tool)) is not None:
            part += f" in calls of the form {format.name}"
            if tool.strict:
                with _naming(tool):
                    raise _cannot_follow(part)
            notes += _notes(tool.name, (part,))
    wrong, ignored = _wrong_with(format, tools)
    if wrong:
        for at, tool in enumerate(tools):
            with _naming(tool):
                if tool.strict or tool.parameters is None or not _wrong_with(format, (tool,))[0]:
                    _require_bearable(tool.schema)
                    continue
                followed, left_out = without_unfollowed(json.dumps(tool.parameters))
            tools[at] = replace(tool, followed=followed)
            notes += _notes(tool.name, left_out)
        wrong, ignored = _wrong_with(format, tools)
    for tool in tools if wrong else ():
        with _naming(tool):
            if named := _wrong_with(format, (tool,))[0]:
                raise _cannot_follow(named)
    if wrong:
        raise _cannot_follow(wrong)
    return replace(use, tools=tuple(tools), notes=(*notes, *_notes("the functions", ignored)))


def _wrong_with(format: ToolFormat, tools: Sequence[Tool]) -> tuple[str, tuple[str, ...]]:
    """Do as :func:`_wrong_in` for the calls of some functions."""
    try:
        for tool in tools:
            _require_bearable(tool.bound)
    except InputError as error:
        return str(error), ()
    return _wrong_in(format.grammar(tools, json.dumps, False))


@contextmanager
def _naming(tool: Tool) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"the tool {tool.name}: {error}") from error


def _cannot_follow(reason: str) -> InputError:
    lines = reason.strip().splitlines() or ["llguidance gave up"]
    # Of an expression, the line that says why stands last.
    said = next((one[7:] for one in lines if one.startswith("error: ")), lines[0])[:300]
    return InputError(f"the schema cannot be followed: {said}; simplify it")


MOST_GRAMMARS = 8


class Grammars:
    """Makes the state of a grammar for each reply, on one tokenizer.

    Args:
        vocabulary: tokens that the model's logits stand for; eos: those that end a reply.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self.tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, sorted(eos)
        # The latest, at their beginnings: those of 128 tools take 50 ms to make, for each call.
        self._made: dict[str, LLMatcher] = {}

    @functools.cached_property
    def known(self) -> LLTokenizer:
        """The tokenizer as llguidance knows it."""
        from llguidance.hf import from_tokenizer

        most = max(self._vocabulary, len(self.tokenizer))
        return from_tokenizer(self.tokenizer, most, self._eos)

    @functools.cached_property
    def added(self) -> dict[str, tuple[int, bool]]:
        """The added tokens by their texts; whether a decoder leaves them out."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {str(one): (token, bool(one.special)) for token, one in added.items()}

    def spell(self, text: str) -> str:
        """Write a text in a grammar: an added token that llguidance sets apart by its number."""
        token, _ = self.added.get(text, (None, False))
        apart = token is not None and self.known.is_special_token(token)
        return f"<[{token}]>" if apart else json.dumps(text)

    def shown(self, format: ToolFormat | None, thoughts: ThoughtMarks | None) -> frozenset[int]:
        """Return the special tokens that are marks of calls or thoughts: those have to be shown."""
        marks = () if format is None else format.special
        around = () if thoughts is None else (thoughts.open, thoughts.close)
        found = [self.added[one] for one in (*marks, *around) if one in self.added]
        return frozenset(token for token, hidden in found if hidden)

    def begin(
        self, rules: ReplyRules, marks: ThoughtMarks | None = None, opened: bool = False
    ) -> RuleState | None:
        """Return the state before a reply's first token; None where nothing binds it.

        Args:
            marks: of a thought that the reply may begin with, in which no rules hold; None: none.
            opened: whether that has begun.

        Raises:
            InputError: llguidance cannot follow them.
        """
        return RuleState(self, rules, marks, opened) if rules.bind else None

    def matcher(self, grammar: str) -> LLMatcher:
        """Return the state at the beginning of a grammar. Raises InputError."""
        from llguidance import LLMatcher

        made = self._made.pop(grammar, None) or LLMatcher(self.known, grammar)
        if made.is_error():
            raise _cannot_follow(made.get_error())
        self._made[grammar] = made
        if len(self._made) > MOST_GRAMMARS:
            del self._made[next(iter(self._made))]
        return made.deep_copy()


class RuleState:
    """Where one reply stands in its rules.

    Text is free where they let it be; behind the opening of a call they bind it to the end of that.
    """

    def __init__(
        self, grammars: Grammars, rules: ReplyRules, marks: ThoughtMarks | None, opened: bool
    ) -> None:
        self._grammars, self._rules = grammars, rules
        self._bytes = token_bytes(grammars.tokenizer)
        self._matcher: LLMatcher | None = None
        self._whole = rules.grammar(grammars.spell)
        self._thought_end = marks.close.encode() if marks is not None and opened else None
        # Of a thought that the model may begin; not where a grammar binds its first token.
        self._marks = marks if not opened and self._whole is None else None
        self._written = b""  # since the last mark; only the end of it, as long as a mark may be
        self._may_call = True  # where calls stand only first: nothing else is written yet
        if self._thought_end is None:
            self._bind()

    @property
    def masks(self) -> bool:
        """Whether the next token is bound."""
        return self._matcher is not None

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits`` [vocab] with -inf for tokens that may not come next."""
        import torch

        if self._matcher is None:
            return logits
        # A byte per token: 0 for one that may not come.
        flags = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        flags = flags[: logits.numel()].to(logits.device)
        return logits.float().masked_fill(flags == 0, -torch.inf)

    def take(self, token: int) -> None:
        """Go on by a token."""
        if self._matcher is not None:
            self._matcher.consume_token(token)
            if self._matcher.is_stopped() and self._matcher.is_accepting():
                self._close()
            return
        self._written += self._bytes.of(token) or b""
        if self._marks is not None and not self._begin(self._marks):
            return
        if self._thought_end is not None:
            found = self._written.find(self._thought_end)
            if found >= 0:
                behind = self._written[found + len(self._thought_end) :]
                self._thought_end, self._written = None, b""
                self._bind()
                self._go_on(behind)
            else:
                self._written = self._written[-len(self._thought_end) :]
        else:
            self._look_for_call()

    def _begin(self, marks: ThoughtMarks) -> bool:
        """Find whether a thought begins; return whether that is known."""
        bare, mark = self._written.lstrip(), marks.open.encode()
        if bare.startswith(mark):
            self._thought_end, self._written = marks.close.encode(), bare[len(mark) :]
        elif mark.startswith(bare):
            return False
        self._marks = None
        return True

    def _bind(self) -> None:
        if self._whole is not None:
            self._matcher = self._grammars.matcher(self._whole)

    def _go_on(self, text: bytes) -> None:
        """Go on by text that a token brought beyond a mark."""
        if self._matcher is None:
            self._written += text
            self._look_for_call()
        elif text.strip() and not self._take_text(text):
            self._matcher = None  # not what was expected: free text

    def _take_text(self, text: bytes) -> bool:
        assert self._matcher is not None
        tokens = self._grammars.known.tokenize_bytes(text)
        return self._matcher.try_consume_tokens(tokens) == len(tokens)

    def _look_for_call(self) -> None:
        """Bind what follows the opening of a call, if that has just been written."""
        format, use = self._rules.format, self._rules.use
        if format is None or use is None or not use.callable:
            return
        if format.only_first and not self._may_call:
            return
        between = format.between.encode()
        for opening in format.openings:
            at = self._written.find(opening.encode())
            if at < 0 or (format.only_first and self._written[:at].strip(between)):
                continue
            behind = self._written[at + len(opening.encode()) :]
            spell = self._grammars.spell
            grammar = format.grammar_behind(use.callable, opening, spell, use.parallel)
            if grammar is None:
                continue
            self._matcher = self._grammars.matcher(grammar)
            if behind and not self._take_text(behind):
                self._matcher = None  # these marks stand in ordinary text
                continue
            self._written = b""
            return
        longest = max(map(len, format.openings))
        if format.only_first:
            self._may_call = len(self._written.lstrip(between)) < longest
        else:
            self._written = self._written[-4 * longest :]

    def _close(self) -> None:
        """Let text be free again behind a call, if more may come than the end of the reply."""
        use = self._rules.use
        if self._whole is None and use is not None and use.parallel:
            self._matcher, self._written, self._may_call = None, b"", True

    @property
    def failure(self) -> InputError | None:
        """Why no token can come next: llguidance has given up, and allows only the end then."""
        if self._matcher is not None and self._matcher.is_error():
            return _cannot_follow(self._matcher.get_error())
        return None
