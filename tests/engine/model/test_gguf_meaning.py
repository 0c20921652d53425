"""Metadata of GGUF files mean what llama.cpp makes of them: additions, leftovers and omissions.

The reference is transformers' model of the same weights. What the metadata say to it is written
here by llama.cpp's rules (its ``llama-model.cpp``, ``llama-context.cpp`` and ``models/``), rope by
its formulas. ``MMKV_LLAMA_CPP`` may name an interpreter that has ``xllamacpp``: the drawn files are
then given to llama.cpp, too.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.families.loading import load
from mmkv.engine.model.gguf.config import generation
from mmkv.engine.model.gguf.file import GgufFile
from mmkv.engine.model.gguf.tokenizer import tokenizer_json
from mmkv.engine.runtime import Runtime
from tests.support.factories import CHECKPOINTS, make_model
from tests.support.gguf_files import Written, finish, set_metadata
from tests.support.model_configs import LINEAR, Checkpoint

TOKENS = 40
_LINEAR = LINEAR | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_MIXED = CHECKPOINTS["qwen3_moe"].text | {"intermediate_size": 3 * 48}
_GEMMA = CHECKPOINTS["gemma3_text"].text | {"query_pre_attn_scalar": 32, "rope_parameters": None}
# Of each architecture a small model, all of whose rope is set below.
MODELS = {
    "llama": Checkpoint("llama", 4, 2, 32),
    "mistral3": Checkpoint("llama", 2, 2, 32),
    "qwen2": Checkpoint("qwen2", 4, 2, 32),
    "qwen2vl": Checkpoint("qwen2", 2, 2, 32),
    "qwen3": Checkpoint("qwen3", 4, 2, 32, text={"hidden_size": 64}),
    "qwen3vl": Checkpoint("qwen3", 2, 2, 32),
    "qwen3moe": Checkpoint("qwen3_moe", 4, 2, 32, text=_MIXED),
    "qwen3vlmoe": Checkpoint("qwen3_moe", 2, 2, 32, text=_MIXED),
    "gemma3": Checkpoint("gemma3_text", 4, 2, 32, layers=3, tied=True, text=_GEMMA),
    "phi3": Checkpoint("phi3", 4, 2, 32),
    "glm4": replace(CHECKPOINTS["glm4"], text=CHECKPOINTS["glm4"].text | {"attention_bias": False}),
    "qwen35": Checkpoint("qwen3_5_text", 4, 1, 32, layers=4, text=_LINEAR),
    "qwen35moe": Checkpoint(
        "qwen3_5_moe_text",
        4,
        2,
        32,
        layers=4,
        text=_LINEAR | _MIXED | {"shared_expert_intermediate_size": 40},
    ),
}
PARTIAL = {"phi3": 32, "glm4": 16, "qwen35": 8, "qwen35moe": 8}  # numbers that are rotated


@dataclass
class Said:
    """What a file says, and what llama.cpp makes of it.

    Attributes:
        metadata: changes of it, without the architecture's name before keys that begin with a dot.
        more: tensors. config: changes of transformers' config. zeros: biases of zeros.
        freqs, near: angles a position, of gemma3's windowed layers ``near``. scale: of cos and sin.
        refused: a word of the refusal; None: it is read.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    more: dict[str, np.ndarray | None] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    freqs: np.ndarray = field(default_factory=lambda: np.ones(0))
    near: np.ndarray = field(default_factory=lambda: np.ones(0))
    scale: float = 1.0
    refused: str | None = None


Draw = Callable[[st.SearchStrategy[Any]], Any]

