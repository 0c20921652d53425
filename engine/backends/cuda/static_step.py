"""One decode step of a fixed batch size, embedding to next token, with nothing left to the host.

:class:`GraphRunner` hands sequences to it, replays it as a CUDA graph and takes them back.

Append, attention, eviction and page bookkeeping read and change the same tensors as the eager
path (``step``), through the kernels of ``kernels``. All shapes are fixed and
nothing is read back, so the step can be captured as a CUDA graph; on a CPU the kernels' torch
references run it, for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.backends.base import Batch, Burst, LoadedModel
from mmkv.engine.backends.cuda.kernels import delta
from mmkv.engine.backends.cuda.kernels.append import empty_room, make_room
from mmkv.engine.backends.cuda.kernels.buffers import NewestTokens, PageTables
from mmkv.engine.backends.cuda.kernels.decode_attention import (
    decode_attention,
    empty_partials,
    tokens_at_once,
)
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction, evict, unsupported_reason
from mmkv.engine.backends.cuda.kernels.experts import experts
from mmkv.engine.backends.cuda.kernels.pointwise import gated, rms_norm
from mmkv.engine.backends.cuda.kernels.sample import (
    Draw,
    PenaltyState,
    SamplingColumns,
    columns_of,
    guard,
    penalise,
    sample,
    uniform,
)
from mmkv.engine.backends.cuda.kernels.store import store_layer, store_log_beta
from mmkv.engine.backends.cuda.kernels.worklist import (
    build_worklist,
    default_runs,
    empty_worklist,
    tile_entries,
)
from mmkv.engine.backends.cuda.policy_step import PolicyStep
from mmkv.engine.budget import Budget
from mmkv.engine.cache import RaggedCache
from mmkv.engine.errors import BROKEN, BudgetError
from mmkv.engine.model.delta import DeltaFunctions
from mmkv.engine.model.mixture import mixture
from mmkv.engine.model.product import plain
from mmkv.engine.model.state_layer import DeltaLayer
from mmkv.engine.model.weights import LayerWeights, state_name
from mmkv.engine.system import exact_products, on_device

# Of one step: with what cuts to a budget, and without it where not each step evicts.
Graphs = dict[bool, torch.cuda.CUDAGraph]
MOST_STEPS = 256  # per replay: pages for all of them are set aside beforehand
_LEAST_STOPS = 8  # ids that a step looks for at least
_LEAST_ROOM = 256  # entries per row that tables and pages have room for at least
_capture = threading.Lock()  # of this process: one thread at a time
_WARM_UP = 2  # steps on idle batch slots, so that libraries allocate before the capture


class StaticStep:
    """The step and its buffers for B batch slots; a batch slot is a sequence, or idle.

    Or one of T tokens that follow each other in a sequence, B / T sequences with T batch slots
    each: all read the sequence's entries at once. Room for them is made beforehand, and nothing is
    evicted.

    Attributes:
        most_entries: of one batch slot, so many at most may stand when it is evicted from.
        policy_step: what the policy does in torch, or None.
        seqs: ``[B]`` int64 sequence slots, -1 idle. A batch slot becomes idle when it says a
            token of ``stop``. Of a sequence with fewer than T tokens, the last ones are idle.
        token: ``[B]`` int64, what is appended next.
        seen: ``[B]`` int64 tokens seen; rope_position: ``[B]`` int64 of the next token.
        allowed: ``[B]`` int64 entries that may stay; share: ``[B]`` float64, above 0 for budgets
            that are a fraction of the tokens seen.
        behind: ``[B]`` int64, how many of its sequence's tokens follow it in this step.
        logits: float32 ``[B, vocab]`` of the latest step, as the model gave them.
        generated: ``[B, steps]`` int64, the tokens chosen, -1 where a batch slot was idle, and
            BROKEN where its logits were not finite, after which it is idle; index: ``[1]``.
        broken: ``[B]`` bool, of the latest step.
        log_beta: ``[B, steps, rows]`` float32 of the entries appended in each step, or None.
        least_dropped: ``[B]`` int64, the smallest result of an eviction since it was zeroed: -1
            where a batch slot had to evict and could not.
        seed: ``[B]`` int64; columns: settings of the draw, or None for greedy decoding.
        said: what penalties look at, or None without them.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: RaggedCache,
        batch: int,
        most_steps: int,
        most_stops: int,
        drawn: bool,
        most_entries: int,
        penalised: bool = False,
        most_row: int = 1,
        tokens: int = 1,
    ) -> None:
        self.model, self.cache = model, cache
        self.batch, self.most_entries, self.tokens = batch, most_entries, tokens
        spec, device = model.spec, cache.length.device
        self.top = torch.zeros(1, dtype=torch.int64, device=device)
        pool = cache.pool
        self.rows = PageTables(cache.length, cache.table, pool._stack, self.top, pool.page_size)
        # Not the tensors: what a pool has outgrown shall not live on here.
        self._columns = self._places()
        self.room = empty_room(batch, self.rows)
        tile, runs = tile_entries(spec.head_dim, pool.dtype), default_runs(device)
        self._work = empty_worklist(
            batch // tokens, spec.entry_layers, spec.num_kv_heads, tile, runs, device
        )
        self._partials = empty_partials(self._work, tokens * spec.group, spec.head_dim)
        # Victims of eviction whose score is NaN, per batch slot, since it was zeroed.
        self.evicted_nan = self.top.new_zeros(batch)
        self._eviction, self.policy_step = None, None
        in_torch = unsupported_reason(model.policy)
        evicts = model.policy.evicts and tokens == 1
        if evicts and not in_torch:
            eviction = empty_eviction(batch, self.rows, most_entries)
            self._eviction = replace(eviction, nan=self.evicted_nan)
        if model.policy.admission is not None or (evicts and in_torch):
            sizes = batch, most_entries, most_row, most_steps
            self.policy_step = PolicyStep(model, cache, self.rows, *sizes, self.evicted_nan)
        shape = (batch, spec.num_heads, spec.head_dim)
        self._mixed = torch.zeros(shape, dtype=pool.dtype, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        # One tensor, which the host fills in one copy. Whole 16 bytes a row: kernels are compiled
        # anew for pointers that are not.
        self.given = integers(8, batch + batch % 2)
        self.given[0] = -1
        given = self.given[:, :batch]
        self.seqs, self.token, self.seen, self.rope_position, self.allowed = given[:5]
        self.share, self.seed, self.behind = given[5].view(torch.float64), given[6], given[7]
        self.least_dropped = integers(batch)
        self.generated, self.index = integers(batch, most_steps), integers(1)
        self.stop = integers(most_stops) - 1
        self.logits = torch.zeros(batch, model.decoder.weights.head.shape[0], device=device)
        self.broken = torch.zeros(batch, dtype=torch.bool, device=device)
        self.log_beta: Tensor | None = None
        self._gates = model.decoder.gates
        if self._gates is not None:
            layers = self._gates.layers
            self._readout = torch.stack([gate.readout for gate in layers])
            self._readout_bias = torch.stack([gate.bias for gate in layers])
            shape = (batch, most_steps, spec.rows)
            self.log_beta = torch.zeros(shape, device=device)
        self.columns: SamplingColumns | None = None
        if drawn:
            self.columns = SamplingColumns.idle(batch, device)
        self.said: PenaltyState | None = None
        if penalised:
            self.said = PenaltyState.empty(batch, model.decoder.weights.head.shape[0], device)

    def _places(self) -> list[tuple[int, torch.Size]]:
        """Where the tensors of the cache are that a step reads."""
        cache = self.cache
        read = *cache.pool.columns(), *cache.memory.values(), *cache.states.values()
        return [(column.data_ptr(), column.shape) for column in read]

    def fits(self, entries: int = 0, row: int = 0) -> bool:
        """Whether a slot and its rows may hold so much, and all is still where it was."""
        cache, rows = self.cache, self.rows
        return (
            entries <= self.most_entries
            and (self.policy_step is None or row <= self.policy_step.most_row)
            # Columns are replaced one by one when they grow: Ctrl-C may come between any two.
            and self._columns == self._places()
            and rows.stack is cache.pool._stack
            and rows.length is cache.length
            and rows.table is cache.table
        )

    def run(self, cut: bool = True) -> None:
        """Append every batch slot's token, choose the next, evict.

        Args:
            cut: whether a sequence may stand above its budget and slack; False leaves that out.
        """
        model, spec = self.model, self.model.spec
        weights, eps = model.decoder.weights, spec.rms_eps
        product = weights.product
        several = self.tokens > 1
        slots = self.room.slots if several else make_room(self.room, self.rows, self.seqs)
        live = slots[:, 0, 0] >= 0  # not those that are idle, none when the pool was too small
        sequences = self.seqs[:: self.tokens].contiguous() if several else self.seqs
        build_worklist(self._work, sequences, self.rows.length)
        policy = self.policy_step
        if policy is not None:
            policy.begin(self.seqs, slots, self.seen, self.rope_position, live)
        rope = model.rope.text(self.rope_position)
        angles = self._angles(rope)
        # Their states stay as they are where a step stores nothing.
        stateful = self.seqs.where(live, -1) if spec.has_entries else self.seqs
        read_by_gates: list[Tensor] = []
        x, residual = model.decoder.embed(self.token), None
        for index, layer in enumerate(weights.layers):
            normed, residual = rms_norm(x, residual, layer.input_norm, eps)
            entry = spec.entry_index[index]
            if entry is None:
                x = self._mix(index, layer, normed, stateful)
            else:
                read_by_gates.append(normed)
                x = self._attend(index, entry, normed, angles, slots[:, entry])
            if layer.attention_out_norm is not None:
                x, _ = rms_norm(x, None, layer.attention_out_norm, eps)
            normed, residual = rms_norm(x, residual, layer.post_norm, eps)
            x = self._mlp(normed, layer)
            if layer.mlp_out_norm is not None:
                x, _ = rms_norm(x, None, layer.mlp_out_norm, eps)
            if policy is not None:
                for _ in range(model.decoder.taps.count(index)):
                    policy.tap(residual + x)
        normed, _ = rms_norm(x, residual, weights.norm, eps)
        self._store_log_beta(read_by_gates, slots)
        if policy is not None:
            policy.appended(rope)
        if self.log_beta is not None:
            made = self.cache.pool.log_beta.view(-1)[slots.clamp(min=0)]
            self.log_beta.index_copy_(1, self.index, made.view(self.batch, 1, -1))
        self._choose(self.logits.copy_(product(normed, weights.head)), live)
        self._evict(cut)

    def _angles(self, rope: tuple[Tensor, Tensor]) -> dict[bool, tuple[Tensor, Tensor]]:
        """Return cos and signed sin ``[B, rot]`` of layers with a window and of the others."""
        decoder, spec = self.model.decoder, self.model.spec
        found = {}
        for index, entry in enumerate(spec.entry_index):
            if entry is not None and spec.is_local(index) not in found:
                cos, sin = decoder.angles(index, rope)
                found[spec.is_local(index)] = cos.contiguous(), sin.contiguous()
        return found

    def _attend(
        self,
        index: int,
        entry: int,
        normed: Tensor,
        angles: dict[bool, tuple[Tensor, Tensor]],
        slots: Tensor,
    ) -> Tensor:
        """Store the new entries of a layer, number ``entry`` of those with entries, and attend."""
        model, pool, spec = self.model, self.cache.pool, self.model.spec
        layer, product = model.decoder.weights.layers[index], model.decoder.weights.product
        fused, gate = model.decoder.without_gate(product(normed, layer.qkv, layer.qkv_bias))
        query = store_layer(
            fused,
            angles[spec.is_local(index)],
            layer.qk_norm,
            spec.rms_eps,
            pool,
            slots,
            self.seen,
        )
        window = spec.sliding_window[entry]
        decode_attention(
            query,
            pool.stored_keys,
            pool.stored_values,
            self.rows.table,
            self._work,
            entry,
            self._partials,
            spec.head_dim**-0.5,
            self._mixed,
            window=NewestTokens(window, pool.position, self.seen) if window else None,
            behind=self.behind if self.tokens > 1 else None,
        )
        if self.policy_step is not None:
            self.policy_step.attended(entry, query)
        mixed = pool.form.rotate(self._mixed).flatten(1)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return product(mixed, layer.out, layer.out_bias)

    def _mix(self, index: int, layer: LayerWeights, normed: Tensor, slots: Tensor) -> Tensor:
        """Take the token through a layer that keeps a state of a sequence; ``slots``: of these."""
        by, product = layer.state_layer, self.model.decoder.weights.product
        assert isinstance(by, DeltaLayer), "the backend refuses others"
        states = {
            name: self.cache.states[state_name(index, name)]
            for name in by.states(self.cache.pool.dtype)
        }
        inputs = by.inputs(normed, layer, product)
        functions = DeltaFunctions(
            delta.causal_conv, delta.conv_step, delta.delta_step, delta.delta_chunk
        )
        mixed = by.step_in_place(inputs, states, slots, functions)
        return by.outputs(mixed, inputs, layer, product)

    def _mlp(self, normed: Tensor, layer: LayerWeights) -> Tensor:
        decoder, spec = self.model.decoder, self.model.spec
        if layer.router is not None and spec.routing is not None:
            matrices = plain(layer.gate_up), plain(layer.down)
            made = mixture(normed, layer.router, *matrices, spec.routing, experts)
            return (
                made if layer.shared_gate is None else made + decoder.shared_expert(normed, layer)
            )
        product = decoder.weights.product
        wide = product(normed, layer.gate_up, layer.gate_up_bias)
        return product(gated(wide, spec.activation), layer.down, layer.down_bias)

    def _store_log_beta(self, hidden: list[Tensor], slots: Tensor) -> None:
        """Store what the gates of all layers say of the new entries: nothing reads it before."""
        if self._gates is not None:
            trunk = self._gates.before_readout(hidden)
            parts = trunk, self._readout, self._readout_bias
            store_log_beta(*parts, self.cache.pool.log_beta, slots)

    def _choose(self, logits: Tensor, live: Tensor) -> None:
        self.seen += live
        self.rope_position += live
        logits, broken = guard(logits, self.model.never_chosen)
        torch.logical_and(broken, live, out=self.broken)
        if self.columns is None:
            token = logits.argmax(-1)
        else:
            if self.said is not None:
                logits = penalise(logits, self.columns, self.said)
            token = sample(logits, self.columns, uniform(self.seed, self.seen))
            if self.said is not None:
                self.said.add(token, live)
        chosen = token.where(~self.broken, BROKEN).where(live, -1)
        self.generated.scatter_(1, self.index.expand(self.batch)[:, None], chosen[:, None])
        self.index += 1
        self.token.copy_(token.where(live, self.token))

    def _evict(self, cut: bool) -> None:
        model = self.model
        if self.policy_step is not None:  # write gates refuse before a budget is cut to
            self.policy_step.evict(self.seqs, self.seen, self.index - 1, cut)
            too_long = -self.policy_step.too_long.long()
            torch.minimum(self.least_dropped, too_long, out=self.least_dropped)
            if self.policy_step.work is not None and cut:
                dropped = self.policy_step.work.dropped
                torch.minimum(self.least_dropped, dropped, out=self.least_dropped)
        if self._eviction is not None and cut:
            rows = model.spec.rows
            growing = (self.share * self.seen * rows).floor().long().clamp(min=rows)
            allowed = growing.where(self.share > 0, self.allowed)
            dropped = evict(
                self._eviction,
                model.policy,
                self.rows,
                self.cache.pool,
                self.seqs,
                self.seen,
                allowed,
                model.interval,
            )
            torch.minimum(self.least_dropped, dropped, out=self.least_dropped)
        stopped = (self.token[:, None] == self.stop).any(-1) | self.broken
        self.seqs.copy_(self.seqs.where(~stopped, -1))


class GraphRunner:
    """Decodes steps of several sequences with no host work in between.

    One step object, and on CUDA one graph, per batch size (powers of two) and kind of draw. They
    are made anew when the pool or the block tables have grown, which therefore grow together and
    to twice their size: a reply of n tokens makes log2(n) of them.

    Graphs share what memory they need for a step: they run one after the other, and none reads
    what another left.

    Attributes:
        captures: steps made so far; graph_bytes: device memory that the graphs hold.
        logits: float32 ``[B, vocab]`` of the latest step, which the next one overwrites.
        log_beta: float32 ``[B, rows]`` of the entries that it appended, too, or None.
    """

    logits: Tensor
    log_beta: Tensor | None

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        self.model, self.cache = model, cache
        self.captures, self.graph_bytes = 0, 0
        self._memory: Any = None  # of all graphs, while there are any
        self._steps: dict[tuple[object, ...], tuple[StaticStep, Graphs | None]] = {}

    @torch.inference_mode()
    def decode(
        self,
        batch: Batch,
        burst: Burst,
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> None:
        """Do what :meth:`mmkv.engine.backends.base.Backend.decode_many` says, by replays."""
        going, token = list(range(len(batch.seqs))), list(batch.tokens)
        drawn = None if draws is None else list(draws)
        device = self.cache.length.device
        with on_device(device), exact_products(device):
            for start in range(0, steps, MOST_STEPS):
                count = min(MOST_STEPS, steps - start)
                part = self._replay(batch, burst, going, token, count, tuple(stop), drawn)
                for index, tokens in zip(going, part, strict=True):
                    burst.generated[index] += tokens
                    token[index] = tokens[-1]
                    if drawn is not None:
                        drawn[index] = drawn[index].after([one for one in tokens if one >= 0])
                going = [i for i in going if burst.generated[i][-1] not in (*stop, BROKEN)]
                if not going:
                    break

    @torch.inference_mode()
    def check(self, batch: Batch) -> Tensor:
        """Append several tokens to each sequence in one replay; nothing is evicted.

        Returns:
            float32 logits ``[B, vocab]`` behind each.

        Raises:
            BudgetError: the pool would pass its limit. Whatever is raised, entries that were
                appended are the caller's to drop.
        """
        runs, cache, device = batch.runs, self.cache, self.cache.length.device
        seqs, sizes = [batch.seqs[run.start] for run in runs], [len(run) for run in runs]
        each = tokens_at_once(self.model.spec.group, cache.pool.dtype)
        with on_device(device), exact_products(device):
            length = cache.length[seqs].flatten(1).cpu()
            first = [run.start for run in runs]
            burst = Burst.of(batch)
            _, row = self._make_room(batch, burst, first, max(sizes), length)
            count = each * power_of_two(len(runs))
            step, graphs = self._step(count, 0, False, 1, row=row, tokens=each)
            slots = step.room.slots.fill_(-1).unflatten(0, (-1, each))
            for size in set(sizes):
                alike = [place for place, own in enumerate(sizes) if own == size]
                where = torch.tensor([seqs[place] for place in alike], device=device)
                slots[alike, :size] = cache.append(where, size).permute(0, 3, 1, 2)
            places = [each * n + at for n, size in enumerate(sizes) for at in range(size)]
            behind = [size - 1 - at for size in sizes for at in range(size)]
            going = range(len(batch.seqs))
            self._fill(step, batch, burst, going, batch.tokens, (), None, places, behind)
            if graphs is None:
                step.run()
            else:
                graphs[True].replay()
            return step.logits[places]

    def _replay(
        self,
        batch: Batch,
        burst: Burst,
        going: Sequence[int],
        token: Sequence[int],
        steps: int,
        stop: tuple[int, ...],
        draws: Sequence[Draw] | None,
    ) -> list[list[int]]:
        """Append up to ``steps`` tokens to the sequences that are ``going``; those they say."""
        # All that the host has to know of the cache, in one read.
        length = self.cache.length[[batch.seqs[index] for index in going]].flatten(1).cpu()
        most, row = self._make_room(batch, burst, going, steps, length)
        count = power_of_two(len(going))
        own = None if draws is None else [draws[index] for index in going]
        penalised = own is not None and any(draw.penalises for draw in own)
        step, graphs = self._step(count, len(stop), own is not None, most, penalised, row)
        self._fill(step, batch, burst, going, token, stop, own)
        if step.policy_step is not None:
            allowed = [self._allowed(batch, burst, index, steps) for index in going]
            step.policy_step.plan(allowed, [batch.prompt_tokens[index] for index in going])
        due = self._due(batch, burst, going, steps, length)
        try:
            for cut in due:
                if graphs is None:
                    step.run(cut)
                else:
                    graphs[cut].replay()
        finally:
            made = step.log_beta
            self.logits = step.logits[: len(going)]
            self.log_beta = None if made is None else made[: len(going), steps - 1]
            error, least, rows = self._count(step, batch, burst, going, steps)
        if error:
            raise BudgetError("the page pool was too small for a step; this is a bug in mmkv")
        if least < 0:
            raise BudgetError(
                "a session has more entries than the eviction on the GPU was made for and stands "
                "above its budget; this is a bug in mmkv, decode it step by step"
            )
        return [[token for token in row if token != -1] for row in rows]

    def _count(
        self, step: StaticStep, batch: Batch, burst: Burst, going: Sequence[int], steps: int
    ) -> tuple[int, int, list[list[int]]]:
        """Read what has become of a burst, all at once, and note what was appended and evicted.

        Returns:
            whether the pool was too small, the least result of an eviction, and per sequence the
            ``steps`` tokens chosen, -1 where it was idle.
        """
        count = len(going)
        seqs = step.generated.new_tensor([batch.seqs[index] for index in going])
        entries = self.cache.length.index_select(0, seqs).flatten(1).sum(1)
        found = [step.top, step.room.error, step.least_dropped.min()[None]]
        found += [step.seen[:count], entries, step.evicted_nan[:count]]
        found += [step.generated[:count, :steps].flatten()]
        top, error, least, *rest = torch.cat([each.long() for each in found]).tolist()
        self.cache.pool.free_pages = top
        seen, held, nan = rest[:count], rest[count : 2 * count], rest[2 * count : 3 * count]
        for batch_slot, index in enumerate(going):
            before = burst.appended[index]
            burst.appended[index] = seen[batch_slot] - batch.seen[index]
            if step.log_beta is not None:
                made = step.log_beta[batch_slot, : burst.appended[index] - before]
                burst.log_beta[index].append(made.clone())
            burst.entries[index] = held[batch_slot]
            burst.nan[index] += nan[batch_slot]
        chosen = rest[3 * count :]
        return error, least, [chosen[at : at + steps] for at in range(0, count * steps, steps)]

    def _make_room(
        self, batch: Batch, burst: Burst, going: Sequence[int], steps: int, length: Tensor
    ) -> tuple[int, int]:
        """Pages and table columns for all steps, so that nothing has to grow in between.

        Args:
            length: ``[going, rows]`` entries now, on the CPU.

        Returns:
            the most entries that eviction will meet in one sequence, 1 where nothing is evicted;
            the most of one row in any of the steps.
        """
        cache, pool = self.cache, self.cache.pool
        longest = int(length.max())
        held = cache.needed_pages(length)
        room = max(power_of_two(longest + steps), _LEAST_ROOM)
        # No row becomes longer than the context, which a caller has seen to for these steps.
        ahead = max(min(room, self.model.spec.max_position) - longest, steps)
        (pages, _), (wanted, largest) = (
            self._bound(batch, burst, going, count, held) for count in (steps, ahead)
        )
        columns = -(-(longest + steps) // pool.page_size)
        # Together, and before the first capture: each of them alone would cost another one.
        if not self._steps or pages > pool.free_pages or columns > cache.table.shape[-1]:
            pool.require(pages)
            pool.prepare(wanted)
            pool.reserve(pages)
            cache._widen(-(-(longest + ahead) // pool.page_size))
        row = min(longest + steps, max(largest, longest))
        return largest if self.model.policy.evicts else 1, row

    def _due(
        self, batch: Batch, burst: Burst, going: Sequence[int], steps: int, length: Tensor
    ) -> list[bool]:
        """Say for each step whether a sequence may have to be cut to its budget.

        Rows grow by one entry a step and are cut to their shares, so the host knows it beforehand;
        not what write gates refuse.
        """
        policy, interval = self.model.policy, self.model.interval
        if interval.steps == 1 or not policy.evicts or policy.admission is not None:
            return [True] * steps
        layers, heads = self.cache.length.shape[1:]
        rows, due = layers * heads, [False] * steps
        for index, held in zip(going, length, strict=True):
            allowed = self._allowed(batch, burst, index, steps)
            for n in range(steps):
                if n < len(allowed):
                    share = policy.shares(allowed[n], layers, heads).share
                    above = interval.above(allowed[n], rows)
                if not n:
                    held = held.view(share.numel(), -1).sum(1)
                each = rows // share.numel()
                held = held + each
                if bool((held > share + above * each).any()):
                    due[n], held = True, torch.minimum(held, share)
        return due

    def _allowed(self, batch: Batch, burst: Burst, index: int, steps: int) -> list[int]:
        """What a sequence may keep after each of the steps, or one number for all of them."""
        rows, share = self.model.spec.rows, batch.share[index]
        if not share:
            return [batch.allowed[index]]
        kept = batch.prompt_tokens[index] * rows if self.model.policy.keeps_prompt else 0
        seen, budget = batch.seen[index] + burst.appended[index], Budget.fraction(share)
        return [budget.entries(rows, seen + n + 1, 0, 0) + kept for n in range(steps)]

    def _bound(
        self, batch: Batch, burst: Burst, going: Sequence[int], steps: int, held: int
    ) -> tuple[int, int]:
        """Bound what so many steps take: pages beside those ``held``, entries of one sequence."""
        cache, rows = self.cache, self.model.spec.rows
        size = cache.pool.page_size
        pages, largest = 0, 0
        for index in going:
            entries = burst.entries[index]
            most = entries + steps * rows
            if self.model.policy.evicts:
                allowed = self._allowed(batch, burst, index, steps)[-1]
                slack = self.model.interval.slack(allowed, rows)
                most = min(most, max(allowed + slack, entries) + rows)
            largest = max(largest, most)
            # States of linear layers count as pages, but none of the pool's holds them.
            pages += (most + rows * (size - 1)) // size
        return max(pages - held, 0), largest

    def _step(
        self,
        batch: int,
        stops: int,
        drawn: bool,
        entries: int,
        penalised: bool = False,
        row: int = 1,
        tokens: int = 1,
    ) -> tuple[StaticStep, Graphs | None]:
        stops = power_of_two(max(stops, _LEAST_STOPS))
        key = (batch, stops, drawn, penalised, tokens)
        known = self._steps.get(key)
        if known is None or not known[0].fits(entries, row):
            # Graphs of the old pool go first: they hold its memory.
            self._steps = {k: v for k, v in self._steps.items() if k != key and v[0].fits()}
            del known
            # Captures are slow: room to grow.
            most, part = power_of_two(entries), max(power_of_two(row) // 8, _LEAST_ROOM // 8)
            cells = -(-row // part) * part
            steps = MOST_STEPS if tokens == 1 else 1
            sizes = batch, steps, stops, drawn, most, penalised, cells, tokens
            step = StaticStep(self.model, self.cache, *sizes)
            known = self._steps[key] = (step, self._captured(step))
            self.captures += 1
        return known

    def _captured(self, step: StaticStep) -> Graphs | None:
        """Capture the step as graphs; None on a CPU. All slots are idle, so nothing changes."""
        if step.seqs.device.type != "cuda":
            return None
        if not self._steps:  # a memory that no graph uses any more cannot be taken up again
            self._memory, self.graph_bytes = torch.cuda.graph_pool_handle(), 0
        with _capture:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    step.run()
                    step.index.zero_()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.empty_cache()  # as a capture does, so that only what it takes is counted
            before = torch.cuda.memory_reserved(step.seqs.device)
            graphs = {}
            for cut in (True, False) if self.model.interval.steps > 1 else (True,):
                graphs[cut] = torch.cuda.CUDAGraph()
                # Other threads go on: what they allocate or read is no part of it.
                with torch.cuda.graph(
                    graphs[cut], pool=self._memory, capture_error_mode="thread_local"
                ):
                    step.run(cut)
        self.graph_bytes += max(torch.cuda.memory_reserved(step.seqs.device) - before, 0)
        return graphs

    def _fill(
        self,
        step: StaticStep,
        batch: Batch,
        burst: Burst,
        going: Sequence[int],
        token: Sequence[int],
        stop: Sequence[int],
        draws: Sequence[Draw] | None,
        places: Sequence[int] | None = None,
        behind: Sequence[int] | None = None,
    ) -> None:
        """Put what is ``going`` in batch slots, the first ones or those of ``places``."""
        at, none = torch.tensor, [0] * len(going)
        share = at([batch.share[i] for i in going] if batch.share else none, dtype=torch.float64)
        given = torch.zeros(step.given.shape, dtype=torch.int64, device="cpu")
        given[0] = -1
        given[:, list(range(len(going)) if places is None else places)] = at(
            [
                [batch.seqs[i] for i in going],
                [token[i] for i in going],
                [batch.seen[i] + burst.appended[i] for i in going],
                [batch.next_position[i] + burst.appended[i] for i in going],
                [batch.allowed[i] for i in going],
                share.view(torch.int64).tolist(),  # its bits
                none if draws is None else [draw.seed for draw in draws],
                behind or none,
            ]
        )
        step.given.copy_(given)
        step.stop.copy_(at([*stop, *[-1] * (len(step.stop) - len(stop))]))
        step.top.fill_(self.cache.pool.free_pages)
        step.index.zero_()
        step.evicted_nan.zero_()
        step.generated.fill_(-1)
        step.room.error.zero_()
        step.least_dropped.zero_()
        if draws is not None and step.columns is not None:
            settings, _ = columns_of(draws, step.seqs.device)
            for name, column in vars(settings).items():
                getattr(step.columns, name)[: len(draws)] = column
            if step.said is not None:
                step.said.fill(draws)


def power_of_two(count: int) -> int:
    """Return the smallest power of two from ``count`` on."""
    return 1 << (count - 1).bit_length()
