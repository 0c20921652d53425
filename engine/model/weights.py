"""Take or share the text weights of a loaded transformers model, without a second copy."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmkv.engine.errors import ModelError
from mmkv.engine.model.panels import Panels, sampled
from mmkv.engine.model.product import Matrix, Product, WeightForm, multiply
from mmkv.engine.model.rounded import IntegerMatrix
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.state_layer import DeltaLayer, StateLayer, StateShapes

_EXPECTED = {
    "self_attn",
    "linear_attn",
    "mlp",
    "resid_attn_dropout",
    "resid_mlp_dropout",
}
# Parts of an MLP that is a mixture of experts.
_SPARSE = {"gate", "experts"}
_SHARED = _SPARSE | {"shared_expert", "shared_expert_gate"}
# Makes the layer of a transformers module that does not attend.
StateLayerOf = Callable[[Any], StateLayer]


@dataclass
class LayerWeights:
    """One decoder layer. Linear weights are ``[out, in]``; q, k, v and gate, up are fused.

    Attributes:
        qkv: ``[(Hq + 2 H) D, d]`` with rows ordered q, k, v; ``qkv_bias`` likewise or None. With an
            output gate (:class:`DecoderSpec`) the D rows of each query head are followed by its
            gate's.
        qk_norm: ``[Hq + H, D]`` per-head RMSNorm gains of q and k, or None.
        out: ``[d, Hq D]``; gate_up: ``[2 f, d]`` with gate first; down: ``[d, f]``.
        router: ``[E, d]`` of a mixture of E experts, whose gate_up is ``[E, 2 f, d]`` and down
            ``[E, d, f]``, without biases; None: the layer is dense.
        shared_gate: ``[1, d]`` of the expert that every token goes through, with shared_gate_up
            ``[2 f_s, d]`` and shared_down ``[d, f_s]``; None: there is none.
        state_layer: what mixes tokens where the layer does not attend, else None. ``qkv`` and
            ``out`` are then its projections, or have no rows where it has its own.
        attention_out_norm, mlp_out_norm: ``[d]`` gains of norms of what attention and MLP add to
            the states, or None.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None
    router: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    state_layer: StateLayer | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None

    def parts(self) -> Iterator[tuple[str, Matrix]]:
        """Yield every tensor with its name, those of the state layer among them."""
        for name, part in vars(self).items():
            if isinstance(part, StateLayer):
                yield from ((f"{name}.{own}", tensor) for own, tensor in part.tensors().items())
            elif part is not None:
                yield name, part

    def matrix_names(self) -> tuple[str, ...]:
        """Return the names of the parts that states are multiplied by; experts are no such."""
        mixing = ("qkv", "out") if self.qkv.numel() else ()
        return (*mixing, "gate_up", "down") if self.router is None else mixing