# Without effect in llama.cpp, for all architectures or all but those named.
UNREAD: list[tuple[str, Any, tuple[str, ...]]] = [
    ("general.name", "phi-2 or so", ()),
    ("general.author", "somebody", ()),
    ("general.file_type", 7, ()),
    ("general.quantization_version", 2, ()),
    (".attention.scale", 0.5, ()),
    (".attention.clamp_kqv", 0.5, ()),
    (".attention.max_alibi_bias", 8.0, ()),
    (".attention.output_scale", 0.5, ()),
    (".attention.temperature_length", 8, ()),
    (".attention.layer_norm_epsilon", 0.1, ()),
    (".attention.causal", True, ()),
    (".attention.sliding_window", 4, ("gemma3",)),
    (".attention.sliding_window_pattern", 2, ("gemma3",)),
    (".attention.temperature_scale", 0.5, ("mistral3",)),
    (".attention.key_length_mla", 5, ()),
    (".attn_logit_softcapping", 2.0, ()),
    (".router_logit_softcapping", 2.0, ()),
    (".final_logit_softcapping", 2.0, ("gemma3",)),
    (".final_logit_softcapping", 0.0, ()),
    (".logit_scale", 0.25, ()),
    (".residual_scale", 0.25, ()),
    (".embedding_scale", 0.25, ()),
    (".vocab_size", 7, ()),
    (".expert_weights_scale", 2.5, ()),
    (".expert_weights_norm", False, ()),
    (".expert_gating_func", 2, ()),
    (".expert_shared_count", 1, ()),
    (".leading_dense_block_count", 1, ()),
    (".nextn_predict_layers", 0, ()),
    (".use_parallel_residual", True, ()),
    (".rope.scaling.finetuned", True, ()),
    (".rope.scaling.alpha", 1000.0, ()),
    (".rope.freq_base_swa", 77.0, ("gemma3",)),
    (".rope.dimension_count_swa", 6, ("gemma3",)),
]
# What mmkv does not do, or no file may say.
REFUSED: list[tuple[str, Any, tuple[str, ...], str]] = [
    (".attention.causal", False, (), "attention.causal is False"),
    (".attention.layer_norm_rms_epsilon", None, (), "layer_norm_rms_epsilon is missing"),
    (".attention.head_count", [4, 2], (), "head_count is [4, 2]"),
    (".attention.value_length", 16, (), "value_length is 16"),
    (".block_count", 2**31 - 1, (), "block_count is 2147483647 for"),
    (".block_count", 3_000_000, (), "block_count is 3000000 for"),
    (".context_length", None, (), "context_length is missing"),
    (".expert_group_count", 2, (), "expert_group_count is 2"),
    (".rope.scaling.type", "su", (), "rope scaling 'su'"),
    (".final_logit_softcapping", 2.0, ("gemma3",), "final_logit_softcapping is 2.0"),
]


