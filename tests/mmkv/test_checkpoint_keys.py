"""Keys that a checkpoint's files may hold beside the usual ones: read as transformers reads them.

What is drawn are legal additions and leftovers of config.json, generation_config.json and
tokenizer_config.json: keys that transformers' own classes know, of this model or of another family,
and forms of a setting that are older or stand beside the present one. Logits of a prompt's last
token are those of transformers' forward pass, within TOLERANCE of the greatest, tokens and ends of
a reply those of its tokenizer and generation config; or a refusal names the key. What transformers
cannot read as a config is refused in its words.

The drawn tests take MMKV_KEYS_EXAMPLES of each checkpoint; with --hypothesis-show-statistics they
say how many were equal, and which keys were refused.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime
from mmkv.generation_config import read_generation
from mmkv.prompt.loading import load_processor
from tests.support import chat_models
from tests.support.factories import CHECKPOINTS, checkpoint, make_turn
from tests.support.hf_models import with_positions_of_the_paper
from tests.support.model_configs import config_of
from tests.support.tiers import one_in

Raw = dict[str, Any]
# Where a key stands in config.json (a part of it, or ""), the key, and its value.
Change = tuple[str, str, Any]
TOLERANCE = 1e-4
EXAMPLES = int(os.environ.get("MMKV_KEYS_EXAMPLES", "60"))
GONE, FLAT = "<gone>", "<flat>"
# Their text models' fields may stand at the top, as in the first files on the hub.
_FLAT_TOO = ("qwen2_vl", "qwen2_5_vl")
PARTS = ("", "text_config", "vision_config")
# What is no addition and no leftover: it names the model, or how large it is.
_FIXED = {"model_type", "architectures", "text_config", "vision_config", "rope_parameters"}
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "depth", "embed_dim"),
    *("num_attention_heads", "num_heads", "moe_intermediate_size", "num_experts", "image_size"),
    *("num_local_experts", "out_hidden_size", "pad_token_id"),
}
_FEWER = {"0": {"num_key_value_heads": 1}}
# Values beside the defaults of transformers' classes and those of the checkpoints here.
_MORE: dict[str, list[Any]] = {
    "sliding_window": [8, 20, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "layer_types": [
        ["sliding_attention", "full_attention"],
        ["full_attention"] * 2,
        ["full_attention", "sliding_attention", "sliding_attention"],
        ["chunked_attention"] * 2,
    ],
    "sliding_window_pattern": [2],
    "attention_chunk_size": [8],
    "is_causal": [False, True],
    "use_bidirectional_attention": [True],
    "per_layer_config": [_FEWER],
    "head_dim": [16, 64],
    "num_key_value_heads": [None, 1, 2],
    "hidden_act": ["silu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu_pytorch_tanh"],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False],
    "attn_logit_softcapping": [30.0],
    "final_logit_softcapping": [30.0],
    "query_pre_attn_scalar": [16, 256],
    "rms_norm_eps": [1e-6, 1e-2],
    "norm_topk_prob": [True, False],
    "mlp_only_layers": [[0]],
    "decoder_sparse_step": [2],
    "num_experts": [4],
    "shared_expert_intermediate_size": [16],
    "full_attention_interval": [2],
    "attn_output_gate": [False],
    "torch_dtype": ["bfloat16", "float16"],
    "dtype": ["bfloat16"],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_theta": [500.0, 1e6],
    "rope_local_base_freq": [500.0],
    "original_max_position_embeddings": [16, 64],
    "embedding_multiplier": [2.0],
    "logits_scaling": [2.0],
    "quantization_config": [None],
    "eos_token_id": [None, 2, [2, 5]],
    "do_sample": [True, False],
    "temperature": [0.3],
    "top_k": [7],
    "repetition_penalty": [1.3],
}
_HOT = sorted(_MORE)
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_KEYS += ("original_max_position_embeddings", "rope_local_base_freq")


def _free(key: str) -> bool:
    names = ("linear_", "image_token", "video_token")
    return not (key in _FIXED | _SIZES or key.startswith(names))


def _optional(key: str) -> bool:
    """Whether a config may leave it to the class's default, which fits the weights here."""
    of_tokens = key.endswith(("_token_id", "_index", "_length")) and key != "eos_token_id"
    return _free(key) and not of_tokens and key != "id2label"


def part_of(raw: Raw, part: str) -> Raw:
    return raw[part] if part else raw


@functools.cache
def raw_of(name: str) -> Raw:
    return json.loads((checkpoint(name) / "config.json").read_text())


