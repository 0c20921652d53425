"""The shape of a decoder: everything the engine must know besides the weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmkv.engine.errors import ModelError

# Layers that see all tokens, and others; transformers' names.
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# Text models whose MLP has a GELU.
GEMMA_TYPES = ("gemma3_text",)
# Text models that rotate features 2 i and 2 i + 1 together, not i and i + rot / 2.
PAIRED_TYPES = ("glm4", "glm4v_text")
# What transformers' text models read of a config: another field is left over from another model.
# Windows: none; in all layers; in those that layer_types names.
_OPEN_TYPES = ("llama", "glm4", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text")
_WINDOWED_TYPES = ("mistral", "ministral3", "phi3", "qwen3_moe")
_LAYERED_TYPES = ("ministral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", *GEMMA_TYPES)
# No head_dim.
WIDTH_TYPES = ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text")
# Norms before attention and before the MLP; some have others, of what these add to the states.
NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = {
    "gemma3_text": (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
    "glm4v_text": (
        "input_layernorm",
        "post_attention_layernorm",
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
    ),
}
_FOUR_NORMS["glm4"] = _FOUR_NORMS["glm4v_text"]
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# "dynamic" frequencies only move past max_position, which the engine refuses to pass.
_STATIC_ROPE = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one checkpoint, scaling included.

    Attributes:
        kind: transformers' name of the scaling (``default``, ``yarn``, ``longrope`` ...).
        inv_freq: ``[rot/2]`` float32, in radians per position.
        scale: factor on cos and sin (yarn, longrope).
        mrope_axes: ``[rot/2]``, the axis (0 t, 1 h, 2 w) that turns each frequency of M-RoPE, else
            None.
        long_inv_freq: ``[rot/2]`` float32, used instead of ``inv_freq`` by sequences that
            reach beyond ``switch_at`` positions (longrope only).
        switch_at: first position the short frequencies were not trained for.
    """

    kind: str
    inv_freq: Tensor
    scale: float = 1.0
    mrope_axes: tuple[int, ...] | None = None
    long_inv_freq: Tensor | None = None
    switch_at: int | None = None

    @property
    def axes(self) -> int:
        """Return the position components per token: 3 for M-RoPE (t, h, w), else 1."""
        return 3 if self.mrope_axes else 1

    @classmethod
    def from_rotary(
        cls,
        rotary: Any,
        section: tuple[int, ...] | None = None,
        interleaved: bool = True,
        sees: bool = True,
    ) -> RopeSpec:
        """Read the frequencies of a transformers rotary module.

        Args:
            rotary: the module.
            section: frequencies per axis where module and config name none, for M-RoPE.
            interleaved: see :func:`mrope_axes`; for a module that does not order them itself.
            sees: whether tokens of pictures may come, whose positions differ by axis.

        Raises:
            ModelError: for scalings whose frequencies change with every new token, which
                would invalidate the keys already cached; for sections that do not fit.
        """
        if getattr(rotary.config, "model_type", None) in GEMMA_TYPES:  # one for each kind of layer
            return cls.from_config(rotary.config)
        axes = _axes_of(rotary, section, interleaved) if sees else None
        found = None
        if _kind(rotary.config.rope_parameters) != "longrope":
            found = (rotary.inv_freq, rotary.attention_scaling)
        return cls._read(rotary.config, axes, found)

    @classmethod
    def from_config(
        cls,
        config: Any,
        section: tuple[int, ...] | None = None,
        interleaved: bool = True,
        layer_type: str | None = None,
    ) -> RopeSpec:
        """Compute the frequencies as transformers' rotary module of this config would.

        Args:
            config: of one of mmkv's own text models.
            section: frequencies per axis where the config names none, for M-RoPE.
            interleaved: see :func:`mrope_axes`.
            layer_type: of which kind of layers, where each has an embedding of its own; None: of
                those that see all tokens, where there are any.

        Raises:
            ModelError: as :meth:`from_rotary`.
        """
        if config.model_type in GEMMA_TYPES:
            layer_type = layer_type or (GLOBAL if GLOBAL in config.layer_types else LOCAL)
        parameters = _parameters(config, layer_type)
        kind = _kind(parameters)
        found: tuple[Tensor, float] | None = None
        if kind == "default":
            found = (_default_frequencies(config, parameters), 1.0)
        elif kind != "longrope":
            found = _frequencies(config, kind, layer_type)
        section = section and (parameters.get("mrope_section") or section)
        axes = mrope_axes(section, interleaved) if section else None
        return cls._read(config, axes, found, layer_type)

    @classmethod
    def _read(
        cls,
        config: Any,
        axes: tuple[int, ...] | None,
        found: tuple[Tensor, float] | None,
        layer_type: str | None = None,
    ) -> RopeSpec:
        """Complete frequencies and scale with what the config says; None: it has two sets."""
        parameters = _parameters(config, layer_type)
        kind = parameters["rope_type"]
        long_inv_freq, switch_at = None, None
        if found is None:
            switch_at = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            # transformers picks the long factors by the length it is shown.
            long_inv_freq, _ = _frequencies(config, kind, layer_type, switch_at + 1)
            found = _frequencies(config, kind, layer_type, switch_at)
        inv_freq, scale = found
        whole = getattr(config, "model_type", None) in _WHOLE_TYPES
        if whole and 2 * len(inv_freq) != head_width(config):
            raise ModelError(
                f"partial_rotary_factor leaves {2 * len(inv_freq)} of the {head_width(config)} "
                f"features of a head to be rotated, and a {config.model_type} model rotates all; "
                "get the original config.json"
            )
        if axes is not None and len(axes) != len(inv_freq):
            raise ModelError(
                f"M-RoPE sections of {len(axes)} frequencies do not fit the {len(inv_freq)} of a "
                "head; give rope_parameters.mrope_section in config.json"
            )
        return cls(
            kind=kind,
            inv_freq=inv_freq.detach().float().cpu().clone(),
            scale=float(scale),
            mrope_axes=axes,
            long_inv_freq=None if long_inv_freq is None else long_inv_freq.float().cpu(),
            switch_at=switch_at,
        )


