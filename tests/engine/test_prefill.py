"""A prompt read chunk by chunk: the same bits as at once, taken back whole, within its bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.bench.shapes import SHAPES, build_engine
from mmkv.engine.budget import Budget
from mmkv.engine.budgets import page_bound
from mmkv.engine.errors import BudgetError, InputError, PolicyError, SessionError
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.runtime import Runtime
from tests.support.factories import checkpoint, make_turn
from tests.support.host_reads import HostReads
from tests.support.policies import KINDS
from tests.support.sessions import PICTURES, TEXT_IDS, assert_same_rows, load, run, text_ids, turn
from tests.support.tiers import one_in, slow_but

POLICIES = slow_but(("dbtrimkv", "snapkv", "full"), KINDS, "the other kinds of policies")
LONG = turn(9, ("image", 24, 16), 25, seed=7)


def test_a_chunk_length_of_its_own(folders: dict[str, Path]) -> None:
    engine, other = load(folders["vl"]), load(folders["vl"], prefill_chunk=5)
    session, reference = engine.session(), other.session()
    prefill = session.begin_prefill(LONG, chunk=5)
    while not prefill.advance():
        pass
    assert prefill.logits is not None and torch.equal(prefill.logits, reference.prefill(LONG))
    assert_same_rows(session, reference)


def test_no_chunk_ends_in_a_picture_that_is_seen_whole() -> None:
    """Gemma's pictures, each of 4 tokens: chunks of any length make the same of a prompt."""
    inputs = make_turn("gemma3", [5, ("image", 16, 16), 2, ("image", 16, 16), 9])
    engine = load(checkpoint("gemma3"), policy="full", prefill_chunk=1)
    assert engine.prefill_chunk == 4
    tokens = inputs["input_ids"].shape[1]
    wanted = engine.session().begin_prefill(inputs, tokens)
    assert wanted.advance() and wanted.logits is not None
    inside = {at for first in (6, 14) for at in range(first + 1, first + 4)}
    for chunk in [*range(1, 13), tokens - 1]:
        prefill, ends = engine.session().begin_prefill(inputs, chunk), set[int]()
        while not prefill.advance():
            ends.add(prefill.done)
        assert ends and not ends & inside
        assert prefill.logits is not None
        difference = (prefill.logits - wanted.logits).abs().max()
        assert difference <= 1e-5 * wanted.logits.abs().max()
    with pytest.raises(InputError, match="cannot be cut in two"):
        engine.turn(inputs, 0).part(0, 8)
    session = engine.session()
    pixels, picture = inputs["pixel_values"][:1], inputs["input_ids"][:, 6:10]
    session.prefill({"input_ids": picture, "pixel_values": pixels})
    before = session.state()
    with pytest.raises(InputError, match="sees such a pair as one"):
        session.prefill({"input_ids": picture, "pixel_values": pixels})
    assert session.state() == before
    with pytest.raises(PolicyError, match="write gates"):
        load(checkpoint("gemma3"), policy="wgkv", gates="random")


