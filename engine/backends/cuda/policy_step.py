"""What a policy asks of a static step beside the kernels: its own torch code, in fixed shapes.

Every row is given the same number of cells, of which its entries take the first. A policy's scorer
reads them through :class:`FixedView`, all batch slots at once, and computes what it computes
eagerly; nothing is read back, so a CUDA graph can hold it. The kernels of ``kernels.evict`` then
choose the victims by these scores, or by those that they compute, and move what stays.

A batch slot that is idle must change nothing. Where batch slots write side by side, an idle one
writes what the first live one writes, to the same place; without a live one, what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from mmkv.engine.backends.base import LoadedModel
from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.backends.cuda.kernels.buffers import EvictionLimits, PageTables
from mmkv.engine.backends.cuda.kernels.evict import (
    drop,
    empty_drop,
    empty_eviction,
    evict_to_shares,
    scores_in_torch,
    unsupported_reason,
)
from mmkv.engine.backends.cuda.kernels.window_scores import window_scores
from mmkv.engine.cache import RaggedCache
from mmkv.engine.model.rope import Rope
from mmkv.engine.policies.base import CacheView, Policy, Scores, WindowReduction
from mmkv.engine.scorer_state import (
    POSITIONS,
    QUERIES,
    RINGS,
    Rows,
    attention_mass,
    attention_paid,
    future_queries,
    newest_entropy,
    store_positions,
    window_positions,
    write_state,
)

# The reductions that the kernel of window scores computes.
ON_PAGES = (WindowReduction("mean"), WindowReduction("sum"))
# Numbers of one temporary, such as the keys of all entries: 128 MiB in float32. Batch slots are
# scored, and layers' attention is computed, together as far as that allows.
_MOST_NUMBERS = 2**25


def own_code(policy: Policy) -> bool:
    """Whether a part of the policy is not mmkv's: its code may read from the device."""
    parts = (policy.scoring, policy.allocation)
    return any(part and not type(part).__module__.startswith("mmkv.engine.") for part in parts)


@dataclass(frozen=True)
class FixedView(CacheView):
    """A view whose N counts all cells of R rows, M each, of one sequence or of several.

    Of several, the layers of the one come after those of the other, and ``seen`` is ``[N]``.

    Attributes:
        occupied: bool ``[R, M]``, which cells hold an entry.
    """

    occupied: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bool))

    def to_rows(self, values: Tensor, fill: float) -> Tensor:
        """See :class:`CacheView`."""
        cells = values.view(*self.occupied.shape, *values.shape[1:])
        empty = ~self.occupied.view(*self.occupied.shape, *(1 for _ in values.shape[1:]))
        return cells.masked_fill(empty, fill)

    def from_rows(self, padded: Tensor) -> Tensor:
        """See :class:`CacheView`."""
        return padded.flatten(0, 1)

    def live(self) -> Tensor:
        """See :class:`CacheView`."""
        return self.occupied