def mrope_axes(section: Sequence[int], interleaved: bool) -> tuple[int, ...]:
    """Return the axis (0 t, 1 h, 2 w) that turns each frequency.

    Args:
        section: frequencies per axis (t, h, w).
        interleaved: t, h, w take turns as far as a section reaches, and the rest is t (Qwen3-VL);
            otherwise the sections lie one behind the other (Qwen2.5-VL).
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    ends = [0, *(3 * count for count in section[1:])]
    return tuple(i % 3 if i < ends[i % 3] else 0 for i in range(sum(section)))


def _axes_of(
    rotary: Any, section: Sequence[int] | None, interleaved: bool
) -> tuple[int, ...] | None:
    """Return the axis of each frequency of a transformers rotary module, None without M-RoPE."""
    named = rotary.config.rope_parameters.get("mrope_section")
    section = getattr(rotary, "mrope_section", None) or named or section
    if not section:
        return None
    if getattr(rotary.config, "model_type", None) in PAIRED_TYPES:  # each comes twice in a row
        return mrope_axes(section, False)
    if not hasattr(rotary, "recomposition_frequencies"):
        return mrope_axes(section, interleaved)
    shown = torch.arange(3.0).view(3, 1, 1, 1).expand(-1, 1, 1, sum(section)).clone()
    mixed = rotary.recomposition_frequencies(shown)[0, 0, : sum(section)]
    return tuple(int(axis) for axis in mixed)


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    found: dict[str, Any] = config.rope_parameters
    return found if layer_type is None else found[layer_type]


def _frequencies(
    config: Any, kind: str, layer_type: str | None, seen: int | None = None
) -> tuple[Tensor, float]:
    """Return frequencies and scale of a scaled embedding, as transformers computes them."""
    made: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](
        config, device=torch.device("cpu"), seq_len=seen, layer_type=layer_type
    )
    return made


def _kind(parameters: dict[str, Any]) -> str:
    kind: str = parameters["rope_type"]
    if kind not in _STATIC_ROPE:
        raise ModelError(
            f"rope_type {kind!r} is not supported; use a checkpoint with one of "
            f"{', '.join(sorted(_STATIC_ROPE))}"
        )
    return kind


def head_width(config: Any) -> int:
    """Return the features of a head of a text model."""
    own = None if config.model_type in WIDTH_TYPES else getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _default_frequencies(config: Any, parameters: dict[str, Any]) -> Tensor:
    """Compute ``theta ** (-2 i / rot)``, float32 ``[rot/2]``."""
    rot = head_width(config)
    # The other models rotate whole heads, whatever it says.
    if config.model_type in PARTIAL_TYPES:
        rot = int(rot * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rot, 2, dtype=torch.float) / rot
    return 1.0 / (parameters["rope_theta"] ** exponents)


@dataclass(frozen=True)
class Routing:
    """How a mixture of experts chooses for a token.

    Attributes:
        experts: of each sparse layer. chosen: of these for one token.
        normalized: the weights of the chosen ones sum to 1.
        inner: width f of an expert. shared: of the one that every token goes through; 0: none.
    """

    experts: int
    chosen: int
    normalized: bool
    inner: int
    shared: int = 0

    @classmethod
    def of(cls, config: Any) -> Routing | None:
        """Read it off the config of a text model; None for a dense one."""
        experts = getattr(config, "num_experts", None)
        if config.model_type not in SPARSE_TYPES or not experts:
            return None
        # transformers' Qwen3-VL router always normalizes, whatever the config says.
        normalized = config.model_type != "qwen3_moe" or bool(config.norm_topk_prob)
        shared = 0
        if config.model_type in DELTA_TYPES:
            shared = config.shared_expert_intermediate_size
        inner = config.moe_intermediate_size
        return cls(experts, config.num_experts_per_tok, normalized, inner, shared)


# Text models with experts that this decoder runs.
SPARSE_TYPES = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_5_moe_text")
# Text models whose linear layers follow the gated delta rule.
DELTA_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
LINEAR = "linear_attention"
# Text models that rotate a part of each head.
PARTIAL_TYPES = ("phi3", *PAIRED_TYPES, *DELTA_TYPES)
_WHOLE_TYPES = {*_OPEN_TYPES, *_WINDOWED_TYPES, *_LAYERED_TYPES} - {*PARTIAL_TYPES}
# Text models whose gains are 1 + weight.
OFFSET_TYPES = (*DELTA_TYPES, *GEMMA_TYPES)


@dataclass(frozen=True)
class DeltaSpec:
    """Sizes of layers that follow the gated delta rule (:mod:`mmkv.engine.model.delta`).

    Attributes:
        key_heads, value_heads: Hk and Hv, a multiple of it; key_dim, value_dim: of a head.
        kernel: tokens that the convolution before it sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Return the channels that are convolved: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Return the numbers of all value heads."""
        return self.value_heads * self.value_dim

    def states(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of what a layer keeps of a sequence, by name."""
        square = (self.value_heads, self.key_dim, self.value_dim)
        return {
            "conv": ((self.channels, self.kernel - 1), dtype),
            "delta": (square, torch.float32),
        }

    @classmethod
    def of(cls, config: Any) -> DeltaSpec | None:
        """Read it off the config of a text model; None where it has no such layers."""
        if config.model_type not in DELTA_TYPES or LINEAR not in config.layer_types:
            return None
        return cls(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Return for each layer of a text model whether its MLP is a mixture of experts."""
    layers = config.num_hidden_layers
    if Routing.of(config) is None or config.model_type in DELTA_TYPES:
        return (Routing.of(config) is not None,) * layers
    dense, every = config.mlp_only_layers or (), config.decoder_sparse_step
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(layers))


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes of one decoder. ``max_position`` counts rope positions; the rest are plain sizes.

    Attributes:
        num_layers: all layers. :attr:`entry_layers` counts those with entries in the cache.
        sliding_window: of each layer with entries; None: all tokens.
        routing: of a mixture of experts; None: every layer is dense.
        has_entries: of each layer, whether it attends to entries in the cache; the others keep a
            state of fixed size in their place (:mod:`mmkv.engine.model.state_layer`). Empty: all.
        delta: of layers that follow the gated delta rule, or None.
        output_gate: queries come with a gate, per head, that multiplies attention's output.
        unit_offset: the norms' gains are 1 + weight.
        norms: transformers' names of a layer's norms: before attention, before the MLP and, if
            there are four, of what attention and MLP add to the states.
        activation: of the MLP's gate: ``silu`` or ``gelu_tanh``.
        embed_scale: factor on the embeddings of tokens.
        query_gain: factor on queries, which their norm's gain has.
        local_rope: of layers with a window, None: that of all.
        paired: features 2 i and 2 i + 1 are rotated together. Rows of queries and keys are put in
            the usual order when they are read: even features first, then odd ones.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    sliding_window: tuple[int | None, ...]
    rope: RopeSpec
    routing: Routing | None = None
    has_entries: tuple[bool, ...] = ()
    delta: DeltaSpec | None = None
    output_gate: bool = False
    unit_offset: bool = False
    norms: tuple[str, ...] = NORMS
    activation: str = "silu"
    embed_scale: float = 1.0
    query_gain: float = 1.0
    local_rope: RopeSpec | None = None
    paired: bool = False

    def is_local(self, layer: int) -> bool:
        """Return whether a layer, of all layers, has the angles of :attr:`local_rope`."""
        entry = self.entry_index[layer]
        windowed = entry is not None and self.sliding_window[entry] is not None
        return self.local_rope is not None and windowed

    @functools.cached_property
    def entry_layers(self) -> int:
        """Return L of cache, budget and gates: the number of layers that have entries."""
        return sum(self.has_entries) if self.has_entries else self.num_layers

    @functools.cached_property
    def entry_index(self) -> tuple[int | None, ...]:
        """Return of each layer its number among those with entries; None: it has none."""
        if not self.has_entries:
            return tuple(range(self.num_layers))
        return tuple(
            sum(self.has_entries[:index]) if there else None
            for index, there in enumerate(self.has_entries)
        )

    @functools.cached_property
    def rows(self) -> int:
        """Return the number of cache rows of one sequence: layers with entries x KV heads."""
        return self.entry_layers * self.num_kv_heads

    def frequencies(self, long: bool) -> list[Tensor]:
        """Return the rope's frequencies ``[rot / 2]`` of each layer that has entries.

        Args:
            long: whether by the long factors, where there are any.
        """
        common = self.rope.long_inv_freq if long else self.rope.inv_freq
        assert common is not None
        there = (layer for layer, index in enumerate(self.entry_index) if index is not None)
        return [
            self.local_rope.inv_freq if self.local_rope and self.is_local(layer) else common
            for layer in there
        ]

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that layers of the gated delta rule keep of a sequence."""
        if self.delta is None:
            return 0
        sizes = self.delta.states(dtype).values()
        each = sum(math.prod(shape) * kind.itemsize for shape, kind in sizes)
        return (self.num_layers - self.entry_layers) * each

    @property
    def group(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def matrix_numbers(self, config: Any) -> int:
        """Count the numbers of embedding and matrices of the text model of this config."""
        queries = self.num_heads * (3 if self.output_gate else 2)
        attention = (queries + 2 * self.num_kv_heads) * self.head_dim
        width = self.vocab_size + self.entry_layers * attention
        if self.delta is not None:
            mixing = self.delta.channels + 2 * (self.delta.value_width + self.delta.value_heads)
            width += (self.num_layers - self.entry_layers) * mixing
        for sparse in sparse_layers(config):
            if sparse and self.routing is not None:
                width += self.routing.experts * (1 + 3 * self.routing.inner)
                width += 3 * self.routing.shared + bool(self.routing.shared)
            else:
                width += 3 * config.intermediate_size
        return width * self.hidden_size

    @classmethod
    def from_hf(
        cls,
        text_model: Any,
        section: tuple[int, ...] | None = None,
        interleaved: bool = True,
        state_kinds: Sequence[str] = (),
        sees: bool = True,
    ) -> DecoderSpec:
        """Read the sizes off a transformers text model (embed_tokens, layers, norm, rotary_emb).

        ``section``, ``interleaved``: see :meth:`RopeSpec.from_rotary`; ``state_kinds``: see
        :meth:`from_config`. ``sees``: where nothing but text is read, M-RoPE has one axis.

        Raises:
            ModelError: when the model uses a part this decoder does not have.
        """
        return cls.from_config(
            text_model.config,
            lambda: RopeSpec.from_rotary(text_model.rotary_emb, section, interleaved, sees),
            state_kinds,
        )

    @classmethod
    def from_config(
        cls, config: Any, rope: Callable[[], RopeSpec], state_kinds: Sequence[str] = ()
    ) -> DecoderSpec:
        """Read the sizes off the config of a text model; ``rope`` reads its rotary embedding.

        Args:
            state_kinds: what ``layer_types`` calls layers that a family builds by itself
                (:meth:`mmkv.engine.model.families.Family.state_layer`).

        Raises:
            ModelError: as :meth:`from_hf`.
        """
        gemma = config.model_type in GEMMA_TYPES
        activation = "hidden_activation" if gemma else "hidden_act"
        named, routing = getattr(config, activation, "silu"), Routing.of(config)
        # Of experts and of the gated delta rule there is no other form.
        plain = routing is None and config.model_type not in DELTA_TYPES
        known = [*_ACTIVATIONS] if plain else ["silu"]
        if named not in known:
            raise ModelError(
                f"activation {named!r} is not supported; this decoder runs models with "
                f"{activation} {' or '.join(map(repr, known))}"
            )
        _require_plain(config)
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        delta = DeltaSpec.of(config)
        stateful = {*state_kinds, *([] if delta is None else [LINEAR])}
        kinds = _kinds(config, layers)
        has_entries = tuple(kind not in stateful for kind in kinds)
        if not any(has_entries):
            raise ModelError(
                "no layer of this model attends to earlier tokens, so there is no cache to bound; "
                "run it with transformers"
            )
        embedding = rope()  # which completes the config's rope_parameters, read below
        dim = head_width(config)
        both = gemma and {GLOBAL, LOCAL} <= {*kinds}
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=dim,
            rms_eps=config.rms_norm_eps,
            max_position=_longest(config),
            sliding_window=attention_windows(config, layers, stateful),
            rope=embedding,
            routing=routing,
            has_entries=() if all(has_entries) else has_entries,
            delta=delta,
            output_gate=config.model_type in DELTA_TYPES,
            unit_offset=config.model_type in OFFSET_TYPES,
            norms=_FOUR_NORMS.get(config.model_type, NORMS),
            activation=_ACTIVATIONS[named],
            embed_scale=config.hidden_size**0.5 if gemma else 1.0,
            query_gain=(dim / config.query_pre_attn_scalar) ** 0.5 if gemma else 1.0,
            local_rope=RopeSpec.from_config(config, layer_type=LOCAL) if both else None,
            paired=config.model_type in PAIRED_TYPES,
        )


def _require_plain(config: Any) -> None:
    """Refuse what a config can ask for and this decoder does not do. Raises ModelError."""
    gemma = config.model_type in GEMMA_TYPES
    for name, asked in (
        ("use_bidirectional_attention", gemma and config.use_bidirectional_attention),
        ("is_causal: false", not getattr(config, "is_causal", True)),
    ):
        if asked:
            raise ModelError(
                f"{name} makes an encoder of this model, which generates nothing; run it with "
                "transformers"
            )
    for name in ("final_logit_softcapping", "attn_logit_softcapping") if gemma else ():
        if getattr(config, name, None) is not None:
            raise ModelError(f"{name} is not supported; use a Gemma 3 checkpoint, which has none")


def _longest(config: Any) -> int:
    """Return how many positions a text model has here: Ministral 3 scales the queries of those
    behind its original ones, which this decoder does not.
    """
    longest, rope = int(config.max_position_embeddings), config.rope_parameters
    if config.model_type != "ministral3":
        return longest
    original, beta = (
        rope.get(name) for name in ("original_max_position_embeddings", "llama_4_scaling_beta")
    )
    if original is None or beta is None:
        raise ModelError(
            "rope_parameters of a ministral3 model lack llama_4_scaling_beta or "
            "original_max_position_embeddings; get the original config.json"
        )
    return min(longest, int(original)) if beta else longest


def _kinds(config: Any, layers: int) -> Sequence[str | None]:
    """Return the kind of each layer; None: a model that does not tell them apart."""
    alike = config.model_type in (*_OPEN_TYPES, *_WINDOWED_TYPES)
    return (not alike and getattr(config, "layer_types", None)) or [None] * layers


def attention_windows(
    config: Any, layers: int, others: Collection[str] = ()
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer of a text model; None: all tokens.

    What transformers' own forward pass does not read is left over from another model.

    Args:
        others: kinds of layers that do not attend, which are left out.

    Raises:
        ModelError: for layers of another kind, or for windows of no size.
    """
    kinds = _kinds(config, layers)
    known = {None, GLOBAL, *others, *([] if config.model_type in DELTA_TYPES else [LOCAL])}
    if unknown := set(kinds) - known:
        raise ModelError(
            f"layer_types {sorted(map(str, unknown))} are not supported; use a checkpoint with "
            "full or sliding-window attention only"
        )
    window = getattr(config, "sliding_window", None)
    if config.model_type in _OPEN_TYPES:
        window = None
    elif config.model_type not in _WINDOWED_TYPES:
        window = window if getattr(config, "use_sliding_window", True) else None
        if window is None and LOCAL in kinds:
            raise ModelError(
                "layer_types has sliding_attention, and no sliding_window is set, or "
                "use_sliding_window is false; get the original config.json"
            )
    attending = (kind for kind in kinds if kind not in others)
    return tuple(None if kind == GLOBAL else window for kind in attending)
