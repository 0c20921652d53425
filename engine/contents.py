"""Report what one sequence holds in the cache: entries, bytes, modalities, token indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mmkv.engine.cache import Entries, RaggedCache
from mmkv.engine.compaction import RowShifts

MODALITIES = ("text", "image", "video")


@dataclass(frozen=True)
class Memory:
    """The tokens that a session has seen, and the memory that it holds.

    Attributes:
        tokens_seen: tokens of the sequence so far, evicted ones included.
        entries: live (layer, head, token) entries; evicted: entries dropped so far, those of
            pruned tokens and of forgotten thoughts included.
        evicted_nan: how many of those had a score that is not a number.
        pages: pages held; kv_bytes: bytes of their keys and values.
        state_bytes: states of layers without entries, the same at any length.
        metadata_bytes: log_beta, position, modality and state of those pages, block tables, what
            a scorer keeps of the sequence, such as recent queries, and how far rows have moved.
        by_modality: live entries per modality.
        differs: how the cache differs from the conversation rendered afresh, in a line; None: it
            does not, or they were not compared.
        pictures: of each picture (each frame of a video) the share of its entries that is held.
        compactions: how often rope positions were drawn together to stay inside the trained context
            (:mod:`mmkv.engine.compaction`); capped: the dropped entries that went since their row
            was too long for that.
        worn: whether the key of a held entry has moved so often that it may be far off, as it is
            rounded each time (:attr:`mmkv.engine.cache.forms.KVForm.most_moves`).
        risk: the share of later attention, as the gates predict it, that belongs to dropped
            entries, in 0..1; not the chance of a wrong answer (:mod:`mmkv.engine.risk`). None: the
            policy has no retention gates, or the session does not know: it comes from a file of an
            older mmkv, or was cut back far.
        over_risk: whether the risk is above its bound, and the budget cannot grow.
        risk_unknown: whether a budget that follows the risk stands still, as there is none.
        escalated: what has become of the latest answer where a calibration finds it doubtful:
            ``said``, ``reread`` or ``not_reread`` (:class:`mmkv.calibration.Weighing`).
        vision_bytes: features of pictures that are kept for when the same come again: of this
            session and of all others with its salt, which share them. It says nothing of the
            session alone, so two that are equal may differ in it.
        drafted: tokens of the latest reply that lossless decoding has drafted; accepted: how many
            of them the reply then had (:mod:`mmkv.engine.drafts`). 0 without it.
    """

    tokens_seen: int
    entries: int
    evicted: int
    pages: int
    kv_bytes: int
    metadata_bytes: int
    by_modality: dict[str, int] = field(default_factory=dict)
    evicted_nan: int = 0
    differs: str | None = None
    pictures: tuple[float, ...] = ()
    state_bytes: int = 0
    compactions: int = 0
    capped: int = 0
    vision_bytes: int = field(default=0, compare=False)
    risk: float | None = field(default=None, compare=False)  # its last bits vary
    over_risk: bool = False
    risk_unknown: bool = False
    worn: bool = False
    escalated: str | None = None
    drafted: int = field(default=0, compare=False)  # how many are worth it is measured
    accepted: int = field(default=0, compare=False)

    @property
    def physical_bytes(self) -> int:
        """Return the bytes of keys, values, metadata and states."""
        return self.kv_bytes + self.metadata_bytes + self.state_bytes

    @property
    def faded(self) -> tuple[int, ...]:
        """Return which pictures, the first being 0, have lost most of their entries."""
        shares = np.fromiter(self.pictures, float, len(self.pictures))  # there may be thousands
        return tuple(np.flatnonzero(shares < 0.5).tolist())


# [start, stop) of a picture's tokens.
Span = tuple[int, int]
# Pictures of a session that are told apart: without a bound they would grow with an endless one.
MOST_PICTURES = 4096


def with_pictures(
    spans: tuple[Span, ...], modality: Tensor, start: int, before: int | None = None
) -> tuple[Span, ...]:
    """Return the pictures of a sequence to which tokens of ``modality [T]`` are appended.

    A picture is a run of visual tokens of one kind. The newest :data:`MOST_PICTURES` are known.

    Args:
        spans: those before; start: tokens before.
        before: modality of the token before; None: not known, a picture goes on where one ended.
    """
    kinds, counts = (part.tolist() for part in modality.unique_consecutive(return_counts=True))
    found, at = list(spans), start
    for i, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        goes_on = not i and before in (None, kind) and found and found[-1][1] == start
        if kind and goes_on:
            found[-1] = found[-1][0], at + count  # a chunk ended inside it
        elif kind:
            found.append((at, at + count))
        at += count
    return tuple(found[-MOST_PICTURES:])


def held_shares(cache: RaggedCache, seq: int, spans: Sequence[Span]) -> tuple[float, ...]:
    """Return the share of the entries of each span of tokens that sequence ``seq`` holds.

    Args:
        spans: in order, none of them empty, none inside another.
    """
    entries = cache.entries(seq)
    return _held(spans, cache.pool.position.view(-1)[entries.slot], cache.rows)


def _held(spans: Sequence[Span], position: Tensor, rows: int) -> tuple[float, ...]:
    """Return the share of each span's entries that are among ``position [N]``."""
    if not spans:
        return ()
    # Of thousands of spans in less time than by torch.tensor.
    edges = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).reshape(-1, 2)
    start, stop = torch.from_numpy(edges).to(position.device).t().contiguous()
    at = torch.searchsorted(start, position.long(), right=True) - 1
    inside = (at >= 0) & (position < stop[at.clamp(min=0)])
    counts = at[inside].bincount(minlength=len(spans))
    return tuple((counts.double() / ((stop - start) * rows)).tolist())


