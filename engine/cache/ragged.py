"""Ragged rows over the page pool: append, drop, fork, and the invariants that hold in between."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.cache.layout import COLUMNS
from mmkv.engine.cache.pool import SMALL, SPARE_SHARE, PagePool
from mmkv.engine.errors import BudgetError
from mmkv.engine.system import free_bytes

_FIRST_SLOTS = 4  # sequences that a new cache has tables for


@dataclass(frozen=True)
class Entries:
    """Every live entry of some sequences, row-major (sequence, layer, KV head, storage order).

    Attributes:
        row: ``[N]`` int64, ``layer * kv_heads + head``, of the sequence with index i among them
            ``i * rows`` more.
        offset: ``[N]`` int64, storage index inside the row.
        slot: ``[N]`` int64, flat slot ``page * P + offset % P`` in the pool.
    """

    row: Tensor
    offset: Tensor
    slot: Tensor


class Owner:
    """Owns a sequence; made by :meth:`RaggedCache.owner`."""

    __slots__ = ("__weakref__", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq


class _Mark(weakref.ref[Owner]):
    __slots__ = ("seq",)
    seq: int


class RaggedCache:
    """Rows (sequence, layer, KV head) of unequal length; a page belongs to one row only.

    Attributes:
        length: ``[S, L, H]`` int64, entries of each row; 0 past the sequences opened so far.
        table: ``[S, L, H, W]`` int64 page ids; columns past ``ceil(length / P)`` mean nothing.
        memory: by name ``[S, ...]``, what a policy keeps of each sequence beside its entries; zero
            where nothing has been written.
        states: by name ``[N, ...]``, what layers without entries keep of each sequence opened so
            far; N is larger where a GPU has room.
        state_bytes: of the states of one sequence; state_pages: as many bytes in pages, which count
            as held while a sequence is open, though no page of the pool is taken for them.
        lost: marks of sequences whose owners are gone, see :meth:`owner`.

    The order of entries inside a row is free (keys carry their rotation, every slot its
    position), which is what lets :meth:`drop` fill a hole with the row's last entry.
    """

    def __init__(
        self,
        pool: PagePool,
        layers: int,
        kv_heads: int,
        memory: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        states: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        self.pool, self.layers, self.kv_heads = pool, layers, kv_heads
        self.rows = layers * kv_heads
        self.length = torch.zeros(0, layers, kv_heads, dtype=torch.int64, device=pool.device)
        self.table = torch.zeros(0, layers, kv_heads, 1, dtype=torch.int64, device=pool.device)
        self.memory, self.states = (
            {
                name: torch.zeros((0, *shape), dtype=dtype, device=pool.device)
                for name, (shape, dtype) in (kept or {}).items()
            }
            for kept in (memory, states)
        )
        self.state_bytes = sum(
            math.prod(kept.shape[1:]) * kept.itemsize for kept in self.states.values()
        )
        self.state_pages = -(-self.state_bytes // pool.page_bytes)
        self._open: list[bool] = []
        self._marks: dict[int, _Mark] = {}
        self.lost: deque[Any] = deque()

    def open(self) -> int:
        """Start an empty sequence and return its slot.

        Raises:
            BudgetError: its states would pass the pool's limit, or what the policy keeps of it the
                memory; nothing has changed then.
        """
        before = self.pool.beside
        self.pool.set_beside((self.open_count + 1) * self.state_pages)
        if False in self._open:
            seq = self._open.index(False)
            self._open[seq] = True
            return seq
        seq = len(self._open)
        try:
            self._make_rows(seq)
        except BaseException:
            self.pool.beside = before
            raise
        # Listed last: what is interrupted before that has rows that nobody uses, and the next call
        # takes them up.
        self._open.append(True)
        return seq

    def _make_rows(self, seq: int) -> None:
        """Have rows for sequence ``seq``. Raises BudgetError."""
        # Twice as many: a captured graph has their addresses, and each of these is a new one.
        spare = max(seq, _FIRST_SLOTS) - 1
        self._require_memory(seq + 1 + spare)
        self.length = _with_row(self.length, seq, spare)
        self.table = _with_row(self.table, seq, spare)
        for name, tensor in self.memory.items():
            self.memory[name] = _with_row(tensor, seq, spare)
        for name, tensor in self.states.items():
            self.states[name] = _with_row(tensor, seq, self._spare_states(seq))

    def _require_memory(self, rows: int) -> None:
        """Raise BudgetError unless tensors of so many rows fit that the policy reads."""
        sizes = [math.prod(x.shape[1:]) * x.itemsize for x in self.memory.values()]
        needed = sum(sizes) * rows
        free = None if needed < SMALL else free_bytes(self.pool.device)
        if free is not None and needed > free:
            raise BudgetError(
                f"what the policy keeps of {rows} sessions beside their entries needs "
                f"{needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB are free; give the policy a "
                "smaller window, or close a session"
            )

    def _spare_states(self, seq: int) -> int:
        """Return the states that are made beside that of sequence ``seq``: on a GPU, half as many
        as there are, from a part of the memory that is free.
        """
        spare = seq // 2 if self.pool.doubles else 0
        free = free_bytes(self.pool.device) if spare * self.state_bytes >= SMALL else None
        return spare if free is None else min(spare, free // SPARE_SHARE // self.state_bytes)

    @property
    def open_count(self) -> int:
        """Count the open sequences, those without an entry among them."""
        return sum(self._open)

    @torch.inference_mode()
    def clear(self, seq: int) -> None:
        """Empty a sequence, which stays open, and return every page it held."""
        # The first on top: the next sequence then has neighbours in memory in their order. A CPU
        # reads rows whose pages descend half as fast again.
        pages = self._pages(seq).flip(0)
        self.length[seq] = 0
        self.pool.give(pages)
        for tensor in (*self.memory.values(), *self.states.values()):
            tensor[seq] = 0

    def close(self, seq: int) -> None:
        """Free a sequence and return every page it held."""
        self.clear(seq)
        self._open[seq] = False
        self.pool.set_beside(self.open_count * self.state_pages)
        self._marks.pop(seq, None)

    def owner(self, seq: int) -> Owner:
        """Return who owns a sequence from now on: when nobody has it any more, it is lost.

        That may be in any thread, in the middle of a call, and while Ctrl-C comes: no bytecode runs
        then, and :meth:`free_lost` does the rest.
        """
        made = Owner(seq)
        mark = _Mark(made, self.lost.append)
        mark.seq = seq
        self._marks[seq] = mark
        return made

    def free_lost(self) -> None:
        """Free what is :attr:`lost`; whoever takes the engine's lock does so first."""
        while self.lost:
            mark: _Mark = self.lost.popleft()
            if self._marks.get(mark.seq) is mark:  # else it was closed, or has another owner
                self.close(mark.seq)

    def fork(self, seq: int) -> int:
        """Copy a sequence into new pages, in the same storage order; returns the new slot."""
        pages = self._pages(seq)
        with self._opened(self.length[seq]) as other:
            copies = self._pages(other)
            for column in self.pool.columns():
                column[copies] = column[pages]
            for tensor in (*self.memory.values(), *self.states.values()):
                tensor[other] = tensor[seq]
        return other

    def append(self, seqs: Tensor, count: int) -> Tensor:
        """Make room for ``count`` new entries in every row of the sequences ``seqs [B]``.

        Returns:
            flat slots ``[B, L, H, count]`` int64 for the caller to fill; lengths are advanced.
        """
        size, rows = self.pool.page_size, self.rows
        row = (seqs[:, None] * rows + torch.arange(rows, device=seqs.device)).flatten()
        before = self.length.view(-1)[row]
        known = before.cpu()  # the only read from the device
        held, needed = _ceil(known, size), _ceil(known + count, size)
        self._widen(int(needed.max()))
        fresh = needed - held
        # Pages first: if the pool refuses, no row has changed.
        pages = self.pool.take(int(fresh.sum()))
        which = torch.repeat_interleave(fresh)
        first = fresh.cumsum(0) - fresh
        column = held[which] + torch.arange(len(which), device="cpu") - first[which]
        width = self.table.shape[-1]
        table = self.table.view(-1)
        which, column = torch.stack([which, column]).to(row.device)
        table[row[which] * width + column] = pages
        self.length.view(-1)[row] = before + count
        index = before[:, None] + torch.arange(count, device=row.device)
        # In place: of a chunk each of these has 8 bytes for every entry.
        column = index.div(size, rounding_mode="floor").add_(row[:, None] * width)
        slot = table[column].mul_(size).add_(index.remainder_(size))
        if self.pool.state_size:
            self.pool.state.flatten(0, 1)[slot.flatten()] = 0
        return slot.view(seqs.numel(), self.layers, self.kv_heads, count)

    def entries(self, seq: int | Sequence[int]) -> Entries:
        """Return all live entries of one sequence, or of several different ones."""
        length = self.length[seq].reshape(-1)
        row = torch.repeat_interleave(length)
        start = length.cumsum(0) - length
        offset = torch.arange(row.numel(), device=row.device) - start[row]
        size = self.pool.page_size
        page = self.table[seq].reshape(length.numel(), -1)[row, offset // size]
        return Entries(row, offset, page * size + offset % size)

    def drop(
        self, seq: int | Sequence[int], victims: Tensor, entries: Entries | None = None
    ) -> None:
        """Evict entries, given as indices ``[K]`` into :meth:`entries` of ``seq``.

        A victim's slot is refilled from the tail of its row; emptied pages go back to the pool.
        """
        live = self.entries(seq) if entries is None else entries
        size = self.pool.page_size
        keep = torch.ones(live.row.numel(), dtype=torch.bool, device=live.row.device)
        keep[victims] = False
        before = self.length[seq].reshape(-1)
        after = before - torch.bincount(live.row[victims], minlength=before.numel())
        inside = live.offset < after[live.row]
        # Row by row there are as many holes inside the new length as survivors beyond it, and
        # both lists are row-major, so they pair up one to one.
        hole, mover = live.slot[~keep & inside], live.slot[keep & ~inside]
        for column in self.pool.columns():
            flat = column.flatten(0, 1)
            flat[hole] = flat[mover]
        table = self.table[seq].reshape(before.numel(), -1)
        column_index = torch.arange(table.shape[1], device=table.device)
        freed = (column_index >= _ceil(after, size)[:, None]) & (
            column_index < _ceil(before, size)[:, None]
        )
        self.pool.give(table[freed])
        self.length[seq] = after.view(-1, self.layers, self.kv_heads)

    def shorten(self, seq: int, count: int) -> None:
        """Drop the entries that each row of a sequence got last, ``count`` of them."""
        before = self._page_mask(seq)
        self.length[seq] -= count
        self.pool.give(self.table[seq][before & ~self._page_mask(seq)].flip(0))

    @contextmanager
    def _opened(self, length: Tensor) -> Iterator[int]:
        """Open a sequence with pages for rows of ``length [L, H]``; an error closes it again."""
        pages = self.pool.take(self.needed_pages(length))
        seq = None
        try:
            self._widen(int(_ceil(length, self.pool.page_size).max()))
            seq = self.open()
            self.length[seq] = length
            self.table[seq][self._page_mask(seq)] = pages
            yield seq
        except BaseException:
            self.pool.give(pages)
            if seq is not None:
                self.length[seq] = 0
                self.close(seq)
            raise

    def memory_bytes(self) -> int:
        """Count the bytes of the policy's memory of one sequence."""
        return sum(kept[0].nbytes for kept in self.memory.values() if kept.shape[0])

    def held_pages(self, seq: int) -> int:
        """Return the pages that one open sequence holds; :attr:`state_pages` are among them."""
        return self.needed_pages(self.length[seq]) + self.state_pages

    def export(self, seq: int) -> dict[str, Tensor]:
        """Return the content of one sequence as compact CPU tensors, in storage order.

        Returns:
            ``length [L, H]``, every column of :data:`COLUMNS` for the N live entries, row-major:
            ``[N, D]``, ``[N]`` or ``[N, K]``, ``memory.NAME`` for the policy's memory and
            ``state.NAME`` for the states.
        """
        slot = self.entries(seq).slot
        columns = {
            name: column.flatten(0, 1)[slot].cpu().contiguous()
            for name, column in zip(COLUMNS, self.pool.columns(), strict=True)
        }
        beside = {name: kept[seq].cpu().clone() for name, kept in self._beside()}
        return {"length": self.length[seq].cpu().clone(), **columns, **beside}

    def import_(self, tensors: dict[str, Tensor]) -> int:
        """Open a sequence with the content that :meth:`export` gave; returns its slot.

        Raises:
            BudgetError: the pool would pass its limit. No page is held after any error.
        """
        with self._opened(tensors["length"].to(self.pool.device)) as seq:
            slot = self.entries(seq).slot
            for name, column in zip(COLUMNS, self.pool.columns(), strict=True):
                if name in tensors:  # older files lack some that hold nothing
                    column.flatten(0, 1)[slot] = tensors[name].to(column)
            for name, kept in self._beside():
                kept[seq] = tensors[name].to(kept)
        return seq

    def layout(self, entries: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return by name the shape and type of what :meth:`export` gives for so many entries."""
        columns = {
            name: ((entries, *column.shape[2:]), column.dtype)
            for name, column in zip(COLUMNS, self.pool.columns(), strict=True)
        }
        beside = {name: (tuple(kept.shape[1:]), kept.dtype) for name, kept in self._beside()}
        return {"length": ((self.layers, self.kv_heads), torch.int64), **columns, **beside}

    def _beside(self) -> list[tuple[str, Tensor]]:
        """Return what lies beside the entries ``[N, ...]``, by its name in :meth:`export`."""
        memory = [(f"memory.{name}", kept) for name, kept in self.memory.items()]
        return memory + [(f"state.{name}", kept) for name, kept in self.states.items()]

    def put_states(self, seqs: Tensor | int, made: Mapping[str, Tensor]) -> None:
        """Put new states of some sequences in place: ``[B, ...]`` for ``seqs [B]``, or of one."""
        for name, state in made.items():
            self.states[name][seqs] = state

    def needed_pages(self, length: Tensor) -> int:
        """Count the pages of rows of these lengths."""
        return int(_ceil(length, self.pool.page_size).sum())

    def pages_for(self, seq: int, count: int) -> int:
        """Count the pages that ``count`` more entries in every row of a sequence take."""
        length = self.length[seq]
        return self.needed_pages(length + count) - self.needed_pages(length)

    def trim(self) -> int:
        """Shrink pool and tables to what the rows hold; content and storage order stay.

        Held pages move down into the ids of free ones, and the tables follow. States of closed
        sequences behind the last open one go.

        Returns:
            bytes of the pages and states given back to the allocator.
        """
        pool, held = self.pool, self._page_mask(slice(None))
        unused, pages = pool.free_pages, self.table[held]
        states = self._trim_states()
        if not unused:
            return states
        source = torch.arange(pages.numel(), device=pages.device)
        is_held = torch.zeros(pool.num_pages, dtype=torch.bool, device=pages.device)
        is_held[pages] = True
        gaps = (~is_held[: pages.numel()]).nonzero().flatten()
        movers = pages.numel() + is_held[pages.numel() :].nonzero().flatten()
        source[gaps] = movers
        place = torch.arange(pool.num_pages, device=pages.device)
        place[movers] = gaps
        width = max(int(_ceil(self.length, pool.page_size).max()), 1) if self.length.numel() else 1
        table = torch.zeros_like(self.table)  # no stale id may name a page that is gone
        table[held] = place[pages]
        pool.keep_only(source)
        self.table = table[..., :width].contiguous()
        return unused * pool.page_bytes + states

    def _trim_states(self) -> int:
        """Let the states behind the last open sequence go; return their bytes."""
        if not self.states:
            return 0
        while self._open and not self._open[-1]:
            self._open.pop()
        rows = len(self._open)
        spare = min(len(kept) for kept in self.states.values()) - rows
        if spare > 0:
            self.states = {name: kept[:rows].clone() for name, kept in self.states.items()}
        return max(spare, 0) * self.state_bytes

    def check(self) -> None:
        """Verify that every page is free or in exactly one row.

        Raises:
            AssertionError: naming the broken invariant.
        """
        held = [self._pages(seq) for seq in range(len(self._open))]
        closed = [n for seq, n in enumerate(held) if not self._open[seq] and n.numel()]
        assert not closed, "a closed sequence holds pages"
        pages = torch.cat([self.pool.free_list(), *held])
        assert pages.numel() == self.pool.num_pages, (
            f"{pages.numel()} pages are free or held, the pool has {self.pool.num_pages}"
        )
        assert pages.unique().numel() == pages.numel(), "a page is free or held twice"
        assert bool((self.length >= 0).all()), "a row has a negative length"
        for name, kept in self.states.items():
            left = [seq for seq, used in enumerate(self._open) if not used and kept[seq].any()]
            assert not left, f"closed sequences {left} have a state {name}"
        assert self.pool.beside == self.open_count * self.state_pages, "states are not counted"

    def _page_mask(self, seq: int | slice) -> Tensor:
        column = torch.arange(self.table.shape[-1], device=self.table.device)
        return column < _ceil(self.length[seq], self.pool.page_size)[..., None]

    def _pages(self, seq: int) -> Tensor:
        return self.table[seq][self._page_mask(seq)]

    def _widen(self, width: int) -> None:
        have = self.table.shape[-1]
        if width > have:
            extra = max(width, 2 * have) - have
            self.table = torch.cat(
                [self.table, self.table.new_zeros(*self.table.shape[:-1], extra)], -1
            )


def _with_row(tensor: Tensor, row: int, spare: int = 0) -> Tensor:
    """Return a tensor that has a row of this number, zero if it is new; then with spare ones."""
    if tensor.shape[0] > row:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(1 + spare, *tensor.shape[1:])])


def _ceil(length: Tensor, size: int) -> Tensor:
    return (length + size - 1).div(size, rounding_mode="floor")
