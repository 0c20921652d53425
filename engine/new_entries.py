"""The state of entries that a pass has just appended, by the policy's scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import NewTokens, Policy, Scorer, returned, shaped, tapped_layers
from mmkv.engine.query_window import QUERIES

if TYPE_CHECKING:
    from mmkv.engine.cache import RaggedCache
    from mmkv.engine.model.spec import DecoderSpec
    from mmkv.engine.sequence import CachedSequence


def sequence_memory(
    policy: Policy, spec: DecoderSpec, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of what the cache keeps of each sequence for ``policy``."""
    kept: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if not policy.evicts:
        return kept
    if policy.scoring.needs.queries:
        shape = (spec.num_layers, spec.num_heads, policy.scoring.needs.queries, spec.head_dim)
        kept[QUERIES] = (shape, dtype)
    asked = getattr(policy.scoring, "memory", None)
    if asked is not None:
        made = asked(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.hidden_size)
        call = f"{type(policy.scoring).__name__}.memory"
        wanted = "a dict of shapes by name"
        for name, shape in returned(made, dict, call, wanted).items():
            if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
                raise PolicyError(f"{call} returned {shape!r} as a shape; return {wanted}")
            kept[str(name)] = (shape, torch.float32)
    return kept


def tap_layers(policy: Policy, layers: int) -> tuple[int, ...]:
    """Indices of the layers after which the policy's scorer reads the residual stream."""
    if not policy.evicts:
        return ()
    taps = policy.scoring.needs.taps
    return tuple(layer for tap in taps for layer in tapped_layers(tap, layers))


def has_born(scorer: Scorer) -> bool:
    """Whether the scorer gives new entries their state."""
    return callable(getattr(scorer, "born", None))


def has_revise(scorer: Scorer) -> bool:
    """Whether the scorer changes the state of entries after each step."""
    return callable(getattr(scorer, "revise", None))


def revise_state(session: CachedSequence) -> None:
    """Let the scorer change the state of a sequence's entries after a step."""
    cache, scorer = session.engine.cache, session.engine.policy.scoring
    entries, seq = cache.entries(session.seq), session.seq
    memory = {name: kept[seq] for name, kept in cache.memory.items() if name != QUERIES}
    state = scorer.revise(session.view(entries), memory)  # type: ignore[attr-defined]
    call = f"{type(scorer).__name__}.revise"
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
) -> None:
    """Ask the scorer for the state of new entries and store it; its memory changes last.

    State 0 is left alone where it adds up attention: the pass itself writes it, before or after.

    Args:
        seqs: ``[B]`` sequence slots; slots: ``[B, L, H, T]`` flat slots of the new entries.
        position: ``[B, T]`` token indices; taps: ``[B, T, d]`` each.
    """
    batch, layers, heads, count = slots.shape
    pool = cache.pool

    new = NewTokens(
        position=position,
        prompt=prompt,
        taps=torch.stack([tap.float() for tap in taps]) if taps else torch.empty(0),
        memory={name: kept[seqs] for name, kept in cache.memory.items() if name != QUERIES},
        keys=lambda: pool.keys_at(slots).float(),
        values=lambda: pool.values_at(slots).float(),
    )
    call = f"{type(scorer).__name__}.born"
    first = int(bool(scorer.needs.mass))
    wanted = f"the state of new entries, a tensor [B, T, L or 1, H or 1, {pool.state_size - first}]"
    state = returned(scorer.born(new), Tensor, call, wanted)  # type: ignore[attr-defined]
    try:
        spread = state.expand(batch, count, layers, heads, pool.state_size - first)
    except RuntimeError as error:
        raise PolicyError(f"{call} returned shape {list(state.shape)}; return {wanted}") from error
    memory = _memory(new.memory, {name: cache.memory[name][seqs] for name in new.memory}, call)
    pool.state.flatten(0, 1)[slots, first:] = spread.permute(0, 2, 3, 1, 4).float()
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
