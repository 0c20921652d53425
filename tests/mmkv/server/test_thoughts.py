"""Thoughts over HTTP: a budget of tokens, and conversations that forget them.

Right values: counts by hand (one token a byte or marker), and a sequence that reads the same tokens
and is told what to forget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AddedToken, AutoTokenizer

import mmkv.server.run
from mmkv import Engine
from mmkv.cli.app import run
from mmkv.prompt.template import ChatTemplate
from mmkv.reply import Sampler
from mmkv.server.job import ChatJob
from tests.mmkv.prompt.test_held import OPENED, THOUGHTS
from tests.support.chat_models import CHATML, byte_tokenizer, save_llama
from tests.support.servers import Server, serving
from tests.support.tool_templates import HERMES

TOKENIZER = byte_tokenizer()
REPLY = "<think>thought, thought, thought</think>\n\ny"
THOUGHT = REPLY.removesuffix("\n\ny")


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def load(folder: Path, forget: bool = False) -> Engine:
    return Engine.from_pretrained(
        folder,
        policy="streamingllm",
        budget=2000,
        dtype="float32",
        kv_limit=8 * 2**20,
        forget_thoughts=forget,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), THOUGHTS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def forgetting(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder, forget=True)) as made:
        yield made


def tell(server: Server, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Give the server another chat template."""
    engine = server.inside(lambda core: core.engine)
    template = ChatTemplate(engine.processor.tokenizer, source, parts=False)
    monkeypatch.setattr(engine.processor, "template", template)
    told = replace(
        server.state.facts,
        template_variables=template.variables,
        thoughts=engine.thought_marks,
    )
    monkeypatch.setattr(server.state, "facts", told)


@pytest.fixture
def rambles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model say o, without an end."""
    monkeypatch.setattr(Sampler, "draw", lambda *_: ids_of("o")[0])


def said_in(answer: httpx.Response) -> tuple[str | None, str]:
    """The thought and the answer of a chat."""
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


WAYS: dict[str, dict[str, Any]] = {
    "field": {"thinking_budget": 3},
    "template": {"chat_template_kwargs": {"thinking_budget": 3}},
}


@pytest.mark.parametrize(("way", "given"), [("chat", "template"), ("response", "field")])
def test_a_request_bounds_the_thought(
    server: Server, monkeypatch: pytest.MonkeyPatch, rambles: None, way: str, given: str
) -> None:
    tell(server, monkeypatch, OPENED)
    # The end of a thought has 11 tokens; without one there would be 20 times o.
    assert len(ids_of("\n</think>\n\n")) == 11
    if way == "chat":
        answer = server.chat("a", max_tokens=20, n=2, **WAYS[given])
        assert said_in(answer) == ("ooo", "oooooo")
    else:
        body = {"model": "small", "input": "a", "max_output_tokens": 20, **WAYS[given]}
        answer = server.client.post("/v1/responses", json=body)
        assert "o" * 10 not in answer.text and "oooooo" in answer.text
    assert "x-mmkv-ignored" not in answer.headers


def test_no_thought_at_all_is_the_template_s_to_leave_out(
    server: Server, monkeypatch: pytest.MonkeyPatch, rambles: None
) -> None:
    answer = server.chat("a", max_tokens=16, thinking_budget=0)
    assert said_in(answer) == (None, "o" * 16)  # it did not begin one
    tell(server, monkeypatch, OPENED)
    answer = server.chat("a", max_tokens=16, thinking_budget=0)
    assert said_in(answer) == (None, "o" * 6)
    chosen = "{% if enable_thinking is false %}</think>\n\n{% endif %}"
    source = OPENED.replace("<think>\n{% endif %}", f"<think>\n{chosen}{{% endif %}}")
    tell(server, monkeypatch, source)
    before = len(ids_of("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n"))
    answer = server.chat("a", max_tokens=16, thinking_budget=0)
    assert said_in(answer) == (None, "o" * 16)
    assert answer.json()["usage"]["prompt_tokens"] == before + len(ids_of("</think>\n\n"))


def test_a_form_of_the_answer_holds_behind_a_thought_that_is_ended(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model likes o best, which JSON does not begin with."""
    tell(server, monkeypatch, OPENED)
    answer = server.chat(
        "a",
        max_tokens=40,
        thinking_budget=3,
        temperature=0,
        logit_bias={str(ids_of("o")[0]): 100},
        response_format={"type": "json_object"},
    )
    thought, text = said_in(answer)
    assert thought == "ooo" and text.startswith("{")


