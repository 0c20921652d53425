"""The conversations of a batch, and the cache that keeps them for a later ``generate``.

A row is a session with the ids that it has seen. Which of them stay when a caller passes the ids of
the whole conversation, or the new ones, is decided here.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmkv.engine.contents import Memory
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.interrupts import CtrlC, whole
from mmkv.engine.sequence import CachedSequence


@dataclass
class BatchRow:
    """One conversation.

    Attributes:
        session: what holds its keys and values.
        ids: every token that the session has seen.
        prompt: how many of them the first prompt had.
        pending: the latest token that was generated; the session has not seen it.
    """

    session: CachedSequence
    ids: list[int] = field(default_factory=list)
    prompt: int = 0
    pending: int | None = None

    def fork(self) -> BatchRow:
        """Return an independent copy."""
        return BatchRow(self.session.fork(), list(self.ids), self.prompt, self.pending)

    def can_go_back(self, count: int) -> bool:
        """Whether it can stand behind its first ``count`` tokens again as if it had read no more.

        Not once something has been evicted, nor behind a picture that it would have to read again.
        """
        session, engine = self.session, self.session.engine
        media = set(engine.family.placeholder.values())
        exact = session.can_cut_back and not session.evicted and not engine.policy.keeps_prompt
        return exact and media.isdisjoint(self.ids[count:])

    def go_back(self, count: int) -> None:
        """Let go what follows its first ``count`` tokens; see :meth:`can_go_back`."""
        if count == len(self.ids):
            return
        session = self.session
        position = session.next_position - (session.seen - count)
        session.cut_back(count, position, min(session.prompt_tokens, count))
        self.ids, self.pending, self.prompt = self.ids[:count], None, min(self.prompt, count)

    def fed(self, token: int) -> None:
        """Note that the session has seen ``token``."""
        self.ids.append(token)
        self.pending = None


def without_padding(input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the tokens int64 ``[T]`` of each row, on the CPU, without those that are masked.

    Args:
        input_ids: ``[B, W]``.
        mask: ``[B, W]`` or, where tokens came before, ``[B, more than W]``.

    Raises:
        InputError: for a mask of another shape.
    """
    ids = input_ids.cpu().long()
    if mask is None:
        return list(ids)
    if mask.dim() != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] < ids.shape[1]:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(ids.shape)}; pass "
            "the mask that the processor returns"
        )
    own = mask[:, mask.shape[1] - ids.shape[1] :].cpu().bool()
    return [row[kept] for row, kept in zip(ids, own, strict=True)]


def masked_before(input_ids: Tensor, mask: Tensor | None) -> list[int] | None:
    """Count the tokens that the mask names before ``input_ids``, per row; None: it names none."""
    if mask is None or mask.shape[1] == input_ids.shape[1]:
        return None
    return mask[:, : mask.shape[1] - input_ids.shape[1]].bool().sum(1).tolist()


def tokens_to_read(
    rows: Sequence[BatchRow],
    input_ids: Sequence[Tensor],
    before: Sequence[int] | None,
    only_new: bool,
) -> list[tuple[int, Tensor]]:
    """Return, per conversation, how many cached tokens stay and which ids are to be read then.

    What is generated is what a reader of all ids would say: where they differ from the cached ones
    (an edited question, a template that dropped earlier thoughts) the conversation goes back to
    what both share, if nothing is lost by that.

    Args:
        rows: the conversations so far.
        input_ids: per row the ids of the whole conversation, or those after the latest reply.
        before: per row how many tokens stand before ``input_ids``, where the mask says so: the ids
            are the new ones then, as transformers takes them.
        only_new: they are the new ones in any case.

    Raises:
        InputError: the conversation cannot go back to where the ids differ.
    """
    if len(rows) != len(input_ids):
        raise InputError(
            f"the cache holds {len(rows)} conversations and the batch has {len(input_ids)} rows; "
            "pass as many rows as the generate call that filled it returned"
        )
    if before is not None:
        joined = [_after(*parts) for parts in zip(rows, input_ids, before, strict=True)]
        return [(len(row.ids), ids) for row, ids in zip(rows, joined, strict=True)]
    if only_new:
        return [(len(row.ids), _joined(row, ids)) for row, ids in zip(rows, input_ids, strict=True)]
    kept = [_shared(row, ids) for row, ids in zip(rows, input_ids, strict=True)]
    return [(count, ids[count:]) for count, ids in zip(kept, input_ids, strict=True)]


def _shared(row: BatchRow, ids: Tensor) -> int:
    """Count the cached tokens that stay when a row's whole conversation is ``ids [T]``.

    Raises:
        InputError: it would have to go back, and cannot.
    """
    count = _common(row.ids, ids)
    if count == len(row.ids) < ids.numel():
        return count
    policy = row.session.engine.policy
    # A policy that scores with the newest queries needs as many tokens to be read again.
    window = policy.scoring.needs.queries if policy.evicts else 0
    kept = max(min(count, ids.numel() - max(window, 1)), 0)
    if not row.can_go_back(kept):
        raise InputError(
            f"input_ids repeat the conversation up to token {count} of the {len(row.ids)} in the "
            "cache, which cannot go back there; pass what generate returned and the new tokens, a "
            "new RetainedCache(), or new tokens alone to RetainedCache(only_new=True)"
        )
    if count < row.prompt:
        warnings.warn(
            f"input_ids differ from the cached conversation at token {count}, in its first prompt: "
            "it goes back there; new tokens alone are for RetainedCache(only_new=True)",
            stacklevel=2,
        )
    return kept


def _after(row: BatchRow, ids: Tensor, before: int) -> Tensor:
    """Return the new tokens of a row whose mask names ``before`` tokens ahead of ``ids``."""
    if before == len(row.ids):
        return ids
    joined = _joined(row, ids)
    if before == len(row.ids) + joined.numel() - ids.numel():
        return joined
    raise InputError(
        f"attention_mask names {before} tokens before input_ids, and the cache holds "
        f"{len(row.ids)}; leave the mask out, or make it cover exactly these"
    )


def _joined(row: BatchRow, ids: Tensor) -> Tensor:
    """Put the latest reply's last token before the new ones: the session has not seen it."""
    return ids if row.pending is None else torch.cat([torch.tensor([row.pending]), ids])


def _common(held: Sequence[int], ids: Tensor) -> int:
    """Count the tokens that both begin with."""
    most = min(len(held), ids.numel())
    differs = (torch.tensor(held[:most], dtype=torch.long) != ids[:most]).nonzero()
    return int(differs[0]) if differs.numel() else most


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