@functools.cache
def classes(name: str) -> dict[str, type]:
    """Return transformers' class of each part of a config."""
    whole = config_of(CHECKPOINTS[name])
    found = {part: getattr(whole, part) for part in PARTS if part and hasattr(whole, part)}
    return {"": type(whole)} | {part: type(each) for part, each in found.items()}


@functools.cache
def pool() -> dict[str, list[Any]]:
    """Return the keys that transformers' classes of all families know, with values."""
    made: dict[str, list[Any]] = {key: [*values] for key, values in _MORE.items()}

    def add(key: str, value: Any) -> None:
        large = isinstance(value, int) and abs(value) > 600
        if not _free(key) or (large and not key.startswith("max_")):
            return
        if isinstance(value, (str, int, float, list, type(None))):
            values = made.setdefault(key, [])
            if all(json.dumps(value) != json.dumps(other) for other in values):
                values.append(value)

    for name in CHECKPOINTS:
        for kind in classes(name).values():
            for field in dataclasses.fields(kind):
                value = field.default
                add(field.name, [*value] if isinstance(value, tuple) else value)
            for other in kind.attribute_map:
                add(other, 4)
        whole = config_of(CHECKPOINTS[name]).to_dict()
        for part in classes(name):
            for key, value in part_of(whole, part).items():
                add(key, value)
    for key, value in transformers.GenerationConfig._get_default_generation_params().items():
        if key != "max_length":
            add(key, value)
    return {key: values for key, values in made.items() if values}


def width_of(text: Raw) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


@st.composite
def ropes(draw: Any, width: int) -> Raw:
    """A rotary embedding, as configs of some version say it."""
    half = width // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    factors = {
        f"{kind}_factor": [first + 0.1 * i for i in range(half)]
        for kind, first in (("short", 1.0), ("long", 2.0))
    }
    kinds: dict[str, Raw] = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "longrope": {**factors, "original_max_position_embeddings": 64},
        "su": factors,
        "mrope": {"mrope_section": section},
    }
    extras = {
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": section,
        "mrope_interleaved": True,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "mscale": 0.7,
        "truncate": False,
        "llama_4_scaling_beta": 0.1,
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    named = draw(st.sets(st.sampled_from(["rope_type", "type"]), min_size=1))
    more = draw(st.sets(st.sampled_from(sorted(extras)), max_size=2))
    return kinds[kind] | dict.fromkeys(named, kind) | {key: extras[key] for key in more}


@st.composite
def changes(draw: Any, name: str) -> list[Change]:
    """One to four keys that are added, changed or left out."""
    raw, made = raw_of(name), []
    parts = [part for part in PARTS if not part or part in raw]
    text = "text_config" if "text_config" in raw else ""
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["hot", "hot", "any", "rope", "rope", "window", "gone"]))
        part = draw(st.sampled_from(parts if kind == "any" else [text, text, ""]))
        if kind == "gone":
            needed = {"head_dim"} if name == "ministral" else set()  # transformers fails without
            left = sorted({*filter(_optional, part_of(raw, part))} - needed)
            made += [(part, draw(st.sampled_from(left)), GONE)] if left else []
            continue
        keys = {"hot": _HOT, "rope": _ROPE_KEYS, "window": _WINDOW_KEYS}.get(kind)
        key = draw(st.sampled_from(keys or sorted(pool())))
        rope = ropes(width_of(part_of(raw, text)))
        nested = st.fixed_dictionaries({"full_attention": rope, "sliding_attention": rope})
        if key in ("rope_parameters", "rope_scaling"):
            made.append((part, key, draw(st.none() | rope | rope | nested)))
        else:
            # transformers' classes take null for the fields that they have.
            known = key in {field.name for field in dataclasses.fields(classes(name)[part])}
            values = [value for value in pool()[key] if known or value is not None]
            made += [(part, key, draw(st.sampled_from(values)))] if values else []
    if name in _FLAT_TOO and draw(st.booleans()):
        made.append(("", "text_config", FLAT))
    return made


@st.composite
def generation(draw: Any) -> Raw:
    """What generation_config.json says: keys that transformers' class has."""
    known = transformers.GenerationConfig()
    defaults = known._get_default_generation_params()
    more = {
        "eos_token_id": [2, [3, 7], None],
        "temperature": [0.6, 1.0],
        "top_k": [0, 20],
        "top_p": [0.9],
        "min_p": [0.1],
        "repetition_penalty": [1.2],
        "do_sample": [True, False],
        "max_new_tokens": [9],
        "forced_eos_token_id": [5],
        "stop_strings": [["x"]],
    }
    keys = draw(st.sets(st.sampled_from(sorted({*known.to_dict(), *more})), max_size=4))
    values = {key: more.get(key, [defaults.get(key)]) for key in sorted(keys)}
    return {key: draw(st.sampled_from(those)) for key, those in values.items()}


