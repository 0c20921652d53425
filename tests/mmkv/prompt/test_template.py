"""Chat templates: which one counts, special tokens in texts, and templates that run wild."""

from __future__ import annotations

import itertools
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from mmkv import Engine
from mmkv.engine.errors import InputError, ModelError
from mmkv.prompt import sandbox, special
from mmkv.prompt.loading import load_processor
from mmkv.prompt.processing import Processor
from mmkv.prompt.special import CUT, Cutter, tokenize
from mmkv.prompt.template import REWRITES, ChatTemplate
from mmkv.server.prompts import outline
from mmkv.training.data.labels import TurnFinder
from mmkv.training.data.scene_encoding import CHAT_TEMPLATE, build_tokenizer
from tests.fuzz.templates import ENDLESS, ODD
from tests.support.chat_models import (
    CHATML,
    LLAVA_TEMPLATE,
    SMOLVLM_TEMPLATE,
    SPECIAL,
    byte_tokenizer,
    picture,
    save_internvl,
    save_llama,
    save_llava,
    save_llava_onevision,
    save_mistral3,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_smolvlm,
)
from tests.support.tiers import one_in

SOURCES = ("processor_config", "chat_template.json", "chat_template.jinja", "tokenizer_config")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints without a template, by family."""
    made = {}
    for name, save in (("llava", save_llava), ("qwen", save_qwen2_5_vl), ("llama", save_llama)):
        made[name] = save(tmp_path_factory.mktemp(name))
        (made[name] / "chat_template.jinja").unlink()
        for weights in made[name].glob("*.safetensors"):
            weights.unlink()
    return made


def change(file: Path, **more: Any) -> None:
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | more))


def put(folder: Path, source: str, template: Any) -> None:
    if source == "chat_template.jinja":
        (folder / source).write_text(template)
    elif source == "chat_template.json":
        change(folder / source, chat_template=template)
    else:
        change(folder / f"{source}.json", chat_template=template)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_template_is_that_of_transformers(
    bare: dict[str, Path], tmp_path: Path, count: int
) -> None:
    """Every set of sources; transformers' processor where the family has one that loads here."""
    for at, named in enumerate(itertools.combinations(SOURCES, count)):
        for family in ("llava", "qwen", "llama"):
            folder = tmp_path / f"{family}{at}"
            shutil.copytree(bare[family], folder)
            for source in named:
                put(folder, source, f"{{{{ '{source}' }}}}")
            tokenizer = AutoTokenizer.from_pretrained(folder)
            own = load_processor(folder).template.source
            if family == "llava":
                theirs = AutoProcessor.from_pretrained(folder, backend="pil").chat_template
                wanted = theirs or tokenizer.chat_template
            elif family == "qwen":  # its processor needs torchvision; the sources are read alike
                from transformers import ProcessorMixin

                found = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
                wanted = found or tokenizer.chat_template
            else:
                older = "{{ 'chat_template.json' }}" if "chat_template.json" in named else None
                wanted = tokenizer.chat_template or older
            assert own == wanted, (family, named)


def test_a_vision_template_counts_more_than_the_tokenizers_text_template(
    bare: dict[str, Path], tmp_path: Path
) -> None:
    """As published Qwen2.5-VL conversions have it."""
    shutil.copytree(bare["qwen"], tmp_path / "m")
    text = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}"
    vision = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '<|image_pad|>' }}"
        "{% endfor %}{% endfor %}"
    )
    put(tmp_path / "m", "tokenizer_config", text)
    put(tmp_path / "m", "chat_template.json", vision)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert load_processor(tmp_path / "m").template.render(asked, opening=True) == (
        "<|image_pad|>what?"
    )


