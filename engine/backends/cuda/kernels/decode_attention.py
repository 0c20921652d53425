"""Attention of one decode step's queries to the ragged paged rows of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.backends.cuda.kernels.buffers import NewestTokens, Partials, WorkList
from mmkv.engine.cache import EncodedKV

# Tokens of a sequence in a step of several: always so many, some of them idle, which costs less
# than to compile and capture other numbers. Fewer where a program has no room for their queries of
# a row (by bytes of a number): registers would not do, or the shared memory of some cards.
_TOKENS = 8
_MOST_QUERIES = {2: 64, 4: 32}


def tokens_at_once(group: int, dtype: torch.dtype) -> int:
    """Return how many tokens of a sequence attend at once, of ``group`` heads a KV head."""
    return min(max(_MOST_QUERIES[dtype.itemsize] >> (group - 1).bit_length(), 1), _TOKENS)


def empty_partials(work: WorkList, group: int, head_dim: int) -> Partials:
    """Return the scratch for ``group`` queries per KV head: query heads times tokens a sequence.

    Allocate once, outside a CUDA graph.
    """
    pieces, device = 2 * work.runs.shape[1], work.runs.device
    return Partials(
        torch.zeros(pieces, group, head_dim, device=device),
        torch.zeros(pieces, group, device=device),
        torch.zeros(pieces, group, device=device),
        torch.zeros(work.rows.shape[1], dtype=torch.int32, device=device),
    )


def decode_attention_reference(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    table: Tensor,
    work: WorkList,
    layer: int,
    partials: Partials,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    window: NewestTokens | None = None,
    behind: Tensor | None = None,
) -> None:
    """Attend from T queries per sequence and head to the entries of its rows in ``layer``.

    Reads the pool through the table; the T G = T Hq / H queries of a row share one read.
    No host sync and no allocation, so it may stand in a CUDA graph.

    Args:
        query: ``[B, Hq, D]`` float16, bfloat16 or float32, contiguous along D; of T tokens of each
            sequence in ``work``, sequence after sequence.
        keys, values: ``[pages, P, D]``, the pool as attention reads it; P a power of two. Plain
            ones may have the same gap behind every entry of both.
        table: ``[S, L, H, W]`` int64 page ids.
        work: what ``build_worklist`` made of this step's lengths.
        layer: its index in ``work`` and ``table``.
        partials: scratch; layers run one after the other, so one is enough.
        scale: factor on the logits, above 0.
        out: ``[B, Hq, D]`` contiguous, written in its dtype. Rows without entries and idle batch
            slots get zeros.
        lse: ``[B, Hq]`` float32 contiguous or None, written: natural log-sum-exp of the logits,
            -inf without entries.
        window: which entries are near enough to be seen; None: all.
        behind: ``[B]`` int64, a row's newest entries that a query does not see: of the tokens that
            follow its own in this step. None: it sees all, and T is 1.
    """
    sequences = work.rows.shape[1] // work.heads
    tokens = query.shape[0] // sequences

    def by_row(x: Tensor) -> Tensor:  # [B, Hq, ...] as [sequence, head, token, query head, ...]
        return x.unflatten(1, (work.heads, -1)).unflatten(0, (sequences, tokens)).transpose(1, 2)

    grouped, result = by_row(query).flatten(2, 3).flatten(0, 1), by_row(out)
    for row, (entries, source, _, _) in enumerate(work.rows[layer].tolist()):
        here, head = divmod(row, work.heads)
        of = slice(here * tokens, (here + 1) * tokens)
        held = -(-entries // keys.shape[1])
        pages = table.view(-1, table.shape[-1])[source, :held]
        key = keys[pages].flatten(0, 1)[:entries].float()
        value = values[pages].flatten(0, 1)[:entries].float()
        scores = grouped[row].float() @ key.T * scale
        scores = scores.unflatten(0, (tokens, -1))  # [token, query head, entry]
        if window is not None:
            back = window.now[of, None] - window.position[pages].flatten()[:entries]
            scores = scores.masked_fill((back >= window.tokens)[:, None], -torch.inf)
        if behind is not None:
            at = torch.arange(entries, device=query.device)
            hidden = at >= entries - behind[of, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        result[here, head] = (scores.softmax(-1) @ value).to(out.dtype)  # of no entries: 0
        if lse is not None:
            by_row(lse)[here, head] = scores.logsumexp(-1)  # of no entries: -inf


decode_attention = in_triton(decode_attention_reference, "query")
