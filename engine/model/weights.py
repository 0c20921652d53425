"""Take or share the text weights of a loaded transformers model, without a second copy."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmkv.engine.errors import ModelError
from mmkv.engine.model.int8 import IntegerMatrix
from mmkv.engine.model.panels import Panels, sampled
from mmkv.engine.model.product import Matrix, Product, WeightForm, multiply
from mmkv.engine.model.spec import DecoderSpec

_EXPECTED = {
    "input_layernorm",
    "self_attn",
    "mlp",
    "post_attention_layernorm",
    "resid_attn_dropout",
    "resid_mlp_dropout",
}
# Parts of an MLP that is a mixture of experts.
_SPARSE = {"gate", "experts"}


@dataclass
class LayerWeights:
    """One decoder layer. Linear weights are ``[out, in]``; q, k, v and gate, up are fused.

    Attributes:
        qkv: ``[(Hq + 2 H) D, d]`` with rows ordered q, k, v; ``qkv_bias`` likewise or None.
        qk_norm: ``[Hq + H, D]`` per-head RMSNorm gains of q and k, or None.
        out: ``[d, Hq D]``; gate_up: ``[2 f, d]`` with gate first; down: ``[d, f]``.
        router: ``[E, d]`` of a mixture of E experts, whose gate_up is ``[E, 2 f, d]`` and down
            ``[E, d, f]``, without biases; None: the layer is dense.
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

    def matrix_names(self) -> tuple[str, ...]:
        """Return the names of the parts that states are multiplied by; experts are no such."""
        return ("qkv", "out", "gate_up", "down") if self.router is None else ("qkv", "out")


@dataclass
class DecoderWeights:
    """All text weights: ``embed`` and ``head`` are ``[vocab, d]`` (one tensor when tied).

    Attributes:
        product: multiplies states by a matrix, which may be held in another form than they.
        form: how matrices are held: ``auto`` (in the dtype of states, or in bfloat16 where that
            changes no number), ``bf16``, ``int8`` or ``int4``.
        note: a line on the file of packed weights that was written, or could not be.
    """

    embed: Matrix
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix
    product: Product = multiply
    form: str = "auto"
    note: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of states: that of gains and biases."""
        return self.norm.dtype

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
    def take(cls, text_model: Any, head: Tensor, spec: DecoderSpec) -> DecoderWeights:
        """Move the weights of ``text_model`` here, emptying it layer by layer.

        The fused matrices of one layer exist beside their parts for the time of that layer
        only, so the peak is the model plus one layer.

        Raises:
            ModelError: when a layer has parts this decoder would silently leave out.
        """
        layers: list[LayerWeights] = []
        for index in range(spec.num_layers):
            layers.append(_take_layer(text_model.layers[index], spec))
            text_model.layers[index] = nn.Identity()
        embed = text_model.embed_tokens.weight.data
        taken = cls(embed, layers, text_model.norm.weight.data, head.data)
        text_model.layers = nn.ModuleList()
        gc.collect()
        return taken

    @classmethod
    @torch.no_grad()
    def share(
        cls, text_model: Any, head: Tensor, spec: DecoderSpec
    ) -> tuple[DecoderWeights, list[Tensor]]:
        """Use the weights of ``text_model`` where they are, and leave the model whole.

        Parts that are fused here are copied into one matrix, layer by layer, and the model's own
        parameters become views of it: there is no second copy, and a change on one side is seen
        on the other. Gains of q and k are copied.

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
                _take_layer(layer, spec, fuse) for layer in text_model.layers[: spec.num_layers]
            ]
        except BaseException:
            separate(views)
            raise
        embed = text_model.embed_tokens.weight.data
        return cls(embed, layers, text_model.norm.weight.data, head.data), views

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
            for part, tensor in vars(layer).items():
                if tensor is not None:
                    yield f"layers.{index}.{part}", tensor

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
            for t in (layer.qkv, layer.out, layer.gate_up, layer.down, layer.router)
            if t is not None
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


def _take_layer(
    layer: Any,
    spec: DecoderSpec,
    fuse: Callable[[list[nn.Linear]], tuple[Tensor, Tensor | None]] = _fuse,
) -> LayerWeights:
    extra = {name for name, _ in layer.named_children()} - _EXPECTED
    attention, mlp = layer.self_attn, layer.mlp
    sparse = spec.routing is not None and {n for n, _ in mlp.named_children()} == _SPARSE
    if extra or not (sparse or hasattr(mlp, "gate_proj") or hasattr(mlp, "gate_up_proj")):
        raise ModelError(
            f"layers of type {type(layer).__name__} have parts this decoder does not run "
            f"({', '.join(sorted(extra)) or type(mlp).__name__}); use a checkpoint of a supported "
            "family"
        )
    if hasattr(attention, "qkv_proj"):
        qkv, qkv_bias = attention.qkv_proj.weight.data, _bias(attention.qkv_proj)
    else:
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        qkv, qkv_bias = fuse(parts)
    if sparse:
        gate_up, gate_up_bias = mlp.experts.gate_up_proj.data, None
    elif hasattr(mlp, "gate_up_proj"):
        gate_up, gate_up_bias = mlp.gate_up_proj.weight.data, _bias(mlp.gate_up_proj)
    else:
        gate_up, gate_up_bias = fuse([mlp.gate_proj, mlp.up_proj])
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q_gain = attention.q_norm.weight.data.expand(spec.num_heads, -1)
        k_gain = attention.k_norm.weight.data.expand(spec.num_kv_heads, -1)
        qk_norm = torch.cat([q_gain, k_gain])
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.data,
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        out=attention.o_proj.weight.data,
        out_bias=_bias(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.experts.down_proj.data if sparse else mlp.down_proj.weight.data,
        down_bias=None if sparse else _bias(mlp.down_proj),
        router=mlp.gate.weight.data if sparse else None,
    )


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.data
