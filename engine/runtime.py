"""The engine: one model, one page pool, many sessions."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor

from mmkv.engine.backends import Backends, delta_functions, kernels_for
from mmkv.engine.backends.base import LoadedModel
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.backends.torch.write_step import attach_write_gates
from mmkv.engine.budgets import Budgets, SharedBudget, batch_of
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.cache.choice import choose_form
from mmkv.engine.cache.layout import Layout
from mmkv.engine.config import DEFAULT_BUDGET, EngineConfig, require_options
from mmkv.engine.drafts import Drafts, Guess, keeping_all
from mmkv.engine.errors import GateError, InputError, PolicyError
from mmkv.engine.interrupts import FairLock, whole
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.families.base import Family, Turn
from mmkv.engine.model.families.features import VisionCache
from mmkv.engine.model.families.loading import load, resolve_device
from mmkv.engine.model.gates import (
    Gates,
    WriteGates,
)
from mmkv.engine.model.rope import Rope
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.state_layer import DeltaLayer
from mmkv.engine.model.weights import DecoderWeights
from mmkv.engine.paths import user_path
from mmkv.engine.policies import Budget, Needs, Policy
from mmkv.engine.policies.pruning import check_pruner
from mmkv.engine.policies.registry import check_policy
from mmkv.engine.policy_choice import choose, require_named_gates
from mmkv.engine.scorer_state import has_on_append, has_on_step, sequence_memory, tap_layers
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.session_file import load_session
from mmkv.engine.steps import decode_step, decode_steps
from mmkv.engine.system import give_back, keep_freed

_LOADING = {"model", "adapter", "lookahead", "device", "dtype", "weights", "threads"}
_FEATURES = 8  # the share of a limit that features of pictures may take: one of so many


class Runtime:
    """Decodes with a bounded KV cache.

    Threads may share it: :attr:`lock` is held during a step or a chunk of a prompt, and their
    sessions take turns in between.

    Args:
        policy: a :class:`Policy`; budget: the default of new sessions.
        options: risk, budget_max, evict_every, prefill_chunk, page_size, kv, kv_limit,
            vision_cache, endless and lossless of :class:`mmkv.engine.config.EngineConfig`.

    Attributes:
        interval: when sessions are cut while they decode.
        vision_cache: features of pictures that sessions have read.
        form_note: why the cache has the form it has, where a budget in bytes chose it.

    Raises:
        InputError: for an option that only loading a checkpoint reads.
        PolicyError, BudgetError: for a value that cannot be.
    """

    def __init__(
        self,
        family: Family,
        spec: DecoderSpec,
        weights: DecoderWeights,
        gates: Gates | WriteGates | None,
        policy: Policy,
        budget: Budget | float | str | None = None,
        **options: Any,
    ) -> None:
        self.lock = FairLock()
        _require_running(options, gates)
        config = EngineConfig(policy=policy, budget=budget, **options)
        check_policy(policy)
        _require_fit(policy, family, spec)
        drafting: Policy | None = None
        if config.lossless:
            _require_lossless(config, weights)
            drafting, policy = policy, keeping_all(policy)
        scores = policy.evicts or drafting is not None
        self.family, self.spec, self.policy = family.merging(policy.merger), spec, policy
        self.device, self.dtype = weights.embed.device, weights.dtype
        self.budget = Budget.of(DEFAULT_BUDGET if config.budget is None else config.budget)
        self.interval = policy.every(config.evict_every)
        self.prefill_chunk = max(config.prefill_chunk, family.least_chunk)
        write_gates: WriteGates | None = None
        if policy.admission is not None:
            policy, write_gates = attach_write_gates(policy, gates, spec)
            write_gates = write_gates.to(self.device, self.dtype)
            self.policy = policy
        self._gates = gates if isinstance(gates, Gates) else None
        self._exact_gates = weights.form == "auto"
        reads_gates = policy.scoring.needs.gates and scores
        # No text says what a picture's placeholder stands for: replies must not hold one.
        media = [token for token in family.placeholder.values() if token < weights.head.shape[0]]
        self.model = LoadedModel(
            device=self.device,
            spec=spec,
            decoder=self._make_decoder(
                weights,
                self._placed_gates if reads_gates else None,
                tap_layers(drafting or policy, spec),
            ),
            rope=self._make_rope(),
            policy=policy,
            needs=policy.scoring.needs if scores else Needs(),
            write_gates=write_gates,
            interval=self.interval,
            never_chosen=torch.tensor(media, dtype=torch.int64, device=self.device),
            has_on_append=scores and has_on_append(policy.scoring),
            has_on_step=scores and has_on_step(policy.scoring),
        )
        self.endless = config.endless and not self.decoder.hosted and drafting is None
        state = self.model.needs.state if policy.admission is None else 1  # log g
        self._make_cache(config, state, weights, drafting)
        self.lock.taken = self.cache.free_lost
        self.left: WeakSet[object] = WeakSet()  # passes over prompts
        self.policy_note: str | None = None
        self.budgets = Budgets(self)
        self.backends = Backends(self.model, self.cache)
        self.drafts = None if drafting is None else Drafts(self, drafting)
        # A budget that can never hold is the user's mistake now, not at the first eviction.
        self.budgets.allowed(self.budget, 0)
        self.budgets.dial(self.budget)

    def _make_cache(
        self, config: EngineConfig, state: int, weights: DecoderWeights, drafting: Policy | None
    ) -> None:
        """Have an empty cache, and one for features of pictures; both share ``kv_limit``.

        Args:
            state: numbers that the policy keeps of an entry.
            drafting: chooses what drafts read, or None.
        """
        size, spec = config.page_size, self.spec
        # A budget that binds nothing chooses nothing.
        binding = self.budget.ceiling if self.policy.evicts else Budget.of(DEFAULT_BUDGET)
        layout = Layout(size, spec.head_dim, self.dtype, state=state)
        form, self.form_note = choose_form(
            config.kv, binding, spec.rows, spec.max_position, layout, self.interval
        )
        pool = PagePool(size, spec.head_dim, 0, self.dtype, self.device, None, state, form)
        features = config.vision_cache_bytes if self.family.has_vision else 0
        if config.kv_limit is not None:
            features = min(features, config.kv_limit // _FEATURES)
            pool.limit = (config.kv_limit - features) // pool.page_bytes
        self.vision_cache = VisionCache(features)
        memory = sequence_memory(drafting or self.policy, spec, self.dtype)
        self.cache = RaggedCache(
            pool, spec.entry_layers, spec.num_kv_heads, memory, weights.states()
        )

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Self:
        """Load a checkpoint and its gates.

        Args:
            path_or_hub_id: a transformers checkpoint folder, the id of one on the hub, or a GGUF
                file.
            progress: called with a few words on what is being loaded.
            options: those of :class:`mmkv.engine.config.EngineConfig`: policy (a name or a
                :class:`Policy`), adapter, budget, risk, budget_max, lookahead, evict_every,
                prefill_chunk, page_size, gates, device, dtype, weights, kv, kv_limit, vision_cache,
                threads, mmproj, endless, lossless.

        Raises:
            ModelError, GateError, PolicyError, BudgetError.
        """
        require_options(options, "from_pretrained", ("progress",))
        return cls.from_config(EngineConfig(model=path_or_hub_id, **options), progress)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        *,
        pictures: bool = False,
    ) -> Self:
        """Load the checkpoint and gates that ``config`` names.

        Without a policy and without gates nothing is evicted, unless a budget is given
        (``policy_note`` says so, as it does of gates that seem to be another model's).
        ``pictures``: some will come, so what reads them is imported beside the weights.

        Raises:
            ModelError, GateError, PolicyError, BudgetError.
        """
        name = config.checkpoint()
        require_named_gates(config)
        _use_threads(config)
        device = resolve_device(config.device)
        if device.type == "cpu":
            keep_freed()
        family, spec, weights = load(
            name,
            dtype=config.dtype,
            device=device,
            progress=progress,
            pictures=pictures,
            form=config.weights,
            kernels=kernels_for(config.weights, device),
            adapter=config.adapter,
            label=str(config.model),
        )
        engine = cls.from_parts(config, family, spec, weights)
        if engine.device.type == "cpu":
            give_back()
        return engine

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        family: Family,
        spec: DecoderSpec,
        weights: DecoderWeights,
        gates: Gates | WriteGates | None = None,
    ) -> Self:
        """Run a model that is in memory already; see :meth:`from_config`.

        Args:
            config: ``model`` names where the weights come from: gates may lie beside them.
            gates: those to use; None: those that ``config`` names, or the checkpoint's own.

        Raises:
            GateError, PolicyError, BudgetError.
        """
        _use_threads(config)
        chosen, gates, note = choose(config, spec, gates, family.has_vision)
        engine = cls(
            family,
            spec,
            weights,
            gates,
            chosen,
            config.budget,
            evict_every=config.evict_every,
            prefill_chunk=config.prefill_chunk,
            page_size=config.page_size,
            kv=config.kv,
            kv_limit=config.kv_limit,
            vision_cache=config.vision_cache,
            endless=config.endless,
            lossless=config.lossless,
        )
        engine.policy_note = note
        return engine

    def _make_decoder(
        self, weights: DecoderWeights, gates: Gates | None, taps: tuple[int, ...]
    ) -> Decoder:
        for layer in weights.layers:
            if isinstance(layer.state_layer, DeltaLayer):
                layer.state_layer.functions = delta_functions(layer.state_layer.conv.device)
        kernels = kernels_for(weights.form, self.device)
        return Decoder(self.spec, weights, gates, taps, kernels.elementwise, kernels.experts)

    def _make_rope(self) -> Rope:
        spec = self.spec
        there = [at for at, index in enumerate(spec.entry_index) if index is not None]
        local = [spec.is_local(layer) for layer in there]
        return Rope(spec.rope, self.device, self.dtype, spec.local_rope, local)

    @property
    def decoder(self) -> Decoder:
        """Runs tokens through the layers."""
        return self.model.decoder

    @property
    def rope(self) -> Rope:
        """The angles of positions."""
        return self.model.rope

    @property
    def write_gates(self) -> WriteGates | None:
        """The write gates of a policy with an admission, on this device."""
        return self.model.write_gates

    @property
    def never_chosen(self) -> Tensor:
        """Ids int64 of tokens that no reply may hold."""
        return self.model.never_chosen

    def gates(self, layer: int, hidden: Tensor) -> Tensor:
        """log_beta float32 ``[tokens, kv_heads]`` of ``hidden [tokens, d]`` (input_layernorm's).

        Raises:
            GateError: the engine was loaded without gates.
        """
        if self._placed_gates is None:
            raise GateError("this engine has no gates; load it with gates=PATH")
        return self._placed_gates.log_beta(layer, hidden)

    @functools.cached_property
    def _placed_gates(self) -> Gates | None:
        """The gates on this device; a policy that does not read them takes no memory for them.

        Beside weights in fewer bits, their trunks are rounded to bfloat16.
        """
        if self._gates is None:
            return None
        if self._exact_gates:
            return self._gates.to(self.device, self.dtype)
        # Its product rounds no states for bfloat16.
        kernels = kernels_for("int8", self.device)
        return self._gates.in_bf16(kernels, self.device, self.dtype)

    def share(
        self, budget: Budget | float | str, floor: float = 0.0, by_risk: bool = False
    ) -> None:
        """Let all sessions of this engine compete for one budget from now on.

        What a session keeps then depends on the others (:class:`SharedBudget`), and its own
        budget binds no more. The form of the cache stays, also where a budget in bytes chose it.

        Args:
            budget: entries per row, of all sessions together.
            floor: entries per row that each session keeps in any case, up to an equal share.
            by_risk: whether sessions that have forgotten more (:mod:`mmkv.engine.risk`) get room
                from those that have forgotten less.

        Raises:
            BudgetError, PolicyError: it cannot be; SessionError: sessions are open already. Nothing
                has changed then.
        """
        with self.lock:
            if self.drafts is not None:
                raise PolicyError("sessions that keep all entries share no budget; leave one out")
            made = Budget.of(budget)
            self.budgets, self.budget = SharedBudget(self, made, floor, by_risk), made
            self.model.shared = True
            self.form_note = None  # it speaks of a budget that is gone

    @property
    def shared(self) -> SharedBudget | None:
        """The budget that all sessions share, or None: each has its own."""
        return self.budgets if isinstance(self.budgets, SharedBudget) else None

    def session(self, budget: Budget | float | None = None) -> CachedSequence:
        """Open an empty session.

        Raises:
            BudgetError: for a budget below one entry per row, one of its own where all share, or
                where the policy evicts nothing.
        """
        return self._open(self.budgets.checked(budget))

    @whole
    def load_session(self, path: str | Path) -> tuple[CachedSequence, dict[str, str]]:
        """Open a saved session: the session and the strings saved beside it.

        Raises:
            SessionError: unreadable, or made with another model, gates or policy.
            BudgetError: the pool has no room for it.
        """
        return load_session(self, user_path(path))

    def turn(self, inputs: Mapping[str, Any], offset: int, salt: str = "") -> Turn:
        """Build the turn that follows ``offset`` rope positions; see :meth:`Family.turn`.

        Pictures that were read before under the same ``salt`` are not encoded again.
        """
        return self.family.turn(inputs, offset, self.device, self.vision_cache, salt)

    def identity(self) -> dict[str, Any]:
        """What a session file must agree with to continue on this engine."""
        held = [gates.fingerprint() for gates in (self.decoder.gates, self.write_gates) if gates]
        return {
            "weights": self.decoder.weights.form,
            "model": self.decoder.weights.fingerprint(),
            "dtype": str(self.dtype),
            "gates": "+".join(held) or "none",
            "policy": self.policy.identity(),
            "evict_every": self.interval.named,
            "kv": self.cache.pool.form.name,
        }

    @torch.inference_mode()
    def decode(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        guesses: Sequence[Guess] | None = None,
    ) -> Tensor:
        """Append one token to each of B sessions in one batched step.

        Ctrl-C is delivered when the step is over, and the step stands (``seen`` tells).

        Args:
            sessions: B different open sessions of this engine; token_ids: B ids.
            guesses: choose the tokens that lossless decoding drafts; None: the likeliest.

        Returns:
            float32 logits ``[B, vocab]``.

        Raises:
            InputError, SessionError, ContextError, BudgetError: before anything has changed.
        """
        return decode_step(self, sessions, token_ids, guesses)

    @torch.inference_mode()
    def decode_many(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> list[list[int]]:
        """Generate ``steps`` tokens for each of B sessions, the first after ``token_ids``.

        On a GPU all steps are replays of one CUDA graph, and nothing is read back in between; where
        that cannot be (:attr:`many_path` says why) it is a loop over :meth:`decode`.

        Args:
            token_ids: a token for each, which is appended first.
            stop: token ids that end a session's reply; returned, but not appended to its cache.
            draws: per session how its tokens are drawn; None: the likeliest.

        Returns:
            per session the generated tokens: ``steps`` of them, or up to a stop token.

        Raises:
            InputError, SessionError, ContextError: before anything has changed.
            BudgetError: the pool would pass its limit; what was appended before that stays, as it
                does where a session goes on beyond the context and then finds no position.
            NotFiniteError: logits were not finite; holds what was generated before.
        """
        return decode_steps(self, sessions, token_ids, steps, stop, draws)

    @torch.inference_mode()
    def trim(self) -> int:
        """Give the cache's unused pages back to the allocator, as after a long prompt's prefill.

        What the sessions hold stays as it is. The pages in use are copied; the next step that
        needs a page grows the pool again, by an eighth. Nothing is done while a pass over prompts
        that was left knows its pages (:class:`mmkv.engine.prefill.ChunkPass`).

        Returns:
            bytes given back. On a GPU torch keeps them for its next tensors.
        """
        with self.lock:
            given_back = 0 if self.left else self.cache.trim()
            if given_back:
                self.backends.reset()
                if self.drafts is not None:
                    self.drafts.reset()
            return given_back

    @property
    def many_path(self) -> str:
        """Backend of :meth:`decode_many`: ``graph``, or ``step by step: `` and why."""
        why = self.backends.for_bursts().burst_reason()
        return f"step by step: {why}" if why else "graph"

    @property
    def decode_path(self) -> str:
        """Backend of :meth:`decode`: ``native``, on a GPU ``CUDA graph``, or ``torch: `` and why.

        A batch runs on torch when one of its sessions must
        (:attr:`mmkv.engine.sequence.CachedSequence.decode_path`).
        """
        return self.path_of(())

    @property
    def evict_path(self) -> str:
        """Backend of scores and evictions in a step: as :attr:`decode_path`, or ``never``.

        A step may run in C or on Triton kernels with its scores in torch: the kernels know some
        scorers, others are computed by their own torch code.
        """
        if not self.policy.evicts and self.policy.admission is None:
            return "never"
        if self.device.type == "cuda":
            return self.decode_path
        backend, why = self.backends.first(lambda each: each.no_eviction_reason())
        if why:
            return f"{backend.path}: {why}"
        in_torch = ["write gates"] if self.policy.admission is not None else []
        if not backend.scores_in_torch:
            return f"{backend.path}, {in_torch[0]} in torch" if in_torch else backend.path
        what = " and ".join([*in_torch, "scores"])
        return f"{backend.path}, {what} in torch: policy {self.policy.name!r}"

    def path_of(self, sessions: Sequence[CachedSequence]) -> str:
        """Name what these sessions are decoded on, as :attr:`decode_path` does."""
        batch = batch_of(sessions) if sessions else None
        backend, why = self.backends.first(lambda each: each.unsupported_reason(batch))
        return f"{backend.path}: {why}" if why else backend.path

    def _open(self, budget: Budget) -> CachedSequence:
        return CachedSequence(self, budget)


def _require_running(options: Mapping[str, Any], gates: object) -> None:
    """Raise InputError for an option that only loading a checkpoint reads."""
    loading = options.keys() & _LOADING
    if isinstance(gates, (str, Path)):
        loading = loading | {"gates"}
    if loading:
        raise InputError(
            f"Runtime(...) loads nothing and cannot read {', '.join(sorted(loading))}; "
            "Runtime.from_pretrained(PATH, ...) does"
        )


def _require_lossless(config: EngineConfig, weights: DecoderWeights) -> None:
    """Raise PolicyError where lossless decoding cannot be."""
    why = ""
    if weights.states():
        why = "takes tokens back, which this model's linear layers cannot"
    elif config.budget is not None and Budget.of(config.budget).risk is not None:
        why = "keeps all entries, so that there is no risk that a budget could follow"
    if why:
        raise PolicyError(f"lossless decoding {why}; leave lossless out")


def _require_fit(policy: Policy, family: Family, spec: DecoderSpec) -> None:
    """Raise PolicyError where a policy cannot run on a model."""
    if policy.admission is not None and family.whole_pictures:
        raise PolicyError(
            f"policy {policy.name!r}: write gates are not made for tokens that see those "
            "behind them in their picture; choose another policy"
        )
    if policy.pruner is None:
        return
    if spec.has_entries:
        raise PolicyError(
            f"policy {policy.name!r} drops tokens on their way through the layers, and this "
            "model has linear layers that must see them all; choose another policy"
        )
    check_pruner(policy.pruner, spec.num_layers, tuple(spec.sliding_window))


def _use_threads(config: EngineConfig) -> None:
    """Have torch, and C after it, run on as many threads as the config says. Raises InputError."""
    if config.threads is None:
        return
    most = max(4 * (os.cpu_count() or 1), 16)  # OpenMP ends the process where it cannot start them
    if config.threads > most:
        raise InputError(f"threads is {config.threads}; give at most {most} on this machine")
    torch.set_num_threads(config.threads)
