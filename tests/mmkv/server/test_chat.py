"""Chat completions over HTTP: replies, streams, errors in OpenAI's shape, JSON by a schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.model import Model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmkv import Engine, Sampling
from mmkv.engine.errors import ContextError
from mmkv.server.prompts import ContextBounds
from tests.support.chat_models import byte_tokenizer, picture, save_qwen3_vl
from tests.support.servers import MODEL, Server, asked, picture_part, serving


def load(folder: Path, **options: Any) -> Engine:
    given = {"gates": "random", "policy": "dbtrimkv", "budget": 512, "dtype": "float32"} | options
    return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **given)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


def replied(server: Server, *messages: Any, **fields: Any) -> dict[str, Any]:
    """Return an answer, of OpenAI's type."""
    answer = server.chat(*messages, **fields)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate(answer.json(), strict=True)
    return answer.json()


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return answer["choices"][choice]["message"]["content"]


def test_a_reply_is_the_engines_own(server: Server, folder: Path) -> None:
    question = [picture_part(picture("red", (48, 40))), {"type": "text", "text": "what is it?"}]
    said = {"role": "user", "content": question}
    answer = replied(server, {"role": "system", "content": "be short"}, said, max_tokens=9)
    alone = load(folder)
    shown = [
        {"type": "image", "image": picture("red", (48, 40))},
        {"type": "text", "text": "what is it?"},
    ]
    conversation = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": shown},
    ]
    (wanted,) = alone.generate([conversation], Sampling(max_new_tokens=9))
    assert text_of(answer) == wanted.text
    usage = answer["usage"]
    assert usage["prompt_tokens"] == wanted.prompt_tokens
    assert usage["completion_tokens"] == len(wanted.token_ids)
    assert wanted.memory is not None
    assert usage["mmkv"]["kept"] == wanted.memory.entries
    assert usage["mmkv"]["by_modality"] == wanted.memory.by_modality
    assert usage["mmkv"]["kv_bytes"] <= usage["mmkv"]["bound_bytes"]


