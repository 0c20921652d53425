"""Models that the engine does not know: their own forward pass, over the engine's cache.

The model's attention is a function registered with transformers under the name ``mmkv``: during a
pass of the engine it stores keys and values in the engine's pages and attends there. Outside of
such a pass it is transformers' own (sdpa).
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmkv.engine.errors import ModelError, PolicyError
from mmkv.engine.model.decoder import ChunkAttention, Decoder, StepAttention
from mmkv.engine.model.families import names
from mmkv.engine.model.families.text import TextFamily
from mmkv.engine.model.gates import Gates
from mmkv.engine.model.spec import DecoderSpec, RopeSpec, attention_windows
from mmkv.engine.model.weights import DecoderWeights
from mmkv.engine.policies import make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import tap_layers

ATTENTION = "mmkv"
_GROWS_WITH_LENGTH = {"dynamic", "longrope"}
# Parts of an attention that the engine's cache does not have.
_FOREIGN = {"softcap": "a softcap", "s_aux": "sinks", "position_bias": "a position bias"}
_current = threading.local()


class HostedFamily(TextFamily):
    """A text model of any type; its tokens stand at consecutive positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        super().__init__(model)

    @staticmethod
    def text_model(hf_model: Any) -> Any:
        """Return something that has the model's embedding."""
        return _Embedded(hf_model.get_input_embeddings())


class _Embedded:
    def __init__(self, embed_tokens: Any) -> None:
        self.embed_tokens = embed_tokens


class _Pass:
    """One forward pass of the engine: where its attention goes, and what its gates read."""

    def __init__(self, decoder: HostedDecoder, step: StepAttention) -> None:
        self.step, self.gates = step, decoder.gates
        self._spec = decoder.spec
        self.gate_logits: dict[int, Tensor] = {}
        self.layers: list[int] = []

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any]
    ) -> Tensor:
        """Attend with ``query [1, Hq, T, D]`` and new keys, values ``[1, H, T, D]``."""
        spec, layer = self._spec, module.layer_idx
        odd = [words for name, words in _FOREIGN.items() if named.get(name) is not None]
        window = spec.sliding_window[layer]
        if named.get("sliding_window", window) != window:
            odd.append("a sliding window of its own")
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        shapes = [(1, count, query.shape[2], spec.head_dim) for count in heads]
        if odd or [tuple(part.shape) for part in (query, key, value)] != shapes:
            raise ModelError(
                f"the attention of {type(module).__name__} has "
                f"{odd[0] if odd else 'heads of several sizes'}, which mmkv's cache does not"
            )
        self.layers.append(layer)
        scale = named.get("scaling")
        if scale is not None and scale != spec.head_dim**-0.5:
            query = query * (scale * spec.head_dim**0.5)
        out = self.step.attend(layer, *(part[0].transpose(0, 1) for part in (query, key, value)))
        return out.view(1, query.shape[2], spec.num_heads, spec.head_dim)

    def read_gate(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compute the gate of a layer from its attention's input ``[1, T, d]``."""
        if self.gates is not None:
            hidden = named["hidden_states"] if "hidden_states" in named else arguments[0]
            self.gate_logits[module.layer_idx] = self.gates.logits(module.layer_idx, hidden[0])


class HostedDecoder(Decoder):
    """Runs tokens through a transformers model; returns logits where Decoder returns states."""

    hosted = True

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        gates: Gates | None,
        taps: tuple[int, ...],
        model: Any,
    ) -> None:
        super().__init__(spec, weights, gates, taps)
        self._model = model

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the model's own embeddings ``[T, d]``, scaled as it scales them."""
        return self._model.get_input_embeddings()(token_ids)

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        step: StepAttention,
        deepstack: tuple[tuple[Tensor, Tensor], ...] = (),
        tapped: list[Tensor] | None = None,
        chunks: ChunkAttention | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model; logits ``[T, vocab]``, or ``[B, vocab]`` of prompts' ends; and log_beta.

        Args:
            rope: the positions ``[T]``, twice, for the model rotates by itself. ``deepstack`` and
                ``tapped`` are not used; HostedRuntime refuses policies with taps.
        """
        ends = None if chunks is None else chunks.ends()
        keep = hidden.shape[0] if ends is None else 1 if ends.numel() == 1 else ends
        _current.engine_pass = engine_pass = _Pass(self, step)
        try:
            out = self._model(
                inputs_embeds=hidden[None],
                position_ids=rope[0][None],
                use_cache=False,
                logits_to_keep=keep,
                return_dict=True,
            )
        finally:
            _current.engine_pass = None
        if sorted(engine_pass.layers) != list(range(self.spec.num_layers)):
            raise ModelError(
                f"{len(engine_pass.layers)} of {self.spec.num_layers} layers of a "
                f"{type(self._model).__name__} attend through transformers' interface; mmkv keeps "
                "a cache for every layer"
            )
        logits = out.logits[0]
        if ends is not None and logits.shape[0] != ends.numel():  # the model gives all it has
            logits = logits[ends]
        if self.gates is None:
            return logits, None
        if len(engine_pass.gate_logits) != self.spec.num_layers:
            raise ModelError(
                f"the attention of a {type(self._model).__name__} does not show what gates read; "
                "choose a policy without gates, such as 'snapkv' or 'streamingllm'"
            )
        gates = [engine_pass.gate_logits[layer] for layer in range(self.spec.num_layers)]
        return logits, torch.nn.functional.logsigmoid(torch.stack(gates, 1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that :meth:`forward` gave, as float32."""
        return hidden.float()


