"""What scorers read and keep: the newest queries, the attention they pay, the state of entries.

The last w queries of each sequence lie in the cache's memory as ``queries [S, L, Hq, w, D]``, after
RoPE and in the model's dtype: the query of token p in slot ``p % w``, so that a step writes one
slot and moves nothing. Where the form of the cache is rotated, they lie there rotated, too. Their
rope positions ``[S, A, w]`` lie beside them for a scorer that asks, in the same slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.cache import EncodedKV, Entries, RaggedCache
from mmkv.engine.errors import PolicyError
from mmkv.engine.model.rope import rotate
from mmkv.engine.policies.base import (
    CacheView,
    Group,
    Needs,
    NewTokens,
    Policy,
    Scorer,
    WindowReduction,
    returned,
    shaped,
    tapped_layers,
)

if TYPE_CHECKING:
    from mmkv.engine.cache.forms import KVForm
    from mmkv.engine.model.rope import Rope
    from mmkv.engine.model.spec import DecoderSpec

# What :func:`window_attention` computes; a backend may have a faster function.
WindowAttention = Callable[[RaggedCache, int, Entries, CacheView, WindowReduction], Tensor]

QUERIES = "queries"
POSITIONS = "query_positions"
# What the engine itself keeps of each sequence for a scorer: only the last w tokens have a part.
RINGS = frozenset((QUERIES, POSITIONS))
# A rope position of a query that was cut off; compaction may take any number of it away.
GONE = -1
# Elements of one block of scores: temporaries stay near 16 MiB however long rows and chunks are.
_MASS_BLOCK_ELEMENTS = 4 * 2**20


def window_positions(seen: int | Tensor, size: int, device: torch.device) -> Tensor:
    """Token index of the query in each of ``size`` slots, int64 ``[w]``; -1 where there is none.

    Args:
        seen: tokens of the sequence whose queries have been stored.
    """
    last = seen - 1
    position = last - (last - torch.arange(size, device=device)) % size
    return position.clamp(min=-1)


def store_queries(queries: Tensor, seqs: Tensor, position: Tensor, new: Tensor) -> None:
    """Put new queries into their slots.

    Args:
        queries: the ring, ``[S, L, Hq, w, D]``; changed in place.
        seqs: ``[B]`` int64; position: ``[B, T]`` token indices, T <= w.
        new: ``[B, L, Hq, T, D]``.
    """
    slot = position % queries.shape[3]
    queries[seqs[:, None], :, :, slot] = new.permute(0, 3, 1, 2, 4)


def store_positions(
    cache: RaggedCache, seqs: Tensor, position: Tensor, rope_position: Tensor
) -> None:
    """Put the rope positions of new queries into their slots, if the scorer asks for them.

    Args:
        seqs: ``[B]`` int64; position: ``[B, T]`` token indices.
        rope_position: ``[A, B, T]``, or ``[1, B, T]`` of text; of more than w tokens the last w
            count.
    """
    ring = cache.memory.get(POSITIONS)
    if ring is None:
        return
    size = ring.shape[2]
    slot = position[:, -size:] % size
    new = rope_position[..., -size:].expand(ring.shape[1], -1, -1)
    ring[seqs[:, None], :, slot] = new.permute(1, 2, 0)


def forget_positions(cache: RaggedCache, seq: int, before: int, seen: int) -> None:
    """Mark queries of tokens from ``seen`` on as gone, of a sequence that had ``before`` tokens.

    They lie where older ones lay, whose token indices their slots will have.
    """
    ring = cache.memory.get(POSITIONS)
    if ring is not None:
        gone = window_positions(before, ring.shape[2], ring.device) >= seen
        ring[seq].masked_fill_(gone, GONE)


def window_attention(
    cache: RaggedCache,
    seq: int,
    entries: Entries,
    view: CacheView,
    reduction: WindowReduction,
) -> Tensor:
    """Compute attention probabilities of the window over the retained entries.

    For each layer and KV head: softmax over the row's entries (causal: an entry after the
    query counts nothing), joined over the group's heads and then over the window's queries.

    Args:
        reduction: how both are joined.

    Returns:
        float32 ``[N]``, row-major as the view.
    """
    queries, keys = cache.memory[QUERIES][seq], cache.pool.stored_keys.flatten(0, 1)
    return attention_paid(queries, keys, entries.slot, view, reduction)


def attention_paid(
    queries: Tensor,
    keys: Tensor | EncodedKV,
    slot: Tensor,
    view: CacheView,
    reduction: WindowReduction,
) -> Tensor:
    """Compute :func:`window_attention` of one sequence's ring of queries ``[L, Hq, w, D]``.

    Where the heads are those of several sequences, ``view.seen`` is a column, a number a KV head.

    Args:
        keys: ``[slots, D]``, the pool's; slot: ``[N]`` those of the entries.
    """
    at = window_positions(view.seen, queries.shape[2], queries.device)
    known = (at >= 0).sum(-1, keepdim=True).clamp(min=1)  # the others attend to nothing
    group = reduction.group
    join_first = group if reduction.of == "logits" else None
    shares = []
    for probability in _probabilities(queries, at, keys, slot, view, join_first):
        if reduction.queries == "variance":
            shares.append(join(_variance(probability, at >= 0), group, 1))
            continue
        if reduction.queries == "entropy":
            shares.append(join(torch.special.entr(probability).sum(2), group, 1))
            continue
        paid = join(probability, group, 1)
        shares.append(paid.amax(1) if reduction.queries == "max" else paid.sum(1) / known)
    return view.from_rows(torch.cat(shares))


def _variance(share: Tensor, known: Tensor) -> Tensor:
    """Variance over those queries of ``share [H, G, w, N]`` that are ``known``; 0 of one.

    Args:
        known: ``[w]`` or ``[H, w]``.
    """
    count, known = known.sum(-1)[..., None, None], known[..., None, :, None]
    apart = (share - share.sum(2, keepdim=True) / count[..., None].clamp(min=1)) * known
    return apart.square().sum(2) / (count - 1).clamp(min=1)


def newest_entropy(
    queries: Tensor, keys: Tensor | EncodedKV, slot: Tensor, view: CacheView
) -> Tensor:
    """Compute :meth:`mmkv.engine.policies.base.CacheView.entropy`; :func:`attention_paid`."""
    size = queries.shape[2]
    newest = torch.as_tensor(view.seen - 1, device=queries.device).view(1)
    queries = queries.index_select(2, newest % size)
    most = view.length.float().log().view(view.layers, -1)
    found = []
    for layer, probability in enumerate(_probabilities(queries, newest, keys, slot, view)):
        entropy = torch.special.entr(probability).sum(-1)[..., 0]
        share = entropy / most[layer][:, None]
        found.append(share.masked_fill(most[layer][:, None] <= 0, 0.0))
    return torch.stack(found).mean()


def future_queries(
    queries: Tensor,
    positions: Tensor,
    form: KVForm,
    seen: int | Tensor,
    ahead: int,
    rope: Rope,
    long: bool = False,
    doubling: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute :meth:`mmkv.engine.policies.base.CacheView.future_queries`.

    Args:
        queries: a sequence's ring ``[L, Hq, w, D]``; positions: ``[A, w]``, where they lie.
        form: of the cache, which may have rotated them; long: by which factors RoPE turned them.
    """
    at = window_positions(seen, queries.shape[2], queries.device)
    at = at.masked_fill(positions[0] <= GONE, -1)
    turns = rope.ahead(positions, at >= 0, ahead, len(queries), long, doubling)
    turned = [
        rotate(form.rotate(layer.float()).transpose(0, 1), *turn).transpose(0, 1)
        for layer, turn in zip(queries, turns, strict=True)
    ]
    return torch.stack(turned), at


