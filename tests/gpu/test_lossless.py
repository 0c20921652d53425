"""Lossless decoding on a GPU beside its full cache: drafts and checks are replays of graphs.

As test_engine.py, on a fake card where there is none.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.backends.torch.backend import TorchBackend
from mmkv.engine.config import EngineConfig
from mmkv.engine.drafts import MOST_DRAFTED, HitRate, Pace
from mmkv.engine.errors import BudgetError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.gpu.test_roads import DRAWN, GREEDY, LOOKING, PENALISED, engine_on, written
from tests.support.factories import checkpoint, make_turn
from tests.support.fake_cuda import Device
from tests.support.sessions import text_ids
from tests.support.tiers import long_but

FULL = {"policy": "full", "budget": None}


@pytest.fixture(autouse=True)
def any_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(5)
    monkeypatch.setattr(Pace, "choose", lambda *_: drawn.randint(0, MOST_DRAFTED))


def engine_of(family: str, **options: Any) -> Runtime:
    usual = {"dtype": "float32", "page_size": 8, "gates": "random", "prefill_chunk": 12}
    return Runtime.from_config(
        EngineConfig(model=checkpoint(family), device="cuda", **(usual | options))
    )


def knowing(session: CachedSequence, token: int, drawn: random.Random) -> Any:
    """Guess what a session with the full cache would say behind a token, now and then wrongly."""
    fork, latest = session.fork(), [token]

    def guess(logits: Tensor) -> int:
        assert bool(logits.isfinite().all())
        latest[0] = int(fork.decode(latest[0]).argmax())
        return latest[0] if drawn.random() < 0.9 else drawn.randrange(3, 90)

    return guess


# Pictures, windows, experts, biases; page-wise and reading forms; what the graph cannot keep.
ROWS = [
    ("qwen3_vl", "dbtrimkv", "auto"),
    ("gemma3", "streamingllm", "int8"),
    ("qwen3_moe", "trimkv", "int4"),
    ("internvl", "h2o", "auto"),
    ("qwen2_sliding", "snapkv", "k8v4"),
]


@pytest.mark.parametrize(("family", "policy", "kv"), long_but(ROWS[1:2], ROWS, "the others"))
def test_logits_are_those_of_the_full_cache(
    family: str, policy: str, kv: str, card: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions of different lengths, whose replies agree with the drafts for a while."""
    on_torch: list[int] = []
    decode = TorchBackend.decode
    monkeypatch.setattr(
        TorchBackend, "decode", lambda *given: (on_torch.append(1), decode(*given))[1]
    )
    ours = engine_of(family, policy=policy, kv=kv, budget=7, lossless=True)
    theirs = engine_of(family, policy="full", kv=kv)
    sessions = [[engine.session() for _ in range(2)] for engine in (ours, theirs)]
    for seed, (one, other) in enumerate(zip(*sessions, strict=True)):
        pieces = (9 + 9 * seed, *([("image", 16, 24), 5] if ours.family.has_vision else []))
        for each in (one, other):
            each.prefill({k: v.to("cuda") for k, v in make_turn(family, pieces, seed).items()})
    drawn, said = random.Random(3), [5, 6]
    for _ in range(14):
        guesses = [knowing(one, token, drawn) for one, token in zip(sessions[1], said, strict=True)]
        found = [ours.decode(sessions[0], said, guesses), theirs.decode(sessions[1], said)]
        largest = float(found[1].abs().max())
        bound = 1e-4 if kv == "auto" else 1e-2  # a last bit may round a key elsewhere
        torch.testing.assert_close(*found, rtol=0, atol=bound * largest)
        said = [
            int(row.argmax()) if drawn.random() < 0.9 else drawn.randrange(3, 90)
            for row in found[1]
        ]
    for one, other in zip(*sessions, strict=True):
        assert [row.tolist() for layer in one.retained() for row in layer] == [
            row.tolist() for layer in other.retained() for row in layer
        ]
    told = [one.memory() for one in sessions[0]]
    assert all(3 <= each.accepted < each.drafted for each in told)
    # Their attention and queries are kept by torch.
    assert bool(on_torch) == (policy in ("h2o", "snapkv"))
    if card is not None:
        assert card.replays > 14


