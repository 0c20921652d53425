"""What a policy asks of a static step beside the kernels: its own torch code, in fixed shapes.

Every row is given the same number of cells, of which its entries take the first. A policy's scorer
reads them through :class:`FixedView` and computes what it computes eagerly; nothing is read back,
so a CUDA graph can hold it. Entries are then moved by the kernels of ``kernels.evict``.

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
from mmkv.engine.backends.cuda.kernels.buffers import PageTables
from mmkv.engine.backends.cuda.kernels.evict import drop, empty_drop, unsupported_reason
from mmkv.engine.backends.cuda.kernels.window_scores import window_scores
from mmkv.engine.cache import RaggedCache
from mmkv.engine.model.rope import Rope
from mmkv.engine.policies.base import CacheView, Policy, Scores, WindowReduction
from mmkv.engine.policies.selection import lowest_cells
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


def own_code(policy: Policy) -> bool:
    """Whether a part of the policy is not mmkv's: its code may read from the device."""
    parts = (policy.scoring, policy.allocation)
    return any(part and not type(part).__module__.startswith("mmkv.engine.") for part in parts)


@dataclass(frozen=True)
class FixedView(CacheView):
    """A view whose N counts all cells of R rows, M each.

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
    """Reads the cells of one sequence; a :class:`mmkv.engine.policies.base.EntrySource`.

    Args:
        seq: ``[1]`` int64, the sequence; slot: ``[N]``, 0 for cells without an entry.
        rope: of the model.
    """

    def __init__(self, cache: RaggedCache, seq: Tensor, slot: Tensor, rope: Rope) -> None:
        self._cache, self._seq, self._slot, self._rope = cache, seq, slot, rope

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
        keys = pool.stored_keys.flatten(0, 1)
        return attention_paid(self._queries()[0], keys, self._slot, view, reduction)

    def entropy(self, view: CacheView) -> Tensor:
        """Without dimensions; see :meth:`mmkv.engine.policies.base.CacheView.entropy`."""
        keys = self._cache.pool.stored_keys.flatten(0, 1)
        return newest_entropy(self._queries()[0], keys, self._slot, view)

    def future_queries(self, view: CacheView, ahead: int) -> tuple[Tensor, Tensor]:
        """See :meth:`mmkv.engine.policies.base.CacheView.future_queries`."""
        positions = self._cache.memory[POSITIONS].index_select(0, self._seq)[0]
        form = self._cache.pool.form
        return future_queries(self._queries()[0], positions, form, view.seen, ahead, self._rope)

    def _queries(self) -> Tensor:
        return self._cache.memory[QUERIES].index_select(0, self._seq)

    def _on_pages(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        cache, pool, queries = self._cache, self._cache.pool, self._queries()
        at = window_positions(view.seen, queries.shape[3], queries.device)
        shares = window_scores(
            queries,
            at[None],
            pool.keys,
            pool.position,
            cache.length.index_select(0, self._seq),
            cache.table.index_select(0, self._seq),
            torch.zeros_like(self._seq),
            queries.shape[-1] ** -0.5,
        )
        cells = view.live().shape[1]
        mean = shares[0].flatten(0, 1)[:, :cells].flatten()
        return mean if reduction.group == "mean" else mean * (queries.shape[2] // view.kv_heads)


class PolicyStep:
    """What a policy does in each step of a batch, from attention to eviction.

    Attributes:
        most_row: the most entries of a row; cells: M, those that there is room for.
        work: buffers of the eviction; ``work.nan`` is shared with the step.
        share: ``[steps, B, groups]`` int64, what each group of rows may keep once a step's token is
            appended; floor: ``[steps, B, R]``, or None where no row is guarded.
        above: ``[steps, B]`` int64, entries of a row beside its share that are let be.
        recent: ``[steps, B]`` int64, newest tokens that are protected; prompt: ``[B]`` int64.
        too_long: ``[B]`` bool, whether a row has more entries than cells: nothing is dropped then.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: RaggedCache,
        rows: PageTables,
        batch: int,
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
        self.work = replace(empty_drop(batch, rows, self.cells), nan=nan)
        self.cuts = model.policy.evicts and bool(unsupported_reason(model.policy))
        self.share, self.floor = rows.length.new_zeros(most_steps, batch, 1), None
        if self.cuts:
            shares = model.policy.shares(count, *rows.length.shape[1:])
            self.share = rows.length.new_zeros(most_steps, batch, shares.share.numel())
            if shares.floor is not None:
                self.floor = rows.length.new_zeros(most_steps, batch, count)
        self.recent = rows.length.new_zeros(most_steps, batch)
        self.above = rows.length.new_zeros(most_steps, batch)
        self.prompt = rows.length.new_zeros(batch)
        self._row = torch.arange(count, device=device).repeat_interleave(self.cells)
        self._slots = torch.arange(batch, device=device)
        self._cell = torch.arange(count * self.cells, device=device)
        self._taps: list[Tensor] = []
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
            above = [every.at(budget, rows) - 1 for budget in budgets]
            recent = [policy.recent(one - kept * policy.keeps_prompt) for one in each]
            steps = slice(None) if len(budgets) == 1 else slice(len(budgets))
            self.share[steps, slot] = torch.stack([one.share for one in made]).to(self.share)
            self.recent[steps, slot] = torch.tensor(recent).to(self.recent)
            self.above[steps, slot] = torch.tensor(above).to(self.above)
            if self.floor is not None:
                floors = [one.floor for one in made if one.floor is not None]
                self.floor[steps, slot] = torch.stack(floors).to(self.floor)

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
        self._taps = []
        self.too_long.zero_()
        if self.model.needs.mass:
            self._read(seqs)

    def attended(self, layer: int, query: Tensor) -> None:
        """Keep what the policy reads of a layer's queries ``[B, Hq, D]``, after its attention."""
        needs, spec, pool = self.model.needs, self.model.spec, self.cache.pool
        if needs.queries:
            ring = self.cache.memory[QUERIES][:, layer]
            where = self._seq, slice(None), self._position % needs.queries
            ring[where] = torch.where(self._write, query[self._who], ring[where])
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
        if model.has_on_append:
            write_state(
                self.cache,
                model.policy.scoring,
                self._seq,
                self._new[..., None],
                self._position[:, None],
                False,
                self._taps,
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
        """Drop what write gates refuse, then what stands above the budget.

        Args:
            seqs: ``[B]``; seen: ``[B]`` tokens seen; index: ``[1]`` the step's number.
            cut: whether a sequence may stand above its budget.
        """
        model = self.model
        if model.has_on_step:
            self._read(seqs)
            for slot in range(seqs.numel()):
                self._on_step(slot, seen)
        if model.policy.admission is not None:
            self._read(seqs)
            self._drop(seqs, [self._refused(slot, seen) for slot in range(seqs.numel())])
        if self.cuts and cut:
            self._read(seqs)
            self._drop(seqs, [self._lowest(slot, seen, index) for slot in range(seqs.numel())])

    def _read(self, seqs: Tensor) -> None:
        """Find the slots of all entries, as they lie now."""
        rows, size = self.rows, self.rows.page_size
        seq = seqs.clamp(min=0)
        self._length = rows.length.index_select(0, seq).flatten(1) * self._live[:, None]
        pages = rows.table.index_select(0, seq).flatten(1, 2)[..., : self.columns]
        offset = torch.arange(size, device=seqs.device)
        slot = (pages[..., None] * size + offset).flatten(-2)
        self._occupied = self._cell[: self.cells] < self._length[..., None]
        self._slot = slot.masked_fill(~self._occupied, 0)
        self._held_by = seq
        self.too_long |= (self._length > self.cells).any(1)

    def _view(self, slot: int, seen: Tensor) -> FixedView:
        pool, where = self.cache.pool, self._slot[slot].flatten()
        return FixedView(
            seen=cast(int, seen[slot]),  # a tensor that stands for one
            layers=self.rows.length.shape[1],
            kv_heads=self.rows.length.shape[2],
            row=self._row,
            length=self._length[slot],
            position=pool.position.view(-1)[where].long(),
            log_beta=pool.log_beta.view(-1)[where],
            modality=pool.modality.view(-1)[where],
            source=FixedEntries(self.cache, self._held_by[slot : slot + 1], where, self.model.rope),
            prompt_tokens=cast(int, self.prompt[slot]),
            occupied=self._occupied[slot],
        )

    def _refused(self, slot: int, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Bool ``[R, M]`` what the write gates refuse, and how many of them have no number."""
        admission, view = self.model.policy.admission, self._view(slot, seen)
        assert admission is not None
        log_g = view.state()[:, 0]
        refused = admission.refused(view.position, log_g, view.seen).view_as(view.occupied)
        refused = refused & view.occupied
        return refused, (refused.flatten() & log_g.isnan()).sum()

    def _lowest(self, slot: int, seen: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Bool ``[R, M]`` what goes to the budget, and how many of it have a score of NaN."""
        policy, view = self.model.policy, self._view(slot, seen)
        made: Tensor | Scores = policy.scoring.score(view)
        value, state = (made.value, made.state) if isinstance(made, Scores) else (made, None)
        recent = self.recent.index_select(0, index)[0, slot]
        value = policy.protected(value.float(), view, recent)
        share = self.share.index_select(0, index)[0, slot]
        above = self.above.index_select(0, index)[0, slot]
        floor = None if self.floor is None else self.floor.index_select(0, index)[0, slot]
        victims, due = lowest_cells(value, view, share, floor, above)
        if state is not None:
            self._put_state(slot, state, due)
        return victims, (victims.flatten() & value.isnan()).sum()

    def _on_step(self, slot: int, seen: Tensor) -> None:
        """See :func:`mmkv.engine.scorer_state.revise_state`."""
        cache, seq, live = self.cache, self._held_by[slot : slot + 1], self._live[slot]
        kept = {name: whole for name, whole in cache.memory.items() if name not in RINGS}
        before = {name: whole.index_select(0, seq)[0] for name, whole in kept.items()}
        memory = dict(before)
        scorer = self.model.policy.scoring
        state = scorer.on_step(self._view(slot, seen), memory)  # type: ignore[attr-defined]
        if state is not None:
            self._put_state(slot, state, live)
        for name, whole in kept.items():
            whole[seq] = torch.where(live, memory[name], before[name])[None]

    def _put_state(self, slot: int, state: Tensor, write: Tensor) -> None:
        """Replace the state of a batch slot's entries, if the bool ``write`` says so."""
        occupied, kept = self._occupied[slot].flatten(), self.cache.pool.state.flatten(0, 1)
        cell = self._cell.where(occupied, occupied.byte().argmax())
        where = self._slot[slot].flatten()[cell]
        kept[where] = torch.where(write, state[cell], kept[where])

    def _drop(self, seqs: Tensor, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        victims, nan = (torch.stack(each) for each in zip(*found, strict=True))
        victims = victims & ~self.too_long[:, None, None]
        drop(self.work, self.rows, self.cache.pool, seqs, victims, nan)
