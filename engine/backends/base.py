"""The contract of a backend: what a decode step and an eviction run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mmkv.engine.backends.cpu import CpuBackend
    from mmkv.engine.backends.cuda import CudaBackend
    from mmkv.engine.backends.torch.backend import TorchBackend
    from mmkv.engine.sequence import CachedSequence


class Decoded(NamedTuple):
    """What a decode step leaves behind.

    Attributes:
        logits: float32 ``[B, vocab]``.
        uncut: sequences that the step has not cut to their budgets.
        refused: whether this backend will not cut them either, so that only others are asked.
    """

    logits: Tensor
    uncut: Sequence[CachedSequence]
    refused: bool


class Backend(Protocol):
    """Runs steps and evictions of the sequences of one engine.

    :mod:`mmkv.engine.steps` chooses which one runs a step, :mod:`mmkv.engine.budgets` which one
    evicts outside of a step. All of them read and change the same cache and keep the same entries,
    so they may take turns on one sequence.
    """

    def unsupported_reason(self, sessions: Sequence[CachedSequence] = ()) -> str:
        """Say in a few words why these sequences cannot be decoded here; empty when they can.

        Without sequences: why none can, as far as model, policy and machine tell.
        """
        ...

    def decode(self, sessions: Sequence[CachedSequence], token_ids: Sequence[int]) -> Decoded:
        """Append one token to each of B different sequences, count it, and compute logits.

        Raises:
            BudgetError: the pool would pass its limit. Whatever is raised, entries that are not
                counted are the caller's to drop (:meth:`CachedSequence.roll_back`).
        """
        ...

    def evict(self, sessions: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """Cut different sequences to their budgets and count what went.

        Returns:
            those that are refused, unchanged: another backend has to cut them.
        """
        ...


@dataclass
class Backends:
    """The three backends of one engine."""

    torch: TorchBackend
    cpu: CpuBackend
    cuda: CudaBackend
