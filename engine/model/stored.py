"""Read the text weights of a checkpoint from its safetensors files, without a model in between.

Only what is stored exactly as transformers' own modules would name it is read: any other set of
names or shapes gives None, and the caller goes the long way, which knows every older form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.model.spec import DecoderSpec
from engine.model.weights import DecoderWeights, LayerWeights

_FLOATS = {"F16", "BF16", "F32", "F64"}
# Buffers that older checkpoints hold and that follow from the config.
_COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Layout:
    """Which parts a layer of one type of text model has, besides its matrices.

    Attributes:
        fused: q, k, v and gate, up are stored as one matrix each.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False

    @classmethod
    def of(cls, config: Any) -> Layout | None:
        """Return the layout of transformers' module for this config; None for other types."""
        bias = bool(getattr(config, "attention_bias", False))
        match config.model_type:
            case "llama":
                mlp = bool(getattr(config, "mlp_bias", False))
                return cls(qkv_bias=bias, out_bias=bias, mlp_bias=mlp)
            case "mistral":
                return cls()
            case "qwen2":
                return cls(qkv_bias=True)
            case "qwen3" | "qwen3_vl_text":
                return cls(qkv_bias=bias, out_bias=bias, qk_norm=True)
            case "phi3":
                return cls(fused=True)
        return None


class StoredTensors:
    """The tensors of a checkpoint's files, mapped and read when asked for.

    Args:
        files: safetensors files; a name may stand in one of them only.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._opened = [safe_open(file, framework="pt") for file in files]
        self._home = {name: file for file in self._opened for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._home)

    @property
    def numbers(self) -> int:
        """Count the numbers of all tensors."""
        return sum(math.prod(self.shape(name)) for name in self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._home[name].get_slice(name).get_shape())

    def is_float(self, name: str) -> bool:
        """Whether it holds plain floating-point numbers."""
        return self._home[name].get_slice(name).get_dtype() in _FLOATS

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return tensors, one below the other along the first axis, in memory of their own."""
        shapes = [self.shape(name) for name in names]
        rows = [shape[0] for shape in shapes]
        made = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=device)
        for name, part in zip(names, made.split(rows), strict=True):
            part.copy_(self._home[name].get_tensor(name))
        return made


@torch.no_grad()
def read_text_weights(
    stored: StoredTensors,
    config: Any,
    spec: DecoderSpec,
    places: Sequence[tuple[str, str]],
    tied: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderWeights | None:
    """Read the text weights in ``dtype`` onto ``device``; fused matrices are written in place.

    Args:
        config: of the text model.
        places: where text weights may stand: (prefix of the text model, name of the head).
        tied: the head is the embedding, unless another one is stored.

    Returns:
        None when a tensor is missing, has another shape or is none of this model's.
    """
    layout = Layout.of(config)
    for prefix, head in places:
        if layout is None or f"{prefix}embed_tokens.weight" not in stored.names:
            continue
        return _read(stored, layout, config, spec, prefix, head, tied, dtype, device)
    return None


def _read(
    stored: StoredTensors,
    layout: Layout,
    config: Any,
    spec: DecoderSpec,
    prefix: str,
    head: str,
    tied: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderWeights | None:
    shapes = {f"{prefix}{name}": shape for name, shape in _shapes(layout, config, spec).items()}
    if head in stored.names or not tied:
        shapes[head] = (spec.vocab_size, spec.hidden_size)
    present = {
        name
        for name in stored.names
        if (name.startswith(prefix) or name == head) and not name.endswith(_COMPUTED)
    }
    if present != set(shapes) or any(
        stored.shape(name) != shape or not stored.is_float(name) for name, shape in shapes.items()
    ):
        return None

    def read(*names: str) -> Tensor:
        return stored.read([f"{prefix}{name}" for name in names], dtype, device)

    embed = read("embed_tokens.weight")
    output = stored.read([head], dtype, device) if head in shapes else embed
    if tied and torch.equal(output, embed):
        output = embed
    layers = [_layer(read, f"layers.{i}.", layout, spec) for i in range(spec.num_layers)]
    return DecoderWeights(embed, layers, read("norm.weight"), output)


def _layer(read: Callable[..., Tensor], at: str, layout: Layout, spec: DecoderSpec) -> LayerWeights:
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    qkv = ("qkv_proj",) if layout.fused else ("q_proj", "k_proj", "v_proj")
    gate_up = ("gate_up_proj",) if layout.fused else ("gate_proj", "up_proj")

    def joined(where: str, parts: Sequence[str], kind: str, there: bool = True) -> Tensor | None:
        return read(*(f"{where}{part}.{kind}" for part in parts)) if there else None

    qk_norm = None
    if layout.qk_norm:
        q_gain = read(f"{attention}q_norm.weight").expand(spec.num_heads, -1)
        k_gain = read(f"{attention}k_norm.weight").expand(spec.num_kv_heads, -1)
        qk_norm = torch.cat([q_gain, k_gain])
    return LayerWeights(
        input_norm=read(f"{at}input_layernorm.weight"),
        qkv=read(*(f"{attention}{part}.weight" for part in qkv)),
        qkv_bias=joined(attention, qkv, "bias", layout.qkv_bias),
        qk_norm=qk_norm,
        out=read(f"{attention}o_proj.weight"),
        out_bias=joined(attention, ["o_proj"], "bias", layout.out_bias),
        post_norm=read(f"{at}post_attention_layernorm.weight"),
        gate_up=read(*(f"{mlp}{part}.weight" for part in gate_up)),
        gate_up_bias=joined(mlp, gate_up, "bias", layout.mlp_bias),
        down=read(f"{mlp}down_proj.weight"),
        down_bias=joined(mlp, ["down_proj"], "bias", layout.mlp_bias),
    )


def _shapes(layout: Layout, config: Any, spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the text model, the head left out."""
    hidden, inner, dim = spec.hidden_size, config.intermediate_size, spec.head_dim
    query, pair = spec.num_heads * dim, spec.num_kv_heads * dim
    attention = {"q_proj": query, "k_proj": pair, "v_proj": pair}
    mlp = {"gate_proj": inner, "up_proj": inner}
    if layout.fused:
        attention, mlp = {"qkv_proj": query + 2 * pair}, {"gate_up_proj": 2 * inner}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for part, rows in attention.items():
        layer[f"self_attn.{part}.weight"] = (rows, hidden)
        if layout.qkv_bias:
            layer[f"self_attn.{part}.bias"] = (rows,)
    for part, rows in mlp.items():
        layer[f"mlp.{part}.weight"] = (rows, hidden)
        if layout.mlp_bias:
            layer[f"mlp.{part}.bias"] = (rows,)
    if layout.out_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if layout.mlp_bias:
        layer["mlp.down_proj.bias"] = (hidden,)
    if layout.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes = {
        f"layers.{i}.{k}": shape for i in range(spec.num_layers) for k, shape in layer.items()
    }
    return shapes | {"embed_tokens.weight": (spec.vocab_size, hidden), "norm.weight": (hidden,)}
