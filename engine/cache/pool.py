"""The page pool: the only place where keys and values live."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mmkv.engine.cache.forms import AUTO, EncodedKV, KVForm
from mmkv.engine.cache.layout import COLUMNS, Columns, Layout
from mmkv.engine.errors import BudgetError
from mmkv.engine.system import free_bytes

SMALL = 64 * 2**20  # growing by less is not worth asking the system for free memory
_ALIGNED = 64  # bytes, as torch aligns its own
SPARE_SHARE = 4  # pages beyond those needed take one part of so many of the free memory


class PagePool(Columns):
    """Pages of ``page_size`` slots; a slot is one entry of one (sequence, layer, KV head) row.

    Args:
        columns: tensors in another's memory with ``num_pages`` pages, which is the ``limit`` then.

    Attributes:
        limit: most pages that may be held, or None: the pool grows no further.
        free_pages: that no row holds; a kernel that takes from the stack or gives back has its
            caller set it.
        beside: pages' worth of what open sequences hold beside the pool, which count to the limit.
        state_size: K, the numbers of the policy's state in each entry.
        dtype: the model's; form: how keys and values lie there.
        doubles: whether a pool that runs short takes twice its pages, where there is room, and not
            an eighth more: on a GPU.
        kv_page_bytes: of keys and values in one page, their scales included; metadata_page_bytes:
            of all other columns; page_bytes: of both.
    """

    def __init__(
        self,
        page_size: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        limit: int | None = None,
        state_size: int = 0,
        form: KVForm = AUTO,
        columns: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.page_size, self.head_dim, self.limit = page_size, head_dim, limit
        self.beside = 0
        self.state_size, self.dtype, self.form = state_size, dtype, form
        self.layout = Layout(page_size, head_dim, dtype, form, state_size)
        # Asked for whenever a session opens, reads or tells its memory.
        of = {name: self.layout.page_bytes(column) for name, column in COLUMNS.items()}
        self.page_bytes = sum(of.values())
        self.kv_page_bytes = sum(
            of[name] for name, column in COLUMNS.items() if column.holds in ("codes", "scales")
        )
        self.metadata_page_bytes = self.page_bytes - self.kv_page_bytes
        self.device = torch.device(device)
        for name, column in COLUMNS.items():
            shape = (num_pages, *self.layout.shape(column))
            made = (
                zeros(shape, self.layout.dtype_of(column), self.device)
                if columns is None
                else columns[name]
            )
            setattr(self, name, made)
        # Growing copies the pool. On a GPU it moves what a captured graph reads, too.
        self.doubles = self.device.type == "cuda"
        # A stack of free page ids: the first `free_pages` of it, lowest id on top.
        self._stack = torch.arange(num_pages - 1, -1, -1, device=device)
        self.free_pages = num_pages

    @property
    def num_pages(self) -> int:
        """Count the pages, free ones included."""
        return self._stack.numel()

    def take(self, count: int) -> Tensor:
        """Hand out ``count`` free pages as int64 ids ``[count]``; grows the pool when short.

        Raises:
            BudgetError: the pool would pass its limit; nothing has changed then.
        """
        self._require_limit(count)
        if count > self.free_pages:
            spare = self.num_pages if self.doubles else self.num_pages // 8
            self._enlarge(count - self.free_pages, spare)
        self.free_pages -= count
        return self._stack[self.free_pages : self.free_pages + count].flip(0)

    def give(self, pages: Tensor) -> None:
        """Return pages ``[n]``; the most recently returned are handed out first."""
        count = pages.numel()
        self._stack[self.free_pages : self.free_pages + count] = pages
        self.free_pages += count

    def reserve(self, count: int) -> None:
        """Make sure ``count`` pages are free, so that a later :meth:`take` cannot fail.

        Raises:
            BudgetError: the pool would pass its limit; nothing has changed then.
        """
        self._require_limit(count)
        short = count - self.free_pages
        if short > 0:
            self._enlarge(short, self.num_pages if self.doubles else 0)

    def set_beside(self, pages: int) -> None:
        """Count what open sequences hold beside the pool.

        Raises:
            BudgetError: that and the pages in use would pass the limit; nothing has changed then.
        """
        before, self.beside = self.beside, pages
        try:
            self._require_limit(0)
        except BudgetError:
            self.beside = before
            raise

    def prepare(self, count: int) -> None:
        """Have up to ``count`` pages free, as far as the limit and free memory allow."""
        short = count - self.free_pages
        if short > 0:
            self._enlarge(0, max(short, self.num_pages if self.doubles else 0))

    def require(self, count: int) -> None:
        """Check that ``count`` pages can be handed out; the pool stays as it is.

        Raises:
            BudgetError: they would pass its limit or the memory.
        """
        self._require_limit(count)
        short = count - self.free_pages
        if short > 0:
            self._cap(short)
            self._require_memory(self.num_pages + short)

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool to ``num_pages``; one tensor is copied at a time.

        Columns grow before the free list names their new pages: a pool that is interrupted in
        between has pages that nobody uses, and the next call takes them up.

        Raises:
            BudgetError: there is not so much memory; nothing has changed then.
        """
        old = self._stack.numel()
        if num_pages <= old:
            return
        self._require_memory(num_pages)
        for name in COLUMNS:
            tensor: Tensor = getattr(self, name)
            if tensor.shape[0] >= num_pages:
                continue
            larger = zeros((num_pages, *tensor.shape[1:]), tensor.dtype, self.device)
            larger[:old] = tensor[:old]
            setattr(self, name, larger)
            del tensor, larger
        fresh = torch.arange(num_pages - 1, old - 1, -1, device=self.device)
        free = self._stack[: self.free_pages]
        stack = torch.cat([fresh, free, self._stack.new_zeros(old - self.free_pages)])
        self._stack, self.free_pages = stack, self.free_pages + num_pages - old

    def keep_only(self, pages: Tensor) -> None:
        """Shrink to the pages ``[n]`` given; page ``pages[i]`` becomes page i, and none is free.

        All tensors are made before one is replaced: running out of memory changes nothing.
        """
        kept = [column[pages] for column in self.columns()]
        for name, column in zip(COLUMNS, kept, strict=True):
            setattr(self, name, column)
        self._stack, self.free_pages = self._stack.new_zeros(pages.numel()), 0

    def free_list(self) -> Tensor:
        """Return the ids of all free pages, for the invariant checks."""
        return self._stack[: self.free_pages]

    @property
    def stored_keys(self) -> Tensor | EncodedKV:
        """Keys ``[pages, P, D]`` as attention reads them: by pages, or flattened, by slots."""
        if self.form.plain:
            return self.keys
        return EncodedKV(self.keys, self.key_scale, self.form.key, self.dtype)

    @property
    def stored_values(self) -> Tensor | EncodedKV:
        """Values, as :attr:`stored_keys`."""
        if self.form.plain:
            return self.values
        return EncodedKV(self.values, self.value_scale, self.form.value, self.dtype)

    def keys_at(self, slots: Tensor) -> Tensor:
        """Return the model's keys ``[..., D]`` at flat ``slots [...]``, as far as they are kept."""
        return self.form.rotate(self.stored_keys.flatten(0, 1)[slots])

    def values_at(self, slots: Tensor) -> Tensor:
        """Return the model's values, as :meth:`keys_at`."""
        return self.form.rotate(self.stored_values.flatten(0, 1)[slots])

    def _enlarge(self, short: int, spare: int) -> None:
        """Grow by at least ``short`` pages and up to ``spare``, so that the next calls need not.

        Pages beyond ``short`` are taken within the limit, and from a quarter of the memory that is
        still free after ``short``. Raises BudgetError: there is no room for ``short``.
        """
        least = self.num_pages + short
        most = min(self.num_pages + max(short, spare), self._cap(short))
        if (most - least) * self.page_bytes >= SMALL:
            free = free_bytes(self.device)
            if free is not None:
                left = max(free - self._needed_bytes(least), 0)
                most = min(most, least + left // (SPARE_SHARE * self.page_bytes))
        self.grow(most)

    def _needed_bytes(self, num_pages: int) -> int:
        needed = (num_pages - self.num_pages) * self.page_bytes
        if self.device.type == "cpu":
            # What was promised before and is not used may not have taken its memory yet.
            needed += self.free_pages * self.page_bytes
        # The largest column stands twice while it is copied.
        return needed + max(column.numel() * column.element_size() for column in self.columns())

    def _require_memory(self, num_pages: int) -> None:
        """Raise BudgetError unless growing fits: a kernel that overcommits kills instead."""
        if (num_pages - self.num_pages) * self.page_bytes < SMALL:
            return
        needed = self._needed_bytes(num_pages)
        free = free_bytes(self.device)
        if free is not None and needed > free:
            raise BudgetError(
                f"the cache would need {needed / 2**30:,.1f} GiB more for {num_pages:,} pages of "
                f"{self.page_bytes:,} bytes, {free / 2**30:,.1f} GiB are free; lower the budget, "
                "the page size or the prefill chunk, or close a session"
            )

    def _require_limit(self, count: int) -> None:
        """Raise BudgetError where so many pages more do not fit beside all that is held."""
        if not self.beside or self.limit is None:
            return  # what the pool may grow to is all there is
        wanted = self.num_pages - self.free_pages + self.beside + count
        if wanted > self.limit:
            raise BudgetError(
                f"{wanted:,} pages of {self.page_bytes:,} bytes are needed, {self.beside:,} for "
                f"the states of linear layers, the limit is {self.limit:,}; raise the memory "
                "limit, lower the budget, or close a session"
            )

    def _cap(self, short: int) -> int:
        wanted = self.num_pages + short
        if self.limit is not None and wanted > self.limit:
            raise BudgetError(
                f"{wanted:,} pages of {self.page_bytes:,} bytes are needed, the limit is "
                f"{self.limit:,}; lower the budget or the prefill chunk, or close a session"
            )
        return self.limit if self.limit is not None else 2**62


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU they take memory as they are written, not before.

    So a pool that is as large as it may become costs what has been used of it.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        raw = np.zeros(size + _ALIGNED, np.uint8)  # of the kernel: it gives pages when touched
    except MemoryError as error:
        raise BudgetError(f"there are no {size:,} bytes for the cache; lower the budget") from error
    start = -raw.ctypes.data % _ALIGNED
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
