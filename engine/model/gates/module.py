"""Retention gates: ``z = w_g . Proj_{l,h}(x) + b_g``, ``log_beta = logsigmoid(z)``.

Source: DBTrimKV, arXiv 2605.09649, section 4. Every published layout is the same shape of
computation: a small SiLU trunk per layer and a linear readout to one number per KV head. They
differ in the trunk's depth and in what is tied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.errors import GateError
from mmkv.engine.model.panel_files import PanelStore, with_panels
from mmkv.engine.model.product import Kernels, Matrix, Product, WeightForm, multiply, plain
from mmkv.engine.model.spec import DecoderSpec


@dataclass
class LayerGate:
    """The gate of one layer.

    Attributes:
        trunk: ``(weight [out, in], bias [out])`` pairs, each followed by SiLU.
        readout: ``[H, d_last]`` float32; bias: ``[H]`` float32.
        product: multiplies by the trunk's weights.
    """

    trunk: Sequence[tuple[Matrix, Tensor]]
    readout: Tensor
    bias: Tensor
    product: Product = multiply

    def logits(self, hidden: Tensor) -> Tensor:
        """z for ``hidden [T, d]``: float32 ``[T, H]``. The trunk runs in its own dtype."""
        x = hidden
        for weight, bias in self.trunk:
            x = F.silu(self.product(x, weight, bias))
        return F.linear(x.float(), self.readout, self.bias)


@dataclass
class Gates:
    """The gates of a whole model.

    Attributes:
        kind: ``tied`` (ours, DBTrimKV's tying), ``rg`` or ``rg10`` (published layouts).
        tensors: the parameters as stored in a gate file, name -> float tensor.
        info: what ``gates.json`` says beside the sizes (base model, settings, results).
        exact: the same before :meth:`in_bf16`; None: these are.
        stages: weights ``[L, out, in]`` and biases ``[L, 1, out]`` of the trunks of all layers,
            which are parts of these: on a GPU, where one product for all is the faster.
        file: where they were read from, and what :func:`identity` said of it just before; None:
            nothing is to be kept beside it.
    """

    kind: str
    layers: list[LayerGate]
    tensors: dict[str, Tensor]
    info: dict[str, object] = field(default_factory=dict)
    exact: Gates | None = None
    stages: Sequence[tuple[Tensor, Tensor]] = ()
    file: tuple[Path, str] | None = None

    def logits(self, layer: int, hidden: Tensor) -> Tensor:
        """z of one layer: ``hidden [T, d]`` -> float32 ``[T, H]``."""
        return self.layers[layer].logits(hidden)

    def log_beta(self, layer: int, hidden: Tensor) -> Tensor:
        """``logsigmoid(z)``, float32 ``[T, H]``. ``hidden`` is the output of input_layernorm."""
        return F.logsigmoid(self.logits(layer, hidden))

    def before_readout(self, hidden: Sequence[Tensor]) -> Tensor:
        """Compute the last product of each layer's trunk, ``[L, T, d_last]``, before its SiLU.

        Args:
            hidden: ``[T, d]`` of each layer.
        """
        if self.stages and self.stages[0][0].dtype == hidden[0].dtype:
            x = torch.stack(list(hidden))
            for index, (weight, bias) in enumerate(self.stages):
                x = torch.baddbmm(bias, F.silu(x) if index else x, weight.mT)
            return x
        made = []
        for gate, x in zip(self.layers, hidden, strict=True):
            for index, stage in enumerate(gate.trunk):
                x = gate.product(F.silu(x) if index else x, *stage)
            made.append(x)
        return torch.stack(made)

    def fingerprint(self) -> str:
        """Hash every weight and bias as stored, in a few hex digits."""
        if self.exact is not None:
            return self.exact.fingerprint()
        digest = hashlib.sha256()
        for gate in self.layers:
            stages = [part for pair in gate.trunk for part in pair if isinstance(part, Tensor)]
            for tensor in (*stages, gate.readout, gate.bias):
                digest.update(tensor.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def to(self, device: torch.device, dtype: torch.dtype) -> Gates:
        """Trunks in the model's dtype; readout, bias and all that follows stay float32.

        A bias near 18 leaves ``1 - beta = 1.5e-8``: bfloat16, with steps of 0.125 there, would
        blur exactly the entries worth keeping.
        """
        if self.exact is not None:
            return self.exact.to(device, dtype)
        layers = [
            LayerGate(
                [(plain(w).to(device, dtype), b.to(device, dtype)) for w, b in gate.trunk],
                gate.readout.to(device, torch.float32),
                gate.bias.to(device, torch.float32),
            )
            for gate in self.layers
        ]
        stages = _together(layers) if device.type == "cuda" else ()
        return Gates(self.kind, layers, self.tensors, self.info, stages=stages)

    def in_bf16(self, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Gates:
        """Do as :meth:`to`, with trunks rounded to bfloat16, and read as ``kernels`` do it.

        States stay float32: rounding them, too, would make ten times as much of the last bits that
        two backends differ in. No trunk is widened on the way. On a CPU large ones are kept packed,
        and mapped, as the model's weights are (:func:`with_panels`).
        """
        if self.exact is not None:
            return self.exact.in_bf16(kernels, device, dtype)
        holding = WeightForm("bf16", kernels)
        read = partial(self._in_bf16, holding, device, dtype)
        if device.type != "cpu" or self.file is None or not holding.packs:
            return read(PanelStore())
        path, seen = self.file
        count = sum(math.prod(weight.shape) for gate in self.layers for weight, _ in gate.trunk)
        size = holding.bytes_of(count)
        model = path.parent.name
        made, _ = with_panels(read, [path], model, "bf16", count, size, part="gates", seen=seen)
        assert made is not None
        return made

    def _in_bf16(
        self, holding: WeightForm, device: torch.device, dtype: torch.dtype, store: PanelStore
    ) -> Gates:
        layers, product = [], holding.kernels.product or multiply
        placed = self if device.type == "cpu" else self.to(device, dtype)
        for index, gate in enumerate(placed.layers):
            held = []
            for stage, (weight, bias) in enumerate(gate.trunk):
                pack = partial(holding.hold, plain(weight))
                held.append((store.matrix(f"{index}.{stage}", pack), bias.to(dtype)))
            layers.append(LayerGate(held, gate.readout.float(), gate.bias.float(), product))
        stages = placed.stages if all(w.dtype == torch.bfloat16 for w, _ in placed.stages) else ()
        return Gates(self.kind, layers, self.tensors, self.info, self, stages)


def _together(layers: Sequence[LayerGate]) -> list[tuple[Tensor, Tensor]]:
    """Have the trunks lie together; return :attr:`Gates.stages`, none where shapes differ."""
    if len({tuple(weight.shape for weight, _ in gate.trunk) for gate in layers}) > 1:
        return []
    stages = []
    for each in zip(*(gate.trunk for gate in layers), strict=True):
        weights, biases = zip(*each, strict=True)
        stages.append((torch.stack([plain(one) for one in weights]), torch.stack(biases)[:, None]))
    for index, gate in enumerate(layers):
        gate.trunk = [(weight[index], bias[index, 0]) for weight, bias in stages]
    return stages


def tied_gates(
    tensors: dict[str, Tensor], spec: DecoderSpec, info: dict[str, object] | None = None
) -> Gates:
    """Gates in our own layout, tied as DBTrimKV ties them or less.

    Names: ``layers.{l}.linear1.weight [d_g, d]``, ``.linear1.bias``, ``.linear2.weight
    [d_g, d_g]``, ``.linear2.bias``. KV head h reads the h-th of H equal blocks (of width
    b = d_g / H) of the trunk's output, ``Proj_{l,h}``, through the readout ``(w_g, b_g)``:

    - ``readout.weight [b]``, ``readout.bias []``: one for all layers and heads (DBTrimKV);
    - ``[L, b]``, ``[L]``: one per layer;
    - ``[L, H, b]``, ``[L, H]``: one per layer and head.

    Gradients flow to ``tensors``: training builds its gates here too.

    Raises:
        GateError: when tensors are missing or do not have these shapes.
    """
    heads, layers = spec.num_kv_heads, []
    weight = _get(tensors, "readout.weight")
    block = weight.shape[-1] if weight.dim() else 0
    width = block * heads
    tying = tying_of(weight)
    if (
        not block
        or tying is None
        or weight.shape[:-1] not in ((), (spec.entry_layers,), (spec.entry_layers, heads))
    ):
        raise GateError(
            f"gate tensor 'readout.weight' is {list(weight.shape)}, the model has "
            f"{spec.entry_layers} layers of {heads} KV heads; use gates trained for this model"
        )
    bias = _get(tensors, "readout.bias", tuple(weight.shape[:-1]))
    every = {"paper": (1, 1), "layer": (-1, 1), "none": (-1, heads)}[tying]
    weights = weight.float().reshape(*every, block).expand(spec.entry_layers, heads, block)
    biases = bias.float().reshape(*every).expand(spec.entry_layers, heads)
    for index in range(spec.entry_layers):
        # Row h holds its readout in block h: the per-head dot products are one small matmul.
        readout = torch.block_diag(*weights[index].split(1))
        name = f"layers.{index}"
        first = _get(tensors, f"{name}.linear1.weight", (width, spec.hidden_size))
        second = _get(tensors, f"{name}.linear2.weight", (width, width))
        trunk = [
            (first, _get(tensors, f"{name}.linear1.bias", (width,))),
            (second, _get(tensors, f"{name}.linear2.bias", (width,))),
        ]
        layers.append(LayerGate(trunk, readout, biases[index].contiguous()))
    extra = sum(name.startswith("layers.") for name in tensors) - 4 * spec.entry_layers
    if extra:
        raise GateError(
            f"the gates hold {extra // 4 + spec.entry_layers} layers, the model has "
            f"{spec.entry_layers}; use gates trained for this model"
        )
    return Gates("tied", layers, tensors, info or {})


def tying_of(readout: Tensor) -> str | None:
    """``paper``, ``layer`` or ``none`` by the shape of ``readout.weight``; None for no such."""
    return {1: "paper", 2: "layer", 3: "none"}.get(readout.dim())


def make_random_gates(spec: DecoderSpec, seed: int = 0, d_gate: int = 64) -> Gates:
    """Untrained gates for tests and speed runs: log_beta spreads over about -8 .. -1e-4.

    ``d_gate`` is rounded up to a multiple of the KV heads.
    """
    heads, hidden = spec.num_kv_heads, spec.hidden_size
    width = math.ceil(d_gate / heads) * heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    block = width // heads
    # SiLU shrinks a unit normal to about 0.6; the readout brings z to a spread of about 4.
    tensors = {"readout.weight": normal(block, std=4.0 / (0.5 * math.sqrt(block)))}
    tensors["readout.bias"] = torch.tensor(1.0)
    for index in range(spec.entry_layers):
        name = f"layers.{index}"
        tensors[f"{name}.linear1.weight"] = normal(width, hidden, std=1.5 / math.sqrt(hidden))
        tensors[f"{name}.linear1.bias"] = torch.zeros(width)
        tensors[f"{name}.linear2.weight"] = normal(width, width, std=1.5 / math.sqrt(width))
        tensors[f"{name}.linear2.bias"] = torch.zeros(width)
    return tied_gates(tensors, spec, {"trained": False, "seed": seed})


def _get(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if name not in tensors:
        raise GateError(f"the gates lack the tensor {name!r}; use gates trained for this model")
    tensor = tensors[name]
    if shape is not None and tuple(tensor.shape) != shape:
        raise GateError(
            f"gate tensor {name!r} is {list(tensor.shape)}, the model needs {list(shape)}; use "
            "gates trained for this model"
        )
    return tensor
