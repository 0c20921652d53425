"""Tokens as bytes, and bytes as text: characters over several tokens, in both kinds of vocabulary.

The right values are UTF-8's own, and what the tokenizers library decodes all ids to.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmkv.reply import Detokenizer, StopStrings, token_bytes
from mmkv.server.writer import TokenLogprob, spell

SMILE = "🙂".encode()


def byte_level() -> Any:
    """Return a vocabulary of all bytes, of AC F0 as one token, and of a word."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    marks = bytes_to_unicode()
    names = [marks[byte] for byte in range(256)]
    names += [marks[0xAC] + marks[0xF0], marks[0x20] + "world", marks[0x82] + marks[0xF0]]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.add_tokens([AddedToken("<tool call>", special=False)])
    return made


def byte_fallback(decoder: Any) -> Any:
    """Return a vocabulary as SentencePiece makes it: words with marks, bytes for what is left."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581world", "\u2581", "hello", "s"]
    inner = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


LLAMA = [
    decoders.Replace("\u2581", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def fallback_ids(tokenizer: Any, *pieces: str | bytes) -> list[int]:
    names = []
    for piece in pieces:
        names += [piece] if isinstance(piece, str) else [f"<0x{byte:02X}>" for byte in piece]
    return tokenizer.convert_tokens_to_ids(names)


def shown(tokenizer: Any, ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_token_that_ends_one_character_and_begins_the_next_is_counted_in_bytes() -> None:
    ids = [0xE2, 0x82, 256, 0x9F, 0x99, 0x82]
    assert shown(byte_level(), ids) == ["", "", "€", "", "", "🙂", ""]
    # After bytes that are no character, too: E2 82 breaks off, F0 begins.
    ids = [0xE2, 258, 0x9F, 0x99, 0x82, ord("a")]
    assert shown(byte_level(), ids) == ["", "\ufffd", "", "", "🙂", "a", ""]


def test_any_bytes_are_the_text_that_the_tokenizer_decodes() -> None:
    tokenizer, rng = byte_level(), random.Random(0)
    special, added = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool call>"])
    pieces = [[*"é€🙂漢a ".encode()], [256], [257], [258], [special], [added], [0xFF], [0xF0, 0x9F]]
    for _ in range(300):
        ids = [rng.choice(rng.choice(pieces)) for _ in range(rng.randint(1, 30))]
        made = shown(tokenizer, [*ids, ord("z")])
        assert "".join(made) == tokenizer.decode([*ids, ord("z")], skip_special_tokens=True)
        # What is shown stays: no more than one open character is held back.
        so_far = "".join(shown(tokenizer, ids))
        assert tokenizer.decode(ids, skip_special_tokens=True) in (so_far, so_far + "\ufffd")


@pytest.mark.parametrize("steps", [LLAMA, [decoders.Metaspace(), decoders.ByteFallback()]])
def test_bytes_beside_words(steps: list[Any]) -> None:
    tokenizer = byte_fallback(decoders.Sequence(steps))
    ids = fallback_ids(tokenizer, "\u2581world", SMILE, "\u2581world", "€🙂".encode(), "s")
    pieces = ["world", "", "", "", "🙂", " world", "", "", "€", "", "", "", "🙂", "s", ""]
    assert shown(tokenizer, ids) == pieces and "".join(pieces) == tokenizer.decode(ids)
    # One invalid byte spoils no characters beside it.
    ids = fallback_ids(tokenizer, "hello", "€".encode(), b"\xff", SMILE[:2], "s")
    assert "".join(shown(tokenizer, ids)) == "hello€\ufffd\ufffds"


def test_a_stop_string_inside_a_token_of_two_characters() -> None:
    stream, stops = Detokenizer(byte_level()), StopStrings(["€"])
    pieces = [stops.push(stream.push(token)) for token in [ord("a"), 0xE2, 0x82, 256]]
    assert pieces == ["a", "", "", ""] and stops.hit


def test_log_probabilities_show_the_bytes_of_each_token() -> None:
    tokenizer = byte_level()
    end, added = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool call>"])
    rows = [TokenLogprob(token, -1.0) for token in [*SMILE, 257, 256, end, added]]
    made = spell(tokenizer, rows)
    wanted = [*([byte] for byte in SMILE), [*b" world"], [0xAC, 0xF0], [*b"<|end|>"]]
    assert [one.bytes for one in made] == [*wanted, [*b"<tool call>"]]
    assert made[4].text == " world" and made[0].text == "\ufffd"
    for steps in (LLAMA, [decoders.Metaspace()]):
        pieces = byte_fallback(decoders.Sequence(steps))
        known = token_bytes(pieces)
        assert known.of(fallback_ids(pieces, "\u2581world")[0]) == b" world"
        assert known.of(fallback_ids(pieces, "hello")[0]) == b"hello"
    pieces = byte_fallback(decoders.Sequence(LLAMA))
    assert [token_bytes(pieces).of(one) for one in fallback_ids(pieces, SMILE)] == [
        bytes([byte]) for byte in SMILE
    ]
