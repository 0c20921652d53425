"""The decode step in C against torch: alone, in batches, where a pool ends, at every level."""

from __future__ import annotations

import gc
import itertools
import platform
import re
import shutil
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv.engine.backends.cpu import NativeDecoder, binding, level, levels, reason
from mmkv.engine.backends.cpu.binding import LEVELS, MAX_TRUNK
from mmkv.engine.cache import COLUMNS
from mmkv.engine.errors import BudgetError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.environment import describe
from tests.support.bursts import grow_one_column
from tests.support.factories import checkpoint
from tests.support.native import (
    MODELS,
    POLICIES,
    assert_close,
    compare,
    content,
    engine_for,
    loaded,
    needs_native,
    open_both,
    prompt,
)
from tests.support.policies import EVICTING_STATIC
from tests.support.sessions import state, text_ids
from tests.support.tiers import long_but, one_in

# Every model, and with one of them every policy, at one interval or the other.
QUICK = [(m, "dbtrimkv", 2, 1) for m in MODELS]
QUICK += [("odd", *p, (1, 8)[at % 2]) for at, p in enumerate(POLICIES)]
# When a step evicts is the policy's affair, of which a model's shape knows nothing.
REST = [
    case
    for m, p, every in itertools.product(MODELS, POLICIES, (1, 8))
    if (case := (m, *p, every)) not in QUICK
]


@one_in(3)
@needs_native
@pytest.mark.parametrize(
    ("model", "policy", "lookahead", "evict_every"),
    [
        *QUICK,
        *(
            pytest.param(*case, marks=pytest.mark.drawn(reason="every policy of every model"))
            for case in REST
        ),
    ],
)
def test_both_paths_agree(model: str, policy: str, lookahead: float, evict_every: int) -> None:
    compare(model, policy, lookahead, evict_every=evict_every)


# Every form, with what C does for a policy: score, attention of a window, attention added up; also
# D = 128, and one that no vector divides.
IN_FORMS = [
    ("qwen3_vl", "dbtrimkv", "int8"),
    ("odd", "dbtrimkv", "int4"),
    ("qwen3", "snapkv", "k8v4"),
    ("qwen2_sliding", "h2o", "int4"),
    ("llama_biased", "kv-val", "int8"),
    ("phi3", "streamingllm", "bf16"),
]


@needs_native
@pytest.mark.parametrize(("model", "policy", "kv"), IN_FORMS)
def test_both_paths_agree_in_fewer_bits(model: str, policy: str, kv: str) -> None:
    compare(model, policy, kv=kv, page_size=24 if kv == "int4" else 8)


@needs_native
@pytest.mark.parametrize(("stages", "policy"), [(0, "streamingllm"), (1, "trimkv")])
def test_gates_of_other_depths(stages: int, policy: str) -> None:
    """No gates at all, and published gates: one trunk stage, a bias of 18."""
    gates: Any = loaded("qwen3")._gates
    layers = [replace(g, trunk=g.trunk[:stages], bias=g.bias + 17) for g in gates.layers]
    compare("qwen3", policy, gates=replace(gates, layers=layers) if stages else None)


@needs_native
def test_empty_rows_give_numbers() -> None:
    assert 0 in compare("qwen3_vl", budget=1).cache.length


@needs_native
def test_scores_beyond_the_range_of_exp() -> None:
    engine = loaded.__wrapped__("qwen3", fresh=True)
    for layer in engine.decoder.weights.layers:
        layer.qk_norm *= 6
    session = engine.session()
    session.prefill(prompt("qwen3"))
    other, logits = session.fork(), session.decode(5)
    engine.backends.cpu.decoder = None
    assert_close(logits, other.decode(5), most=1e-3)


