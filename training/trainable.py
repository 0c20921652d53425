"""TrainableGates: retention gates as a torch module, and the gate file they make."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.gates import Gates
from engine.gates.module import tied_gates
from engine.spec import DecoderSpec
from engine.weights import LayerWeights


class TrainableGates(nn.Module):
    """The parameters of gates in our own layout (see :func:`engine.gates.module.tied_gates`).

    Args:
        d_gate: width of the trunk, rounded up to a multiple of the KV heads.
        tying: ``paper`` (one readout for all layers and heads: 001, section 4), ``layer`` or
            ``none`` (one per layer and head).
        bias: where the readout's bias starts; at 18, 1 - beta is 1.5e-8 and nothing is forgotten.
        layers: the backbone's, for gates that read ``[k; v]`` instead of x (the ablation of 001,
            section 5.4): keys and values of all KV heads as they are projected, before norm and
            RoPE. These are linear in x, so :meth:`file_tensors` folds the projection into the
            gates' first layer, and the engine runs them like any others.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        d_gate: int = 512,
        tying: str = "paper",
        bias: float = 18.0,
        seed: int = 0,
        layers: Sequence[LayerWeights] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._projections = None if layers is None else [_key_value(x, spec) for x in layers]
        heads = spec.num_kv_heads
        block = math.ceil(d_gate / heads)
        width = block * heads
        lead = {"paper": (), "layer": (spec.num_layers,), "none": (spec.num_layers, heads)}[tying]
        read = spec.hidden_size if layers is None else 2 * heads * spec.head_dim
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> nn.Parameter:
            # As nn.Linear starts: uniform within 1 / sqrt(inputs).
            limit = shape[-1] ** -0.5
            return nn.Parameter((2 * torch.rand(*shape, generator=generator) - 1) * limit)

        self.layers = nn.ModuleList()
        for _ in range(spec.num_layers):
            stage = nn.Module()
            for name, inputs in (("linear1", read), ("linear2", width)):
                linear = nn.Module()
                linear.weight = uniform(width, inputs)
                linear.bias = nn.Parameter(torch.zeros(width))
                setattr(stage, name, linear)
            self.layers.append(stage)
        self.readout = nn.Module()
        self.readout.weight = uniform(*lead, block)
        self.readout.bias = nn.Parameter(torch.full(lead, float(bias)))

    def gates(self) -> Gates:
        """The engine's gates over the live parameters: gradients reach them."""
        return tied_gates(self._folded(), self.spec)

    def file_tensors(self) -> dict[str, Tensor]:
        """What a gate file holds."""
        return {name: tensor.detach().clone() for name, tensor in self._folded().items()}

    def _folded(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        for index, (weight, bias) in enumerate(self._projections or ()):
            name = f"layers.{index}.linear1"
            first = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = first @ weight.to(first)
            if bias is not None:
                tensors[f"{name}.bias"] = tensors[f"{name}.bias"] + first @ bias.to(first)
        return tensors


def _key_value(layer: LayerWeights, spec: DecoderSpec) -> tuple[Tensor, Tensor | None]:
    """The rows of the fused projection that make keys and values: ``[2 H d_h, d]`` and bias."""
    first = spec.num_heads * spec.head_dim
    return layer.qkv[first:], None if layer.qkv_bias is None else layer.qkv_bias[first:]
