"""Bodies as programs in use send them, in our words: none may be refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_models import picture
from tests.support.servers import MODEL, Server, picture_part

PICTURE = picture_part(picture("red", (40, 32)))["image_url"]["url"]
SYSTEM = {"role": "system", "content": "You help."}
ASKS = {"role": "user", "content": "hello"}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def image(**more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": PICTURE} | more}


def asks(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)} | more


def replies(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


CACHED = {"cache_control": {"type": "ephemeral"}}
THOUGHT = {"type": "reasoning", "reasoning": "hm", "index": 0}
# By the program: conversations whose messages or parts have something of its own.
TALKS: dict[str, list[dict[str, Any]]] = {
    "open-webui": [SYSTEM, asks(text("what is it?"), image())],
    "open-webui, a reply goes on": [ASKS, replies("Well, ")],
    "LangChain": [
        {"role": "system", "content": [text("You help.", id="lc_1")]},
        ASKS,
        replies([THOUGHT, text("hi", index=1, annotations=[], id="msg_1")], name=None),
        asks(text("and?"), image(detail="auto"), name="me"),
    ],
    "litellm": [
        {"role": "system", "content": [text("a", **CACHED)]},
        asks(text("b"), image(format="image/png")),
    ],
    "opencode": [SYSTEM, asks(text("a")), replies("b", reasoning_content="hm"), ASKS],
    "Cline": [
        SYSTEM,
        asks(text("<task>"), text("<environment_details>")),
        replies([text("I see.")], reasoning_details=[]),
        asks(image(), text("go on")),
    ],
    "aider, a long reply goes on": [ASKS, replies("```\na", prefix=True)],
    "SillyTavern": [SYSTEM, ASKS | {"name": "A"}, replies("B:")],
    "vLLM's client": [asks(image() | {"uuid": "a"}, text("b"))],
    "vLLM's client, a prefix": [ASKS, replies("Sure, ", reasoning=None)],
}

# Fields that do nothing here at the value that programs send, by this value.
OFF: list[tuple[Any, str]] = [
    (None, "logprobs tool_ids best_of documents chat_template mm_processor_kwargs tool_choice"),
    (None, "structured_outputs parallel_tool_calls reasoning_effort response_format"),
    (False, "timings_per_token ban_eos_token ignore_eos use_beam_search echo store"),
    (False, "include_stop_str_in_output add_special_tokens continue_final_message"),
    (True, "use_mmap cache_prompt return_progress temperature_last do_sample add_bos_token"),
    (True, "skip_special_tokens spaces_between_special_tokens include_reasoning"),
    (True, "add_generation_prompt"),
    (0, "frequency_penalty presence_penalty min_p dynatemp_range xtc_probability dry_multiplier"),
    (0, "top_a epsilon_cutoff eta_cutoff mirostat_mode smoothing_factor min_tokens priority"),
    (1, "n typ_p typical_p tfs dynatemp_exponent repeat_penalty guidance_scale length_penalty"),
    ("", "grammar negative_prompt"),
    ([], "files tools stop stop_token_ids banned_strings sampler_priority"),
    ({}, "json_schema logit_bias background_tasks"),
    (-1, "dry_penalty_last_n n_predict"),
    (64, "num_ctx num_keep num_batch repeat_last_n"),
    (0.1, "xtc_threshold dry_base dry_allowed_length mirostat_tau mirostat_eta"),
    ("s", "keep_alive chat_id session_id id user prompt_cache_key cache_salt request_id"),
    ("s", "litellm_session_id"),
    ("auto", "reasoning_format"),
]
# Settings that say something, of one program or another.
SETTINGS: dict[str, dict[str, Any]] = {
    "fields without effect": {name: value for value, names in OFF for name in names.split()},
    "open-webui": {
        **STREAM,
        **{"seed": 0, "top_p": 0.9, "temperature": 0.8, "logit_bias": {"5": -100}},
        **{"features": {"web_search": False}, "variables": {"{{USER_NAME}}": "A"}},
    },
    "open-webui, a title": {
        "max_completion_tokens": 3,
        "metadata": {"task": "title_generation"},
    },
    "LangChain": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "Answer",
                "description": "An answer.",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"a": {"type": "boolean"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        },
    },
    "litellm": {"extra_headers": {"x": "y"}, "reasoning_effort": "low", "metadata": {"t": "t"}},
    "Continue": {"stop": ["\n\n", "<|im_end|>"], "prediction": {"type": "content", "content": "b"}},
    "opencode": {**STREAM, "tool_choice": "auto", "reasoning_effort": "medium"},
    "n8n": {"max_tokens": -1, "response_format": {"type": "text"}},
    "llama.cpp's page": {"samplers": ["top_k", "min_p"], "max_tokens": -1, "repeat_penalty": 1.1},
    "vLLM's client": {"chat_template_kwargs": {"enable_thinking": False}},
    "vLLM's client, a prefix": {
        "messages": TALKS["vLLM's client, a prefix"],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}

LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"where": {"type": "string", "description": "A place."}},
        "required": ["where"],
        "additionalProperties": False,
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"where": "up"}'},
}
RETURNS: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
# Replies that call, and results, of agents; test_clients has whole bodies of two others.
STEPS: dict[str, list[dict[str, Any]]] = {
    "open-webui": [replies(None, tool_calls=[CALL]), RETURNS],
    "Continue": [replies(" ", tool_calls=[CALL]), RETURNS],
    "opencode": [replies("", reasoning_content="hm", tool_calls=[CALL]), RETURNS],
    "Cline": [
        replies(None, reasoning_details=[], tool_calls=[CALL]),
        RETURNS | {"content": [text("blue")]},
    ],
    "n8n": [replies("", tool_calls=[CALL]), RETURNS | {"name": "look"}],
}

# Of /v1/completions: editors that complete code.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "Continue": {
        "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>",
        **{"presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "suffix": ""},
        **{"stop": ["<fim_prefix>", "\n\n"], "stream": True},
    },
    "LangChain": {"prompt": ["a"], "n": 1, "logit_bias": {}, "logprobs": None, "seed": None},
    "llama.cpp": {"prompt": "a", "n_predict": -1, "max_tokens": -1, "cache_prompt": True},
}


def answered(server: Server, path: str, body: dict[str, Any]) -> None:
    given = {"model": MODEL, "max_tokens": 3, "messages": [ASKS], **body}
    if path == "completions":
        del given["messages"]
    if "max_completion_tokens" in body:
        del given["max_tokens"]
    answer = server.client.post(f"/v1/{path}", json=given)
    assert answer.status_code == 200, answer.text
    assert not body.get("stream") or answer.text.rstrip().endswith("data: [DONE]"), answer.text


@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_is_answered(server: Server, name: str) -> None:
    answered(server, "chat/completions", STREAM | {"messages": TALKS[name]})


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_taken(server: Server, name: str) -> None:
    answered(server, "chat/completions", SETTINGS[name])


@pytest.mark.parametrize(
    ("name", "strict"), zip(STEPS, [None, True, False, None, True], strict=True)
)
def test_a_call_and_its_result_are_read(server: Server, name: str, strict: bool | None) -> None:
    function = LOOK if strict is None else LOOK | {"strict": strict}
    body = {"messages": [ASKS, *STEPS[name]], "tools": [{"type": "function", "function": function}]}
    answered(server, "chat/completions", body | {"parallel_tool_calls": False})


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_text_is_completed(server: Server, name: str) -> None:
    answered(server, "completions", COMPLETIONS[name])
