"""Give the tensors of GGUF files by the names, shapes and order of rows that transformers has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.gguf.file import PLAIN, GgufFile, GgufTensor, parts_of, read_gguf
from mmkv.engine.model.gguf.text import unread
from mmkv.engine.model.panel_files import MappedFile
from mmkv.engine.model.rounded import BLOCK
from mmkv.engine.model.spec import DELTA_TYPES, LINEAR, OFFSET_TYPES
from mmkv.engine.model.stored import Grid, StoredShapes, StoredTensors

# llama.cpp's names and transformers', without ".weight" or ".bias" where both have these.
_TEXT = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Those of the same layers whose ends differ.
_DELTA_WHOLE = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
# What differs from _LAYER, by architecture.
_OWN = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
}
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
# In the config already.
_COMPUTED = {
    "rope_freqs.weight": ("llama", "mistral3"),
    "rope_factors_long.weight": ("llama", "mistral3", "phi3"),
    "rope_factors_short.weight": ("llama", "mistral3", "phi3"),
}
_CLIP = {
    "v.class_embd": "vision_tower.vision_model.embeddings.class_embedding",
    "v.patch_embd": "vision_tower.vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.vision_model.embeddings.position_embedding",
    "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
    "v.post_ln": "vision_tower.vision_model.post_layernorm",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
_CLIP_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN3_VL = {
    "v.patch_embd": "patch_embed.proj",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
_QWEN3_VL_LAYER = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_THIRDS = (".attn_q", ".attn_k", ".attn_v")  # of a matrix that towers of Qwen have as one
_LEVEL = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_QWEN25_VL = {
    "v.patch_embd": "patch_embed.proj",
    "v.post_ln": "merger.ln_q",
    "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}
_QWEN25_VL_LAYER = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN2_VL_LAYER = _QWEN25_VL_LAYER | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_SIGLIP = {
    **{name: _CLIP[name] for name in ("v.patch_embd", "v.position_embd", "v.post_ln")},
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
}
# Names, names in a layer, what is before all of them and before the layers, by type of the model.
_TOWERS = {
    "llava": (_CLIP, _CLIP_LAYER, "", "vision_tower.vision_model.encoder.layers"),
    "gemma3": (_SIGLIP, _CLIP_LAYER, "", "vision_tower.vision_model.encoder.layers"),
    "qwen2_vl": (_QWEN25_VL, _QWEN2_VL_LAYER, "visual.", "blocks"),
    "qwen2_5_vl": (_QWEN25_VL, _QWEN25_VL_LAYER, "visual.", "blocks"),
    "qwen3_vl": (_QWEN3_VL, _QWEN3_VL_LAYER, "model.visual.", "blocks"),
}
_AT_ONCE = 2**24  # numbers that are made of their codes at a time
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Order:
    """How rows that llama.cpp has in an order of its own are put into that of here.

    Attributes:
        rows: that belong together, such as those of a head.
        put: returns such rows ``[n, bytes]`` as they are here; n is a multiple of ``rows``.
    """

    rows: int
    put: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Piece:
    """Rows of a stored tensor. A vector has one number a row.

    Attributes:
        first, after: rows, of all but the last axis.
    """

    tensor: GgufTensor
    first: int
    after: int
    order: _Order | None = None


@dataclass(frozen=True)
class _Source:
    """What a tensor is made of.

    Attributes:
        pieces: one below the other; what they leave of the tensor is ``fill``.
        frames: pieces are frames of a convolution over time ``[out, channels, frames, h, w]``.
        change: makes the numbers of here of those of llama.cpp.
        columns: the axes that columns have in llama.cpp, of which the first two change places.
    """

    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    fill: float = 0.0
    frames: bool = False
    change: Callable[[Tensor], Tensor] | None = None
    columns: tuple[int, int, int] | None = None

    @property
    def kind(self) -> str:
        """Return ggml's name of the type; of several, all of them. What is changed is F32."""
        kinds = {"F32"} if self.change else {piece.tensor.kind for piece in self.pieces}
        return "+".join(sorted(kinds)) or "F32"

    @property
    def rows_stored(self) -> int:
        """Count the rows of the pieces of a matrix."""
        return sum(piece.after - piece.first for piece in self.pieces)


