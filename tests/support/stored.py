"""What an engine has stored, pass by pass, shown to its oracle."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmkv.engine.runtime import Runtime
from tests.support.oracle import Oracle


class Notes:
    """Keys and values as an engine's pool stores them, layer after layer, since they were shown."""

    def __init__(self, engine: Runtime) -> None:
        self.made: list[tuple[Tensor, Tensor]] = []
        store = engine.cache.pool.store

        def noted(slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            self.made.append(store(slots, key, value))
            return self.made[-1]

        setattr(engine.cache.pool, "store", noted)  # noqa: B010 - a method of this pool alone

    def show_prefill(self, oracle: Oracle) -> None:
        """Hand a prefill's entries ``[H, C, D]`` over, of all its chunks."""
        assert oracle.quantiser is not None
        oracle.quantiser.theirs, self.made = self.made, []

    def show_step(self, oracles: Sequence[Oracle]) -> None:
        """Hand the entries of a decode step over, ``[B H, D]`` of a batch."""
        for index, oracle in enumerate(oracles):
            assert oracle.quantiser is not None
            oracle.quantiser.theirs = [
                (key.chunk(len(oracles))[index][:, None], value.chunk(len(oracles))[index][:, None])
                for key, value in self.made
            ]
        self.made = []
