"""Lossless decoding beside the full cache: the same logits, in C bit for bit; what drafts read."""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.base import Batch
from mmkv.engine.budgets import page_bound
from mmkv.engine.cache import COLUMNS
from mmkv.engine.drafts import MOST_DRAFTED, HitRate, Pace
from mmkv.engine.errors import BudgetError, InputError, PolicyError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.engine.backends.test_native import IN_FORMS
from tests.engine.test_oracle import text_of
from tests.support.factories import checkpoint
from tests.support.native import MODELS, engine_for, needs_native, prompt
from tests.support.policies import EVICTING, EVICTING_KINDS
from tests.support.sessions import load, text_ids, turn
from tests.support.tiers import long_but, one_in

STATELESS = [model for model in MODELS if not model.startswith("qwen3_5")]


@pytest.fixture(autouse=True)
def any_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft what chance says: on models as small as these it never pays."""
    drawn = random.Random(5)
    monkeypatch.setattr(Pace, "choose", lambda *_: drawn.randint(0, MOST_DRAFTED))


@functools.cache
def engines(model: str, policy: str = "dbtrimkv", **options: Any) -> tuple[Runtime, Runtime]:
    """One that is lossless, and one with the full cache."""
    own = {"budget": 6, **options}
    return engine_for(model, policy, lossless=True, **own), engine_for(model, "full", **options)


class Knowing:
    """Guesses what a session with the full cache would say behind a token; now and then wrongly.

    On models as random as these the drafts' own guesses are hardly ever right.
    """

    def __init__(self, session: CachedSequence, token: int, drawn: random.Random) -> None:
        self._fork, self._token, self._drawn = session.fork(), token, drawn

    def __call__(self, logits: Tensor) -> int:
        assert logits.shape == (self._fork.engine.spec.vocab_size,) and logits.isfinite().all()
        self._token = int(self._fork.decode(self._token).argmax())
        return self._token if self._drawn.random() < 0.9 else self._drawn.randrange(3, 90)


def step(
    ours: Sequence[CachedSequence],
    theirs: Sequence[CachedSequence],
    said: Sequence[int],
    drawn: random.Random,
) -> tuple[Tensor, Tensor]:
    """Decode a token in each of some sessions, and in the same with the full cache."""
    guesses = [Knowing(one, token, drawn) for one, token in zip(theirs, said, strict=True)]
    found = ours[0].engine.decode(ours, said, guesses)
    for guess in guesses:
        guess._fork.close()
    return found, theirs[0].engine.decode(theirs, said)


def talk(
    sessions: tuple[CachedSequence, CachedSequence],
    model: str,
    check: Callable[[Tensor, Tensor], None],
    tokens: int = 16,
) -> None:
    """Lead two sessions through two turns: likely tokens, and others that nobody would draft."""
    drawn = random.Random(tokens)
    for seed in range(2):
        found = tuple(session.prefill(prompt(model, seed)) for session in sessions)
        # Where a policy reads the last layer, that is computed for all tokens in one product.
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
        for _ in range(tokens):
            token = int(found[1].argmax()) if drawn.random() < 0.9 else drawn.randrange(3, 90)
            found = step(sessions[:1], sessions[1:], [token], drawn)
            check(*found)
            found = found[0][0], found[1][0]
    assert sessions[0].seen == sessions[1].seen
    assert sessions[0].retained()[0][0].tolist() == list(range(sessions[0].seen))


def same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs)


@needs_native
@pytest.mark.parametrize("model", STATELESS)
def test_logits_are_those_of_the_full_cache(model: str) -> None:
    lossless, full = engines(model)
    with lossless.session() as ours, full.session() as theirs:
        talk((ours, theirs), model, same_bits)
        assert ours.ahead is not None and ours.ahead.accepted > 0
        assert ours.ahead.drafted > ours.ahead.accepted
        pages = ours.memory().pages, theirs.memory().pages
        assert pages[0] == pages[1]  # no entry is stored twice
    assert lossless.cache.pool.free_pages == lossless.cache.pool.num_pages
    lossless.cache.check()


@one_in(3)
@needs_native
@pytest.mark.parametrize("policy", EVICTING)
def test_every_policy_that_evicts_may_draft(policy: str) -> None:
    lossless, full = engines("qwen3_vl", text_of(policy))
    with lossless.session() as ours, full.session() as theirs:
        talk((ours, theirs), "qwen3_vl", same_bits)
        assert ours.ahead is not None and ours.ahead.drafted > 0
    lossless.cache.check()


@needs_native
@pytest.mark.parametrize(("model", "policy", "kv"), IN_FORMS)
def test_in_fewer_bits(model: str, policy: str, kv: str) -> None:
    lossless, full = engines(model, policy, kv=kv, page_size=24 if kv == "int4" else 8)
    with lossless.session() as ours, full.session() as theirs:
        talk((ours, theirs), model, same_bits)


@one_in(2)
@pytest.mark.parametrize("policy", EVICTING_KINDS)
def test_on_torch_they_are_close(policy: str) -> None:
    lossless, full = (
        engine_for("qwen3_vl", text_of(name), budget=6, lossless=name == policy)
        for name in (policy, "full")
    )
    for engine in (lossless, full):
        engine.backends.cpu.switch_off()

    def close(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    with lossless.session() as ours, full.session() as theirs:
        talk((ours, theirs), "qwen3_vl", close)
        assert ours.ahead is not None and ours.ahead.accepted > 0


@needs_native
@pytest.mark.parametrize(
    ("model", "kv", "page_size"),
    [
        *long_but(
            [("qwen3_vl", "auto", 8), ("odd", "k8v4", 8), ("gemma3_text", "auto", 1)],
            itertools.product(("qwen3_vl", "odd", "gemma3_text"), ("auto", "k8v4"), (1, 8)),
            "the other pairs",
        ),
        ("qwen2_sliding", "auto", 32),
        ("phi3_long", "int8", 16),
    ],
)
def test_tokens_of_one_sequence_in_a_step_are_computed_as_alone(
    model: str, kv: str, page_size: int
) -> None:
    """Every column of the cache, too; beside another sequence, so that runs begin anywhere.

    A stretch of 256 entries, which attention reads together, ends among the tokens.
    """
    policy = "h2o" if model == "qwen3_vl" else "dbtrimkv"  # sums of attention, or gates
    engine = engine_for(model, policy, budget=500, kv=kv, page_size=page_size)
    together, alone, beside = (engine.session() for _ in range(3))
    for session in (together, alone, beside):
        session.prefill(prompt(model))
        session.prefill({"input_ids": text_ids(254 - session.seen, 4)[None]})
    tokens = text_ids(5, 3).tolist()
    said = [*tokens, 9]
    columns = [(together, i) for i in range(len(tokens))] + [(beside, 0)]
    batch = Batch(
        [one.seq for one, _ in columns],
        [one.seen + i for one, i in columns],
        [one.next_position + i for one, i in columns],
        [bool(one.long_rope) for one, _ in columns],
        *([[0] * 6] * 3),
        said,
    )
    native = engine.backends.cpu.decoder
    found = native.step(engine.cache, batch)
    wanted = [alone.decode(token) for token in tokens]
    assert torch.equal(found[:5], torch.stack(wanted))
    mine, theirs = (engine.cache.export(one.seq) for one in (together, alone))
    for name in ("length", *COLUMNS):
        assert torch.equal(*(x[name].view(torch.uint8) for x in (mine, theirs))), name
    with alone.fork() as last:
        assert last.seen == together.seen + 5
    together.seen += 5  # which the backend does not know
    for session in (together, alone, beside):
        session.close()


@needs_native
@pytest.mark.parametrize("policy", ["dbtrimkv", "trimkv", "keydiff", "streamingllm"])
def test_drafts_read_what_the_policy_would_have_kept(policy: str) -> None:
    """A prompt of one chunk is read with all of it in any case: sets and tokens are comparable."""
    options: dict[str, Any] = {"budget": 6, "prefill_chunk": 64, "evict_every": 50}
    lossless = engine_for("qwen3_vl", policy, lossless=True, **options)
    bounded = engine_for("qwen3_vl", policy, **options)
    with lossless.session() as ours, bounded.session() as theirs:
        for session in (ours, theirs):
            logits = session.prefill(prompt("qwen3_vl"))
        chosen = ours.ahead.chosen if ours.ahead else None
        assert chosen is not None
        kept = [row.tolist() for layer in theirs.retained() for row in layer]
        assert [sorted(row.tolist()) for row in chosen.offset.split(chosen.count.tolist())] == kept
        first = int(logits.argmax())
        with torch.inference_mode():
            drafted = lossless.drafts._draft([ours], [first], [6], None)[0]
        assert drafted == bounded.decode_many([theirs], [first], 6)[0]


OPERATIONS = ("decode", "likely", "likely", "likely", "prefill", "fork", "cut", "save", "forget")


@needs_native
@pytest.mark.parametrize("seed", range(4))
def test_sessions_under_any_calls(seed: int, tmp_path: Path) -> None:
    """Beside sessions with the full cache that get the same calls, several in a batch."""
    drawn, check = random.Random(seed), same_bits
    policy = ("dbtrimkv", "snapkv", "h2o", "dbtrimkv")[seed]
    lossless, full = engines("qwen3_vl", policy)
    pairs = [(lossless.session(), full.session()) for _ in range(3)]
    logits = [torch.zeros(90)] * 3
    places: list[list[tuple[int, int, int]]] = [[] for _ in pairs]
    for index, pair in enumerate(pairs):
        logits[index] = [one.prefill(turn(9 + 7 * index, seed=index)) for one in pair][1]
    for _ in range(60):
        what, index = drawn.choice(OPERATIONS), drawn.randrange(3)
        ours, theirs = pairs[index]
        if what in ("decode", "likely"):
            many = drawn.sample(range(3), drawn.randint(1, 3))
            likely = what == "likely"
            said = [int(logits[i].argmax()) if likely else drawn.randrange(9, 90) for i in many]
            made = step(*([pairs[i][side] for i in many] for side in (0, 1)), said, drawn)
            check(*made)
            for i, row in zip(many, made[1], strict=True):
                logits[i] = row
        elif what == "prefill":
            pieces = ((5,), (2, ("image", 16, 24), 3))[drawn.randrange(2)]
            places[index].append((theirs.seen, theirs.next_position, theirs.prompt_tokens))
            inputs = turn(*pieces, seed=drawn.randrange(9))
            made = [one.prefill(inputs) for one in pairs[index]]
            logits[index] = made[1]
            check(*made)
        elif what == "fork":
            pairs[index] = ours.fork(), theirs.fork()
            ours.close(), theirs.close()
        elif what == "cut" and places[index]:
            place = places[index].pop()
            ours.cut_back(*place), theirs.cut_back(*place)
            places[index] = [p for p in places[index] if p[0] < place[0]]
        elif what == "save":
            ours.save(tmp_path / "a.safetensors")
            ours.close()
            pairs[index] = lossless.load_session(tmp_path / "a.safetensors")[0], theirs
        elif what == "forget" and drawn.random() < 0.3:
            start = drawn.randrange(theirs.seen)
            assert ours.forget(start, start + 2) == theirs.forget(start, start + 2)
        ours, theirs = pairs[index]
        assert (ours.seen, ours.entries) == (theirs.seen, theirs.entries)
        assert ours.memory().entries == theirs.memory().entries
        lossless.cache.check()
    for pair in pairs:
        for one in pair:
            one.close()
    lossless.cache.check()
    assert lossless.cache.pool.free_pages == lossless.cache.pool.num_pages


@needs_native
def test_a_limit_leaves_room_for_what_is_bounded() -> None:
    """With the pages of the bound drafts never stand in the way, with fewer they are left out."""
    spare = engine_for("qwen3_vl", budget=6, lossless=True)
    inputs = turn(40)
    bound = page_bound(spare, spare.budget, 40, 20)
    need = page_bound(engine_for("qwen3_vl", "full"), spare.budget, 40, 20)
    for pages in (bound.steady, need.steady):
        limit = pages * spare.cache.pool.page_bytes
        options = {"kv_limit": limit, "vision_cache": 0}
        lossless = engine_for("qwen3_vl", budget=6, lossless=True, **options)
        full = engine_for("qwen3_vl", "full")
        with lossless.session() as ours, full.session() as theirs:
            lossless.cache.pool.limit = pages
            if pages == need.steady:
                with pytest.raises(BudgetError):
                    lossless.budgets.reserve(ours, 60, 64)
            found = [one.extend(one.engine.turn(inputs, 0)) for one in (ours, theirs)]
            for _ in range(20):
                token = int(found[1].argmax())
                found = [one.decode(token) for one in (ours, theirs)]
                assert torch.equal(*found)


@needs_native
def test_a_pass_that_fails_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    lossless, full = engines("qwen3_vl")
    with lossless.session() as ours, full.session() as theirs:
        for one in (ours, theirs):
            one.prefill(prompt("qwen3_vl"))
        backend = lossless.backends.cpu

        def fails(*_: Any) -> Tensor:
            lossless.cache.append(torch.tensor([ours.seq]), 3)
            raise RuntimeError("a step that breaks")

        with monkeypatch.context() as patched:
            patched.setattr(backend, "decode", fails)
            with pytest.raises(RuntimeError, match="breaks"):
                ours.decode(5)
        assert ours.memory().entries == theirs.memory().entries
        talk((ours, theirs), "qwen3_vl", same_bits, tokens=6)
    lossless.cache.check()


def with_drafts(model: str = "qwen3_vl", **options: Any) -> tuple[CachedSequence, CachedSequence]:
    """Two sessions as of :func:`engines`, where tokens are cached that the first has not seen."""
    lossless, full = engines(model, **options)
    ours, theirs = lossless.session(), full.session()
    found = tuple(session.prefill(prompt(model)) for session in (ours, theirs))
    get_ahead(ours, theirs, found[1])
    return ours, theirs


def get_ahead(ours: CachedSequence, theirs: CachedSequence, logits: Tensor) -> None:
    """Decode likely tokens until some are cached that a session has not seen."""
    drawn = random.Random(1)
    while ours.ahead is None or len(ours.ahead.tokens) < 3:
        logits = step([ours], [theirs], [int(logits.argmax())], drawn)[1][0]


@needs_native
def test_a_record_begins_with_what_the_session_has_seen() -> None:
    ours, theirs = with_drafts()
    with ours, theirs:
        held = ours.record().read(ours).retained(-1)
        assert held[0][0].tolist() == list(range(theirs.seen))


@needs_native
@pytest.mark.parametrize("read", [0, 21])
def test_a_prompt_that_is_taken_back_takes_drafts_along(read: int) -> None:
    lossless, full = engines("qwen3_vl")
    with lossless.session() as ours, full.session() as theirs:
        begun = []
        for session in (ours, theirs):
            if read:
                session.prefill({"input_ids": text_ids(read, 1)[None]})
            begun.append(session.begin_prefill({"input_ids": text_ids(40, 2)[None]}))
            begun[-1].advance()
        first = [session.decode(5) for session in (ours, theirs)][1]
        get_ahead(ours, theirs, first)
        drafted = ours.ahead.tokens[0] if ours.ahead else 0
        for turn_ in begun:
            turn_.roll_back()
        lossless.cache.check()
        assert ours.memory().entries == theirs.memory().entries
        assert read == 0 or torch.equal(ours.decode(drafted), theirs.decode(drafted))
        talk((ours, theirs), "qwen3_vl", same_bits, tokens=6)
    lossless.cache.check()


@needs_native
def test_drafts_hold_no_memory_that_the_pool_has_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[np.ndarray]] = []  # what columns lie in that have grown
    plain = np.zeros

    def zeros(*of: Any, **named: Any) -> np.ndarray:
        array = plain(*of, **named)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(np, "zeros", zeros)
    ours, theirs = with_drafts(prefill_chunk=15)
    with ours, theirs:
        assert any(array() is not None for array in made)
        for session in (ours, theirs):
            session.engine.trim()
        assert all(array() is None for array in made)
        assert ours.engine.drafts is not None and not ours.engine.drafts._rows.table.numel()


@needs_native
def test_a_guess_may_ask_for_steps_of_other_sessions() -> None:
    lossless, full = engines("qwen3_vl")
    with lossless.session() as ours, full.session() as theirs, lossless.session() as other:
        for session in (ours, theirs, other):
            session.prefill(prompt("qwen3_vl"))

        def guess(_: Tensor) -> int:
            return int(other.decode(5).argmax())

        for token in range(5, 13):
            same_bits(lossless.decode([ours], [token], [guess])[0], theirs.decode(token))


@needs_native
def test_a_guess_may_give_memory_back() -> None:
    lossless, full = engines("qwen3_vl")
    with lossless.session() as ours, full.session() as theirs:
        given_back = []

        def guess(logits: Tensor) -> int:
            given_back.append(lossless.trim())
            return int(logits.argmax())

        for token in range(5, 13):
            with lossless.session() as other:  # its pages are free then
                other.prefill(prompt("qwen3_vl"))
            if token == 5:
                for session in (ours, theirs):
                    session.prefill(prompt("qwen3_vl"))
            same_bits(lossless.decode([ours], [token], [guess])[0], theirs.decode(token))
        lossless.cache.check()
    assert any(given_back)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
def test_a_draft_whose_numbers_break_reaches_no_reply(native: bool) -> None:
    lossless, full = (
        engine_for("phi3", policy, budget=6, lossless=policy != "full")
        for policy in ("dbtrimkv", "full")
    )
    broken = lossless.decoder.weights.embed[77]
    kept = broken.clone()
    with lossless.session() as ours, full.session() as theirs:
        for session in (ours, theirs):
            if not native:
                session.engine.backends.cpu.switch_off()
            session.prefill({"input_ids": text_ids(21, 3)[None] % 70})
        try:
            broken.fill_(torch.nan)
            for token in range(5, 13):
                found = lossless.decode([ours], [token], [lambda _: 77])[0]
                torch.testing.assert_close(found, theirs.decode(token), rtol=1e-4, atol=1e-5)
        finally:
            broken.copy_(kept)
        assert ours.ahead is not None and (ours.ahead.drafted > 0) == native


@needs_native
@pytest.mark.parametrize("token", [-1, 10**4])
def test_a_guess_that_is_no_token_is_none(token: int) -> None:
    lossless, full = engines("qwen3")
    with lossless.session() as ours, full.session() as theirs:
        for session in (ours, theirs):
            session.prefill(prompt("qwen3"))
        for said in range(5, 11):
            same_bits(lossless.decode([ours], [said], [lambda _: token])[0], theirs.decode(said))
            assert ours.ahead is not None and not ours.ahead.drafted


@needs_native
@pytest.mark.parametrize("both", [False, True])
def test_what_nobody_has_seen_takes_no_page_that_a_token_needs(both: bool) -> None:
    """Of a session beside the one that needs it, which is decoded in the same step or not."""
    options: dict[str, Any] = {"page_size": 1, "kv_limit": 2**24, "vision_cache": 0}
    lossless = engine_for("qwen3_vl", budget=6, lossless=True, **options)
    full = engine_for("qwen3_vl", "full", **options)
    ours, theirs = ([engine.session() for _ in range(2)] for engine in (lossless, full))
    for one in (*ours, *theirs):
        logits = one.prefill(prompt("qwen3_vl"))
    get_ahead(ours[0], theirs[0], logits)
    lossless.trim()
    pool = lossless.cache.pool
    pool.limit = pool.num_pages
    assert ours[0].ahead is not None
    tokens = [ours[0].ahead.tokens[0], 5] if both else [5]
    found = (e.decode(own[-len(tokens) :], tokens) for e, own in ((lossless, ours), (full, theirs)))
    same_bits(*found)
    assert [one.seen for one in ours] == [one.seen for one in theirs]
    assert [one.memory().entries for one in ours] == [one.memory().entries for one in theirs]
    lossless.cache.check()
    for one in (*ours, *theirs):
        one.close()


@needs_native
def test_a_burst_begins_with_what_is_known() -> None:
    ours, theirs = with_drafts()
    with ours, theirs:
        assert ours.ahead is not None
        token, before = ours.ahead.tokens[0], ours.ahead.accepted
        said = [one.engine.decode_many([one], [token], 1) for one in (ours, theirs)]
        assert said[0] == said[1] and ours.ahead.accepted == before + 1


def test_what_a_pass_on_torch_has_appended_goes_when_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks take their pages session after session, so that the first may have its own."""
    lossless, full = (
        engine_for("qwen3_vl", budget=6, lossless=True, page_size=1),
        engine_for("qwen3_vl", "full", page_size=1),
    )
    sessions = [[engine.session() for _ in range(2)] for engine in (lossless, full)]
    for engine, own in zip((lossless, full), sessions, strict=True):
        engine.backends.cpu.switch_off()
        for session in own:
            session.prefill(prompt("qwen3_vl"))
    monkeypatch.setattr(Pace, "choose", lambda *_: 6)
    pool = lossless.cache.pool
    pool.limit = pool.num_pages - pool.free_pages + 13 * lossless.spec.rows
    for token in (5, 6, 7):
        found = [
            engine.decode(own, [token, token])
            for engine, own in zip((lossless, full), sessions, strict=True)
        ]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        assert [one.memory().entries for one in sessions[0]] == [
            one.memory().entries for one in sessions[1]
        ]
    for session in itertools.chain(*sessions):
        session.close()