@dataclass
class DecoderWeights:
    """All text weights: ``embed`` and ``head`` are ``[vocab, d]`` (one tensor when tied).

    Attributes:
        product: multiplies states by a matrix, which may be held in another form than they.
        form: how matrices are held: ``auto`` (in the dtype of states, or in bfloat16 where that
            changes no number), ``bf16``, ``int8`` or ``int4``.
        note: a line on the file of packed weights that was written, or could not be.
        gains_apart: the dtype of states where gains are held in float32 beside others.
    """

    embed: Matrix
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix
    product: Product = multiply
    form: str = "auto"
    note: str | None = None
    gains_apart: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of states: that of gains and biases."""
        return self.gains_apart or self.norm.dtype

    def states(self) -> StateShapes:
        """Return shape and dtype of what is kept of a sequence beside its entries, by name."""
        return {
            state_name(index, name): kept
            for index, layer in enumerate(self.layers)
            if layer.state_layer is not None
            for name, kept in layer.state_layer.states(self.dtype).items()
        }

    def matrices(self) -> Iterator[Matrix]:
        """Yield what states are multiplied by, and the embedding; a tied head comes again."""
        yield from (self.embed, self.head)
        for layer in self.layers:
            yield from (getattr(layer, name) for name in layer.matrix_names())

    @torch.no_grad()
    def hold(self, holding: WeightForm) -> None:
        """Hold matrices of floats in another form from now on, made one after the other.

        Those of experts stay as they are.
        """
        tied = self.head.data_ptr() == self.embed.data_ptr()
        self.product, self.form = holding.product, holding.name
        assert isinstance(self.embed, Tensor) and isinstance(self.head, Tensor)
        self.embed, head = holding.hold(self.embed, "embed_tokens"), self.head
        self.head = self.embed if tied else holding.hold(head, "lm_head")
        for index, layer in enumerate(self.layers):
            for name in layer.matrix_names():
                held = holding.hold(getattr(layer, name), f"layers.{index}.{name}")
                setattr(layer, name, held)

    @classmethod
    @torch.no_grad()
    def take(
        cls,
        text_model: Any,
        head: Tensor,
        spec: DecoderSpec,
        state_layer: StateLayerOf | None = None,
    ) -> DecoderWeights:
        """Move the weights of ``text_model`` here, emptying it layer by layer.

        The fused matrices of one layer exist beside their parts for the time of that layer
        only, so the peak is the model plus one layer.

        Args:
            state_layer: makes the layers that do not attend, of a family that has its own.

        Raises:
            ModelError: when a layer has parts this decoder would silently leave out.
        """
        layers: list[LayerWeights] = []
        for index in range(spec.num_layers):
            layers.append(_take_layer(text_model.layers[index], spec, index, state_layer))
            text_model.layers[index] = nn.Identity()
        embed = text_model.embed_tokens.weight.data
        taken = cls(embed, layers, gain_of(text_model.norm.weight.data, spec), head.data)
        taken.gains_apart = embed.dtype if taken.norm.dtype != embed.dtype else None
        text_model.layers = nn.ModuleList()
        gc.collect()
        return taken

    @classmethod
    @torch.no_grad()
    def share(
        cls,
        text_model: Any,
        head: Tensor,
        spec: DecoderSpec,
        state_layer: StateLayerOf | None = None,
    ) -> tuple[DecoderWeights, list[Tensor]]:
        """Use the weights of ``text_model`` where they are, and leave the model whole.

        Parts that are fused here are copied into one matrix, layer by layer, and the model's own
        parameters become views of it: there is no second copy, and a change on one side is seen
        on the other. Gains of q and k are copied, those that are 1 + weight, and q, k and v where
        their rows are put in another order (:attr:`DecoderSpec.paired`).

        Returns:
            The weights, and the parameters that became views; :func:`separate` reverses that.

        Raises:
            ModelError: as :meth:`take`; the model is as it was then.
        """
        views: list[Tensor] = []

        def fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
            weight, bias = _fuse(linears)
            rows = [linear.out_features for linear in linears]
            for linear, part in zip(linears, weight.split(rows), strict=True):
                linear.weight.data = part
                views.append(linear.weight)
            if bias is not None:
                for linear, part in zip(linears, bias.split(rows), strict=True):
                    if linear.bias is not None:
                        linear.bias.data = part
                        views.append(linear.bias)
            return weight, bias

        try:
            layers = [
                _take_layer(layer, spec, index, state_layer, fuse)
                for index, layer in enumerate(text_model.layers[: spec.num_layers])
            ]
        except BaseException:
            separate(views)
            raise
        embed = text_model.embed_tokens.weight.data
        made = cls(embed, layers, gain_of(text_model.norm.weight.data, spec), head.data)
        made.gains_apart = embed.dtype if made.norm.dtype != embed.dtype else None
        return made, views

    def errors(self) -> dict[str, float]:
        """Return the relative error of each rounded matrix by its name; a tied head is left out.

        Root mean square of what rounding changed, over that of the weights.
        """
        return {name: part.error for name, part in self._parts() if isinstance(part, IntegerMatrix)}

    def rounding(self) -> str:
        """Say in a few words how far rounded matrices are off; empty where none is."""
        errors = self.errors()
        if not errors:
            return ""
        worst = max(errors, key=errors.__getitem__)
        middle = sorted(errors.values())[len(errors) // 2]
        return (
            f"weights in {self.form}: {100 * middle:.2f} % off (median of {len(errors)} matrices; "
            f"at most {100 * errors[worst]:.2f} %, {worst})"
        )

    def named(self) -> Iterator[tuple[str, Matrix]]:
        """Yield every tensor with its name; a tied head is the embedding again."""
        yield from (("embed_tokens", self.embed), ("norm", self.norm), ("lm_head", self.head))
        for index, layer in enumerate(self.layers):
            yield from ((f"layers.{index}.{part}", tensor) for part, tensor in layer.parts())

    def nbytes(self) -> int:
        """Return the bytes of all weights; a tied head counts once."""
        return sum(part.nbytes for _, part in self._parts())

    def numbers(self) -> int:
        """Count the numbers of all weights; a tied head counts once."""
        return sum(part.numel() for _, part in self._parts())

    def _parts(self) -> list[tuple[str, Matrix]]:
        tied = self.head.data_ptr() == self.embed.data_ptr()
        return [(name, part) for name, part in self.named() if not (tied and name == "lm_head")]

    def fingerprint(self) -> str:
        """Return a short hash that tells two checkpoints apart, from a sample of every matrix."""
        digest = hashlib.sha256()
        for tensor in [self.embed, self.norm, self.head] + [
            t
            for layer in self.layers
            for t in (
                *(layer.qkv, layer.out, layer.gate_up, layer.down, layer.router),
                *([] if layer.state_layer is None else layer.state_layer.tensors().values()),
            )
            if t is not None and t.numel()
        ]:
            some = (
                tensor.sample(257)
                if isinstance(tensor, Panels)
                else sampled(tensor.reshape(-1), 257)
            )
            sample = some.float().cpu().contiguous()
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()[:16]


@torch.no_grad()
def separate(views: list[Tensor]) -> None:
    """Give parameters that are views of a larger tensor memory of their own, with equal values."""
    for parameter in views:
        parameter.data = parameter.data.clone()


def _fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([linear.weight.data for linear in linears])
    biases = [_bias(linear) for linear in linears]
    if all(bias is None for bias in biases):
        return weight, None
    filled = [
        weight.new_zeros(linear.out_features) if bias is None else bias
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return weight, torch.cat(filled)


def state_name(layer: int, part: str) -> str:
    """Return the name under which the cache has a part of a layer's state."""
    return f"layers.{layer}.{part}"