def test_the_checkpoints_generation_config_is_the_default(tmp_path: Path) -> None:
    own = save_qwen3_vl(tmp_path)
    config = {"do_sample": False, "repetition_penalty": 1.4, "max_new_tokens": 12}
    (own / "generation_config.json").write_text(json.dumps(config))
    talk = [{"role": "user", "content": "go on"}]
    engine = load(own)
    (wanted,), plain = (
        engine.generate(talk),
        engine.generate(talk, Sampling.greedy(max_new_tokens=9)),
    )
    with serving(lambda: load(own)) as made:

        def reply(**fields: Any) -> dict[str, Any]:
            body = {"model": MODEL, "messages": talk} | fields
            return made.client.post("/v1/chat/completions", json=body).json()

        answer = reply()
        assert text_of(answer) == wanted.text and wanted.text != plain[0].text
        assert answer["usage"]["completion_tokens"] == 12
        off = reply(repetition_penalty=1, max_tokens=9)
        assert text_of(off) == plain[0].text
        drawn = [text_of(reply(temperature=2, seed=seed)) for seed in range(3)]
        assert len(set(drawn)) > 1
        assert text_of(reply(temperature=2, min_p=1)) == wanted.text  # the likeliest alone
        for field, value in (("min_p", 1.5), ("repetition_penalty", 0)):
            assert reply(**{field: value})["error"]["param"] == field
        config = json.dumps({"repetition_penalty": 1.0, "max_new_tokens": 9})
        assert text_of(reply(generation_config=config)) == plain[0].text
        config = json.dumps({"do_sample": True})
        drawn = [text_of(reply(generation_config=config, seed=seed)) for seed in range(3)]
        assert len(set(drawn)) > 1
        body = {"model": MODEL, "input": "go on"}
        shown = made.client.post("/v1/responses", json=body).json()
        assert shown["output"][0]["content"][0]["text"] == wanted.text
        assert shown["temperature"] == 0 and shown["presence_penalty"] == 0

        def responded(**fields: Any) -> str:
            answer = made.client.post(
                "/v1/responses", json=body | {"max_output_tokens": 9} | fields
            )
            return answer.json()["output"][0]["content"][0]["text"]

        assert responded(repetition_penalty=1) == plain[0].text
        likeliest = responded()
        for alone in ({"min_p": 1}, {"top_k": 1}):  # the likeliest alone
            assert responded(temperature=2, **alone) == likeliest
        drawn = [responded(temperature=2, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_log_probabilities_show_half_characters_as_bytes(server: Server) -> None:
    """The vocabulary is bytes: each token has one, whatever it is part of."""
    answer = replied(server, "go on", max_tokens=20, logprobs=True, top_logprobs=2)
    rows = answer["choices"][0]["logprobs"]["content"]
    assert all(len(row["bytes"]) == 1 for row in rows if not row["token"].startswith("<|"))
    joined = bytes(byte for row in rows for byte in row["bytes"])
    said = joined.decode("utf-8", errors="replace")
    assert said.startswith(text_of(answer)) or said == text_of(answer)
    assert any(byte > 127 for byte in joined)


def test_replies_follow_a_schema(server: Server) -> None:
    """The model is random; what it says is JSON of the schema all the same."""
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    answer = replied(
        server, "what?", response_format=form, max_tokens=80, temperature=2, seed=1, n=4
    )
    for choice in range(4):
        said = json.loads(text_of(answer, choice))
        assert said.keys() == {"colour", "count"} and 0 <= said["count"] <= 9
        assert said["colour"] in ("red", "green", "blue")
        assert answer["choices"][choice]["finish_reason"] == "stop"
    plain = {"type": "json_object"}
    assert text_of(replied(server, "what?", response_format=plain, max_tokens=9))[0] == "{"


FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
OWN = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/picture.png"}}
BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
THOUGHT, TEXT = {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}
PART = "messages[0].content[0]"
BAD: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"messages": []}, 400, "invalid_request", "messages"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "king", "content": "a"}]}, 400, "invalid_request", "messages.0.role"),
    ({"temperature": 3}, 400, "invalid_request", "temperature"),
    ({"min_tokens": 1}, 400, "unsupported_parameter", "min_tokens"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_request", None),
    ({"messages": [{"role": "user", "content": [AUDIO]}]}, 400, "unsupported_parameter", PART),
    (
        {"messages": [{"role": "user", "content": [THOUGHT, TEXT]}]},
        400,
        "unsupported_parameter",
        PART,
    ),
    ({"messages": [{"role": "user", "content": [BROKEN]}]}, 422, "media_unreadable", None),
    ({"logit_bias": {"\ud800": 1}}, 400, "invalid_request", None),
    ({"messages": [{"role": "user", "content": [FILE]}]}, 400, "media_url", None),
    ({"messages": [{"role": "user", "content": [OWN]}]}, 403, "media_refused", None),
    ({"n": 100}, 400, "invalid_value", "n"),
    ({"max_tokens": 10**6}, 400, "context_length_exceeded", "max_tokens"),
    ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    *(
        ({"logit_bias": {token: 1}}, 400, "invalid_value", "logit_bias")
        for token in ("x", "1" * 5000, "9" * 19)
    ),
    ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        400,
        "invalid_value",
        "response_format",
    ),
    ({"modalities": ["text", "audio"]}, 400, "unsupported_parameter", "modalities"),
    ({"mmkv": {"policy": "h2o"}}, 400, "unsupported_parameter", "mmkv.policy"),
    ({"mmkv": {"budget": 0.001}}, 400, "invalid_value", None),
    ({"mmkv": {"budget": 10**7}}, 400, "too_large_for_memory", None),
    ({"mmkv": {"resume": "required"}}, 409, "not_resumable", None),
]


