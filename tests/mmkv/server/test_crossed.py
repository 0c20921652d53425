"""Two turns of a conversation, with the server's features crossed two by two on one server.

Right values: what the model is made to say, taken apart by hand; the prompt as the tokenizer's own
``apply_chat_template`` writes it; log probabilities of transformers' model over all tokens, afresh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from mmkv import Engine
from mmkv.sampling import Sampler
from mmkv.server.job import ConversationLookup
from mmkv.server.reply import _Lines
from mmkv.server.state import TurnMemory
from tests.mmkv.server.test_tools import joined_pieces
from tests.support.pairwise import Row, pairwise_rows
from tests.support.servers import Server, serving
from tests.support.tiers import one_in
from tests.support.tool_templates import HERMES, function, save_tool_model, tool_tokenizer

TOKENIZER = tool_tokenizer(HERMES)
TOOL = function("point", x={"type": "integer"})
CALL = '<tool_call>\n{"name": "point", "arguments": {"x": 7}}\n</tool_call>'
MOST, STOP = 100, "ZZ"


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


OPENING = ids_of("<|im_start|>assistant\n")


@dataclass
class Said:
    """What the model says; the text, thought and calls in it, why it ends."""

    raw: str
    text: str = ""
    thought: str = ""
    calls: int = 0
    end: str = "stop"
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = ids_of(self.raw)

    def message(self) -> dict[str, Any]:
        called = {"name": "point", "arguments": {"x": 7}}
        calls = [{"id": "a", "type": "function", "function": called}] * self.calls
        given = {"role": "assistant", "content": self.text, "reasoning_content": self.thought}
        return given | ({"tool_calls": calls} if calls else {})


EMPTY = "<think>\n\n</think>\n\n"  # is no thought
LONG = "o" * (MOST - len(ids_of(EMPTY)))
WORDS = "More words than a call has, so that this ends behind one beside it."
# By seed; of two replies the second one says what follows.
SAID = {
    "plain": Said("A word, é.", "A word, é."),
    "call": Said(CALL, calls=1, end="tool_calls"),
    "thought": Said(f"<think>\nHm.\n</think>\n\n{WORDS}", WORDS, "Hm."),
    "all": Said(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", "I look.", "Hm.", 1, "tool_calls"),
    "calls": Said(f"{CALL}\n\n{CALL}", calls=2, end="tool_calls"),  # not as the template writes
    "cut": Said(EMPTY + LONG, LONG, end="length"),
    "stopped": Said(f"Well{STOP}", "Well", end="stopped"),
}
NAMES = list(SAID)
FACTORS: dict[str, list[Any]] = {
    "says": NAMES,
    "way": ["chat", "session", "background", "response", "thread"],
    "n": [1, 2],
    "stream": [False, True],
    "clients": [1, 2],
    "question": ["why?", "why? " * 80],  # a long one is kept apart from the reply's opening
    "back": ["all", "bare", "inline"],  # how the client of a chat sends thoughts back
    "resume": ["auto", "never"],  # of the second turn
    "rewrites": ["reread", "keep"],
    "by": ["id", "messages"],  # how a response or a thread is gone on from
}


def allowed(row: Row) -> bool:
    """Whether its way has all that it asks for."""
    if row["way"] == "response" and row["says"] == "stopped":
        return False  # it has no stop texts
    if row["way"] == "background" and not row["stream"]:
        return False
    if row["by"] == "messages" and (row["way"] not in ("response", "thread") or row["stream"]):
        return False  # a stream's pieces are not put together here as they are sent back
    return row["way"] == "chat" or (row["n"], row["back"], row["resume"]) == (1, "all", "auto")


ROWS = pairwise_rows(FACTORS, allowed)
# Of each way a stream that one client reads alone: what stands when it ends is looked at there.
USUAL = {name: values[0] for name, values in FACTORS.items()} | {"stream": True}
ALONE = [USUAL | {"way": way} for way in FACTORS["way"][1:]]
ROWS += [row for row in ALONE if row not in ROWS]


@dataclass
class Answer:
    """An answer, whole or put together of its events, whatever its form."""

    id: str = ""
    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    end: str = ""
    rows: list[float] = field(default_factory=list)
    back: list[dict[str, Any]] = field(default_factory=list)  # what a client sends back of it


def scores(given: dict[str, Any] | None) -> list[float]:
    """Return the log probability of each token, and of the likeliest in its place."""
    rows = [] if given is None else given["content"]
    return [one["logprob"] for row in rows for one in (row, *row["top_logprobs"])]


class Talk:
    """One client's conversation, in one of the ways."""

    ENDS: ClassVar[dict[str, str]] = {
        "end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length",
        "stop_sequence": "stopped", "incomplete": "length", "completed": "stop",
    }  # fmt: skip

    def __init__(self, server: Server, key: str, row: Row) -> None:
        self.server, self.row, self.way = server, row, row["way"]
        self.headers = {"Authorization": f"Bearer {key}"}
        self.messages: list[dict[str, Any]] = []  # in the form of its way
        self.before: str | None = None
        self.in_session = self.way in ("session", "background")
        if self.in_session:
            made = server.client.post("/v1/sessions", json={}, headers=self.headers)
            self.before = made.json()["id"]

    def turn(self, said: str, *new: dict[str, Any], n: int = 1, **own: str) -> list[Answer]:
        """Send new messages; return the replies, once they and their usage are checked."""
        body = {"model": "small", "stream": self.row["stream"], "seed": NAMES.index(said)}
        body |= {"mmkv": {key: value for key, value in own.items() if value}}
        field, usages = "messages", ("input_tokens", "output_tokens")
        made, result, tool, given = TOOL["function"], "tool_call_id", TOOL, list(new)
        going_on = self.before and self.row["by"] == "id" and self.way in ("response", "thread")
        if self.way == "response":
            told = {"type": "function_call_output", "output": "done"}
            given = [told | {"call_id": one[result]} if result in one else one for one in new]
            body |= {"max_output_tokens": MOST}
            body |= {"previous_response_id": self.before} if going_on else {}
            path, field, tool = "responses", "input", {"type": "function", **made}
        elif self.way == "thread":
            told = {"type": "tool_result", "content": "done"}
            results = [told | {"tool_use_id": one[result]} for one in new if result in one]
            given = [{"role": "user", "content": results}] if results else given
            thread = {"type": "continue", "previous_message_id": self.before}
            body |= {"max_tokens": MOST, "stop_sequences": [STOP]}
            body |= {"thread": thread if going_on else {"type": "create"}}
            tool = {key: made[key] for key in ("name", "description")}
            path, tool["input_schema"] = "messages", made["parameters"]
        else:
            most = "max_completion_tokens" if self.in_session else "max_tokens"
            body |= {"n": n, most: MOST, "stop": STOP, "logprobs": True, "top_logprobs": 1}
            body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
            body["mmkv"] |= {"background": True} if self.way == "background" else {}
            path, usages = "chat/completions", ("prompt_tokens", "completion_tokens")
            path = f"sessions/{self.before}/{path}" if self.in_session else path
        self.messages += given
        body[field] = given if self.in_session or going_on else self.messages
        body |= {} if self.way == "thread" and going_on else {"tools": [tool]}
        answer = self.server.client.post(f"/v1/{path}", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        assert "content-encoding" not in answer.headers
        kind = "text/event-stream; charset=utf-8" if body["stream"] else "application/json"
        assert answer.headers["content-type"] == kind
        if body["stream"]:
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.headers["cache-control"] == "no-cache"
        elif self.in_session:
            shown = self.server.client.get(f"/v1/sessions/{self.before}", headers=self.headers)
            assert answer.json()["session"] == shown.json()
        found, self.usage = (self.streamed if body["stream"] else self.whole)(answer.text)
        self.before = self.before if self.in_session else found[0].id
        assert len(found) == n
        self.sizes = tuple(self.usage[name] for name in usages)
        named = "thinking_tokens" if self.way == "thread" else "reasoning_tokens"
        self.thoughts = self.usage[f"{usages[1]}_details"][named]
        cached = self.usage.get(f"{usages[0]}_details", {}).get("cached_tokens")
        cached = self.usage["cache_read_input_tokens"] if self.way == "thread" else cached
        assert cached == self.usage["mmkv"]["resumed"]
        return found

    def said(self, wrote: Said, answer: Answer) -> None:
        """Note a reply as the client sends it back."""
        if self.way in ("response", "thread"):
            self.messages += answer.back
            return
        back = {key: one for key, one in wrote.message().items() if one}
        if self.row["back"] != "all":
            back.pop("reasoning_content", None)
        if self.row["back"] == "inline" and wrote.thought and not wrote.calls:
            back["content"] = wrote.raw
        calls = [{"id": one["id"], "type": "function", "function": one} for one in answer.calls]
        self.messages.append(back | ({"tool_calls": calls} if calls else {}))

    def whole(self, text: str) -> tuple[list[Answer], dict[str, Any]]:
        made = json.loads(text)
        if self.way == "chat" or self.in_session:
            found = []
            for choice in made["choices"]:
                one = choice["message"]
                calls = [
                    call["function"] | {"id": call["id"]} for call in one.get("tool_calls", ())
                ]
                thought = one.get("reasoning_content") or ""
                assert (one["content"] is None) == (bool(calls) and not one["content"])
                rows = scores(choice["logprobs"])
                given = one["content"] or "", thought, calls, choice["finish_reason"], rows
                found.append(Answer(made["id"], *given))
            return found, made["usage"]
        one = Answer(made["id"], end=self.ENDS[made.get("status") or made["stop_reason"]])
        items = made.get("output") or made["content"]
        one.back = items if "output" in made else [{"role": "assistant", "content": items}]
        for item in items:
            match item["type"]:
                case "message":
                    one.text += item["content"][0]["text"]
                case "reasoning":
                    one.thought += item["content"][0]["text"]
                case "text":
                    one.text += item["text"]
                case "thinking":
                    one.thought += item["thinking"]
                case _:
                    arguments = item.get("arguments") or json.dumps(item["input"])
                    name = item.get("call_id") or item["id"]
                    one.calls.append({"name": item["name"], "arguments": arguments, "id": name})
        return [one], made["usage"]

    def streamed(self, text: str) -> tuple[list[Answer], dict[str, Any]]:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert self.way == "thread" or lines.pop() == "[DONE]"
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if self.way == "response":
            made = events[-1]["response"]
            assert events[-1]["type"] == f"response.{made['status']}"
            deltas = [one["delta"] for one in events if one["type"].endswith("_text.delta")]
            (one,), usage = self.whole(json.dumps(made))
            assert "".join(deltas) == one.thought + one.text
            written = [
                each["delta"] for each in events if each["type"].endswith("_arguments.delta")
            ]
            assert "".join(written) == "".join(call["arguments"] for call in one.calls)
            return [one], usage
        if self.way == "thread":
            one, last = Answer(events[0]["message"]["id"]), events[-2]
            assert [each["type"] for each in events[:2]] == ["message_start", "ping"]
            assert events[-1]["type"] == "message_stop" and events[0]["message"]["content"] == []
            begun = [each["content_block"]["type"] for each in events if "content_block" in each]
            assert begun == sorted(begun, key=["thinking", "text", "tool_use"].index)
            for event in events:
                block = event.get("content_block", {})
                if block.get("type") == "tool_use":
                    one.calls.append({"name": block["name"], "arguments": "", "id": block["id"]})
                delta = event.get("delta", {})
                one.text += delta.get("text", "")
                one.thought += delta.get("thinking", "")
                if "partial_json" in delta:
                    one.calls[-1]["arguments"] += delta["partial_json"]
            one.end = self.ENDS[last["delta"]["stop_reason"]]
            return [one], last["usage"]
        found = []
        pieces = [one for one in events if one["choices"]]
        for at in sorted({one["choices"][0]["index"] for one in pieces}):
            own = [one for one in pieces if one["choices"][0]["index"] == at]
            made = joined_pieces(own)
            rows = [score for one in own for score in scores(one["choices"][0]["logprobs"])]
            given = made["content"], made["reasoning_content"], made["calls"], made["reason"]
            found.append(Answer(events[0]["id"], *given, rows))
        return found, events[-1]["usage"]


def rendered(messages: list[dict[str, Any]]) -> str:
    return TOKENIZER.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=4096, dtype="float32")

    with serving(load, api_keys=("one-key", "other-key")) as made:
        yield made


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Note what is kept (an empty line) and what is sent; replies say what their seeds name."""

    def draw(sampler: Sampler, *_: Any) -> int:
        ids = [*SAID[NAMES[(sampler.sampling.seed or 0) % len(NAMES)]].ids, TOKENIZER.eos_token_id]
        at = getattr(sampler, "at", 0)
        sampler.at = at + 1  # type: ignore[attr-defined]
        return ids[at]

    noted: list[bytes] = []
    claim, keep_after, write = TurnMemory.claim, ConversationLookup.keep_after, _Lines.write

    def claimed(*given: Any) -> Any:
        noted.append(b"")
        return claim(*given)

    def kept(*given: Any) -> None:
        keep_after(*given)
        noted.append(b"")

    async def written(lines: _Lines, line: bytes) -> None:
        noted.append(line)
        await write(lines, line)

    monkeypatch.setattr(Sampler, "draw", draw)
    monkeypatch.setattr(TurnMemory, "claim", claimed)
    monkeypatch.setattr(ConversationLookup, "keep_after", kept)
    monkeypatch.setattr(_Lines, "write", written)
    return noted


def scored(model: LlamaForCausalLM, prompt: list[int], reply: list[int]) -> list[float]:
    """Return the same of a reply's tokens, by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1)
    own = found.gather(1, torch.tensor(reply)[:, None])
    return torch.cat([own, found.amax(1, keepdim=True)], 1).flatten().tolist()


