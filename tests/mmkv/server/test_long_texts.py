"""Texts that cannot fit into the context are refused before they are rendered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmkv.engine.errors import ContextError
from mmkv.server.prompts import ContextBounds
from tests.support.chat_models import byte_tokenizer
from tests.support.servers import Server

CONTEXT = 2048  # of the model; its longest token has 16 characters
COUNTED = 5 * CONTEXT
TOO_LONG = 16 * CONTEXT + 1


def pairs() -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads two letters a as one token."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aa"]
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads any unknown word as one token."""
    inner = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


@pytest.mark.parametrize("length", [COUNTED, TOO_LONG])
def test_the_engine_never_sees_them(
    server: Server, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(*_: Any) -> None:
        raise AssertionError("the engine's thread was asked")

    monkeypatch.setattr(server.state.engine_thread.core, "job", job)
    asked = {"model": "small", "input": "a" * length}
    for answer in (
        server.chat("a" * length),
        server.chat("a" * length, stream=True),
        server.chat("a" * (length // 2), "b", "c" * (length // 2 + 1)),
        server.client.post("/v1/responses", json=asked),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert "2,048" in error["message"] and "shorten" in error["message"]


def test_what_goes_on_from_a_memory_counts_with_it(server: Server) -> None:
    name = server.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}/chat/completions"
    body = {"model": "small", "max_tokens": 2, "messages": [{"role": "user", "content": "a" * 900}]}
    assert server.client.post(path, json=body).status_code == 200
    body["messages"] = [{"role": "user", "content": "a" * (TOO_LONG - 900)}]
    answer = server.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert server.client.delete(f"/v1/sessions/{name}").status_code == 200


def test_tokens_are_counted_where_characters_do_not_tell() -> None:
    bounds = ContextBounds(pairs(), 1000)
    assert bounds.longest == 2
    bounds.require_possible(2000)
    with pytest.raises(ContextError):
        bounds.require_possible(2001)
    # Cut into pieces as it is, the whole counts as if it were not.
    long = ContextBounds(pairs(), 100_000)
    asyncio.run(long.count(["a" * 200_000]))
    with pytest.raises(ContextError):
        asyncio.run(long.count(["a" * 200_000, "a" * 300_000]))
    few = ContextBounds(byte_tokenizer(), 100)
    asyncio.run(few.count(["<|vision_start|>" * 100]))  # a token each, if it were one
    with pytest.raises(ContextError):
        asyncio.run(few.count(["b" * 500]))


def test_tokens_without_a_longest_bound_nothing() -> None:
    """A tokenizer that drops characters, or reads any number of them as one token."""
    bounds = ContextBounds(words(), 10)
    assert bounds.longest is None
    bounds.require_possible(10**9)
    asyncio.run(bounds.count(["b" * 1000]))
    with pytest.raises(ContextError):
        asyncio.run(bounds.count(["b " * 1000]))