def _probabilities(
    queries: Tensor,
    query_at: Tensor,
    keys: Tensor | EncodedKV,
    slot: Tensor,
    view: CacheView,
    join_first: Group | None = None,
) -> Iterator[Tensor]:
    """Yield each layer's shares of attention ``[H, G, w, longest row]``, 0 where nothing is seen.

    Args:
        queries: ``[L, Hq, w, D]``; query_at: ``[w]`` or ``[H, w]`` their token indices, -1 where
            there is none.
        join_first: how the logits of the group's heads are joined, G = 1 then; None: not at all.
    """
    heads, dim = view.kv_heads, queries.shape[-1]
    slot = view.to_rows(slot, 0)
    position = view.to_rows(view.position, torch.iinfo(torch.int64).max)
    for layer in range(view.layers):
        rows = slice(layer * heads, (layer + 1) * heads)
        grouped = queries[layer].float().reshape(heads, -1, dim) * dim**-0.5
        scores = grouped @ keys[slot[rows]].float().transpose(1, 2)
        scores = scores.unflatten(1, (-1, query_at.shape[-1]))
        allowed = position[rows][:, None] <= query_at[..., None]
        if join_first is not None:
            scores = join(scores, join_first, 1)[:, None]
        probability = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        # A query whose own entry and all before it are gone attends to nothing.
        yield probability.nan_to_num(0.0)