def talked(
    server: Server, model: LlamaForCausalLM, key: str, row: Row, log: list[bytes] | None = None
) -> None:
    """Have a conversation of two turns and check all of it; ``log``: of this one alone."""
    talk, way = Talk(server, key, row), row["way"]
    told: list[dict[str, Any]] = []
    seen: list[int] = []
    held: list[int] = []
    kept = False  # what is held stays as it is, where the template would show it in another way
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"{row} {row['question']}"}]
    for said, n, resume in ((row["says"], row["n"], "auto"), ("plain", 1, row["resume"])):
        told += asked
        prompt = ids_of(rendered(told))
        fresh = prompt
        if kept:
            behind = rendered([*told[:1], {"role": "assistant", "content": "@@"}, *told[2:]])
            prompt = [*seen, *ids_of(behind.partition("@@")[2])]
        own = {"resume": resume if way == "chat" else "", "rewrites": row["rewrites"]}
        answers = talk.turn(said, *asked, n=n, **own)
        if row["stream"] and log is not None:  # who reads the end may ask again
            last = b"message_delta" if way == "thread" else b'"usage":{'
            end = next(at for at, line in enumerate(log) if last in line)
            assert log[:end].count(b"") == n + (way != "chat")
            log.clear()
        replies = [SAID[NAMES[(NAMES.index(said) + at) % len(NAMES)]] for at in range(n)]
        for answer, wanted in zip(answers, replies, strict=True):
            other = {"response": {"tool_calls": "stop"}, "thread": {}}.get(way, {"stopped": "stop"})
            end = other.get(wanted.end, wanted.end)
            assert (answer.text, answer.thought, answer.end) == (wanted.text, wanted.thought, end)
            called = [(one["name"], json.loads(one["arguments"])) for one in answer.calls]
            assert called == [("point", {"x": 7})] * wanted.calls
            if way in ("chat", "session"):
                assert answer.rows == pytest.approx(scored(model, prompt, wanted.ids), abs=2e-4)
        pairs = enumerate(zip(held, prompt, strict=False))
        resumed = next((at for at, (one, two) in pairs if one != two), len(held))
        resumed = resumed if resume == "auto" else 0
        assert talk.usage["mmkv"]["resumed"] == resumed
        read = len(prompt) - (resumed if way == "thread" else 0)
        assert talk.sizes == (read, sum(len(one.ids) for one in replies))
        spelled = [f"<think>\n{one.thought}\n</think>" for one in replies if one.thought]
        assert talk.thoughts == sum(map(len, map(ids_of, spelled)))
        differs = talk.usage["mmkv"]["differs"] or ""
        asked_for = row["says"] != "stopped" and not told[-1].get("tool_call_id")
        assert ("as wanted" in differs) == (prompt != fresh and asked_for)
        wrote = replies[0]
        ids = [one["id"] for answer in answers for one in answer.calls]
        assert len(set(ids)) == len(ids)
        seen = [*prompt, *wrote.ids]  # the last one of a reply that did not end is not read yet
        held = seen if wrote.end in ("stop", "tool_calls") else seen[:-1]
        kept = row["resume"] == "auto" and (row["rewrites"] == "keep" or wrote.calls > 0)
        if wrote.end == "stopped":  # the memory holds what the client never saw
            kept = way != "chat" and row["by"] == "id"
            if not kept:  # no other request gets it; a long question's is there
                held = prompt[: -len(OPENING)] if len(row["question"]) > 256 else []
        told.append(wrote.message())
        if row["resume"] == "never" and row["back"] != "all" and wrote.calls:
            told[-1].pop("reasoning_content")  # nobody knows it
        talk.said(wrote, answers[0])
        asked = [
            {"role": "tool", "tool_call_id": one["id"], "content": "done"}
            for one in answers[0].calls
        ]
        asked = asked or [{"role": "user", "content": "And then?"}]
    if talk.in_session:
        path = f"/v1/sessions/{talk.before}/messages"
        shown = server.client.get(path, headers=talk.headers).json()["data"]
        found = [(one["role"], len(one.get("tool_calls", ()))) for one in shown]
        assert found == [(one["role"], len(one.get("tool_calls", ()))) for one in told]


@one_in(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values()))[:60])
def test_two_turns(server: Server, model: LlamaForCausalLM, log: list[bytes], row: Row) -> None:
    keys = ("one-key", "other-key")[: row["clients"]]
    before = len(server.inside(lambda core: core.scheduler.sessions))
    with ThreadPoolExecutor() as pool:
        own = log if len(keys) == 1 else None
        for done in [pool.submit(talked, server, model, key, row, own) for key in keys]:
            done.result()
    kept = {"chat": 0, "session": 1, "background": 1}.get(row["way"], 2)  # the others are stored
    assert len(server.inside(lambda core: core.scheduler.sessions)) == before + kept * len(keys)
