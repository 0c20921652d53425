"""Special tokens and markers in somebody's words are words, in every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmkv.prompt.loading import load_processor
from mmkv.prompt.processing import Processor
from mmkv.prompt.special import CUT, Cutter, tokenize
from mmkv.prompt.template import ChatTemplate
from mmkv.server.prompts import outline
from mmkv.training.data.labels import TurnFinder
from tests.support.chat_models import (
    SPECIAL,
    byte_tokenizer,
    picture,
    save_internvl,
    save_llama,
    save_llava,
    save_llava_onevision,
    save_qwen3_vl,
)

SAVES: dict[str, Callable[[Path], Path]] = {
    "llama": save_llama,
    "without a template": lambda folder: save_llama(folder, template=None),
    "qwen3_vl": save_qwen3_vl,
    "llava": save_llava,
    "llava_onevision": save_llava_onevision,
    "internvl": save_internvl,
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
    for _ in range(60):
        texts = [hostile(rng) for _ in range(4)]
        made = ids_of(processor, talk(texts), images)
        assert [token for token in made if token in special] == frame, texts
        said = tokenizer.decode(made)
        assert all(text in said for text in texts[:2]) and "".join(texts[2:]) in said
        cut += any(name in text for name in SPECIAL for text in texts)
    assert cut > 20


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
        assert found is not None
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