@needs_native
def test_the_context_ends_where_the_full_caches_does() -> None:
    small = load(checkpoint("qwen3"), lossless=True, budget=4)
    small.spec.__dict__["max_position"] = 40
    session = small.session()
    try:
        session.prefill({"input_ids": text_ids(30, 1)[None]})
        for _ in range(10):
            session.decode(int(text_ids(1, session.seen)))
        assert session.seen == 40 and not session.has_room
    finally:
        small.spec.__dict__["max_position"] = 128
        session.close()


@needs_native
def test_nothing_is_drafted_that_has_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that was begun with Phi-3's short factors ends where these do."""
    monkeypatch.setattr(Pace, "choose", lambda *_: MOST_DRAFTED)
    lossless = engine_for("phi3_long", budget=3, lossless=True)
    switch = lossless.spec.rope.switch_at
    assert switch is not None
    with lossless.session() as session:
        session.prefill({"input_ids": text_ids(switch - 4, 1)[None]})
        session.decode(5)
        assert session.ahead is not None and session.ahead.drafted == 3


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        ("full", {}, "'full' evicts nothing, so that drafts would read as much"),
        ("wgkv", {}, "has write gates"),
        ("fastv", {}, "has a pruner"),
        ("dbtrimkv", {"budget": None, "budget_max": 20, "risk": 0.1}, "there is no risk"),
    ],
)
def test_what_cannot_draft_is_refused(policy: str, options: dict[str, Any], says: str) -> None:
    made = {"gates": None} if policy == "wgkv" else {}
    with pytest.raises((PolicyError, InputError), match=says):
        engine_for("qwen3_vl", policy, lossless=True, **made, **options)


