"""Bodies as programs in use send them, in our words: none may be refused."""

from __future__ import annotations

from typing import Any

import httpx
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


# By the program: what it sends beside the model.
BODIES: dict[str, dict[str, Any]] = {
    "open-webui": {
        **STREAM,
        "messages": [SYSTEM, {"role": "user", "content": [text("what is it?"), image()]}],
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 128,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repeat_penalty": 1.1,
        "seed": 0,
        "stop": ["</s>"],
        "logit_bias": {"5": -100},
        "num_ctx": 4096,
        "num_keep": 24,
        "num_batch": 512,
        "use_mmap": True,
        "keep_alive": "5m",
        "chat_id": "c1",
        "session_id": "s1",
        "id": "m1",
        "features": {"web_search": False},
        "variables": {"{{USER_NAME}}": "A"},
        "background_tasks": {"title_generation": True},
        "files": [],
        "tool_ids": None,
    },
    "open-webui, a title": {
        "messages": [{"role": "user", "content": "### Task:\nName this chat."}],
        "stream": False,
        "max_completion_tokens": 128,
        "metadata": {"task": "title_generation"},
    },
    "open-webui, a reply goes on": {
        **STREAM,
        "messages": [ASKS, {"role": "assistant", "content": "Well, "}],
    },
    "LangChain": {
        "messages": [{"content": "hello", "role": "user"}],
        "stream": False,
        "n": 1,
        "temperature": 0.7,
        "max_completion_tokens": 64,
        "logprobs": None,
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
    "LangChain, a history": {
        **STREAM,
        "messages": [
            {"role": "system", "content": [text("You help.", id="lc_1")]},
            ASKS,
            {
                "role": "assistant",
                "content": [
                    {"type": "reasoning", "reasoning": "hm", "index": 0},
                    text("hi", index=1, annotations=[], id="msg_1"),
                ],
                "name": None,
            },
            {"role": "user", "content": [text("and?"), image(detail="auto")], "name": "me"},
        ],
    },
    "litellm": {
        **STREAM,
        "messages": [
            {"role": "system", "content": [text("a", cache_control={"type": "ephemeral"})]},
            {"role": "user", "content": [text("b"), image(format="image/png")]},
        ],
        "user": "u",
        "metadata": {"trace": "t"},
        "litellm_session_id": "s",
        "extra_headers": {"x": "y"},
        "reasoning_effort": "low",
        "parallel_tool_calls": None,
    },
    "Continue": {
        "messages": [SYSTEM, {"role": "user", "content": [text("b"), image()]}],
        "max_tokens": 128,
        "temperature": 0.1,
        "top_k": 40,
        "min_p": 0.01,
        "stop": ["\n\n\n", "<|im_end|>"],
        "stream": True,
        "prediction": {"type": "content", "content": "b"},
    },
    "opencode": {
        **STREAM,
        "messages": [
            SYSTEM,
            {"role": "user", "content": [text("a")]},
            {"role": "assistant", "content": "b", "reasoning_content": "hm"},
            {"role": "user", "content": "c"},
        ],
        "max_tokens": 128,
        "temperature": 0,
        "top_p": 1,
        "reasoning_effort": "medium",
        "tool_choice": "auto",
        "prompt_cache_key": "p",
        "store": False,
    },
    "Cline": {
        **STREAM,
        "messages": [
            SYSTEM,
            {"role": "user", "content": [text("<task>"), text("<environment_details>")]},
            {"role": "assistant", "content": [text("I see.")], "reasoning_details": []},
            {"role": "user", "content": [image(), text("go on")]},
        ],
        "temperature": 0,
        "reasoning_effort": None,
        "litellm_session_id": "cline-1",
        "include_reasoning": True,
    },
    "LibreChat": {
        "messages": [SYSTEM, {"role": "user", "content": [text("b"), image(detail="auto")]}],
        "temperature": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "stop": ["||>", "\nUser:"],
        "user": "6650c1f2",
        "stream": True,
        "include_reasoning": True,
    },
    "aider": {
        "messages": [
            {"role": "system", "content": [text("rules", cache_control={"type": "ephemeral"})]},
            ASKS,
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": "do it"},
        ],
        "temperature": 0,
        "stream": True,
    },
    "aider, a long reply goes on": {
        "messages": [ASKS, {"role": "assistant", "content": "```\na", "prefix": True}],
        "temperature": 0,
        "stream": True,
    },
    "Zed": {
        **STREAM,
        "messages": [SYSTEM, {"role": "user", "content": [text("a"), image()]}],
        "max_completion_tokens": 128,
        "stop": [],
        "temperature": 1.0,
        "tools": [],
        "tool_choice": None,
        "parallel_tool_calls": None,
        "prompt_cache_key": "thread",
        "reasoning_effort": None,
    },
    "n8n": {
        "messages": [ASKS],
        "temperature": 0.7,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "n": 1,
        "stream": False,
        "max_tokens": -1,
        "response_format": {"type": "text"},
    },
    "LM Studio's example": {
        "messages": [SYSTEM, ASKS],
        "temperature": 0.7,
        "max_tokens": -1,
        "stream": False,
    },
    "llama.cpp's page": {
        "messages": [ASKS],
        "stream": True,
        "cache_prompt": True,
        "return_progress": True,
        "reasoning_format": "auto",
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typ_p": 1,
        "typical_p": 1,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "max_tokens": -1,
        "n_predict": -1,
        "timings_per_token": False,
        "grammar": "",
        "json_schema": {},
    },
    "SillyTavern": {
        "messages": [SYSTEM, {**ASKS, "name": "A"}, {"role": "assistant", "content": "B:"}],
        "stream": True,
        "max_tokens": 128,
        "temperature": 1,
        "temperature_last": True,
        "top_p": 1,
        "top_k": 0,
        "top_a": 0,
        "tfs": 1,
        "typical_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "mirostat_mode": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "smoothing_factor": 0,
        "guidance_scale": 1,
        "negative_prompt": "",
        "do_sample": True,
        "add_bos_token": True,
        "ban_eos_token": False,
        "skip_special_tokens": True,
        "banned_strings": [],
        "sampler_priority": [],
        "min_tokens": 0,
        "ignore_eos": False,
        "logit_bias": {},
        "include_reasoning": True,
    },
    "vLLM's client": {
        "messages": [{"role": "user", "content": [image() | {"uuid": "a"}, text("b")]}],
        "max_tokens": 128,
        "min_tokens": 0,
        "best_of": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "echo": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "documents": None,
        "chat_template": None,
        "chat_template_kwargs": {"enable_thinking": False},
        "mm_processor_kwargs": None,
        "structured_outputs": None,
        "priority": 0,
        "request_id": "r",
        "cache_salt": "s",
    },
    "vLLM's client, a prefix": {
        "messages": [ASKS, {"role": "assistant", "content": "Sure, ", "reasoning": None}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"where": {"type": "string", "description": "A place."}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"where": "up"}'},
}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RETURNS: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
# Those of agents, with functions.
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "open-webui": {**STREAM, "messages": [SYSTEM, ASKS, CALLS, RETURNS], "tools": [LOOK]},
    "LangChain": {
        "messages": [ASKS, CALLS, RETURNS],
        "stream": False,
        "tools": [{"type": "function", "function": {**LOOK["function"], "strict": True}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "LangChain, a form": {
        "messages": [ASKS],
        "tools": [LOOK],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
    },
    "Continue": {
        "messages": [SYSTEM, ASKS, CALLS | {"content": " "}, RETURNS],
        "max_tokens": 128,
        "stream": True,
        "tools": [LOOK],
        "parallel_tool_calls": False,
    },
    "opencode": {
        **STREAM,
        "messages": [SYSTEM, ASKS, CALLS | {"content": "", "reasoning_content": "hm"}, RETURNS],
        "max_tokens": 128,
        "temperature": 0,
        "tools": [LOOK],
        "tool_choice": "auto",
    },
    "Cline": {
        **STREAM,
        "messages": [
            SYSTEM,
            ASKS,
            CALLS | {"reasoning_details": []},
            RETURNS | {"content": [text("blue")]},
        ],
        "temperature": 0,
        "tools": [{**LOOK, "function": {**LOOK["function"], "strict": False}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "Zed": {
        **STREAM,
        "messages": [SYSTEM, ASKS, CALLS, RETURNS],
        "stop": [],
        "temperature": 1.0,
        "tools": [LOOK],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "prompt_cache_key": "thread",
    },
    "n8n": {
        "messages": [SYSTEM, ASKS, CALLS | {"content": ""}, RETURNS | {"name": "look"}],
        "temperature": 0.7,
        "n": 1,
        "stream": True,
        "tools": [LOOK],
        "tool_choice": "auto",
    },
}

# Of /v1/completions: editors that complete code.
COMPLETIONS: dict[str, dict[str, Any]] = {
    "Continue": {
        "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>",
        "max_tokens": 64,
        "temperature": 0.01,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "stop": ["<fim_prefix>", "\n\n"],
        "stream": True,
        "suffix": "",
    },
    "Zed": {
        "prompt": "a",
        "max_tokens": 64,
        "temperature": 0.2,
        "stop": ["<|endoftext|>", "<|file_separator|>"],
    },
    "LangChain": {
        "prompt": ["a"],
        "temperature": 0.7,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "n": 1,
        "max_tokens": 256,
        "logit_bias": {},
        "logprobs": None,
        "seed": None,
    },
    "llama.cpp": {
        "prompt": "a",
        "n_predict": -1,
        "max_tokens": -1,
        "cache_prompt": True,
        "stream": False,
        "echo": False,
    },
}


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = server.client.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    assert not body.get("stream") or answer.text.rstrip().endswith("data: [DONE]"), answer.text
    return answer


@pytest.mark.parametrize("name", BODIES)
def test_a_chat_is_answered(server: Server, name: str) -> None:
    post(server, "chat/completions", short(BODIES[name]))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_chat_with_functions_is_answered(server: Server, name: str) -> None:
    post(server, "chat/completions", short(WITH_TOOLS[name]))


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_text_is_completed(server: Server, name: str) -> None:
    post(server, "completions", short(COMPLETIONS[name]))


def short(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose answer is short; one that sets no limit keeps that of the server."""
    named = {"max_tokens", "max_completion_tokens"} & body.keys()
    limit = {name: 3 for name in named if body[name] != -1}
    return body | (limit if named else {"max_tokens": 3})