def memory_of(
    cache: RaggedCache,
    seq: int,
    seen: int,
    evicted: int,
    evicted_nan: int,
    pictures: Sequence[Span] = (),
    vision_bytes: int = 0,
    compactions: int = 0,
    capped: int = 0,
    risk: float | None = None,
    shifts: RowShifts | None = None,
    over_risk: bool = False,
    risk_unknown: bool = False,
) -> Memory:
    """Measure sequence ``seq``; the counts and spans are those that the cache does not know."""
    pages = cache.needed_pages(cache.length[seq])
    entries = cache.entries(seq)
    most = cache.pool.form.most_moves
    modality = cache.pool.modality.view(-1)[entries.slot].long()
    counts = torch.bincount(modality, minlength=len(MODALITIES)).tolist()
    tables = cache.rows * (cache.table.shape[-1] + 1) * cache.table.element_size()
    tables += 0 if shifts is None else shifts.nbytes
    return Memory(
        tokens_seen=seen,
        entries=entries.slot.numel(),
        evicted=evicted,
        pages=pages,
        kv_bytes=pages * cache.pool.kv_page_bytes,
        metadata_bytes=pages * cache.pool.metadata_page_bytes + tables + cache.memory_bytes(),
        by_modality=dict(zip(MODALITIES, counts, strict=True)),
        evicted_nan=evicted_nan,
        state_bytes=cache.state_bytes,
        pictures=_held(pictures, cache.pool.position.view(-1)[entries.slot], cache.rows),
        vision_bytes=vision_bytes,
        compactions=compactions,
        capped=capped,
        risk=risk,
        over_risk=over_risk,
        risk_unknown=risk_unknown,
        worn=most is not None and shifts is not None and _moves(cache, entries, shifts) > most,
    )


def _moves(cache: RaggedCache, entries: Entries, shifts: RowShifts) -> int:
    """Return how often the entry has moved that has moved most."""
    token = cache.pool.position.view(-1)[entries.slot].long()
    row, token = torch.stack([entries.row, token]).cpu().numpy()
    return int(shifts.moves[shifts.find(row, token)].max(initial=0))


def retained_tokens(cache: RaggedCache, seq: int) -> list[list[Tensor]]:
    """Return the indices of the tokens kept, ``[layer][kv_head]``, ascending int64 on the CPU."""
    entries = cache.entries(seq)
    position = cache.pool.position.view(-1)[entries.slot].long().cpu()
    rows = position.split(cache.length[seq].flatten().tolist())
    ordered = [row.sort().values for row in rows]
    return [ordered[i : i + cache.kv_heads] for i in range(0, len(ordered), cache.kv_heads)]