@needs_native
@pytest.mark.parametrize("model", ["odd", "qwen2", "qwen3_vl_group8"])
def test_bfloat16_copies_change_nothing_but_the_order_of_sums(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that were published in bfloat16; others are not copied."""
    assert not engine_for(model).backends.cpu.decoder._bf16.kept
    engine = loaded.__wrapped__(model, fresh=True)
    weights = engine.decoder.weights
    matrices = [getattr(x, n) for x in weights.layers for n in ("qkv", "out", "gate_up", "down")]
    for tensor in [*matrices, weights.head]:
        tensor.copy_(tensor.bfloat16())
    matrices[1][-1, -1] += 2.0**-20  # one that does not fit
    least = 2 * min(matrix.numel() for matrix in [*matrices, weights.head])
    monkeypatch.setattr("mmkv.engine.backends.cpu.kernels._MOST_BF16_BYTES", least - 1)
    assert not NativeDecoder(engine.spec, weights, engine.decoder.gates)._bf16.kept
    generated = []
    for room in (0, 2**31):
        monkeypatch.setattr("mmkv.engine.backends.cpu.kernels._MOST_BF16_BYTES", room)
        decoder = NativeDecoder(engine.spec, weights, engine.decoder.gates)
        assert len(decoder._bf16.kept) == (len(matrices) if room else 0)  # the head, less one
        engine.backends.cpu.decoder = decoder
        sessions = [engine.session() for _ in range(3)]
        for index, session in enumerate(sessions):
            session.prefill(prompt(model, index))
        generated.append([engine.decode(sessions[:n], [5, 6, 7][:n]) for n in (1, 3, 3)])
    for one, two in zip(*generated, strict=True):
        assert_close(one, two)


@needs_native
def test_the_number_of_threads_does_not_change_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mmkv.engine.backends.cpu.decoder._NUMBERS_PER_THREAD", 1
    )  # too small for two
    engine = engine_for("qwen3_vl", "h2o", budget=1000)  # its sums take scratch
    one = engine.session()
    one.prefill(prompt("qwen3_vl"))
    two = one.fork()
    for token in text_ids(40, 1).tolist():
        logits = []
        for threads, session in enumerate((one, two), 1):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
            logits.append(session.decode(token))
        assert_close(*logits, most=1e-6)
    one.prefill({"input_ids": text_ids(300, 2)[None]})  # longer than the scratch so far
    one.decode(5)
    scratch_for = engine.backends.cpu.decoder._scratch_for
    assert scratch_for[0] > 360 and scratch_for[1] == 2


# A batch in one decode step in C: what torch makes of it, and each as if alone.


def several(engine: Runtime) -> list[CachedSequence]:
    """Sessions of different lengths and budgets; a closed one left a gap between their slots."""
    made = [engine.session(budget) for budget in (8, 9, 1, 34, 12)]
    for index, session in enumerate(made):
        session.prefill({"input_ids": text_ids(5 + 9 * index, index)[None]})
    made.pop(1).close()
    return made


@needs_native
@pytest.mark.parametrize(
    "model",
    long_but(
        ("qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3_text", "qwen2_sliding", "glm4v", "odd"),
        [model for model in MODELS if model != "phi3_long"],
        "layers that the others have",
    ),
)
def test_a_batch_is_what_torch_makes_of_it_and_each_is_as_if_alone(model: str) -> None:
    """Logits and memory against torch in one batched step; every bit against sessions alone."""
    ours, reference, single = (engine_for(model) for _ in range(3))
    reference.backends.cpu.switch_off()
    batch, plain, alone = several(ours), several(reference), several(single)
    for index in range(10):
        tokens = text_ids(len(batch), index).tolist()
        logits = ours.decode(batch, tokens)
        # torch alone and torch in a batch differ by 4e-5 where experts follow linear layers.
        most = 1e-4 if model == "qwen3_5_moe" else 1e-5
        assert_close(logits, reference.decode(plain, tokens), most)
        assert content(ours.cache) == content(reference.cache)
        for row, session, token in zip(logits, alone, tokens, strict=True):
            assert torch.equal(row, session.decode(token))
        if index == 4:  # another order, and fewer
            batch, plain, alone = ([x[i] for i in (2, 0, 3)] for x in (batch, plain, alone))
    assert min(session.evicted for session in batch) > 0
    assert [state(x) for x in batch] == [state(x) for x in plain] == [state(x) for x in alone]
    ours.cache.check()


@needs_native
def test_a_batch_of_short_and_long_rope() -> None:
    ours, reference = (engine_for("phi3_long", "full") for _ in range(2))
    reference.backends.cpu.decoder = None
    both = []
    for engine in (ours, reference):
        both.append([engine.session(), engine.session()])
        for session, length in zip(both[-1], (6, 30), strict=True):  # trained for 16, then more
            session.prefill({"input_ids": text_ids(length, 1)[None]})
        assert [session.long_rope for session in both[-1]] == [False, True]
    for token in range(3, 8):
        logits = [
            engine.decode(sessions, [token, token + 1])
            for engine, sessions in zip((ours, reference), both, strict=True)
        ]
        assert_close(*logits)


@needs_native
def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    """It goes on where more is allowed, as in torch."""
    engine, other = (engine_for("odd", "full") for _ in range(2))
    other.backends.cpu.switch_off()
    batch, plain = ([each.session() for _ in range(3)] for each in (engine, other))
    for session in (*batch, *plain):  # two rows of 3 full pages of 8: each needs two pages more
        session.prefill({"input_ids": text_ids(24, 1)[None]})
    pool = engine.cache.pool
    pool.limit = pool.num_pages
    assert 2 <= pool.free_pages < 6
    before, pages = [state(s) for s in batch], content(engine.cache)
    with pytest.raises(BudgetError, match=f"the limit is {pool.limit}"):
        engine.decode(batch, [5, 6, 7])
    assert [state(s) for s in batch] == before and content(engine.cache) == pages
    engine.cache.check()
    pool.limit += 6
    assert_close(engine.decode(batch, [5, 6, 7]), other.decode(plain, [5, 6, 7]))
    engine.cache.check()


# Pages and evictions of a decode step in C where the pool or a budget has an end.


@needs_native
def test_a_pool_that_has_been_outgrown_is_let_go() -> None:
    session, _ = open_both("qwen3_vl")
    pool = session.engine.cache.pool
    session.decode(5)
    outgrown = weakref.ref(pool.keys)
    pool.reserve(pool.num_pages + 100)
    session.decode(6)
    gc.collect()
    assert outgrown() is None


@needs_native
def test_c_reads_the_columns_that_stand_after_interrupted_growths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, plain = open_both("odd", "full", kv="int8", page_size=64)  # its pages have room
    cache = session.engine.cache
    session.decode(5), plain.decode(5)
    for token in range(6, 5 + len(COLUMNS)):
        grow_one_column(cache.pool, monkeypatch)
        assert_close(session.decode(token), plain.decode(token))
        (view,) = session.engine.backends.cpu.decoder._views._each
        shown = [getattr(view, name) or 0 for name in COLUMNS]
        assert shown == [column.data_ptr() for column in cache.pool.columns()]


@needs_native
@pytest.mark.parametrize("policy", EVICTING_STATIC)
def test_budgets_beyond_what_c_counts_with(policy: str) -> None:
    """``sys.maxsize`` for no limit, as a budget and as steps between evictions."""
    for options in ({"budget": sys.maxsize}, {"budget": 1e40}, {"evict_every": sys.maxsize}):
        native, plain = open_both("qwen3_vl", policy, **options)
        for token in text_ids(5, 1).tolist():
            native.decode(token), plain.decode(token)
        assert state(native) == state(plain)
        assert content(native.engine.cache) == content(plain.engine.cache)


@needs_native
def test_a_refused_eviction_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step in C refuses goes to torch at once; elsewhere C is asked one time."""
    session, plain = open_both("qwen3_vl")
    evictor, asked = session.engine.backends.cpu.evictor, []
    evict = evictor.evict
    monkeypatch.setattr(evictor, "evict", lambda *args: asked.append(args) or evict(*args))
    evictor._policy.most = 0  # room for no victim
    evictor._each = []  # requests are made anew
    for token in text_ids(5, 1).tolist():
        assert_close(session.decode(token), plain.decode(token))
    assert state(session) == state(plain) and session.evicted > 0
    assert content(session.engine.cache) == content(plain.engine.cache)
    assert not asked
    session.set_budget(9), plain.set_budget(9)
    assert state(session) == state(plain)
    assert len(asked) == 1


# When a decode step runs in C, and sessions that change between C and torch.


@needs_native
def test_paths_take_turns_on_one_session() -> None:
    """Each step and each eviction on either side; pages end up as with torch alone."""
    session, plain = open_both("qwen3_vl")
    mixed, cpu = session.engine, session.engine.backends.cpu
    turns = [*itertools.product((cpu.decoder, None), (cpu.evictor, None))]
    for number in range(2):
        for token, turn in zip(text_ids(13, number).tolist(), itertools.cycle(turns)):
            cpu.decoder, cpu.evictor = turn
            assert_close(session.decode(token), plain.decode(token))
            assert content(mixed.cache) == content(plain.engine.cache)
        for each in (session, plain):
            each.prefill(prompt("qwen3_vl", seed=number))
    assert state(session) == state(plain)


@needs_native
def test_what_runs_on_torch_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("odd")
    assert engine.decode_path == engine.session().decode_path == "native"
    assert f"decode step on the CPU: native (level {levels()[0]})" in describe().splitlines()
    assert engine_for("odd", "full").backends.cpu.evictor is None
    engine.decoder.on_gate_input = lambda layer, hidden: None
    assert engine.decode_path == "torch: on_gate_input is set"
    assert engine_for("odd", "snapkv").decode_path == "native"
    half = Runtime.from_pretrained(checkpoint("qwen2"), device="cpu", dtype="bfloat16")
    assert half.decode_path == "torch: bfloat16 weights" and half.backends.cpu.evictor is None
    first, *others = engine.decoder.gates.layers
    long = replace(first, trunk=first.trunk * (MAX_TRUNK // len(first.trunk) + 1))
    for layers in ([long, *others], [first, *others[:-1], long]):  # one is enough
        gates = replace(engine.decoder.gates, layers=layers)
        reason = NativeDecoder.unsupported_reason(engine.decoder.weights, gates)
        assert reason == f"gates with more than {MAX_TRUNK} trunk stages"
    native, plain = open_both("mistral")
    for token in text_ids(6, 1).tolist():  # 21 tokens before, a window of 24
        assert native.decode_path == "native"
        assert_close(native.decode(token), plain.decode(token))
    monkeypatch.setenv("MMKV_NATIVE", "0")
    assert engine_for("odd").decode_path == "torch: switched off by MMKV_NATIVE=0"
    assert "torch (switched off by MMKV_NATIVE=0)" in describe()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on PATH")
def test_a_machine_with_a_compiler_has_the_library() -> None:
    """And takes the best that loads: without one, the tests of it are skipped."""
    assert not isinstance(binding._load("baseline"), str), binding._load("baseline")
    assert level() == levels()[0]


# The library of every level of the instruction set that this CPU runs, and which one is loaded.


# Pictures; linear layers and experts; another activation and windows; sizes that no vector divides.
@needs_native
@pytest.mark.parametrize("level", levels()[1:])  # the first is what all other tests run
@pytest.mark.parametrize("model", ["qwen3_vl", "qwen3_5_moe", "gemma3_text", "odd"])
def test_every_level_agrees_with_torch(
    model: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    assert compare(model).backends.cpu.decoder._library.level == level


@needs_native
def test_the_environment_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels()[-1] == "baseline" and level() == levels()[0]
    monkeypatch.setenv("MMKV_NATIVE", "baseline")
    assert "decode step on the CPU: native (level baseline)" in describe().splitlines()
    monkeypatch.setenv("MMKV_NATIVE", "fastest")
    assert level() == "" and "MMKV_NATIVE=fastest is none of v4, v3" in reason()


@needs_native
def test_a_level_beyond_the_cpu_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that runs the baseline alone; loading would end in an illegal instruction."""
    load = binding._load.__wrapped__
    baseline, asked = load("baseline"), []
    assert baseline.mmkv_runs(b"baseline") and not baseline.mmkv_runs(b"v5")

    def runs(level: bytes) -> int:
        asked.append(level.decode())
        return 0

    monkeypatch.setattr(baseline, "mmkv_runs", runs)
    monkeypatch.setattr(
        binding, "_load", lambda name: baseline if name == "baseline" else load(name)
    )
    assert levels() == ["baseline"] and binding._best.__wrapped__() is baseline
    assert set(asked) == {name for name in LEVELS if compiled(name)} - {"baseline"}
    for name in list(asked):
        monkeypatch.setenv("MMKV_NATIVE", name)
        assert level() == "" and reason() == f"this CPU cannot run level {name}"


def compiled(name: str) -> bool:
    return find_spec(f"{binding.__package__}._step_{name}") is not None


@needs_native
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads what Linux says of the CPU")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_levels_are_those_that_linux_reports() -> None:
    flags = set(re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    needs = {"v3": {"avx2", "fma", "bmi1", "bmi2"}}
    needs["v4"] = needs["v3"] | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}
    baseline = binding._load("baseline")
    for name, wanted in needs.items():
        assert bool(baseline.mmkv_runs(name.encode())) == (wanted <= flags)
