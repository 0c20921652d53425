"""Replies in bursts of tokens, as a GPU decodes them, against one token at a time.

On a CPU the graph's step runs in torch, so that the same bookkeeping is used.
"""

from __future__ import annotations

from typing import Any

import pytest

import mmkv.reply
from mmkv import Engine, Sampling
from mmkv.engine.errors import ContextError
from mmkv.resources import bundled_model
from mmkv.session import Session
from tests.support.tiers import slow_but

SCENE = {"type": "image", "image": str(bundled_model().parent / "scene.png")}
QUESTIONS = ["What color is the shape in the first row?", "How many shapes are there?", "Describe."]


def engine_for(burst: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """Return the bundled model; ``burst`` makes it decode as with a graph."""
    options = {"policy": "dbtrimkv", "gates": "random", "dtype": "float32", "budget": 24}
    engine = Engine.from_pretrained(bundled_model(), **(options | settings))
    if burst:
        monkeypatch.setattr(type(engine), "many_path", "graph")
    return engine


def talk(engine: Engine, sampling: Sampling) -> tuple[Session, list[Any]]:
    """Three turns, and what each came to."""
    session, replies = engine.session(), []
    for index, question in enumerate(QUESTIONS):
        pieces = list(session.send(question, [SCENE["image"]] * (not index), sampling=sampling))
        assert session.last is not None
        replies.append(("".join(pieces), session.last.token_ids, session.last.finish_reason))
    return session, [replies, session.history, session.seen]


LIMITS = [(limit, stop) for stop in ((), ("e",)) for limit in (1, 5, 64)]


@pytest.mark.parametrize(
    ("limit", "stop"), slow_but([(5, ()), (64, ("e",))], LIMITS, "each talks three turns twice")
)
def test_bursts_generate_and_retain_the_same_as_single_tokens(
    limit: int, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_new_tokens=limit, stop=stop)
    single, expected = talk(engine_for(False, monkeypatch), sampling)
    burst, got = talk(engine_for(True, monkeypatch), sampling)
    assert got == expected
    assert (burst.engine.backends.cuda.runner is not None) == (limit > 1 and not stop)
    kept = [[row.tolist() for layer in s.retained() for row in layer] for s in (single, burst)]
    assert kept[0] == kept[1]


def test_batches_and_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed gives the same tokens in a batch and alone, bursts cut where they may be."""
    conversations: Any = [
        [{"role": "user", "content": [SCENE, {"type": "text", "text": question}]}]
        for question in QUESTIONS
    ]
    engine = engine_for(True, monkeypatch)
    drawn = Sampling(max_new_tokens=40, temperature=5.0, top_p=0.9, seed=5)
    together = [reply.token_ids for reply in engine.generate(conversations, drawn)]
    monkeypatch.setattr(mmkv.reply, "BURST", 7)
    alone = [engine.generate(each, drawn)[0].token_ids for each in conversations]
    assert together == alone and any(len(row) > 16 for row in together)
    assert len({tuple(row) for row in together}) > 1
    other = engine.generate(conversations, Sampling(max_new_tokens=40, temperature=5.0, seed=6))
    assert [reply.token_ids for reply in other] != together


def test_a_burst_ends_at_the_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(True, monkeypatch, policy="full")
    session = engine.session()
    list(session.send("hello", sampling=Sampling(max_new_tokens=1)))
    limit = session.next_position + 30
    monkeypatch.setattr(type(engine.spec), "max_position", limit, raising=False)
    object.__setattr__(engine.spec, "max_position", limit)
    text = "".join(session.send("x", sampling=Sampling(max_new_tokens=200, temperature=50, seed=1)))
    assert session.last is not None and session.last.finish_reason == "context"
    assert session.next_position == limit and text
    with pytest.raises(ContextError):
        list(session.send("more"))
