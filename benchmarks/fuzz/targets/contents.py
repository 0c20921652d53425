"""What a conversation is made of: picture files, chat templates, rows of MMDU and of training data.

Pictures come with EXIF data and as data: URIs. A template is a program, which may do more than
write a text.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

import mmkv.eval.mmdu.run as mmdu
from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import SharedModels, save_vision_model, small_engine
from benchmarks.fuzz.target import Case, Target, Wrong, as_bytes, as_text
from mmkv.chat.options import ChatOptions
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError
from mmkv.eval.mmdu.judge import compare
from mmkv.eval.mmdu.run import run_score
from mmkv.prompt.media import load_image
from mmkv.prompt.template import ChatTemplate
from mmkv.resources import asset
from mmkv.training.data import examples
from mmkv.training.data.conversations import RowFile
from mmkv.training.data.scene_encoding import CHAT_TEMPLATE, build_tokenizer

_FORMATS = (
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "P"),
    ("PNG", "I;16"),
    ("PNG", "1"),
    ("JPEG", "RGB"),
    ("JPEG", "CMYK"),
    ("GIF", "P"),
    ("BMP", "RGB"),
    ("TIFF", "RGB"),
    ("TIFF", "F"),
    ("WEBP", "RGB"),
    ("PPM", "RGB"),
    ("ICO", "RGB"),
    ("TGA", "RGB"),
)


class Pictures(Target):
    """Files of 15 kinds with changed bytes; whole files with EXIF data of any form."""

    name = "pictures"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        noise = Image.frombytes("L", (24, 17), Random(0).randbytes(24 * 17))
        exif = Image.Exif()
        exif[0x0112], exif[0x010F] = 6, "maker"
        self._files = []
        for kind, mode in _FORMATS:
            picture = noise.convert("I").convert(mode) if mode == "I;16" else noise.convert(mode)
            for options in ({}, {"exif": exif.tobytes()}):
                made = io.BytesIO()
                picture.save(made, kind, **options)
                self._files.append(made.getvalue())
        self._exif, self._noise = exif.tobytes(), noise.convert("RGB")

    def make(self, rng: Random) -> Case:
        kind = rng.randrange(4)
        if kind == 0:
            content = self._with_exif(mutate.flip(rng, self._exif, 8), rng)
        elif kind == 1:
            # Most of what a decoder believes stands in the first bytes.
            whole = rng.choice(self._files)
            content = mutate.flip(rng, whole[:80]) + whole[80:]
        else:
            content = mutate.flip(rng, rng.choice(self._files))
        return {"how": rng.choice(("file", "file", "uri", "object")), "content": as_text(content)}

    def _with_exif(self, exif: bytes, rng: Random) -> bytes:
        made = io.BytesIO()
        kind = rng.choice(("JPEG", "PNG", "WEBP"))
        try:
            self._noise.save(made, kind, exif=exif)
        except Exception:  # Pillow refuses to write this one
            return mutate.flip(rng, self._files[-1])
        return made.getvalue()

    def run(self, case: Case) -> None:
        content = as_bytes(case["content"])
        if case["how"] == "uri":
            made = load_image("data:image/png;base64," + base64.b64encode(content).decode())
        elif case["how"] == "object":
            try:
                opened = Image.open(io.BytesIO(content))
            except Exception:  # what a caller sees from Pillow itself
                return
            made = load_image(opened)
        else:
            file = self.folder / "picture"
            file.write_bytes(content)
            made = load_image(str(file))
        assert made.mode == "RGB" and made.width and made.height


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


def template(rng: Random) -> str:
    """Return a template: one of the lists, a changed one, or words at random."""
    what = rng.random()
    if what < 0.2:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 25)))
    source = rng.choice((*ENDLESS, *ODD, *(CHAT_TEMPLATE,) * 20))
    if what < 0.4:
        return source
    if what < 0.6:
        return CHAT_TEMPLATE + source
    pieces = source.split(" ")
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(pieces))
        if rng.random() < 0.5:
            pieces[at] = rng.choice(_WORDS)
        else:
            pieces.insert(
                at, rng.choice((rng.choice(_WORDS), rng.choice(pieces), mutate.text(rng)))
            )
    return " ".join(pieces)


class Templates(Target):
    """Templates that render a talk of three turns, as a whole and turn after turn."""

    name = "chat templates"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._tokenizer = build_tokenizer()

    def make(self, rng: Random) -> Case:
        return {"source": template(rng), "text": mutate.text(rng), "parts": rng.random() < 0.5}

    def run(self, case: Case) -> None:
        made = ChatTemplate(self._tokenizer, case["source"], case["parts"])
        talk = [{"role": "user", "content": case["text"]}, {"role": "assistant", "content": "b"}]
        made.render(talk[:1], opening=True)
        made.addition(talk, [{"role": "user", "content": "then?"}])


_TURNS = (("user", "a <ImageHere> and?"), ("assistant", "red"), ("user", "then"), ("assistant", ""))


class Benchmark(Target):
    """A file of two dialogues, one of them changed, answered and scored as a whole."""

    name = "MMDU rows"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        (folder / "pictures").mkdir()
        shutil.copy(asset("scene.png"), folder / "pictures" / "p.png")
        self._model = save_vision_model(folder / "model")
        self.engine = small_engine(self._model)
        self.engines = [self.engine]

    def make(self, rng: Random) -> Case:
        rows: Any = [_dialogue("one"), _dialogue("two")]
        if rng.random() < 0.3:
            rows = {row.pop("id"): row for row in rows}
        if rng.random() < 0.9:
            key = rng.choice(sorted(rows)) if isinstance(rows, dict) else 0
            rows[key] = mutate.edit(rng, rows[key])
        else:
            rows = mutate.edit(rng, rows)
        return {"content": as_text(mutate.dump(rng, rows)), "answers": rng.random() < 0.2}

    def run(self, case: Case) -> None:
        data, output = self.folder / "benchmark.json", self.folder / "answers"
        shutil.rmtree(output, ignore_errors=True)
        data.write_bytes(as_bytes(case["content"]))
        given = mmdu.DataOptions(data, self.folder / "pictures")
        config = EngineConfig(model=self._model, budget=24)
        options = ChatOptions(config, max_new_tokens=2, quiet=True)
        load, mmdu._engine = mmdu._engine, lambda *_: self.engine
        try:
            mmdu.run(given, options, output)
        finally:
            mmdu._engine = load
        if case["answers"]:
            # What was written is read again, with a byte of it changed.
            for number, file in enumerate(sorted(output.glob("*.json"))):
                file.write_bytes(mutate.flip(Random(number), file.read_bytes(), 1))
            for read in (lambda: run_score(given, output), lambda: compare([output]).show()):
                try:
                    read()
                except MmkvError:
                    continue


def _dialogue(name: str) -> dict[str, Any]:
    turns = [{"from": who, "value": what} for who, what in _TURNS]
    return {"id": name, "image": ["p.png"], "conversations": turns, "exact": ["a", "b"]}


class TrainingRows(Target):
    """Rows of five kinds beside one that is whole; every usable row is encoded."""

    name = "training rows"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        shutil.copy(asset("scene.png"), folder / "p.png")
        self._model = str(save_vision_model(folder / "model"))
        self._shared = SharedModels()
        self._processor = examples.load_processor(self._model)

    def make(self, rng: Random) -> Case:
        kind = rng.choice(sorted(_ROWS))
        lines = [json.dumps(_ROWS[kind]).encode()]
        for _ in range(rng.randrange(1, 4)):
            lines.append(mutate.dump(rng, mutate.edit(rng, _ROWS[kind])))
        rng.shuffle(lines)
        suffix = rng.choice((".jsonl", ".jsonl", ".json", ".txt"))
        whole = b"\n".join(lines)
        if suffix == ".json":
            whole = b"[" + b",".join(lines) + b"]"
        if suffix == ".txt" or rng.random() < 0.1:
            whole = mutate.flip(rng, whole)
        named = rng.choice((kind, kind, None, *sorted(_ROWS)))
        return {"suffix": suffix, "kind": named, "content": as_text(whole)}

    def run(self, case: Case) -> None:
        file = self.folder / f"rows{case['suffix']}"
        file.write_bytes(as_bytes(case["content"]))
        said: list[str] = []
        rows = RowFile(file, case["kind"], report=said.append)
        encoder = examples.SyntheticEncoder(self._processor, 512, "cut", said.append)
        for row in rows:
            encoder(row)
        for line in said:
            if line.strip() == "":
                raise Wrong("a row was skipped without a reason")
            line.encode()  # what is reported can be written to a file or terminal


_ROWS: dict[str, Any] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "short"},
            {"role": "user", "content": [{"type": "image", "image": "p.png"}, _TURNS[2][1]][:1]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [{"type": "text", "text": "then"}]},
            {"role": "assistant", "content": "blue"},
        ],
    },
    "llava": {
        "image": "p.png",
        "conversations": [
            {"from": "human", "value": "<image>\nwhat?"},
            {"from": "gpt", "value": "red"},
        ],
    },
    "mmdu": {
        "image": ["p.png"],
        "conversations": [
            {"from": "user", "value": "see <ImageHere>."},
            {"from": "assistant", "value": "red"},
        ],
    },
    "pairs": {"instruction": "what?", "input": "red and blue", "output": "red"},
    "text": {"text": "a text of some words that is long enough"},
}
