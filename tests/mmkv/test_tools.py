"""Functions that a session's replies call: calls, results, and what a step of an agent reads.

Right values: the conversation rendered and tokenized whole, and read by a fresh session.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

import mmkv.reply
from mmkv import Engine, InputError, Sampling, Session, Tool, ToolCall
from mmkv.calls.formats import Hermes, QwenXml, arguments_rule
from mmkv.calls.tools import tool_use
from mmkv.engine.errors import SessionError
from mmkv.grammar import (
    MOST_TRIED,
    ReplyRules,
    answer_schema,
    require_tools,
    without_unfollowed,
)
from tests.support.chat_models import picture
from tests.support.tool_templates import (
    FORMS,
    call,
    function,
    save_seeing_tool_model,
    save_tool_model,
)

TOOLS = [
    function("press", key={"type": "string", "enum": ["a", "Enter"]}),
    function("point", x={"type": "integer", "minimum": 0, "maximum": 99}),
]
CALLS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "point", "arguments": {"x": 7}}\n</tool_call>',
    "qwen_xml": "I look.\n<tool_call>\n<function=point>\n<parameter=x>\n7\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3": '{"name": "point", "parameters": {"x": 7}}',
    "mistral": '[TOOL_CALLS][{"name": "point", "arguments": {"x": 7}}]',
}
CALL = CALLS["hermes"]
BOTH = (
    '<tool_call>\n{"name": "point", "arguments": {"x": 7}}\n</tool_call>\n'
    '<tool_call>\n{"name": "press", "arguments": {"key": "a"}}\n</tool_call>'
)
LOOSE = Sampling(max_new_tokens=300)


def load(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, dtype="float32", **{"policy": "full"} | options)


@pytest.fixture(scope="module", params=FORMS)
def formed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Engine]:
    folder = save_tool_model(tmp_path_factory.mktemp("form"), FORMS[request.param])
    return request.param, load(folder)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(save_tool_model(tmp_path_factory.mktemp("hermes")))


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the model say some texts, each to its end, and then what it finds likeliest."""
    queue: list[int] = []
    draw = mmkv.reply.Sampler.draw

    def drawn(self: Any, *given: Any) -> int:
        return queue.pop(0) if queue else draw(self, *given)

    monkeypatch.setattr(mmkv.reply.Sampler, "draw", drawn)

    def say(engine: Engine, *texts: str) -> None:
        tokenizer = engine.processor.tokenizer
        queue.clear()
        for text in texts:
            queue.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
            queue.append(tokenizer.eos_token_id)

    return say


def sent(session: Session, text: str = "go", **more: Any) -> str:
    return "".join(session.send(text, sampling=more.pop("sampling", LOOSE), **more))


def answered(session: Session, *results: Any, **more: Any) -> str:
    """Send results of the latest calls, in order."""
    assert session.last is not None
    pairs = list(zip(session.last.tool_calls, results, strict=True))
    return "".join(session.send_results(pairs, sampling=more.pop("sampling", LOOSE), **more))


def called(session: Session) -> list[tuple[str, Any]]:
    assert session.last is not None
    return [(one.name, one.parsed) for one in session.last.tool_calls]


