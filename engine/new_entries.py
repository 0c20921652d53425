"""The state of entries that a pass has just appended, by the policy's scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.policies.base import NewTokens, Policy, Scorer, tapped_layers
from engine.query_window import QUERIES

if TYPE_CHECKING:
    from engine.cache import RaggedCache
    from engine.model.spec import DecoderSpec
    from engine.sequence import CachedSequence


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
        shapes = asked(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.hidden_size)
        kept |= {name: (shape, torch.float32) for name, shape in shapes.items()}
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
    state: Tensor = scorer.born(new)  # type: ignore[attr-defined]
    spread = state.expand(batch, count, layers, heads, -1).permute(0, 2, 3, 1, 4)
    pool.state.flatten(0, 1)[slots, int(bool(scorer.needs.mass)) :] = spread.float()
    for name, kept in new.memory.items():
        cache.memory[name][seqs] = kept