_home = tempfile.TemporaryDirectory(prefix="mmkv-keys-")


def written(name: str, made: list[Change], said: Raw | None) -> Path:
    """Return a folder of the checkpoint with these changes; its weights are the same file."""
    folder, raw = Path(_home.name) / name, copy.deepcopy(raw_of(name))
    folder.mkdir(exist_ok=True)
    for file in checkpoint(name).glob("*.safetensors"):
        if not (folder / file.name).exists():
            os.link(file, folder / file.name)
    for part, key, value in made:
        if value == GONE:
            part_of(raw, part).pop(key, None)
        elif value == FLAT:
            inside = raw.pop(key)
            raw = {k: v for k, v in inside.items() if k != "model_type"} | raw
        else:
            part_of(raw, part)[key] = value
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if said is not None:
        (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


@functools.cache
def turn_of(name: str, picture: bool) -> Raw:
    return make_turn(name, [17, ("image", 32, 32), 20] if picture else [40])


def sees(name: str) -> bool:
    return "vision_config" in classes(name)


@torch.no_grad()
def theirs(name: str, folder: Path, inputs: Raw) -> tuple[torch.Tensor, set[int], Any]:
    """Return transformers' logits, ends of a reply, and generation config."""
    kind = "ImageTextToText" if sees(name) else "CausalLM"
    model, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"random numbers for {report['missing_keys']}")
    found = with_positions_of_the_paper(model.eval())(**inputs, use_cache=False).logits[0, -1]
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, (list, tuple)) else [ends])} - {None}
    return found, ends, model.generation_config


def stated_ends(folder: Path) -> set[int]:
    """Return the ends that config.json itself names, of the first part that does."""
    raw = json.loads((folder / "config.json").read_text())
    for holder in (raw, raw.get("text_config") or {}):
        if (ends := holder.get("eos_token_id")) is not None:
            return {*(ends if isinstance(ends, list) else [ends])}
    return set()


def names_in(change: Change) -> Iterator[str]:
    """Yield by which names a refusal may speak of a change: a rope's is one of all its keys."""
    _, key, value = change
    yield key
    if key in _ROPE_KEYS:
        yield "rope"
    if "position" in key:
        yield "was trained for"
    for inner in filter(lambda one: "_" in one, value if isinstance(value, dict) else ()):
        yield from names_in(("", inner, value[inner]))