def whole(session: Session, images: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the conversation up to its latest reply, rendered and encoded at once."""
    text = session.template_with(session.tools).render(session.history[:-1], opening=True)
    return session.engine.processor.encode(text, images)


def greedy(session: Session, inputs: dict[str, Any], count: int) -> list[int]:
    """Return the likeliest tokens behind a prompt, up to the end of the reply."""
    logits, made = session.prefill(inputs), []
    while len(made) < count:
        token = int(logits.argmax())
        if token in session.engine.eos_token_ids:
            break
        made.append(token)
        logits = session.decode(token)
    return made


def test_a_call_and_the_step_behind_it(
    formed: tuple[str, Engine], says: Callable[..., None]
) -> None:
    form, engine = formed
    with engine.session() as session, engine.session() as fresh:
        says(engine, CALLS[form])
        text = "" if form in ("llama3", "mistral") else "I look."
        assert sent(session, tools=TOOLS) == text
        reply = session.last
        assert reply is not None and reply.finish_reason == "tool_calls"
        assert called(session) == [("point", {"x": 7})]
        assert (reply.content, reply.reasoning, reply.text) == (text, None, CALLS[form])
        (made,) = reply.tool_calls
        assert session.history[-1] == {
            "role": "assistant",
            "content": CALLS[form],
            "sampled": True,
            "tool_calls": [made.for_template()],
        }
        before = session.seen
        answered(session, "hit <|im_end|>", sampling=Sampling(max_new_tokens=8))
        result = {"role": "tool", "tool_call_id": made.id, "name": "point"}
        assert session.history[-2] == {
            **result,
            "content": [{"type": "text", "text": "hit <|im_end|>"}],
        }
        # What the step has read is what the whole conversation has more than stood there.
        assert session.last is not None
        inputs = whole(session)
        assert session.last.prompt_tokens == inputs["input_ids"].shape[-1] - before
        assert session.memory().differs is None
        assert session.last.token_ids == greedy(fresh, inputs, 8)


def test_the_history_holds_calls_as_transformers_renders_them(
    hermes: Engine, says: Callable[..., None]
) -> None:
    """The right text is that of transformers' own rendering, of the calls without their text."""
    with hermes.session() as session:
        says(hermes, CALL)
        sent(session, tools=TOOLS)
        says(hermes, "done")
        assert answered(session, "hit") == "done"
        plain = [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [call("point", x=7)],
            },
            {"role": "tool", "content": "hit"},
            {"role": "assistant", "content": "done"},
        ]
        tokenizer = hermes.processor.tokenizer
        theirs = tokenizer.apply_chat_template(plain, tools=TOOLS, tokenize=False)
        ours = session.template_with(session.tools).render(session.history, opening=False)
        assert ours == theirs
        assert tokenizer(theirs)["input_ids"][: session.seen] == [
            token for piece in session.held.pieces or () for token in piece.ids or ()
        ]


def test_a_model_that_has_to_call_does(hermes: Engine) -> None:
    """Random weights, loose sampling: only the schema makes such calls."""
    with hermes.session() as session:
        hot = Sampling(max_new_tokens=300, temperature=2.0, seed=3)
        sent(session, tools=TOOLS, sampling=hot, tool_choice="required", parallel_tool_calls=False)
        ((name, given),) = called(session)
        assert (name, set(given)) in (("press", {"key"}), ("point", {"x"}))
        one = {"type": "function", "function": {"name": "point"}}
        answered(session, "", sampling=hot, tool_choice=one)
        ((name, given),) = called(session)
        assert name == "point" and 0 <= given["x"] <= 99
        assert session.last is not None and session.last.finish_reason == "tool_calls"


def test_none_may_be_called(hermes: Engine, says: Callable[..., None]) -> None:
    with hermes.session() as session:
        says(hermes, CALL)
        assert sent(session, tools=TOOLS, tool_choice="none") == CALL
        assert session.last is not None and not session.last.tool_calls
        assert session.last.finish_reason == "eos" and "sampled" not in session.history[-1]


def weather(place: str, days: int = 1, unit: str | None = None) -> str:
    """Tell the weather.

    Args:
        place: a town
        days: how many days
        unit: of temperatures (choices: ["C", "F"])
    """
    return f"{place} {days} {unit}"


def test_functions_of_python_are_tools(hermes: Engine, says: Callable[..., None]) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "a town"},
            "days": {"type": "integer", "description": "how many days"},
            "unit": {
                "type": "string",
                "nullable": True,
                "enum": ["C", "F"],
                "description": "of temperatures",
            },
        },
        "required": ["place"],
    }
    made = Tool("weather", "Tell the weather.", parameters)
    with hermes.session() as session:
        says(hermes, '<tool_call>\n{"name": "weather", "arguments": {"place": "Ur"}}\n</tool_call>')
        sent(session, tools=[weather, made_other := Tool("nothing"), TOOLS[0]])
        assert session.tools == (made, made_other, Tool.of(TOOLS[0]))
        ((_, given),) = called(session)
        assert weather(**given) == "Ur 1 None"


def no_hints(place):  # type: ignore[no-untyped-def]
    """Tell it."""


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([no_hints], r"tools\[0\]: the function no_hints cannot be described \(.*type hints"),
        ([lambda: 1], "the function <lambda> cannot be described"),
        ([3], "a tool of type 'int' is not known"),
        ([Tool("one"), Tool("one")], "two tools are named 'one'; rename one"),
        ([function("odd", x={"type": "nothing"})], "the tool odd: the schema cannot be followed"),
        (
            [function("odd", x={"type": "object", "required": "é" * 120})],
            "the tool odd: the schema cannot be followed",
        ),
    ],
)
def test_tools_that_cannot_be(hermes: Engine, tools: list[Any], said: str) -> None:
    with hermes.session() as session:
        with pytest.raises(InputError, match=said):
            session.send("go", tools=tools)
        with pytest.raises(InputError, match="tool_choice"):
            session.send("go", tool_choice="required")
        with pytest.raises(TypeError, match="tools must be a list of functions"):
            session.send("go", tools=weather)  # type: ignore[arg-type]
        assert session.tools == () and session.history == []