@pytest.mark.parametrize(
    "looking", long_but(("log probabilities",), LOOKING, "one that looks is enough")
)
def test_replies_are_those_of_the_full_cache(
    looking: str, card: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is drawn: by the same random numbers, which drafts foresee."""
    note, right = HitRate.note, list[bool]()
    monkeypatch.setattr(HitRate, "note", lambda self, hit: (right.append(hit), note(self, hit)))
    full, engine = (engine_on("cuda", **own) for own in (FULL, {"lossless": True, "budget": 16}))
    assert engine.many_path == "graph"
    for asked in ([DRAWN], [GREEDY, PENALISED, LOOKING[looking]]):
        right.clear()
        assert written(engine, asked) == written(full, asked)
        assert sum(right) > 3


def test_bursts_are_those_of_the_full_cache(
    card: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafts are made in bursts: after the first passes few graphs are captured."""
    monkeypatch.setattr(Pace, "choose", lambda *_: 4)
    full, engine = (engine_on("cuda", **own) for own in (FULL, {"lossless": True, "budget": 16}))
    draws = [Draw(), Draw(temperature=0.9, top_k=20, seed=3), Draw(temperature=0.7, presence=0.3)]
    made, captured = [], 0
    for each in (full, engine):
        sessions = [Runtime.session(each) for _ in draws]
        for seed, session in enumerate(sessions):
            session.prefill({"input_ids": text_ids(40 + 9 * seed, seed)[None]})
        made.append([each.decode_many(sessions, [5] * 3, 12, draws=draws)])
        captured = 0 if card is None else card.captured
        last = [row[-1] for row in made[-1][0]]
        made[-1].append(each.decode_many(sessions, last, 16, draws=draws))
    assert made[0] == made[1]
    assert all(one.ahead is not None and one.ahead.accepted > 3 for one in sessions)
    assert card is None or card.captured <= captured + 2  # what grew in between
    drafts = engine.drafts
    assert drafts is not None and drafts._cuda.runner is not None
    for session in sessions:
        session.close()
    assert engine.trim() and drafts._cuda.runner is None and not drafts._rows.table.numel()


def test_more_sessions_capture_drafts_once_for_each_doubling(
    card: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit any more is made for twice as many; the pool stays as it is."""
    monkeypatch.setattr(Pace, "choose", lambda *_: 3)
    engine, sessions = engine_of("qwen3_vl", budget=6, lossless=True), list[CachedSequence]()
    engine.cache.pool.grow(600)
    assert engine.drafts is not None
    for count in range(1, 9):
        sessions.append(engine.session())
        sessions[-1].prefill({"input_ids": text_ids(20, count)[None]})
        engine.decode(sessions, [5] * count)
        for session in sessions:  # all draft anew
            engine.drafts.drop(session)
    assert engine.drafts._cuda.runner is not None
    assert engine.drafts._cuda.runner.captures == 4  # for 1, 2, 4 and 8


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError, BudgetError])
def test_a_reply_without_room_for_drafts_goes_on(
    raised: type[Exception], card: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = engine_of("qwen3_vl", budget=6, lossless=True), engine_of("qwen3_vl", **FULL)

    def failing(*_: Any) -> None:
        raise raised("no room")

    assert ours.drafts is not None
    monkeypatch.setattr(ours.drafts._cuda, "decode_many", failing)
    found = []
    for engine in (ours, theirs):
        with engine.session() as session:
            session.prefill({"input_ids": text_ids(30, 1)[None]})
            found.append(engine.decode_many([session], [5], 9))
            assert session.ahead is None or not session.ahead.drafted
        engine.cache.check()
    assert found[0] == found[1]
