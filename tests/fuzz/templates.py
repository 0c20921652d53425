"""Chat templates that would never end or eat memory, odd ones, and a strategy that changes them."""

from __future__ import annotations

from hypothesis import strategies as st

from mmkv.training.data.scene_encoding import CHAT_TEMPLATE
from tests.fuzz.strategies import texts

_DOUBLE = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = EXPR %}{% endfor %}"
_FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"

ENDLESS = (
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ [1] * 10000000000 }}",
    "{{ 10 ** (10 ** 8) }}",
    "{{ 9 ** 4000 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "{{ '{:.999999999f}'.format(1.5) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ ('x' * 99 ~ '%9999999999d') % 1 }}",
    "{{ 'x'.encode().ljust(99) + '%9999999999d'.encode() % 1 }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a\\nb' | indent(9999999999) }}",
    "{{ 1.5 | round(999999999, 'floor') }}",
    "{{ [1] | batch(9999999999, 0) | list }}",
    "{{ [1] | slice(9999999999) | list }}",
    "{{ messages | tojson(indent=9999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'.zfill(9999999999) }}",
    "{{ '\\t'.expandtabs(9999999999) }}",
    "{{ (5).to_bytes(9999999999, 'big') }}",
    "{{ ('a' * 900000).translate({97: 'b' * 900000}) }}",
    "{{ ('x' * 900000).replace('x', 'y' * 900000) }}",
    "{{ ('x' * 900000) | replace('x', 'y' * 900000) }}",
    "{% set s = 'x' * 900000 %}{{ s.join(s) }}",
    "{% set s = 'x' * 900000 %}{{ range(99999) | join(s) }}",
    "{% set s = 'x' * 900000 %}{{ ''.join(range(99999) | map(attribute='a', default=s)) }}",
    "{% set s = 'x' * 900000 %}{{ range(99999) | map(attribute='a', default=s) | join }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{{ lipsum(n=100000) }}",
    "{{ range(10 ** 12) | list }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    *(_FOREVER.replace("BODY", body) for body in ("", "x", "{% set x = 1 %}", "{{ loop.length }}")),
    *(
        f"{_DOUBLE.replace('EXPR', step)}{end}"
        for step, end in (
            ("ns.s + ns.s", "{{ ns.s }}"),
            ("ns.s ~ ns.s", "{{ ns.s | length }}"),
            ("ns.s | replace('x', ns.s ~ 'x')", ""),
            ("[ns.s, ns.s]", "{{ ns.s | tojson }}"),
            ("{'a': ns.s, 'b': ns.s}", "{{ ns.s }}"),
            ("(ns.s, ns.s)", "{{ ns.s | string | length }}"),
            ("dict(a=ns.s, b=ns.s)", "{{ ns.s | string | length }}"),
            ("'%s%s' % (ns.s, ns.s)", ""),
            ("'{0}{0}'.format(ns.s)", ""),
            ("(ns.s | length * 99999999) * (ns.s | string | length)", "{{ 1 // 0 }}"),
        )
    ),
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(s=[]) %}{% for i in range(99999) %}"
    "{% set ns.s = [ns.s, 'x' * 100000 ~ i] %}{% endfor %}",
    "{% set ns = namespace(s=1) %}{% for i in range(99999) %}"
    "{% set ns.s = namespace(a=ns.s, b='x' * 100000 ~ i) %}{% endfor %}",
    "{% set s %}" + _FOREVER.replace("BODY", "xxxxxxxxxxxxxxxx") + "{% endset %}",
    "{% set s = 'x' * 900000 %}{{ s | wordwrap(1) }}",
    "{{ ('<!--' * 90000 + '-->') | striptags }}",
    "{{ range(99999) | map('list') | sum(start=[]) }}",
    "{{ range(99999) | select('in', range(99999) | list) | list }}",
)
ODD = (
    "{% include 'other' %}",
    "{% extends 'base.html' %}",
    "{% import '/etc/passwd' as p %}{{ p }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('two\\nlines') }}",
    "{{ raise_exception() }}",
    "{{ messages[99].content }}",
    "{{ undefined_name.field.deeper }}",
    "{{ 1 // 0 }}",
    "{{ '%d' | format('x') }}",
    "{{ [1, 2] | sort(attribute='x') }}",
    "{{ messages | tojson }}",
    "{% for m in messages %}{{ m.content }}",
    "{{ '\\ud800' }}",
    "",
    "{{ messages[0]['content'] }}{{ messages[0]['content'] }}",
    "{% generation %}{% endgeneration %}",
    "{{ strftime_now('%Y' * 100) }}",
    "{{ strftime_now('%Y' * 100000) }}",
    "{{ strftime_now(3) }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{{ ns | tojson }}",
    "{% if add_generation_prompt %}{{ 'x' }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "{% if 1 %}" * 400 + "{% endif %}" * 400,
    "{{ " + " ~ ".join(["messages"] * 3000) + " }}",
    "x" * 2_000_000,
    "{{ messages | map('batch', 9999999) | list }}",
    "{% autoescape true %}{{ '<' ~ '{:>5}'.format(1) }}{% endautoescape %}",
    "{% filter upper %}{{ messages | length }}{% endfilter %}",
    "{% call(x) missing() %}{% endcall %}",
)
_WORDS = (
    "{{ {% %} }} {%- -%} messages [0] .content . for in if endfor endif else elif set = "
    "' ' 'x' 9 99999999999 ( ) * ** + - ~ | % // tojson range(99999) range namespace() ns ns.x "
    "raise_exception macro endmacro f f() loop loop.length loop.last list join map('string') "
    "sum sort unique batch(9) format('x') .format(1) .join .replace('x','xx') replace('x','xx') "
    "recursive break continue true none [] {} [1,2] and not is defined is string string length "
    "generation endgeneration add_generation_prompt dict() cycler joiner() self caller block a "
    "endblock <|im_start|> system \n"
).split(" ")


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Draw a template: one of the lists, one behind a good one, a changed one, or words."""
    word = st.sampled_from(_WORDS)
    what = draw(st.sampled_from("whole behind changed changed words".split()))
    if what == "words":
        return " ".join(draw(st.lists(word, min_size=1, max_size=25)))
    source = draw(st.sampled_from((*ENDLESS, *ODD)))
    if what != "changed":
        return source if what == "whole" else CHAT_TEMPLATE + source
    pieces = draw(st.just(CHAT_TEMPLATE) | st.just(source)).split(" ")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(pieces) - 1))
        replaced = draw(st.booleans())
        pieces[at : at + replaced] = [draw(word | st.sampled_from(pieces) | texts)]
    return " ".join(pieces)