def test_results_that_cannot_be(hermes: Engine, says: Callable[..., None]) -> None:
    with hermes.session() as session:
        with pytest.raises(InputError, match="calls no function"):
            session.send_results([("call_1", "")])
        says(hermes, BOTH)
        sent(session, tools=TOOLS)
        assert session.last is not None
        first, second = session.last.tool_calls
        for results, said in (
            ([(first, "a")], rf"no result of press \({second.id}\); send those of all"),
            ([(first, "a"), (first.id, "a")], f"two results of the call {first.id}"),
            ([("call_x", "a")], "the latest reply has no call 'call_x'; its calls are call_"),
            ([(first, {"x": 1})], r"point returned a dict; send a text, such as json.dumps"),
            (["a"], "a result is a pair"),
            ([(first, [{"type": "sound"}]), (second, "")], "a message part of type 'sound'"),
        ):
            with pytest.raises(InputError, match=said):
                session.send_results(results)
        with pytest.raises(TypeError, match="results must be a list of pairs"):
            session.send_results("a")
        assert len(session.history) == 2
        # In any order, by call, id, or call in OpenAI's form; kept in the order of the calls.
        says(hermes, "done")
        list(session.send_results([(second.as_json(), "B"), (first.id, "A")], sampling=LOOSE))
        texts = [one["content"][0]["text"] for one in session.history if one["role"] == "tool"]
        assert texts == ["A", "B"]


def test_arguments_that_are_no_object() -> None:
    with pytest.raises(InputError, match="the call of f are no JSON object"):
        _ = ToolCall("f", "[1").parsed
    assert ToolCall("f", "").parsed == {}


def test_what_is_shown_and_what_is_not(hermes: Engine, says: Callable[..., None]) -> None:
    """The thought between its marks, and the text; calls are left out, whole or not."""
    with hermes.session() as session:
        says(hermes, "<think>\nhm\n</think>\n\nI look.\n" + BOTH)
        pieces = list(session.send("go", sampling=LOOSE, tools=TOOLS))
        assert "".join(pieces) == "<think>\nhm\n</think>\n\nI look." and len(pieces) > 5
        assert session.last is not None
        assert (session.last.reasoning, session.last.content) == ("hm", "I look.")
        assert called(session) == [("point", {"x": 7}), ("press", {"key": "a"})]
    with hermes.session() as session:
        says(hermes, BOTH)
        cut = len(hermes.processor.tokenizer(BOTH)["input_ids"]) - 5
        assert sent(session, tools=TOOLS, sampling=Sampling(max_new_tokens=cut)) == ""
        assert session.last is not None and session.last.finish_reason == "length"
        assert called(session) == [("point", {"x": 7})]


def test_tools_stay_until_others_are_named(hermes: Engine, says: Callable[..., None]) -> None:
    """What is held is the conversation with the present tools, as a fresh session reads it."""
    with hermes.session() as session, hermes.session() as fresh:
        says(hermes, CALL, "done", "hi", "ho")
        sent(session, tools=TOOLS)
        answered(session, "hit")
        before = session.seen
        sent(session, "and?")
        assert session.tools == tuple(map(Tool.of, TOOLS)) and session.last is not None
        assert session.last.prompt_tokens == whole(session)["input_ids"].shape[-1] - before
        for tools in (TOOLS[:1], []):
            sent(session, "more", tools=tools, sampling=Sampling(max_new_tokens=4))
            text = session.template_with(session.tools).render(session.history[:-1], opening=True)
            assert text.count('"description": "Does ') == len(tools) == len(session.tools)
            session.unfed = ()
        ids = session.last.token_ids
        assert ids == greedy(fresh, whole(session), 4) and session.memory().differs is None


def test_tools_that_cannot_change(hermes: Engine, says: Callable[..., None]) -> None:
    with hermes.session() as session:
        session.rewrites = "keep"
        says(hermes, "hi")
        sent(session, tools=TOOLS)
        with pytest.raises(InputError, match=r"cannot change: .*rewrites: keep.*begin a new one"):
            session.send("go", tools=[])
        assert len(session.tools) == 2


