"""A refusal leaves nothing behind, wherever it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv.engine.cache import pool, ragged
from mmkv.engine.cache.pool import PagePool
from mmkv.engine.cache.ragged import RaggedCache
from mmkv.engine.errors import BudgetError
from mmkv.engine.prefill import extend_together
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import checkpoint
from tests.support.sessions import text_ids
from tests.support.tiers import one_in

# What refuses, or finds no memory.
RESERVING: list[tuple[Any, str]] = [(PagePool, "reserve"), (PagePool, "require")]
PLACES = [
    *RESERVING,
    *((PagePool, name) for name in ("take", "grow", "set_beside")),
    (RaggedCache, "_require_memory"),
    (ragged, "_with_row"),
    (pool, "zeros"),
]
GATED = {"policy": "dbtrimkv", "gates": "random", "budget": 8}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", GATED),
    "risk": ("llama", GATED | {"risk": 0.05, "budget_max": 32}),
    "window": ("llama", {"policy": "expected-attention:window=4", "budget": 8}),
    "states": ("qwen3_5_text", GATED | {"kv_limit": 2**20}),
    "long rope": ("phi3_long", {"policy": "full"}),
    "shared": ("llama", GATED),
    # All of its 512 positions are taken, and what has moved once has moved: it reserves before.
    "context": ("llama", GATED),
}


def engine_of(kind: str) -> Runtime:
    name, options = ENGINES[kind]
    given = {"dtype": "float32", "device": "cpu", "prefill_chunk": 16, "page_size": 8}
    made = Runtime.from_pretrained(checkpoint(name), **given, **options)
    if kind == "shared":
        made.share(12, floor=1)
    return made


def ids(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_ids": text_ids(count, seed)[None]}


Sessions = list[CachedSequence]


def together(engine: Runtime, sessions: Sessions) -> None:
    turns = [
        engine.turn(ids(n, n), one.next_position) for n, one in zip((9, 7), sessions, strict=True)
    ]
    extend_together(sessions, turns)


# By name: what is asked of an engine with two sessions, one of which has read nothing.
CALLS: dict[str, Callable[[Runtime, Sessions, Path], Any]] = {
    "open": lambda engine, _, __: engine.session(),
    "fork": lambda _, sessions, __: sessions[0].fork(),
    "first prompt": lambda _, sessions, __: sessions[1].prefill(ids(11)),
    "prompt": lambda _, sessions, __: sessions[0].prefill(ids(11)),
    "chunks": lambda _, sessions, __: sessions[0].begin_prefill(ids(30), 8),
    "together": lambda engine, sessions, _: together(engine, sessions),
    "step": lambda engine, sessions, _: engine.decode(sessions, [5, 6]),
    "budget": lambda _, sessions, __: sessions[0].set_budget(4),
    "load": lambda engine, _, path: engine.load_session(path),
}


@contextmanager
def refusing(places: list[tuple[Any, str]], at: int) -> Iterator[list[str]]:
    """Have the call with this number, of all ``places``, refuse; yields those that were made."""
    with pytest.MonkeyPatch.context() as patch:
        called: list[str] = []

        def watched(place: Any, name: str) -> None:
            given = getattr(place, name)

            def call(*arguments: Any, **named: Any) -> Any:
                called.append(name)
                if len(called) == at:
                    raise BudgetError("no")
                return given(*arguments, **named)

            patch.setattr(place, name, call)

        for place in places:
            watched(*place)
        yield called


def standing(engine: Runtime, sessions: Sessions) -> dict[str, Any]:
    """Return all that an engine and its sessions hold and count."""
    cache, shared = engine.cache, engine.shared
    with engine.lock:
        cache.check()
        return {
            "pages": cache.pool.num_pages - cache.pool.free_pages,
            "beside": cache.pool.beside,
            "open": cache.open_count,
            "owned": len(cache._marks),
            "left": len(engine.left),
            "weights": shared and [shared._weights.get(one) for one in sessions],
            "sharing": shared and len(shared._weights),
            "states": [one.state() for one in sessions],
            "budgets": [(one.budget, one.dial, one.left, one.closed) for one in sessions],
            "content": [
                {name: part.tolist() for name, part in cache.export(one.seq).items()}
                for one in sessions
            ],
        }


@one_in(2)
@pytest.mark.parametrize("kind", ENGINES)
def test_after_a_refusal_all_is_as_before(kind: str, tmp_path: Path) -> None:
    engine, path = engine_of(kind), tmp_path / "one.mmkv"
    for name, call in CALLS.items():
        if name == "budget" and kind in ("shared", "long rope"):
            continue
        sessions = [engine.session(), engine.session()]
        sessions[0].prefill(ids({"long rope": 27, "context": 512}.get(kind, 13), 3))
        sessions[0].save(path)
        before, at = standing(engine, sessions), 0
        while True:
            at += 1
            with refusing(RESERVING if kind == "context" else PLACES, at) as called:
                try:
                    made = call(engine, sessions, path)
                except BudgetError as error:
                    assert str(error) == "no", error
                else:
                    assert len(called) < at
                    break
            after = standing(engine, sessions)
            for what, value in before.items():
                assert after[what] == value, (name, called, what)
        made = made[0] if isinstance(made, tuple) else made
        for one in sessions + ([made] if isinstance(made, CachedSequence) else []):
            one.close()
        del made
        engine.trim()
