"""TrainableGates: retention gates as a torch module whose state dict is a gate file."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from engine.gates import Gates
from engine.gates.module import tied_gates
from engine.spec import DecoderSpec


class TrainableGates(nn.Module):
    """The parameters of gates in our own layout (see :func:`engine.gates.module.tied_gates`).

    Args:
        d_gate: width of the trunk, rounded up to a multiple of the KV heads.
        tying: ``paper`` (one readout for all layers and heads: 001, section 4), ``layer`` or
            ``none`` (one per layer and head).
        bias: where the readout's bias starts; at 18, 1 - beta is 1.5e-8 and nothing is forgotten.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        d_gate: int = 512,
        tying: str = "paper",
        bias: float = 18.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.spec = spec
        heads, layers = spec.num_kv_heads, spec.num_layers
        block = math.ceil(d_gate / heads)
        width = block * heads
        lead = {"paper": (), "layer": (layers,), "none": (layers, heads)}[tying]
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> nn.Parameter:
            # As nn.Linear starts: uniform within 1 / sqrt(inputs).
            limit = shape[-1] ** -0.5
            return nn.Parameter((2 * torch.rand(*shape, generator=generator) - 1) * limit)

        self.layers = nn.ModuleList()
        for _ in range(layers):
            stage = nn.Module()
            for name, inputs in (("linear1", spec.hidden_size), ("linear2", width)):
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
        return tied_gates(dict(self.named_parameters()), self.spec)

    def file_tensors(self) -> dict[str, Tensor]:
        """What a gate file holds."""
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
