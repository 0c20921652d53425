"""The step without the host against the eager one: same tokens, entries and pages; and bursts."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mmkv
import mmkv.engine.backends.cuda.kernels
import mmkv.reply
from mmkv import Engine, Sampling
from mmkv.engine import runtime
from mmkv.engine.backends import kernels_for
from mmkv.engine.backends.base import Batch
from mmkv.engine.backends.cuda.kernels import product
from mmkv.engine.backends.cuda.kernels.append import make_room
from mmkv.engine.backends.cuda.kernels.pointwise import TritonElementwise
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.backends.cuda.static_step import GraphRunner, StaticStep
from mmkv.engine.cache import COLUMNS
from mmkv.engine.errors import BudgetError, ContextError
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.resources import bundled_model
from mmkv.session import Session
from tests.support.bursts import Bursts, eager, grow_one_column, opened, same, states
from tests.support.host_reads import HostReads, host_reads
from tests.support.kernels import HAS_TRITON, INTERPRETED
from tests.support.native import POLICIES, content, engine_for, rounded_engine
from tests.support.policies import STATIC
from tests.support.sessions import assert_same_rows, state, text_ids
from tests.support.tiers import long_but, one_in

__all__ = ["host_reads"]
MODELS = ["qwen3_vl", "llama_biased", "odd"]
# Linear layers, experts beside a shared one, GELU and four norms, sliding windows.
OTHERS = ["qwen3_5_moe", "gemma3_text", "qwen3_5", "mistral"]


@pytest.mark.parametrize(("model", "kv"), [("qwen3_vl", "k8v4"), ("odd", "int4")])
def test_the_static_step_is_the_eager_step_in_fewer_bits(model: str, kv: str) -> None:
    ours, reference = (engine_for(model, kv=kv) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    generated = Bursts(ours).decode(one, [5, 6], 12)
    assert generated == eager(reference, two, [5, 6], 12)
    same(one, two)


def test_a_burst_of_a_hybrid_has_all_its_pages() -> None:
    """States of linear layers are no pages that the new entries could take."""
    engine = engine_for("qwen3_5", budget=500)
    bursts, session = Bursts(engine), engine.session()
    for count in (5, 400):
        session.prefill({"input_ids": text_ids(count, 1)[None]})
        assert len(bursts.decode([session], [5], 40)[0]) == 40
    assert session.entries == engine.spec.rows * 485


@pytest.mark.parametrize(("model", "form"), [("qwen3_vl", "int8"), ("llama_biased", "int4")])
def test_the_static_step_is_the_eager_step_with_rounded_weights(model: str, form: str) -> None:
    ours, reference = (rounded_engine(model, form) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    assert Bursts(ours).decode(one, [5, 6], 12) == eager(reference, two, [5, 6], 12)
    same(one, two)
    assert all(session.evicted > 0 for session in one)


SCORED = [name for name in STATIC if name != "balanced"]
KERNEL_CASES = [("odd", "adakv"), ("odd", "gkv")]
KERNEL_CASES += [(model, "dbtrimkv") for model in OTHERS[:2]]
# Every policy with one of the models, and every model.
MATRIX = [("odd", *policy) for policy in POLICIES]
MATRIX += [(m, "dbtrimkv", 2) for m in ("qwen3_vl", "llama_biased", "qwen3_moe", "glm4v")]


@one_in(2)
@pytest.mark.parametrize(("model", "policy", "lookahead"), MATRIX)
def test_the_static_step_is_the_eager_step(model: str, policy: str, lookahead: float) -> None:
    ours, reference = (engine_for(model, policy, lookahead) for _ in range(2))
    runner = Bursts(ours)
    one, two = opened(ours, 3), opened(reference, 3)
    generated = runner.decode(one, [3, 4, 5], 9)
    assert generated == eager(reference, two, [3, 4, 5], 9)
    same(one, two)
    assert all(s.evicted > 0 for s in one) == ours.policy.evicts
    # On from there: larger tables, fewer batch slots, another order; then eager steps on the
    # result.
    for sessions in (one, two):
        sessions[0].prefill({"input_ids": text_ids(60, 9)[None]})
    held = one, two  # the middle ones stay open: nobody frees them in between
    one, two = [one[2], one[0]], [two[2], two[0]]
    assert runner.decode(one, [6, 7], 6) == eager(reference, two, [6, 7], 6)
    same(one, two)
    assert eager(ours, one, [8, 9], 3) == eager(reference, two, [8, 9], 3)
    same(one, two)
    assert len(held[0]) == 3


@pytest.mark.parametrize("model", long_but(OTHERS[:2], OTHERS, "two have all that is special"))
def test_states_and_windows_over_many_steps(
    model: str, host_reads: HostReads, tmp_path: Path
) -> None:
    """Batches that change, forks, files, closed and new sequences, stops: nothing is read back."""
    ours, reference = (engine_for(model) for _ in range(2))
    ours.cache.pool.doubles = True  # as on a GPU
    one, two = opened(ours, 3), opened(reference, 3)
    runner = Bursts(ours)

    def go_on(which: list[int], steps: int) -> None:
        mine, theirs = ([held[index] for index in which] for held in (one, two))
        tokens = [20 + index for index in which]
        assert runner.decode(mine, tokens, steps) == eager(reference, theirs, tokens, steps)
        same(one, two)

    go_on([0, 1, 2], 14)
    for held in (one, two):
        held.append(held[0].fork())
    go_on([3, 1], 9)
    go_on([0, 3], 6)
    for held in (one, two):
        engine = held[0].engine
        held[1].save(tmp_path / "asleep")
        held.pop(1).close()
        held[0].prefill({"input_ids": text_ids(7, 9)[None]})
        held.append(engine.session())  # where the other one was
        held[-1].prefill({"input_ids": text_ids(9, 8)[None]})
        held.append(engine.load_session(tmp_path / "asleep")[0])
    go_on([4, 1, 3, 0], 9)
    stop = eager(reference, two[:1], [3], 2)[0]
    assert stop[0] != stop[1]
    generated = runner.decode(one[:2], [3, 4], 5, stop=stop[1:])
    assert generated[0] == stop
    assert generated[1:] == eager(reference, two[1:2], [4], len(generated[1]))
    assert states(one) == states(two)
    for left, right in zip(one, two, strict=True):  # one after the other, they take other pages
        assert_same_rows(left, right)
    assert host_reads.found == [] and all(session.evicted > 0 for session in one)


@pytest.mark.parametrize(
    "budget", [Budget.fraction(0.7), Budget.fraction(0.9), Budget.bytes(40_000), Budget.of(9)]
)
def test_every_kind_of_budget_holds_at_every_step(budget: Budget) -> None:
    ours, reference = (engine_for("qwen3", budget=budget, evict_every=3) for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    runner = Bursts(ours)
    for steps in (1, 2, 7):
        assert runner.decode(one, [3, 4], steps) == eager(reference, two, [3, 4], steps)
        same(one, two)


def test_a_larger_budget_makes_a_larger_step() -> None:
    ours, reference = (engine_for("qwen3", budget=4) for _ in range(2))
    one, two = opened(ours, 1), opened(reference, 1)
    runner = Bursts(ours)
    for budget, steps in ((4, 3), (40, 60), (4, 3)):
        one[0].set_budget(budget)
        two[0].set_budget(budget)
        assert runner.decode(one, [3], steps) == eager(reference, two, [3], steps)
        same(one, two)
    (step,) = (step for step, _ in runner._steps.values())
    assert step.most_entries >= 41 * ours.spec.rows > 8 * ours.spec.rows


def test_a_batch_slot_stops_at_its_stop_token_and_the_others_go_on() -> None:
    ours, reference = (engine_for("qwen3_vl") for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    free = eager(reference, two, [3, 4], 12)
    stop = free[0][5]
    first = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    generated = Bursts(ours).decode(one, [3, 4], 12, stop=[stop])
    assert generated == first and len(generated[0]) <= 6
    # What was generated last has not been appended, as when the eager loop stops there.
    assert [s.seen for s in one] == [
        s.seen - 12 + len(row) for s, row in zip(two, generated, strict=True)
    ]
    ours.cache.check()


def test_draws_follow_their_seed_whatever_the_company() -> None:
    engine = engine_for("qwen3_vl")
    sessions = opened(engine, 3)
    draws = [Draw(temperature=2.0, seed=seed) for seed in (1, 2, 3)]
    draws[2] = Draw(temperature=2.0, seed=3, presence=2.0)  # and whether others are penalised
    alone = []
    for session, draw in zip(sessions, draws, strict=True):
        with session.fork() as fork:
            alone += Bursts(engine).decode([fork], [3], 12, draws=[draw])
    together = Bursts(engine).decode(sessions, [3, 3, 3], 12, draws=draws)
    assert together == alone
    again = engine_for("qwen3_vl")
    assert again.decode_many(opened(again, 3), [3, 3, 3], 12, draws=draws) == together
    assert len({tuple(row) for row in together}) == 3
    assert all(len(set(row)) > 4 for row in together)


def test_a_pool_that_grew_is_found_again() -> None:
    ours, reference = (engine_for("odd", "full") for _ in range(2))
    one, two = opened(ours, 1), opened(reference, 1)
    runner = Bursts(ours)
    for _ in range(3):
        assert runner.decode(one, [3], 8) == eager(reference, two, [3], 8)
        ours.cache.pool.grow(ours.cache.pool.num_pages + 50)
        ours.session()  # other tables
        assert not any(step.fits() for step, _ in runner._steps.values())
    assert states(one) == states(two)
    assert len(runner._steps) == 1


def append_alone(step: StaticStep, cut: bool = True) -> None:
    """A step without the model: room, position and eviction."""
    slots = make_room(step.room, step.rows, step.seqs)
    live = step.seqs >= 0
    pool = step.cache.pool
    pool.position.view(-1)[slots[live]] = step.seen[live].int()[:, None, None]
    step.seen += live
    step.rope_position += live
    step.generated[:, step.index] = step.token.where(live, -1)[:, None]
    step.index += 1
    step._evict(cut)


def long_context(policy: str, budget: Any, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """An engine on which a reply of 1,000 tokens takes no arithmetic, with a pool as on a GPU."""
    monkeypatch.setattr(StaticStep, "run", append_alone)
    engine = engine_for("odd", policy, budget=budget)
    engine.spec = engine.model.spec = dataclasses.replace(engine.spec, max_position=4096)
    engine.cache.pool.doubles = True
    return engine


def begun(engine: Runtime, count: int) -> list[CachedSequence]:
    sessions = [engine.session() for _ in range(count)]
    for index, session in enumerate(sessions):
        session.prefill({"input_ids": text_ids(5 + index, index)[None]})
    return sessions


def reply(runner: Bursts, sessions: list[CachedSequence], tokens: int) -> None:
    """Decode so many tokens as chat and server do: 16 at a time."""
    seen = [session.seen for session in sessions]
    for _ in range(tokens // 16):
        runner.decode(sessions, [3] * len(sessions), 16)
    assert [session.seen - before for session, before in zip(sessions, seen, strict=True)] == [
        tokens
    ] * len(sessions)


@pytest.mark.parametrize(
    ("policy", "budget", "count", "tokens"),
    [
        ("full", 8, 4, 496),
        ("dbtrimkv", 400, 2, 480),
        ("dbtrimkv", Budget.fraction(0.5), 1, 480),
    ],
)
def test_a_growing_reply_is_captured_once_for_each_doubling(
    policy: str, budget: Any, count: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 256 entries per row first, then 512, 1,024: at most so many captures."""
    engine = long_context(policy, budget, monkeypatch)
    runner = Bursts(engine)
    reply(runner, begun(engine, count), tokens)
    assert 2 <= runner.captures <= (tokens + 16).bit_length() - 7
    engine.cache.check()