def join(shares: Tensor, group: Group, dim: int) -> Tensor:
    """Join the attention of the heads of a KV group, which lie along ``dim``."""
    if group == "max":
        return shares.amax(dim)
    return shares.mean(dim) if group == "mean" else shares.sum(dim)


@dataclass(frozen=True)
class Rows:
    """The entries of R rows, padded to the longest.

    Attributes:
        slot: ``[R, N]`` int64 flat slots of the pool; live: ``[R, N]`` bool.
    """

    slot: Tensor
    live: Tensor

    @classmethod
    def of(cls, length: Tensor, table: Tensor, page_size: int, longest: int | None = None) -> Rows:
        """Gather the slots of ``length [R]`` and ``table [R, W]``; ``longest``: of the rows."""
        longest = int(length.max()) if longest is None else longest
        column = torch.arange(longest, device=length.device)
        slot = table[:, column // page_size] * page_size + column % page_size
        live = column < length[:, None]
        return cls(slot.masked_fill(~live, 0), live)


def attention_mass(
    query: Tensor,
    query_position: Tensor,
    keys: Tensor | EncodedKV,
    position: Tensor,
    rows: Rows,
    scale: float,
    group: Group,
    window: int = 0,
    until: Tensor | None = None,
) -> Tensor:
    """Add up the attention of every query to each entry of its row.

    Args:
        query: ``[R, G, Q, D]``, the G query heads of each row's KV head.
        query_position: ``[R, Q]`` token indices: a query sees entries at or before its own.
        keys: ``[slots, D]``, position: ``[slots]``, the pool's, the pass's own entries included.
        group: how the G heads are joined, query by query.
        window: tokens that a query sees back, 0 for all (sliding-window layers).
        until: ``[R, Q]`` token indices of the last entries that queries see; None: their own.

    Returns:
        float32 ``[R, N]``, 0 where there is no entry.
    """
    key = keys[rows.slot].float().transpose(1, 2)[:, None]
    at = position[rows.slot].long()[:, None]
    block = max(1, _MASS_BLOCK_ELEMENTS // max(rows.slot.numel() * query.shape[1], 1))
    total = torch.zeros(rows.slot.shape, device=query.device)
    until = query_position if until is None else until
    parts = (query.split(block, 2), query_position.split(block, 1), until.split(block, 1))
    for part, where, last in zip(*parts, strict=True):
        back = where[..., None] - at
        seen = rows.live[:, None] & (at <= last[..., None]) & (back < (window or math.inf))
        scores = (part.float() * scale) @ key
        shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        total += join(shares, group, 1).sum(1)
    return total


class CacheEntries:
    """Reads the entries of one sequence where they lie.

    A :class:`mmkv.engine.policies.base.EntrySource`.

    Only what the scorer says it needs: a policy that reads more would run on one backend and not on
    another.
    """

    def __init__(
        self,
        cache: RaggedCache,
        seq: int,
        entries: Entries,
        needs: Needs,
        attention: WindowAttention = window_attention,
        rope: Rope | None = None,
        long: bool = False,
    ) -> None:
        self._cache, self._seq, self._entries, self._needs = cache, seq, entries, needs
        self._attention, self._rope, self._long = attention, rope, long

    def keys(self) -> Tensor:
        """``[N, D]`` after RoPE."""
        if not self._needs.keys:
            raise PolicyError(_undeclared("keys", "keys=True"))
        return self._cache.pool.keys_at(self._entries.slot)

    def values(self) -> Tensor:
        """``[N, D]``."""
        if not self._needs.values:
            raise PolicyError(_undeclared("values", "values=True"))
        return self._cache.pool.values_at(self._entries.slot)

    def state(self) -> Tensor:
        """``[N, K]``."""
        return self._cache.pool.state.flatten(0, 1)[self._entries.slot]

    def attention(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        """``[N]``; see :meth:`mmkv.engine.policies.base.CacheView.attention`."""
        self._check_queries("attention")
        return self._attention(self._cache, self._seq, self._entries, view, reduction)

    def entropy(self, view: CacheView) -> Tensor:
        """Without dimensions; see :meth:`mmkv.engine.policies.base.CacheView.entropy`."""
        self._check_queries("entropy")
        cache = self._cache
        queries, keys = cache.memory[QUERIES][self._seq], cache.pool.stored_keys.flatten(0, 1)
        return newest_entropy(queries, keys, self._entries.slot, view)

    def future_queries(self, view: CacheView, ahead: int, doubling: bool) -> tuple[Tensor, Tensor]:
        """See :meth:`mmkv.engine.policies.base.CacheView.future_queries`."""
        memory, seq, rope = self._cache.memory, self._seq, self._turns("future queries")
        rings, form = (memory[QUERIES][seq], memory[POSITIONS][seq]), self._cache.pool.form
        return future_queries(*rings, form, view.seen, ahead, rope, self._long, doubling)

    def bands(self, vectors: Tensor) -> Tensor:
        """See :meth:`mmkv.engine.policies.base.CacheView.bands`."""
        return self._turns("bands").bands(vectors)

    def _turns(self, what: str) -> Rope:
        if POSITIONS not in self._cache.memory or self._rope is None:
            raise PolicyError(_undeclared(what, "queries=128, positions=True"))
        return self._rope

    def _check_queries(self, what: str) -> None:
        if QUERIES not in self._cache.memory:
            raise PolicyError(_undeclared(what, "queries=16") + " or another number")


def _undeclared(what: str, needs: str) -> str:
    return f"the scorer reads {what} and does not say so; give it needs = Needs({needs})"


def view_of(
    cache: RaggedCache,
    seq: int,
    entries: Entries,
    seen: int,
    prompt_tokens: int,
    needs: Needs,
    attention: WindowAttention = window_attention,
    rope: Rope | None = None,
    long: bool = False,
) -> CacheView:
    """Show policies the ``entries`` of one sequence.

    Args:
        seen: tokens of the sequence so far; prompt_tokens: those that came in prompts.
        needs: what the scorer says it reads; attention: computes what it asks for of the window.
        rope: of the model; long: whether the sequence has its long factors.
    """
    pool = cache.pool
    return CacheView(
        seen=seen,
        layers=cache.layers,
        kv_heads=cache.kv_heads,
        row=entries.row,
        length=cache.length[seq].flatten(),
        position=pool.position.view(-1)[entries.slot].long(),
        log_beta=pool.log_beta.view(-1)[entries.slot],
        modality=pool.modality.view(-1)[entries.slot],
        source=CacheEntries(cache, seq, entries, needs, attention, rope, long),
        prompt_tokens=prompt_tokens,
    )


def score_entries(
    cache: RaggedCache, policy: Policy, entries: Entries, view: CacheView, budget: int
) -> Tensor:
    """Score the entries of one sequence, ``[N]``; the state that the scorer hands back is stored.

    Once for each eviction: a scorer may hand back a state that counts how often it was asked.
    """
    scores = policy.scores(view, budget)
    if scores.state is not None:
        cache.pool.state.flatten(0, 1)[entries.slot] = scores.state
    return scores.value


def sequence_memory(
    policy: Policy, spec: DecoderSpec, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of what the cache keeps of each sequence for ``policy``."""
    kept: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if not policy.evicts:
        return kept
    if policy.scoring.needs.queries:
        shape = (spec.entry_layers, spec.num_heads, policy.scoring.needs.queries, spec.head_dim)
        kept[QUERIES] = (shape, dtype)
    if policy.scoring.needs.positions:
        kept[POSITIONS] = ((spec.rope.axes, policy.scoring.needs.queries), torch.int64)
    asked = getattr(policy.scoring, "memory", None)
    if asked is not None:
        made = asked(spec.entry_layers, spec.num_kv_heads, spec.head_dim, spec.hidden_size)
        call = f"{type(policy.scoring).__name__}.memory"
        wanted = "a dict of shapes by name"
        for name, shape in returned(made, dict, call, wanted).items():
            if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
                raise PolicyError(f"{call} returned {shape!r} as a shape; return {wanted}")
            kept[str(name)] = (shape, torch.float32)
    return kept


def tap_layers(policy: Policy, spec: DecoderSpec) -> tuple[int, ...]:
    """Indices, of all layers, of those after which the policy's scorer reads the residual stream.

    They have entries, and a tap names them by their share of the layers that have.
    """
    if not policy.evicts:
        return ()
    taps = policy.scoring.needs.taps
    of_all = [spec.entry_index.index(layer) for layer in range(spec.entry_layers)]
    return tuple(of_all[at] for tap in taps for at in tapped_layers(tap, len(of_all)))


def has_on_append(scorer: Scorer) -> bool:
    """Whether the scorer gives new entries their state."""
    return callable(getattr(scorer, "on_append", None))


def has_on_step(scorer: Scorer) -> bool:
    """Whether the scorer changes the state of entries after each step."""
    return callable(getattr(scorer, "on_step", None))


def revise_state(
    cache: RaggedCache, scorer: Scorer, seq: int, entries: Entries, view: CacheView
) -> None:
    """Let the scorer change the state of a sequence's ``entries`` after a step."""
    # Copies: what is moved from one name to another must not change with the first.
    memory = {name: kept[seq].clone() for name, kept in cache.memory.items() if name not in RINGS}
    state = scorer.on_step(view, memory)  # type: ignore[attr-defined]
    call = f"{type(scorer).__name__}.on_step"
    if state is not None:
        shape = (entries.row.numel(), cache.pool.state_size)
        state = shaped(state, shape, call, "a new state [N, K], or None")
    memory = _memory(memory, {name: cache.memory[name][seq] for name in memory}, call)
    if state is not None:
        cache.pool.state.flatten(0, 1)[entries.slot] = state.float()
    for name, kept in memory.items():
        cache.memory[name][seq] = kept


def write_state(
    cache: RaggedCache,
    scorer: Scorer,
    seqs: Tensor,
    slots: Tensor,
    position: Tensor,
    prompt: bool,
    taps: Sequence[Tensor],
    outputs: Callable[[int], Tensor],
    write: Tensor | None = None,
) -> None:
    """Ask the scorer for the state of new entries and store it; its memory changes last.

    State 0 is left alone where it adds up attention: the pass itself writes it, before or after.

    Args:
        seqs: ``[B]`` sequence slots; slots: ``[B, L, H, T]`` flat slots of the new entries.
        position: ``[B, T]`` token indices; taps: ``[B, T, d]`` each.
        outputs: :meth:`mmkv.engine.model.decoder.Decoder.output` of the model.
        write: a bool on the device: False leaves everything as it is. None: True.
    """
    batch, layers, heads, count = slots.shape
    pool = cache.pool

    def asked(layer: int) -> Tensor:
        if not scorer.needs.outputs:
            raise PolicyError(_undeclared("output matrices", "state=1, outputs=True"))
        return outputs(layer)

    new = NewTokens(
        position=position,
        prompt=prompt,
        taps=torch.stack([tap.float() for tap in taps]) if taps else torch.empty(0),
        memory={name: kept[seqs] for name, kept in cache.memory.items() if name not in RINGS},
        keys=lambda: pool.keys_at(slots).float(),
        values=lambda: pool.values_at(slots).float(),
        outputs=asked,
    )
    call = f"{type(scorer).__name__}.on_append"
    first = int(bool(scorer.needs.mass))
    wanted = f"the state of new entries, a tensor [B, T, L or 1, H or 1, {pool.state_size - first}]"
    state = returned(scorer.on_append(new), Tensor, call, wanted)  # type: ignore[attr-defined]
    try:
        spread = state.expand(batch, count, layers, heads, pool.state_size - first)
    except RuntimeError as error:
        raise PolicyError(f"{call} returned shape {list(state.shape)}; return {wanted}") from error
    before = {name: cache.memory[name][seqs] for name in new.memory}
    memory, kept_state = _memory(new.memory, before, call), pool.state.flatten(0, 1)
    made = spread.permute(0, 2, 3, 1, 4).float()
    if write is not None:
        made = torch.where(write, made, kept_state[slots, first:])
        memory = {name: torch.where(write, kept, before[name]) for name, kept in memory.items()}
    kept_state[slots, first:] = made
    for name, kept in memory.items():
        cache.memory[name][seqs] = kept


def _memory(made: dict[str, Tensor], before: dict[str, Tensor], call: str) -> dict[str, Tensor]:
    """Return what a scorer has put in its memory. Raises PolicyError: it is of another shape."""
    return {
        name: shaped(
            made.get(name),
            tuple(kept.shape),
            f"{call} in memory[{name!r}]",
            "what memory() asked for",
        )
        for name, kept in before.items()
    }