def test_undo_fork_and_files_in_the_middle(
    hermes: Engine, says: Callable[..., None], tmp_path: Path
) -> None:
    """From each, the next step ends where it does without: the same tokens, the same history."""
    few = Sampling(max_new_tokens=6)
    with hermes.session() as session:
        session.undo_depth = 2
        says(hermes, CALL)
        sent(session, tools=TOOLS)
        assert session.last is not None
        pair = (session.last.tool_calls[0].id, "hit")
        session.save(tmp_path / "talk.mmkv")
        fork = session.fork()
        list(session.send_results([pair], sampling=few))
        wanted, history = session.last.token_ids, session.history
        with Session.load(hermes, tmp_path / "talk.mmkv") as loaded, fork:
            for other in (loaded, fork):
                assert [one.for_template() for one in other.tools] == TOOLS
                list(other.send_results([pair], sampling=few))
                assert other.last is not None and other.last.token_ids == wanted
                assert other.history == history
        assert session.undo()  # the step alone
        assert len(session.history) == 2 and len(session.tools) == 2
        list(session.send_results([pair], sampling=few))
        assert session.last is not None and session.last.token_ids == wanted
        assert session.undo() and session.undo()
        assert session.history == [] and session.tools == ()


def test_a_file_with_tools_that_cannot_be(
    hermes: Engine, says: Callable[..., None], tmp_path: Path
) -> None:
    with hermes.session() as session:
        for tools in ('[{"type": "web"}]', '[{"name": "a"}, {"name": "a"}]', "{}"):
            with pytest.raises(SessionError, match="in the session file is damaged"):
                session.restore_dialogue({"mmkv.tools": tools})


def test_a_step_that_is_stopped(hermes: Engine, says: Callable[..., None]) -> None:
    """Ctrl-C, as a closed stream, leaves what was said: results, and the beginning of a reply."""
    with hermes.session() as session, hermes.session() as fresh:
        says(hermes, CALL, "and so on")
        sent(session, tools=TOOLS)
        assert session.last is not None
        stream = session.send_results([(session.last.tool_calls[0], "hit")], sampling=LOOSE)
        shown = next(stream) + next(stream)
        stream.close()
        assert session.history[-1]["content"].startswith(shown)
        assert session.last.finish_reason == "interrupted" and not session.last.tool_calls
        says(hermes)
        sent(session, "and?", sampling=Sampling(max_new_tokens=6))
        assert session.last.token_ids == greedy(fresh, whole(session), 6)


def test_pictures_in_results(tmp_path: Path, says: Callable[..., None]) -> None:
    engine = load(save_seeing_tool_model(tmp_path))
    with engine.session() as session, engine.session() as fresh:
        says(engine, BOTH)
        sent(session, tools=TOOLS, images=[picture("red")])
        before = session.memory().by_modality["image"]
        shown = [{"type": "text", "text": "now"}, {"type": "image", "image": picture("green")}]
        few = Sampling(max_new_tokens=6)
        answered(session, shown, [{"type": "image", "image": picture("blue")}], sampling=few)
        assert [one["content"] for one in session.history if one["role"] == "tool"] == [
            [{"type": "text", "text": "now"}, {"type": "image"}],
            [{"type": "image"}],
        ]
        assert session.memory().by_modality["image"] == 3 * before
        assert session.last is not None and session.memory().differs is None
        inputs = whole(session, [picture(one) for one in ("red", "green", "blue")])
        assert session.last.token_ids == greedy(fresh, inputs, 6)


def test_the_agent_of_the_documents(
    hermes: Engine, says: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "chat.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    asked = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ur"}}\n</tool_call>'
    with hermes.session() as session:
        says(hermes, asked, asked, "It rains.")
        exec(code, {"session": session})
        assert capsys.readouterr().out == "It rains.\n"
        results = [one["content"] for one in session.history if one["role"] == "tool"]
        assert results == 2 * [[{"type": "text", "text": "rain in Ur"}]]


def test_the_page_of_a_conversation_with_calls(
    hermes: Engine, says: Callable[..., None], tmp_path: Path
) -> None:
    with hermes.session() as session, session.trace() as trace:
        says(hermes, CALL)
        sent(session, tools=TOOLS)
        says(hermes, "done")
        answered(session, "hit")
        texts = trace.snapshot().texts
        assert "<tool_call>" in texts and "</tool_response>" in texts


