"""What a model will take of memory, before it is loaded: in which forms it fits, and what is left.

Everything is counted from ``config.json`` and the headers of the weight files; no torch is
imported. What is left after weights, libraries and the work of a step is the cache's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.engine.budget import format_bytes
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError, ModelError
from mmkv.engine.model.fingerprint import tensor_shapes
from mmkv.engine.model.source import checkpoint_file, files_of

FORMS = ("auto", "bf16", "int8", "int4")
# Python, torch and transformers, measured on Linux (benchmarks/notes/weights.md).
PROCESS = 350 * 2**20
_STATES, _INNER = 16, 6  # vectors of a token's width, and of its MLP's, that a layer makes
_PICTURE = 1024**2  # pixels of the picture that room is left for
CHUNK = EngineConfig.prefill_chunk  # tokens that are read at once where nothing else is said
_LEAST = 16  # entries of a row below which nothing can be kept
_UNUSED = "mtp."  # weights that guess several tokens at once, which no part here reads
_DTYPES = ("dtype", "torch_dtype")  # where a config says in which it is stored
# Experts of a mixture, or what chooses among them; of GGUF, too.
_MIXED = re.compile(r"(\.experts\.|_exps\.)|\.(?:mlp\.gate|ffn_gate_inp)\.")
# Parts of quantised matrices that are no numbers of theirs.
_BESIDE = re.compile(
    r"weight_(?!packed).+|qzeros|scales|g_idx|SCB|\w*scale\w*|(nested_)?(absmax|quant_map)"
    r"|bitsandbytes__\w+"
)
_Headers = Iterable[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor
# What a folder with files that cannot be read raises; loading it says what is wrong.
_UNREADABLE = (
    MmkvError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class WeightCount:
    """The numbers of a checkpoint, by how they are held.

    Attributes:
        layers: of the matrices of decoder layers. tables: of embedding and head.
        eyes: of the matrices of tower and projector. plain: of norms, biases and
            tables of positions, in float32. experts: of a mixture, in float32.
        stored: bytes of a number of a matrix under ``auto``: 2 from bfloat16, else 4.
    """

    layers: int = 0
    tables: int = 0
    eyes: int = 0
    plain: int = 0
    experts: int = 0
    stored: int = 2

    def bytes(self, form: str) -> int:
        """Return what they take on a CPU in a form that ``--weights`` names."""
        rest, wide = self.tables + self.eyes, 4 * (self.plain + self.experts)
        if form in ("auto", "bf16"):
            each = self.stored if form == "auto" else 2
            return each * (self.layers + rest) + wide
        inside = 4 if form == "int4" else 8
        return _rounded(self.layers, inside) + _rounded(rest, 8) + wide

    @classmethod
    def of(cls, tensors: _Headers, tied: bool = False) -> WeightCount:
        """Count what headers list.

        Args:
            tied: the head is the embedding, wherever else it may be stored.
        """
        found = dict.fromkeys(("layers", "tables", "eyes", "plain", "experts"), 0)
        stored = seen = 2
        for name, dtype, shape in tensors:
            if (tied and name.endswith("lm_head.weight")) or name.startswith(_UNUSED):
                continue
            kind = _kind(name, shape)
            found[kind] += math.prod(shape)
            if kind == "eyes" and dtype in ("F32", "F16"):
                seen = 4
            elif kind != "plain" and dtype in ("F32", "F16"):
                stored = 4
        if seen > stored:  # eyes in float32 beside a narrow text model stay so
            found["plain"] += found["eyes"]
            found["eyes"] = 0
        return cls(**found, stored=stored)


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes in one form of weights.

    Attributes:
        form: as ``--weights`` names it.
        weights: bytes of all weights. process: of Python and its libraries.
        work: of a step's states, and of reading a picture.
        entry: bytes of one entry in every (layer, KV head), in 16 bits. longest: positions.
    """

    form: str
    weights: int
    work: int
    entry: int
    longest: int
    process: int = PROCESS

    @property
    def fixed(self) -> int:
        """Return the bytes that are taken whatever the cache holds."""
        return self.weights + self.process + self.work

    def left(self, memory: int) -> int:
        """Return the bytes of ``memory`` that are left for the cache, 0 at least."""
        return max(memory - self.fixed, 0)

    def entries(self, memory: int) -> int:
        """Return the entries that are left for each (layer, KV head)."""
        return self.left(memory) // self.entry

    def fits(self, memory: int) -> bool:
        """Whether one page of each row is left, at least."""
        return self.entries(memory) >= _LEAST

    def describe(self, memory: int) -> str:
        """Say in a few words what is taken and left of ``memory``."""
        taken = (
            f"weights {format_bytes(self.weights)} ({self.form}), process "
            f"{format_bytes(self.process)}, work {format_bytes(self.work)}"
        )
        if not self.fits(memory):
            return f"{taken}: more than {format_bytes(memory)}"
        entries = self.entries(memory)
        held = f"all {self.longest:,} positions"
        if entries < self.longest:
            held = f"{entries:,} entries per layer and KV head in 16 bits"
        return f"{taken}; {format_bytes(self.left(memory))} left for the cache, {held}"