@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_openais_shape(
    server: Server,
    fields: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    answer = server.chat("something new", stream=stream, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error.keys() >= {"message", "type"} and "Traceback" not in error["message"]
    if code == "too_large_for_memory":
        assert error["needed"] > error["limit"] > 0
    server.wait_for(lambda core: core.scheduler.running == 0)
    assert server.held == 0


def test_bodies_that_are_no_requests(server: Server) -> None:
    for body in (b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"null", b"", b"3", b"[]", b"{"):
        answer = server.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and answer.json()["error"]["message"], body[:9]


def test_what_transformers_chat_asks_for(server: Server) -> None:
    """The model is loaded, and a generation config says how to sample."""
    asked = {"model": MODEL}
    said = server.client.post("/load_model", json=asked).text
    assert json.loads(said.removeprefix("data: ")) == asked | {"status": "ready", "cached": True}
    other = server.client.post("/load_model", json={"model": "other"}).text
    assert json.loads(other.removeprefix("data: "))["status"] == "error"

    def reply(**fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} | fields
        return server.client.post("/v1/chat/completions", json=body).json()

    config = json.dumps({"max_new_tokens": 3, "do_sample": False, "transformers_version": "5"})
    own = reply(generation_config=config)
    assert own["choices"] == reply(max_tokens=3, temperature=0)["choices"]
    assert reply(generation_config=config, max_tokens=2)["usage"]["completion_tokens"] == 2
    for wrong, param in (
        ('{"num_beams": 4}', "generation_config.num_beams"),
        ('{"max_new_tokens": 0}', "generation_config.max_new_tokens"),
        ("[" * 100_000, "generation_config"),
        ("[]", "generation_config"),
    ):
        assert reply(generation_config=wrong)["error"]["param"] == param


def test_other_routes(server: Server) -> None:
    listed = server.client.get("/v1/models").json()
    assert [Model.model_validate(one).id for one in listed["data"]] == [MODEL]
    assert server.client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    # As Anthropic's API shows one, too.
    assert not listed["has_more"] and listed["first_id"] == listed["last_id"] == MODEL
    (shown,) = listed["data"]
    assert (shown["type"], shown["display_name"], shown["lifecycle"]) == ("model", MODEL, "active")
    assert datetime.fromisoformat(shown["created_at"]).timestamp() == shown["created"]
    assert server.client.get("/v1/models/other").status_code == 404
    assert server.client.get("/health").json() == {"status": "ok"}
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= paths.keys()
    for bad in (server.client.get("/v1/nothing"), server.client.put("/v1/models")):
        assert bad.status_code in (404, 405) and bad.json()["error"]["message"]


def numbers(server: Server) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    return {key: float(value) for key, value in (x.split() for x in lines if x[0] != "#")}


def test_metrics_count_pictures_that_came_again(server: Server) -> None:
    shown = [picture_part(picture(colour, (64, 48))) for colour in ("red", "blue", "gray")]

    def after_asking(text: str, pictures: list[Any]) -> dict[str, float]:
        parts = [{"type": "text", "text": text}, *pictures]  # no snapshot holds the pictures
        replied(server, {"role": "user", "content": parts}, max_tokens=2)
        return numbers(server)

    before, first = numbers(server), after_asking("one", shown[:2])
    second = after_asking("two", shown)
    names = [f"mmkv_mm_cache_{name}" for name in ("queries_total", "hits_total", "bytes")]
    grown = ([found[name] - before[name] for found in (first, second)] for name in names)
    queries, hits, held = grown
    assert queries == [2, 5] and hits == [0, 2]
    assert held[0] > 0 and held[1] == held[0] * 3 / 2


def test_metrics_count_what_was_done(server: Server) -> None:
    before = numbers(server)
    usage = replied(server, "count this", max_tokens=4, n=2)["usage"]
    after = numbers(server)
    for name, value in (
        ("mmkv_prompt_tokens_total", usage["prompt_tokens"]),
        ("mmkv_generation_tokens_total", 2 * 4),
        ('mmkv_request_success_total{finished_reason="length"}', 2),
        ("mmkv_time_to_first_token_seconds_count", 1),
        ("mmkv_inter_token_latency_seconds_count", 2),  # of one: the first turn brings two of four
        ("mmkv_e2e_request_latency_seconds_count", 1),
    ):
        assert after[name] - before.get(name, 0) == value, name
    assert after["mmkv_page_leaks_total"] == 0


def test_no_header_fits_an_empty_key(folder: Path) -> None:
    with serving(lambda: load(folder), api_keys=("",)) as server:
        for shown in ({}, {"Authorization": "Bearer"}, {"Authorization": "Basic x"}):
            assert server.client.get("/v1/models", headers=shown).status_code == 401


def test_log_probabilities_of_a_whole_answer_have_a_bound(server: Server) -> None:
    """They are put together before the first byte is sent."""
    fields = {"max_tokens": 1500, "logprobs": True, "top_logprobs": 20}
    answer = server.chat("what?", n=8, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "too_many_logprobs")
    assert "252,000" in error["message"]  # 8 * 1500 * 21
    own = {"model": MODEL, "input": "what?", "max_output_tokens": 10**4, "stream": True}
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    refused = server.client.post("/v1/responses", json=own | include)
    assert refused.status_code == 400


def test_keys_and_long_bodies(folder: Path) -> None:
    with serving(lambda: load(folder), api_keys=("one", "two"), body=2000) as server:
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
            answer = server.client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/chat/completions", "/v1/responses"):  # no stranger's body is parsed
            answer = server.client.post(path, content=b"{" + b" " * 3000)
            assert answer.status_code == 401
        assert server.client.get("/health").status_code == 200
        server.client.headers["Authorization"] = "Bearer two"
        assert server.chat("hi", max_tokens=1).status_code == 200
        long = asked("x" * 3000)
        assert server.client.post("/v1/chat/completions", json=long).status_code == 413

        def pieces() -> Iterator[bytes]:
            yield from (json.dumps(long)[at : at + 500].encode() for at in range(0, 3100, 500))

        kind = {"Content-Type": "application/json"}
        answer = server.client.post("/v1/chat/completions", content=pieces(), headers=kind)
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert error["code"] == "request_too_large" and "than 0.00190735 MiB;" in error["message"]


# Texts that cannot fit into the context are refused before they are rendered.


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


@pytest.fixture(scope="module")
def ending(folder: Path) -> Iterator[Server]:
    """Yield a server whose conversations end at the context."""
    with serving(lambda: load(folder, endless=False)) as made:
        assert made.client.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
        yield made


@pytest.mark.parametrize("length", [COUNTED, TOO_LONG])
def test_the_engine_never_sees_them(
    ending: Server, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(*_: Any) -> None:
        raise AssertionError("the engine's thread was asked")

    monkeypatch.setattr(ending.state.engine_thread.core, "job", job)
    asked = {"model": "small", "input": "a" * length}
    for answer in (
        ending.chat("a" * length),
        ending.chat("a" * length, stream=True),
        ending.chat("a" * (length // 2), "b", "c" * (length // 2 + 1)),
        ending.client.post("/v1/responses", json=asked),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
        assert "2,048" in error["message"] and "shorten" in error["message"]


def test_what_goes_on_from_a_memory_counts_with_it(ending: Server) -> None:
    name = ending.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}/chat/completions"
    body = {"model": "small", "max_tokens": 2, "messages": [{"role": "user", "content": "a" * 900}]}
    assert ending.client.post(path, json=body).status_code == 200
    body["messages"] = [{"role": "user", "content": "a" * (TOO_LONG - 900)}]
    answer = ending.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert ending.client.delete(f"/v1/sessions/{name}").status_code == 200


def test_tokens_are_counted_where_characters_do_not_tell() -> None:
    bounds = ContextBounds(pairs(), 1000)
    assert bounds.longest == 2
    bounds.require_possible([2000])
    with pytest.raises(ContextError):
        bounds.require_possible([1000, 1001])
    # Cut into pieces as it is, the whole counts as if it were not.
    long = ContextBounds(pairs(), 100_000)
    asyncio.run(long.count([["a" * 200_000]]))
    with pytest.raises(ContextError):
        asyncio.run(long.count([["a" * 200_000], ["a" * 300_000]]))
    few = ContextBounds(byte_tokenizer(), 100)
    asyncio.run(few.count([["<|vision_start|>" * 100]]))  # a token each, if it were one
    with pytest.raises(ContextError):
        asyncio.run(few.count([["b" * 500]]))


def test_tokens_without_a_longest_bound_nothing() -> None:
    """A tokenizer that drops characters, or reads any number of them as one token."""
    bounds = ContextBounds(words(), 10)
    assert bounds.longest is None
    bounds.require_possible([10**9])
    asyncio.run(bounds.count([["b" * 1000]]))
    with pytest.raises(ContextError):
        asyncio.run(bounds.count([["b " * 1000]]))


# Replies in JSON whose schema cannot be followed, or is none.


# What llguidance takes, and gives up in the middle of a reply.
LOOP: dict[str, Any] = {
    "type": "object",
    "properties": {"red": {"$ref": "#/$defs/a"}},
    "required": ["red"],
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
}
ITSELF = {"$ref": "#/$defs/a", "$defs": LOOP["$defs"]}
PANIC = {"type": "object", "required": "é" * 120}  # cut inside a letter, where it is shown
WIDE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                f"{at}-{name}": {"type": "string", "pattern": "^a.*b.*c$"} for name in range(8)
            },
        }
        for at in range(60)
    ]
}


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema} | fields
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "schema", [LOOP, WIDE, ITSELF, PANIC], ids=["loop", "wide", "itself", "panic"]
)
def test_a_schema_that_breaks_in_mid_reply_is_refused(server: Server, schema: Any, n: int) -> None:
    answer = server.chat("what?", response_format=form(schema), max_tokens=80, n=n)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_value")
    assert error["message"].startswith("the schema cannot be followed: ")
    assert "\n" not in error["message"] and error["message"].endswith("simplify it")
    assert server.held == 0
    assert server.chat("what?").status_code == 200


