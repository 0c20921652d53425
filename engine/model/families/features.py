"""Vision features, and which turn and placeholder token each row of them belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import InputError

TEXT, IMAGE, VIDEO = 0, 1, 2


@dataclass(frozen=True)
class Features:
    """Output of the vision side for one modality: rows ``[V, hidden]``, deepstack likewise."""

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()


def rows_of(features: Any) -> Tensor:
    """Return features as ``[V, hidden]`` from one tensor or a list per picture."""
    if isinstance(features, (list, tuple)):
        return torch.cat([rows_of(part) for part in features])
    return features.reshape(-1, features.shape[-1])


def in_token_order(
    features: dict[int, Features], modality: Tensor
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Merge the features of all modalities into the order of their tokens."""
    if not features:
        return None, ()
    if len(features) == 1:
        (only,) = features.values()
        return only.rows, only.deepstack
    kinds = modality[modality != TEXT]

    def merge(parts: dict[int, Tensor]) -> Tensor:
        first = next(iter(parts.values()))
        merged = first.new_empty(kinds.numel(), first.shape[-1])
        for kind, part in parts.items():
            merged[(kinds == kind).to(first.device)] = part
        return merged

    levels = min(len(part.deepstack) for part in features.values())
    return (
        merge({kind: part.rows for kind, part in features.items()}),
        tuple(
            merge({kind: part.deepstack[i] for kind, part in features.items()})
            for i in range(levels)
        ),
    )


def covers_seen(
    features: dict[int, Features], new: Sequence[Tensor], held: Sequence[Tensor]
) -> bool:
    """Return whether features came for the placeholders seen before, too."""
    covers = {
        len(made.rows) != sum(int((part == kind).sum()) for part in new)
        for kind, made in features.items()
        if any(bool((part == kind).any()) for part in held)
    }
    if len(covers) == 2:
        raise InputError(
            "the pictures or the videos of the whole conversation came with only the new ones of "
            "the other; pass the pixels of the new turn alone"
        )
    return True in covers


def shared_out(features: dict[int, Features], spans: Sequence[Tensor]) -> list[dict[int, Features]]:
    """Give each span of tokens, by its modality ``[T]``, its part of the features of all."""
    shares: list[dict[int, Features]] = [{} for _ in spans]
    for kind, made in features.items():
        counts = [int((span == kind).sum()) for span in spans]
        levels = [level.split(counts) for level in made.deepstack]
        for i, rows in enumerate(made.rows.split(counts)):
            if counts[i]:
                shares[i][kind] = Features(rows, tuple(level[i] for level in levels))
    return shares