def plans(
    config: Mapping[str, Any], count: WeightCount, chunk: int = CHUNK, features: int = 0
) -> dict[str, MemoryPlan]:
    """Return what a model takes on a CPU, for each form of weights that it can have.

    Args:
        config: of ``config.json``. chunk: prompt tokens that are read at once.
        features: bytes that features of pictures may take.

    Raises:
        ValueError: no layer has entries, which loading refuses.
    """
    text = text_config(config)
    layers, width = int(text["num_hidden_layers"]), int(text["hidden_size"])
    heads = int(text["num_attention_heads"])
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or width // heads)
    inner = int(text.get("intermediate_size") or 4 * width)
    longest = int(text.get("max_position_embeddings") or 2**17)
    # Key and value, retention, position and modality of an entry.
    linear = _linear_layers(text, layers)
    if linear >= layers:
        raise ValueError("no layer has entries")
    entry = (layers - linear) * kv_heads * (2 * 2 * head_dim + 4 + 4 + 1)
    if min(layers, width, heads, kv_heads, head_dim, inner, longest, entry) < 1:
        raise ValueError("sizes below 1")
    tokens = min(chunk, longest)  # of a chunk, whose entries come before others go
    work = states_bytes(tokens, width, inner) + tokens * entry + 4 * int(text["vocab_size"])
    if linear:  # of a sequence, and of a copy that it may go back to
        work += 2 * linear * _state_bytes(text)
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        work += eyes_bytes(vision, _PICTURE, width) + features
    forms = FORMS[:1] if count.experts else FORMS  # a mixture of experts has no other
    return {form: MemoryPlan(form, count.bytes(form), work, entry, longest) for form in forms}


def _linear_layers(text: Mapping[str, Any], layers: int) -> int:
    """Count the layers of a text model that keep a state in place of entries."""
    kinds = text.get("layer_types")
    if kinds is None and str(text.get("model_type")).startswith("qwen3_5"):
        return layers - layers // int(text.get("full_attention_interval") or 4)
    return sum(kind == "linear_attention" for kind in kinds or ())


def _state_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes that a layer of the gated delta rule keeps of a sequence, in float32."""
    key, value = (int(text.get(f"linear_{name}_head_dim") or 128) for name in ("key", "value"))
    keys = int(text.get("linear_num_key_heads") or 16)
    values = int(text.get("linear_num_value_heads") or 32)
    past = int(text.get("linear_conv_kernel_dim") or 4) - 1
    return 4 * ((2 * keys * key + values * value) * past + values * key * value)


def states_bytes(tokens: int, width: int, inner: int) -> int:
    """Return what a layer makes of so many tokens on the way, in float32."""
    return 4 * tokens * (_STATES * width + _INNER * inner)


def eyes_bytes(vision: Mapping[str, Any], pixels: int, width: int) -> int:
    """Return what a tower makes of so many pixels on the way, in float32.

    Args:
        width: of the text model, where the tower's is not named.
    """
    patch = patch_side(vision.get("patch_size"))
    hidden = int(vision.get("hidden_size") or width)
    inner = int(vision.get("intermediate_size") or 4 * hidden)
    return states_bytes(pixels // patch**2, hidden, inner)


def patch_side(size: Any) -> int:
    """Return the pixels of a patch's side; some settings have one for each axis."""
    size = size or 14
    return int(size) if isinstance(size, int) else int(min(size))


def planned(model: str, chunk: int = CHUNK, features: int = 0) -> dict[str, MemoryPlan] | None:
    """Return the :func:`plans` of a folder, or of a hub id whose files are in the cache.

    None: there are no weights in safetensors, or files that cannot be read.
    """
    try:
        files = files_of(lambda name: checkpoint_file(model, name))
        path = checkpoint_file(model, "config.json")
        if files is None or path is None:
            return None
        config = json.loads(path.read_text(encoding="utf-8"))
        return plans(config, _counted(tensor_shapes(files), config), chunk, features)
    except _UNREADABLE:
        return None


