"""Prompts of several sequences in one pass: each keeps what it would keep alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmkv.engine.budgets import page_bound
from mmkv.engine.errors import BudgetError, NotFiniteError, SessionError
from mmkv.engine.policies import make_policy
from mmkv.engine.prefill import ChunkPass, Prefill, advance_together, extend_together
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.engine.test_oracle import text_of
from tests.support.dialogues import engine_of, folder_of, prompt
from tests.support.policies import KINDS, OTHERS
from tests.support.sessions import assert_same_rows, load, run, text_ids, turn
from tests.support.tiers import long_but, one_in

# A turn of each row, twice: with pictures and without, longer and shorter than a chunk.
TURNS: list[list[list[Any]]] = [
    [[5, ("image", 24, 32), 4], [17], [40], [2, ("image", 16, 24), 3]],
    [[3], [2, ("image", 24, 32), 25], [1], [9]],
]
CHUNK = 16


def together(sessions: list[CachedSequence], prompts: list[dict[str, Tensor]]) -> Tensor:
    engine = sessions[0].engine
    turns = [
        engine.family.turn(inputs, session.next_position, engine.device)
        for session, inputs in zip(sessions, prompts, strict=True)
    ]
    return extend_together(sessions, turns)


def passes_of(engine: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count from now on the tokens of every forward pass."""
    counts: list[int] = []
    forward = engine.decoder.forward

    def counting(hidden: Tensor, *rest: Any) -> Any:
        counts.append(hidden.shape[0])
        return forward(hidden, *rest)

    monkeypatch.setattr(engine.decoder, "forward", counting)
    return counts


# Other pruners drop tokens where these do; write gates beside a policy are those alone and it.
ALIKE = ("dart", "cdpruner", "wgkv+dbtrimkv")


@one_in(3)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "vl3") for name in KINDS + OTHERS if name not in ALIKE),
        *long_but((), [(name, "vl3") for name in ALIKE], "as one of the others"),
        ("dbtrimkv", "llava3"),
        ("fastv", "llava3"),
    ],
)
def test_each_keeps_what_it_keeps_alone(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(name)
    budget = 3.5 if make_policy(text).keeps_prompt else 9.4
    options = {"prefill_chunk": CHUNK, "page_size": 8}
    engine = engine_of(folder_of(model), text, budget, **options)
    packed, alone = ([engine.session() for _ in TURNS[0]] for _ in range(2))
    records = [[session.record() for session in group] for group in (packed, alone)]
    counts = passes_of(engine, monkeypatch)
    for number, row in enumerate(TURNS):
        prompts = [prompt(model, *pieces, seed=10 * number + i) for i, pieces in enumerate(row)]
        found = together(packed, prompts)
        in_passes, counts[:] = list(counts), []
        wanted = torch.stack([s.prefill(p) for s, p in zip(alone, prompts, strict=True)])
        assert max(in_passes) <= CHUNK and len(in_passes) < len(counts)
        counts.clear()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        for left, right in zip(packed, alone, strict=True):
            assert left.state() == right.state()
            assert_same_rows(left, right)
            after = [run(session, text_ids(3, number)) for session in (left, right)]
            torch.testing.assert_close(*after, rtol=1e-4, atol=1e-5)
            assert_same_rows(left, right)
        counts.clear()
    for *made, left, right in zip(*records, packed, alone, strict=True):
        first, second = made[0].read(left), made[1].read(right)
        assert np.array_equal(first.seen, second.seen)
        for field in ("row", "position", "cause"):
            assert np.array_equal(first.deaths[field], second.deaths[field])
    engine.cache.check()


def test_the_last_layer_computes_the_last_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder_of("text3"), "dbtrimkv", 9)
    last, tokens = engine.decoder.weights.layers[-1].down, []
    product = engine.decoder.weights.product

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is last:
            tokens.append(x.shape[0])
        return product(x, weight, bias)

    monkeypatch.setattr(engine.decoder.weights, "product", counting)
    together([engine.session() for _ in range(3)], [turn(n) for n in (4, 11, 7)])
    assert tokens == [3]


