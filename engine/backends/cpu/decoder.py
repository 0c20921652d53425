"""NativeDecoder: a model's weights laid out for the C step."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Literal

import torch
from torch import Tensor

from mmkv.engine.backends.base import HOSTED, Batch
from mmkv.engine.backends.cpu.binding import (
    JOINS,
    MAX_TRUNK,
    BatchSlot,
    Eviction,
    Expert,
    Layer,
    Linear,
    Model,
    Step,
    library,
)
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.backends.cpu.kernels import Bf16Copies, linear
from mmkv.engine.cache import RaggedCache
from mmkv.engine.model.gates import Gates
from mmkv.engine.model.product import plain
from mmkv.engine.model.spec import DecoderSpec, DeltaSpec, Routing
from mmkv.engine.model.state_layer import DeltaLayer
from mmkv.engine.model.weights import DecoderWeights, LayerWeights, state_name
from mmkv.engine.policies.base import Group
from mmkv.engine.scorer_state import QUERIES

# With fewer weights per thread and step, a second thread saves less (0.28 against 0.35 ms on two
# idle cores) than it risks: on a busy machine it may keep the step waiting for milliseconds.
_NUMBERS_PER_THREAD = 2**22
_NOTED_STEPS = 64  # whose log betas lie in one tensor


class NativeDecoder:
    """Runs a decode step of one or more sequences in C: embedding rows to logits, cache included.

    It reads the tensors where they lie and keeps them alive; a gate's float32 values may change in
    place, but a tensor put in another's place later is not seen. Float32 projections that bfloat16
    holds exactly (of a model that transformers loaded, say) are copied in that form, which changes
    no result; those that are held in it are read as they are. For weights of the form ``bf16``
    states are rounded, too, as :func:`mmkv.engine.model.product.multiply_rounded` does.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        gates: Gates | None,
        mass: Literal["", Group] = "",
        taps: tuple[int, ...] = (),
    ) -> None:
        refused = self.unsupported_reason(weights, gates)
        loaded = library()
        if refused or isinstance(loaded, str):
            raise RuntimeError(refused)
        self._library, self._kept = loaded, (weights, gates)
        self._bf16 = Bf16Copies()
        matrix = functools.partial(linear, bf16=self._bf16, rounds=weights.form == "bf16")
        layers = (_layer(n, layer, spec, gates, matrix) for n, layer in enumerate(weights.layers))
        self._layers = (Layer * spec.num_layers)(*layers)
        # Where the layers without entries have their states: the cache replaces them as it grows.
        self._states: Tensor | None = None
        delta = spec.delta or DeltaSpec(0, 0, 0, 0, 0)
        routing = spec.routing or Routing(0, 0, False, 0)
        self._model = Model(
            layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary=2 * spec.rope.inv_freq.numel(),
            trunk=0 if gates is None else len(gates.layers[0].trunk),
            angles=1 if spec.local_rope is None else 2,
            gelu=spec.activation == "gelu_tanh",
            output_gate=spec.output_gate,
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            taps=delta.kernel,
            chosen=routing.chosen,
            normalized=routing.normalized,
            eps=spec.rms_eps,
            embed_scale=spec.embed_scale,
            embed=linear(weights.embed),
            norm=weights.norm.data_ptr(),
            head=matrix(weights.head),
            layer=self._layers,
        )
        long = spec.rope.inv_freq if spec.rope.long_inv_freq is None else spec.rope.long_inv_freq
        local = [] if spec.local_rope is None else [spec.local_rope.inv_freq]
        self._inv_freq = tuple(torch.cat([each, *local]) for each in (spec.rope.inv_freq, long))
        self._frequencies = [tensor.data_ptr() for tensor in self._inv_freq]
        self._views = CacheViews()
        self._vocab = weights.head.shape[0]
        self._most_threads = max(1, _read_numbers(weights, routing) // _NUMBERS_PER_THREAD)
        self._scratch, self._scratch_for = torch.empty(0), (0, 0, 0)
        self._tap_layers = torch.tensor(taps, dtype=torch.int64)
        # The residual stream ``[n, B, hidden]`` after the layers of `taps`, of the last step.
        self.tapped = torch.empty(0)
        self._entry_shape = (spec.entry_layers, spec.num_kv_heads) if gates is not None else None
        # Of the entries of the last steps ``[S, B, layers, heads]``, None without gates; how many
        # of these steps came before the last one. What is written stays: others may hold it.
        self.log_beta: Tensor | None = None
        self.noted, self._log_beta_at = 0, 0
        scales = spec.rope.scale, (spec.local_rope or spec.rope).scale
        # `done` of it: whether C has made the latest step, which is whole then.
        self.latest, self._batch_slots = Step(rope_scale=scales), (BatchSlot * 0)()
        self._mass, self._trunk = 1 + JOINS.index(mass) if mass else 0, self._model.trunk
        self.latest.taps, self.latest.tap_layer = len(taps), self._tap_layers.data_ptr()
        self._batch_slot: list[BatchSlot] = []  # to take one out of the array anew is slow
        self._model_ref, self._step_ref = byref(self._model), byref(self.latest)

    @staticmethod
    def unsupported_reason(
        weights: DecoderWeights, gates: Gates | None, hosted: bool = False
    ) -> str:
        """Say in a few words why these weights cannot run in C; empty when they can.

        Args:
            hosted: whether they lack layers: a transformers model has them, and runs them.
        """
        loaded = library()
        if isinstance(loaded, str):
            return loaded
        if hosted:
            return HOSTED
        if any(not isinstance(each.state_layer, DeltaLayer | None) for each in weights.layers):
            return "linear layers of its own"
        if weights.embed.device.type != "cpu":
            return f"weights on {weights.embed.device}"
        if gates is not None and any(len(gate.trunk) > MAX_TRUNK for gate in gates.layers):
            return f"gates with more than {MAX_TRUNK} trunk stages"
        matrices = [each for each in weights.matrices() if isinstance(each, Tensor)]
        for tensor in [*_float32_parts(weights, gates), *matrices]:
            if tensor.dtype != torch.float32:
                return f"{str(tensor.dtype).removeprefix('torch.')} weights"
            if not tensor.is_contiguous():
                return "weights that are not contiguous"
        return ""

    @property
    def bytes_spared(self) -> int:
        """Return the bytes that a step need not read, thanks to copies in bfloat16."""
        return sum(2 * short.numel() for short in self._bf16.kept)

    @property
    def eviction_seconds(self) -> float:
        """Time that C has spent on eviction in all steps so far."""
        return self.latest.evicting / 1e9

    def step(
        self, cache: RaggedCache, batch: Batch, requests: ctypes.Array[Eviction] | None = None
    ) -> Tensor:
        """Append one text token to each of B sequences, and evict.

        A sequence may stand several times in a row, with tokens that follow each other: pages are
        then read once for all of them.

        Every weight is read once for all of them, and each is computed as if it were alone: the
        logits of a sequence do not depend, not in one bit, on its company.

        Args:
            requests: from ``NativeEvictor.request``; its ``commit`` says what went.

        Returns:
            float32 logits ``[B, vocab]``.

        Raises:
            BudgetError: the pool would pass its limit; nothing has changed then.
        """
        seqs, step = batch.seqs, self.latest
        batch_slots = len(seqs)
        if batch_slots > len(self._batch_slot):
            self._batch_slots = (BatchSlot * batch_slots)()
            self._batch_slot = list(self._batch_slots)
            step.batch_slot = self._batch_slots
        for batch_slot, seq, token, position, rope_position, far in zip(
            self._batch_slot,
            seqs,
            batch.tokens,
            batch.seen,
            batch.next_position,
            batch.long_rope,
            strict=False,
        ):
            batch_slot.token, batch_slot.position, batch_slot.rope_position = (
                token,
                position,
                rope_position,
            )
            batch_slot.states = seq
            batch_slot.inv_freq = self._frequencies[far]
        if cache.memory or cache.states or step.taps:
            self._show_memory(cache, seqs)
        threads = min(torch.get_num_threads(), self._most_threads * batch_slots)
        logits = torch.empty(batch_slots, self._vocab)
        step.batch_slots, step.threads, step.logits = batch_slots, threads, logits.data_ptr()
        step.requests = requests
        step.mass, self._model.trunk = (0, 0) if batch.bare else (self._mass, self._trunk)
        if batch.bare:  # log beta is 0, no queries are kept, no attention is summed up
            for batch_slot in self._batch_slot[:batch_slots]:
                batch_slot.queries = None
        elif self._entry_shape is not None:
            self._make_log_beta(batch_slots, self._entry_shape)
        self._make_scratch(0, threads, batch_slots)
        while True:
            views = self._views.of(cache, seqs)
            try:
                self._library.mmkv_step(self._model_ref, views, self._step_ref)
            finally:  # Ctrl-C may land the moment C returns
                cache.pool.free_pages = views[0].free
            if step.done:
                return logits
            self._make_room(cache)
            self._make_scratch(step.longest, threads, batch_slots)

    def _make_log_beta(self, batch_slots: int, shape: tuple[int, int]) -> None:
        """Have room for the log betas of the next step; a tensor a step would cost as much time
        as all that is done with it.
        """
        self.noted += 1
        noted = self.log_beta
        if noted is None or self.noted == _NOTED_STEPS or noted.shape[1] != batch_slots:
            noted = torch.empty(_NOTED_STEPS, batch_slots, *shape)
            self.log_beta, self.noted, self._log_beta_at = noted, 0, noted.data_ptr()
        size = batch_slots * shape[0] * shape[1] * 4
        self.latest.log_beta = self._log_beta_at + self.noted * size

    def _show_memory(self, cache: RaggedCache, seqs: Sequence[int]) -> None:
        """Say where C leaves what the policy keeps beside the entries."""
        step, ring = self.latest, cache.memory.get(QUERIES)
        if ring is not None:
            step.window = ring.shape[3]
            start, each = ring.data_ptr(), ring[0].nbytes
            for batch_slot, seq in zip(self._batch_slot, seqs, strict=False):
                batch_slot.queries = start + each * seq
        if cache.states:
            self._show_states(cache)
        if step.taps:
            self.tapped = torch.empty(step.taps, len(seqs), self._model.hidden)
            step.tapped = self.tapped.data_ptr()

    def _show_states(self, cache: RaggedCache) -> None:
        first = next(iter(cache.states.values()))
        if self._states is first:
            return
        self._states = None  # until all are written: Ctrl-C may come in between
        for index, layer in enumerate(self._layers):
            if layer.entry < 0:
                layer.conv_states = cache.states[state_name(index, "conv")].data_ptr()
                layer.delta_states = cache.states[state_name(index, "delta")].data_ptr()
        self._states = first

    def _make_room(self, cache: RaggedCache) -> None:
        """Grow pool and table to what C wants for one entry more per row."""
        step = self.latest
        if step.pages > cache.pool.free_pages:
            # take() grows the pool by an eighth at least; handed back in the order they lay.
            cache.pool.give(cache.pool.take(step.pages).flip(0))
        if step.width > cache.table.shape[-1]:
            cache._widen(step.width)

    def _make_scratch(self, longest: int, threads: int, batch_slots: int) -> None:
        have = self._scratch_for
        if longest > have[0] or threads > have[1] or batch_slots > have[2]:
            room = max(longest + 256, 2 * have[0]) if longest > have[0] else have[0]
            threads, batch_slots = max(threads, have[1]), max(batch_slots, have[2])
            count = self._library.mmkv_scratch(byref(self._model), room, threads, batch_slots)
            # torch aligns tensors to cache lines, which the C code counts on for speed only.
            scratch = torch.empty(count)
            # C has the new one before the old one goes, even when Ctrl-C comes in between.
            self.latest.scratch, old, self._scratch = scratch.data_ptr(), self._scratch, scratch
            self.latest.room, self._scratch_for = room, (room, threads, batch_slots)
            del old


def _layer(
    index: int,
    layer: LayerWeights,
    spec: DecoderSpec,
    gates: Gates | None,
    matrix: Callable[..., Linear],
) -> Layer:
    entry = spec.entry_index[index]
    made = Layer(
        entry=-1 if entry is None else entry,
        window=0 if entry is None else spec.sliding_window[entry] or 0,
        angle=spec.is_local(index) * spec.rope.inv_freq.numel(),
        input_norm=layer.input_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        qk_norm=_place(layer.qk_norm),
        attention_out_norm=_place(layer.attention_out_norm),
        mlp_out_norm=_place(layer.mlp_out_norm),
        qkv=matrix(layer.qkv, layer.qkv_bias),
        out=matrix(layer.out, layer.out_bias),
    )
    if layer.router is None:
        made.gate_up = matrix(layer.gate_up, layer.gate_up_bias)
        made.down = matrix(layer.down, layer.down_bias)
    else:
        both = zip(plain(layer.gate_up), plain(layer.down), strict=True)
        # As they lie: copies of all experts would be as large as a model.
        experts = [Expert(linear(wide), linear(narrow)) for wide, narrow in both]
        made.router, made.experts = linear(layer.router), (Expert * len(experts))(*experts)
    for name in ("shared_gate", "shared_gate_up", "shared_down"):
        if (part := getattr(layer, name)) is not None:
            setattr(made, name, linear(part))
    if isinstance(by := layer.state_layer, DeltaLayer):
        made.rates = linear(by.rates)
        for name in ("conv", "log_decay", "step_bias", "gain"):
            setattr(made, name, getattr(by, name).data_ptr())
    if gates is not None and entry is not None:
        gate = gates.layers[entry]
        for stage, (weight, bias) in enumerate(gate.trunk):
            made.trunk[stage] = linear(weight, bias)
        made.readout = linear(gate.readout, gate.bias)
    return made


def _read_numbers(weights: DecoderWeights, routing: Routing) -> int:
    """Count the weights that a step of one sequence reads: of experts, those it goes through."""
    idle = 0
    for layer in weights.layers:
        if layer.router is not None:
            every = plain(layer.gate_up).numel() + plain(layer.down).numel()
            idle += every * (routing.experts - routing.chosen) // routing.experts
    return weights.numbers() - idle


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _float32_parts(weights: DecoderWeights, gates: Gates | None) -> list[Tensor]:
    """Return what C reads as float32: all but the matrices (gains, biases, routers), and the gates.

    What is held in another form is no Tensor, and left out.
    """
    matrices = {id(matrix) for matrix in weights.matrices()}
    named = [part for _, part in weights.named() if id(part) not in matrices]
    found = [part for part in named if isinstance(part, Tensor)]
    for gate in [] if gates is None else gates.layers:
        trunk = (part for pair in gate.trunk for part in pair)
        found += [part for part in trunk if isinstance(part, Tensor)]
        found += [gate.readout, gate.bias]
    return found