def test_no_layer_of_a_chunk_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many reads with five layers as with two; counted on a CPU, in torch."""
    monkeypatch.setenv("MMKV_NATIVE", "0")
    found = []
    for layers in (2, 5):
        shape = replace(SHAPES["tiny"], layers=layers, vocab=TEXT_IDS)
        engine = build_engine(shape, "dbtrimkv", 400, dtype=torch.float32, prefill_chunk=30)
        with HostReads() as reads:
            engine.session().prefill({"input_ids": text_ids(30, seed=0)[None]})
        found.append(reads.found)
    assert found[0] == found[1] and found[0]


def test_what_cannot_be_taken_back_says_so(engine: Runtime) -> None:
    session = engine.session()
    with pytest.raises(InputError, match="empty"):
        session.begin_prefill({"input_ids": torch.empty(1, 0, dtype=torch.int64)})
    prefill = session.begin_prefill(LONG)
    prefill.advance()
    session.decode(5)
    with pytest.raises(SessionError, match="take the prompt back"):
        prefill.advance()
    prefill.roll_back()
    assert session.seen == 0
    whole = session.begin_prefill(turn(5))
    assert whole.advance() and whole.advance()
    with pytest.raises(SessionError, match="cannot be taken back"):
        whole.roll_back()
    kept = session.begin_prefill(LONG, undoable=False)
    kept.advance()
    with pytest.raises(SessionError, match="cannot be taken back"):
        kept.roll_back()


@one_in(3)
@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        *((policy, Budget.of(14.3)) for policy in KINDS),
        *((policy, Budget.bytes(60_000)) for policy in ("dbtrimkv", "snapkv", "epikv")),
        *((policy, Budget.fraction(0.4)) for policy in ("dbtrimkv", "snapkv", "epikv")),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_a_pool_of_the_bound_is_enough(
    policy: str, budget: Budget, folders: dict[str, Path]
) -> None:
    """The pool refuses every page above the bound, so none is ever asked for."""
    engine = load(folders["vl"], policy=policy, budget=budget, evict_every=3, page_size=4)
    pool = engine.cache.pool
    lasting = engine.budgets.lasting_pages(budget)
    with engine.session() as session:
        asked = ((PICTURES, 9, None), (LONG, 30, 20), (turn(2), 1, None))
        for at, (prompt, steps, chunk) in enumerate(asked):
            tokens = prompt["input_ids"].numel()
            bound = page_bound(engine, budget, tokens, steps, session.extent, chunk)
            if lasting is not None:
                assert bound.steady <= lasting
            pool.limit = bound.steady + bound.chunk
            prefill = session.begin_prefill(prompt, chunk, undoable=False)
            while not prefill.advance():
                assert engine.cache.held_pages(session.seq) <= bound.steady
            pool.limit = bound.steady
            if pool.num_pages > bound.steady:
                engine.trim()
            run(session, text_ids(steps, at))
            assert engine.cache.held_pages(session.seq) <= bound.steady
            engine.trim()


def test_one_page_less_than_the_bound_can_be_too_few(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy="full", page_size=4)
    bound = page_bound(engine, engine.budget, 9)  # 4 rows of 3 pages, the last with one entry
    assert (bound.steady, bound.chunk) == (12, 0)
    engine.cache.pool.limit = 11
    with pytest.raises(BudgetError):
        engine.session().prefill(turn(9))
    engine.cache.pool.limit = 12
    assert engine.session().prefill(turn(9)) is not None


def test_what_a_chunk_leaves_on_the_heap_is_given_back(
    engine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither that nor an MLP in blocks of tokens changes the result."""
    prompt = {"input_ids": torch.arange(3, 27)[None]}
    with engine.session() as session:
        wanted = session.prefill(prompt)
    given: list[int] = []
    monkeypatch.setattr("mmkv.engine.prefill.give_back", lambda: given.append(1))
    monkeypatch.setattr("mmkv.engine.prefill.MANY_TOKENS", 8)
    monkeypatch.setattr("mmkv.engine.model.decoder._MLP_TOKENS", 5)
    with engine.session() as session:
        torch.testing.assert_close(session.prefill(prompt), wanted)
        chunks = len(given)
        session.prefill({"input_ids": torch.tensor([[3, 4, 5]])})
    assert chunks > 0 and len(given) == chunks, "a short prompt leaves little"


# What cuts work into blocks, by module, and a size that cuts every call of a small model.
BLOCKS = {
    "backends.torch.attention._BLOCK_ELEMENTS": 1,
    "backends.torch.attention._QUERY_ELEMENTS": 1,
    "backends.torch.attention._QUERIES": 3,
    "backends.cpu.decoder._NOTED_STEPS": 3,
    "backends.cpu.evictor._MOST_SHARES": 1,
    "compaction._AT_ONCE": 5,
    "model.decoder._MLP_TOKENS": 5,
    "policies.attention._BLOCK_ELEMENTS": 1,
    "risk._WAITING": 3,
    "scorer_state._MASS_BLOCK_ELEMENTS": 1,
    "trace._BLOCK": 1100,  # room for all that one step in C may drop
    "trace._MOST_WAITING": 3,
}


@one_in(2)
@pytest.mark.parametrize(
    ("policy", "native"),
    [
        ("dbtrimkv", True),
        ("dbtrimkv", False),
        ("expected-attention:window=8,sinks=1", False),
        ("h2o", False),
        ("criticalkv:window=4", False),
        ("rkv:window=4", False),
    ],
)
def test_blocks_of_any_size_come_to_the_same(
    policy: str, native: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and a reply past the model's context, recorded."""
    made = []
    for lowered in (False, True):
        for name, size in BLOCKS.items() if lowered else ():
            monkeypatch.setattr(f"mmkv.engine.{name}", size)
        engine = load(folders["text"], policy=policy, budget=9, prefill_chunk=20)
        if not native:
            engine.backends.cpu.switch_off()
        session = engine.session()
        recorder = session.record()
        logits = [session.prefill(turn(25, seed=1)), run(session, text_ids(30, 2))]
        logits += [session.prefill(turn(22, seed=3)), run(session, text_ids(9, 4))]
        record = recorder.read(session)
        deaths = sorted(zip(*(record.deaths[n].tolist() for n in ("row", "position")), strict=True))
        rows = [row.tolist() for layer in session.retained() for row in layer]
        made.append((torch.cat([x.flatten() for x in logits]), rows, deaths, session.memory()))
    (wanted, *told), (found, *same) = made
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert same == told and session.compactions


def test_blocks_of_tokens_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place where nothing is trained; else so that gradients reach every token."""
    monkeypatch.setattr("mmkv.engine.model.decoder._MLP_TOKENS", 5)
    x, y = torch.randn(12, 3, requires_grad=True), torch.randn(12, 2, 3)

    def call(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * x[:, None]

    with torch.inference_mode():
        quick = Decoder._in_blocks(call, x, y)
    slow = Decoder._in_blocks(call, x, y)
    for one, two, wanted in zip(quick, slow, call(x, y), strict=True):
        assert torch.equal(one, wanted) and torch.equal(two, wanted)
    slow[1].sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, y.sum(1))