class GgufTensors(StoredTensors):
    """The tensors of a GGUF file and, if there is one, of its tower's.

    Numbers are read from the mapped file, some rows at a time, when a tensor is asked for.

    Args:
        files: the language model's file, and the tower's. config: of the whole model.

    Raises:
        ModelError: a damaged file, or a tensor that such a model does not have.
    """

    def __init__(self, files: Sequence[Path], config: Any) -> None:
        self.files = tuple(part for path in files for part in parts_of(path))
        opened = [read_gguf(path) for path in files]
        prefix = "model." if len(opened) == 1 else "model.language_model."
        self._sources = _text_sources(opened[0], config.get_text_config(), prefix)
        if len(opened) > 1:
            self._sources |= _tower_sources(opened[1], config)
            rows = config.get_text_config().vocab_size
            for name in (f"{prefix}embed_tokens.weight", "lm_head.weight"):
                if (own := self._sources.get(name)) is not None and own.shape[0] == rows - 1:
                    # The token that stands for pictures, where the file has none.
                    self._sources[name] = replace(own, shape=(rows, *own.shape[1:]))
        self._mapped = {}
        if ignored := unread(opened[0]):
            self.note = (
                f"{opened[0].path.name} says {', '.join(ignored)}, which llama.cpp does not read "
                f"for {opened[0].architecture}, nor does mmkv"
            )

    @property
    def names(self) -> set[str]:
        """See :class:`StoredTensors`."""
        return set(self._sources)

    @property
    def numbers(self) -> int:
        """See :class:`StoredTensors`."""
        return self.numbers_of(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`StoredTensors`."""
        return self._sources[name].shape

    def kind(self, name: str) -> str:
        """See :class:`StoredTensors`: what is quantised becomes float32."""
        kind = self._sources[name].kind
        return kind if kind in _DTYPES else "F32"

    def tensor(self, name: str) -> Tensor:
        """See :class:`StoredTensors`."""
        return self.read_as_stored(name)

    def in_place(self, name: str) -> bool:
        """See :class:`StoredTensors`: files of another format do not count."""
        return False

    def grid(self, name: str) -> Grid | None:
        """See :class:`StoredTensors`: Q8_0 and Q4_0 have a step, in float16, for 32 columns."""
        source = self._sources[name]
        if source.kind not in ("Q8_0", "Q4_0") or source.rows_stored < source.shape[0]:
            return None
        if source.columns is not None and source.columns[-1] % BLOCK:
            return None
        blocks = torch.cat([self._raw(one, one.first, one.after) for one in source.pieces])
        for one in source.pieces:  # a copy was made of them
            self._map_of(one.tensor).forget(one.tensor.begin, one.tensor.nbytes)
        blocks = blocks.unflatten(-1, (-1, 2 + (BLOCK if source.kind == "Q8_0" else BLOCK // 2)))
        if source.columns is not None:
            outer, inner, width = source.columns
            axes = (outer, inner, width // BLOCK)
            blocks = blocks.unflatten(1, axes).transpose(1, 2).flatten(1, 3)
        steps = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
        stored = blocks[..., 2:]
        if source.kind == "Q8_0":
            codes = stored.contiguous().view(torch.int8)
        else:
            codes = torch.cat([stored & 15, stored >> 4], -1).to(torch.int8) - 8
        return Grid(codes.flatten(1), steps)

    def widened(self, form: str) -> bool:
        """Whether matrices of the language model that are quantised are not in that form."""
        kinds = {source.kind for name, source in self._sources.items() if ".layers." in name}
        return form in ("auto", "bf16") and not kinds <= _DTYPES.keys()

    def read_as_stored(self, name: str) -> Tensor:
        """See :class:`StoredTensors`: what is quantised comes in float32."""
        dtype = _DTYPES.get(self._sources[name].kind, torch.float32)
        return self.read([name], dtype, torch.device("cpu"))

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :class:`StoredTensors`."""
        sources = [self._sources[name] for name in names]
        rows = [source.shape[0] for source in sources]
        made = torch.empty((sum(rows), *sources[0].shape[1:]), dtype=dtype, device=device)
        for source, part in zip(sources, made.split(rows), strict=True):
            self._fill(source, part)
        return made

    def _fill(self, source: _Source, part: Tensor) -> None:
        """Write a tensor's numbers into ``part``, whose rows lie together."""
        if source.frames:
            for frame, piece in enumerate(source.pieces):
                numbers = torch.cat([*self._rows(piece)])
                part[:, :, frame].copy_(numbers.view(part[:, :, frame].shape))
            return
        flat, at = part.view(-1), 0
        for piece in source.pieces:
            for rows in self._rows(piece):
                if source.change is not None:
                    rows = source.change(rows.float())
                if source.columns is not None:
                    rows = rows.unflatten(-1, source.columns).transpose(1, 2)
                flat[at : at + rows.numel()].copy_(rows.reshape(-1))
                at += rows.numel()
        flat[at:].fill_(source.fill)

    def _rows(self, piece: _Piece) -> Iterator[Tensor]:
        """Yield the numbers of a piece, some rows at a time, ``[n, columns]``."""
        tensor = piece.tensor
        each = 1 if piece.order is None else piece.order.rows
        step = max(1, _AT_ONCE // (tensor.shape[-1] * each)) * each
        size = _row_bytes(tensor)
        for first in range(piece.first, piece.after, step):
            raw = self._raw(piece, first, min(first + step, piece.after))
            yield _numbers(raw, tensor)
            self._map_of(piece.tensor).forget(tensor.begin + first * size, len(raw) * size)

    def _raw(self, piece: _Piece, first: int, after: int) -> Tensor:
        """Return rows as they are stored, uint8 ``[n, bytes of a row]``, in the order of here."""
        size = _row_bytes(piece.tensor)
        begin = piece.tensor.begin + first * size
        raw = self._map_of(piece.tensor).tensor(begin, torch.uint8, (after - first, size))
        return raw if piece.order is None else piece.order.put(raw)

    def _map_of(self, tensor: GgufTensor) -> MappedFile:
        if tensor.path not in self._mapped:
            with tensor.path.open("rb") as opened:
                self._mapped[tensor.path] = MappedFile(opened.fileno())
        return self._mapped[tensor.path]


def _row_count(tensor: GgufTensor) -> int:
    """Count the rows; those of a vector have one number."""
    if len(tensor.shape) == 1 and tensor.kind in PLAIN:
        return tensor.shape[0]
    return tensor.rows


def _row_bytes(tensor: GgufTensor) -> int:
    return tensor.nbytes // _row_count(tensor)


def _halves(rows: Tensor, width: int) -> Tensor:
    """Put neighbours, which turn together in llama.cpp, half a head of that width apart."""
    return rows.view(-1, width // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _pairs(rows: Tensor, width: int, rotated: int) -> Tensor:
    """Put side by side those of a head's first ``rotated`` features that are half of them apart."""
    heads = rows.view(-1, width, rows.shape[-1])
    turned = heads[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, rotated:]], 1).reshape(rows.shape)


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Exchange two axes of groups of rows."""
    shaped = rows.view(outer, inner, -1, rows.shape[-1])
    return shaped.transpose(0, 1).reshape(rows.shape)


def _numbers(raw: Tensor, tensor: GgufTensor) -> Tensor:
    """Return the numbers of stored rows, as floats."""
    if (dtype := _DTYPES.get(tensor.kind)) is not None:
        return raw.view(dtype)
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType(tensor.number)))


def _text_sources(file: GgufFile, config: Any, prefix: str) -> dict[str, _Source]:
    """Return the text model's tensors."""
    made: dict[str, _Source] = {}
    for name, tensor in file.tensors.items():
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.?(.*)", name)
        stem, ending = _split(name)
        if found is not None:
            if int(found[1]) < config.num_hidden_layers:
                at = f"{prefix}layers.{found[1]}."
                kind = (getattr(config, "layer_types", None) or {int(found[1]): ""})[int(found[1])]
                made |= {
                    at + ours: source
                    for ours, source in _layer(file, config, tensor, found[2], found[3], kind)
                }
            elif not file.get("nextn_predict_layers"):  # which predict further tokens
                raise _foreign(file, name)
        elif name == "output.weight":
            made["lm_head.weight"] = _whole(tensor)
        elif stem in _TEXT:
            change = _offset(config) if stem == "output_norm" else None
            made[f"{prefix}{_TEXT[stem]}.{ending}"] = replace(_whole(tensor), change=change)
        elif file.architecture not in _COMPUTED.get(name, ()):
            raise _foreign(file, name)
    for index in range(config.num_hidden_layers):
        _complete(file, config, made, f"{prefix}layers.{index}.")
    return made


def _offset(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what makes weights of gains, where these are 1 + weight."""
    return (lambda gains: gains - 1) if config.model_type in OFFSET_TYPES else None


def _layer(
    file: GgufFile, config: Any, tensor: GgufTensor, part: str, ending: str, kind: str
) -> Iterator[tuple[str, _Source]]:
    """Yield the sources of a tensor of a layer, by the rest of their names.

    Args:
        part, ending: of its name. kind: of the layer; empty: all are alike.
    """
    names = _LAYER | _OWN.get(file.architecture, {})
    width, heads = config.head_dim, config.num_attention_heads
    gated = 2 if config.model_type in DELTA_TYPES else 1
    pair = width * config.num_key_value_heads
    qkv = {"attn_q": gated * width * heads, "attn_k": pair, "attn_v": pair}
    plain = ending in ("weight", "bias")
    if kind == LINEAR and part in ("attn_qkv", *_DELTA, "ssm_a", "ssm_dt"):
        yield _linear(file, config, tensor, part, ending)
    elif part == "attn_qkv" and plain:
        _require_rows(file, tensor, sum(qkv.values()))
        first = 0
        for own, rows in qkv.items():
            order = _order(file, config, own)
            piece = _Piece(tensor, first, first + rows, order)
            yield f"{names[own]}.{ending}", _Source((rows, *tensor.shape[1:]), (piece,))
            first += rows
    elif part in names and plain:
        if part in qkv:
            _require_rows(file, tensor, qkv[part])
        change = _offset(config) if part.endswith("_norm") else None
        source = replace(_whole(tensor, _order(file, config, part)), change=change)
        if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            source = replace(source, shape=(1, *tensor.shape))
        yield f"{names[part]}.{ending}", source
    elif part in _EXPERTS and len(tensor.shape) == 3:
        yield from _experts(tensor, part, ending)
    else:
        raise _foreign(file, tensor.name)


def _experts(tensor: GgufTensor, part: str, ending: str) -> Iterator[tuple[str, _Source]]:
    """Yield the matrices of each expert, which llama.cpp has one behind the other."""
    experts, rows, columns = tensor.shape
    parts = _EXPERTS[part]
    wide = rows // len(parts)
    for number in range(experts * len(parts)):
        expert, at = divmod(number, len(parts))
        piece = _Piece(tensor, number * wide, (number + 1) * wide)
        yield f"mlp.experts.{expert}.{parts[at]}.{ending}", _Source((wide, columns), (piece,))


def _order(file: GgufFile, config: Any, part: str) -> _Order | None:
    """Return how rows of queries and keys are put, where llama.cpp has another order."""
    width = config.head_dim
    if part in ("attn_q", "attn_k"):
        if file.architecture in ("llama", "mistral3"):  # whose rope turns neighbours there
            return _Order(width, lambda rows: _halves(rows, width))
        if file.architecture == "glm4" and any((file.get("rope.dimension_sections") or [])[:2]):
            rotated = file.whole("rope.dimension_count", width)  # M-RoPE turns halves there
            return _Order(width, lambda rows: _pairs(rows, width, rotated))
    return None


def _linear(
    file: GgufFile, config: Any, tensor: GgufTensor, part: str, ending: str
) -> tuple[str, _Source]:
    """Return name and source of a tensor of a layer that follows the gated delta rule.

    Value heads that share a key head are neighbours here; llama.cpp has the first of each key
    head, then the second.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    share, width = values // keys, config.linear_value_head_dim
    both = 2 * keys * config.linear_key_head_dim
    name = _DELTA_WHOLE.get(f"{part}.{ending}".rstrip(".")) or f"{_DELTA.get(part, '')}.{ending}"
    if name.startswith("."):
        raise _foreign(file, tensor.name)
    # How many rows lie before those of the value heads, and how many each of these has.
    behind = {"attn_qkv": (both, width), "ssm_conv1d": (both, width), "attn_gate": (0, width)}
    behind |= dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), (0, 1))
    source = _whole(tensor)
    if part in behind:
        first, each = behind[part]
        _require_rows(file, tensor, first + values * each)
        order = _Order(values * each, lambda rows: _swapped(rows, share, keys))
        own = _Piece(tensor, first, first + values * each, order)
        source = replace(source, pieces=(_Piece(tensor, 0, first), own) if first else (own,))
    if part == "ssm_conv1d":
        source = replace(source, shape=(tensor.shape[0], 1, *tensor.shape[1:]))
    elif part == "ssm_a":
        source = replace(source, change=lambda decays: (-decays).log())
    elif part == "ssm_out" and tensor.shape[1:] == (values * width,):
        source = replace(source, columns=(share, keys, width))
    elif part == "post_attention_norm":
        source = replace(source, change=_offset(config))
    return name, source


