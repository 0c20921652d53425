"""The shape of a decoder: everything the engine must know besides the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelError

# "dynamic" frequencies only move past max_position, which the engine refuses to pass.
_STATIC_ROPE = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one checkpoint, scaling included.

    Attributes:
        kind: transformers' name of the scaling (``default``, ``yarn``, ``longrope`` ...).
        inv_freq: ``[rot/2]`` float32, in radians per position.
        scale: factor on cos and sin (yarn, longrope).
        mrope_section: frequencies per axis (t, h, w) for interleaved M-RoPE, else None.
        long_inv_freq: ``[rot/2]`` float32, used instead of ``inv_freq`` by sequences that
            reach beyond ``switch_at`` positions (longrope only).
        switch_at: first position the short frequencies were not trained for.
    """

    kind: str
    inv_freq: Tensor
    scale: float = 1.0
    mrope_section: tuple[int, ...] | None = None
    long_inv_freq: Tensor | None = None
    switch_at: int | None = None

    @property
    def axes(self) -> int:
        """Return the position components per token: 3 for M-RoPE (t, h, w), else 1."""
        return 3 if self.mrope_section else 1

    @classmethod
    def from_rotary(cls, rotary: Any) -> RopeSpec:
        """Read the frequencies of a transformers rotary module.

        Raises:
            ModelError: for scalings whose frequencies change with every new token, which
                would invalidate the keys already cached.
        """
        section = getattr(rotary, "mrope_section", None)
        found = None
        if _kind(rotary.config) != "longrope":
            found = (rotary.inv_freq, rotary.attention_scaling)
        return cls._read(rotary.config, section, found)

    @classmethod
    def from_config(cls, config: Any, section: tuple[int, ...] | None = None) -> RopeSpec:
        """Compute the frequencies as transformers' rotary module of this config would.

        Args:
            config: of one of mmkv's own text models.
            section: frequencies per axis where the config names none, for M-RoPE.

        Raises:
            ModelError: as :meth:`from_rotary`.
        """
        kind = _kind(config)
        found: tuple[Tensor, float] | None = None
        if kind == "default":
            found = (_default_frequencies(config), 1.0)
        elif kind != "longrope":
            found = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        return cls._read(config, section, found)

    @classmethod
    def _read(
        cls,
        config: Any,
        section: Sequence[int] | None,
        found: tuple[Tensor, float] | None,
    ) -> RopeSpec:
        """Complete frequencies and scale with what the config says; None: it has two sets."""
        parameters = config.rope_parameters
        kind = parameters["rope_type"]
        section = parameters.get("mrope_section") or section
        long_inv_freq, switch_at = None, None
        if found is None:
            switch_at = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            # transformers picks the long factors by the length it is shown.
            long_inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](
                config, device=torch.device("cpu"), seq_len=switch_at + 1
            )
            found = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=switch_at)
        inv_freq, scale = found
        return cls(
            kind=kind,
            inv_freq=inv_freq.detach().float().cpu().clone(),
            scale=float(scale),
            mrope_section=tuple(section) if section else None,
            long_inv_freq=None if long_inv_freq is None else long_inv_freq.float().cpu(),
            switch_at=switch_at,
        )


def _kind(config: Any) -> str:
    kind = config.rope_parameters["rope_type"]
    if kind not in _STATIC_ROPE:
        raise ModelError(
            f"rope scaling {kind!r} is not supported; use a checkpoint with one of "
            f"{', '.join(sorted(_STATIC_ROPE))}"
        )
    return kind


def _default_frequencies(config: Any) -> Tensor:
    """Compute ``theta ** (-2 i / rot)``, float32 ``[rot/2]``."""
    rot = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "phi3":  # the other models rotate whole heads, whatever it says
        rot = int(rot * config.rope_parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rot, 2, dtype=torch.float) / rot
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents)


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes of one decoder. ``max_position`` counts rope positions; the rest are plain sizes."""

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

    @property
    def rows(self) -> int:
        """Return the number of cache rows of one sequence: layers x KV heads."""
        return self.num_layers * self.num_kv_heads

    @property
    def group(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def matrix_numbers(self, intermediate_size: int) -> int:
        """Count the numbers of embedding and matrices of a SwiGLU model of these sizes."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * intermediate_size)
        return self.vocab_size * self.hidden_size + self.num_layers * layer

    @classmethod
    def from_hf(cls, text_model: Any) -> DecoderSpec:
        """Read the sizes off a transformers text model (embed_tokens, layers, norm, rotary_emb).

        Raises:
            ModelError: when the model uses a part this decoder does not have.
        """
        return cls.from_config(
            text_model.config, lambda: RopeSpec.from_rotary(text_model.rotary_emb)
        )

    @classmethod
    def from_config(cls, config: Any, rope: Callable[[], RopeSpec]) -> DecoderSpec:
        """Read the sizes off the config of a text model; ``rope`` reads its rotary embedding.

        Raises:
            ModelError: as :meth:`from_hf`.
        """
        if getattr(config, "hidden_act", "silu") != "silu":
            raise ModelError(
                f"activation {config.hidden_act!r} is not supported; this decoder runs SwiGLU "
                "(hidden_act 'silu') models"
            )
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_eps=config.rms_norm_eps,
            max_position=config.max_position_embeddings,
            sliding_window=attention_windows(config, layers),
            rope=rope(),
        )


def attention_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer of a text model; None: all tokens.

    Raises:
        ModelError: for layers of another kind.
    """
    kinds = getattr(config, "layer_types", None) or [None] * layers
    unknown = set(kinds) - {None, "full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"layer types {sorted(unknown)} are not supported; use a checkpoint with full or "
            "sliding-window attention only"
        )
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    return tuple(None if kind == "full_attention" else window for kind in kinds)