def begun(sessions: list[CachedSequence], *prompts: dict[str, Tensor]) -> list[Prefill]:
    engine = sessions[0].engine
    turns = [
        engine.family.turn(inputs, session.next_position, engine.device)
        for session, inputs in zip(sessions, prompts, strict=True)
    ]
    return [Prefill(*parts) for parts in zip(sessions, turns, strict=True)]


# A layer that is left alone sees no policy but by what it keeps beside the entries.
LEFT = ("dbtrimkv", "snapkv", "h2o", "wgkv", "fastv")


@pytest.mark.parametrize("name", long_but(LEFT, KINDS + OTHERS, "the other kinds"))
def test_a_pass_that_is_left_after_each_layer_computes_the_same_bits(name: str) -> None:
    """Others are opened, read and decoded meanwhile, for which pool and tables grow."""
    text = text_of(name)
    budget = 3.5 if make_policy(text).keeps_prompt else 9.4
    engine = engine_of(folder_of("vl3"), text, budget, prefill_chunk=CHUNK, page_size=8)
    left, whole = ([engine.session() for _ in range(2)] for _ in range(2))
    other = engine.session()
    other.prefill(turn(11))
    for number, row in enumerate(TURNS):
        prompts = [prompt("vl3", *pieces, seed=10 * number + i) for i, pieces in enumerate(row[:2])]
        passes, others = begun(left, *prompts), begun(whole, *prompts)
        for prefills, seconds in ((passes, 0.0), (others, None)):
            while going := [one for one in prefills if one.logits is None]:
                made, times = ChunkPass(going, by_layer=seconds is not None), 1
                while not made.run(seconds):
                    times += 1
                    run(other, text_ids(2, times))
                    engine.session().prefill(turn(CHUNK + times, seed=times))
                assert times == (engine.spec.num_layers + 1 if seconds is not None else 1)
        for one, wanted, (first, second) in zip(
            passes, others, zip(left, whole, strict=True), strict=True
        ):
            assert torch.equal(one.logits, wanted.logits)  # type: ignore[arg-type]
            assert first.state() == second.state()
            memories = [engine.cache.export(session.seq) for session in (first, second)]
            assert all(torch.equal(part, memories[1][key]) for key, part in memories[0].items())
    engine.cache.check()


def test_a_pass_that_was_left_can_be_taken_back(folders: dict[str, Path]) -> None:
    """Also where one of its sequences was closed meanwhile; the others are as they were."""
    engine = load(folders["vl"])
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        session.prefill(turn(9))
    before = [session.state() for session in sessions]
    held = [engine.cache.held_pages(session.seq) for session in sessions]
    prefills = begun(sessions, *(turn(4, seed=i) for i in range(3)))
    made = ChunkPass(prefills, by_layer=True)
    assert not made.run(0.0)
    made.abort()
    assert [session.state() for session in sessions] == before
    assert [engine.cache.held_pages(session.seq) for session in sessions] == held
    engine.cache.check()
    assert not made.run(0.0)
    sessions[1].close()
    other = engine.session()  # has its place in the cache
    other.prefill(turn(20))
    kept = engine.cache.export(other.seq)["position"]
    with pytest.raises(SessionError, match="closed"):
        made.run()
    assert torch.equal(engine.cache.export(other.seq)["position"], kept)
    assert engine.cache.held_pages(sessions[0].seq) == held[0]
    assert sessions[2].state() == before[2]
    engine.cache.check()
    advance_together([prefills[0], prefills[2]])
    assert prefills[0].logits is not None and prefills[2].logits is not None


