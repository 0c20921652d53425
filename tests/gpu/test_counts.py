"""Launches, waits and captures of an 8B model's structure on the fake card: 36 layers of 8 rows.

What a launch computes does not matter to its number, so the model is narrow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.bench.shapes import Shape, build_engine
from mmkv.engine.sequence import CachedSequence
from tests.support.fake_cuda import fake_cuda

SHAPE = Shape("qwen3", 36, 64, 16, 8, 16, 128, 128, False, 5e6, 1e-6, gate=64)


def opened(policy: str, count: int, layers: int) -> list[CachedSequence]:
    engine = build_engine(
        replace(SHAPE, layers=layers),
        policy,
        8,
        device="cuda",
        dtype=torch.bfloat16,
        prefill_chunk=32,
        page_size=8,
    )
    sessions = [engine.session() for _ in range(count)]
    for session in sessions:
        session.prefill({"input_ids": torch.arange(3, 35)[None]})
    return sessions


def in_a_graph(session: CachedSequence) -> int:
    """Launches of a captured step."""
    ((_, graphs),) = session.engine.backends.cuda.runner._steps.values()
    return len(graphs[True].steps)


def of_a_step(policy: str, layers: int) -> tuple[int, int]:
    """Return the launches of a captured step of two sessions, and how often the host waits."""
    with fake_cuda() as card:
        sessions = opened(policy, 2, layers)
        sessions[0].engine.decode(sessions, [5, 6])
        card.reads.clear()
        sessions[0].engine.decode(sessions, [5, 6])
        return in_a_graph(sessions[0]), card.reads.total()


def of_a_chunk(policy: str, layers: int) -> tuple[int, int]:
    """Return the launches of a chunk that evicts, and how often the host waits."""
    with fake_cuda() as card:
        (session,) = opened(policy, 1, layers)
        card.reads.clear()
        card.launches.clear()
        session.prefill({"input_ids": torch.arange(35, 67)[None]})
        assert session.evicted > 0
        return card.launches.total(), card.reads.total()


Counts = Callable[[str, int], tuple[int, int]]


def of_36_layers(counts: Counts, policy: str) -> tuple[int, int]:
    """Return what follows from 2 and 3 layers: each has as many launches, none a wait."""
    (two, waits), (three, again) = counts(policy, 2), counts(policy, 3)
    assert waits == again
    return two + 34 * (three - two), waits


@pytest.mark.parametrize(("policy", "most"), [("dbtrimkv", 390), ("snapkv", 440), ("h2o", 1340)])
def test_a_step_is_so_many_launches_and_waits_twice(policy: str, most: int) -> None:
    launches, waits = of_36_layers(of_a_step, policy)
    assert launches <= most and waits == 2


@pytest.mark.parametrize("policy", ["dbtrimkv", "streamingllm"])
def test_a_chunk_is_1000_launches_at_most_and_waits_four_times(policy: str) -> None:
    launches, waits = of_36_layers(of_a_chunk, policy)
    assert launches <= 1000 and waits <= 4


@pytest.mark.long(reason="36 layers whole")
@pytest.mark.parametrize("counts", [of_a_step, of_a_chunk])
@pytest.mark.parametrize("policy", ["dbtrimkv", "snapkv", "h2o", "streamingllm"])
def test_every_layer_adds_the_same(counts: Counts, policy: str) -> None:
    assert counts(policy, 36) == of_36_layers(counts, policy)


def test_growth_alone_captures_anew() -> None:
    """Not other lengths, stop ids or neighbours; buckets of batches do, and kinds of draw."""
    with fake_cuda() as card:
        sessions = opened("dbtrimkv", 4, 2)
        engine = sessions[0].engine
        engine.decode_many(sessions, [5] * 4, 4)
        engine.decode_many(sessions[:2], [5] * 2, 4)
        assert card.mode == "thread_local"  # what other threads do meanwhile voids nothing
        before = card.captured
        for steps, stop in ((1, []), (9, [7]), (16, [7, 8, 9])):
            engine.decode_many(sessions, [6] * 4, steps, stop)
            engine.decode_many(sessions[1:4], [6] * 3, steps, stop)
            engine.decode(sessions[2:], [6] * 2)
        assert card.captured == before
