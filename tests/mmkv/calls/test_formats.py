"""Replies with calls, read in pieces that end anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmkv.calls.formats import FORMATS, QwenXml, format_of, whole_call
from mmkv.calls.parser import (
    THOUGHT_MARKS,
    CallPiece,
    ParsedReply,
    ReplyParser,
    ThoughtMarks,
    ToolFormat,
    parse,
)
from mmkv.calls.tools import Tool, ToolUse, parsed_arguments
from mmkv.grammar import Grammars
from tests.support.tool_templates import QWEN_XML, tool_tokenizer

TOOLS = (
    Tool("click", "Click.", {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}),
    Tool("write", "Write.", {"properties": {"text": {"type": "string"}, "n": {"type": "number"}}}),
    Tool("done"),
)
THINK = ThoughtMarks("<think>", "</think>")
FORMS = {one.name: one for one in FORMATS}

# Per format: replies as its models write them, their text, and their calls.
RECORDED = [
    (one["format"], one["reply"], one["text"], [(name, given) for name, given in one["calls"]])
    for one in json.loads(Path(__file__).with_name("replies.json").read_text())
]


def _parser(name: str, opened: bool = False, use: ToolUse | None = None) -> ReplyParser:
    return ReplyParser(FORMS[name](), use or ToolUse(TOOLS), THINK, opened)


def _calls(made: ParsedReply) -> list[tuple[str, Any]]:
    found = []
    for one in made.calls:
        try:
            found.append((one.name, json.loads(one.arguments)))
        except ValueError:
            found.append((one.name, one.arguments))
    return found


@pytest.mark.parametrize(("name", "reply", "text", "calls"), RECORDED)
def test_a_reply_is_read_alike_wherever_its_pieces_end(
    name: str, reply: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    made = parse(_parser(name), reply)
    assert (made.text, made.thought, _calls(made), made.complete) == (text, None, calls, True)
    thought = parse(_parser(name), f"<think>\nSo, <tool_call> it is.\n</think>\n\n{reply}")
    assert thought.thought == "So, <tool_call> it is."
    assert (thought.text, _calls(thought)) == (text, calls)
    for size in (1, 2, 3, 5, 7):
        parser, again = _parser(name), ParsedReply()
        for start in range(0, len(reply), size):
            again.add(parser.push(reply[start : start + size]))
        again.add(parser.finish())
        assert (again.text, _calls(again), again.complete) == (text, calls, True), size
    for cut in range(len(reply)):
        parser, again = _parser(name), ParsedReply()
        for piece in (reply[:cut], reply[cut:]):
            again.add(parser.push(piece))
        again.add(parser.finish())
        assert (again.text, _calls(again)) == (text, calls), cut


@pytest.mark.parametrize(("name", "reply", "text", "calls"), RECORDED)
def test_a_reply_that_is_cut_off_shows_no_marks(
    name: str, reply: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    """Names are whole, arguments are a beginning of the whole ones, text is no mark."""
    whole = parse(_parser(name), reply)
    for cut in range(len(reply)):
        made = parse(_parser(name), reply[:cut], cut=True)
        assert [one.name for one in made.calls] == [one.name for one in whole.calls][
            : len(made.calls)
        ]
        for one, other in zip(made.calls, whole.calls, strict=False):
            assert other.arguments.startswith(one.arguments.rstrip())
        if calls and "<tool" not in text:
            assert "<tool_call>" not in made.text and '"name"' not in made.text, made.text


def test_arguments_come_as_they_are_written() -> None:
    parser = _parser("hermes")
    reply = '<tool_call>\n{"name": "write", "arguments": {"text": "one two three'
    found = [one for mark in reply for one in parser.push(mark)]
    written = "".join(one.text for one in found if isinstance(one, CallPiece))
    assert written == '{"text": "one two three'


def test_a_thought_that_the_prompt_opened() -> None:
    made = parse(_parser("hermes", opened=True), "\nHm.\n</think>\n\nYes.")
    assert (made.thought, made.text) == ("Hm.", "Yes.")
    made = parse(_parser("hermes", opened=True), "Hm")
    assert (made.thought, made.text) == ("Hm", "")
    made = parse(_parser("hermes"), "<thin")
    assert (made.thought, made.text) == (None, "<thin")


# Whether the prompt opens a thought, a reply that repeats marks, and its thought and text by hand.
REPEATED = [
    (True, "<think>\nhm\n</think>\n\nhi", "hm", "hi"),
    (True, "\n<think> <think>hm</think>hi", "hm", "hi"),
    (True, "<think>hm", "hm", ""),
    (True, "<think>", None, ""),
    (True, "</think>hi", None, "hi"),
    (True, "a</think>hi </think> there <think>", "a", "hi </think> there <think>"),
    (False, "<think><think>\nhm</think>hi", "hm", "hi"),
    (False, "<think>a\n<think>\nb</think>hi", "a\n\nb", "hi"),
    (False, "<think>a</think></think>\n\nhi", "a", "hi"),
    (False, "<think>a</think>\n</think>hi", "a", "hi"),
    (False, "<think>\n</think>\n<think>\na</think>hi", "a", "hi"),
    (False, "<think>a</think><think>b</think>hi", "a\nb", "hi"),
    (False, "</think>\n\nhi", None, "hi"),
    (False, "hi <think>x</think>", None, "hi <think>x</think>"),
]


@pytest.mark.parametrize("marks", THOUGHT_MARKS, ids=lambda marks: marks.open)
@pytest.mark.parametrize(("opened", "reply", "thought", "text"), REPEATED)
def test_marks_of_a_thought_that_are_repeated(
    marks: ThoughtMarks, opened: bool, reply: str, thought: str | None, text: str
) -> None:
    reply, text = (
        one.replace("<think>", marks.open).replace("</think>", marks.close) for one in (reply, text)
    )
    for size in (len(reply), 1, 2, 3, 5):
        parser, made = ReplyParser(marks=marks, opened=opened), ParsedReply()
        for start in range(0, len(reply), size):
            made.add(parser.push(reply[start : start + size]))
        made.add(parser.finish())
        assert (made.thought, made.text) == (thought, text), size


def test_what_may_not_be_called_is_text() -> None:
    reply = '<tool_call>\n{"name": "click", "arguments": {}}\n</tool_call>'
    only = ToolUse(TOOLS, only=frozenset({"done"}))
    assert parse(_parser("hermes", use=only), reply).text == reply


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function=", "qwen-xml"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]x[ARGS]", "mistral-named"),
        (None, "hermes"),
    ],
)
def test_a_template_tells_the_format(source: str | None, name: str) -> None:
    made: ToolFormat = format_of(source)
    assert made.name == name


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("llama3", '{"type": "circle", "radius": 3, "te'),
        ("llama3", '{"name": "Ann", "age": 3, "te'),
        ("llama3", '{"type": 3'),
        ("llama3", '{"name": 3, "x'),
        ("hermes", '<tool_call>\n{"name": "other", "arguments": {"x": '),
        ("mistral", "[TOOL_CALLS][{x"),
    ],
)
def test_an_object_that_is_no_call_is_not_held_back(name: str, reply: str) -> None:
    """It comes while it is written, and is not lost where the reply is cut off."""
    parser, made = _parser(name), ParsedReply()
    for mark in reply:
        made.add(parser.push(mark))
    assert made.text[:8] == reply[:8]
    made.add(parser.finish(cut=True))
    assert (made.text, made.calls) == (reply, [])


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", '<tool_call>\n{"arguments": %s, "name": "write"}\n</tool_call>'),
        ("qwen-xml", "<tool_call>\n<function=write>\n<parameter=n>\n%s\n</parameter>\n"),
        ("hermes", '<tool_call>\n{"name": "write", "arguments": "%s"}\n</tool_call>'),
    ],
)
@pytest.mark.parametrize("value", ['"a\\ud800"', '{"n": [1, "\\udc00é"]}'])
def test_half_a_pair_of_surrogates_stays_escaped(name: str, reply: str, value: str) -> None:
    if '"%s"' in reply:
        value = value.replace('"', '\\"')
    (call,) = parse(_parser(name), reply % value).calls
    assert call.arguments.encode() and "\\ud" in call.arguments


SCHEMAS: dict[str, dict[str, Any]] = {
    "const": {"properties": {"a": {"type": "string", "const": "b c"}}},
    "open": {"type": "object"},
    "more": {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    "none": {"type": "object", "properties": {}},
}


@pytest.mark.parametrize(
    ("schema", "given", "fits"),
    [
        ("const", {"a": "b c"}, True),
        ("const", {"a": "other"}, False),
        ("open", {"a": "b", "<": "c"}, False),
        ("open", {"a": "b", "any name": "c"}, True),
        ("open", {"a": "b </parameter> c"}, False),  # the first mark ends the value
        ("more", {"a": "1", "b": "c"}, True),
        ("more", {"a": "b c"}, False),
        ("none", {}, True),
        ("none", {"a": "b"}, False),
    ],
)
def test_what_a_schema_lets_be_written_as_parameters(
    schema: str, given: dict[str, str], fits: bool
) -> None:
    tool = Tool("pick", "", SCHEMAS[schema])
    tokenizer = tool_tokenizer(QWEN_XML)
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = FORMS["qwen-xml"]().grammar([tool], grammars.spell, False)
    each = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    call = f"<tool_call>\n<function=pick>\n{each}</function>\n</tool_call>"
    ids = tokenizer(call, add_special_tokens=False)["input_ids"]
    for _ in range(2):  # each at the beginning, though they share what was made of the grammar
        assert (grammars.matcher(grammar).try_consume_tokens(ids) == len(ids)) == fits
    if fits:
        (made,) = parse(ReplyParser(FORMS["qwen-xml"](), ToolUse((tool,))), call).calls
        assert [*json.loads(made.arguments)] == [*given]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_numbers_that_cannot_be_written_again_are_text(number: str) -> None:
    arguments = f'{{"x": [{number}]}}'
    assert parsed_arguments(arguments) == arguments
    assert whole_call(f'{{"name": "mark", "arguments": {arguments}}}') is None
    tool = Tool("mark", parameters={"type": "object", "properties": {"x": {"type": "number"}}})
    value = f"<parameter=x>\n{number}\n</parameter>"
    said = f"<tool_call>\n<function=mark>\n{value}\n</function>\n</tool_call>"
    (call,) = parse(ReplyParser(QwenXml(), ToolUse((tool,))), said).calls
    assert json.loads(call.arguments) == {"x": number}