def test_linear_layers_are_refused() -> None:
    with pytest.raises(PolicyError, match="linear layers cannot; leave lossless out"):
        engine_for("qwen3_5", lossless=True)


def test_sessions_share_no_budget() -> None:
    engine = engine_for("qwen3_vl", lossless=True)
    with pytest.raises(PolicyError, match="share no budget"):
        engine.share(8)


def paced(draft: float, single: float, more: float) -> Pace:
    pace = Pace()
    for _ in range(3):
        pace.note(0, 0.0, single)
        pace.note(4, 4 * draft, single + 4 * more)
    return pace


CHOOSE = Pace.choose  # as it was before the fixture


@pytest.mark.parametrize(
    ("draft", "single", "more", "rate", "best"),
    [
        (6.0, 50.0, 5.0, 0.98, 16),
        (6.0, 50.0, 5.0, 0.5, 1),
        (20.0, 25.0, 5.0, 0.9, 0),  # a draft costs nearly as much as a step
        (6.0, 50.0, 50.0, 0.98, 0),  # nothing is gained by a pass of several
        (6.0, 50.0, 5.0, 0.05, 0),
    ],
)
def test_as_many_drafts_as_pay(
    draft: float, single: float, more: float, rate: float, best: int
) -> None:
    """Beside the expected seconds a token of every number, by summing up what may happen."""
    found = CHOOSE(paced(draft, single, more), rate)

    def seconds(count: int) -> float:
        tokens = sum(rate**at for at in range(count + 1))
        return (count * draft + single + count * more) / tokens

    least = min(range(MOST_DRAFTED + 1), key=seconds)
    assert found == best
    assert seconds(found) <= 1.03 * seconds(least)