def test_nothing_else_happens_to_what_a_pass_that_was_left_reads(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its sessions refuse, and its pages stay where they are; afterwards all goes on."""
    engine = load(folders["vl"])
    small, whole, session = (engine.session() for _ in range(3))
    small.prefill(turn(30))
    for one in (whole, session):
        one.prefill(turn(9))
    (alone,), (prefill,) = (begun([one], turn(4, seed=1)) for one in (whole, session))
    alone.advance()
    prefill._undoable = True
    made = ChunkPass([prefill], by_layer=True)
    assert not made.run(0.0)
    for what in (
        session.fork,
        prefill.advance,
        prefill.roll_back,
        lambda: session.decode(5),
        lambda: session.prefill(turn(2)),
        lambda: session.cut_back(5, 5, 5),
        lambda: session.set_budget(8),
        lambda: session.save(tmp_path / "file.mmkv"),
    ):
        with pytest.raises(SessionError, match="a prompt is being read"):
            what()
    small.close()
    kept = engine.cache.export(whole.seq)
    assert engine.trim() == 0
    while not made.run(0.0):
        pass
    assert torch.equal(prefill.logits, alone.logits)  # type: ignore[arg-type]
    assert all(torch.equal(part, kept[key]) for key, part in engine.cache.export(whole.seq).items())
    assert_same_rows(session, whole)
    assert engine.trim() > 0
    assert torch.equal(session.decode(5), whole.decode(5))
    (prefill,) = begun([session], turn(4, seed=2))
    made = ChunkPass([prefill], by_layer=True)
    assert not made.run(0.0)
    made.abort()
    assert session.fork().entries == session.entries
    engine.cache.check()


def test_one_prompt_without_numbers_leaves_the_others(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folders["vl"])
    sessions = [engine.session() for _ in range(3)]
    prefills = [
        Prefill(s, engine.family.turn(turn(4, seed=i), 0, engine.device))
        for i, s in enumerate(sessions)
    ]
    logits = engine.decoder.logits

    def with_a_hole(hidden: Tensor) -> Tensor:
        made = logits(hidden)
        made[1] = torch.nan
        return made

    with monkeypatch.context() as patched:
        patched.setattr(engine.decoder, "logits", with_a_hole)
        with pytest.raises(NotFiniteError):
            advance_together(prefills)
    assert [prefill.logits is None for prefill in prefills] == [False, True, False]
    assert [session.seen for session in sessions] == [4, 0, 4]
    assert prefills[1].advance()
    engine.cache.check()


def test_a_limited_pool_reads_no_more_at_once_than_it_holds(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folders["vl"], prefill_chunk=64, budget=8, page_size=4)
    prompts = [turn(30, seed=i) for i in range(3)]  # 32 pages each
    engine.cache.pool.limit = 2 * 11 + 32  # two sequences at their budgets and a prompt
    counts = passes_of(engine, monkeypatch)
    together([engine.session() for _ in prompts], prompts)
    assert counts == [30, 30, 30]
    engine.trim()
    engine.cache.pool.limit = 5
    with pytest.raises(BudgetError):
        together([engine.session()], [turn(20)])


def test_one_prompt_fits_where_it_does_alone(folders: dict[str, Path]) -> None:
    """With a page that is begun in every row, and no page more than the bound."""
    engine = load(folders["vl"], prefill_chunk=CHUNK, budget=40, page_size=16)
    session = engine.session()
    session.prefill(turn(4))
    engine.trim()
    pool = engine.cache.pool
    bound = page_bound(engine, session.budget, 25, 0, session.extent)
    pool.limit = bound.steady + bound.chunk
    together([session], [turn(25)])
    assert pool.num_pages <= pool.limit


def test_the_pool_grows_under_the_lock(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folders["vl"], prefill_chunk=CHUNK, page_size=4)
    grow, held = engine.cache.pool.grow, []

    def watched(pages: int) -> None:
        held.append(engine.lock._lock._is_owned())  # type: ignore[attr-defined]
        grow(pages)

    monkeypatch.setattr(engine.cache.pool, "grow", watched)
    together([engine.session() for _ in range(3)], [turn(5), turn(40), turn(7)])
    assert held and all(held)
