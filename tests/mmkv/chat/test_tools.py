"""``mmkv chat --tools``: calls are shown, and their results asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mmkv.chat.inputs import LineReader
from mmkv.reply import Sampler
from tests.mmkv.test_tools import BOTH, CALL, TOOLS
from tests.support.chat_models import picture
from tests.support.tool_templates import HERMES, save_seeing_tool_model, tool_tokenizer

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_seeing_tool_model(tmp_path_factory.mktemp("seeing")))


@pytest.fixture
def chat(
    mmkv: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, seeing: str, tmp_path: Path
) -> Callable[..., Ran]:
    """Run ``mmkv chat`` with a file of tools and replies: ``chat(*replies, options=, lines=)``."""
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    tokenizer = tool_tokenizer(HERMES)

    def ran(*replies: str, options: Any = (), lines: Any = ("go",), tools: bool = True) -> Ran:
        queue: list[int] = []
        for text in replies:
            queue.extend([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        monkeypatch.setattr(Sampler, "draw", lambda *_: queue.pop(0))
        named = ("--tools", str(tmp_path / "tools.json")) if tools else ()
        made = mmkv("chat", seeing, *named, *options, stdin="".join(f"{line}\n" for line in lines))
        assert "Traceback" not in made.err and (made.code or not queue), made.err
        return made

    return ran


def test_one_answer(chat: Callable[..., Ran]) -> None:
    shown = chat(CALL, options=("-p", "go"))
    assert shown.code == 0 and shown.out == "I look.\n"
    assert 'point  {"x": 7}' in shown.err and "mmkv chat -i asks" in shown.err
    made = json.loads(chat(BOTH, options=("-p", "go", "--json")).out)
    assert made["finish_reason"] == "tool_calls" and made["content"] == ""
    said = [(one["function"]["name"], one["function"]["arguments"]) for one in made["tool_calls"]]
    assert said == [("point", '{"x": 7}'), ("press", '{"key": "a"}')]
    assert made["text"] == BOTH and made["reasoning"] is None


def test_a_conversation_asks_for_results(chat: Callable[..., Ran], tmp_path: Path) -> None:
    file, seen = tmp_path / "talk.mmkv", tmp_path / "seen.png"
    picture().save(seen)
    lines = [
        "go",
        "/history",
        f"@{seen}",
        "@/nowhere.png",
        "now",
        "//etc",
        f"/save {file}",
        "/history",
        f"/export {tmp_path / 'talk.md'}",
    ]
    ran = chat(BOTH, "I <b>see</b>.", options=("-i",), lines=lines)
    assert ran.out == "\nI <b>see</b>.\n"
    assert ran.err.count('point  {"x": 7}') == 2 and ran.err.count('press  {"key": "a"}') == 1
    assert "/nowhere.png" in ran.err
    assert "point: [picture] now\n" in ran.err and "press: /etc\n" in ran.err
    assert "**Result**\n\n[picture] now\n" in (tmp_path / "talk.md").read_text()
    # The tools are the conversation's own, and what is called is asked for after it is loaded.
    ran = chat(
        CALL, options=("-i", "--load", str(file)), lines=["more", f"/save! {file}"], tools=False
    )
    assert ran.out == "I look.\n"
    ran = chat("done", options=("-i", "--load", str(file)), lines=["hit"], tools=False)
    assert ran.out == "done\n"


def test_steps_are_taken_back_and_tried_again(chat: Callable[..., Ran]) -> None:
    lines = ["go", "hit", "/retry", "/undo", "/undo", "/results", "go", "missed", "/history"]
    ran = chat(CALL, "one", "two", CALL, "three", options=("-i",), lines=lines)
    assert ran.out == "I look.\none\ntwo\nI look.\nthree\n"
    assert ran.err.count("took back the latest turn") == 2
    assert ran.err.count('point  {"x": 7}') == 3  # asked again once, for the second /undo
    assert "the latest reply calls no function" in ran.err
    assert "point: missed\n" in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("{", "is no JSON"),
        ("{}", "has to be a list of functions"),
        ("[]", "has to be a list of functions"),
        ('[{"type": "web"}]', "[0]: a tool of type 'web' is not known"),
        ('[{"name": "a"}, {"name": "a"}]', "two tools are named 'a'"),
    ],
)
def test_files_that_cannot_be(
    mmkv: Callable[..., Ran], tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "tools.json"
    if text is not None:
        file.write_text(text)
    ran = mmkv("chat", "no-such-model", "-p", "go", "--tools", str(file))
    assert ran.code == 1 and said in ran.error_line() and str(file) in ran.error_line()


@pytest.mark.parametrize("other", ["--raw", "--cost"])
def test_options_that_exclude_each_other(mmkv: Callable[..., Ran], other: str) -> None:
    ran = mmkv("chat", "no-such-model", "-p", "go", "--tools", "x.json", other)
    assert ran.code == 2 and "--tools" in ran.error_line() and other in ran.error_line()


def test_results_are_put_off(chat: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = LineReader.ask, []

    def interrupted(self: LineReader, question: str) -> str:
        asked.append(question)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return ask(self, question)

    monkeypatch.setattr(LineReader, "ask", interrupted)
    ran = chat(CALL, "done", options=("-i",), lines=["go", "/results", "hit", "/results"])
    assert ran.out == "I look.\ndone\n" and len(asked) == 2
    assert "(postponed; /results asks again)" in ran.err
    assert "the latest reply calls no function" in ran.err
