"""Helpers of the scheduler's tests on a real engine: a small one, prompts, and a watch on pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv import Engine, Sampling
from mmkv.scheduler import Scheduler
from mmkv.session import Session
from tests.support.chat_models import picture

CHUNK = 16
REPLY = Sampling(max_new_tokens=9, temperature=1.5, seed=3)
LONG = "a question that is long enough to be read in several chunks of sixteen tokens"


def load(qwen: Path, **options: Any) -> Engine:
    own = {"policy": "dbtrimkv", "gates": "random", "budget": 24, "page_size": 4, "kv": "auto"}
    given = own | options
    return Engine.from_pretrained(qwen, dtype="float32", prefill_chunk=CHUNK, **given)


def watch(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, scheduler: Scheduler, beside: int = 0
) -> list[int]:
    """Check at each taking of pages that no more are held than committed; what was held.

    ``beside``: pages that the scheduler's limit leaves out.
    """
    held: list[int] = []
    take, pool = type(engine.cache.pool).take, engine.cache.pool

    def watched(self: Any, count: int) -> torch.Tensor:
        pages = take(self, count)
        if self is pool:
            held.append(pool.num_pages - pool.free_pages)
            assert held[-1] <= scheduler.ledger.committed + beside
        return pages

    monkeypatch.setattr(type(pool), "take", watched)
    return held


def ask(session: Session | None, turn: int) -> dict[str, Any]:
    """Return what is asked in a turn: pictures in some."""
    images = [picture("red", (40 + 8 * turn, 24))] if turn % 2 == 0 else []
    return {"text": f"turn {turn}: {LONG if turn != 1 else 'short'}?", "images": images}


def ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 200, (1, count), generator=generator)