def draw_rope(draw: Draw, name: str, said: Said, width: int) -> None:
    """Draw frequencies and their scaling, and compute them as ggml's rope does."""
    rotated = PARTIAL.get(name, width)
    keys = ("type", "factor", "attn_factor", "original_context_length", "yarn_beta_fast")
    keys += ("yarn_beta_slow", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor")
    values: dict[str, list[Any]] = {
        "type": [None, None, "none", "linear", "yarn"],
        "factor": [None, 0.0, 1.0, 2.5, 4.0],
        "attn_factor": [None, None, 1.0, 0.75],
        "original_context_length": [None, 16, 64],
        "yarn_beta_fast": [None, 8.0],
        "yarn_beta_slow": [None, 2.0],
        "yarn_log_multiplier": [None, 0.5],
        "yarn_ext_factor": [None, 0.5],
        "yarn_attn_factor": [None, 3.0],
    }
    scaling = {key: draw(st.sampled_from(values[key])) for key in keys}
    older, base = draw(st.sampled_from([None, 3.0])), draw(st.sampled_from([None, 500.0, 1e6]))
    said.metadata |= {f".rope.scaling.{key}": value for key, value in scaling.items()}
    said.metadata |= {".rope.scale_linear": older, ".rope.freq_base": base}
    kind, theta = scaling["type"] or "linear", base or 10000.0
    factor = scaling["factor"] if scaling["factor"] is not None else older
    factor = 1.0 if kind == "none" else factor or 1.0
    said.scale = 1.0 if scaling["attn_factor"] is None else scaling["attn_factor"]
    index = np.arange(rotated // 2)
    freqs = theta ** (-2.0 * index / rotated)
    if kind == "yarn":
        fast, slow, mul = 32.0, 1.0, 0.0
        if name == "mistral3":
            fast, slow = scaling["yarn_beta_fast"] or fast, scaling["yarn_beta_slow"] or slow
            mul = scaling["yarn_log_multiplier"] or mul
        context = scaling["original_context_length"] or 512
        ends = [
            rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (fast, slow)
        ]
        low, high = max(0, math.floor(ends[0])), min(rotated - 1, math.ceil(ends[1]))
        ramp = 1 - np.clip((index - low) / max(0.001, high - low), 0, 1)
        freqs = freqs / factor * (1 - ramp) + freqs * ramp
        if factor > 1:
            grown = 0.1 * math.log(factor)
            said.scale *= (1 + grown) / (1 + mul * grown if mul else 1)
    else:
        freqs = freqs / factor
    if name in ("llama", "mistral3") and kind != "yarn" and draw(st.booleans()):
        slower = np.linspace(1, 4, rotated // 2, dtype=np.float32)
        said.more["rope_freqs.weight"], freqs = slower, freqs / slower
    if name == "phi3" and draw(st.booleans()) and kind != "yarn":
        # The context of llama.cpp here is no longer than the original one, or it is.
        short, long = np.linspace([1, 2], [3, 5], rotated // 2, dtype=np.float32).T
        said.more |= {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
        said.metadata[".rope.scaling.original_context_length"] = 256
        freqs = freqs / short
    said.freqs = freqs
    near = draw(st.sampled_from([None, 100.0]))
    if name == "gemma3":
        said.metadata[".rope.freq_base_swa"] = near
    said.near = (near or 10000.0) ** (-2.0 * index / rotated)


WINDOWS = [None, 0, 1, 2, 3, [True, False, True], [False, True], [1, 1, 0]]


def say_windows(said: Said, layers: int, window: int | None, pattern: Any) -> None:
    """Say which layers of gemma3 have a window."""
    said.metadata |= {
        ".attention.sliding_window": window,
        ".attention.sliding_window_pattern": pattern,
    }
    every = 6 if pattern is None else pattern
    if isinstance(every, list):
        local = [index < len(every) and bool(every[index]) for index in range(layers)]
    else:
        local = [not every or index % every < every - 1 for index in range(layers)]
    kinds = ["sliding_attention" if window and one else "full_attention" for one in local]
    said.config |= {"sliding_window": window or 512, "layer_types": kinds}


def draw_sizes(draw: Draw, spec: Checkpoint, name: str, said: Said) -> None:
    """Leave out what has its default, and say once or for each layer what is alike."""
    inner = spec.text.get("intermediate_size", 2 * spec.heads * spec.head_dim)
    alike = {".attention.head_count": spec.heads, ".attention.head_count_kv": spec.kv_heads}
    alike |= {".feed_forward_length": inner}
    for key, value in alike.items():
        if draw(st.booleans()):
            said.metadata[key] = [value] * said.metadata.get(".block_count", spec.layers)
    hidden = spec.text.get("hidden_size", spec.heads * spec.head_dim)
    left = {".attention.head_count_kv": spec.heads == spec.kv_heads}
    own = hidden == spec.heads * spec.head_dim
    left |= {".attention.key_length": own, ".attention.value_length": own}
    whole = PARTIAL.get(name, spec.head_dim) == spec.head_dim
    left |= {".rope.dimension_count": whole and own, ".vocab_size": True}
    # Of a mixture: as wide as the dense one divided by the chosen ones.
    left[".expert_feed_forward_length"] = "moe" in name
    for key, may in left.items():
        if may and draw(st.booleans()):
            said.metadata[key] = None


def predict_further(said: Said, layers: int) -> None:
    said.metadata |= {".block_count": layers + 1, ".nextn_predict_layers": 1}
    for part in ("attn_norm", "nextn.enorm", "nextn.hnorm"):
        said.more[f"blk.{layers}.{part}.weight"] = np.ones(128, np.float32)


def draw_tensors(draw: Draw, name: str, said: Said, stored: dict[str, Tensor]) -> None:
    """Draw a head that is the embedding, biases of queries alone, q, k and v as one matrix, and
    layers that predict further tokens, which do not run.
    """
    spec, layer = MODELS[name], "model.layers.0.self_attn."
    if draw(st.booleans()):
        said.more["output.weight"] = None
    biased = name in ("llama", "qwen3", "gemma3", "glm4", "qwen3moe") and draw(st.booleans())
    if biased:
        rows = stored[f"{layer}q_proj.weight"].shape[0]
        said.more["blk.0.attn_q.bias"] = np.linspace(-1, 1, rows, dtype=np.float32)
        said.config["attention_bias"] = True
    if name in ("qwen2", "qwen3", "gemma3") and not biased and draw(st.booleans()):
        for ending in ("weight", "bias")[: 1 + (name == "qwen2")]:
            three = [stored[f"{layer}{part}_proj.{ending}"].numpy() for part in "qkv"]
            said.more |= {f"blk.0.attn_{part}.{ending}": None for part in "qkv"}
            said.more[f"blk.0.attn_qkv.{ending}"] = np.concatenate(three)
    if name == "qwen3vlmoe" and draw(st.booleans()):
        said.more["blk.0.attn_k.bias"] = np.zeros(spec.kv_heads * spec.head_dim, np.float32)
    if name in ("glm4", "qwen35", "qwen35moe") and draw(st.booleans()):
        predict_further(said, spec.layers)
    if name.startswith("qwen35") and draw(st.booleans()):
        linear = [kind == "linear_attention" for kind in LINEAR["layer_types"]]
        linear += [False] * (".block_count" in said.metadata)
        said.metadata |= {".full_attention_interval": 9, ".attention.recurrent_layers": linear}


@functools.cache
def source(name: str) -> Path:
    """Return the checkpoint of an architecture."""
    folder = Path(_home.name) / name
    make_model(MODELS[name]).save_pretrained(folder)
    return folder


_home = tempfile.TemporaryDirectory(prefix="mmkv-meaning-")


def drawn(draw: Draw, name: str) -> Said:
    """Draw what a file says."""
    spec, said = MODELS[name], Said()
    draw_tensors(draw, name, said, load_file(source(name) / "model.safetensors"))
    draw_sizes(draw, spec, name, said)
    draw_rope(draw, name, said, spec.head_dim)
    if name == "gemma3":
        window = draw(st.sampled_from([None, 0, 7, 100]))
        say_windows(said, spec.layers, window, draw(st.sampled_from(WINDOWS)))
    free = [(key, value) for key, value, but in UNREAD if name not in but]
    for key, value in draw(st.lists(st.sampled_from(free), max_size=5)):
        said.metadata.setdefault(key, value)
    wrong = [(key, value, word) for key, value, of, word in REFUSED if name in (of or MODELS)]
    if draw(st.sampled_from([*range(12)])) == 11:
        key, value, word = draw(st.sampled_from(wrong))
        said.metadata[key], said.refused = value, word
    return said


@torch.inference_mode()
def reference(name: str, said: Said, truth: Path, ids: Tensor) -> Tensor:
    """Return the logits behind ``ids`` of transformers' model."""
    config = json.loads((truth / "config.json").read_text()) | said.config
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        truth, config=kind(**config), dtype=torch.float32
    ).eval()
    if "output.weight" in said.more:
        model.lm_head.weight = model.model.embed_tokens.weight
    if (bias := said.more.get("blk.0.attn_q.bias")) is not None:
        for part, parameter in model.named_parameters():
            if part.endswith("proj.bias"):
                parameter.zero_()
        order = np.arange(len(bias))
        if name == "llama":  # neighbours turn together there
            width = MODELS[name].head_dim
            order = order.reshape(-1, width // 2, 2).swapaxes(1, 2).reshape(-1)
        model.model.layers[0].self_attn.q_proj.bias.copy_(torch.from_numpy(bias[order]))
    rotary = model.model.rotary_emb
    for part, freqs in (("", said.freqs), ("full_attention_", said.freqs)):
        if hasattr(rotary, f"{part}inv_freq"):
            setattr(rotary, f"{part}inv_freq", torch.tensor(freqs, dtype=torch.float32))
            setattr(rotary, f"{part}attention_scaling", said.scale)
    if hasattr(rotary, "sliding_attention_inv_freq"):
        near = (said.metadata[".rope.scaling.attn_factor"] or 1.0, said.near)
        rotary.sliding_attention_inv_freq = torch.tensor(near[1], dtype=torch.float32)
        rotary.sliding_attention_attention_scaling = near[0]
    logits: Tensor = model(ids[None]).logits[0, -1]
    return logits


class Peer:
    """llama.cpp in a process of its own, which some files abort."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, file: Path, ids: list[int]) -> dict[str, Any]:
        """Return ``logs`` or ``refused``."""
        if self._process is None or self._process.poll() is not None:
            script = Path(__file__).parents[2] / "support" / "llama_cpp.py"
            self._process = subprocess.Popen(
                [os.environ["MMKV_LLAMA_CPP"], script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        asked = {"model": str(file), "tokens": ids, "vocabulary": 160}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            return {"refused": "aborted"}
        found: dict[str, Any] = json.loads(line)
        return found


_peer, counts = Peer(), Counter[str]()


def check(name: str, said: Said) -> None:
    """Write a file, read it, and compare, or find the refusal."""
    torch.manual_seed(1)
    ids = torch.randint(3, 148, (TOKENS,))
    with tempfile.TemporaryDirectory() as folder:
        metadata = {
            f"{{arch}}{key}" if key[0] == "." else key: value
            for key, value in said.metadata.items()
        }
        files = Written(
            source(name),
            Path(folder) / "files",
            Kind.F32,
            architecture=name,
            metadata=metadata,
            more=said.more,
        )
        if said.refused is not None:
            with pytest.raises(ModelError) as error:
                Runtime.from_pretrained(files.text, policy="full", device="cpu", dtype="float32")
            assert said.refused in str(error.value)
            counts["refused"] += 1
            return
        runtime = Runtime.from_pretrained(files.text, policy="full", device="cpu", dtype="float32")
        with runtime.session() as session:
            ours = session.prefill({"input_ids": ids[None]})
        wanted = reference(name, said, files.truth, ids)
        assert (ours - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        counts["equal"] += 1
        if "MMKV_LLAMA_CPP" in os.environ:
            answer = _peer.ask(files.text, ids.tolist())
            if "refused" in answer:
                counts[f"not loaded by llama.cpp: {answer['refused'][:60]}"] += 1
                return
            theirs = torch.tensor(answer["logs"])
            # Its GELU is looked up in a table of float16.
            near = 0.03 if name == "gemma3" else 0.003
            assert (ours.log_softmax(-1) - theirs).abs().max() <= near
            counts["equal to llama.cpp"] += 1


def run(names: list[str], examples: int) -> None:
    """Check so many drawn files of some architectures."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names))
        said = drawn(data.draw, name)
        note(repr(said))
        check(name, said)

    one()


def test_metadata_mean_what_llama_cpp_makes_of_them() -> None:
    run([*MODELS], 14)


@pytest.mark.parametrize("key", [".rope.scaling.factor", ".rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(key: str) -> None:
    freqs = 10000.0 ** (-2.0 * np.arange(16) / 32) / 4
    check("llama", Said({".rope.scaling.type": None, key: 4.0}, freqs=freqs))


@pytest.mark.parametrize("pattern", WINDOWS[3:], ids=str)
def test_a_list_of_windows_or_their_period(pattern: Any) -> None:
    freqs = 10000.0 ** (-2.0 * np.arange(16) / 32)
    plain = {".rope.freq_base": 10000.0, ".rope.scaling.attn_factor": None}
    said = Said(plain, freqs=freqs, near=freqs)
    say_windows(said, MODELS["gemma3"].layers, 7, pattern)
    check("gemma3", said)


@pytest.mark.parametrize("name", ["glm4", "qwen35"])
def test_layers_that_predict_further_tokens_are_left_out(name: str) -> None:
    turned = PARTIAL[name]
    said = Said(freqs=10000.0 ** (-2.0 * np.arange(turned // 2) / turned))
    predict_further(said, MODELS[name].layers)
    check(name, said)


def test_a_key_that_llama_cpp_does_not_read_is_named(tmp_path: Path) -> None:
    said = {"{arch}.attention.sliding_window": 4, "{arch}.logit_scale": 2.0}
    files = Written(source("llama"), tmp_path / "files", Kind.F32, metadata=said)
    note = load(files.text, "float32", "cpu")[2].note
    assert note is not None and "says attention.sliding_window, logit_scale, which" in note


@pytest.mark.parametrize(
    ("said", "ends", "first"),
    [
        ({}, [2], [1]),
        ({"eos_token_id": 4, "eot_token_id": 5, "fim_pad_token_id": 6}, [4, 5, 6], [1]),
        ({"eos_token_id": 900, "add_bos_token": False}, [2], []),
        ({"model": "gpt2", "pre": "gpt-2", "eos_token_id": 7}, [7], []),
        ({"model": "gpt2", "pre": "llama-bpe", "bos_token_id": 7, "eos_token_id": 4}, [4], [7]),
        ({"model": "gpt2", "pre": "llama-bpe", "bos_token_id": 7, "add_bos_token": False}, [], []),
        ({"tokens": {9: "<end_of_turn>", 8: "<|fim_pad|>", 3: "</s>"}}, [2, 3, 8, 9], [1]),
        ({"tokens": {9: "<|end|>", 8: "<|call|>", 3: "<|return|>"}}, [2, 3, 8], [1]),
    ],
)
def test_ends_and_first_tokens_where_a_file_says_little(
    said: dict[str, Any], ends: list[int], first: list[int], tmp_path: Path
) -> None:
    """By llama.cpp's defaults, and its list of texts that end a reply."""
    named = said.pop("tokens", {})
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([named.get(n, "a" if n == 12 else f"t{n}") for n in range(20)])
    writer.add_token_scores([0.0] * 20)
    writer.add_token_merges(["t 1"])
    for key, value in ({"model": "llama"} | said).items():
        set_metadata(writer, f"tokenizer.ggml.{key}", value)
    writer.add_add_space_prefix(False)
    finish(writer)
    file = GgufFile(tmp_path / "m.gguf")
    assert generation(file).get("eos_token_id", []) == ends
    page = tokenizer_json(file)
    assert page is not None
    assert Tokenizer.from_str(page).encode("a").ids == [*first, 12]


@pytest.mark.drawn(reason="50 files of each of 13 architectures")
@pytest.mark.parametrize("name", MODELS)
def test_many_drawn_files(name: str) -> None:
    run([name], 50)
    print(dict(counts))
