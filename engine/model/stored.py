"""Read a checkpoint's weight files: its text weights without transformers' model, or others.

Of text weights, only what is stored exactly as transformers' own modules would name it is read: any
other set of names or shapes gives None, and the caller goes the long way, which knows every older
form.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.panel_files import MappedFile, PanelStore
from mmkv.engine.model.panels import Rows
from mmkv.engine.model.product import INTEGERS, Matrix, WeightForm, equal, multiply
from mmkv.engine.model.rounded import BLOCK
from mmkv.engine.model.spec import DecoderSpec, DeltaSpec, Routing, sparse_layers
from mmkv.engine.model.state_layer import DeltaLayer
from mmkv.engine.model.weights import (
    DecoderWeights,
    LayerWeights,
    gain_of,
    halves_order,
    head_gains,
    norms_of,
)

_CPU = torch.device("cpu")
_FLOATS = {"F16", "BF16", "F32", "F64"}
_STORED_AS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
# What is read into memory of its own; safetensors maps all others.
_READ_AS = _STORED_AS | {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
}
_SHORT = _READ_AS | {torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}
# Buffers that older checkpoints hold and that follow from the config.
COMPUTED = ("rotary_emb.inv_freq",)
_STACK = "experts.gate_up_proj"
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class StoredShapes:
    """Which parts a layer of one type of text model has, besides its matrices.

    Attributes:
        output_gate: ``q_proj`` makes a gate behind each query.
        fused, fused_mlp: q, k, v, or gate and up, are stored as one matrix.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    fused: bool = False
    fused_mlp: bool = False

    @classmethod
    def of(cls, config: Any) -> StoredShapes | None:
        """Return the layout of transformers' module for this config; None for other types."""
        bias = bool(getattr(config, "attention_bias", False))
        match config.model_type:
            case "llama":
                mlp = bool(getattr(config, "mlp_bias", False))
                return cls(qkv_bias=bias, out_bias=bias, mlp_bias=mlp)
            case "mistral" | "ministral" | "ministral3":
                return cls()
            case "qwen2" | "qwen2_vl_text" | "qwen2_5_vl_text":
                return cls(qkv_bias=True)
            case "qwen3" | "qwen3_vl_text" | "qwen3_moe" | "qwen3_vl_moe_text":
                return cls(qkv_bias=bias, out_bias=bias, qk_norm=True)
            case "qwen3_5_text" | "qwen3_5_moe_text":
                return cls(qkv_bias=bias, out_bias=bias, qk_norm=True, output_gate=True)
            case "gemma3_text":
                return cls(qkv_bias=bias, out_bias=bias, qk_norm=True)
            case "glm4":
                return cls(qkv_bias=bias, fused_mlp=True)
            case "glm4v_text":
                return cls(qkv_bias=True, fused_mlp=True)
            case "phi3":
                return cls(fused=True, fused_mlp=True)
        return None


