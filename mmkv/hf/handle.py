"""``retain(model)``: transformers' ``generate`` on a bounded KV cache, until it is closed.

A model that the engine does not know runs its own forward pass (:class:`Host`): its attention is a
function registered with transformers under the name ``mmkv``, which stores keys and values in the
engine's pages and attends there during a pass of the engine, and is transformers' own (sdpa)
outside.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmkv.engine.budget import Budget
from mmkv.engine.config import EngineConfig, require_options
from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError, ModelError, PolicyError, SessionError
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.engine.model.decoder import ChunkAttention, Decoder, StepAttention
from mmkv.engine.model.families import Family, family_for, find, names
from mmkv.engine.model.families.text import TextFamily
from mmkv.engine.model.gates import Gates, WriteGates
from mmkv.engine.model.panels import sampled
from mmkv.engine.model.spec import DecoderSpec, RopeSpec, attention_windows
from mmkv.engine.model.weights import DecoderWeights, separate
from mmkv.engine.policies import Policy, make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.system import require_card
from mmkv.hf.cache import RetainedCache
from mmkv.hf.generate import Call
from mmkv.shipped import with_shipped_gates

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAMPLED = 67  # numbers of each parameter
_OWN = {"model", "mmproj", "adapter", "device", "dtype", "weights"}
ATTENTION = "mmkv"
_GROWS_WITH_LENGTH = {"dynamic", "longrope"}
# Parts of an attention that the engine's cache does not have.
_FOREIGN = {"softcap": "a softcap", "s_aux": "sinks", "position_bias": "a position bias"}
_current = threading.local()


@dataclass(frozen=True)
class RetainedMemory:
    """What a retained model's cache takes.

    Attributes:
        rows: per conversation of the latest ``generate`` what it held at the end of the call.
        kv_bytes: keys and values that caches hold now; 0 where none was kept.
        pool_bytes: of the page pool, free pages included; :meth:`Retained.trim` returns those.
    """

    rows: tuple[Memory, ...]
    kv_bytes: int
    pool_bytes: int


def retain(
    model: PreTrainedModel,
    *,
    gates: str | Path | Gates | WriteGates | None = None,
    policy: str | Policy | None = None,
    budget: Budget | float | str | None = None,
    **options: Any,
) -> Retained:
    """Let ``model.generate`` run on a bounded cache from now on, to the end of a ``with`` block.

    Args:
        model: a transformers model of a family that mmkv runs, on one device, with its
            language-model head. Nothing else in the process changes.
        gates: a gate folder, file, hub id, ``"random"`` or gates in memory; None: those in the
            checkpoint's own ``gates/`` folder, or else those that ship for it, as
            :meth:`mmkv.Engine.from_pretrained` takes them (``handle.note`` says which).
        policy: its name with parameters, or a Policy. None: ``dbtrimkv`` with gates; without,
            ``rkv`` for a model that reads pictures and ``streamingllm`` for one that reads text.
        budget: M, the mean entries kept per (layer, KV head) of each row of a batch; a Budget; or
            text such as ``"25%"``. None: 256, and nothing is evicted without gates and policy.
        options: lookahead, evict_every, prefill_chunk, page_size, kv_limit and the like of
            :class:`mmkv.engine.config.EngineConfig`.

    Returns:
        The handle; ``close()`` and the end of a ``with`` block put everything back.

    Raises:
        InputError, ModelError, GateError, PolicyError, BudgetError: the model is as it was.
    """
    return Retained(model, gates, policy=policy, budget=budget, **options)


class Retained:
    """A model whose ``generate`` runs on a bounded cache; made by :func:`retain`.

    The engine reads the model's own weights: matrices that it wants joined are joined layer by
    layer, and the model's parameters become views of them until the handle is closed. Weights that
    are changed or replaced meanwhile are followed by the next ``generate``, or refused. Threads may
    call ``generate`` at the same time.

    Attributes:
        model: the model; note: a line for the user about the choice of policy and gates, or of the
            form of the cache, or None.
    """

    def __init__(
        self, model: PreTrainedModel, gates: str | Path | Gates | WriteGates | None, **options: Any
    ) -> None:
        _checked(model)
        if isinstance(vars(model).get("generate"), _Plain):
            del vars(model)["generate"]  # a copy of a retained model
        if "generate" in vars(model):
            raise InputError(
                "this model's generate has been replaced already; close the other retain first "
                "(model.generate.handle.close())"
            )
        if clash := options.keys() & _OWN:
            raise InputError(f"retain takes no {min(clash)}: the model has its own")
        if "vision_cache" in options:
            raise InputError("retain takes no vision_cache: the model's weights may change")
        require_options(options, "retain")
        loaded = gates if isinstance(gates, Gates | WriteGates) else None
        name = getattr(model, "name_or_path", "") or type(model).__name__
        config = EngineConfig(
            model=name,
            gates=gates if isinstance(gates, str | Path) else None,
            vision_cache=0,
            **options,
        )
        self._config, self._shipped = (
            with_shipped_gates(config) if loaded is None else (config, None)
        )
        self.model, self._gates, self._lock = model, loaded, threading.Lock()
        self._memory: tuple[Memory, ...] = ()
        self._caches: weakref.WeakSet[RetainedCache] = weakref.WeakSet()
        self._host: Host | None = None
        self._views: list[Tensor] = []
        self._engine: Runtime | None = None
        try:
            with CtrlC():
                self._begin()
                self._stock = model.generate
                vars(model)["generate"] = _Generate(self, self._stock)
        except BaseException:
            self._end()
            raise

    def _begin(self) -> None:
        """Make the engine of the model as it is now."""
        engine = self._engine = self._build()
        engine.model.never_chosen = engine.never_chosen[:0]  # transformers chooses from all tokens
        engine.policy_note = engine.policy_note or self._shipped
        self.note = "; ".join(filter(None, (engine.policy_note, engine.form_note))) or None
        self._seen = _Seen(self.model)

    def _follow(self) -> None:
        """Make the engine anew where the model has other weights than it had.

        Raises:
            ModelError: it cannot be retained as it is now; an error that only making the engine
                shows closes the handle.
        """
        with self._lock:
            if self._engine is None or self._seen == _Seen(self.model):
                return
            _checked(self.model)
            try:
                self._put_back()
                self._begin()
            except BaseException:
                self._end()
                raise

    def _build(self) -> Runtime:
        """Make the engine: mmkv's own over the model's weights, or one that runs the model."""
        model, config, gates = self.model, self._config, self._gates
        family_type = _family(model)
        if family_type is None:
            self._host = Host(model)
            family = HostedFamily(model)
            spec, weights = self._host.spec, self._host.weights
            return HostedRuntime.from_parts(config, family, spec, weights, gates)
        text_model: Any = family_type.text_model(model)
        section, interleaved = family_type.mrope_section, family_type.mrope_interleaved
        kinds, sees = family_type.state_kinds, family_type.has_vision
        spec = DecoderSpec.from_hf(text_model, section, interleaved, kinds, sees)
        # Views that were made in inference mode could not be trained.
        with torch.inference_mode(False):
            head = family_type.output_head(model)
            own = family_type.state_layer
            weights, self._views = DecoderWeights.share(text_model, head, spec, own)
        return Runtime.from_parts(config, family_type(model), spec, weights, gates)

    @property
    def engine(self) -> Runtime:
        """Return the engine: its policy, budget and ``decode_path``. Raises SessionError."""
        if self._engine is None:
            raise SessionError("the model is no longer retained; call mmkv.hf.retain again")
        return self._engine

    def memory(self) -> RetainedMemory:
        """Return what the cache takes, in bytes."""
        if self._engine is None:
            return RetainedMemory(self._memory, 0, 0)
        held = [memory.kv_bytes for cache in list(self._caches) for memory in cache.memory()]
        pool = self._engine.cache.pool
        return RetainedMemory(self._memory, sum(held), pool.num_pages * pool.page_bytes)

    def trim(self) -> int:
        """Give unused pages back to the allocator; the bytes given back."""
        return self.engine.trim()

    @whole
    def close(self) -> None:
        """Put ``generate`` and the weights back and return all memory; again: no effect."""
        with self._lock:
            if self._engine is not None:
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        vars(self.model).pop("generate", None)
        for cache in list(self._caches):
            cache.close()
        # Without it nothing keeps the joined matrices but the model's own views.
        self._engine = None
        self._put_back()

    def _put_back(self) -> None:
        if self._host is not None:
            self._host.release()
            self._host = None
        with torch.inference_mode(False):
            separate(self._views)
        self._views = []

    @whole
    def _generate(self, *arguments: Any, **named: Any) -> Any:
        self._follow()
        call = Call(self.engine, self._stock, (arguments, named))
        made = call.run()
        self._memory = call.memory
        if call.cache is not None:
            call.cache.owner = self._caches
            self._caches.add(call.cache)
        return made


class _Generate:
    """A retained model's ``generate``; a deep copy of the model has its own weights and no engine.

    Attributes:
        handle: the :class:`Retained`.
    """

    def __init__(self, handle: Retained, stock: Any) -> None:
        functools.update_wrapper(self, stock)
        self.handle = handle

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.handle._generate(*arguments, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.handle.model))
        return self if copied is None else _Plain(copied)


class _Plain:
    """The ``generate`` of a copy of a retained model: transformers' own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return type(self._model).generate(self._model, *arguments, **named)


