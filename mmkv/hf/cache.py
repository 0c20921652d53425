"""What ``generate`` returns as ``past_key_values``: the sessions of a batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache

from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.hf.loop import BatchRow

# Hashes of pictures per modality (mmkv.engine.model.families.vision_cache.looks).
Looks = dict[int, list[bytes | None]]


class RetainedCache(Cache):
    """The conversations of a batch, for a later ``generate`` to go on with.

    Pass it as ``past_key_values``, with the ids of the whole conversation and all its pictures or
    the new ones. A new one is empty and belongs to the first model that fills it. ``copy.deepcopy``
    gives an independent copy. Its memory is returned when it is closed, collected, or when the
    model is no longer retained.

    Args:
        only_new: ids are always those that come after the latest reply. Otherwise they are so if
            the attention mask covers earlier tokens, too, as for transformers' own caches.
    """

    def __init__(self, *, only_new: bool = False) -> None:
        super().__init__(layers=[])
        self.only_new = only_new
        self.rows: list[BatchRow] = []
        self._looks: list[Looks] = []  # of the pictures of each call, or all of one conversation's
        self._use = threading.Lock()
        self.owner: weakref.WeakSet[RetainedCache] | None = None  # closes it, with the others

    def __repr__(self) -> str:
        return f"RetainedCache({len(self.rows)} conversations, {self.get_seq_length()} tokens)"

    @whole
    def __deepcopy__(self, memo: dict[int, Any]) -> RetainedCache:
        made = RetainedCache(only_new=self.only_new)
        with self.in_use():
            made._looks = [dict(looks) for looks in self._looks]
            for row in self.rows:  # one by one: what was forked before an error is closed
                made.rows.append(row.fork())
        if self.owner is not None:
            made.owner = self.owner
            self.owner.add(made)
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that the longest conversation has seen, evicted ones included."""
        return max((len(row.ids) for row in self.rows), default=0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Return False: evicted tokens cannot come back."""
        return False

    def memory(self) -> tuple[Memory, ...]:
        """Return the tokens that each conversation has seen, and the memory that it holds."""
        return tuple(row.session.memory() for row in self.rows)

    def retained(self) -> list[list[list[Tensor]]]:
        """Return the token indices kept, ``[row][layer][kv_head]``, each ascending int64."""
        return [row.session.retained() for row in self.rows]

    @whole
    def reset(self) -> None:
        """Forget all conversations and return their memory."""
        with self.in_use():
            self.close()

    def close(self) -> None:
        """Return the memory; the cache is empty afterwards."""
        close_rows(self.rows)
        self._looks = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Claim the cache for one call. Raises SessionError while another call has it."""
        with CtrlC():
            if not self._use.acquire(blocking=False):
                raise SessionError(
                    "the cache is in use by another generate call; wait for it, or give each its "
                    "own (copy.deepcopy)"
                )
            try:
                yield
            finally:
                self._use.release()

    @whole
    def replace(self, rows: Sequence[BatchRow], looks: Looks, again: Collection[int]) -> None:
        """Take over other rows and close those held so far.

        Args:
            looks: of the pictures that came with the ids.
            again: the modalities of which all came, not only the new ones.
        """
        before = list(self.rows)
        self.rows[:] = rows
        if self._looks and len(rows) == 1:
            old = self._looks.pop()
            for kind, now in looks.items():
                seen = old.get(kind, [])
                old[kind] = max(seen, now, key=len) if kind in again else [*seen, *now]
            looks = old
        self._looks.append(looks)
        close_rows(before)

    def check_looks(self, kind: int, looks: Looks) -> None:
        """Check pixels that cover pictures read before. Raises InputError where they are others."""
        now = looks[kind]
        for old in self._looks:
            seen = old.get(kind, [])
            # Of several rows it is not known whose pictures are which.
            same = now[: len(seen)] == seen if len(self.rows) == 1 else _in_order(seen, now)
            if not (same or _in_order(now, seen)):
                raise InputError(
                    "the pixels of earlier pictures or videos are not those that the cache has "
                    "read; pass a new RetainedCache(), or the pixels of the new ones alone"
                )

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a forward pass of the model itself."""
        raise InputError(
            "a RetainedCache is read by generate of a model under mmkv.hf.retain alone; for the "
            "model's own forward pass use a DynamicCache"
        )

    def crop(self, *_: Any) -> NoReturn:
        """Refuse: evicted tokens cannot come back."""
        raise InputError("a RetainedCache cannot be cropped; copy.deepcopy it before it goes on")

    def reorder_cache(self, *_: Any) -> NoReturn:
        """Refuse beam search."""
        raise InputError("a RetainedCache does not run beam search; set num_beams=1")


def _in_order(part: Sequence[Any], of: Sequence[Any]) -> bool:
    """Return whether all of ``part`` are found in ``of``, in this order."""
    rest = iter(of)
    return all(one in rest for one in part)


@whole
def close_rows(rows: list[BatchRow]) -> None:
    """Return the pages of all rows and empty the list."""
    while rows:
        rows.pop().session.close()