def check(name: str, made: list[Change], said: Raw | None = None, picture: bool = False) -> str:
    """Compare with transformers; return ``equal``, or the key that a refusal names."""
    folder, inputs = written(name, made, said), turn_of(name, picture and sees(name))
    wanted: Any = None
    try:
        wanted = theirs(name, folder, inputs)
    except Exception as error:  # a legal key may ask transformers for what it cannot do, either
        failure = error
    try:
        engine = Runtime.from_pretrained(folder, policy="full", device="cpu", dtype="float32")
        if wanted is None and sees(name):
            _ = engine.family.hf  # the tower is read, too
        with engine.session() as session:
            logits = session.prefill(inputs)
        generation = read_generation(str(folder), 512)
    except MmkvError as error:
        known = [each for change in made for each in names_in(change)] + [*(said or {})]
        assert "\n" not in str(error)
        found = [each for each in known if each in str(error)]
        if found:
            return found[0]
        with contextlib.suppress(Exception):
            transformers.AutoConfig.from_pretrained(folder)
            pytest.fail(f"no key is named: {error}")
        return "transformers' words"
    assert wanted is not None, f"read, and transformers says {failure!r}"
    error = float((logits - wanted[0]).abs().max() / wanted[0].abs().max())
    assert error <= TOLERANCE, f"relative error {error:.1e}"
    # Where the generation config names no end, what config.json says still ends a reply.
    assert {*engine.family.eos_token_ids} == (wanted[1] or stated_ends(folder))
    if wanted[2].do_sample:
        defaults = wanted[2]._get_default_generation_params()
        for key in ("temperature", "top_k", "top_p", "repetition_penalty"):
            value = getattr(wanted[2], key)
            assert getattr(generation.sampling, key) == (defaults[key] if value is None else value)
    return "equal"


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"rope_type": "llama3", "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_BESIDE = {"rope_type": "default", "rope_theta": 500000.0}
_KINDS = {kind: _BESIDE for kind in ("full_attention", "sliding_attention")}
_SHARED = "shared_expert_intermediate_size"
# Checkpoint, its changes, and the key that a refusal names; None: it is read.
FOUND: list[tuple[str, list[Change], str | None]] = [
    # Two forms of the rotary embedding at once.
    ("llama", [("", "rope_parameters", _BESIDE), ("", "rope_scaling", _LLAMA3)], None),
    ("llama", [("", "rope_parameters", _KINDS)], None),
    ("llama", [("", "partial_rotary_factor", 0.5)], "partial_rotary_factor"),
    ("qwen3", [("", "rope_parameters", _BESIDE), ("", "partial_rotary_factor", 0.5)], None),
    ("gemma3_text", [("", "partial_rotary_factor", 0.25), ("", "layer_types", GONE)], None),
    ("ministral3", [("", "original_max_position_embeddings", 64)], None),
    # Windows that the forward pass does not have, or has whatever else is said.
    ("llama", [("", "sliding_window", 8)], None),
    ("llama", [("", "layer_types", ["chunked_attention"] * 2)], None),
    ("qwen3_vl", [("text_config", "sliding_window", 8)], None),
    ("mistral", [("", "use_sliding_window", False)], None),
    ("mistral", [("", "layer_types", ["full_attention", "sliding_attention"])], None),
    ("phi3_sliding", [("", "layer_types", ["full_attention"] * 2)], None),
    ("qwen2", [("", "layer_types", ["full_attention", "sliding_attention"])], "layer_types"),
    # What the model's class does not read, or reads under another name.
    ("qwen2_5_vl", [("text_config", "head_dim", 64)], "head_dim"),
    ("llama", [("", "hidden_activation", "gelu_pytorch_tanh")], None),
    ("gemma3_text", [("", "hidden_act", "silu")], None),
    ("qwen3_5_text", [("", "hidden_act", "gelu_pytorch_tanh")], "hidden_act"),
    ("qwen3_moe", [("", "shared_expert_intermediate_size", 16)], None),
    # How replies are drawn, in files without a generation config.
    ("llama", [("", "do_sample", True), ("", "temperature", 0.3)], None),
    ("llava", [("text_config", "do_sample", True), ("text_config", "top_k", 7)], None),
    # What any model of transformers reads.
    ("llama", [("", "is_causal", False)], "is_causal"),
    ("mistral3", [("", "is_causal", False)], "is_causal"),
    ("llama_biased", [("", "per_layer_config", {"0": {"head_dim": 16}})], "per_layer_config"),
    # Settings of the text model at another part, which transformers cannot read there.
    ("llava_qwen2", [("", "per_layer_config", _FEWER)], "per_layer_config"),
    ("qwen2_vl", [("vision_config", "per_layer_config", _FEWER)], "per_layer_config"),
    ("llava_onevision", [("", "rope_parameters", _YARN)], "rope_parameters"),
    # Weights and config that do not fit each other.
    ("llama", [("", "num_hidden_layers", 4)], "num_hidden_layers"),
    ("qwen2", [("", "vocab_size", 100)], "vocab_size"),
    ("llama_biased", [("", "attention_bias", False)], "attention_bias"),
    ("mistral3", [("vision_config", "patch_size", 32)], "patch_size"),
    ("qwen3_vl", [("vision_config", "patch_size", [14, 14])], "patch_size"),
    ("qwen3_5_moe", [("text_config", _SHARED, 8)], _SHARED),
    ("llava_mistral", [("", "vision_feature_layer", GONE)], "vision_feature_layer"),
    ("ministral", [("", "head_dim", None)], "head_dim"),
]


@one_in(3)
@pytest.mark.parametrize(("name", "made", "key"), FOUND)
def test_leftovers_and_forms_that_were_read_otherwise(
    name: str, made: list[Change], key: str | None
) -> None:
    assert check(name, made) == (key or "equal")


def test_tiles_of_another_grid_are_refused() -> None:
    key = "image_grid_pinpoints"
    assert check("llava_next", [("", key, GONE)], picture=True) == key


def test_what_tokenizers_raises_is_refused() -> None:
    """Of no class but Exception: the one that it makes where no class is named has no <unk>."""
    said = {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": None}
    assert check_tokenizer("gemma3_text", said) == "tokenizer_config.json"


ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "qwen3_moe", "gemma3_text"])
@settings(ANY, max_examples=2, derandomize=True)
@given(st.data())
def test_drawn_keys_of_a_config(name: str, data: st.DataObject) -> None:
    check(name, data.draw(changes(name)), data.draw(st.none() | generation()))


