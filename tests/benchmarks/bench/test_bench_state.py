"""Random models in published sizes and synthetic sessions, which the timings depend on."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from benchmarks.bench.harness import take_turns, time_calls
from benchmarks.bench.methods import (
    Own,
    Undo,
    gate_bytes,
    own_bytes,
    pages_for,
    rewind,
    row_lengths,
    split,
    synthetic_sessions,
    without,
)
from benchmarks.bench.shapes import SHAPES, build_engine, build_model
from mmkv.engine.backends.base import Burst
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda import static_step as static_step
from mmkv.engine.budgets import batch_of
from mmkv.engine.model.families.config import read_config
from mmkv.engine.runtime import Runtime
from mmkv.eval import step
from tests.support.factories import checkpoint
from tests.support.kernels import DEVICE

TINY = SHAPES["tiny"]
# float32; the engine keeps the gains of q and k once per head.
WEIGHTS = 4 * (TINY.parameters + TINY.layers * (TINY.heads + TINY.kv_heads - 2) * TINY.head_dim)


def tiny(policy: str = "dbtrimkv", budget: float = 12, **settings):
    made = build_engine(TINY, policy, budget, DEVICE, torch.float32, **settings)
    made.backends.cpu.switch_off()
    return made


# As the model cards state them (LLaVA-1.5: its language model with 64 more tokens than Vicuna).
@pytest.mark.parametrize(
    ("name", "parameters", "token_bytes"),
    [
        ("qwen3-4b", 4_022_468_096, 147_456),
        ("qwen3-vl-4b", 4_022_468_096, 147_456),
        ("qwen3-vl-8b", 8_190_735_360, 147_456),
        ("llava-1.5-7b", 6_738_415_616 + 2 * 64 * 4096, 524_288),
    ],
)
def test_shapes_have_the_published_sizes(name: str, parameters: int, token_bytes: int) -> None:
    assert SHAPES[name].parameters == parameters
    assert SHAPES[name].kv_token_bytes() == token_bytes


def test_the_engine_is_the_transformers_model_of_the_same_seed() -> None:
    model = build_model(TINY, DEVICE, torch.float32)
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters
    ids = torch.arange(3, 40)[None]
    engine = tiny("full")
    with torch.inference_mode():
        want = model(input_ids=ids.to(DEVICE)).logits[0, -1]
    got = engine.session().prefill({"input_ids": ids})
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    sharing = build_engine(TINY, "dbtrimkv", 9, DEVICE, torch.float32, weights_of=engine)
    assert sharing.decoder.weights is engine.decoder.weights
    assert sharing.decoder.gates is not None and engine.decoder.gates is None


@pytest.mark.parametrize("skew", [1.0, 4.0, 10.0, 500.0])
@pytest.mark.parametrize(("rows", "total", "longest"), [(288, 73728, 4096), (7, 20, 20), (4, 0, 9)])
def test_row_lengths(rows: int, total: int, longest: int, skew: float) -> None:
    length = row_lengths(rows, total, longest, skew)
    assert length.sum() == total and length.min() >= 0 and length.max() <= longest
    if (rows, skew) == (288, 10.0):
        assert 9 < int(length.max()) / (total / rows) < 11
    if skew == 1.0:
        assert length.max() - length.min() <= 1


def test_row_lengths_refuse_what_cannot_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        row_lengths(4, 41, 10)


@pytest.mark.parametrize("policy", ["dbtrimkv", "full"])
def test_synthetic_sessions_decode_as_real_ones(policy: str) -> None:
    engine = tiny(policy)
    sessions = synthetic_sessions(engine, 3, 50, 3.0, 5)
    pages = engine.cache.pool.num_pages
    each = (12 if policy == "dbtrimkv" else 50) * TINY.rows
    for session in sessions:
        assert session.memory().entries == session.entries == each
        for row in (row for layer in session.retained() for row in layer):
            assert row.numel() == row.unique().numel() and (row < 50).all()
    if policy == "dbtrimkv":
        lengths = {int(n) for n in engine.cache.length.flatten()}
        assert len(lengths) > 3, "rows should be uneven"
    before = engine.cache.length.clone()
    for _ in range(5):
        logits = engine.decode(sessions, [1, 2, 3])
        assert logits.isfinite().all()
    assert engine.cache.pool.num_pages == pages, "room for the steps was set aside"
    engine.cache.check()
    if policy == "full":
        for session in sessions:
            rewind(session, 50)
        assert torch.equal(engine.cache.length, before)
        assert [s.entries for s in sessions] == [each] * 3
        assert sessions[0].retained()[0][0].tolist() == list(range(50))
        engine.cache.check()


def test_the_floor_counts_what_a_step_reads() -> None:
    engine = tiny(budget=10)
    sessions = synthetic_sessions(engine, 2, 30)
    size = step.step_bytes(engine, sessions)
    assert size.weights == WEIGHTS  # tied: the head is the embedding, once
    assert size.kv == 2 * 11 * TINY.rows * 2 * TINY.head_dim * 4
    width = TINY.gate
    trunk = width * (TINY.hidden + width + 2)
    assert gate_bytes(engine) == 4 * TINY.layers * (trunk + TINY.kv_heads * (width + 1))
    assert size.floor(1e9) == (size.weights + size.kv) / 1e9
    untied = dataclasses.replace(TINY, kind="llama", tied=False)
    llava = build_engine(untied, "full", device=DEVICE, dtype=torch.float32)
    embedding = TINY.vocab * TINY.hidden * 4
    assert step.weight_bytes(llava) == llava.decoder.weights.nbytes() - embedding


def test_the_floor_counts_the_experts_that_a_step_can_choose() -> None:
    engine = Runtime.from_pretrained(checkpoint("qwen3_moe"), policy="full", dtype="float32")
    text = read_config(str(checkpoint("qwen3_moe"))).get_text_config()
    expert = 3 * text.moe_intermediate_size * text.hidden_size * 4 * text.num_hidden_layers
    experts, chosen = text.num_experts, text.num_experts_per_tok
    assert 2 * chosen < experts < 3 * chosen
    sizes = [step.weight_bytes(engine, sequences) for sequences in (1, 2, 3)]
    assert sizes[1] - sizes[0] == chosen * expert
    assert sizes[2] - sizes[0] == (experts - chosen) * expert


def test_the_estimate_of_memory_is_an_upper_bound() -> None:
    for policy, budget in (("dbtrimkv", 12), ("full", None)):
        engine = tiny(policy, budget or 1)
        method = Own(engine, 8, 600, 3.0, 8)
        runner = GraphRunner(engine.model, engine.cache)
        method.graph(runner)
        pool = engine.cache.pool
        # What is held and what the steps may take; a pool takes more where memory is free.
        batch = batch_of(method.sessions, method.tokens)
        batch.share = [0] * len(batch.seqs)
        held = engine.cache.needed_pages(engine.cache.length[list(batch.seqs)])
        more, _ = runner._bound(batch, Burst.of(batch), range(8), 8, held)
        pages = pool.num_pages - pool.free_pages + more
        assert pages <= pool.num_pages
        used = pages * pool.page_bytes + engine.cache.table.nbytes
        (step, _), *_ = runner._steps.values()
        if step._eviction is not None:
            used += step._eviction.keys.nbytes + step._eviction.ties.nbytes
        used += engine.decoder.weights.nbytes()
        assert used <= own_bytes(TINY, 8, 600, budget, 8, torch.float32, skew=3.0)
    assert pages_for(3, 4, 16) == 3 and pages_for(100, 4, 16) == 10


@pytest.mark.parametrize("policy", ["dbtrimkv", "full"])
def test_the_parts_of_a_step_add_up_and_leave_the_cache_whole(policy: str) -> None:
    engine = tiny(policy)
    method = Own(engine, 3, 40, 3.0, 6)
    found = split(method, 1e9, 2, 6)
    engine.cache.check()
    entries = (12 if policy == "dbtrimkv" else 40) * TINY.rows
    assert [s.memory().entries for s in method.sessions] == [entries] * 3
    ms = dict(found["ms"])
    floors = ms.pop("weights floor"), ms.pop("KV floor")
    whole = ms.pop("step")
    assert floors[0] == 1e3 * WEIGHTS / 1e9 and sum(ms.values()) == pytest.approx(whole)
    evicts = policy == "dbtrimkv"
    assert ("without eviction" in found["variants"]) == evicts
    assert (ms["eviction"] == 0, ms["gates"] == 0) == (not evicts, not evicts)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a captured step calls no Python function")
@pytest.mark.parametrize(
    ("part", "missing"),
    [
        ("", []),
        ("attention", ["decode_attention"]),
        ("eviction", ["evict"]),
        ("append", ["evict", "make_room", "store_layer"]),
    ],
)
def test_a_part_left_out_is_not_called(part: str, missing: list[str]) -> None:
    names = ["decode_attention", "evict", "make_room", "store_layer"]
    engine = tiny()
    method = Own(engine, 2, 40, 3.0, 4)
    with mock.patch.multiple(
        static_step, **{name: mock.Mock(wraps=getattr(static_step, name)) for name in names}
    ):
        spies = {name: getattr(static_step, name) for name in names}
        undo = Undo(engine)
        undo._make_room = spies["make_room"]
        before = engine.cache.length.clone()
        with without(engine, part, undo):
            method.graph(GraphRunner(engine.model, engine.cache))
        assert [name for name in names if not spies[name].call_count] == sorted(missing)
    if part in ("eviction", "append"):
        assert torch.equal(engine.cache.length, before)
    engine.cache.check()


def test_methods_take_turns() -> None:
    order: list[str] = []

    def method(name: str):
        return lambda: float(order.append(name) or len(order))

    times = take_turns({"a": method("a"), "b": method("b")}, 3)
    assert "".join(order) == "abbaab" and times == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}
    assert step.spread([4.0, 1.0, 2.0, 3.0])["median"] == 2.5


def test_a_copy_is_read_and_written() -> None:
    copies = 8 if DEVICE.type == "cuda" else 1
    with mock.patch.object(step, "wall", side_effect=[9, 0.5, 0.5, 2.0]):
        assert step.copy_bandwidth(DEVICE, 4000, rounds=3) == 2 * 4000 / 0.5 * copies


def test_short_calls_are_repeated() -> None:
    calls = []
    times = time_calls(lambda: calls.append(1), torch.device("cpu"), 3, 1e-3)
    assert len(times) == 3 and len(calls) > 30 and all(0 < t < 1e-3 for t in times)
