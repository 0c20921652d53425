"""Chat templates are programs of a checkpoint: none runs without end or eats the memory."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv.engine.errors import InputError
from mmkv.eval.fuzz.targets.contents import ENDLESS, ODD, template
from mmkv.prompt import sandbox
from mmkv.prompt.template import ChatTemplate
from mmkv.training.data.scene_encoding import CHAT_TEMPLATE, build_tokenizer
from tests.support.chat_models import CHATML, LLAVA_TEMPLATE

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "a" * 300_000 + " 12345678 % {0} é"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
USUAL = """{{ bos_token }}{% set ns = namespace(found=false, text='') %}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}
{%- set rest = messages %}{% endif %}
{%- for m in rest | rejectattr('role', 'equalto', 'tool') | list %}
{%- if loop.first or loop.last %}{{ loop.index0 ~ '/' ~ loop.length }}{% endif %}
{%- set words = m.content | map(attribute='text') | join(' ') %}
{%- set ns.text = ns.text + '[%s]' % words.split(' ')[-1].lstrip('\\n') %}{% set ns.found = true %}
{{- '{:>4}|{}'.format(loop.index, m.role) }}{{ m | tojson }}{{ words[:20] | trim | upper }}
{%- endfor %}{% for a, b in {'x': [ns.found, 1 + 2 ** 3], 'y': [3]}.items() %}{{ a }}{{ b }}
{%- if a == 'x' %}{% continue %}{% endif %}{% endfor %}{% macro f(x) %}<{{ x }}>{% endmacro %}
{%- generation %}{{ f(ns.text) * 2 }}{% endgeneration %}{{ strftime_now('%Y') | length }}"""


_TOKENIZER = build_tokenizer()


@pytest.fixture
def tokenizer() -> Any:
    return _TOKENIZER


def render(tokenizer: Any, source: str) -> str:
    messages = [{"role": "user", "content": "what?"}]
    return ChatTemplate(tokenizer, source, parts=False).render(messages, opening=True)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_eats_time_or_memory_is_stopped(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    render(tokenizer, "warm")
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="chat template") as error:
            render(tokenizer, source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and peak < 100 * 2**20


@pytest.mark.parametrize("source", ODD)
def test_no_template_raises_anything_else(tokenizer: Any, source: str) -> None:
    try:
        render(tokenizer, source)
    except InputError as error:
        assert "chat template" in str(error) and "\n" not in str(error)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_templates_of_a_generator_are_refused_or_run(rng: Any) -> None:
    with mock.patch.object(sandbox, "SECONDS", 0.1):
        try:
            render(_TOKENIZER, template(rng))
        except InputError as error:
            assert "chat template" in str(error)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, CHATML, LLAVA_TEMPLATE, USUAL])
@pytest.mark.parametrize("opening", [True, False])
def test_usual_templates_render_as_by_transformers(
    tokenizer: Any, source: str, opening: bool
) -> None:
    talk = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    expected = tokenizer.apply_chat_template(
        talk, chat_template=source, tokenize=False, add_generation_prompt=opening
    )
    assert ChatTemplate(tokenizer, source, parts=True).render(talk, opening) == expected


def test_the_limit_grows_with_the_messages(tokenizer: Any) -> None:
    source = "{{ messages[0].content * 2 }}"
    long = [{"role": "user", "content": "x" * 3_000_000}]
    made = ChatTemplate(tokenizer, source, parts=False).render(long, opening=True)
    assert len(made) == 6_000_000