def test_sessions_that_come_and_go_are_not_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = long_context("dbtrimkv", 12, monkeypatch)
    runner = Bursts(engine)
    captures = []
    for turn in range(4):
        sessions = begun(engine, 3 - turn % 3)
        for session in sessions:
            reply(runner, [session], 32)
        for session in sessions:
            session.close()
        captures.append(runner.captures)
    assert captures[-1] == captures[0]
    # More at a time than ever before: once for each doubling of pages or of rows, from 4 to 16.
    held = []
    for count in range(1, 17):
        held += begun(engine, 1)
        reply(runner, held[-1:], 16)
        assert engine.cache.open_count == count
    assert runner.captures - captures[0] <= 5
    engine.cache.check()


def test_a_pool_that_doubles_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = long_context("full", 8, monkeypatch)
    pool, runner = engine.cache.pool, Bursts(engine)
    (session,) = begun(engine, 1)
    pool.limit = pool.num_pages + 50 * engine.spec.rows
    reply(runner, [session], 384)
    assert pool.num_pages == pool.limit and runner.captures <= 3
    with pytest.raises(BudgetError, match="the limit is"):
        reply(runner, [session], 384)
    assert pool.num_pages == pool.limit
    engine.cache.check()


def test_a_pool_whose_growth_was_interrupted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = engine_for("odd", "full", kv="int8")
    session, runner, pool = runtime.session(), Bursts(runtime), runtime.cache.pool
    for _ in range(len(COLUMNS) - 1):
        runner.decode([session], [3], 1)
        (step,) = (step for step, _ in runner._steps.values())
        assert step.fits()
        grow_one_column(pool, monkeypatch)
        assert not step.fits()