def gain_of(weight: Tensor, spec: DecoderSpec) -> Tensor:
    """Return the gain of a norm. 1 + weight is float32: bfloat16 would round it to 8 bits."""
    return 1 + weight.float() if spec.unit_offset else weight


def head_gains(q: Tensor, k: Tensor, spec: DecoderSpec) -> Tensor:
    """Return the gains ``[Hq + H, D]`` of the norms of queries and keys, of weights ``[D]``."""
    queries = gain_of(q, spec)
    if spec.query_gain != 1:
        queries = queries * spec.query_gain
    both = queries.expand(spec.num_heads, -1), gain_of(k, spec).expand(spec.num_kv_heads, -1)
    return torch.cat(both)


def halves_order(spec: DecoderSpec, heads: int) -> Tensor:
    """Return which rows of queries or keys of so many heads stand where: of the features that are
    rotated in pairs, the even ones first, then the odd ones.
    """
    rot = 2 * spec.rope.inv_freq.numel()
    order = torch.arange(spec.head_dim)
    order[:rot] = torch.cat([order[:rot:2], order[1:rot:2]])
    return (torch.arange(heads)[:, None] * spec.head_dim + order).flatten()


_Fuse = Callable[[list[nn.Linear]], tuple[Tensor, Tensor | None]]


def _take_layer(
    layer: Any,
    spec: DecoderSpec,
    index: int,
    state_layer: StateLayerOf | None = None,
    fuse: _Fuse = _fuse,
) -> LayerWeights:
    attends = spec.entry_index[index] is not None
    own = None if attends or spec.delta is not None else state_layer
    mlp, sparse = layer.mlp, _is_mixture(layer.mlp, spec)
    extra = {name for name, _ in layer.named_children()} - _EXPECTED - {*spec.norms}
    dense = hasattr(mlp, "gate_proj") or hasattr(mlp, "gate_up_proj")
    if (extra and own is None) or not (sparse or dense):
        raise ModelError(
            f"layers of type {type(layer).__name__} have parts this decoder does not run "
            f"({', '.join(sorted(extra)) or type(mlp).__name__}); use a checkpoint of a supported "
            "family"
        )
    if attends:
        mixing = _take_attention(layer.self_attn, spec, fuse)
    elif own is not None:
        none = layer.input_layernorm.weight.data.new_zeros(0, spec.hidden_size)
        mixing = {"qkv": none, "qkv_bias": None, "qk_norm": None, "out": none, "out_bias": None}
        mixing["state_layer"] = own(layer)
    else:
        mixing = _take_delta(layer.linear_attn, spec, fuse)
    gains = [gain_of(getattr(layer, name).weight.data, spec) for name in spec.norms]
    return LayerWeights(**norms_of(gains), **mixing, **_take_mlp(mlp, sparse, fuse))


def _is_mixture(mlp: Any, spec: DecoderSpec) -> bool:
    """Whether this is the mixture of experts that the sizes describe, and nothing else."""
    if spec.routing is None:
        return False
    wanted = _SHARED if spec.routing.shared else _SPARSE
    return {name for name, _ in mlp.named_children()} == wanted


