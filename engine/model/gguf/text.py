"""What a GGUF file's metadata say of a language model, as transformers' config says it.

They mean what llama.cpp makes of them (its ``llama-model.cpp`` and ``models/``): its defaults, its
older keys, and nothing of a key that it does not read for an architecture; :func:`unread` names
those that others read.
"""

from __future__ import annotations

import math
from typing import Any

from mmkv.engine.errors import ModelError
from mmkv.engine.model.gguf.file import GgufFile
from mmkv.engine.model.gguf.tokenizer import special

# llama.cpp's name of an architecture: the type of the text model.
TEXTS = {
    "llama": "llama",
    "mistral3": "llama",
    "qwen2": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3vlmoe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "glm4": "glm4",
}
_PARTIAL = ("phi3", "glm4", "qwen35", "qwen35moe")  # a part of each head may stay unrotated
_BY_FACTORS = ("llama", "mistral3")  # whose frequencies a tensor may divide
_WIDEST = 2**14  # numbers of a head
_SCALINGS = ("none", "linear", "yarn", "longrope")
# Keys that change an answer, and the architectures of TEXTS for which llama.cpp reads them.
_READ_OF: dict[str, tuple[str, ...]] = {
    "attention.sliding_window": ("gemma3",),
    "attention.temperature_scale": ("mistral3",),
    "final_logit_softcapping": ("gemma3",),
    "rope.scaling.yarn_beta_fast": ("mistral3",),
    "rope.scaling.yarn_beta_slow": ("mistral3",),
    "rope.scaling.yarn_log_multiplier": ("mistral3",),
}
_NEVER = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_gating_func",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "router_logit_softcapping",
)


def unread(file: GgufFile) -> list[str]:
    """Return the keys that would change an answer, were they read for this architecture."""
    keys = [key for key, of in _READ_OF.items() if file.architecture not in of]
    return [key for key in (*keys, *_NEVER) if file.get(key)]


