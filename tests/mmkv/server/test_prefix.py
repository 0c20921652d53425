"""Requests whose last message is the assistant's: the reply goes on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch

from mmkv import Engine, Sampling
from mmkv.server.job import ChatJob
from tests.mmkv.prompt.test_held import THOUGHTS, TRIMMED, held_ids, with_template
from tests.mmkv.prompt.test_prefix import TEMPLATES
from tests.support.chat_models import picture, save_llama, script
from tests.support.servers import MODEL, Server, asked, picture_part, serving
from tests.support.tiers import long_but

QUESTION = "a question that is long enough to be kept apart from what follows it" * 5
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def load(folder: Path, **options: Any) -> Engine:
    given = {"policy": "full", "dtype": "float32", "kv_limit": 8 * 2**20, "prefill_chunk": 64}
    return Engine.from_pretrained(folder, **(given | options))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


def text_of(answer: httpx.Response, choice: int = 0) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][choice]["message"]["content"]
    return text


def read(answer: httpx.Response) -> tuple[int, int]:
    """Return how many tokens of a prompt there were, and how many of them were cached."""
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def error_of(answer: httpx.Response) -> tuple[str, str]:
    error = answer.json()["error"]
    assert answer.status_code == 400 and "\n" not in error["message"]
    return error["param"], error["message"]


def test_the_reply_is_that_of_the_engine(server: Server, folder: Path) -> None:
    """With a picture, in a chat, in its stream, and in a turn of a session."""
    shown = [picture_part(picture("red", (48, 40))), {"type": "text", "text": "what is it?"}]
    given = [{"role": "user", "content": shown}, {"role": "assistant", "content": "It is "}]
    engine = load(folder)
    with engine.session() as session:
        greedy = Sampling(9, temperature=0)
        alone = [picture("red", (48, 40))]
        wanted = "".join(session.send("what is it?", alone, sampling=greedy, prefix="It is "))
        assert session.last is not None
        tokens = session.last.prompt_tokens
    answer = server.chat(*given, max_tokens=9)
    assert text_of(answer) == wanted and read(answer)[0] == tokens
    assert text_of(server.chat(given[0], max_tokens=9)) != wanted
    said = server.chat(*given, max_tokens=9, stream=True).text
    pieces = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in pieces) == wanted
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    for n, fields in ((1, flags), (2, {"logprobs": True})):
        answer = server.chat(*given, max_tokens=9, n=n, **fields)
        assert [text_of(answer, at) for at in range(n)] == [wanted] * n
    name = server.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}/chat/completions"
    assert text_of(server.client.post(path, json=asked(*given, max_tokens=9))) == wanted
    items = server.client.get(f"/v1/sessions/{name}/messages").json()["data"]
    assert [one["role"] for one in items] == ["user", "assistant"]
    assert items[1]["content"] == [{"type": "text", "text": f"It is {wanted}"}]


def said(server: Server, monkeypatch: pytest.MonkeyPatch, *replies: str) -> None:
    """Make the model say this."""
    core = server.state.engine_thread.core
    script(monkeypatch, core.engine, list(replies))


def test_what_was_continued_is_one_message_that_is_not_read_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(server, monkeypatch, " I can. ", " I can. ", "so", "so")
    answer = server.chat(QUESTION, "Sure,", max_tokens=40)
    assert text_of(answer) == " I can. " and read(answer)[1] == 0
    # The same beginning once more: the question is not read again.
    whole, cached = read(server.chat(QUESTION, "Sure,", max_tokens=40))
    assert whole - cached == 1 + len("assistant\nSure,")
    before = whole + len(" I can. ")
    # One token a byte or marker, by hand: what follows the reply.
    after = 3 + len("user\nand?") + 3 + len("assistant\n")
    answer = server.chat(QUESTION, "Sure, I can. ", "and?", max_tokens=40)
    assert text_of(answer) == "so" and read(answer) == (before + after, before)
    # Without the space behind it, the client means a shorter one.
    answer = server.chat(QUESTION, "Sure, I can.", "and?", max_tokens=40)
    assert text_of(answer) == "so" and read(answer) == (before + after - 1, before - 1)


def test_a_space_less_is_no_reason_to_read_all_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where entries were evicted, a client that strips replies goes on from what was said."""
    with serving(lambda: load(folder, policy="streamingllm", budget=48)) as server:
        said(server, monkeypatch, " I can. ", "so", " I can. ", "so")
        for prefix in ("Sure,", ""):
            begun = [QUESTION + prefix, *([prefix] if prefix else [])]
            first = server.chat(*begun, max_tokens=40)
            assert first.json()["usage"]["mmkv"]["evicted"] > 0
            whole = f"{prefix} I can. ".strip()
            second = server.chat(begun[0], whole, "and?", max_tokens=40)
            assert read(second)[1] == read(first)[0] + len(" I can. ")