class Positions:
    """Stands where the engine has cos and sin: the model makes its own."""

    def at(self, positions: Tensor, long: bool = False) -> tuple[Tensor, Tensor]:
        """Return the positions ``[T]`` of ``[1, T]``, twice."""
        return positions[0], positions[0]

    def text(self, positions: Tensor, long: bool = False) -> tuple[Tensor, Tensor]:
        """Return the positions ``[T]``, twice."""
        return positions, positions


class HostedRuntime(Runtime):
    """An engine whose forward pass is a transformers model's."""

    def __init__(self, family: HostedFamily, *parts: Any, **options: Any) -> None:
        super().__init__(family, *parts, **options)
        policy = self.policy
        needs = policy.scoring.needs
        more = self.decoder.taps or needs.outputs or needs.positions
        if policy.pruner is not None or policy.admission is not None or more:
            raise PolicyError(
                f"policy {policy.name!r} reads more of a model than its attention; for a "
                f"{family.config.model_type!r} model use one such as 'dbtrimkv' or 'snapkv'"
            )

    def _make_decoder(self, weights: DecoderWeights, gates: Gates | None) -> HostedDecoder:
        taps = tap_layers(self.policy, self.spec)
        family: Any = self.family
        return HostedDecoder(self.spec, weights, gates, taps, family.model)

    def _make_rope(self) -> Any:
        return Positions()


class Host:
    """Lets a model's attention run on the engine's cache, until it is released.

    Raises:
        ModelError: the model computes something else than it would by itself, or cannot at all.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self.spec = _spec(model)
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
        no_norm = embed.weight.data.new_zeros(0)
        self.weights = DecoderWeights(embed.weight.data, [], no_norm, head.weight.data)
        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, _mask)
        self._before = model.config._attn_implementation
        self._hooks = [
            module.register_forward_pre_hook(_before_attention, with_kwargs=True)
            for module in model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
        ]
        try:
            self._check()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the model its own attention back."""
        for hook in self._hooks:
            hook.remove()
        self._model.set_attn_implementation(self._before)

    @torch.no_grad()
    def _check(self) -> None:
        """Compare a few tokens with the model's own forward pass."""
        try:
            error = self._error()
        except (RuntimeError, TypeError, ValueError, AttributeError) as reason:
            raise ModelError(
                f"a {type(self._model).__name__} does not run over mmkv's cache: "
                f"{str(reason).splitlines()[0][:120]}"
            ) from reason
        if not error < (1e-3 if self.weights.dtype == torch.float32 else 0.1):
            raise ModelError(
                f"a {type(self._model).__name__} computes other logits over mmkv's cache (relative "
                f"error {error:.1e}); it has parts that mmkv does not know"
            )

    def _error(self) -> float:
        """Return the greatest difference of logits, as a part of the greatest logit."""
        model, family = self._model, HostedFamily(self._model)
        ids = torch.arange(3, 10, device=model.device) % family.vocab_size
        wanted = model(input_ids=ids[None], use_cache=False).logits[0].float()
        model.set_attn_implementation(ATTENTION)
        self._find_windows(ids)
        engine = HostedRuntime(family, self.spec, self.weights, None, make_policy("full"))
        with engine.session() as session:
            found = [session.prefill({"input_ids": ids[:4].cpu()}, None)]
            found += [session.decode(int(token)) for token in ids[4:]]
        return float((torch.stack(found) - wanted[3:]).abs().max() / wanted.abs().max())

    def _find_windows(self, ids: Tensor) -> None:
        """Take the windows off where the model masks by none: sliding_window is then left over
        from another model. Raises ModelError: it masks by others.
        """
        asked: set[int] = set()
        _current.windows = asked
        try:
            # Masks come first; the pass of the engine will say which attention it cannot do.
            with contextlib.suppress(ValueError):
                self._model(input_ids=ids[None], use_cache=False)
        finally:
            del _current.windows
        if not asked:
            none = (None,) * self.spec.num_layers
            self.spec = replace(self.spec, sliding_window=none)
        elif asked != {*self.spec.sliding_window} - {None}:
            raise ModelError(
                f"a {type(self._model).__name__} sees windows of {sorted(asked)} tokens, which its "
                "sliding_window and layer_types do not say"
            )


def _spec(model: Any) -> DecoderSpec:
    config = model.config
    if config.get_text_config() is not config or not model._can_set_attn_implementation():
        raise ModelError(
            f"model type {config.model_type!r} is not supported: mmkv runs {', '.join(names())}, "
            "and other text models that use transformers' attention interface"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds: set[Any] = {part.get("rope_type") for part in parts}
    if grows := kinds & _GROWS_WITH_LENGTH:
        raise ModelError(f"rope scaling {min(grows)!r} changes keys that the cache holds already")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_eps=0.0,
        max_position=config.max_position_embeddings,
        sliding_window=attention_windows(config, layers),
        rope=RopeSpec("own", torch.zeros(1)),
    )


def _engine_pass() -> _Pass | None:
    return getattr(_current, "engine_pass", None)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
) -> tuple[Tensor, None]:
    now = _engine_pass()
    if now is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    return now.attend(module, query, key, value, named), None


def _mask(*arguments: Any, **named: Any) -> Tensor | None:
    if (windows := getattr(_current, "windows", None)) is not None and named.get("local_size"):
        windows.add(named["local_size"])
    return sdpa_mask(*arguments, **named) if _engine_pass() is None else None


def _before_attention(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    now = _engine_pass()
    if now is not None:
        now.read_gate(module, arguments, named)
