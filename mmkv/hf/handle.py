"""``retain(model)``: transformers' ``generate`` on a bounded KV cache, until it is closed."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmkv.engine.budget import Budget
from mmkv.engine.config import EngineConfig, require_options
from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError, ModelError, SessionError
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.engine.model.families import Family, family_for, find
from mmkv.engine.model.gates import Gates, WriteGates
from mmkv.engine.model.panels import sampled
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.weights import DecoderWeights, separate
from mmkv.engine.policies import Policy
from mmkv.engine.runtime import Runtime
from mmkv.hf.cache import RetainedCache
from mmkv.hf.generate import Call
from mmkv.hf.hosted import Host, HostedFamily, HostedRuntime
from mmkv.shipped import with_shipped_gates

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAMPLED = 67  # numbers of each parameter
_OWN = {"model", "mmproj", "adapter", "device", "dtype", "weights"}


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