def test_long_runs_are_lent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, reference = (engine_for("odd", "full") for _ in range(2))
    one, two = opened(ours, 1), opened(reference, 1)
    monkeypatch.setattr("mmkv.engine.backends.cuda.static_step.MOST_STEPS", 8)
    assert Bursts(ours).decode(one, [3], 30) == eager(reference, two, [3], 30)
    same(one, two)


@pytest.mark.parametrize(("policy", "budget", "steps"), [("dbtrimkv", 12, 4), ("knorm", 34, 8)])
def test_an_eviction_that_cannot_be_is_an_error(
    policy: str, budget: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers made for fewer entries than a session holds: the step says so, and is counted."""
    ours = engine_for("odd", policy, budget=budget)
    session = opened(ours, 3)[2]
    runner = Bursts(ours)
    make_room = runner._make_room
    monkeypatch.setattr(runner.runner, "_make_room", lambda *args: make_room(*args) and (1, 1))
    seen = session.seen
    with pytest.raises(BudgetError, match="above its budget"):
        runner.decode([session], [3], steps)
    assert session.seen == seen + steps and session.entries > session.allowed_entries
    assert session.memory().entries == session.entries
    ours.decode([session], [3])
    assert session.entries == session.allowed_entries
    ours.cache.check()


def test_a_pool_without_room_refuses_before_the_first_step() -> None:
    engine = engine_for("odd", "full")
    sessions = [engine.session()]
    sessions[0].prefill({"input_ids": text_ids(20, 1)[None]})
    engine.cache.pool.limit = engine.cache.pool.num_pages
    before, pages = state(sessions[0]), content(engine.cache)
    with pytest.raises(BudgetError, match="the limit is"):
        Bursts(engine).decode(sessions, [3], 200)
    assert state(sessions[0]) == before and content(engine.cache) == pages


def test_without_a_gpu_many_steps_are_single_ones() -> None:
    """Where there is one the graph runs; the tokens are the static step's either way."""
    ours, reference = (engine_for("qwen3_vl") for _ in range(2))
    one, two = opened(ours, 3), opened(reference, 3)
    generated = ours.decode_many(one, [3, 4, 5], 12)
    stop = generated[1][4]
    assert ours.many_path == "step by step: no GPU"
    assert generated == Bursts(reference).decode(two, [3, 4, 5], 12)
    again = ours.decode_many(one, [row[-1] for row in generated], 6, stop=[stop])
    assert again == Bursts(reference).decode(two, [row[-1] for row in generated], 6, stop=[stop])
    same(one, two)
    ours.endless = False
    with pytest.raises(ContextError):
        ours.decode_many(one, [3, 4, 5], 10**6)
    same(one, two)


def on_cuda(engine: Runtime, monkeypatch: pytest.MonkeyPatch, triton: bool = True) -> Runtime:
    """An engine that takes itself for one on a GPU, with or without Triton."""
    for each in (engine, engine.model):
        monkeypatch.setattr(each, "device", torch.device("cuda"))
    monkeypatch.setattr("mmkv.engine.backends.cuda.backend.triton_installed", lambda: triton)
    return engine


def test_what_cannot_run_without_the_host_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, policy, why in [
        ("mistral", "full", ""),
        ("gemma3", "dbtrimkv", ""),
        ("qwen3_5_moe", "full", ""),
        ("odd", "snapkv", ""),
        ("phi3_long", "full", "longrope"),
        ("odd", "full", ""),
        ("odd", "dbtrimkv", ""),
    ]:
        ours = on_cuda(engine_for(model, policy), monkeypatch)
        assert ours.backends.cuda.burst_reason() == why
        assert ours.many_path == (f"step by step: {why}" if why else "graph")
        assert ours.decode_path == (f"torch: {why}" if why else "CUDA graph")


def test_a_gpu_without_triton_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = on_cuda(engine_for("odd"), monkeypatch, triton=False)
    assert ours.many_path == "step by step: Triton is not installed"
    assert ours.decode_path == "torch: Triton is not installed"


@pytest.mark.triton
@pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1 (the interpreter)"
)
# Every model, with gates and without, and what scores in torch between the kernels; floors and all
# that the kernels score are in test_kernels_evict.py.
@pytest.mark.parametrize(
    ("model", "policy"),
    long_but(
        [*zip(MODELS, SCORED, strict=False), *KERNEL_CASES[:1], KERNEL_CASES[-1]],
        [*itertools.product(MODELS, SCORED), *KERNEL_CASES],
        "the other pairs; experts behind linear layers take a minute",
    ),
)
def test_the_kernels_together_are_the_eager_step(
    model: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and static step with every kernel in its Triton form, on a CPU."""
    reference = engine_for(model, policy)
    two = opened(reference, 2)
    wanted = eager(reference, two, [3, 4], 2)  # in torch: by the kernels, too, from here on
    put_in_triton(monkeypatch)
    ours = engine_for(model, policy)
    assert isinstance(ours.decoder.elementwise, TritonElementwise)
    one = opened(ours, 2)
    assert Bursts(ours).decode(one, [3, 4], 2) == wanted
    same(one, two)


def put_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that are made from now on run every kernel in its Triton form, on a CPU."""
    for name in [m.name for m in pkgutil.iter_modules(mmkv.engine.backends.cuda.kernels.__path__)]:
        module = importlib.import_module(f"mmkv.engine.backends.cuda.kernels.{name}")
        if hasattr(module, "on_triton"):
            monkeypatch.setattr(module, "on_triton", lambda tensor: True)
    for module in ("torch.step", "cuda.policy_step"):
        monkeypatch.setattr(f"mmkv.engine.backends.{module}.on_triton", lambda tensor: True)
    on_gpu = functools.partial(kernels_for, device=torch.device("cuda"))
    monkeypatch.setattr(runtime, "kernels_for", lambda form, device: on_gpu(form))


@pytest.mark.triton
@pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1 (the interpreter)"
)
@pytest.mark.parametrize(("model", "kv"), [("gemma3_text", "auto"), ("odd", "int8")])
def test_several_tokens_in_a_step_are_single_steps(
    model: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of one sequence and one of another, beyond a window and over the end of a page."""
    reference = engine_for(model, "full", kv=kv)
    two = opened(reference, 2)
    reference.backends.cpu.switch_off()
    wanted = [reference.decode(two[:1], [token])[0] for token in (3, 4, 5)]
    wanted.append(reference.decode(two[1:], [6])[0])
    put_in_triton(monkeypatch)
    ours = engine_for(model, "full", kv=kv)
    one = opened(ours, 2)
    columns = [(one[0], at) for at in range(3)] + [(one[1], 0)]
    batch = Batch(
        [session.seq for session, _ in columns],
        [session.seen + at for session, at in columns],
        [session.next_position + at for session, at in columns],
        [False] * 4,
        *([[session.entries for session, _ in columns]] * 2),
        [0] * 4,
        [3, 4, 5, 6],
    )
    made = GraphRunner(ours.model, ours.cache).check(batch)
    torch.testing.assert_close(made, torch.stack(wanted), rtol=1e-4, atol=1e-4)
    held = (ours.cache.export(one[0].seq), reference.cache.export(two[0].seq))
    for name in ("length", "position", "modality", "state"):
        assert torch.equal(held[0][name], held[1][name]), name
    torch.testing.assert_close(held[0]["keys"], held[1]["keys"], rtol=1e-4, atol=1e-4)


@pytest.mark.triton
@pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1 (the interpreter)"
)
def test_a_step_with_triton_products_is_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 4 bits, head and embedding in 8: logits with the same bits."""
    from mmkv.engine.backends.cuda.kernels import product_triton

    ours, reference = (rounded_engine("llama_biased", "int4") for _ in range(2))
    one, two = opened(ours, 2), opened(reference, 2)
    wanted = eager(reference, two, [3, 4], 1)
    monkeypatch.setattr(product, "on_triton", lambda tensor: True)
    large = product_triton.sizes(128) | {"TOKENS": 16}  # the interpreter takes as long for small
    monkeypatch.setattr(product_triton, "sizes", lambda tokens: large)
    assert Bursts(ours).decode(one, [3, 4], 1) == wanted
    same(one, two)


# Replies in bursts of tokens, as a GPU decodes them, against one token at a time.
#
# On a CPU the graph's step runs in torch, so that the same bookkeeping is used.


SCENE = {"type": "image", "image": str(bundled_model().parent / "scene.png")}
QUESTIONS = ["What color is the shape in the first row?", "How many shapes are there?", "Describe."]


def bursts_engine_for(burst: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
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


@pytest.mark.parametrize(("limit", "stop"), [(1, ()), (40, ()), (40, ("e",))])
def test_bursts_generate_and_retain_the_same_as_single_tokens(
    limit: int, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_new_tokens=limit, stop=stop)
    single, expected = talk(bursts_engine_for(False, monkeypatch), sampling)
    burst, got = talk(bursts_engine_for(True, monkeypatch), sampling)
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
    engine = bursts_engine_for(True, monkeypatch)
    drawn = Sampling(max_new_tokens=20, temperature=5.0, top_p=0.9, seed=5)
    together = [reply.token_ids for reply in engine.generate(conversations, drawn)]
    monkeypatch.setattr(mmkv.reply, "BURST", 7)
    alone = [engine.generate(each, drawn)[0].token_ids for each in conversations]
    assert together == alone and any(len(row) > 16 for row in together)
    assert len({tuple(row) for row in together}) > 1
    other = engine.generate(conversations, Sampling(max_new_tokens=20, temperature=5.0, seed=6))
    assert [reply.token_ids for reply in other] != together


def test_a_burst_ends_at_the_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bursts_engine_for(True, monkeypatch, policy="full")
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