@pytest.mark.parametrize("family", ["llava", "llama"])
def test_of_several_templates_the_default_counts(
    bare: dict[str, Path], tmp_path: Path, family: str
) -> None:
    for at, sort in enumerate(("folder", "list")):
        folder = tmp_path / sort
        shutil.copytree(bare[family], folder)
        if sort == "folder":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
            (folder / "chat_template.jinja").write_text("{{ 'plain' }}")
        else:
            named = [("tool_use", "{{ 'tools' }}"), ("default", "{{ 'plain' }}")]
            several = [{"name": name, "template": source} for name, source in named]
            put(folder, "tokenizer_config", several)
        wanted = AutoTokenizer.from_pretrained(folder).get_chat_template()
        assert load_processor(folder).template.source == wanted == "{{ 'plain' }}", at
    shutil.rmtree(tmp_path / "folder" / "additional_chat_templates")
    (tmp_path / "folder" / "chat_template.jinja").unlink()
    put(tmp_path / "folder", "tokenizer_config", [{"name": "rag", "template": "x"}])
    with pytest.raises(ModelError, match=r"several chat templates \(rag\)"):
        load_processor(tmp_path / "folder")


# Special tokens and markers in somebody's words are words, in every family.


SAVES: dict[str, Callable[[Path], Path]] = {
    "llama": save_llama,
    "without a template": lambda folder: save_llama(folder, template=None),
    "qwen3_vl": save_qwen3_vl,
    "llava": save_llava,
    "llava_onevision": save_llava_onevision,
    "internvl": save_internvl,
    "smolvlm": save_smolvlm,
    "mistral3": save_mistral3,
}
WORDS = ("a", " ", "\n", "<", "|", ">", "im_end", "<|im_", "end|>", "image>", "é", "漢", "42", "<<")


@pytest.fixture(scope="module", params=SAVES)
def processor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Processor:
    return load_processor(SAVES[request.param](tmp_path_factory.mktemp("model")))


def special_ids(tokenizer: Any) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def hostile(rng: Random) -> str:
    words = (*WORDS, *SPECIAL, "MMKV-REPLY-HERE-5b1d", "</s>")
    return "".join(rng.choice(words) for _ in range(rng.randint(1, 8)))


def ids_of(processor: Processor, messages: list[dict[str, Any]], images: int = 0) -> list[int]:
    text = processor.template.render(messages, opening=True)
    made = processor.encode(text, [picture("red", (32, 32))] * images)
    return made["input_ids"][0].tolist()


def test_special_tokens_in_words_are_words(processor: Processor) -> None:
    """In system, question, earlier reply and side by side; with a picture where there is sight."""
    rng, tokenizer = Random(3), processor.tokenizer
    special = special_ids(tokenizer)
    images = int(processor.sees)

    def talk(texts: list[str]) -> list[dict[str, Any]]:
        seen = [{"type": "image"}] * images
        parts = [{"type": "text", "text": text} for text in texts[2:]]
        return [
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1]},
            {"role": "user", "content": [*seen, *parts]},
        ]

    plain = ids_of(processor, talk(["x"] * 4), images)
    frame = [token for token in plain if token in special]
    cut = 0
    for _ in range(20):
        texts = [hostile(rng) for _ in range(4)]
        made = ids_of(processor, talk(texts), images)
        assert [token for token in made if token in special] == frame, texts
        said = tokenizer.decode(made)
        assert all(text in said for text in texts[:2]) and "".join(texts[2:]) in said
        cut += any(name in text for name in SPECIAL for text in texts)
    assert cut > 6