def _take_mlp(mlp: Any, sparse: bool, fuse: _Fuse) -> dict[str, Any]:
    """Take a dense MLP, or a mixture with the expert that every token goes through, if any."""
    if sparse:
        gate_up, gate_up_bias = mlp.experts.gate_up_proj.data, None
    elif hasattr(mlp, "gate_up_proj"):
        gate_up, gate_up_bias = mlp.gate_up_proj.weight.data, _bias(mlp.gate_up_proj)
    else:
        gate_up, gate_up_bias = fuse([mlp.gate_proj, mlp.up_proj])
    made = {
        "gate_up": gate_up,
        "gate_up_bias": gate_up_bias,
        "down": mlp.experts.down_proj.data if sparse else mlp.down_proj.weight.data,
        "down_bias": None if sparse else _bias(mlp.down_proj),
        "router": mlp.gate.weight.data if sparse else None,
    }
    if sparse and hasattr(mlp, "shared_expert"):
        shared = mlp.shared_expert
        made["shared_gate"] = mlp.shared_expert_gate.weight.data
        made["shared_gate_up"], _ = fuse([shared.gate_proj, shared.up_proj])
        made["shared_down"] = shared.down_proj.weight.data
    return made


def norms_of(gains: Sequence[Tensor]) -> dict[str, Any]:
    """Return the norms of :class:`LayerWeights`, of gains as :attr:`DecoderSpec.norms` has them."""
    names = ("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm")
    return dict(zip(names, gains, strict=False))


def _take_attention(attention: Any, spec: DecoderSpec, fuse: _Fuse) -> dict[str, Any]:
    """Return the parts of :class:`LayerWeights` of an attention."""
    if hasattr(attention, "qkv_proj"):
        qkv, qkv_bias = attention.qkv_proj.weight.data, _bias(attention.qkv_proj)
    elif spec.paired:
        qkv, qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        turned = halves_order(spec, spec.num_heads + spec.num_kv_heads).to(qkv.device)
        order = torch.cat([turned, torch.arange(len(turned), len(qkv), device=qkv.device)])
        qkv, qkv_bias = qkv[order], None if qkv_bias is None else qkv_bias[order]
    else:
        qkv, qkv_bias = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    qk_norm = None
    if hasattr(attention, "q_norm"):
        qk_norm = head_gains(attention.q_norm.weight.data, attention.k_norm.weight.data, spec)
    out, out_bias = attention.o_proj.weight.data, _bias(attention.o_proj)
    return {
        "qkv": qkv,
        "qkv_bias": qkv_bias,
        "qk_norm": qk_norm,
        "out": out,
        "out_bias": out_bias,
    }


def _take_delta(module: Any, spec: DecoderSpec, fuse: _Fuse) -> dict[str, Any]:
    """Return the parts of :class:`LayerWeights` of a layer of the gated delta rule."""
    assert spec.delta is not None
    qkv, qkv_bias = fuse([module.in_proj_qkv, module.in_proj_z])
    rates, _ = fuse([module.in_proj_b, module.in_proj_a])
    layer = DeltaLayer(
        spec.delta,
        spec.rms_eps,
        conv=module.conv1d.weight.data[:, 0],
        rates=rates,
        log_decay=module.A_log.data.float(),
        step_bias=module.dt_bias.data.float(),
        gain=module.norm.weight.data,
    )
    out, out_bias = module.out_proj.weight.data, _bias(module.out_proj)
    return {
        "qkv": qkv,
        "qkv_bias": qkv_bias,
        "qk_norm": None,
        "out": out,
        "out_bias": out_bias,
        "state_layer": layer,
    }


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.data


def find_not_finite(tensors: Iterable[tuple[str, Tensor | Panels]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, None where none does.

    The least and the greatest number are numbers only if all are, and are found in one pass.
    """
    for name, held in tensors:
        tensor = held.held()[-1] if isinstance(held, Panels) else held
        if not tensor.numel():
            continue
        least, greatest = tensor.detach().aminmax()
        if not (torch.isfinite(least) and torch.isfinite(greatest)):
            return name
    return None


def require_finite(tensors: Iterable[tuple[str, Tensor | Panels]], checkpoint: str) -> None:
    """Check weights of a checkpoint, in one pass over their bytes.

    Raises:
        ModelError: one holds NaN or an infinity, so that every answer would be noise.
    """
    if odd := find_not_finite(tensors):
        raise ModelError(
            f"the weights of {checkpoint} hold NaN or infinity (in {odd}); get the complete "
            "checkpoint again, or load it in another dtype"
        )
