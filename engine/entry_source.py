"""What a policy's view reads from the cache: keys, values, state and window attention."""

from __future__ import annotations

from torch import Tensor

from mmkv.engine.cache import Entries, RaggedCache
from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import CacheView, Needs, WindowReduction
from mmkv.engine.query_window import QUERIES, newest_entropy, window_attention


class CacheEntries:
    """Reads the entries of one sequence where they lie.

    A :class:`mmkv.engine.policies.base.EntrySource`.

    Only what the scorer says it needs: a policy that reads more would run on one backend and not on
    another.
    """

    def __init__(
        self, cache: RaggedCache, seq: int, entries: Entries, needs: Needs, native: bool = False
    ) -> None:
        self._cache, self._seq, self._entries, self._needs = cache, seq, entries, needs
        self._native = native

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
        return window_attention(
            self._cache, self._seq, self._entries, view, reduction, self._native
        )

    def entropy(self, view: CacheView) -> Tensor:
        """Without dimensions; see :meth:`mmkv.engine.policies.base.CacheView.entropy`."""
        self._check_queries("entropy")
        return newest_entropy(self._cache, self._seq, self._entries, view)

    def _check_queries(self, what: str) -> None:
        if QUERIES not in self._cache.memory:
            raise PolicyError(_undeclared(what, "queries=16") + " or another number")


def _undeclared(what: str, needs: str) -> str:
    return f"the scorer reads {what} and does not say so; give it needs = Needs({needs})"