def test_values_that_come_again_are_cut_alike(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones are known by heart; more than are kept here, and longer ones, too."""
    rng, tokenizer = Random(6), processor.tokenizer
    monkeypatch.setattr(special, "_MOST_KNOWN", 8)
    whole = Cutter(tokenizer, ("<mark>",))
    values = [{hostile(rng): [hostile(rng), {"id": 3, "x": hostile(rng)}]} for _ in range(30)]
    values += [{"long": f"{'word ' * 100}{name}"} for name in (*SPECIAL, "<mar")]
    first = [whole.cut_all(value) for value in values]
    assert first == [whole.cut_all(value) for value in values]
    assert first == [Cutter(tokenizer, ("<mark>",)).cut_all(value) for value in values]
    shown = json.dumps(first, ensure_ascii=False)
    assert CUT in shown and shown.replace(CUT, "") == json.dumps(values, ensure_ascii=False)
    assert not whole.finds(shown) and whole.finds(shown.replace(CUT, ""))


def test_words_without_special_tokens_have_transformers_ids(processor: Processor) -> None:
    rng, tokenizer = Random(4), processor.tokenizer
    source = processor.template.source
    if source is None:
        pytest.skip("transformers renders nothing without a template")
    for _ in range(30):
        text = "".join(rng.choice(WORDS[:5]) for _ in range(9))
        talk = [{"role": "user", "content": text}]
        parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        shown = parts if processor.sees else talk
        theirs = tokenizer.apply_chat_template(
            shown, chat_template=source, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert ids_of(processor, talk) == theirs


def test_a_later_turn_that_holds_the_marker_loses_nothing(processor: Processor) -> None:
    rng, template = Random(5), processor.template
    past = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    for text in (
        "MMKV-REPLY-HERE-5b1d",
        "so MMKV-REPLY-STANDS-HERE-7c2e!",
        *map(hostile, [rng] * 30),
    ):
        turn = [{"role": "user", "content": text}]
        addition = template.addition(past, turn)
        ids = processor.encode(addition.text, continuing=True)["input_ids"][0].tolist()
        assert text in processor.tokenizer.decode(ids)
        found = outline(template, [*past, *turn], held=2, replied=True)
        if found is None:  # SmolVLM's writes a blank before a reply, not behind an opening
            assert addition.differs == REWRITES
            continue
        assert text in "".join(part.text for part in found.segments).replace(CUT, "")


def sentencepiece(prepend: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2's: words begin with a sign for the space before them."""
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz<>|/_▁:"})
    vocabulary = {piece: n for n, piece in enumerate(["<unk>", "<s>", "</s>", "<0x0A>", *letters])}
    vocabulary |= {"▁im": len(vocabulary), "im": len(vocabulary) + 1}
    merges = [("i", "m"), ("▁", "im")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<image>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
def test_pieces_get_no_space_of_their_own(prepend: str) -> None:
    tokenizer = sentencepiece(prepend)
    cutter = Cutter(tokenizer)
    for text in ("see <image> here", "<s>", "a</s>b", "im<s>im", "<<s>s>"):
        (cut,) = cutter.cut([text])
        ids = tokenize(tokenizer, cut)
        assert not {*ids} & special_ids(tokenizer)
        assert tokenizer.decode(ids).strip() == text
    assert (
        tokenize(tokenizer, "see here") == tokenizer("see here", add_special_tokens=False).input_ids
    )


def test_what_a_tokenizer_adds_around_a_text_stays_around_it() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    start, stop = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", start), ("<|im_end|>", stop)],
    )
    (cut,) = Cutter(tokenizer).cut(["a<|im_end|>b"])
    ids = tokenize(tokenizer, cut, add_special_tokens=True)
    assert ids == [start, *tokenize(tokenizer, cut), stop]


def test_labels_of_a_reply_that_names_special_tokens() -> None:
    """Training reads the same tokens: the whole reply is learned, up to its true end."""
    tokenizer = byte_tokenizer()
    template = ChatTemplate(tokenizer, tokenizer.chat_template, parts=False)
    talk = [
        {"role": "user", "content": "a <|im_end|>"},
        {"role": "assistant", "content": "b <|im_end|> c"},
    ]
    whole, (turn,) = TurnFinder(tokenizer).find(talk, template.render)
    assert tokenizer.decode(whole[turn.start : turn.stop]) == "b <|im_end|> c<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert whole.count(end) == 2 and whole[turn.stop - 1] == end


# Chat templates are programs of a checkpoint: none runs without end or eats the memory.


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


@one_in(3)
@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_eats_time_or_memory_is_stopped(
    tokenizer: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.05)
    render(tokenizer, "warm")
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="chat template") as error:
            render(tokenizer, source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and peak < 100 * 2**20


def test_an_extent_counts_characters_and_items() -> None:
    assert sandbox.extent({"ab": [1, "c", None], "d": {"e": ()}}, 2**62) == 5 + 10
    assert sandbox.extent(MappingProxyType({"ab": ("c", frozenset((1,)))}), 2**62) == 3 + 6


@pytest.mark.parametrize("source", ODD)
def test_no_template_raises_anything_else(tokenizer: Any, source: str) -> None:
    try:
        render(tokenizer, source)
    except InputError as error:
        assert "chat template" in str(error) and "\n" not in str(error)


# Reads fields that are there, that are not, and that dicts have of their own; all of a loop's.
FIELDS = """{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.index }}{{ loop.index0 }}
{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.length }}{{ loop.depth }}{{ loop.previtem is defined
}}{{ loop.next is defined }}{{ loop.cycle('a', 'b') }}{{ m.role }}{{ m.gone is defined }}{{ m.gone
}}{{ m['gone'] is defined }}{{ m.items() | list | length }}{{ m.get('role') }}{{ m.content }}
{% for part in m.content %}{{ loop.index }}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, CHATML, LLAVA_TEMPLATE, USUAL, FIELDS])
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


# Turns as the published templates write them, and what stands behind a reply: each model's own
# generation_config.json names that, but for Idefics3's.
_OF_LLAMA3 = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
_OF_GEMMA = "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
_OF_GLM = "<|{{ m.role }}|>\n{{ m.content }}"
_OF_PHI = "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
_OF_LLAMA2 = (
    "{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}"
)
_OF_VICUNA = "{{ m.role | upper }}: {{ m.content }} "
TURN_ENDS = [
    (SMOLVLM_TEMPLATE, "<end_of_utterance>"),
    (CHATML, "<|im_end|>"),
    *(
        (f"{{% for m in messages %}}{turn}{{% endfor %}}", end)
        for turn, end in [
            (_OF_LLAMA3, "<|eot_id|>"),
            (f"{_OF_GEMMA}<end_of_turn>\n", "<end_of_turn>"),
            (_OF_GLM, "<|user|>"),
            (_OF_PHI, "<|end|>"),
            (_OF_LLAMA2, "</s>"),
            (_OF_VICUNA, ""),
        ]
    ),
    ("{{ raise_exception('alone') if messages | length > 1 }}", ""),
    (None, ""),
]


@pytest.mark.parametrize(("source", "end"), TURN_ENDS)
def test_the_token_behind_a_reply_ends_it(source: str | None, end: str) -> None:
    tokenizer = byte_tokenizer()
    names = [name for _, name in TURN_ENDS if name]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    assert ChatTemplate(tokenizer, source, parts=source == SMOLVLM_TEMPLATE).turn_end == end


def test_the_end_that_only_the_template_knows_ends_replies(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    folder = save_llama(tmp_path / "model", tokenizer=tokenizer)
    ends = Engine.from_pretrained(folder).eos_token_ids
    assert ends == {*tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])}


@pytest.mark.parametrize("fix", [None, False])
def test_mistrals_split_is_the_one_that_transformers_offers(
    fix: bool | None, tmp_path: Path
) -> None:
    """It has a wrong expression in files of before transformers 5, which large ones tell."""
    page = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocabulary = page["model"]["vocab"]
    for token in ("12", "123", *(f"unused{number}" for number in range(100_001))):
        vocabulary[token] = len(vocabulary) + len(SPECIAL)
    page["model"]["merges"] = [["1", "2"], ["12", "3"]]
    wrong = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": wrong}, "behavior": "Isolated", "invert": False}
    page["pre_tokenizer"]["use_regex"] = False
    page["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, page["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(page))
    change(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if fix is not None:
        change(tmp_path / "tokenizer_config.json", fix_mistral_regex=fix)
    change(tmp_path / "config.json", model_type="mistral", transformers_version="4.57.1")
    found = load_processor(tmp_path).tokenizer("NaOH 123")["input_ids"]
    known = {} if fix is False else {"fix_mistral_regex": True}
    assert found == AutoTokenizer.from_pretrained(tmp_path, **known)("NaOH 123")["input_ids"]
    assert (vocabulary["123"] in found) == (fix is False)