class _Seen:
    """What tells whether a model's weights are those that the engine was made of.

    Every parameter by name: which one it is, where and how often written, and some of its numbers,
    for writes through ``.data``, which torch does not count.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        parts = dict(model.named_parameters(remove_duplicate=False))
        self._facts = {
            name: (id(part), part.data_ptr(), part.dtype, part.shape, _writes(part))
            for name, part in parts.items()
        }
        self._kept = list(parts.values())  # so that no other gets the id of one that is gone
        some = [sampled(part.detach().reshape(-1), _SAMPLED).float() for part in parts.values()]
        places = {one.device for one in some}
        self._numbers = torch.cat(some if len(places) == 1 else [one.cpu() for one in some])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Seen)
            and self._facts == other._facts
            and torch.equal(self._numbers, other._numbers)
        )


def _writes(part: Tensor) -> int:
    """Count how often a tensor was written, as far as torch does."""
    return -1 if part.is_inference() else part._version


def _family(model: PreTrainedModel) -> type[Family] | None:
    """Return the family that runs this model. Raises ModelError."""
    return None if find(model.config.model_type) is None else family_for(model.config)


def _checked(model: object) -> type[Family] | None:
    """Return the family that runs this model, None where it has to run itself.

    Raises:
        InputError, ModelError: it cannot be retained.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"retain takes a transformers model, not a {type(model).__name__}; of a PEFT model "
            "pass what merge_and_unload() returns"
        )
    family = _family(model)
    head: Any = model.get_output_embeddings()
    if head is None or not model.can_generate():
        raise ModelError(
            f"a {type(model).__name__} does not generate; load the checkpoint with "
            f"{'AutoModelForCausalLM' if family is None else family.auto_class}"
        )
    places = {str(parameter.device) for parameter in model.parameters()}
    if len(places) > 1 or "meta" in places:
        raise ModelError(
            f"the model lies on {', '.join(sorted(places))}; load it whole on one device"
        )
    require_card(model.device)
    text_model: Any = model if family is None else family.text_model(model)
    kinds = {parameter.dtype for parameter in text_model.parameters()}
    if len(kinds) > 1 or not kinds <= set(_DTYPES):
        raise ModelError(
            f"the text weights are of {', '.join(sorted(map(str, kinds)))}; load the model in "
            "float32, bfloat16 or float16"
        )
    if family is not None:
        _check_parts(text_model, head)
    return family