def _complete(file: GgufFile, config: Any, made: dict[str, _Source], at: str) -> None:
    """Add what a layer has here and may lack in llama.cpp: biases of zeros; join q, k and v."""
    three = [f"{at}self_attn.{part}_proj" for part in "qkv"]
    layout = StoredShapes.of(config) or StoredShapes()
    if layout.fused:
        parts = [made.pop(f"{name}.weight", None) for name in three]
        if None not in parts:
            made[f"{at}self_attn.qkv_proj.weight"] = _below(filter(None, parts))
        return
    biased = {
        **dict.fromkeys(three, layout.qkv_bias),
        f"{at}self_attn.o_proj": layout.out_bias,
        **{f"{at}mlp.{part}_proj": layout.mlp_bias for part in ("gate", "up", "down")},
    }
    for name, there in biased.items():
        if there and f"{name}.weight" in made and f"{name}.bias" not in made:
            made[f"{name}.bias"] = _Source(made[f"{name}.weight"].shape[:1], ())


def _below(sources: Iterable[_Source]) -> _Source:
    """Return matrices of as many columns each, one below the other."""
    parts = list(sources)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return _Source(shape, tuple(piece for part in parts for piece in part.pieces))


def _require_rows(file: GgufFile, tensor: GgufTensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise ModelError(
            f"{file.path}: {tensor.name} has {tensor.shape[0]} rows, not {rows} as its metadata "
            "say; get the original file"
        )


def _tower_sources(file: GgufFile, config: Any) -> dict[str, _Source]:
    """Return the tensors of the tower and the projector."""
    kind = config.model_type
    names, layers, prefix, blocks = _tower_of(config)
    made: dict[str, _Source] = {}
    parts: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in file.tensors.items():
        stem, ending = _split(name)
        ours = _tower_name(config, stem)
        if name == "v.patch_embd.weight.1":
            continue  # with its first frame
        if ours is not None and "attn_qkv" in layers and stem.endswith(_THIRDS):
            parts.setdefault(f"{ours}.{ending}", {})[stem[-1]] = tensor
        elif ours is not None:
            change = (lambda gains: gains - 1) if stem == "mm.soft_emb_norm" else None
            made[f"{ours}.{ending}"] = replace(_whole(tensor), change=change)
        elif name in names:
            shape = (math.prod(tensor.shape),) if name == "v.class_embd" else tensor.shape
            made[names[name]] = replace(_whole(tensor), shape=shape)
        else:
            raise _foreign(file, name)
    for at, three in parts.items():
        made[at] = _joined(file, at, [three.get(part) for part in "qkv"])
    if kind == "llava":
        made |= _unused_norm(made, config.vision_config.hidden_size)
    if kind in ("llava", "qwen2_vl"):
        _name_by_shape(made, f"{prefix}{blocks}")
    if "qwen" in kind:
        made[f"{prefix}{names['v.patch_embd']}.weight"] = _frames(file)
    return made


def _tower_of(config: Any) -> tuple[dict[str, str], dict[str, str], str, str]:
    return _TOWERS.get(config.model_type, _TOWERS["qwen3_vl"])


def _tower_name(config: Any, stem: str) -> str | None:
    """Return the name that a tensor has here, None where a tower has no such; ends left out."""
    names, layers, prefix, blocks = _tower_of(config)
    if stem in names:
        return f"{prefix}{names[stem]}"
    found = re.fullmatch(r"v\.(blk|deepstack)\.(\d+)\.(\w+)", stem)
    if found is None:
        return None
    _, number, part = found.groups()
    if found[1] == "blk":
        if stem.endswith(_THIRDS):
            part = "attn_qkv" if "attn_qkv" in layers else part
        return f"{prefix}{blocks}.{number}.{layers[part]}" if part in layers else None
    levels = list(getattr(config.vision_config, "deepstack_visual_indexes", ()) or ())
    if part not in _LEVEL or int(number) not in levels:
        return None
    return f"{prefix}deepstack_merger_list.{levels.index(int(number))}.{_LEVEL[part]}"


def _unused_norm(made: dict[str, _Source], width: int) -> dict[str, _Source]:
    """Return the norm behind CLIP's last block, which LLaVA does not read, where it is left out."""
    at = _CLIP["v.post_ln"]
    unused = {f"{at}.weight": _Source((width,), (), 1.0), f"{at}.bias": _Source((width,), ())}
    return {name: source for name, source in unused.items() if name not in made}


def _name_by_shape(made: dict[str, _Source], blocks: str) -> None:
    """Exchange the two layers of MLPs where an older converter named each as the other."""
    wide, narrow = (made.get(f"{blocks}.0.mlp.{name}.bias") for name in ("fc1", "fc2"))
    if wide is None or narrow is None or wide.shape[0] >= narrow.shape[0]:
        return
    for name in [name for name in made if ".mlp.fc1." in name]:
        other = name.replace(".mlp.fc1.", ".mlp.fc2.")
        made[name], made[other] = made[other], made[name]


def _frames(file: GgufFile) -> _Source:
    """Return the embedding of patches of two frames, which llama.cpp has as two convolutions."""
    found = [file.tensors.get(f"v.patch_embd.weight{end}") for end in ("", ".1")]
    first, second = found
    if first is None or second is None or first.shape != second.shape or len(first.shape) != 4:
        raise ModelError(
            f"{file.path} has not two alike convolutions v.patch_embd; get the original file"
        )
    rows, channels, *sides = first.shape
    pieces = (_all_of(first), _all_of(second))
    return _Source((rows, channels, 2, *sides), pieces, frames=True)


def _joined(file: GgufFile, at: str, three: Sequence[GgufTensor | None]) -> _Source:
    there = [tensor for tensor in three if tensor is not None]
    if len(there) != 3 or len({tensor.shape[1:] for tensor in there}) != 1:
        raise ModelError(f"{file.path} lacks a part of {at}; get the original file")
    return _below(map(_whole, there))


def _whole(tensor: GgufTensor, order: _Order | None = None) -> _Source:
    return _Source(tensor.shape, (_all_of(tensor, order),))


def _all_of(tensor: GgufTensor, order: _Order | None = None) -> _Piece:
    return _Piece(tensor, 0, _row_count(tensor), order)


def _split(name: str) -> tuple[str, str]:
    """Return a name without its last part, and that part."""
    stem, _, kind = name.rpartition(".")
    return stem, kind


def _foreign(file: GgufFile, name: str) -> ModelError:
    return ModelError(
        f"{file.path} has a tensor {ascii(name)[:80]}, which mmkv does not know in a "
        f"{file.architecture}; name the transformers checkpoint that it was made of"
    )
