"""How long a chunk of a prompt may be, so that those who watch a reply do not wait too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmkv.api import Engine

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


def chunk_length(engine: Engine, seconds: float) -> int:
    """Measure chunks and return the longest of :data:`LENGTHS` that takes at most ``seconds``.

    Call it once, when a server starts, and give the result to every job: where chunks end decides
    what is kept, so a length that followed the load would make replies depend on it.
    """
    import torch

    (token,) = engine.processor.tokenizer("a", add_special_tokens=False)["input_ids"][:1]

    def seconds_of(length: int) -> float:
        taken = []
        with engine.session() as session:
            for _ in range(3):  # the first one finds an empty cache
                inputs = {"input_ids": torch.full((1, length), token)}
                started = time.perf_counter()
                prefill = session.begin_prefill(inputs, length, undoable=False)
                prefill.advance()
                assert prefill.logits is not None
                prefill.logits[0].item()  # waits for a GPU
                taken.append(time.perf_counter() - started)
        return min(taken[1:])

    most = engine.spec.max_position // 3
    return longest_within(seconds, seconds_of, [one for one in LENGTHS if one <= most])


def longest_within(
    seconds: float, seconds_of: Callable[[int], float], lengths: list[int] | tuple[int, ...]
) -> int:
    """Return the longest of ascending ``lengths`` that takes at most ``seconds``; else the first.

    Lengths after the first that takes longer are not tried.
    """
    found = LENGTHS[0]
    for length in lengths:
        if seconds_of(length) > seconds:
            break
        found = length
    return found