def _check_parts(text_model: Any, head: Any) -> None:
    """Check that matrices are plain ones: the engine reads nothing else. Raises ModelError."""
    if getattr(head, "bias", None) is not None:
        raise ModelError("the language-model head has a bias, which mmkv does not run")
    for name, module in text_model.layers.named_modules():
        if "_proj" in name.rpartition(".")[2] and type(module) is not nn.Linear:
            raise ModelError(
                f"layers.{name} is a {type(module).__name__} of {type(module).__module__}, not a "
                "plain matrix; merge adapters into the model first (merge_and_unload)"
            )


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
        if options.get("lossless"):
            raise PolicyError(
                f"lossless decoding does not run the layers of transformers that a "
                f"{family.config.model_type!r} model has; leave lossless out"
            )
        super().__init__(family, *parts, **options)
        policy = self.policy
        needs = policy.scoring.needs
        more = self.decoder.taps or needs.outputs or needs.positions
        if policy.pruner is not None or policy.admission is not None or more:
            raise PolicyError(
                f"policy {policy.name!r} reads more of a model than its attention; for a "
                f"{family.config.model_type!r} model use one such as 'dbtrimkv' or 'snapkv'"
            )

    def _make_decoder(
        self, weights: DecoderWeights, gates: Gates | None, taps: tuple[int, ...]
    ) -> HostedDecoder:
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
