"""What ``generate`` returns as ``past_key_values``: the sessions of a batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache

from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.hf.loop import BatchRow


class RetainedCache(Cache):
    """The conversations of a batch, for a later ``generate`` to go on with.

    Pass it as ``past_key_values``: with the ids of the whole conversation, or with those that come
    after the latest reply, and with the pictures that are new. A new one is empty and belongs to
    the first model that fills it. ``copy.deepcopy`` gives an independent copy. Its memory is
    returned when it is closed, collected, or when the model is no longer retained.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows: list[BatchRow] = []
        self._use = threading.Lock()
        self.owner: weakref.WeakSet[RetainedCache] | None = None  # closes it, with the others

    def __repr__(self) -> str:
        return f"RetainedCache({len(self.rows)} conversations, {self.get_seq_length()} tokens)"

    @whole
    def __deepcopy__(self, memo: dict[int, Any]) -> RetainedCache:
        made = RetainedCache()
        with self.in_use():
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
        """Return -1: there is no most."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Return False: evicted tokens cannot come back."""
        return False

    def memory(self) -> tuple[Memory, ...]:
        """Return what each conversation has seen and what it physically holds."""
        return tuple(row.session.memory() for row in self.rows)

    def retained(self) -> list[list[list[Tensor]]]:
        """Return the token indices kept, ``[row][layer][kv_head]``, each ascending int64."""
        return [row.session.retained() for row in self.rows]

    @whole
    def reset(self) -> None:
        """Forget all conversations and return their memory."""
        with self.in_use():
            close_rows(self.rows)

    def close(self) -> None:
        """Return the memory; the cache is empty afterwards."""
        close_rows(self.rows)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the cache for one call. Raises SessionError while another one has it."""
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
    def replace(self, rows: Sequence[BatchRow]) -> None:
        """Take over other rows and close those held so far."""
        before = list(self.rows)
        self.rows[:] = rows
        close_rows(before)

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


@whole
def close_rows(rows: list[BatchRow]) -> None:
    """Return the pages of all rows and empty the list."""
    while rows:
        rows.pop().session.close()