def test_where_a_thought_cannot_be_bounded_it_is_said(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(**fields: Any) -> tuple[int, str]:
        answer = server.chat("a", max_tokens=1, **fields)
        return answer.status_code, answer.json()["error"]["param"]

    for wrong in (-1, 2**31, "3", 1.5, True):
        assert error(thinking_budget=wrong) == (400, "thinking_budget")
    where = "chat_template_kwargs.thinking_budget"
    for wrong in (-1, 2**31, "3", True):
        assert error(chat_template_kwargs={"thinking_budget": wrong}) == (400, where)
    begun = {"role": "assistant", "content": "Well"}
    refused = server.chat("a", begun, max_tokens=1, thinking_budget=3, continue_final_message=True)
    assert refused.status_code == 400 and "leave one of them out" in refused.text
    body = {"model": "small", "prompt": "a", "thinking_budget": 3}
    refused = server.client.post("/v1/completions", json=body)
    assert refused.json()["error"]["param"] == "thinking_budget"
    tell(server, monkeypatch, CHATML)  # knows no thoughts
    answer = server.chat("a", max_tokens=1, thinking_budget=3)
    assert answer.headers["x-mmkv-ignored"] == "thinking_budget"


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says next, a reply after the other."""
    queue: list[str] = []
    spelled: list[int] = []

    def draw(*_: Any) -> int:
        if not spelled:
            spelled.extend([*ids_of(queue.pop(0)), TOKENIZER.eos_token_id])
        return spelled.pop(0)

    monkeypatch.setattr(Sampler, "draw", draw)
    return queue


@pytest.mark.parametrize("stream", [False, True])
def test_marks_that_a_reply_repeats_are_no_part_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, says: list[str], stream: bool
) -> None:
    tell(server, monkeypatch, OPENED)
    asked = [{"role": "user", "content": "a"}]
    for path, body in {
        "chat/completions": {"messages": asked},
        "responses": {"input": "a"},
        "messages": {"messages": asked, "max_tokens": 99},
    }.items():
        says.append("<think>\nQ</think>\n</think>\n\nZ")
        body |= {"model": "small", "stream": stream}
        answer = server.client.post(f"/v1/{path}", json=body).text
        assert "think>" not in answer and '"Q"' in answer and '"Z"' in answer


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits behind each prompt."""
    seen: list[torch.Tensor] = []
    begin = ChatJob._begin_replies

    def watched(job: ChatJob, logits: torch.Tensor) -> None:
        seen.append(logits.clone())
        begin(job, logits)

    monkeypatch.setattr(ChatJob, "_begin_replies", watched)
    return seen


WHAT_CLIENTS_SEND_BACK = {"whole": REPLY, "without the thought": "y"}


@pytest.mark.parametrize(
    ("way", "template"),
    [
        ("whole", "OPENED"),
        ("without the thought", "THOUGHTS"),
        ("without the thought", "OPENED"),
        ("session", "OPENED"),
        ("response", "THOUGHTS"),
    ],
)
def test_a_kept_conversation_forgets_and_reads_only_what_is_new(
    forgetting: Server,
    monkeypatch: pytest.MonkeyPatch,
    says: list[str],
    logits: list[torch.Tensor],
    way: str,
    template: str,
) -> None:
    opened = template == "OPENED"
    if opened:
        tell(forgetting, monkeypatch, OPENED)
    reply = REPLY.removeprefix("<think>") if opened else REPLY
    first = f"{way}, {template}: a question of some length " * 12
    asked = [first, "b?"]
    says += [reply, "z"]
    if way in WHAT_CLIENTS_SEND_BACK:
        back = WHAT_CLIENTS_SEND_BACK[way]
        made = [
            forgetting.chat(first, max_tokens=90),
            forgetting.chat(first, back, "b?", max_tokens=90),
        ]
    elif way == "session":
        name = forgetting.client.post("/v1/sessions", json={}).json()["id"]
        url = f"/v1/sessions/{name}/chat/completions"
        made = []
        for text in asked:
            said = [{"role": "user", "content": text}]
            body = {"model": "small", "messages": said, "max_tokens": 90}
            made.append(forgetting.client.post(url, json=body))
    else:
        made = []
        for text in asked:
            before = made[-1].json()["id"] if made else None
            body = {"model": "small", "input": text, "previous_response_id": before}
            made.append(forgetting.client.post("/v1/responses", json=body))
    used = [one.json()["usage"] for one in made]
    opening = "<|im_start|>assistant\n" + ("<think>\n" if opened else "")
    one = ids_of(f"<|im_start|>user\n{first}<|im_end|>\n{opening}")
    two = ids_of(f"<|im_end|>\n<|im_start|>user\nb?<|im_end|>\n{opening}")
    # The thought takes no entry any more, and nothing was read again.
    assert used[1]["mmkv"]["resumed"] == len(one) + len(reply)
    counts = [each.get("prompt_tokens", each.get("input_tokens")) for each in used]
    assert counts == [len(one), len(one) + len(reply) + len(two)]
    thought = len(THOUGHT) + opened  # the prompt's opening ends with a new line
    engine = forgetting.inside(lambda core: core.engine)
    assert used[0]["mmkv"]["evicted"] == thought * engine.spec.rows
    for each in used:
        assert "thoughts of a reply were forgotten" in each["mmkv"]["differs"]

    def exact() -> torch.Tensor:
        with engine.session() as plain:
            plain.prefill({"input_ids": torch.tensor([one])})
            for token in ids_of(reply):
                plain.decode(token)
            start = len(one) - len(ids_of("<think>\n")) * opened
            assert plain.forget(start, start + thought) == thought * engine.spec.rows
            return plain.prefill({"input_ids": torch.tensor([two])})

    torch.testing.assert_close(
        logits[-1], forgetting.inside(lambda _: exact()), atol=1e-5, rtol=1e-5
    )


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# An empty line before the call: not as the template writes it.
CALL = 'I look.\n\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


@pytest.mark.parametrize("way", ["session", "chat", "chat with the thought", "chat read afresh"])
def test_the_thought_before_a_call_is_forgotten(
    forgetting: Server, monkeypatch: pytest.MonkeyPatch, says: list[str], way: str
) -> None:
    """The template shows thoughts since the latest question, and this one is before its result."""
    tell(forgetting, monkeypatch, HERMES)
    reply = f"<think>\nwhere, where\n</think>\n\n{CALL}"
    says += [reply, "there"]
    asked = {"role": "user", "content": f"{way}: where is it, in the third row or the fourth? " * 6}
    url = "/v1/chat/completions"
    if way == "session":
        name = forgetting.client.post("/v1/sessions", json={}).json()["id"]
        url = f"/v1/sessions/{name}/chat/completions"

    def ask(*messages: Any, **more: Any) -> dict[str, Any]:
        body = {"model": "small", "messages": messages, "max_tokens": 200, "tools": [LOOK]}
        answer = forgetting.client.post(url, json=body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = ask(asked)
    message = first["choices"][0]["message"]
    assert message["reasoning_content"] == "where, where"
    (call,) = message["tool_calls"]
    result = {"role": "tool", "content": "here", "tool_call_id": call["id"]}
    if way != "chat with the thought":
        del message["reasoning_content"]
    before = [] if way == "session" else [asked, message]
    more = {"mmkv": {"resume": "never"}} if way == "chat read afresh" else {}
    again = ask(*before, result, **more)
    assert again["choices"][0]["message"]["content"] == "there"
    used = again["usage"]
    added = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nhere\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    held = first["usage"]["prompt_tokens"] + len(ids_of(reply))
    if way == "chat read afresh":
        assert used["mmkv"]["resumed"] == 0 and used["mmkv"]["differs"] is None
        return
    assert used["mmkv"]["resumed"] == held
    assert used["prompt_tokens"] == held + len(ids_of(added))
    assert "thoughts of a reply were forgotten" in used["mmkv"]["differs"]


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_are_tokens_stand_around_a_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, special: bool
) -> None:
    folder = save_llama(tmp_path, THOUGHTS, vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = ["<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(one, special=special) for one in marks], special)
    tokenizer.save_pretrained(folder)
    begins, ends = tokenizer.convert_tokens_to_ids(marks)
    letter, end = ids_of("o")[0], TOKENIZER.eos_token_id
    draws: list[int] = []
    monkeypatch.setattr(Sampler, "draw", lambda *_: draws.pop(0))
    with serving(lambda: load(folder)) as server:
        draws += [begins, letter, letter, ends, letter, end]
        answer = server.chat("a", max_tokens=9)
        assert said_in(answer) == ("oo", "o")
        used = answer.json()["usage"]
        assert used["completion_tokens_details"]["reasoning_tokens"] == 4
        draws += [letter, end]
        again = server.chat("a", {"role": "assistant", "content": "o"}, "b", max_tokens=9)
        assert said_in(again) == (None, "o")
        message = answer.json()["choices"][0]["message"]
        draws += [letter, end]
        again = server.chat("a", message, "b", max_tokens=9)
        assert said_in(again) == (None, "o")


def test_what_is_forgotten_is_not_counted(
    forgetting: Server, monkeypatch: pytest.MonkeyPatch, says: list[str]
) -> None:
    tell(forgetting, monkeypatch, HERMES)
    says.append("there")
    thought = {"type": "thinking", "thinking": "where, where", "signature": "s"}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}}
    said = [
        {"role": "user", "content": "where is it?"},
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
    ]
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"model": "small", "messages": said, "tools": [tool], "mmkv": {"resume": "never"}}
    answers = [
        forgetting.client.post("/v1/messages/count_tokens", json=body),
        forgetting.client.post("/v1/messages", json=body | {"max_tokens": 90}),
    ]
    assert answers[0].json()["input_tokens"] == answers[1].json()["usage"]["input_tokens"]


def test_an_option_has_a_server_forget(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded: list[Engine] = []
    monkeypatch.setattr(mmkv.server.run, "serve", lambda load, *_: loaded.append(load()))
    for given in ([], ["--forget-thoughts"]):
        assert run(["serve", str(folder), "--quiet", "--memory", "8MiB", *given]) == 0
    assert [engine.forget_thoughts for engine in loaded] == [False, True]
    plain = save_llama(tmp_path / "plain")
    assert run(["serve", str(plain), "--memory", "8MiB", "--forget-thoughts"]) == 1
    assert "--forget-thoughts is about thoughts" in capsys.readouterr().err