@pytest.mark.drawn("sixty configs of each checkpoint")
@pytest.mark.parametrize("name", CHECKPOINTS)
@settings(ANY, max_examples=EXAMPLES)
@given(st.data())
def test_many_drawn_keys_of_a_config(name: str, data: st.DataObject) -> None:
    said = data.draw(st.none() | generation())
    event(check(name, data.draw(changes(name)), said, data.draw(st.booleans())))


_ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
_STARRED = "{% for m in messages %}*{{ m.content }}{% endfor %}"
_NAMED = [{"name": "default", "template": _STARRED}, {"name": "tool_use", "template": "tools"}]
# What tokenizer_config.json may say: fields of transformers' classes, old and new.
TOKENIZER: dict[str, list[Any]] = {
    "add_bos_token": [True, False],
    "add_eos_token": [True, False],
    "add_prefix_space": [True, False],
    "additional_special_tokens": [["<|im_end|>", "<extra>"], []],
    "added_tokens_decoder": [{"259": {"content": "<|im_end|>", "special": False} | _ADDED}],
    "bos_token": ["<|endoftext|>", None, {"content": "<s>", "special": True} | _ADDED],
    "chat_template": [_STARRED, _NAMED, chat_models.LLAVA_TEMPLATE],
    "clean_up_tokenization_spaces": [True, False],
    "do_lower_case": [True],
    "eos_token": ["<|endoftext|>", {"content": "<|im_end|>", "special": True} | _ADDED],
    "errors": ["replace"],
    "extra_special_tokens": [{"image_token": "<image>"}, ["<extra>"]],
    "fix_mistral_regex": [True, False],
    "legacy": [True, False],
    "max_length": [8],
    "model_max_length": [8, 10**30],
    "model_input_names": [["input_ids", "attention_mask"]],
    "pad_token": ["<|endoftext|>", None],
    "padding_side": ["left", "right"],
    "processor_class": ["LlavaProcessor"],
    "sp_model_kwargs": [{}],
    "spaces_between_special_tokens": [True, False],
    "split_special_tokens": [True, False],
    "tokenizer_class": ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", None],
    "truncation_side": ["left"],
    "unk_token": ["<|endoftext|>", None],
    "use_default_system_prompt": [True],
    "use_fast": [False],
}
TALK = [{"role": "user", "content": "Hi there.  ok"}, {"role": "assistant", "content": "a"}]
TALK += [{"role": "user", "content": " é 12"}]


@functools.cache
def with_tokenizer(name: str) -> Path:
    """Return the folder of a checkpoint with a tokenizer of single bytes, without weights."""
    folder = Path(_home.name) / f"{name}-tokenizer"
    folder.mkdir()
    chat_models.byte_tokenizer().save_pretrained(folder)
    shutil.copy(checkpoint(name) / "config.json", folder)
    return folder


def check_tokenizer(name: str, said: Raw) -> str:
    """Compare the ids of a conversation with transformers'; return as :func:`check`."""
    folder = with_tokenizer(name)
    file = folder / "tokenizer_config.json"
    usual = file.read_text()
    try:
        file.write_text(json.dumps(json.loads(usual) | said))
        if "chat_template" in said:
            (folder / "chat_template.jinja").rename(folder / "aside")
        wanted: Any = None
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
            wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:
            failure = error
        try:
            processor = load_processor(folder)
            shown = processor.template.render(copy.deepcopy(TALK), opening=True)
            found = processor.encode(shown)["input_ids"][0].tolist()
        except MmkvError as error:
            assert "\n" not in str(error)
            return next(key for key in [*said, "tokenizer_config.json"] if key in str(error))
        assert wanted is not None, f"read, and transformers says {failure!r}"
        assert found == wanted
        return "equal"
    finally:
        file.write_text(usual)
        if (folder / "aside").exists():
            (folder / "aside").rename(folder / "chat_template.jinja")


TEXT = [name for name in CHECKPOINTS if not sees(name)]


@st.composite
def tokenizers(draw: Any) -> Raw:
    keys = draw(st.sets(st.sampled_from(sorted(TOKENIZER)), min_size=1, max_size=4))
    return {key: draw(st.sampled_from(TOKENIZER[key])) for key in sorted(keys)}


@settings(ANY, max_examples=12, derandomize=True)
@given(tokenizers())
def test_drawn_keys_of_a_tokenizer(said: Raw) -> None:
    check_tokenizer("llama", said)


@pytest.mark.drawn("sixty settings of each text model's tokenizer")
@pytest.mark.parametrize("name", TEXT)
@settings(ANY, max_examples=EXAMPLES)
@given(tokenizers())
def test_many_drawn_keys_of_a_tokenizer(name: str, said: Raw) -> None:
    event(check_tokenizer(name, said))