class StoredTensors:
    """The tensors of a checkpoint's files, read when asked for.

    Subclasses show other files, or the tensors of another one changed; they override ``names``,
    :meth:`shape`, :meth:`kind`, :meth:`tensor`, :meth:`in_place` and :meth:`grid`.

    Args:
        files: safetensors files; a name may stand in one of them only.

    Attributes:
        settings: all else that the numbers depend on, beside the files.
        note: a line on what of the files is not used, or None.
    """

    settings: str = ""
    note: str | None = None

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._home: dict[str, Any] = {}
        self._file: dict[str, Path] = {}
        for path in files:
            opened = safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118
                self._home[name], self._file[name] = opened, path
        self._begin: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._mapped: dict[Path, MappedFile] = {}

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._home[name].get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """Return the dtype that a tensor is stored in, as safetensors names it."""
        return str(self._home[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU; whoever writes to it must copy it first."""
        found: Tensor = self._home[name].get_tensor(name)
        return found

    def in_place(self, name: str) -> bool:
        """Whether its numbers lie in a file one after the other, as they are."""
        return name in self._file

    def grid(self, name: str) -> Grid | None:
        """Return a matrix as the whole numbers times steps that it is, None where it is not."""
        return None

    @property
    def numbers(self) -> int:
        """Count the numbers of all tensors."""
        return self.numbers_of(self.names)

    def numbers_of(self, names: Iterable[str]) -> int:
        """Count the numbers of some tensors."""
        return sum(math.prod(self.shape(name)) for name in names)

    def is_float(self, name: str) -> bool:
        """Whether it holds plain floating-point numbers."""
        return self.kind(name) in _FLOATS

    def kinds(self, names: Iterable[str]) -> set[str]:
        """Return the dtypes that tensors are stored in, as safetensors names them."""
        return {self.kind(name) for name in names}

    def one_dtype(self, names: Iterable[str]) -> torch.dtype | None:
        """Return the dtype that all of these are stored in, None where they differ."""
        kinds = self.kinds(names)
        return next((dtype for dtype, kind in _STORED_AS.items() if kinds == {kind}), None)

    def read_as_stored(self, name: str) -> Tensor:
        """Return a tensor of any shape in the file's dtype, on the CPU, in memory of its own."""
        kind, shape = self.kind(name), self.shape(name)
        dtype = next((dtype for dtype, short in _READ_AS.items() if short == kind), None)
        if dtype is None or not math.prod(shape) or not self.in_place(name):
            return self.tensor(name).clone()
        made = torch.empty(math.prod(shape), dtype=dtype)
        self._read_into(name, made)
        return made.view(shape)

    def read(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return tensors, one below the other along the first axis, in memory of their own."""
        shapes = [self.shape(name) for name in names]
        kinds = self.kinds(names)
        rows = [shape[0] for shape in shapes]
        made = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=device)
        for name, part in zip(names, made.split(rows), strict=True):
            if device.type == "cpu" and kinds == {_STORED_AS.get(dtype)} and self.in_place(name):
                self._read_into(name, part)
            else:
                part.copy_(self.tensor(name))
        return made

    def read_matrix(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        holding: WeightForm | None,
        part: str,
    ) -> Matrix:
        """Do as :meth:`read`, and hold the float32 matrix as ``holding`` says, if there is one.

        What has more than two axes is then a matrix of all but the first of them. What is whole
        numbers already stays the same ones where the form has room for them.

        Panels are packed from the mapped file, which is let go of at once: the process would seem
        to hold both.

        Args:
            part: its name, as :meth:`WeightForm.bits` takes it.
        """
        if holding is None:
            return self.read(names, dtype, device)
        if (whole := self._integers(names, holding.bits(part))) is not None:
            return whole
        exact = self.kinds(names) == {"BF16"}
        if not (exact and holding.packs and all(map(self.in_place, names))):
            wide = self.read(names, torch.bfloat16 if exact else dtype, device)
            return holding.hold(wide.flatten(1), part)
        mapped = (self._mapped_at(name).tensor(*self._place(name)) for name in names)
        parts = [tensor.flatten(1) for tensor in mapped]
        held = holding.hold(parts[0] if len(parts) == 1 else Rows(parts), part)
        for name, tensor in zip(names, parts, strict=True):
            self._mapped_at(name).forget(self._place(name)[0], tensor.nbytes)
        return held

    def _integers(self, names: Sequence[str], bits: int | None) -> Matrix | None:
        """Return the whole numbers that these are, None where they do not fit so many bits."""
        if bits is None:
            return None
        grids = [grid for name in names if (grid := self.grid(name)) is not None]
        if len(grids) < len(names) or not all(grid.fits(bits) for grid in grids):
            return None
        codes, steps = zip(*(grid.blocks() for grid in grids), strict=True)
        return INTEGERS[bits].kept(torch.cat(codes), torch.cat(steps))

    def _mapped_at(self, name: str) -> MappedFile:
        path = self._file[name]
        if path not in self._mapped:
            with path.open("rb") as file:
                self._mapped[path] = MappedFile(file.fileno())
        return self._mapped[path]

    def _place(self, name: str) -> tuple[int, torch.dtype, tuple[int, ...]]:
        """Return where a tensor of bfloat16 begins in its file, its dtype and shape."""
        path = self._file[name]
        if path not in self._begin:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._begin[path] = 8 + size, json.loads(file.read(size))
        begin, header = self._begin[path]
        return begin + header[name]["data_offsets"][0], torch.bfloat16, self.shape(name)

    def _read_into(self, name: str, part: Tensor) -> None:
        """Fill ``part`` from the file. Through a mapping, the process would seem to hold both."""
        path = self._file[name]
        with path.open("rb") as file:
            file.seek(self._place(name)[0])
            read = file.readinto(part.view(torch.uint8).numpy().data)
        if read != part.nbytes:
            raise EOFError(f"{path.name} ends in {name}")

    def read_stack(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return matrices ``shape [E, rows, columns]`` that may be stored transposed."""
        stored = self.tensor(name)
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.copy_(stored if stored.shape == made.shape else stored.transpose(1, 2))


class PickledTensors(StoredTensors):
    """The tensors of pickles: files of ``torch.save``, mapped, of which tensors alone are read.

    Args:
        files: a name may stand in one of them only.

    Raises:
        ModelError: a file holds other things than tensors, such as code, or is damaged or older.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(())
        self.files = tuple(files)
        for path in files:
            self._home |= _unpickled(path)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`StoredTensors`."""
        return tuple(self._home[name].shape)

    def kind(self, name: str) -> str:
        """See :class:`StoredTensors`."""
        return _SHORT.get(self._home[name].dtype, "?")

    def tensor(self, name: str) -> Tensor:
        """See :class:`StoredTensors`."""
        found: Tensor = self._home[name]
        return found


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of ``torch.save`` by their names; none of its code runs."""
    remedy = "take the checkpoint's safetensors, or ask its maker for them"
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                if any(part.compress_type for part in parts.infolist()):
                    raise ModelError(
                        f"{path.name} is compressed, which torch.save never does, and may fill all "
                        f"of the memory; {remedy}"
                    )
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path.name} holds more than tensors, which could run code, and is not read; {remedy}"
        ) from error
    except (RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{path.name} is damaged, or of a torch before 1.6, and cannot be read; {remedy}"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(part, Tensor) and _is_plain(part)
        for name, part in found.items()
    ):
        raise ModelError(f"{path.name} holds no plain tensors by their names; {remedy}")
    return {name: part.detach() for name, part in found.items()}


def _is_plain(part: Tensor) -> bool:
    """Whether real numbers are there, and all of them: some views repeat a few without end."""
    there = part.layout == torch.strided and part.device == _CPU and not part.is_complex()
    return there and part.nbytes <= part.untyped_storage().nbytes()


class ChangedTensors(StoredTensors):
    """The tensors of another one: those of ``self.changed`` are made, all others are its own.

    Attributes:
        below: the other one.
        changed: names and shapes of what is made, and safetensors' names of their dtypes.
        hidden: names of ``below`` that are not shown.
    """

    def __init__(self, below: StoredTensors, files: Sequence[Path] = ()) -> None:
        super().__init__(())
        self.below, self.files = below, (*below.files, *files)
        self.settings, self.note = below.settings, below.note
        self.changed: dict[str, tuple[tuple[int, ...], str]] = {}
        self.hidden: set[str] = set()

    @property
    def names(self) -> set[str]:
        """See :class:`StoredTensors`."""
        return (self.below.names - self.hidden) | self.changed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`StoredTensors`."""
        return self.changed[name][0] if name in self.changed else self.below.shape(name)

    def kind(self, name: str) -> str:
        """See :class:`StoredTensors`."""
        return self.changed[name][1] if name in self.changed else self.below.kind(name)

    def tensor(self, name: str) -> Tensor:
        """See :class:`StoredTensors`."""
        return self.made(name) if name in self.changed else self.below.tensor(name)

    def in_place(self, name: str) -> bool:
        """See :class:`StoredTensors`."""
        return name not in self.changed and self.below.in_place(name)

    def grid(self, name: str) -> Grid | None:
        """See :class:`StoredTensors`."""
        return None if name in self.changed else self.below.grid(name)

    @abstractmethod
    def made(self, name: str) -> Tensor:
        """Return a tensor of ``changed``."""

    def _mapped_at(self, name: str) -> MappedFile:
        return self.below._mapped_at(name)

    def _place(self, name: str) -> tuple[int, torch.dtype, tuple[int, ...]]:
        return self.below._place(name)

    def _read_into(self, name: str, part: Tensor) -> None:
        self.below._read_into(name, part)


class HalvedTensors(ChangedTensors):
    """Queries and keys that are rotated in pairs of features, with their rows in the usual order:
    :attr:`mmkv.engine.model.spec.DecoderSpec.paired`.

    Args:
        prefix: of the text model's tensors.
    """

    def __init__(self, below: StoredTensors, prefix: str, spec: DecoderSpec) -> None:
        super().__init__(below)
        parts = {"self_attn.q_proj.": spec.num_heads, "self_attn.k_proj.": spec.num_kv_heads}
        self._order: dict[str, Tensor] = {}
        for name in below.names:
            heads = next((count for part, count in parts.items() if part in name), None)
            if name.startswith(prefix) and heads is not None and below.is_float(name):
                self.changed[name] = below.shape(name), below.kind(name)
                self._order[name] = halves_order(spec, heads)

    def made(self, name: str) -> Tensor:
        """See :class:`ChangedTensors`."""
        return self.below.tensor(name)[self._order[name]]


class Grid:
    """A matrix ``[out, in]`` of whole numbers times steps.

    Args:
        codes: int8 ``[out, in]``. steps: float32 ``[out, groups]``: one for every
            ``in / groups`` columns of a row.
    """

    def __init__(self, codes: Tensor, steps: Tensor) -> None:
        self.codes, self.steps = codes, steps

    def fits(self, bits: int) -> bool:
        """Whether a form of so many bits has these codes, and a step for each group."""
        groups = self.steps.shape[1]
        most = 2 ** (bits - 1) - 1
        least = -most if bits == 8 else -most - 1  # C has no -128
        low, high = self.codes.aminmax()
        blocks = self.codes.shape[1] % (BLOCK * groups) == 0
        return blocks and least <= int(low) and int(high) <= most

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Return codes ``[out, blocks, 32]`` and the step of each block."""
        codes = self.codes.unflatten(1, (-1, BLOCK))
        return codes, self.steps.repeat_interleave(codes.shape[1] // self.steps.shape[1], 1)


@torch.no_grad()
def read_text_weights(
    stored: StoredTensors,
    config: Any,
    spec: DecoderSpec,
    places: Sequence[tuple[str, str]],
    tied: bool,
    dtype: torch.dtype,
    device: torch.device,
    holding: WeightForm | None,
    panels: PanelStore,
) -> DecoderWeights | None:
    """Read the text weights in ``dtype`` onto ``device``; fused matrices are written in place.

    Args:
        config: of the text model.
        places: where text weights may stand: (prefix of the text model, name of the head).
        tied: the head is the embedding, unless another one is stored.
        holding: how float32 matrices are held; None: in ``dtype``.
        panels: where they are, if they were packed before.

    Returns:
        None when a tensor is missing, has another shape or is none of this model's.
    """
    layout, place = StoredShapes.of(config), text_place(stored, places)
    if layout is None or place is None:
        return None
    prefix, head = place
    if spec.paired:
        stored = HalvedTensors(stored, prefix, spec)
    # transformers saves the matrices of each expert; older checkpoints stack them.
    stacked = any(name.endswith(_STACK) for name in stored.names)
    shapes = _shapes(layout, config, spec, prefix, stacked)
    if head in stored.names or not tied:
        shapes[head] = (spec.vocab_size, spec.hidden_size)
    if not _holds(stored, shapes, prefix, head):
        return None
    text = _TextReader(stored, layout, spec, prefix, shapes, dtype, device, holding, panels)
    embed = text.matrix("embed_tokens.weight")
    output = text.held("lm_head", head) if head in shapes else embed
    if tied and output is not embed and panels.fact("tied", lambda: equal(output, embed)):
        output = embed
    layers = [text.layer(index, sparse) for index, sparse in enumerate(sparse_layers(config))]
    norm = gain_of(text.read("norm.weight"), spec)
    made = DecoderWeights(embed, layers, norm, output, multiply)
    if holding is not None:
        made.product, made.form = holding.product, holding.name
    made.gains_apart = None if norm.dtype == dtype else dtype
    return made


def text_place(stored: StoredTensors, places: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return at which of ``places`` the files hold the text model, None where at none."""
    there = (place for place in places if f"{place[0]}embed_tokens.weight" in stored.names)
    return next(there, None)


def _holds(
    stored: StoredTensors, shapes: Mapping[str, tuple[int, ...]], prefix: str, head: str
) -> bool:
    """Whether the files have exactly these tensors of the text model, as numbers."""
    present = {
        name
        for name in stored.names
        if (name.startswith(prefix) or name == head) and not name.endswith(COMPUTED)
    }
    # GPTQ's tools write biases of zeros to layers that have none.
    extra = {name for name in present - shapes.keys() if name.endswith(".bias")}
    present -= {name for name in extra if not stored.tensor(name).any()}
    return present == shapes.keys() and all(
        stored.shape(name) in (shape, _turned(shape)) and stored.is_float(name)
        for name, shape in shapes.items()
    )


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of transposed matrices where some are stacked, else the shape itself."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape


@dataclass(frozen=True)
class _TextReader:
    """Reads the layers of a text model.

    Attributes:
        prefix: of all names that its methods are given.
        shapes: of all tensors, by their whole names.
        holding, panels: as of :func:`read_text_weights`.
    """

    stored: StoredTensors
    layout: StoredShapes
    spec: DecoderSpec
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    holding: WeightForm | None
    panels: PanelStore

    def read(self, *names: str, kind: torch.dtype | None = None) -> Tensor:
        """Return tensors, one below the other."""
        whole = [f"{self.prefix}{name}" for name in names]
        return self.stored.read(whole, kind or self.dtype, self.device)

    def matrix(self, *names: str) -> Matrix:
        """Return matrices, one below the other, in the form that they are held in."""
        return self.held(names[0], *(f"{self.prefix}{name}" for name in names))

    def held(self, part: str, *names: str) -> Matrix:
        """Do as :meth:`matrix` of whole names; ``part`` is as :meth:`WeightForm.bits` takes it."""

        def make() -> Matrix:
            # What is rounded is the same, whatever the states are and wherever the model runs.
            whole = self.holding is None
            wide = (self.dtype, self.device) if whole else (torch.float32, _CPU)
            return self.stored.read_matrix(names, *wide, self.holding, part)

        made = self.panels.matrix("+".join(names), make)
        rows = sum(self.shapes[name][0] for name in names)
        fits = tuple(made.shape) == (rows, *self.shapes[names[0]][1:])
        return (made if fits else make()).to(self.device)

    def layer(self, index: int, sparse: bool) -> LayerWeights:
        """Return a layer; ``sparse``: it is a mixture of experts."""
        at, attends = f"layers.{index}.", self.spec.entry_index[index] is not None
        routing = self.spec.routing if sparse else None
        mlp = self._dense(f"{at}mlp.") if routing is None else self._experts(f"{at}mlp.", routing)
        mixing = self._attention(f"{at}self_attn.") if attends else self._delta(f"{at}linear_attn.")
        gains = [gain_of(self.read(f"{at}{name}.weight"), self.spec) for name in self.spec.norms]
        return LayerWeights(**norms_of(gains), **mlp, **mixing)

    def _dense(self, mlp: str) -> dict[str, Any]:
        wide = ("gate_up_proj",) if self.layout.fused_mlp else _GATE_UP
        biased = self.layout.mlp_bias
        return {
            "gate_up": self.matrix(*(f"{mlp}{part}.weight" for part in wide)),
            "gate_up_bias": self._biases(mlp, *wide) if biased else None,
            "down": self.matrix(f"{mlp}down_proj.weight"),
            "down_bias": self._biases(mlp, "down_proj") if biased else None,
        }

    def _biases(self, where: str, *parts: str) -> Tensor:
        return self.read(*(f"{where}{part}.bias" for part in parts))

    def _experts(self, mlp: str, routing: Routing) -> dict[str, Any]:
        """Return a mixture of experts, with the one that every token goes through, if any."""
        each, down = routing.experts, f"{mlp}experts.down_proj"
        made: dict[str, Any] = {"gate_up_bias": None, "down_bias": None}
        made["router"] = self.read(f"{mlp}gate.weight")
        if f"{self.prefix}{down}" in self.shapes:
            made |= {"gate_up": self._stack(f"{mlp}{_STACK}"), "down": self._stack(down)}
        else:
            pairs = [(e, part) for e in range(each) for part in _GATE_UP]
            gate_up = self.read(*(f"{mlp}experts.{e}.{part}.weight" for e, part in pairs))
            made["gate_up"] = gate_up.unflatten(0, (each, -1))
            downs = self.read(*(f"{mlp}experts.{e}.down_proj.weight" for e in range(each)))
            made["down"] = downs.unflatten(0, (each, -1))
        if routing.shared:
            own = f"{mlp}shared_expert."
            made["shared_gate"] = self.read(f"{mlp}shared_expert_gate.weight")
            made["shared_gate_up"] = self.read(f"{own}gate_proj.weight", f"{own}up_proj.weight")
            made["shared_down"] = self.read(f"{own}down_proj.weight")
        return made

    def _stack(self, name: str) -> Tensor:
        whole = f"{self.prefix}{name}"
        return self.stored.read_stack(whole, self.shapes[whole], self.dtype, self.device)

    def _attention(self, own: str) -> dict[str, Any]:
        layout, qk_norm = self.layout, None
        qkv = ("qkv_proj",) if layout.fused else ("q_proj", "k_proj", "v_proj")
        if layout.qk_norm:
            query, key = (self.read(f"{own}{part}_norm.weight") for part in "qk")
            qk_norm = head_gains(query, key, self.spec)
        return {
            "qkv": self.matrix(*(f"{own}{part}.weight" for part in qkv)),
            "qkv_bias": self._biases(own, *qkv) if layout.qkv_bias else None,
            "qk_norm": qk_norm,
            "out": self.matrix(f"{own}o_proj.weight"),
            "out_bias": self._biases(own, "o_proj") if layout.out_bias else None,
        }

    def _delta(self, own: str) -> dict[str, Any]:
        """Return what a layer of the gated delta rule has in an attention's place."""
        delta = self.spec.delta
        assert delta is not None
        layer = DeltaLayer(
            delta,
            self.spec.rms_eps,
            conv=self.read(f"{own}conv1d.weight")[:, 0],
            rates=self.read(f"{own}in_proj_b.weight", f"{own}in_proj_a.weight"),
            log_decay=self.read(f"{own}A_log", kind=torch.float32),
            step_bias=self.read(f"{own}dt_bias", kind=torch.float32),
            gain=self.read(f"{own}norm.weight"),
        )
        return {
            "qkv": self.matrix(f"{own}in_proj_qkv.weight", f"{own}in_proj_z.weight"),
            "qkv_bias": None,
            "qk_norm": None,
            "out": self.matrix(f"{own}out_proj.weight"),
            "out_bias": None,
            "state_layer": layer,
        }


def _shapes(
    layout: StoredShapes, config: Any, spec: DecoderSpec, prefix: str, stacked: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the text model, the head left out."""
    hidden = spec.hidden_size
    inner = getattr(config, "intermediate_size", 0)  # some have experts alone
    norms: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in spec.norms}
    attention = norms | _attention_shapes(layout, spec)
    wide = {"gate_up_proj": 2 * inner} if layout.fused_mlp else dict.fromkeys(_GATE_UP, inner)
    dense = _linear_shapes("mlp.", wide, hidden, layout.mlp_bias)
    dense |= _linear_shapes("mlp.", {"down_proj": hidden}, inner, layout.mlp_bias)
    sparse = {} if spec.routing is None else _sparse_shapes(spec.routing, hidden, stacked)
    linear = {} if spec.delta is None else norms | _delta_shapes(spec.delta, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (spec.vocab_size, hidden),
        f"{prefix}norm.weight": (hidden,),
    }
    for index, mixed in enumerate(sparse_layers(config)):
        layer = linear if spec.entry_index[index] is None else attention
        for name, shape in (layer | (sparse if mixed else dense)).items():
            shapes[f"{prefix}layers.{index}.{name}"] = shape
    return shapes


def _linear_shapes(
    where: str, rows: Mapping[str, int], columns: int, bias: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of linear layers of so many rows each."""
    made: dict[str, tuple[int, ...]] = {
        f"{where}{name}.weight": (count, columns) for name, count in rows.items()
    }
    return made | ({f"{where}{name}.bias": (n,) for name, n in rows.items()} if bias else {})


def _attention_shapes(layout: StoredShapes, spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    hidden, dim = spec.hidden_size, spec.head_dim
    query, pair = spec.num_heads * dim, spec.num_kv_heads * dim
    asked = 2 * query if layout.output_gate else query
    rows = {"q_proj": asked, "k_proj": pair, "v_proj": pair}
    if layout.fused:
        rows = {"qkv_proj": query + 2 * pair}
    shapes = _linear_shapes("self_attn.", rows, hidden, layout.qkv_bias)
    shapes |= _linear_shapes("self_attn.", {"o_proj": hidden}, query, layout.out_bias)
    gains = ("q_norm", "k_norm") if layout.qk_norm else ()
    return shapes | {f"self_attn.{name}.weight": (dim,) for name in gains}


def _delta_shapes(delta: DeltaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer of the gated delta rule."""
    heads = delta.value_heads
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (delta.channels, hidden),
        "in_proj_z.weight": (delta.value_width, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (delta.channels, 1, delta.kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (delta.value_dim,),
        "out_proj.weight": (hidden, delta.value_width),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _sparse_shapes(routing: Routing, hidden: int, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixture of experts."""
    experts, inner = routing.experts, routing.inner
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    if shared := routing.shared:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes |= {f"mlp.shared_expert.{p}_proj.weight": (shared, hidden) for p in ("gate", "up")}
        shapes["mlp.shared_expert.down_proj.weight"] = (hidden, shared)
    if stacked:
        shapes[f"mlp.{_STACK}"] = (experts, 2 * inner, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, inner)
        return shapes
    for e in range(experts):
        shapes |= {f"mlp.experts.{e}.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        shapes[f"mlp.experts.{e}.down_proj.weight"] = (hidden, inner)
    return shapes
