"""Give the tensors of GGUF files by the names, shapes and order of rows that transformers has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.gguf.file import GgufFile, GgufTensor, parts_of, read_gguf
from mmkv.engine.model.int8 import BLOCK
from mmkv.engine.model.panel_files import MappedFile
from mmkv.engine.model.stored import Grid, StoredTensors

# llama.cpp's names and transformers', without ".weight" or ".bias".
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
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_COMPUTED = {"rope_freqs"}  # in the config already
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
_AT_ONCE = 2**24  # numbers that are made of their codes at a time
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Piece:
    """Rows of a stored tensor.

    Attributes:
        first, after: rows, of all but the last axis.
        heads: whose rows llama.cpp has in the order in which its rope turns them: the two numbers
            that turn together are neighbours there, and half a head apart here; 0: as here.
    """

    tensor: GgufTensor
    first: int
    after: int
    heads: int = 0


@dataclass(frozen=True)
class _Source:
    """What a tensor is made of.

    Attributes:
        pieces: one below the other; what they leave of the tensor is ``fill``.
        frames: pieces are frames of a convolution over time ``[out, channels, frames, h, w]``.
    """

    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    fill: float = 0.0
    frames: bool = False

    @property
    def kind(self) -> str:
        """Return ggml's name of the type; of several, all of them."""
        return "+".join(sorted({piece.tensor.kind for piece in self.pieces})) or "F32"

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
        text = _text_sources(opened[0], config.get_text_config(), prefix)
        self._sources = dict(text)
        if len(opened) > 1:
            self._sources |= _tower_sources(opened[1], config)
            rows = config.get_text_config().vocab_size
            for name in (f"{prefix}embed_tokens.weight", "lm_head.weight"):
                if (own := self._sources.get(name)) is not None and own.shape[0] == rows - 1:
                    # The token that stands for pictures, where the file has none.
                    self._sources[name] = replace(own, shape=(rows, *own.shape[1:]))
        self._mapped = {}

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
        blocks = torch.cat([self._raw(one, one.first, one.after) for one in source.pieces])
        for one in source.pieces:  # a copy was made of them
            self._map_of(one.tensor).forget(one.tensor.begin, one.tensor.nbytes)
        blocks = blocks.unflatten(-1, (-1, 2 + (BLOCK if source.kind == "Q8_0" else BLOCK // 2)))
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
                flat[at : at + rows.numel()].copy_(rows.reshape(-1))
                at += rows.numel()
        flat[at:].fill_(source.fill)

    def _rows(self, piece: _Piece) -> Iterator[Tensor]:
        """Yield the numbers of a piece, some rows at a time, ``[n, columns]``."""
        tensor = piece.tensor
        step = max(1, _AT_ONCE // tensor.shape[-1])
        if piece.heads and len(tensor.shape) > 1:  # whole heads
            each = (piece.after - piece.first) // piece.heads
            step = max(1, step // each) * each
        for first in range(piece.first, piece.after, step):
            raw = self._raw(piece, first, min(first + step, piece.after))
            yield _numbers(raw, tensor)
            self._map_of(piece.tensor).forget(
                tensor.begin + first * tensor.row_bytes, len(raw) * tensor.row_bytes
            )

    def _raw(self, piece: _Piece, first: int, after: int) -> Tensor:
        """Return rows as they are stored, uint8 ``[n, bytes of a row]``, in the order of here."""
        tensor = piece.tensor
        begin = tensor.begin + first * tensor.row_bytes
        mapped = self._map_of(piece.tensor)
        raw = mapped.tensor(begin, torch.uint8, (after - first, tensor.row_bytes))
        if not piece.heads:
            return raw
        if len(tensor.shape) == 1:  # a bias
            size = tensor.row_bytes // tensor.shape[0]
            return _halves(raw.view(-1, size), piece.heads).view(1, -1)
        return _halves(raw, piece.heads * (after - first) // (piece.after - piece.first))

    def _map_of(self, tensor: GgufTensor) -> MappedFile:
        if tensor.path not in self._mapped:
            with tensor.path.open("rb") as opened:
                self._mapped[tensor.path] = MappedFile(opened.fileno())
        return self._mapped[tensor.path]


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Put the rows of heads so that the two which turn together are half a head apart."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _numbers(raw: Tensor, tensor: GgufTensor) -> Tensor:
    """Return the numbers of stored rows, as floats."""
    if (dtype := _DTYPES.get(tensor.kind)) is not None:
        return raw.view(dtype)
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType(tensor.number)))


def _text_sources(file: GgufFile, config: Any, prefix: str) -> Iterator[tuple[str, _Source]]:
    """Yield the text model's tensors."""
    turned = {}
    if file.architecture == "llama":  # whose rope turns neighbours in llama.cpp
        turned = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in file.tensors.items():
        stem, kind = _split(name)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if stem in _COMPUTED:
            continue
        if stem == "output":
            yield f"lm_head.{kind}", _whole(tensor)
        elif stem in _TEXT:
            yield f"{prefix}{_TEXT[stem]}.{kind}", _whole(tensor)
        elif layer and layer[2] in _LAYER:
            heads = turned.get(layer[2], 0)
            _require_heads(file, tensor, heads)
            made = f"{prefix}layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
            yield made, _whole(tensor, heads)
        elif layer and layer[2] in _EXPERTS and len(tensor.shape) == 3:
            experts, rows, columns = tensor.shape
            for expert in range(experts):
                at = f"{prefix}layers.{layer[1]}.mlp.experts.{expert}.{_EXPERTS[layer[2]]}"
                piece = _Piece(tensor, expert * rows, (expert + 1) * rows)
                yield f"{at}.{kind}", _Source((rows, columns), (piece,))
        else:
            raise _foreign(file, name)


def _require_heads(file: GgufFile, tensor: GgufTensor, heads: int) -> None:
    rows = tensor.shape[0]
    if heads and rows % (2 * heads):
        raise ModelError(
            f"{file.path}: {tensor.name} has {rows} rows, not {heads} heads; get the original file"
        )


def _tower_sources(file: GgufFile, config: Any) -> dict[str, _Source]:
    """Return the tensors of the tower and the projector."""
    kind = config.model_type
    if kind == "llava":
        names, layers, prefix = _CLIP, _CLIP_LAYER, ""
        blocks = "vision_tower.vision_model.encoder.layers"
    elif kind == "qwen2_5_vl":
        names, layers, prefix, blocks = _QWEN25_VL, _QWEN25_VL_LAYER, "visual.", "blocks"
    else:
        names, layers, prefix, blocks = _QWEN3_VL, _QWEN3_VL_LAYER, "model.visual.", "blocks"
    levels = list(getattr(config.vision_config, "deepstack_visual_indexes", ()) or ())
    made: dict[str, _Source] = {}
    parts: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in file.tensors.items():
        stem, ending = _split(name)
        layer = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem)
        level = re.fullmatch(r"v\.deepstack\.(\d+)\.(\w+)", stem)
        if (stem == "v.patch_embd" and ending == "weight.1") or name == "v.patch_embd.weight.1":
            continue  # with its first frame
        if name == "v.class_embd":
            made[names[name]] = _Source((tensor.rows * tensor.shape[-1],), (_all_of(tensor),))
        elif stem in names:
            made[f"{prefix}{names[stem]}.{ending}"] = _whole(tensor)
        elif layer and layer[2] in layers:
            made[f"{prefix}{blocks}.{layer[1]}.{layers[layer[2]]}.{ending}"] = _whole(tensor)
        elif layer and "attn_qkv" in layers and layer[2] in ("attn_q", "attn_k", "attn_v"):
            at = f"{prefix}{blocks}.{layer[1]}.{layers['attn_qkv']}.{ending}"
            parts.setdefault(at, {})[layer[2]] = tensor
        elif level and level[2] in _LEVEL and int(level[1]) in levels:
            at = f"{prefix}deepstack_merger_list.{levels.index(int(level[1]))}"
            made[f"{at}.{_LEVEL[level[2]]}.{ending}"] = _whole(tensor)
        else:
            raise _foreign(file, name)
    for at, three in parts.items():
        made[at] = _joined(file, at, [three.get(f"attn_{part}") for part in "qkv"])
    if kind == "llava":
        made |= _unused_norm(made, config.vision_config.hidden_size)
        _name_by_shape(made, blocks)
    else:
        at = f"{prefix}{names['v.patch_embd']}.weight"
        made[at] = _frames(file)
    return made


def _unused_norm(made: dict[str, _Source], width: int) -> dict[str, _Source]:
    """Return the norm behind CLIP's last block, which LLaVA does not read, where it is left out."""
    at = _CLIP["v.post_ln"]
    unused = {f"{at}.weight": _Source((width,), (), 1.0), f"{at}.bias": _Source((width,), ())}
    return {name: source for name, source in unused.items() if name not in made}


def _name_by_shape(made: dict[str, _Source], blocks: str) -> None:
    """Exchange the two layers of MLPs where an older converter named each as the other."""
    first = made.get(f"{blocks}.0.mlp.fc1.bias")
    width = made[f"{_CLIP['v.class_embd']}"].shape[0]
    if (
        first is None
        or first.shape != (width,)
        or made[f"{blocks}.0.mlp.fc2.bias"].shape == (width,)
    ):
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
    shape = (sum(tensor.shape[0] for tensor in there), *there[0].shape[1:])
    return _Source(shape, tuple(_all_of(tensor) for tensor in there))


def _whole(tensor: GgufTensor, heads: int = 0) -> _Source:
    return _Source(tensor.shape, (_all_of(tensor, heads),))


def _all_of(tensor: GgufTensor, heads: int = 0) -> _Piece:
    return _Piece(tensor, 0, math.prod(tensor.shape[:-1]), heads)


def _split(name: str) -> tuple[str, str]:
    """Return a name without its last part, and that part."""
    stem, _, kind = name.rpartition(".")
    return stem, kind


def _foreign(file: GgufFile, name: str) -> ModelError:
    return ModelError(
        f"{file.path} has a tensor {ascii(name)[:80]}, which mmkv does not know in a "
        f"{file.architecture}; name the transformers checkpoint that it was made of"
    )
