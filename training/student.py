"""The student: a frozen decoder with gated attention, beside full attention.

It runs the engine's decoder over documents laid end to end. So every family of the engine can be
trained, and the gates see the same states in training as in decoding. The gates,
retention gates and write gates, are torch modules; their files are read and written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmkv.engine.errors import InputError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates, WriteGates, write_gates
from mmkv.engine.model.gates.files import layer_name, published_gates
from mmkv.engine.model.gates.module import tied_gates
from mmkv.engine.model.product import Matrix, plain
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.weights import LayerWeights
from mmkv.engine.policies.base import admitted
from mmkv.engine.runtime import Runtime
from mmkv.training.gated_attention import gated_attention
from mmkv.training.measure.teacher_forced import Documents, FullAttention


class GatedAttention(FullAttention):
    """Retention-gated attention within each document.

    Args:
        log_beta: ``[T, H]`` float32 of the layer that runs.
    """

    def __init__(
        self, engine: Runtime, documents: Documents, gating: str, log_beta: Tensor
    ) -> None:
        super().__init__(engine, documents)
        self.gating, self._log_beta = gating, log_beta.split(documents.lengths)

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gate = self._log_beta[index].T[None]
        return gated_attention(query, key, value, gate, scale=self.scale, gating=self.gating)


def student_states(
    engine: Runtime,
    documents: Documents,
    gates: Gates,
    gating: str = "log-bias",
    checkpointing: bool = False,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same pass with retention-gated attention (DBTrimKV, section 4; TRIM-KV, eq. 3).

    Args:
        gating: ``log-bias`` adds age times log_beta to the attention logits, ``logit-scale``
            multiplies them by beta to the age.
        checkpointing: recompute each layer in the backward pass instead of keeping it.
        temperature: ``[T]``, what each token's log_beta is divided by. None: 1.

    Returns:
        states ``[T, d]`` before the final norm, and log_beta ``[T, L, H]`` float32, divided.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)

    def run(index: int, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        x, entry = decoder.gate_input(index, hidden), engine.spec.entry_index[index]
        if entry is None:  # a layer without entries has nothing to forget
            plain = FullAttention(engine, documents)
            return decoder.layer(index, hidden, x, rope, plain, documents.deepstack), None
        log_beta = gates.log_beta(entry, x)
        if temperature is not None:
            log_beta = log_beta / temperature[:, None]
        step = GatedAttention(engine, documents, gating, log_beta)
        return decoder.layer(index, hidden, x, rope, step, documents.deepstack), log_beta

    return _through_layers(engine.spec, run, documents.hidden, checkpointing)


def _through_layers(
    spec: DecoderSpec,
    run: Callable[[int, Tensor], tuple[Tensor, Tensor | None]],
    hidden: Tensor,
    checkpointing: bool,
) -> tuple[Tensor, Tensor]:
    """Run all layers; their last states ``[T, d]``, and what the gates said ``[T, L, H]``."""
    said = []
    for index in range(spec.num_layers):
        if checkpointing:
            hidden, gate = checkpoint(run, index, hidden, use_reentrant=False)
        else:
            hidden, gate = run(index, hidden)
        if gate is not None:
            said.append(gate)
    return hidden, torch.stack(said, 1)


def with_trunks_in_bf16(gates: Gates) -> Gates:
    """Return the same gates, their trunks multiplied in bfloat16; the readout stays float32."""
    layers = [replace(layer, product=_multiply_in_bf16) for layer in gates.layers]
    return replace(gates, layers=layers)


def _multiply_in_bf16(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    narrow = None if bias is None else bias.bfloat16()
    return F.linear(x.bfloat16(), plain(weight).bfloat16(), narrow).to(x.dtype)


class WriteGatedAttention(FullAttention):
    """Attention within each document in which entries past the window count by their gates.

    Attributes:
        bias: ``[T, H]`` float32, what the logits of an entry get once it has left the window;
            set before :meth:`attend`.
    """

    bias: Tensor

    def __init__(self, engine: Runtime, documents: Documents, window: int) -> None:
        super().__init__(engine, documents)
        self.window = window

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = self.bias.split(self.documents.lengths)[index].T[None]
        return gated_attention(
            query, key, value, bias, scale=self.scale, gating="write", window=self.window
        )


def floored(log_g: Tensor, floor: float = 1e-3) -> Tensor:
    """Return the bias of training, ``log max(g, floor)``.

    WG-KV (arXiv 2512.17452, section 3.2) writes ``log(m + eps)``; the authors' released code has a
    floor of 1e-3 on g, so that a gate of 1 changes nothing.
    """
    return log_g.clamp(min=math.log(floor))


def binary(log_g: Tensor, threshold: float) -> Tensor:
    """Return the bias of inference: 0 for entries with ``g >= threshold``, -inf for the others."""
    return torch.zeros_like(log_g).masked_fill(~admitted(log_g, threshold), -math.inf)


def write_gated_states(
    engine: Runtime,
    documents: Documents,
    gates: WriteGates,
    window: int,
    bias_of: Callable[[Tensor], Tensor] = floored,
    checkpointing: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the same pass with write-gated attention (WG-KV, arXiv 2512.17452, section 3.2).

    Args:
        window: W_local, tokens that every entry is seen in full for.
        bias_of: log g ``[T, H]`` to what is added to the logits past the window. With
            :func:`binary` the pass is what decoding with admission computes.
        checkpointing: recompute each layer in the backward pass instead of keeping it.

    Returns:
        states ``[T, d]`` before the final norm, and log g ``[T, L, H]`` float32.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)

    def run(index: int, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        found, entry = [], engine.spec.entry_index[index]
        step = WriteGatedAttention(engine, documents, window)

        def read(key_pre: Tensor, key_post: Tensor) -> None:
            assert entry is not None
            found.append(gates.log_g(entry, key_pre, key_post))
            step.bias = bias_of(found[0])

        x = decoder.gate_input(index, hidden)
        hidden = decoder.layer(index, hidden, x, rope, step, documents.deepstack, read)
        return hidden, found[0] if found else None

    return _through_layers(engine.spec, run, documents.hidden, checkpointing)


class TrainableGates(nn.Module):
    """The parameters of gates in one of four layouts.

    ``tied``: a trunk of two layers per decoder layer, of which each KV head reads a block of its
    own (:func:`mmkv.engine.model.gates.module.tied_gates`; DBTrimKV, arXiv 2605.09649, sections 4
    and 5.1). ``rg``: ``d -> d_gate -> H`` per decoder layer, every head reading the whole
    hidden layer (:func:`mmkv.engine.model.gates.files.published_gates`; TRIM-KV, arXiv
    2512.03324, section 5.1). ``rg10``: what DBTrimKV's authors published: two hidden layers, of
    which each head reads all; the heads' readouts are one for all layers. It starts as there:
    weights are normal with a deviation of 0.02. ``linear``: ``z = W x + b`` per decoder layer, the
    ablation of TRIM-KV; its file has the layout ``rg``, since ``silu(z) - silu(-z) = z``.

    Args:
        d_gate: width of the hidden layers; with ``tied`` rounded up to a multiple of the KV heads.
        tying: ``paper`` (one readout for all layers and heads: arXiv 2605.09649, section 4),
            ``layer`` or ``none`` (one per layer and head); ``tied`` alone reads it.
        bias: where the readout's bias starts; at 18, 1 - beta is 1.5e-8 and nothing is forgotten.
        layers: the backbone's, for gates that read ``[k; v]`` instead of x (the ablation of
            DBTrimKV, section 5.4): keys and values of all KV heads as they are projected, before
            norm and RoPE. These are linear in x, so :meth:`file_tensors` folds the projection into
            the gates' first layer, and the engine runs them like any others.
        gate: ``tied``, ``rg``, ``rg10`` or ``linear``.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        d_gate: int = 512,
        tying: str = "paper",
        bias: float = 18.0,
        seed: int = 0,
        layers: Sequence[LayerWeights] | None = None,
        gate: str = "tied",
    ) -> None:
        super().__init__()
        self.spec, self.gate = spec, gate
        attending = [layer for layer in layers or () if layer.state_layer is None]
        self._projections = None if layers is None else [_key_value(x, spec) for x in attending]
        heads = spec.num_kv_heads
        read = spec.hidden_size if layers is None else 2 * heads * spec.head_dim
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> nn.Parameter:
            # As nn.Linear starts: uniform within 1 / sqrt(inputs).
            limit = shape[-1] ** -0.5
            return nn.Parameter((2 * torch.rand(*shape, generator=generator) - 1) * limit)

        def linear(inputs: int, outputs: int) -> nn.Module:
            made = nn.Module()
            made.weight = uniform(outputs, inputs)
            made.bias = nn.Parameter(torch.zeros(outputs))
            return made

        self.layers = nn.ModuleList()
        if gate == "linear":
            for _ in range(spec.entry_layers):
                stage = nn.Module()
                stage.weight = uniform(heads, read)
                stage.bias = nn.Parameter(torch.full((heads,), float(bias)))
                self.layers.append(stage)
            return
        if gate == "rg10":
            sizes = ("linear1", read), ("linear2", d_gate)
            for _ in range(spec.entry_layers):
                stage = nn.Module()
                for name, inputs in sizes:
                    setattr(stage, name, linear(inputs, d_gate))
                    made = getattr(stage, name)
                    made.weight = nn.Parameter(_normal(generator, d_gate, inputs))
                self.layers.append(stage)
            self.linear3 = nn.Module()
            self.linear3.weight = nn.Parameter(_normal(generator, heads, d_gate))
            self.bias = nn.Parameter(torch.full((heads,), float(bias)))
            return
        if gate == "rg":
            for _ in range(spec.entry_layers):
                stage = nn.Module()
                stage.linear1 = linear(read, d_gate)
                stage.linear2 = nn.Module()
                stage.linear2.weight = uniform(heads, d_gate)
                stage.bias = nn.Parameter(torch.full((heads,), float(bias)))
                self.layers.append(stage)
            return
        block = math.ceil(d_gate / heads)
        width = block * heads
        lead = {"paper": (), "layer": (spec.entry_layers,), "none": (spec.entry_layers, heads)}[
            tying
        ]
        for _ in range(spec.entry_layers):
            stage = nn.Module()
            stage.linear1 = linear(read, width)
            stage.linear2 = linear(width, width)
            self.layers.append(stage)
        self.readout = nn.Module()
        self.readout.weight = uniform(*lead, block)
        self.readout.bias = nn.Parameter(torch.full(lead, float(bias)))

    def start_from(self, gates: Gates) -> None:
        """Take the parameters of other gates, of the same layout and sizes.

        Raises:
            InputError: for others, and for parameters that a gate file folds.
        """
        if self._projections is not None or gates.kind != self.gate:
            reads = "" if self._projections is None else " on keys and values"
            raise InputError(
                f"the gates of --init are {gates.kind}, and this run trains {self.gate}{reads}; "
                f"give --gate {gates.kind} and leave --gate-input out"
            )
        tensors = dict(gates.tensors)
        if self.gate != "tied":
            tensors = {}
            for index, layer in enumerate(gates.layers):
                name = f"layers.{index}."
                for number, (weight, bias) in enumerate(layer.trunk, 1):
                    tensors[f"{name}linear{number}.weight"] = plain(weight)
                    tensors[f"{name}linear{number}.bias"] = bias
                last = f"{name}linear2." if self.gate == "rg" else "linear3."
                tensors[f"{last}weight"] = layer.readout
                tensors[f"{name if self.gate == 'rg' else ''}bias"] = layer.bias
        take_parameters(self, tensors)

    def gates(self) -> Gates:
        """Return the engine's gates over the live parameters: gradients reach them."""
        return self.built(self._folded())

    def built(self, tensors: dict[str, Tensor]) -> Gates:
        """Return the engine's gates of this layout over the tensors of a gate file."""
        make = tied_gates if self.gate == "tied" else published_gates
        return make(tensors, self.spec)

    def file_tensors(self) -> dict[str, Tensor]:
        """Return what a gate file holds."""
        return {name: tensor.detach().clone() for name, tensor in self._folded().items()}

    def _folded(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        if self.gate == "linear":
            tensors = self._as_hidden_layer(tensors)
        if self.gate == "rg10":
            shared = {name: tensors.pop(name) for name in ("linear3.weight", "bias")}
            for index in range(len(self.layers)):
                tensors |= {f"layers.{index}.{name}": tensor for name, tensor in shared.items()}
        for index, (weight, bias) in enumerate(self._projections or ()):
            name = f"layers.{index}.linear1"
            first = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = first @ weight.to(first)
            if bias is not None:
                tensors[f"{name}.bias"] = tensors[f"{name}.bias"] + first @ bias.to(first)
        if self.gate != "tied":
            return {layer_name(name): tensor for name, tensor in tensors.items()}
        return tensors

    def _as_hidden_layer(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a linear gate in the layout ``rg``, of two hidden units a head: W x and -W x."""
        found = {}
        one = torch.eye(self.spec.num_kv_heads)
        for index in range(len(self.layers)):
            name, weight = f"layers.{index}", tensors[f"layers.{index}.weight"]
            eye = one.to(weight)
            found[f"{name}.linear1.weight"] = torch.cat([weight, -weight])
            found[f"{name}.linear1.bias"] = torch.zeros_like(weight[:, 0]).repeat(2)
            found[f"{name}.linear2.weight"] = torch.cat([eye, -eye], 1)
            found[f"{name}.bias"] = tensors[f"{name}.bias"]
        return found


def take_parameters(gates: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set all parameters of gates that train; their names and shapes have to be those of a file.

    Raises:
        InputError: naming the first that differs.
    """
    own = dict(gates.named_parameters())
    for name in sorted(own.keys() | tensors.keys()):
        ours, theirs = (list(of[name].shape) if name in of else None for of in (own, tensors))
        if ours != theirs:
            raise InputError(
                f"the gates of --init have {theirs or 'nothing'} as {name}, these "
                f"{ours or 'nothing'}; give the --d-gate and --tying that they were trained with"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw weights as the authors of ``rg10`` start them."""
    return 0.02 * torch.randn(*shape, generator=generator)


class TrainableWriteGates(nn.Module):
    """The parameters of write gates (``engine.model.gates.write``; WG-KV, arXiv 2512.17452).

    Gains of the norms start at 1, all else as ``torch.nn.Linear`` starts, as in the authors'
    released code: g begins near 0.5.

    Args:
        d_gate: width of the hidden layer of each head.
    """

    def __init__(self, spec: DecoderSpec, d_gate: int = 512, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        count, heads, size = spec.entry_layers, spec.num_kv_heads, spec.head_dim
        generator = torch.Generator().manual_seed(seed)

        def linear(inputs: int, weight: tuple[int, ...], bias: tuple[int, ...]) -> nn.Module:
            made, limit = nn.Module(), inputs**-0.5
            for name, shape in (("weight", weight), ("bias", bias)):
                noise = torch.rand(*shape, generator=generator)
                setattr(made, name, nn.Parameter((2 * noise - 1) * limit))
            return made

        self.norm = nn.Module()
        self.norm.before = nn.Parameter(torch.ones(count, size))
        self.norm.after = nn.Parameter(torch.ones(count, size))
        self.layers = nn.ModuleList()
        for _ in range(count):
            stage = nn.Module()
            stage.linear1 = linear(2 * size, (heads, d_gate, 2 * size), (heads, d_gate))
            self.layers.append(stage)
        self.readout = linear(d_gate, (count, heads, d_gate), (count, heads))

    def gates(self) -> WriteGates:
        """Return the engine's gates over the live parameters: gradients reach them."""
        return self.built(dict(self.named_parameters()))

    def built(self, tensors: dict[str, Tensor]) -> WriteGates:
        """Return the engine's gates over the tensors of a gate file."""
        return write_gates(tensors, self.spec)

    def file_tensors(self) -> dict[str, Tensor]:
        """Return what a gate file holds."""
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}


def _key_value(layer: LayerWeights, spec: DecoderSpec) -> tuple[Tensor, Tensor | None]:
    """Return the fused projection's rows for keys and values, ``[2 H d_h, d]``, and their bias."""
    first = spec.num_heads * spec.head_dim * (2 if spec.output_gate else 1)
    rows = plain(layer.qkv)[first:].to(layer.input_norm.dtype)
    return rows, None if layer.qkv_bias is None else layer.qkv_bias[first:]
