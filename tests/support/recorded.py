"""Dialogues that an engine records while the oracle leads them, too; and one with pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mmkv import Engine, Sampling
from mmkv.explain import Snapshot, Trace
from mmkv.prompt.video import Clip
from mmkv.resources import asset, bundled_model
from mmkv.session import Session
from tests.support.dialogues import engine_of, folder_of, oracle_of, prefill_both, prompt
from tests.support.oracle import Retained
from tests.support.sessions import text_ids

MODEL = "vl3"
LATE = (  # pictures arrive in later turns
    ("turn", 9, ("image", 16, 24), 5),
    ("decode", 6),
    ("turn", 4, ("image", 32, 16), 3, ("image", 16, 48), 6),
    ("decode", 10),
    ("turn", 3),
    ("decode", 4),
)
VIDEO = (
    ("turn", 5, ("video", 6, 16, 16), 4),
    ("decode", 8),
    ("turn", 4, ("image", 24, 16), 3, ("video", 4, 8, 16), 6),
    ("decode", 8),
)
SHIFT = (  # the budget moves both ways
    ("turn", 20, ("image", 16, 16), 6),
    ("decode", 5),
    ("budget", 6),
    ("decode", 5),
    ("budget", 17.4),
    ("decode", 9),
    ("budget", 9),
    ("turn", 8),
)
# Policy, evict_every, chunk, budget, steps, whether torch decodes.
DIALOGUES: tuple[tuple[str, int, int, float, tuple[tuple[Any, ...], ...], bool], ...] = (
    ("dbtrimkv", 1, 7, 12, LATE, False),
    ("dbtrimkv", 1, 9, 12, VIDEO, True),
    ("dbtrimkv", 8, 7, 12, SHIFT, False),
    ("trimkv", 1, 16, 9, LATE, False),
    ("snapkv", 2, 7, 20, VIDEO, False),
)


@dataclass(frozen=True)
class Recorded:
    """A recorded dialogue, and what the oracle kept after each of its steps but the first."""

    snapshot: Snapshot
    kept: list[Retained]


@cache
def recorded(number: int) -> Recorded:
    """Lead one of :data:`DIALOGUES` by an engine that records it, and by the oracle."""
    policy, every, chunk, budget, script, in_torch = DIALOGUES[number]
    folder, settings = folder_of(MODEL), {"evict_every": every, "prefill_chunk": chunk}
    engine = engine_of(folder, policy, budget, **settings)
    if in_torch:
        engine.backends.cpu.switch_off()
    oracle = oracle_of(engine, folder, policy, budget, **settings)
    session = engine.session()
    kept: list[Retained] = []
    follow = oracle.follow

    def follow_and_note(retained: Retained) -> None:
        follow(retained)
        kept.append(oracle.retained())

    oracle.follow = follow_and_note  # type: ignore[method-assign]
    trace = Trace(session)
    for at, (kind, *rest) in enumerate(script):
        if kind == "turn":
            prefill_both(session, oracle, prompt(MODEL, *rest, seed=at))
        elif kind == "decode":
            for token in text_ids(rest[0], seed=1000 + at).tolist():
                session.decode(token), oracle.decode(token)
                oracle.follow(session.retained())
        else:
            session.set_budget(rest[0])
            oracle.set_budget(rest[0])
            oracle.follow(session.retained())
    trace.stop()
    session.close()
    return Recorded(trace.snapshot(), kept)


def clip() -> Clip:
    """Eight frames of noise in which a bright square moves."""
    frames = np.random.default_rng(0).integers(0, 90, (8, 64, 96, 3), dtype=np.uint8)
    for at, frame in enumerate(frames):
        frame[16:48, 8 * at : 8 * at + 32] = 240
    return Clip(frames, tuple(range(0, 16, 2)), 8.0)


def talk(engine: Engine) -> tuple[Session, Trace]:
    """Hold a recorded dialogue with a picture, a video and a text that looks like markup."""
    session = engine.session()
    trace = session.trace()
    for text, images, videos in (
        ("what is at row 2, column 3?", [asset("scene.png")], []),
        ('</script><b>bold</b><!-- $x^2$ & "quoted"', [], [clip()]),
    ):
        sampling = Sampling(max_new_tokens=6)
        list(session.send(text, images=images, videos=videos, sampling=sampling))
    if engine.policy.evicts:
        session.set_budget(5)
    list(session.send("what is at row 1, column 1?", sampling=Sampling(max_new_tokens=4)))
    return session, trace


def bundled(**options: Any) -> Engine:
    """Load the bundled model with a small budget and short chunks; dbtrimkv cuts at each step."""
    own: dict[str, Any] = {"budget": 8, "prefill_chunk": 12}
    if "policy" not in options:
        own |= {"policy": "dbtrimkv", "evict_every": 1}
    return Engine.from_pretrained(bundled_model(), **(own | options))