def test_what_is_not_done_is_looked_at_again() -> None:
    drafting, single = paced(6, 50, 5), paced(20, 25, 5)
    chosen = [CHOOSE(drafting, 0.98) for _ in range(80)]
    assert chosen[:16].count(0) == 0 and 0 in chosen
    chosen = [CHOOSE(single, 0.9) for _ in range(16 + 32 + 64 + 3)]
    looked = [at for at, count in enumerate(chosen) if count]
    assert looked == [16, 16 + 33, 16 + 33 + 65]  # ever more seldom


@needs_native
def test_nothing_is_chosen_while_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose costs as much as a part of a step; later, drafts read as much as ever."""
    lossless, _ = engines("qwen3_vl")
    drafts, count = lossless.drafts, 0
    assert drafts is not None
    monkeypatch.setattr(Pace, "choose", lambda *_: count)
    with lossless.session() as ours:
        ours.prefill(prompt("qwen3_vl"))
        assert ours.ahead is not None and ours.ahead.chosen is not None
        before = ours.ahead.chosen
        for token in range(5, 25):
            ours.decode(token)
        assert ours.ahead.chosen is before
        count = 1
        ours.decode(9)
        assert ours.ahead.chosen.seen == ours.seen - 1
        assert ours.ahead.chosen.offset.numel() == ours.allowed_entries


def test_longer_sessions_begin_with_what_shorter_ones_measured() -> None:
    drafts = engine_for("qwen3_vl", lossless=True).drafts
    assert drafts is not None
    short = drafts._pace(2, 7)
    assert CHOOSE(short, 0.98) == 0  # nothing is known
    drafts._paces[2, 7] = paced(6, 50, 5)
    assert CHOOSE(drafts._pace(2, 8), 0.98) == 16 and CHOOSE(drafts._pace(3, 8), 0.98) == 0
    drafts._pace(2, 8).note(0, 0.0, 1.0)
    assert len(drafts._pace(2, 7)._single) == 3 < len(drafts._pace(2, 8)._single)


def test_the_rate_follows_the_latest() -> None:
    rate = HitRate()
    for _ in range(200):
        rate.note(True)
    assert rate.value > 0.99
    for _ in range(40):
        rate.note(False)
    assert rate.value < 0.35
