"""What a grammar lets through is what its schema allows; right values by arithmetic and by hand."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mmkv.calls.formats import Hermes, Llama3, QwenXml
from mmkv.calls.parser import ThoughtMarks, ToolFormat
from mmkv.calls.tools import Tool, ToolUse
from mmkv.engine.errors import InputError
from mmkv.grammar import (
    MOST_GRAMMARS,
    Grammars,
    ReplyRules,
    RuleState,
    answer_schema,
    require_tools,
)

BYTES = LLTokenizer("byte")


def begun(grammar: str) -> LLMatcher:
    assert not LLMatcher.validate_grammar(grammar, BYTES)
    return LLMatcher(BYTES, grammar)


def answering(schema: dict[str, Any]) -> LLMatcher:
    """Return the state before a strict answer. Raises InputError."""
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    grammar = ReplyRules(answer_schema(form)[0]).grammar(json.dumps)
    assert grammar is not None
    return begun(grammar)


def lets_through(matcher: LLMatcher, text: str) -> bool:
    state, tokens = matcher.deep_copy(), list(text.encode())
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


# Bounds beside which others have the same integer part, or lie one step of any digit away.
BOUNDS = (None, -2.5, -2, -0.05, 0, 0.5, 1, 1.05, 100)


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("strict", itertools.product([False, True], repeat=2))
def test_numbers_beside_their_bounds(kind: str, strict: tuple[bool, bool]) -> None:
    steps = [Decimal(step) for step in ("0", "1", "0.5", "0.1", "0.01", "0.0001")]
    names = ["exclusiveMinimum" if strict[0] else "minimum"]
    names += ["exclusiveMaximum" if strict[1] else "maximum"]
    for bounds in itertools.product(BOUNDS, repeat=2):
        given = [(name, one) for name, one in zip(names, bounds, strict=True) if one is not None]
        try:
            state = answering({"type": kind, **dict(given)})
        except InputError:
            continue  # nothing lies between them
        low, high = (None if one is None else Decimal(str(one)) for one in bounds)
        near = {
            one + sign * step
            for one in (low, high)
            if one is not None
            for step in steps
            for sign in (1, -1)
        }
        for value in near:
            fits = kind == "number" or value % 1 == 0
            fits &= low is None or value > low or (value == low and not strict[0])
            fits &= high is None or value < high or (value == high and not strict[1])
            assert lets_through(state, f"{value.normalize():f}") == fits, (given, value)
            if not fits and value % 1:
                assert not lets_through(state, f"{value:f}0"), (given, value)


DATES = {"type": "string", "format": "date"}
SHOWN = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
ANSWERS = [
    ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0.1", "0"),
    ({"$ref": "#/$defs/n", "maximum": 0.5, "$defs": {"n": {"exclusiveMinimum": 0}}}, "0.1", "0"),
    ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "-0.5", "-0"),
    ({"type": "number", "exclusiveMinimum": 0, "minimum": 3}, "3", "2"),
    ({"type": "object", **SHOWN}, '{"a":1,"b":"x"}', '{"a":1,"\\u0061":"x"}'),
    ({"const": {"exclusiveMinimum": 0}}, '{"exclusiveMinimum":0}', '{"minimum":1e-14}'),
    ({"properties": {"enum": DATES}}, '{"enum":"2024-02-29"}', '{"enum":"2023-02-29"}'),
    (DATES | {"pattern": "^20"}, '"2000-02-29"', '"1900-02-29"'),
    ({"type": "string", "format": "time"}, '"23:59:59Z"', '"12:00:60Z"'),
    (DATES | {"format": "date-time"}, '"2024-02-29T01:02:03Z"', '"2023-02-29T01:02:03Z"'),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), ANSWERS)
def test_a_schema_lets_through_what_it_says(schema: dict[str, Any], right: str, wrong: str) -> None:
    state = answering(schema)
    assert (lets_through(state, right), lets_through(state, wrong)) == (True, False)


CALLS = [
    (Hermes, {"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}, None),
    (QwenXml, {"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}, None),
    (QwenXml, {"a": {"type": "string", "enum": ["b", 0]}}, None),
    (QwenXml, {}, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
    (QwenXml, {"b": {"type": "integer"}, "a": {"type": "integer", "const": 1}}, True),
]


@pytest.mark.parametrize(("form", "named", "others"), CALLS)
def test_arguments_are_what_their_schema_says(
    form: type[ToolFormat], named: dict[str, Any], others: Any
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": named}
    tool = Tool("f", "", schema if others is None else {**schema, "additionalProperties": others})
    state = begun(form().grammar([tool], json.dumps, False))
    begin, end = '<tool_call>\n{"name": "f", "arguments": {"a": ', "}}\n</tool_call>"
    if form is QwenXml:
        begin, end = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
    for value, fits in {"0.1": False, "b": False, "1": False, "0": False}.items():
        fits = value == {"enum": "b", "const": "1"}.get([*named.get("a", "0")][-1], "0.1")
        if form is QwenXml:
            value = f"<parameter=a>\n{value}\n</parameter>\n"
        assert lets_through(state, begin + value + end) == fits
    if others is True:
        twice = "".join(f"<parameter=a>\n{one}\n</parameter>\n" for one in (1, "b"))
        assert not lets_through(state, begin + twice + end)


@pytest.mark.parametrize("between", ["", "\n", "; ", ";", ", ", "and "])
def test_a_second_call_is_bound_behind_what_stands_between_calls(
    between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_byte = SimpleNamespace(of=lambda token: bytes([token]))
    monkeypatch.setattr("mmkv.grammar.token_bytes", lambda _: one_byte)
    grammars: Any = SimpleNamespace(known=BYTES, tokenizer=None, spell=json.dumps, matcher=begun)
    rules = ReplyRules(format=Llama3(), use=ToolUse((Tool("f", "", {"type": "object"}),)))
    state = RuleState(grammars, rules, None, opened=False)
    bound = []
    for text in ('{"name"', ': "f", "parameters": {}}', between, '{"name"'):
        for token in text.encode():
            state.take(token)
        bound.append(state.masks)
    assert bound == [True, False, False, between not in (", ", "and ")]


@pytest.mark.parametrize("answers", [True, False])
def test_a_thought_is_begun_where_no_answer_is_bound(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_byte = SimpleNamespace(of=lambda token: bytes([token]))
    monkeypatch.setattr("mmkv.grammar.token_bytes", lambda _: one_byte)
    grammars: Any = SimpleNamespace(known=BYTES, tokenizer=None, spell=json.dumps, matcher=begun)
    use = ToolUse((Tool("f", "", {"type": "object"}),))
    answer = answer_schema({"type": "json_object"})[0] if answers else None
    rules = ReplyRules(answer) if answers else ReplyRules(format=Llama3(), use=use)
    state = RuleState(grammars, rules, ThoughtMarks("<t>", "</t>"), opened=False)
    assert (state.masks, state._marks is None) == (answers, answers)


def test_what_a_grammar_would_ignore_is_refused_or_said() -> None:
    with pytest.raises(InputError, match="minProperties 2 needs names"):
        answering({"type": "object", "minProperties": 2})
    for own, what in [
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength"),
        ({"properties": {}, "required": ["a"]}, "required"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
    ]:
        for strict in (False, True):
            use = ToolUse((Tool("f", "", own, strict),))
            if not strict:
                (note,) = require_tools(QwenXml(), use).notes
                assert f" {what} in calls of the form qwen-xml" in note
                continue
            with pytest.raises(InputError, match=f"the tool f: .* {what} in calls of the form"):
                require_tools(QwenXml(), use)


def drawn_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema of what llguidance follows, merged or not."""
    numbers = [0, 1, -1, 0.5, -0.5, 2, 10, draw.randint(-9, 9), round(draw.uniform(-3, 3), 2)]
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    number = {"type": draw.choice(["number", "integer"])}
    number |= {name: draw.choice(numbers) for name in bounds if draw.random() < 0.5}
    text: dict[str, Any] = {"type": "string", "minLength": draw.randint(0, 3)}
    text |= draw.choice([{}, {"maxLength": 4}, {"pattern": draw.choice(["^[a-c]+$", "a", "^.b"])}])
    text |= draw.choice([{}, {}, {"format": draw.choice(["date", "ipv4", "email"])}])
    plain = [number, number, text, {"enum": [1, "a", None, [1], {"a": 1.5}]}, {"type": "boolean"}]
    if not depth:
        return draw.choice(plain)

    def inner() -> dict[str, Any]:
        return drawn_schema(draw, depth - 1)

    kind = draw.randrange(7)
    if kind == 0:
        return {"type": "array", "items": inner(), "minItems": draw.randint(0, 2)}
    if kind == 1:
        return {"type": "array", "prefixItems": [inner(), inner()], "maxItems": draw.randint(0, 3)}
    if kind < 4:
        known = {name: inner() for name in draw.sample(["a", "b", "é", "a b"], draw.randint(0, 3))}
        made = {"type": "object", "properties": known, "required": list(known)[:1]}
        return made | draw.choice([{}, {"additionalProperties": draw.choice([False, inner()])}])
    if kind == 4:
        return {draw.choice(["anyOf", "allOf", "oneOf"]): [inner(), inner()]}
    return {**inner(), **draw.choice([{}, {"allOf": [inner()]}])}