def planned_from_hub(
    model: str, chunk: int = CHUNK, features: int = 0
) -> dict[str, MemoryPlan] | None:
    """Return the :func:`plans` of a checkpoint on the hub, of which headers alone are fetched.

    None: the hub is out of reach, or it has no such checkpoint.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

    from mmkv.engine.model.source import hub_reachable

    if not hub_reachable():
        return None
    try:
        config = json.loads(Path(hf_hub_download(model, "config.json")).read_text())
        files = HfApi().get_safetensors_metadata(model).files_metadata.values()
        tensors = [
            (name, str(tensor.dtype), list(tensor.shape))
            for file in files
            for name, tensor in file.tensors.items()
        ]
        return plans(config, _counted(tensors, config), chunk, features)
    except (HfHubHTTPError, NotASafetensorsRepoError, *_UNREADABLE):
        return None


def plan_of(made: Mapping[str, MemoryPlan], form: str) -> MemoryPlan:
    """Return the plan of a form. Raises ModelError where the model cannot have it."""
    if form not in made:
        raise ModelError(
            f"weights {form!r} are not for a mixture of experts; leave --weights at auto"
        )
    return made[form]


def advice(made: Mapping[str, MemoryPlan], form: str, memory: int) -> str:
    """Say whether a model fits into ``memory`` in a form, and which one would if not."""
    plan = plan_of(made, form)
    if plan.fits(memory):
        return plan.describe(memory)
    smaller = [one for one in made.values() if one.fits(memory) and one.weights < plan.weights]
    if smaller:
        best = max(smaller, key=lambda one: one.weights)
        return (
            f"{plan.describe(memory)}; --weights {best.form} takes "
            f"{format_bytes(best.weights)} and leaves {format_bytes(best.left(memory))}"
        )
    least = min(made.values(), key=lambda one: one.fixed)
    return (
        f"{plan.describe(memory)}; in no form does it take less than "
        f"{format_bytes(least.fixed)} ({least.form}): use a smaller model"
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text model within those of a checkpoint."""
    for name in ("text_config", "llm_config"):
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def _counted(tensors: _Headers, config: Mapping[str, Any]) -> WeightCount:
    """Return the numbers of a checkpoint with these headers and this config."""
    tied = text_config(config).get("tie_word_embeddings", False)
    tied = bool(config.get("tie_word_embeddings", tied))
    return WeightCount.of(_unpacked(tensors, config), tied)


def _unpacked(tensors: _Headers, config: Mapping[str, Any]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield what headers list, and matrices of a quantised checkpoint with all their numbers.

    What is beside them is left out. They become what their steps are in, or the model is.

    Raises:
        ValueError: such bits cannot be.
    """
    said: Mapping[str, Any] = _first(config, ("compression_config", "quantization_config"), {})
    if not said:
        yield from tensors
        return
    groups = (said.get("config_groups") or {}).values()
    bits = next((group["weights"]["num_bits"] for group in groups), said.get("bits", 4))
    if bits not in range(1, 17):
        raise ValueError(f"{bits} bits")
    own, tensors = _first(config, _DTYPES, ""), list(tensors)
    known = {name: (dtype, shape) for name, dtype, shape in tensors}
    for name, dtype, shape in tensors:
        module, _, part = name.rpartition(".")
        if _BESIDE.fullmatch(part):
            continue
        if dtype not in ("I32", "U8", "I8", "F8_E4M3", "F8_E5M2"):
            yield name, dtype, shape
            continue
        _, words = known.get(f"{module}.qzeros", ("", []))
        if said.get("dynamic") and len(words) == len(shape) == 2:  # of GPTQ: bits by module
            bits = 32 * words[1] // shape[1]
        each = {"I32": 32 / int(bits), "U8": 2}.get(dtype, 1)  # 3 bits: over words' ends
        steps = {known.get(f"{module}.{one}", ("",))[0] for one in ("scales", "weight_scale")}
        wide = "F16" if own == "float16" and "BF16" not in steps else "BF16"
        count = int(math.prod(shape) * each)
        yield f"{module}.weight", "F16" if "F16" in steps else wide, [1, count]


def _first(config: Mapping[str, Any], names: Sequence[str], otherwise: Any) -> Any:
    """Return the first setting that is there under one of ``names``, the text model's after all."""
    parts = (config, text_config(config))
    return next((part[name] for part in parts for name in names if part.get(name)), otherwise)


def _kind(name: str, shape: list[int]) -> str:
    """Return the field of :class:`WeightCount` that a tensor counts for."""
    if len(shape) < 2:
        kind = "plain"
    elif _is_text(name):
        kind = "layers" if ".layers." in name else "tables"
    else:
        kind = "plain" if "embed" in name and "patch" not in name else "eyes"
    if _is_text(name) and (mixed := _MIXED.search(name)):
        kind = "experts" if mixed[1] else "plain"
    return kind


def _is_text(name: str) -> bool:
    """Whether a tensor belongs to the text model: its decoder, embedding or head."""
    own = name.removeprefix("model.")
    places = ("language_model.", "text_model.", "layers.", "embed_tokens.", "norm.", "lm_head.")
    return own.startswith(places)


def _rounded(numbers: int, bits: int) -> int:
    """Return the bytes of numbers in groups of 32 with a scale of 16 bits each."""
    return numbers // 32 * (4 * bits + 2)
