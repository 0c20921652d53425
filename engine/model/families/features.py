"""Vision features, and which turn and placeholder token each row of them belongs to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.errors import InputError

TEXT, IMAGE, VIDEO = 0, 1, 2
# Patches that a tower takes in one pass, or one picture: two of 1,024 x 1,024 pixels in Qwen3-VL.
# A layer's states in float32 take some 130 MB in its 2B model then.
MOST_PATCHES = 8192


@dataclass(frozen=True)
class Features:
    """Output of the vision side for one modality: rows ``[V, hidden]``, deepstack likewise.

    Attributes:
        kept: bool ``[V]``, which a policy's merger keeps; None: nothing was merged.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()
    kept: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return all its tensors."""
        return (self.rows, *self.deepstack) + (() if self.kept is None else (self.kept,))

    def each(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Return these with every tensor changed in the same way."""
        kept = None if self.kept is None else change(self.kept)
        return Features(change(self.rows), tuple(map(change, self.deepstack)), kept)

    def split(self, counts: Sequence[int]) -> list[Features]:
        """Return parts of so many rows each."""
        ends = list(accumulate(counts))
        spans = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        return [self.each(operator.itemgetter(span)) for span in spans]


def rows_of(features: Any) -> Tensor:
    """Return features as ``[V, hidden]`` from one tensor or a list per picture."""
    if isinstance(features, (list, tuple)):
        return torch.cat([rows_of(part) for part in features])
    return features.reshape(-1, features.shape[-1])


def passes(patches: Sequence[int]) -> Iterator[slice]:
    """Yield the pictures of each pass: neighbours of ``MOST_PATCHES`` together, or one.

    Args:
        patches: of each picture.
    """
    first = taken = 0
    for number, count in enumerate(patches):
        if number > first and taken + count > MOST_PATCHES:
            yield slice(first, number)
            first, taken = number, 0
        taken += count
    if len(patches) > first:
        yield slice(first, len(patches))


def joined(parts: Sequence[Features]) -> Features:
    """Return the features of several passes as those of one."""
    if len(parts) == 1:
        return parts[0]
    levels = zip(*(part.deepstack for part in parts), strict=True)
    kept = [part.kept for part in parts if part.kept is not None]
    return Features(
        torch.cat([part.rows for part in parts]),
        tuple(map(torch.cat, levels)),
        torch.cat(kept) if kept else None,
    )


def in_token_order(features: dict[int, Features], modality: Tensor) -> Features | None:
    """Merge the features of all modalities into the order of their tokens.

    No family that merges patches has more than one modality.
    """
    if len(features) < 2:
        return next(iter(features.values()), None)
    kinds = modality[modality != TEXT]

    def merge(parts: dict[int, Tensor]) -> Tensor:
        first = next(iter(parts.values()))
        merged = first.new_empty(kinds.numel(), first.shape[-1])
        for kind, part in parts.items():
            merged[(kinds == kind).to(first.device)] = part
        return merged

    levels = min(len(part.deepstack) for part in features.values())
    return Features(
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
        for i, part in enumerate(made.split(counts)):
            if counts[i]:
                shares[i][kind] = part
    return shares