def exact(number: str) -> int | float | Decimal:
    """Return a number of JSON as it stands, where it has no exponent."""
    if "e" in number.lower():
        return float(number)
    return int(Decimal(number)) if Decimal(number) % 1 == 0 else Decimal(number)


def walked(state: LLMatcher, draw: random.Random) -> str | None:
    """Return a text that the grammar lets through, of random bytes; None: it grew too long."""
    made, liked = bytearray(), [b'"]}:,', b"0123456789-.", b"ab\\u0061", bytes(range(32, 127))]
    for _ in range(300):
        bias = state.compute_logit_bias()
        allowed = [token for token in range(len(bias)) if bias[token]]
        ends = BYTES.eos_token in allowed
        if not allowed or (ends and (len(allowed) == 1 or draw.random() < 0.4)):
            return made.decode() if ends else None
        of_kind = [token for token in allowed if token < 256 and token in draw.choice(liked)]
        token = draw.choice(of_kind or [one for one in allowed if one < 256])
        state.consume_token(token)
        made.append(token)
    return None


@pytest.mark.drawn(reason="a thousand schemas take minutes")
def test_texts_of_drawn_schemas_are_valid() -> None:
    """By the package jsonschema, with numbers as they stand; others with a character changed."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator
    found = 0
    for seed in range(1200):
        draw = random.Random(seed)
        schema = drawn_schema(draw)
        try:
            state = answering(schema)
        except InputError:
            continue
        exactly = json.loads(json.dumps(schema), parse_float=exact)
        judge = validator(exactly, format_checker=validator.FORMAT_CHECKER)
        for _ in range(8):
            text = walked(state.deep_copy(), draw)
            if text is None:
                continue
            at, other = (
                draw.randrange(len(text) + 1),
                draw.choice(["", "0", "-", ".", "\\u0061", "a"]),
            )
            for said in (text, text[:at] + other + text[at + 1 :]):
                if lets_through(state, said):
                    found += 1
                    value = json.loads(said, parse_float=exact)
                    wrong = [error.message for error in judge.iter_errors(value)]
                    assert not wrong, (schema, said)
    assert found > 3_000


def test_the_latest_grammars_are_kept() -> None:
    grammars = Grammars(None, 256, [])
    vars(grammars)["known"] = BYTES
    texts = [f'start: "{at}"' for at in range(MOST_GRAMMARS + 1)]
    for at in [*range(MOST_GRAMMARS), 0, MOST_GRAMMARS]:
        state = grammars.matcher(texts[at])
        assert lets_through(state, str(at))
        state.consume_token(ord(str(at)))  # which nobody else's has read
        assert lets_through(grammars.matcher(texts[at]), str(at))
    assert list(grammars._made) == [*texts[2:-1], texts[0], texts[-1]]
