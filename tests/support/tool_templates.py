"""Chat templates that read tools, in the four forms that models have, and models with them.

Written for the tests. HERMES: JSON calls, thoughts shown since the latest question (as Qwen3 and
Qwen3-VL). QWEN_XML: calls as functions with parameters (as Qwen3-Coder and Qwen3.5). LLAMA3: one
call as bare JSON. MISTRAL: a list of calls behind a token, ids of nine letters, roles in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.chat_models import byte_tokenizer, save_llama, save_qwen3_vl

_WORDS = """
{%- macro words(content) -%}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
# From here on the Qwen forms agree: what stands between <tool_response> is one user's turn.
_RESULTS = """
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
"""
HERMES = (
    _WORDS
    + """
{%- set leading = messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if leading %}{{ words(messages[0].content) + '\\n\\n' }}{% endif %}
    {{- 'Functions at hand:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nCall one so: <tool_call>{"name": N, "arguments": A}</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif leading %}
    {{- '<|im_start|>system\\n' + words(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not words(m.content).startswith('<tool_response>') %}
        {%- set ns.asked = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = words(m.content) %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
    + _RESULTS
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
)
QWEN_XML = (
    _WORDS
    + """
{%- set leading = messages[0].role == 'system' %}
{%- if tools or leading %}
    {{- '<|im_start|>system\\n' }}
    {%- if leading %}{{ words(messages[0].content) }}{% endif %}
    {%- if tools %}
        {{- '\\n\\n<tools>' }}
        {%- for tool in tools %}
            {%- set function = tool.function %}
            {{- '\\n<function>\\n<name>' ~ function.name ~ '</name>' }}
            {%- if function.description is defined %}
                {{- '\\n<description>' ~ function.description | trim ~ '</description>' }}
            {%- endif %}
            {%- for name, field in function.parameters.properties | items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
                {%- for key, value in field | items %}
                    {{- '\\n<' ~ key ~ '>' }}
                    {%- if value is string %}{{ value }}{% else %}{{ value | tojson }}{% endif %}
                    {{- '</' ~ key ~ '>' }}
                {%- endfor %}
                {{- '\\n</parameter>' }}
            {%- endfor %}
            {{- '\\n</function>' }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set content = words(m.content) %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content | trim }}
        {%- for call in m.tool_calls or [] %}
            {%- if content | trim or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- if value is string %}{{ value }}{% else %}{{ value | tojson }}{% endif %}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
    + _RESULTS
    + """
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set ns = namespace(system='', rest=messages) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}{% set ns.rest = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- ns.system + '<|eot_id|>' }}
{%- if tools is not none and ns.rest %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- ns.rest[0].content | trim + '<|eot_id|>' }}
    {%- set ns.rest = ns.rest[1:] %}
{%- endif %}
{%- for m in ns.rest %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {%- set function = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + function.name }}
        {{- '", "parameters": ' + function.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}
        {%- else %}{{ m.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(system='', rest=messages, turns=0, asked=-1) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}{% set ns.rest = messages[1:] %}
{%- endif %}
{%- for m in ns.rest %}
    {%- if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
    {%- if not (m.role == 'tool' or m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.turns % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set ns.turns = ns.turns + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in ns.rest %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.asked %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}
        {%- if loop.last and ns.system %}{{ ns.system + '\\n\\n' }}{% endif %}
        {{- m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids have nine letters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('ids have nine letters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
FORMS = {"hermes": HERMES, "qwen_xml": QWEN_XML, "llama3": LLAMA3, "mistral": MISTRAL}

_PLAIN_TOKENS = {
    HERMES: ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    LLAMA3: [],
    MISTRAL: [],
}
_PLAIN_TOKENS[HERMES] += ["<think>", "</think>"]
_PLAIN_TOKENS[QWEN_XML] = _PLAIN_TOKENS[HERMES]
_SPECIAL = {
    LLAMA3: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    MISTRAL: ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"],
}
_SPECIAL[LLAMA3] += ["<|eom_id|>", "<|python_tag|>"]
_SPECIAL[MISTRAL] += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_SPECIAL[MISTRAL] += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]


def function(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form, all its parameters required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    described = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS = [
    function("press", key={"type": "string", "description": "a key, as <Enter> or 'ä'"}),
    function("point", x={"type": "integer"}, y={"type": "integer"}),
]


def call(name: str, id: str = "call_0001", **arguments: Any) -> dict[str, Any]:
    """Return an entry of ``tool_calls``."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_tokenizer(form: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the template and the tokens of a form, as models have them.

    ``<tool_call>`` and ``<think>`` are added tokens that are not special, as Qwen's are;
    ``[TOOL_CALLS]`` and ``<|python_tag|>`` are special.
    """
    tokenizer = byte_tokenizer(form)
    special = _SPECIAL.get(form, [])
    tokenizer.add_special_tokens(
        {"extra_special_tokens": special}, replace_extra_special_tokens=False
    )
    tokenizer.add_tokens([AddedToken(name, special=False) for name in _PLAIN_TOKENS[form]])
    if special:
        tokenizer.bos_token = special[0]
        tokenizer.eos_token = "</s>" if form == MISTRAL else "<|eot_id|>"
    return tokenizer


def save_tool_model(folder: Path, form: str = HERMES, seed: int = 0, **sizes: int) -> Path:
    """Return a text-only checkpoint whose template has a form."""
    return save_llama(folder, seed=seed, tokenizer=tool_tokenizer(form), **sizes)


def save_seeing_tool_model(folder: Path, form: str = HERMES, seed: int = 0) -> Path:
    """Return a Qwen3-VL checkpoint; HERMES and QWEN_XML show pictures in results of tools, too."""
    return save_qwen3_vl(folder, seed=seed, tokenizer=tool_tokenizer(form))
