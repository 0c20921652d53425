"""Entries of tokens that are forgotten, beside an oracle that masks them from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmkv.engine import trace
from mmkv.engine.policies import PRESETS
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.dialogues import (
    Notes,
    engine_of,
    folder_of,
    oracle_of,
    prefill_both,
    prompt,
)
from tests.support.oracle import Oracle, Quantiser, Retained
from tests.support.policies import ALL, KINDS
from tests.support.sessions import text_ids
from tests.support.tiers import long_but, one_in

TOLERANCE = 1e-4


def with_a_small_window(name: str) -> str:
    return name + (":window=3" if "window" in PRESETS[name].parameters else "")


QUICK, POLICIES = (
    [with_a_small_window(name) for name in (*names, "wgkv")] for names in (KINDS, ALL)
)


def agree(session: CachedSequence, oracle: Oracle) -> None:
    """Compare retained sets and counts."""
    oracle.follow(session.retained())
    memory = session.memory()
    assert memory.entries == session.entries == int(oracle.keep.sum())
    assert memory.entries + memory.evicted == session.seen * session.engine.spec.rows
    session.engine.cache.check()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= TOLERANCE, f"logits differ by {error:.2e}"


def decode_both(
    session: CachedSequence,
    oracle: Oracle,
    count: int,
    seed: int,
    notes: Notes | None = None,
) -> None:
    for token in text_ids(count, seed).tolist():
        ours = session.decode(token)
        if notes is not None:
            notes.show_step([oracle])
        close(ours, oracle.decode(token))
        agree(session, oracle)


def converse(
    model: str, policy: str, tmp_path: Path, native: bool, kv: str = "auto", every: int = 1
) -> None:
    """Two turns whose replies are forgotten in part, then saved, forked, gone on from."""
    budget = 9.4
    engine = engine_of(
        folder_of(model), policy, budget, prefill_chunk=16, page_size=8, kv=kv, evict_every=every
    )
    oracle = oracle_of(
        engine, folder_of(model), policy, budget, prefill_chunk=16, evict_every=every
    )
    notes = None
    if kv != "auto":
        notes, oracle.quantiser = Notes(engine), Quantiser(kv)
    if notes is not None or not native:
        engine.backends.cpu.switch_off()
    session = engine.session()
    close(*prefill_both(session, oracle, prompt(model, 5, ("image", 16, 24), 4), notes))
    start = session.seen - 1  # the prompt's last token opens the thought
    decode_both(session, oracle, 9, 1, notes)
    pages = session.memory().pages
    before = session.entries
    taken = session.next_position
    oracle.forget(start, start + 7)
    held = int(oracle.keep.sum())
    assert session.forget(start, start + 7) == before - held > 0
    agree(session, oracle)
    assert session.memory().pages <= pages and session.next_position == taken
    decode_both(session, oracle, 3, 2, notes)
    session.save(tmp_path / "session")
    fork = session.fork()
    session.close()
    session, _ = engine.load_session(tmp_path / "session")
    for again in (session, fork):
        oracle.follow(again.retained())
    fork.close()
    close(*prefill_both(session, oracle, prompt(model, 3, ("image", 24, 16), 2, seed=3), notes))
    decode_both(session, oracle, 8, 4, notes)
    start = session.seen - 8
    oracle.forget(start, start + 8)  # all of it
    session.forget(start, start + 8)
    agree(session, oracle)
    close(*prefill_both(session, oracle, prompt(model, 20, seed=5), notes))
    decode_both(session, oracle, 3, 6, notes)
    oracle.close()
    session.close()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


# Each kind on one of both paths, in turn; the first one on both.
IN_TURN = [(name, at % 2 == 0) for at, name in enumerate(QUICK)] + [(QUICK[0], False)]


@one_in(3)
@pytest.mark.parametrize(
    ("policy", "native"),
    long_but(
        IN_TURN, [(p, native) for p in POLICIES for native in (True, False)], "the other presets"
    ),
)
def test_what_is_kept_is_what_a_mask_keeps(policy: str, native: bool, tmp_path: Path) -> None:
    converse("text3", policy, tmp_path, native)


@pytest.mark.parametrize(
    "model",
    long_but(
        ("vl3", "qwen2_5_vl", "qwen2_sliding"),
        ["vl3", "qwen2_5_vl", "qwen3_vl_moe", "internvl", "qwen3", "qwen2_sliding", "mistral"],
        "positions and layers of the others are like these",
    ),
)
def test_families_forget_alike(model: str, tmp_path: Path) -> None:
    converse(model, "dbtrimkv", tmp_path, native=True, every=3)


@pytest.mark.parametrize(("policy", "kv"), [("dbtrimkv", "int8"), ("h2o", "int4")])
def test_entries_in_fewer_bits_are_forgotten_alike(policy: str, kv: str, tmp_path: Path) -> None:
    converse("text3", policy, tmp_path, native=False, kv=kv)


def flat(retained: Retained) -> list[list[int]]:
    return [row.tolist() for layer in retained for row in layer]


def test_what_one_forgets_leaves_room_for_others_under_a_shared_budget() -> None:
    def opened() -> tuple[Runtime, CachedSequence, CachedSequence]:
        engine = engine_of(folder_of("text3"), "dbtrimkv", 12, prefill_chunk=64)
        engine.share(12)
        return engine, engine.session(), engine.session()

    engine, session, other = opened()
    session.prefill(prompt("text3", 40))
    other.prefill(prompt("text3", 40, seed=1))
    total = engine.budgets.competing(session)
    assert session.entries + other.entries == total
    kept = flat(session.retained()), flat(other.retained())
    assert session.forget(0, 30) > 0
    assert flat(session.retained()) == [[at for at in row if at >= 30] for row in kept[0]]
    assert flat(other.retained()) == kept[1]
    held = session.entries + other.entries
    grown = (total - held) // engine.spec.rows
    assert grown > 2
    for token in range(3, 3 + grown):  # nobody is evicted until the room is used up
        other.decode(token)
    assert session.entries + other.entries == held + grown * engine.spec.rows <= total
    for token in range(3, 9):
        other.decode(token)
    assert session.entries + other.entries == total


def test_a_record_says_what_was_forgotten() -> None:
    engine = engine_of(folder_of("text3"), "dbtrimkv", 9, prefill_chunk=16)
    session = engine.session()
    recorder = session.record()
    session.prefill(prompt("text3", 30))
    before = flat(session.retained())
    session.forget(20, 28)
    for token in range(3, 9):
        session.decode(token)
    record = recorder.read(session)
    (step,) = [at for at, kind in enumerate(record.kind) if trace.KINDS[kind] == "forget"]
    assert [row.tolist() for layer in record.retained(step - 1) for row in layer] == before
    wanted = [[at for at in row if not 20 <= at < 28] for row in before]
    assert [row.tolist() for layer in record.retained(step) for row in layer] == wanted
    gone = record.deaths[record.died_at == step]
    assert len(gone) and set(gone["cause"]) == {trace.FORGOTTEN}
    assert flat(session.retained()) == [
        row.tolist() for layer in record.retained(-1) for row in layer
    ]
