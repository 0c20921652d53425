"""The one door to eviction: cut sequences to their budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.backends.base import Backend

if TYPE_CHECKING:
    from engine.runtime import Runtime
    from engine.sequence import CachedSequence


def cut_to_budgets(
    engine: Runtime,
    sessions: Sequence[CachedSequence],
    slack: int = 0,
    refused_by: Backend | None = None,
) -> None:
    """Evict from the sequences in which a group of rows stands above its share and its slack.

    Before that goes what write gates have not admitted. C is asked first, for all of them together;
    torch cuts what C refuses.

    Args:
        sessions: different open sequences of ``engine``. Where they share a budget, all that do
            are cut by it.
        refused_by: a backend that has refused these sequences, and is not asked again.
    """
    if engine.shared is not None:
        engine.shared.cut(slack)
        return
    if engine.policy.admission is not None:
        for session in sessions:
            engine.backends.torch.drop_refused(session)
    due = [session for session in sessions if session.is_due(slack)]
    for backend in (engine.backends.cpu, engine.backends.torch):
        if due and backend is not refused_by:
            due = list(backend.evict(due))