def text_config(file: GgufFile, kind: str, sees: bool) -> dict[str, Any]:
    """Return the config of a text model.

    Args:
        kind: its type, as transformers names it. sees: its positions have three axes.

    Raises:
        ModelError: what mmkv does not run, by its name; counts that cannot be.
    """
    _require_plain(file, kind)
    layers = file.layers("block_count") - file.whole("nextn_predict_layers", 0)
    heads, hidden = file.whole("attention.head_count"), file.whole("embedding_length")
    if not heads or "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no heads or no embedding; get the original file")
    width = file.whole("attention.key_length", hidden // heads)
    rotated = file.whole("rope.dimension_count", width)
    if file.architecture not in _PARTIAL:
        _require_width(file, "rope.dimension_count", width)
    _require_width(file, "attention.value_length", width)
    if not 0 < rotated <= width <= _WIDEST:
        raise ModelError(
            f"{file.path}: a head has {width} numbers, of which {rotated} are rotated, which "
            "cannot be; get the original file"
        )
    ends = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.whole("feed_forward_length", 0),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.whole("attention.head_count_kv", heads),
        "head_dim": width,
        "max_position_embeddings": file.whole("context_length"),
        "rms_norm_eps": file.real("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(end.startswith("attn_") and end.endswith(".bias") for end in ends),
        "mlp_bias": bool(ends & {"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
        "rope_parameters": _rope(file, width, rotated, sees),
        "dtype": _dtype(file),
    }
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        config[f"{ours}_token_id"] = special(file, theirs)
    if "moe" in kind:
        config |= _experts(file, config)
    if kind.startswith("qwen3_5"):
        config |= _delta(file, layers)
    if kind == "gemma3_text":
        config |= _gemma(file, config)
    if kind == "phi3":
        config["original_max_position_embeddings"] = _original(file)
    if scale := file.real("attention.temperature_scale", 0.0) * (file.architecture == "mistral3"):
        config["model_type"] = "ministral3"
        rope = {"original_max_position_embeddings": _original(file), "llama_4_scaling_beta": scale}
        config["rope_parameters"] = rope | config["rope_parameters"]
    return config


def _require_plain(file: GgufFile, kind: str) -> None:
    """Raise ModelError for what llama.cpp does and this decoder does not."""
    experts = file.whole("expert_count", 0)
    if experts and "moe" not in kind:
        raise ModelError(
            f"{file.path} is a mixture of experts of the kind {file.architecture}, which mmkv does "
            "not run"
        )
    unlike = {
        "attention.causal": (True, None),
        "expert_group_count": (0, 1, None),
        "final_logit_softcapping": (0, None) if kind == "gemma3_text" else None,
    }
    for name, known in unlike.items():
        if known is not None and (value := file.get(name)) not in known:
            raise ModelError(
                f"{file.path}: {file.architecture}.{name} is {ascii(value)[:40]}, which mmkv does "
                "not run; use another model"
            )


def _require_width(file: GgufFile, name: str, width: int) -> None:
    if file.whole(name, width) != width:
        raise ModelError(
            f"{file.path}: {name} is {file.get(name)} and a head has {width} numbers, which "
            "mmkv does not run; use another model"
        )


def _experts(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a mixture of experts."""
    chosen, dense = file.whole("expert_used_count"), config["intermediate_size"]
    each = file.whole("expert_feed_forward_length", 0) or dense // max(chosen, 1)
    made: dict[str, Any] = {
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": chosen,
        "intermediate_size": dense or each,
        "moe_intermediate_size": each,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    if config["model_type"] == "qwen3_5_moe_text":
        shared = file.whole("expert_shared_feed_forward_length", 0)
        made["shared_expert_intermediate_size"] = shared or dense
    return made


def _delta(file: GgufFile, layers: int) -> dict[str, Any]:
    """Return which layers follow the gated delta rule, and their sizes."""
    linear = file.get("attention.recurrent_layers")
    if linear is None:
        every = file.whole("full_attention_interval", 4)
        linear = [bool((n + 1) % every) for n in range(layers)]
    linear = [linear] * layers if isinstance(linear, (bool, int)) else linear[:layers]
    values = file.whole("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_num_key_heads": file.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": file.whole("ssm.state_size"),
        "linear_value_head_dim": file.whole("ssm.inner_size") // max(values, 1),
        "linear_conv_kernel_dim": file.whole("ssm.conv_kernel"),
    }


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the windows of Gemma 3, and what else its config has."""
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        _require_width(file, f"{name}_swa", config["head_dim"])
    layers, window = config["num_hidden_layers"], file.whole("attention.sliding_window", 0)
    pattern = file.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):  # of each layer; those beyond it see all
        local = [bool(one) for one in [*pattern[:layers], *[0] * (layers - len(pattern))]]
    else:  # every so manieth layer sees all; 0: none
        every = file.whole("attention.sliding_window_pattern", 6)
        local = [not every or n % every < every - 1 for n in range(layers)]
    theta = file.real("rope.freq_base_swa", 10000.0)
    near: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if (scale := file.real("rope.scaling.attn_factor", 1.0)) != 1.0:
        pairs, context = config["head_dim"] // 2, config["max_position_embeddings"]
        near |= _divided([1.0] * pairs, None, scale, context)
    # What makes queries shorter: of a head, but in the model of 27 billion numbers.
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar if layers == 62 else config["head_dim"],
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": [
            "sliding_attention" if window and one else "full_attention" for one in local
        ],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": near,
        },
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


def _dtype(file: GgufFile) -> str:
    """Return the dtype of the widest matrices of the layers; of quantised ones, bfloat16."""
    kinds = {t.kind for name, t in file.tensors.items() if name.startswith("blk.") and t.rows > 1}
    names = {"F32": "float32", "F16": "float16"}
    return names.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _original(file: GgufFile) -> int:
    """Return the positions that a model was trained for before its rope was scaled."""
    context = file.whole("context_length")
    return file.whole("rope.scaling.original_context_length", context) or context


def _rope(file: GgufFile, width: int, rotated: int, sees: bool) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, scaling included.

    Args:
        width: of a head. rotated: so many of its numbers are.
    """
    theta = file.real("rope.freq_base", 10000.0)
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if file.architecture in _PARTIAL:
        share = rotated / max(width, 1)
        made["partial_rotary_factor"] = share if int(width * share) == rotated else share + 1e-9
    made |= _scaling(file, theta, rotated)
    if sees:
        sections = file.get("rope.dimension_sections")
        if not isinstance(sections, list) or len(sections) < 3:
            raise ModelError(f"{file.path} has no rope.dimension_sections; get the original file")
        made["mrope_section"] = sections[:3]
        if file.architecture not in ("qwen2vl", "glm4"):
            made["mrope_interleaved"] = True
    return made


def _scaling(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """Return what scales a rope: linearly, by yarn, or by a number for each frequency."""
    kind = file.get("rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise ModelError(
            f"{file.path} has rope scaling {ascii(kind)[:40]}, which mmkv does not read from GGUF; "
            "name the transformers checkpoint that it was made of"
        )
    factor = 1.0 if kind == "none" else _factor(file)
    scale = file.real("rope.scaling.attn_factor", 1.0)
    factors = _factors(file, kind, rotated)
    bare = file.architecture == "phi3"  # whose config takes factors alone
    if kind == "yarn":
        yarn = _yarn(file, factor, scale)
        if factors is None and not bare:
            return yarn
        scale, slower = yarn["attention_factor"], _slowed(yarn, theta, rotated)
    else:
        if factors is None and scale == 1.0 and (factor == 1.0 or not bare):
            return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        slower = [factor] * (rotated // 2)
    long = factors is not None and factors[0] is not factors[1]
    original = _original(file) if long else file.whole("context_length")
    divided = _divided(slower, factors, scale, original)
    return divided if bare else _llama3(theta, divided) or divided


def _factor(file: GgufFile) -> float:
    """Return what a scaling stretches the positions by."""
    older = file.real("rope.scale_linear", 0.0)  # an older name of the next
    return file.real("rope.scaling.factor", older) or 1.0


def _yarn(file: GgufFile, factor: float, scale: float) -> dict[str, Any]:
    """Return yarn's parameters; ``scale``: on cos and sin, beside its own."""
    scale, fast, slow = scale * _magnitude(factor), 32.0, 1.0
    if file.architecture == "mistral3":
        fast = file.real("rope.scaling.yarn_beta_fast", fast)
        slow = file.real("rope.scaling.yarn_beta_slow", slow)
        scale /= _magnitude(factor, file.real("rope.scaling.yarn_log_multiplier", 0.0))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": scale,
        "beta_fast": fast,
        "beta_slow": slow,
        "original_max_position_embeddings": _original(file),
    }