def test_a_session_holds_one_message(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said(server, monkeypatch, " I can.", "so")
    name = server.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}/chat/completions"
    first = server.client.post(path, json=asked("how?", "Sure,", max_tokens=40))
    second = server.client.post(path, json=asked("and?", max_tokens=40))
    assert (text_of(first), text_of(second)) == (" I can.", "so")
    assert read(second)[1] == read(first)[0] + len(" I can.")
    items = server.client.get(f"/v1/sessions/{name}/messages").json()["data"]
    assert [one["content"][0]["text"] for one in items] == ["how?", "Sure, I can.", "and?", "so"]
    alone = {"messages": [{"role": "assistant", "content": "more"}]}
    param, message = error_of(server.client.post(path, json=asked("") | alone))
    assert param == "messages[-1].role" and "has to stand before it" in message


@pytest.mark.parametrize("policy", ["full", "dbtrimkv"])
def test_a_reply_that_was_cut_off_goes_on(policy: str, folder: Path) -> None:
    """In pieces it is what it is at once, and what was said is not read again.

    A reply that was cut off lacks its last token in the cache, so that nothing is let go.
    """
    options: dict[str, Any] = {"policy": policy, "evict_every": 1}
    if policy != "full":
        options |= {"budget": 48, "gates": "random"}
    printable = {str(token): -100.0 for token in range(264) if not 33 <= token < 90}
    with serving(lambda: load(folder, **options)) as server:
        fields: dict[str, Any] = {"logit_bias": printable, "cache_salt": "pieces"}
        text, before = "", 0
        for at in range(5):
            given = [QUESTION, text] if text else [QUESTION]
            answer = server.chat(*given, max_tokens=7, **fields)
            if at:
                assert read(answer) == (before + 1, before)
            text += text_of(answer)
            before = read(answer)[0] + 6
        wanted = server.chat(QUESTION, max_tokens=35, **(fields | {"cache_salt": "whole"}))
        assert text == text_of(wanted) and len(text) == 35
        assert (answer.json()["usage"]["mmkv"]["evicted"] > 0) == (policy != "full")


