"""/v1/completions: texts that are continued as they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from openai.types import Completion

from mmkv import Engine
from tests.support.chat_models import save_llama
from tests.support.servers import MODEL, Server, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: Engine.from_pretrained(folder, dtype="float32")) as made:
        yield made


def complete(server: Server, text: Any, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 0} | fields
    return server.client.post("/v1/completions", json=body)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("prompt", ["once upon", ["<|im_end|>a"]])
def test_a_text_is_continued_as_transformers_does(
    server: Server, folder: Path, prompt: str | list[str]
) -> None:
    """What looks like a special token is text: it is spelled out."""
    core = server.state.engine_thread.core
    tokenizer, text = core.engine.processor.tokenizer, "".join(prompt)
    start = tokenizer("", add_special_tokens=True)["input_ids"]
    spelled = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = torch.tensor([start + spelled])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    answer = Completion.model_validate(complete(server, prompt).json())
    assert answer.choices[0].text == tokenizer.decode(made, skip_special_tokens=True)
    assert answer.usage is not None and answer.usage.prompt_tokens == ids.shape[1]
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"


def test_a_stream_has_the_same_text_and_log_probabilities(server: Server) -> None:
    whole = complete(server, "once", logprobs=3, n=2).json()
    stream = events(
        complete(
            server, "once", logprobs=3, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    usage = stream.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
    for index in range(2):
        pieces = [one["choices"][0] for one in stream if one["choices"][0]["index"] == index]
        choice = whole["choices"][index]
        assert "".join(piece["text"] for piece in pieces) == choice["text"] != ""
        assert (
            [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"] == "length"
        )
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
            assert [one for part in parts for one in part] == choice["logprobs"][name]
        scored = choice["logprobs"]
        for place, token in enumerate(scored["tokens"]):
            offset = scored["text_offset"][place]
            assert offset == sum(map(len, scored["tokens"][:place]))
            best = scored["top_logprobs"][place]
            assert 1 <= len(best) <= 4 and token in best
            assert scored["token_logprobs"][place] == best[token] == max(best.values()) <= 0
    for one in stream:  # OpenAI's streams have null there, and its type has not
        one["choices"][0]["finish_reason"] = one["choices"][0]["finish_reason"] or "stop"
        Completion.model_validate(one)
    assert complete(server, "once").json()["choices"][0]["logprobs"] is None


def test_nothing_of_it_is_kept(server: Server) -> None:
    for _ in range(2):
        assert complete(server, "x" * 300).json()["usage"]["mmkv"]["resumed"] == 0
    assert server.held == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"best_of": 2}, "best_of"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"model": "other"}, "model"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_refused_is_named(server: Server, fields: dict[str, Any], named: str) -> None:
    answer = complete(server, "a", **fields)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == named


def test_fields_without_effect_are_named_and_stops_are_kept(server: Server) -> None:
    answer = complete(server, "once", echo=False, suffix="", keep_alive="5m", n=1)
    assert answer.headers["x-mmkv-ignored"] == "keep_alive"
    text = answer.json()["choices"][0]["text"]
    cut = complete(server, "once", stop=[text[3]]).json()["choices"][0]
    assert cut["text"] == text[: text.index(text[3])] and cut["finish_reason"] == "stop"