def test_calls_that_nobody_answers(hermes: Engine, says: Callable[..., None]) -> None:
    with hermes.session() as session, hermes.session() as fresh:
        says(hermes, CALL)
        sent(session, tools=TOOLS)
        sent(session, "never mind", sampling=Sampling(max_new_tokens=6))
        assert session.last is not None
        assert session.last.token_ids == greedy(fresh, whole(session), 6)
        with pytest.raises(InputError, match="calls no function"):
            session.send_results([])


def test_a_forgotten_thought_before_a_call(hermes: Engine, says: Callable[..., None]) -> None:
    """The history and the cache keep the call alone, and the step behind it reads what is new."""
    thought = "<think>\nhm\n</think>\n\n"
    with hermes.session() as session:
        session.forget_thoughts = True
        says(hermes, thought + CALL)
        sent(session, tools=TOOLS)
        assert session.last is not None and session.last.reasoning == "hm"
        assert session.history[-1]["content"] == CALL and session.history[-1]["sampled"]
        says(hermes, "done")
        answered(session, "hit")
        new = "<|im_end|>\n<|im_start|>user\n<tool_response>\nhit\n</tool_response><|im_end|>\n"
        new += "<|im_start|>assistant\n"
        tokens = hermes.processor.tokenizer(new)["input_ids"]
        assert session.last.prompt_tokens == len(tokens)


def test_a_budget_holds_over_steps(
    says: Callable[..., None], tmp_path: Path, hermes: Engine
) -> None:
    engine = load(hermes._source or tmp_path, policy="streamingllm", budget=32)
    with engine.session() as session:
        says(engine, *[CALL] * 4)
        sent(session, tools=TOOLS)
        for _ in range(3):
            before = session.seen
            answered(session, "hit")
            assert session.last is not None
            inputs = whole(session)
            assert session.last.prompt_tokens == inputs["input_ids"].shape[-1] - before
            assert session.memory().entries <= 32 * engine.spec.rows
            assert session.memory().differs is None


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
# Parts of schemas as zod, schemars and people write them, and what of each cannot be followed.
PARTS: list[tuple[Any, list[str]]] = [
    ({"type": "string", "format": "email", "pattern": EMAIL}, ["pattern"]),  # zod 4
    ({"type": "string", "pattern": r"\bfoo\b"}, ["pattern"]),
    ({"type": "string", "pattern": r"(a)\1"}, ["pattern"]),
    ({"type": "string", "pattern": r"^\d{3}$"}, []),
    ({"anyOf": [{"type": "string", "pattern": "(?=a)"}, {"type": "null"}]}, ["anyOf[0].pattern"]),
    ({"type": "array", "items": {"type": "string", "pattern": "(?<=a)b"}}, ["items.pattern"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["minimum"]),  # schemars
    ({"type": "integer", "exclusiveMinimum": 10**30}, ["exclusiveMinimum"]),
    ({"type": "number", "maximum": 1e300, "minimum": 0}, ["maximum"]),
    ({"type": "integer", "multipleOf": 10**13}, ["multipleOf"]),
    ({"$ref": "https://example.com/x"}, ["$ref"]),
    ({"type": "object", "properties": {"pattern": {"const": {"pattern": "(?=a)"}}}}, []),
    (
        {"type": "object", "properties": {"default": {"type": "string", "pattern": "(?=a)"}}},
        ["properties.default.pattern"],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^(?!x)": {}, "^a": {"type": "integer"}},
            "additionalProperties": False,
        },
        ["patternProperties"],
    ),
]