@pytest.mark.parametrize("policy", ["full", "streamingllm"])
def test_a_reply_that_was_ended_goes_on(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token is read again; where others were evicted, all of the reply is."""
    options = {} if policy == "full" else {"budget": 48}
    with serving(lambda: load(folder, **options, policy=policy)) as server:
        said(server, monkeypatch, "well, ", "so")
        before = read(server.chat(QUESTION, max_tokens=40))[0]
        answer = server.chat(QUESTION, "well, ", max_tokens=40)
        assert text_of(answer) == "so"
        total, cached = read(answer)
        assert total == before + len("well, ")
        again = 1 if policy == "full" else 1 + len("assistant\nwell, ")
        assert total - cached == again


def test_a_template_that_trims_says_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trimming() -> Engine:
        engine = load(save_llama(tmp_path))
        with_template(engine, TRIMMED)
        return engine

    with serving(trimming) as server:
        said(server, monkeypatch, " I can.", "so")
        name = server.client.post("/v1/sessions", json={}).json()["id"]
        path = f"/v1/sessions/{name}/chat/completions"
        first = server.client.post(path, json=asked("how?", "Sure, ", max_tokens=40))
        items = server.client.get(f"/v1/sessions/{name}/messages").json()["data"]
        assert items[1]["content"][0]["text"] == "Sure, I can."
        second = server.client.post(path, json=asked("and?", max_tokens=40))
        assert read(second)[1] == read(first)[0] + len(" I can.")


@pytest.mark.parametrize(
    "name",
    long_but(
        ("thoughts", "trimmed"),
        ["chatml", "thoughts", "trimmed", "empty thoughts", "headers"],
        "these two show earlier messages in other ways; test_the_prompt has all templates",
    ),
)
def test_drawn_conversations_are_held_as_they_are_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is the conversation as rendered, by its tokens and by the logits behind them."""
    rng, wrong = Random(7), []
    begin = ChatJob._begin_replies

    def checked(job: ChatJob, logits: torch.Tensor) -> None:
        assert job.live is not None
        ids = held_ids(job.live)
        whole = job._template.render([one.for_template() for one in job.work.messages], True)
        wrong.append(job.engine.processor.tokenizer.decode(ids) != whole)
        with job.engine.session() as fresh:
            exact = fresh.prefill({"input_ids": torch.tensor([ids])})
        wrong.append(not torch.allclose(exact, logits, atol=1e-4, rtol=1e-4))
        begin(job, logits)

    def shown() -> Engine:
        engine = load(save_llama(tmp_path))
        with_template(engine, TEMPLATES[name])
        return engine

    monkeypatch.setattr(ChatJob, "_begin_replies", checked)
    letters = {str(token): -100.0 for token in range(264) if not 64 <= token < 90 and token != 0}
    fields: dict[str, Any] = {"logit_bias": letters, "temperature": 1, "max_tokens": 6}
    resumed = 0
    with serving(shown) as server:
        talk: list[str] = ["hello"]
        for seed in range(14):
            begun = rng.choice(["", "", "Sure,", "So, ", "\nYes"])
            if rng.random() < 0.3 and len(talk) > 1:  # the latest reply goes on
                asked_for, begun = talk[:-1], talk[-1]
            elif rng.random() < 0.3:  # another reply to an earlier question
                asked_for = talk[: rng.randrange(0, len(talk), 2) + 1]
            else:
                asked_for = [*talk, "and?"] if len(talk) % 2 == 0 else talk
            answer = server.chat(*asked_for, *([begun] if begun else []), seed=seed, **fields)
            resumed += read(answer)[1] > 0
            said = begun + text_of(answer)
            talk = [*asked_for, rng.choice([said, said, said.strip()])]
            if len(talk) > 12:
                talk = ["hello"]
    assert not any(wrong) and len(wrong) == 28 and resumed > 4


REASONING = THOUGHTS.replace(
    "<|im_start|>{{ m.role }}\n",
    "<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}",
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of a model that thinks before it answers."""
    made = save_llama(tmp_path_factory.mktemp("thinker"))

    def thinking() -> Engine:
        engine = load(made)
        with_template(engine, REASONING)
        return engine

    with serving(thinking) as server:
        yield server


def test_a_prefix_may_end_in_a_thought(thinker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        ("<think>\nwell,", " so\n</think>\n\nyes", " so", "yes"),
        ("<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("<think>\nhm\n</think>\n\n", "yes", None, "yes"),
        ("<think>\nhm\n</think>\n\nSo", " <think>yes", None, " <think>yes"),
        ("Sure,", " <think>yes</think>", None, " <think>yes</think>"),
    ]
    said(thinker, monkeypatch, *(one for case in cases for one in [case[1]] * 2))
    for at, (prefix, _, thought, text) in enumerate(cases):
        answer = thinker.chat(f"{at}?", prefix, max_tokens=40)
        assert text_of(answer) == text
        assert answer.json()["choices"][0]["message"].get("reasoning_content") == thought
        stream = thinker.chat(f"{at}?", prefix, max_tokens=40, stream=True).text
        events = [json.loads(one[6:]) for one in stream.splitlines() if one.startswith("data: {")]
        deltas = [one["choices"][0]["delta"] for one in events]
        assert "".join(one.get("content", "") for one in deltas) == text
        assert "".join(one.get("reasoning_content", "") for one in deltas) == (thought or "")


def test_calls_are_free_text_in_a_thought_that_was_begun(
    thinker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(thinker, monkeypatch, " <tool_call> no\n</think>\n\nyes")
    answer = thinker.chat("how?", "<think>\nwell,", tools=TOOLS, max_tokens=60)
    assert text_of(answer) == "yes"
    thought = answer.json()["choices"][0]["message"]["reasoning_content"]
    assert thought == " <tool_call> no"


@pytest.mark.parametrize("shown", ["text", "whole"])
def test_a_reply_with_a_thought_goes_on(
    thinker: Server, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """Also from a client that sends back its text alone."""
    whole = "<think>\nhm\n</think>\n\nwell,"
    said(thinker, monkeypatch, whole, " yes", "no")
    question = f"{shown}? {QUESTION}"
    first = thinker.chat(question, max_tokens=40)
    assert text_of(first) == "well,"
    before = read(first)[0] + len(whole)
    second = thinker.chat(question, whole if shown == "whole" else "well,", max_tokens=40)
    assert text_of(second) == " yes" and read(second) == (before, before - 1)
    third = thinker.chat(question, "well, yes", "and?", max_tokens=40)
    assert text_of(third) == "no"


def test_a_thought_before_the_prefix_is_shown(
    thinker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(thinker, monkeypatch, " yes", " yes")
    last = {"role": "assistant", "content": "So", "reasoning_content": "hm"}
    asks = {"role": "user", "content": "how?"}
    tokens = [
        read(thinker.chat(asks, last | {"reasoning_content": thought}, max_tokens=9))[0]
        for thought in (None, "hm")
    ]
    assert tokens[1] - tokens[0] == len("<think>\nhm\n</think>\n\n")


CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_functions_and_a_prefix(server: Server) -> None:
    assert server.chat("hello", "Sure,", tools=TOOLS).status_code == 200
    answer = server.chat("hello", "Sure,", tools=TOOLS, tool_choice="required")
    assert error_of(answer)[0] == "tool_choice"
    called = {"role": "assistant", "content": "Sure,", "tool_calls": [CALL]}
    asks = {"role": "user", "content": "hello"}
    assert error_of(server.chat(asks, called, tools=TOOLS))[0] == "messages[-1].role"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": False}, "continue_final_message"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"response_format": FORMAT}, "response_format"),
        ({"echo": True}, "echo"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_prefix(server: Server, fields: dict[str, Any], param: str) -> None:
    assert error_of(server.chat("hello", "Sure,", **fields))[0] == param
    assert server.chat("hello", "Sure,", response_format={"type": "text"}).status_code == 200


def test_what_needs_a_prefix(server: Server) -> None:
    for name, wrong, right in (
        ("continue_final_message", True, False),
        ("add_generation_prompt", False, True),
    ):
        param, message = error_of(server.chat("hello", **{name: wrong}))
        assert param == name and "is not the assistant's" in message
        assert server.chat("hello", **{name: right}).status_code == 200
        assert server.chat("hello", **{name: None}).status_code == 200


@pytest.mark.parametrize(
    "last",
    [
        [{"role": "assistant", "content": "Sure,"}],
        [{"role": "system", "content": "be kind"}, {"role": "assistant", "content": "Sure,"}],
        [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "Sure,"}] * 2],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": " \n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    ],
    ids=lambda one: str([each["content"] for each in one]),
)
def test_last_messages_that_begin_no_reply(server: Server, last: list[Any]) -> None:
    assert error_of(server.chat(*last))[0] == "messages[-1].role"


def test_a_prefix_counts_with_the_context(server: Server) -> None:
    answer = server.chat("hello", "a" * 40_000)
    assert error_of(answer)[1].startswith("40,005 characters are more than")


def test_a_response_does_not_continue_a_message(server: Server) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure,"}]
    answer = server.client.post("/v1/responses", json={"model": MODEL, "input": items})
    assert error_of(answer)[0] == "input[-1].role"