def _magnitude(factor: float, share: float = 1.0) -> float:
    """Return yarn's factor on cos and sin."""
    return 1.0 if factor <= 1.0 else 0.1 * share * math.log(factor) + 1.0


def _slowed(yarn: dict[str, Any], theta: float, rotated: int) -> list[float]:
    """Return what yarn divides each frequency by: nothing where it turns often in the original
    positions, all of the factor where it turns less than once or so.
    """
    original, factor = yarn["original_max_position_embeddings"], yarn["factor"]
    low, high = (
        rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn["beta_fast"], yarn["beta_slow"])
    )
    begin, end = max(0, math.floor(low)), min(rotated - 1, math.ceil(high))
    ramps = (min(max((n - begin) / max(0.001, end - begin), 0), 1) for n in range(rotated // 2))
    return [1 / (ramp / factor + 1 - ramp) for ramp in ramps]


def _factors(file: GgufFile, kind: str, rotated: int) -> tuple[list[float], list[float]] | None:
    """Return what divides the frequencies of short texts and of long ones, which may be one list;
    None: nothing does.
    """
    names = ["rope_freqs.weight"] * 2
    if file.architecture == "phi3" or kind == "longrope":
        names = ["rope_factors_short.weight", "rope_factors_long.weight"]
    if file.architecture not in (*_BY_FACTORS, "phi3") or not file.tensors.keys() & {*names}:
        return None
    found = {name: file.floats(name) for name in {*names} if name in file.tensors}
    if any(len(factors) != rotated // 2 for factors in found.values()):
        raise ModelError(
            f"{file.path} has not a factor for each of {rotated // 2} frequencies; get the "
            "original file"
        )
    short, long = (found.get(name) or [1.0] * (rotated // 2) for name in names)
    return short, long


def _divided(
    slower: list[float],
    factors: tuple[list[float], list[float]] | None,
    scale: float,
    original: int,
) -> dict[str, Any]:
    """Return rope parameters that divide frequencies by numbers and scale cos and sin."""
    both = factors or ([1.0] * len(slower),) * 2
    short, long = ([a * b for a, b in zip(slower, own, strict=True)] for own in both)
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": scale,
        "original_max_position_embeddings": original,
    }


def _llama3(theta: float, divided: dict[str, Any]) -> dict[str, Any] | None:
    """Return the same as Llama 3.1 and later say it, None where they cannot.

    A file has the outcome of their four numbers, of which three are always alike but for the
    length.
    """
    factors = divided["short_factor"]
    if divided["attention_factor"] != 1.0 or factors != divided["long_factor"]:
        return None
    waves = [2 * math.pi * theta ** (n / len(factors)) for n in range(len(factors))]
    factor, low, high = max(factors, default=1.0), 1.0, 4.0
    for power in range(4, 21):
        length = 2.0**power
        smooth = [min(max((length / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
        if all(map(_near, (1 / ((1 - s) / factor + s) for s in smooth), factors)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(length),
            }
    return None


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)