def test_a_stream_whose_schema_breaks_ends_with_the_error(server: Server) -> None:
    """Also while other replies to the same request could go on."""
    lengths = {"enum": ["a", "bcdefghijklmnop"]}
    late = LOOP | {
        "properties": {"colour": lengths} | LOOP["properties"],
        "required": ["colour", "red"],
    }
    given = {"response_format": form(late), "max_tokens": 80, "n": 8, "temperature": 1, "seed": 1}
    lines = [line for line in server.chat("what?", stream=True, **given).text.split("\n") if line]
    assert lines[-1].startswith('data: {"error"') and "cannot be followed" in lines[-1]


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 512, -9.3e18, -1e308])
def test_a_number_that_would_end_the_process_is_refused(server: Server, number: float) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"enum": [0, {"b": number}]}]}}}
    function = {"name": "look", "parameters": schema}
    for field in (
        {"response_format": form(schema)},
        {"tools": [{"type": "function", "function": function}]},
    ):
        error = server.chat("what?", **field).json()["error"]
        assert f"cannot be followed: the number {number} is too" in error["message"]
    near = {"type": "object", "properties": {"a": {"type": "integer", "enum": [-(2**63) + 1025]}}}
    assert server.chat("what?", response_format=form(near)).status_code == 200


def test_a_response_whose_schema_breaks(server: Server) -> None:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": LOOP}}
    body = {"model": "small", "input": "what?", "text": text}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert "the schema cannot be followed" in answer.json()["error"]["message"]


def test_a_streamed_response_whose_schema_breaks_blames_the_request(server: Server) -> None:
    late = LOOP | {
        "properties": {"colour": {"enum": ["a"]}} | LOOP["properties"],
        "required": ["colour", "red"],
    }
    text = {"format": {"type": "json_schema", "name": "answer", "schema": late}}
    body = {"model": "small", "input": "what?", "text": text, "stream": True}
    lines = server.client.post("/v1/responses", json=body).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