class FixedEntries:
    """Reads the cells of n sequences; a :class:`mmkv.engine.policies.base.EntrySource`.

    Args:
        seqs, seen: ``[n]`` int64, sequences and tokens seen; length: ``[n, R]``.
        pages: ``[n, R, columns]``, of the rows' tables; slot: ``[N]``, 0 for cells without an
            entry.
        rope: of the model.
    """

    def __init__(
        self,
        cache: RaggedCache,
        seqs: Tensor,
        seen: Tensor,
        length: Tensor,
        pages: Tensor,
        slot: Tensor,
        rope: Rope,
    ) -> None:
        self._cache, self._seqs, self._seen, self._rope = cache, seqs, seen, rope
        self._length, self._pages, self._slot = length, pages, slot

    def keys(self) -> Tensor:
        """``[N, D]`` after RoPE."""
        return self._cache.pool.keys_at(self._slot)

    def values(self) -> Tensor:
        """``[N, D]``."""
        return self._cache.pool.values_at(self._slot)

    def state(self) -> Tensor:
        """``[N, K]``."""
        return self._cache.pool.state.flatten(0, 1)[self._slot]

    def attention(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        """``[N]``; see :meth:`mmkv.engine.policies.base.CacheView.attention`."""
        pool = self._cache.pool
        if reduction in ON_PAGES and on_triton(pool.keys) and pool.form.plain:
            return self._on_pages(view, reduction)
        keys, queries = pool.stored_keys.flatten(0, 1), self._queries()
        count, layers, heads = len(queries), queries.shape[1], view.kv_heads
        joined = self._joined_layers(queries, view)

        def by_layer(cells: Tensor) -> Tensor:
            """Some layers of all sequences are as one layer with the heads of all."""
            return cells.view(count, layers, -1).transpose(0, 1).reshape(layers * count * heads, -1)

        assert isinstance(view, FixedView)
        turned = replace(
            view,
            seen=cast(int, self._seen.repeat_interleave(heads).repeat(joined)[:, None]),
            layers=layers // joined,
            kv_heads=joined * count * heads,
            position=by_layer(view.position).flatten(),
            occupied=by_layer(view.occupied),
        )
        queries = queries.transpose(0, 1).reshape(layers // joined, -1, *queries.shape[3:])
        slot = by_layer(self._slot).flatten()
        paid = attention_paid(queries, keys, slot, turned, reduction)
        return paid.view(layers, count, -1).transpose(0, 1).flatten()

    def _joined_layers(self, queries: Tensor, view: CacheView) -> int:
        """How many layers' attention is computed at once."""
        width = max(queries.shape[-1], queries.shape[2] // view.kv_heads * queries.shape[3])
        numbers = len(queries) * view.kv_heads * view.live().shape[1] * width
        layers, most = queries.shape[1], max(1, _MOST_NUMBERS // numbers)
        return max(n for n in range(1, layers + 1) if layers % n == 0 and n <= most)

    def entropy(self, view: CacheView) -> Tensor:
        """Without dimensions; see :meth:`mmkv.engine.policies.base.CacheView.entropy`."""
        keys, queries = self._cache.pool.stored_keys.flatten(0, 1), self._queries()
        joined = self._joined_layers(queries, view)
        whole = replace(view, layers=view.layers // joined, kv_heads=joined * view.kv_heads)
        queries = queries.reshape(whole.layers, -1, *queries.shape[3:])
        return newest_entropy(queries, keys, self._slot, whole)

    def future_queries(self, view: CacheView, ahead: int, doubling: bool) -> tuple[Tensor, Tensor]:
        """See :meth:`mmkv.engine.policies.base.CacheView.future_queries`; of one sequence."""
        positions = self._cache.memory[POSITIONS].index_select(0, self._seqs)[0]
        form, queries = self._cache.pool.form, self._queries()[0]
        rope, seen = self._rope, self._seen[0]
        return future_queries(queries, positions, form, seen, ahead, rope, doubling=doubling)

    def bands(self, vectors: Tensor) -> Tensor:
        """See :meth:`mmkv.engine.policies.base.CacheView.bands`."""
        return self._rope.bands(vectors)

    def _queries(self) -> Tensor:
        return self._cache.memory[QUERIES].index_select(0, self._seqs)

    def _on_pages(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        pool, queries = self._cache.pool, self._queries()
        rows = queries.shape[1], view.kv_heads
        shares = window_scores(
            queries,
            window_positions(self._seen[:, None], queries.shape[3], queries.device),
            pool.keys,
            pool.position,
            self._length.unflatten(1, rows),
            self._pages.unflatten(1, rows),
            torch.arange(len(queries), device=queries.device),
            queries.shape[-1] ** -0.5,
        )
        mean = shares.flatten()
        return mean if reduction.group == "mean" else mean * (queries.shape[2] // view.kv_heads)


class PolicyStep:
    """What a policy does in each step of a batch, from attention to eviction.

    Attributes:
        most_row: the most entries of a row; cells: M, those that there is room for.
        cuts: whether evictions to the budget are made here.
        work: buffers of these evictions, refusals: of what write gates refuse, each None where
            there are none; ``nan`` of both is shared with the step.
        limits: of each step, once its token is appended; see
            :class:`mmkv.engine.backends.cuda.kernels.buffers.EvictionLimits`.
        prompt: ``[B]`` int64, tokens that came in prompts.
        too_long: ``[B]`` bool, whether a row has more entries than cells: nothing is dropped then.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: RaggedCache,
        rows: PageTables,
        batch: int,
        most_entries: int,
        most_row: int,
        most_steps: int,
        nan: Tensor,
    ) -> None:
        self.model, self.cache, self.rows = model, cache, rows
        device = rows.length.device
        self.most_row = most_row
        self.columns = min(-(-most_row // rows.page_size), rows.table.shape[-1])
        self.cells = self.columns * rows.page_size
        count = model.spec.rows
        self._slots = torch.arange(batch, device=device)
        policy, needs = model.policy, model.policy.scoring.needs
        self.work, self.refusals = None, None
        if policy.admission is not None:
            self.refusals = replace(empty_drop(batch, rows, self.cells), nan=nan)
        self.cuts = policy.evicts and bool(unsupported_reason(policy))
        if self.cuts:
            shares = policy.shares(count, *rows.length.shape[1:])
            self._group = shares.group.to(device)
            self._group_rows = shares.group.bincount(minlength=shares.share.numel()).to(device)
            groups, floors = shares.share.numel(), shares.floor is not None
            most = min(most_entries, count * self.cells)
            self.work = replace(empty_eviction(batch, rows, most, groups), nan=nan)
            # One tensor: a step reads its part in one launch.
            self._sizes = [batch * groups, batch * count * floors, batch, batch]
            self._limits = rows.length.new_zeros(most_steps, sum(self._sizes))
            self.limits = self._split(self._limits)
        self.prompt = rows.length.new_zeros(batch)
        self._cell = torch.arange(batch * count * self.cells, device=device)
        numbers = count * self.cells * (model.spec.head_dim if needs.keys or needs.values else 1)
        self._together = 1 if needs.positions else max(1, _MOST_NUMBERS // numbers)
        self._taps: list[Tensor] = []
        self._queries: list[Tensor] = []
        self.too_long = torch.zeros(batch, dtype=torch.bool, device=device)

    def plan(self, allowed: Sequence[Sequence[int]], prompt: Sequence[int]) -> None:
        """Note what each batch slot may keep, before the steps run.

        Args:
            allowed: of each batch slot the entries that may stay after each step, all of them or
                one number for all; prompt: tokens that came in prompts.
        """
        policy, layers, heads = self.model.policy, *self.rows.length.shape[1:]
        self.prompt[: len(prompt)] = torch.tensor(prompt)
        if not self.cuts:
            return
        for slot, (budgets, kept) in enumerate(zip(allowed, prompt, strict=True)):
            made = [policy.shares(budget, layers, heads) for budget in budgets]
            rows, every = self.model.spec.rows, self.model.interval
            each = (budget // rows for budget in budgets)
            above = [every.above(budget, rows) for budget in budgets]
            recent = [policy.recent(one - kept * policy.keeps_prompt) for one in each]
            steps, limits = slice(None) if len(budgets) == 1 else slice(len(budgets)), self.limits
            limits.share[steps, slot] = torch.stack([one.share for one in made]).to(limits.share)
            limits.recent[steps, slot] = torch.tensor(recent).to(limits.recent)
            limits.above[steps, slot] = torch.tensor(above).to(limits.above)
            if limits.floor is not None:
                floors = [one.floor for one in made if one.floor is not None]
                limits.floor[steps, slot] = torch.stack(floors).to(limits.floor)

    def _split(self, numbers: Tensor) -> EvictionLimits:
        """Give the parts of ``numbers [..., all limits]`` their names."""
        share, floor, above, recent = numbers.split(self._sizes, -1)
        batch = (self._slots.numel(), -1)
        guard = floor.unflatten(-1, batch) if floor.numel() else None
        return EvictionLimits(share.unflatten(-1, batch), guard, above, recent)

    def begin(
        self, seqs: Tensor, slots: Tensor, position: Tensor, rope_position: Tensor, live: Tensor
    ) -> None:
        """Begin a step whose entries have room.

        Args:
            seqs, live: ``[B]``; slots: ``[B, L, H]`` of the new entries; position,
                rope_position: ``[B]``.
        """
        who = self._slots.where(live, live.byte().argmax())
        self._who, self._write, self._live = who, live.any(), live
        self._seq = seqs[who].clamp(min=0)
        self._new, self._position = slots[who].clamp(min=0), position[who]
        if self.model.needs.positions:
            ring, slot = self.cache.memory[POSITIONS], self._position % self.model.needs.queries
            old = ring[self._seq, :, slot].T
            where = torch.where(self._write, rope_position[who], old)
            store_positions(self.cache, self._seq, self._position[:, None], where[..., None])
        self._taps, self._queries = [], []
        self.too_long.zero_()
        if self.model.needs.mass:
            self._read(seqs)

    def attended(self, layer: int, query: Tensor) -> None:
        """Keep what the policy reads of a layer's queries ``[B, Hq, D]``, after its attention."""
        needs, spec, pool = self.model.needs, self.model.spec, self.cache.pool
        if needs.queries:
            self._queries.append(query)
        if needs.mass:
            slot, live = (
                cells.unflatten(1, self.rows.length.shape[1:])[:, layer].flatten(0, 1)
                for cells in (self._slot, self._occupied)
            )
            mass = attention_mass(
                query.reshape(-1, spec.group, 1, spec.head_dim),
                self._position.repeat_interleave(spec.num_kv_heads)[:, None],
                pool.stored_keys.flatten(0, 1),
                pool.position.view(-1),
                Rows(slot, live),
                spec.head_dim**-0.5,
                needs.mass,
                spec.sliding_window[layer] or 0,
            )
            # Cells without an entry add 0 to slot 0.
            pool.state.flatten(0, 1)[:, 0].index_add_(0, slot.flatten(), mass.flatten())

    def tap(self, state: Tensor) -> None:
        """Take the residual stream ``[B, d]`` after a layer that the scorer taps."""
        self._taps.append(state[self._who][:, None])

    def appended(self, rope: tuple[Tensor, Tensor]) -> None:
        """Give the new entries their state, once all layers are through."""
        model, pool = self.model, self.cache.pool
        if self._queries:  # of all layers at once
            ring, every = self.cache.memory[QUERIES], slice(None)
            newest = self._seq, every, every, self._position % model.needs.queries
            made = torch.stack(self._queries, 1)[self._who]
            ring[newest] = torch.where(self._write, made, ring[newest])
        if model.has_on_append:
            write_state(
                self.cache,
                model.policy.scoring,
                self._seq,
                self._new[..., None],
                self._position[:, None],
                False,
                self._taps,
                model.decoder.output,
                self._write,
            )
        cos, sin = rope
        writes = model.write_step((cos[self._who], sin[self._who]))
        if writes is not None:
            state = pool.state.flatten(0, 1)
            for layer in range(self._new.shape[1]):
                where = self._new[:, layer]
                log_g = writes.log_g(layer, pool.keys_at(where))
                state[where, 0] = torch.where(self._write, log_g, state[where, 0])

    def evict(self, seqs: Tensor, seen: Tensor, index: Tensor, cut: bool) -> None:
        """Let the scorer revise its state, drop what write gates refuse and what is over budget.

        Args:
            seqs: ``[B]``; seen: ``[B]`` tokens seen; index: ``[1]`` the step's number.
            cut: False: no sequence can be above its budget, so nothing is looked at.
        """
        model = self.model
        if model.has_on_step:
            self._read(seqs)
            # on_step gets the memory of one sequence, without a batch dimension: one batch slot
            # at a time. Queries are not part of it, and are read for all together.
            alone = any(name != QUERIES for name in self.cache.memory)
            for part in self._parts(1 if alone else seqs.numel()):
                self._on_step(part, seen)
        if self.refusals is not None:
            self._read(seqs)
            self._refuse(seqs, seen)
        if self.work is not None and cut:
            self._cut(seqs, seen, index)

    def _read(self, seqs: Tensor) -> None:
        """Find the slots of all entries, as they lie now."""
        rows, size = self.rows, self.rows.page_size
        seq = seqs.clamp(min=0)
        self._length = rows.length.index_select(0, seq).flatten(1) * self._live[:, None]
        pages = rows.table.index_select(0, seq).flatten(1, 2)[..., : self.columns].contiguous()
        offset = torch.arange(size, device=seqs.device)
        self._pages = pages
        slot = (pages[..., None] * size + offset).flatten(-2)
        self._occupied = self._cell[: self.cells] < self._length[..., None]
        self._slot = slot.masked_fill(~self._occupied, 0)
        self._held_by = seq
        self.too_long |= (self._length > self.cells).any(1)

    def _parts(self, together: int) -> list[slice]:
        """Batch slots, so many at once."""
        batch = self._slots.numel()
        return [slice(at, min(at + together, batch)) for at in range(0, batch, together)]

    def _view(self, part: slice, seen: Tensor) -> FixedView:
        pool, where = self.cache.pool, self._slot[part].flatten()
        count, layers, heads = part.stop - part.start, *self.rows.length.shape[1:]
        now, prompt = seen[part], self.prompt[part]
        each = count, layers * heads * self.cells
        source = FixedEntries(
            self.cache,
            self._held_by[part],
            now,
            self._length[part],
            self._pages[part],
            where,
            self.model.rope,
        )
        return FixedView(
            # Tensors that stand for numbers.
            seen=cast(int, now[0] if count == 1 else now[:, None].expand(each).flatten()),
            layers=count * layers,
            kv_heads=heads,
            row=self._cell[: where.numel()].div(self.cells, rounding_mode="floor"),
            length=self._length[part].flatten(),
            position=pool.position.view(-1)[where].long(),
            log_beta=pool.log_beta.view(-1)[where],
            modality=pool.modality.view(-1)[where],
            source=source,
            prompt_tokens=cast(int, prompt[0] if count == 1 else prompt),
            sequences=count,
            occupied=self._occupied[part].flatten(0, 1),
        )

    def _refuse(self, seqs: Tensor, seen: Tensor) -> None:
        """Drop what the write gates refuse, and count how many of them have no number."""
        admission, view = self.model.policy.admission, self._view(slice(0, seqs.numel()), seen)
        assert admission is not None and self.refusals is not None
        log_g = view.state()[:, 0]
        refused = admission.refused(view.position, log_g, view.seen).view_as(self._occupied)
        refused = refused & self._occupied & ~self.too_long[:, None, None]
        nan = (refused & log_g.isnan().view_as(refused)).flatten(1).sum(1)
        drop(self.refusals, self.rows, self.cache.pool, seqs, refused, nan)

    def _cut(self, seqs: Tensor, seen: Tensor, index: Tensor) -> None:
        """Drop what goes to the budget."""
        policy, scores = self.model.policy, None
        limits = self._split(self._limits.index_select(0, index)[0])
        if scores_in_torch(policy):
            self._read(seqs)
            made = [self._scores(part, seen, limits) for part in self._parts(self._together)]
            scores = made[0] if len(made) == 1 else torch.cat(made)
            scores = scores.view(self._occupied.shape)
        assert self.work is not None
        pool = self.cache.pool
        evict_to_shares(self.work, policy, self.rows, pool, seqs, seen, limits, scores)

    def _scores(self, part: slice, seen: Tensor, limits: EvictionLimits) -> Tensor:
        """Score the cells of some batch slots; keep the state that the scorer hands back."""
        view = self._view(part, seen)
        if self.model.needs.shares:
            share = (limits.share[part] // self._group_rows)[:, self._group].flatten()
            view = replace(view, share=share)
        made: Tensor | Scores = self.model.policy.scoring.score(view)
        if isinstance(made, Tensor):
            return made.float().contiguous()
        if made.state is not None:
            share = limits.share[part]
            rows = self.model.spec.rows // share.shape[1]
            held = self._length[part].unflatten(1, (share.shape[1], rows)).sum(-1)
            due = (held > share + limits.above[part, None] * rows).any(-1)
            self._put_state(part, made.state, due)
        return made.value.float().contiguous()

    def _on_step(self, part: slice, seen: Tensor) -> None:
        """See :func:`mmkv.engine.scorer_state.revise_state`; several batch slots have no memory."""
        cache, seq, live = self.cache, self._held_by[part], self._live[part]
        kept = {name: whole for name, whole in cache.memory.items() if name not in RINGS}
        before = {name: whole.index_select(0, seq)[0] for name, whole in kept.items()}
        memory = dict(before)
        scorer = self.model.policy.scoring
        state = scorer.on_step(self._view(part, seen), memory)  # type: ignore[attr-defined]
        if state is not None:
            self._put_state(part, state, live)
        for name, whole in kept.items():
            whole[seq] = torch.where(live, memory[name], before[name])[None]

    def _put_state(self, part: slice, state: Tensor, write: Tensor) -> None:
        """Replace the state of those batch slots' entries of which the bool ``write`` says so."""
        writes = (self._occupied[part] & write[:, None, None]).flatten()
        kept = self.cache.pool.state.flatten(0, 1)
        cell = self._cell[: writes.numel()].where(writes, writes.byte().argmax())
        where = self._slot[part].flatten()[cell]
        kept[where] = torch.where(writes.any(), state[cell], kept[where])