@pytest.mark.parametrize(("part", "left_out"), PARTS, ids=lambda one: str(one)[:60])
def test_a_part_of_a_schema_that_cannot_be_followed_is_left_out_and_named(
    part: Any, left_out: list[str]
) -> None:
    """And no other one is: what is left is the schema without those. Strict, it is refused."""
    schema = {"type": "object", "properties": {"x": part, "y": {"enum": [3]}}, "required": ["x"]}
    found, names = without_unfollowed(json.dumps(schema))
    assert [one.split(" (")[0] for one in names] == [f"properties.x.{one}" for one in left_out]
    if left_out == ["patternProperties"]:  # names that it would have let through are not forbidden
        rest = {"patternProperties": {"^a": {"type": "integer"}}}
        assert found["properties"]["x"] == {"type": "object"} | rest
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for form in (Hermes(), QwenXml()):
        made = tool_use([tool])
        assert made is not None
        use = require_tools(form, made)
        assert use.tools[0].schema == schema, "the model is told of all"
        bound = form.grammar(use.tools, json.dumps, False)
        assert not LLMatcher.validate_grammar(bound)
        told = [one for one in use.notes if "in calls of the form qwen-xml" not in one]
        if told:
            assert use.tools[0].bound == found and len(told) == len(left_out)
        tool["function"]["strict"] = True
        strict = tool_use([tool])
        assert strict is not None
        if form.name == "hermes" and left_out:
            assert use.notes
            with pytest.raises(InputError, match="the tool f: the schema cannot be followed"):
                require_tools(form, strict)
        tool["function"]["strict"] = False
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    made, notes = answer_schema(answer)
    assert made is not None and made.pop("x-guidance") and made == found
    assert len(notes) == len(left_out)
    answer["json_schema"]["strict"] = True
    if left_out:
        with pytest.raises(InputError, match="cannot be followed"):
            answer_schema(answer)


BOUNDS = [
    *({"exclusiveMinimum": low, "maximum": low + more} for low in (0, 1, -2) for more in (0.5, 3)),
    *({"minimum": top - 0.25, "exclusiveMaximum": top} for top in (0, 2, -1, 100)),
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"exclusiveMinimum": 0, "minimum": 0, "maximum": 0.5},
    {"exclusiveMinimum": 0.25, "maximum": 0.5},
    {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
    {"$ref": "#/$defs/some", "maximum": 0.5},
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_what_a_bound_leaves_out_is_never_written(hermes: Engine, bounds: dict[str, Any]) -> None:
    """By llguidance's word for whole calls and answers, beside jsonschema's."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install -e '.[test]'")
    whole = {
        "type": "object",
        "properties": {"default": {"type": "number", **bounds}},
        "required": ["default"],
        "$defs": {"some": {"exclusiveMinimum": 0}},
    }
    check = jsonschema.Draft202012Validator(whole)
    made = tool_use([{"type": "function", "function": {"name": "f", "parameters": whole}}])
    assert made is not None
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": whole, "strict": True}}
    answer = ReplyRules(answer_schema(form)[0]).grammar(json.dumps)
    call = f"start: {arguments_rule(made.tools[0])}"
    ends = [one for key, one in bounds.items() if "imum" in key] or [0, 0.5]
    values = {end + by for end in ends for by in (-1, -0.25, -0.125, 0, 0.125, 0.25, 1)}
    taken = 0
    for value in sorted(values):
        for grammar, gap in ((answer, ""), (call, " ")):
            matcher = LLMatcher(hermes.grammars.known, grammar)
            text = f'{{"default":{gap}{value:g}}}'
            tokens = hermes.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            read = matcher.consume_tokens(tokens) and matcher.is_accepting()
            assert not read or check.is_valid(json.loads(text)), text
            taken += read
    assert taken > 1


def test_very_many_patterns_are_not_tried(hermes: Engine) -> None:
    parts = {f"x{at}": {"type": "string", "pattern": f"(?=a{at})"} for at in range(MOST_TRIED + 1)}
    with pytest.raises(InputError, match="very many patterns"):
        without_unfollowed(json.dumps({"properties": parts}))
    tool = function("f", x={"type": "string", "pattern": "(?=a)"})
    with hermes.session() as session:
        sent(session, tools=[tool], sampling=Sampling(max_new_tokens=1))
        assert session.note is not None and "properties.x.pattern" in session.note


def test_without_llguidance(hermes: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with hermes.session() as session, pytest.raises(InputError, match=r"pip install 'mmkv\[serve"):
        session.send("go", tools=TOOLS)


def test_a_reply_that_is_begun(hermes: Engine, says: Callable[..., None]) -> None:
    """The pieces and the content are what follows the prefix; the history has both."""
    rest = CALL.removeprefix("I")
    with hermes.session() as session:
        says(hermes, rest)
        assert sent(session, tools=TOOLS, prefix="I") == " look."
        assert session.last is not None and called(session) == [("point", {"x": 7})]
        assert session.last.content == " look." and session.history[-1]["content"] == CALL
        before = session.seen
        says(hermes, "done")
        answered(session, "hit")
        assert session.last.prompt_tokens == whole(session)["input_ids"].shape[-1] - before
