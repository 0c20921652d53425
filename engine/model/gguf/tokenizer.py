"""Make the tokenizer of a GGUF file one of the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mmkv.engine.errors import ModelError
from mmkv.engine.model.gguf.file import GgufFile

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # kinds of tokens
_SPACE = "\u2581"  # what SentencePiece writes for a space
# How texts are split before merges.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same by llama.cpp's names (tokenizer.ggml.pre): expressions, one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "mellum"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("falcon-h1", "midm-2.0", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")  # by Qwen's own tokenizers, first of all
# Whose texts have a first token, unless the file says otherwise.
_BEGUN: tuple[str, ...] = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
_BEGUN += ("falcon-h1", "midm-2.0", "lfm2")
# Texts that are one token are taken whole, whatever the merges would make of them.
_WHOLE_WORDS = (*_BEGUN, "glm4", "glm5")
# Ids of special tokens where a file of SentencePiece names none.
_PIECES = {"bos": 1, "eos": 2, "unknown": 0}


def special(file: GgufFile, name: str) -> int | None:
    """Return the id of a special token such as ``eos``; None where the file names none."""
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not (type(found) is int and 0 <= found < len(tokens(file))):
        found = _PIECES.get(name) if file.metadata.get("tokenizer.ggml.model") == "llama" else None
    return found if found is not None and found < len(tokens(file)) else None


def tokens(file: GgufFile) -> list[str]:
    """Return all tokens by their ids."""
    found = file.metadata.get("tokenizer.ggml.tokens")
    return found if isinstance(found, list) else []


def tokenizer_json(file: GgufFile, more: Sequence[str] = ()) -> str | None:
    """Return what a ``tokenizer.json`` holds; None where the file has no tokenizer.

    Args:
        more: special tokens behind the file's own.

    Raises:
        ModelError: one of a kind that mmkv does not know.
    """
    kind = file.metadata.get("tokenizer.ggml.model", "no_vocab")
    if isinstance(whole := file.metadata.get("tokenizer.huggingface.json"), str):
        return whole
    if kind == "no_vocab":
        return None
    made = {"gpt2": _byte_level, "llama": _sentence_piece}.get(str(kind))
    if made is None:
        raise _unknown(file, f"a tokenizer of kind {ascii(kind)[:40]}", "gpt2 and llama")
    page = made(file)
    page["added_tokens"] = _added(file) + [
        _token(number, token, True) for number, token in enumerate(more, len(tokens(file)))
    ]
    page["post_processor"] = _ends(file, kind == "llama")
    return json.dumps(page | {"version": "1.0", "truncation": None, "padding": None})


def _byte_level(file: GgufFile) -> dict[str, Any]:
    """Return pairs of bytes that merge, as GPT-2 has them."""
    before = file.metadata.get("tokenizer.ggml.pre") or "default"
    if before not in _SPLITS:
        raise _unknown(file, f"the pre-tokenizer {ascii(before)[:40]}", ", ".join(_SPLITS))
    vocabulary = {token: number for number, token in enumerate(tokens(file))}
    pairs = []
    for merge in file.metadata.get("tokenizer.ggml.merges", ()):
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if {left, right, left + right} <= vocabulary.keys():
            pairs.append([left, right])
    bytes_: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [
        _step("Split", pattern={"Regex": split}, behavior="Isolated", invert=False)
        for split in _SPLITS[before]
    ]
    return {
        "normalizer": _step("NFC") if before in _COMPOSED else None,
        "pre_tokenizer": _step("Sequence", pretokenizers=[*steps, bytes_ | {"use_regex": False}]),
        "decoder": bytes_ | {"use_regex": True},
        "model": _merging(vocabulary, pairs) | {"ignore_merges": before in _WHOLE_WORDS},
    }


def _sentence_piece(file: GgufFile) -> dict[str, Any]:
    """Return pieces that merge in the order of their scores, as SentencePiece has them."""
    named = tokens(file)
    scores, kinds = file.metadata.get("tokenizer.ggml.scores"), _kinds(file)
    if not isinstance(scores, list) or len(scores) != len(named):
        raise ModelError(f"{file.path} has no scores of its tokens; get the original file")
    vocabulary = {token: number for number, token in enumerate(named)}
    pairs = []
    for token, score, kind in zip(named, scores, kinds, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-score, vocabulary[left], vocabulary[right], [left, right]))
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    begin = [_step("Prepend", prepend=_SPACE)] if prefix else []
    end = [_step("Strip", content=" ", start=1, stop=0)] if prefix else []
    spaces = _step("Replace", pattern={"String": " "}, content=_SPACE)
    back = _step("Replace", pattern={"String": _SPACE}, content=" ")
    unknown = special(file, "unknown")
    named_unknown = next((t for t, k in zip(named, kinds, strict=True) if k == _UNKNOWN), None)
    model = _merging(vocabulary, [pair for *_, pair in sorted(pairs)])
    return {
        "normalizer": _step("Sequence", normalizers=[*begin, spaces]),
        "pre_tokenizer": None,
        "decoder": _step("Sequence", decoders=[back, _step("ByteFallback"), _step("Fuse"), *end]),
        "model": model
        | {
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": named_unknown if unknown is None else named[unknown],
        },
    }


def _merging(vocabulary: dict[str, int], pairs: list[list[str]]) -> dict[str, Any]:
    return _step(
        "BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=False,
        vocab=vocabulary,
        merges=pairs,
    )


def _added(file: GgufFile) -> list[dict[str, Any]]:
    """Return the tokens that are found in texts before anything is merged."""
    return [
        _token(number, token, kind != _USER)
        for number, (token, kind) in enumerate(zip(tokens(file), _kinds(file), strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER) and token
    ]


def _token(number: int, content: str, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special} | plain


def _kinds(file: GgufFile) -> list[int]:
    found, named = file.metadata.get("tokenizer.ggml.token_type"), tokens(file)
    if found is None:
        return [1] * len(named)
    if not isinstance(found, list) or len(found) != len(named):
        raise ModelError(f"{file.path} has not one kind for each token; get the original file")
    return found


def _ends(file: GgufFile, pieces: bool) -> dict[str, Any] | None:
    """Return what puts tokens around a text that is no chat."""
    whole: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    used = {}
    begun = pieces or file.metadata.get("tokenizer.ggml.pre") in _BEGUN
    for name, default, where in (("bos", begun, 0), ("eos", False, 2)):
        wanted = file.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        if not wanted or (number := special(file, name)) is None:
            continue
        token = tokens(file)[number]
        used[token] = {"id": token, "ids": [number], "tokens": [token]}
        whole.insert(where, {"SpecialToken": {"id": token, "type_id": 0}})
    pair = [*whole, {"Sequence": {"id": "B", "type_id": 0}}]
    return _step("TemplateProcessing", single=whole, pair=pair, special_tokens=used)


def _step(kind: str, **settings: Any) -> dict[str, Any]:
    return {"type": kind, **settings}


def _unknown(file: GgufFile, what: str, known: str) -> ModelError:
    return ModelError(
        f"{file.path} has {what}, and mmkv knows {known}; name the transformers checkpoint that it "
        "was made of"
    )
