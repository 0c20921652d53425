"""The decode step in C against its torch reference, and when which one runs."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import shutil
import sys
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmkv
from engine.backends.cpu import NativeDecoder, available, binding, levels, reason
from engine.backends.cpu.cache_views import CacheViews
from engine.cache import COLUMNS, Form, PagePool, RaggedCache
from engine.cache.forms import FORMS
from engine.errors import BudgetError
from engine.policies import make_policy
from engine.runtime import Runtime
from engine.sequence import CachedSequence
from mmkv.environment import describe
from mmkv.resources import bundled_model
from tests.support.factories import checkpoint, make_turn
from tests.support.interrupted_growth import grow_one_column
from tests.support.model_configs import Checkpoint
from tests.support.policies import EVICTING_STATIC
from tests.support.sessions import load, save_checkpoint, state, text_ids
from tests.support.tiers import slow_but

needs_native = pytest.mark.skipif(not available(), reason=f"native decode step: {reason()}")
# KV groups 1, 3, 4 and 8, head sizes 32, 64 and 128, normed q and k, biases, tied heads, pictures
# with and without M-RoPE, scaled, partial and long rope; and sizes that no vector divides.
MODELS = [
    "qwen3_vl",
    "qwen3_vl_group8",
    "llava",
    "qwen3",
    "qwen3_yarn",
    "qwen2",
    "llama_biased",
    "phi3",
    "phi3_long",
    "odd",
]
ODD = Checkpoint("llama", 3, 1, 22, text={"vocab_size": 157, "intermediate_size": 90})
POLICIES = [
    ("full", 2),
    ("dbtrimkv", 1),
    ("dbtrimkv", 2),
    ("dbtrimkv", 7),
    ("dbtrimkv", math.inf),
    ("trimkv", 2),
    ("streamingllm", 2),
]


@functools.cache
def loaded(model: str, fresh: bool = False) -> Runtime:
    if model != "odd":
        return load(checkpoint(model), fresh)
    with tempfile.TemporaryDirectory() as folder:
        return load(save_checkpoint(ODD, Path(folder)), fresh)


def engine_for(model: str, policy: str = "dbtrimkv", ahead: float = 2, **options: Any) -> Runtime:
    disk = loaded(model)
    options = {"gates": disk._gates, "budget": 12, "prefill_chunk": 16, "page_size": 8} | options
    return Runtime(
        disk.family, disk.spec, disk.decoder.weights, policy=make_policy(policy, ahead), **options
    )


def open_both(model: str, *policy: Any, **options: Any) -> tuple[CachedSequence, CachedSequence]:
    """A native session and a torch session, one prompt in each."""
    ours, reference = (engine_for(model, *policy, **options) for _ in range(2))
    reference.backends.cpu.switch_off()
    both = ours.session(), reference.session()
    for session in both:
        session.prefill(prompt(model))
    return both


def prompt(model: str, seed: int = 0) -> dict[str, Tensor]:
    if model in ("qwen3_vl", "qwen3_vl_group8", "llava"):  # these see
        return make_turn(model, [9, ("image", 16, 24), 12], seed)
    return {"input_ids": text_ids(21, seed)[None]}


def assert_close(ours: Tensor, reference: Tensor, most: float = 1e-5) -> None:
    """Logits differ by so little, relative to the largest of them; NaN never does."""
    assert ours.shape == reference.shape and ours.dtype == torch.float32
    assert float((ours - reference).abs().max() / reference.abs().max()) <= most


def content(cache: RaggedCache, columns: tuple[str, ...] = ("position", "modality")) -> list[Any]:
    """Free pages in their order; per sequence its lengths, page tables and the named columns."""
    found = cache.pool.free_list().tolist()
    for seq in range(cache.length.shape[0]):
        held = cache.export(seq)
        bits = {n: t.view(torch.uint8) if t.is_floating_point() else t for n, t in held.items()}
        found += [cache._pages(seq).tolist(), *(bits[n].tolist() for n in ("length", *columns))]
    return found


@torch.inference_mode()
def equalise(ours: RaggedCache, reference: RaggedCache) -> None:
    """Give both caches the codes of the second, if nearly all are the same."""
    held = ours._pages(0)
    for name in COLUMNS:
        mine, theirs = getattr(ours.pool, name), getattr(reference.pool, name)
        if not name.startswith(("key", "value")) or not mine.numel():
            continue
        share = (mine[held] != theirs[held]).float().mean()
        assert share < 0.01, f"{name}: {share:.3f} of the codes differ"
        mine.copy_(theirs)


def compare(model: str, *policy: Any, **options: Any) -> Runtime:
    """Decode on both paths and compare logits and memory after each step; the native engine.

    Keys differ in their last bits. Where one lies between two steps of the form, the paths may take
    different ones: few do, and the next step begins with the same codes.
    """
    native, plain = open_both(model, *policy, **options)
    most = 1e-5 if native.engine.cache.pool.form.plain else 1e-2
    assert (native.decode_path, plain.decode_path) == ("native", "torch: switched off")
    assert (native.engine.backends.cpu.evictor is not None) == native.engine.policy.evicts
    for token in text_ids(18, 1).tolist():
        assert_close(native.decode(token), plain.decode(token), most)
        assert content(native.engine.cache) == content(plain.engine.cache)
        if not plain.engine.cache.pool.form.plain:
            equalise(native.engine.cache, plain.engine.cache)
    assert state(native) == state(plain)
    assert (native.evicted > 0) == native.engine.policy.evicts
    torch.testing.assert_close(native.view().log_beta, plain.view().log_beta, rtol=1e-3, atol=0)
    return native.engine


# Every model, and with one of them every policy at every interval.
QUICK = [(m, "dbtrimkv", 2, 1) for m in MODELS]
QUICK += [("odd", *p, every) for p in POLICIES for every in (1, 8) if (*p, every) != QUICK[0][1:]]
# Every model with every policy, at one interval or the other: when a step evicts is the policy's
# affair, of which a model's shape knows nothing.
PAIRS = [(m, *p, (1, 8)[n % 2]) for n, (m, p) in enumerate(itertools.product(MODELS, POLICIES))]
MATRIX = list(dict.fromkeys(QUICK + PAIRS))
REST = [
    case
    for m, p, every in itertools.product(MODELS, POLICIES, (1, 8))
    if (case := (m, *p, every)) not in MATRIX
]


@needs_native
@pytest.mark.parametrize(
    ("model", "policy", "lookahead", "evict_every"),
    [
        *slow_but(QUICK, MATRIX, "the rest of the matrix"),
        *(
            pytest.param(*case, marks=pytest.mark.drawn(reason="the other interval"))
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
    ("qwen2", "h2o", "int4"),
    ("llama_biased", "kv-val", "int8"),
    ("phi3", "streamingllm", "bf16"),
]


@needs_native
@pytest.mark.parametrize(("model", "policy", "kv"), IN_FORMS)
@pytest.mark.parametrize("page_size", [8, 24])
def test_both_paths_agree_in_fewer_bits(model: str, policy: str, kv: str, page_size: int) -> None:
    compare(model, policy, kv=kv, page_size=page_size)


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kv", [name for name in FORMS if name != "auto"])
def test_c_rounds_as_torch_does_bit_by_bit(
    kv: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    noise = torch.Generator().manual_seed(3)
    for dim in (2, 22, 32, 96, 128):
        pools = [PagePool(8, dim, 20, form=Form.of(kv, torch.float32, dim)) for _ in range(2)]
        size = 10.0 ** torch.randint(-9, 4, (2, 160, 1), generator=noise)
        vectors = size * torch.randn(2, 160, dim, generator=noise)
        vectors[:, :8] = vectors[:, :8, :1]  # no range at all
        vectors[:, 8:12] = 0
        vectors[:, 12:24] = vectors[:, 12:24].abs()
        vectors[:, 24:40] = vectors[:, 24:40].round()
        vectors[:, 40:44] *= 1e-44 / size[:, 40:44]  # too small for a scale of 8 bits
        vectors[:, 44:48] = 7e4 + vectors[:, 44:48].abs() / size[:, 44:48]  # beyond float16
        pools[0].store(torch.arange(160), *vectors)
        cache = RaggedCache(pools[1], 1, 1)
        view = CacheViews().of(cache, [cache.open()])
        for slot, (key, value) in enumerate(vectors.transpose(0, 1).clone()):
            loaded.mmkv_store(view._views, slot, key.data_ptr(), value.data_ptr())
        for name in COLUMNS:
            ours, theirs = getattr(pools[1], name), getattr(pools[0], name)
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (name, dim)


@needs_native
@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e9])
def test_c_stores_nothing_finite_of_what_is_not(wrong: float, kv: str) -> None:
    loaded: Any = binding.library()
    pool = PagePool(8, 32, 1, form=FORMS[kv])
    cache = RaggedCache(pool, 1, 1)
    key, value = torch.ones(32), torch.ones(32)
    key[3] = wrong
    view = CacheViews().of(cache, [cache.open()])
    loaded.mmkv_store(view._views, 2, key.data_ptr(), value.data_ptr())
    assert not pool.keys_at(torch.tensor([2])).isfinite().any()
    assert pool.values_at(torch.tensor([2])).isfinite().all()


@needs_native
@pytest.mark.parametrize(("stages", "policy"), [(0, "streamingllm"), (1, "trimkv")])
def test_gates_of_other_depths(stages: int, policy: str) -> None:
    """No gates at all, and published gates: one trunk stage, a bias of 18."""
    gates: Any = loaded("qwen3")._gates
    layers = [replace(g, trunk=g.trunk[:stages], bias=g.bias + 17) for g in gates.layers]
    compare("qwen3", policy, gates=replace(gates, layers=layers) if stages else None)


@needs_native
@pytest.mark.slow(reason="512 tokens on two paths")
def test_the_bundled_model_says_the_same_for_512_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = {"type": "image", "image": str(bundled_model().parent / "scene.png")}
    message = {"role": "user", "content": [picture, {"type": "text", "text": "Describe."}]}
    options: Any = {"gates": "random", "dtype": "float32", "device": "cpu", "budget": 24}
    runs = []
    for switch in "10":
        monkeypatch.setenv("MMKV_NATIVE", switch)
        engine = mmkv.Engine.from_pretrained(bundled_model(), **options)
        session, generated = engine.session(), []
        logits = session.prefill(engine.inputs([message]))
        for _ in range(512):
            generated.append(int(logits.argmax()))
            logits = session.decode(generated[-1])
        assert session.entries == 24 * engine.spec.rows
        runs.append((generated, [row.tolist() for layer in session.retained() for row in layer]))
        assert engine.decode_path.startswith("native" if switch == "1" else "torch")
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 8, "a model that repeats itself proves little"


@needs_native
def test_paths_take_turns_on_one_session() -> None:
    """Each step and each eviction on either side; pages end up as with torch alone."""
    session, plain = open_both("qwen3_vl")
    mixed, cpu = session.engine, session.engine.backends.cpu
    turns = [*itertools.product((cpu.decoder, None), (cpu.evictor, None))]
    for number in range(3):
        for token, turn in zip(text_ids(25, number).tolist(), itertools.cycle(turns)):
            cpu.decoder, cpu.evictor = turn
            assert_close(session.decode(token), plain.decode(token))
            assert content(mixed.cache) == content(plain.engine.cache)
        for each in (session, plain):
            each.prefill(prompt("qwen3_vl", seed=number))
    assert state(session) == state(plain)


def several(engine: Runtime) -> list[CachedSequence]:
    """Sessions of different lengths and budgets; a closed one left a gap between their slots."""
    made = [engine.session(budget) for budget in (12, 9, 1, 40, 12)]
    for index, session in enumerate(made):
        session.prefill({"input_ids": text_ids(5 + 9 * index, index)[None]})
    made.pop(1).close()
    return made


@needs_native
@pytest.mark.parametrize("model", [model for model in MODELS if model != "phi3_long"])
def test_a_batch_is_what_torch_makes_of_it_and_each_is_as_if_alone(model: str) -> None:
    """Logits and memory against torch in one batched step; every bit against sessions alone."""
    ours, reference, single = (engine_for(model) for _ in range(3))
    reference.backends.cpu.switch_off()
    batch, plain, alone = several(ours), several(reference), several(single)
    for index in range(14):
        tokens = text_ids(len(batch), index).tolist()
        logits = ours.decode(batch, tokens)
        assert_close(logits, reference.decode(plain, tokens))
        assert content(ours.cache) == content(reference.cache)
        for row, session, token in zip(logits, alone, tokens, strict=True):
            assert torch.equal(row, session.decode(token))
        if index == 6:  # another order, and fewer
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
    engine = engine_for("odd", "full")
    batch = [engine.session() for _ in range(3)]
    for session in batch:  # two rows of 3 full pages of 8: each needs two pages more
        session.prefill({"input_ids": text_ids(24, 1)[None]})
    pool = engine.cache.pool
    pool.limit = pool.num_pages
    assert 2 <= pool.free_pages < 6
    before, pages = [state(s) for s in batch], content(engine.cache)
    with pytest.raises(BudgetError, match="the limit is"):
        engine.decode(batch, [5, 6, 7])
    assert [state(s) for s in batch] == before and content(engine.cache) == pages
    engine.decode(batch[:1], [5])
    engine.cache.check()


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
def test_a_full_pool_refuses_the_step_and_loses_nothing() -> None:
    session, plain = open_both("odd", "full")  # 21 tokens: three pages of 8 in each of two rows
    pool = session.engine.cache.pool
    for token in text_ids(3, 1).tolist():
        assert_close(session.decode(token), plain.decode(token))
    pool.limit = 7
    before, pages = state(session), content(session.engine.cache)
    with pytest.raises(BudgetError, match="limit is 7"):
        session.decode(6)
    assert state(session) == before and content(session.engine.cache) == pages
    session.engine.cache.check()
    pool.limit = 8
    assert_close(session.decode(6), plain.decode(6))


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
    generated = []
    for room in (0, 2**31):
        monkeypatch.setattr("engine.backends.cpu.matrices._MOST_BF16_BYTES", room)
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
    monkeypatch.setattr("engine.backends.cpu.decoder._NUMBERS_PER_THREAD", 1)  # too small for two
    engine = engine_for("qwen3_vl", "full")
    one = engine.session()
    one.prefill(prompt("qwen3_vl"))
    two = one.fork()
    for token in text_ids(150, 1).tolist():
        logits = []
        for threads, session in enumerate((one, two), 1):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
            logits.append(session.decode(token))
        assert_close(*logits, most=1e-6)
    one.prefill({"input_ids": text_ids(300, 2)[None]})  # longer than the scratch so far
    one.decode(5)
    scratch_for = engine.backends.cpu.decoder._scratch_for
    assert scratch_for[0] > 470 and scratch_for[1] == 2


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
    native, plain = open_both("mistral")
    paths = []
    for token in text_ids(6, 1).tolist():  # 21 tokens before, a window of 24
        paths.append(native.decode_path)
        assert_close(native.decode(token), plain.decode(token))
    assert paths == ["native"] * 3 + ["torch: a sliding window is in effect"] * 3
    monkeypatch.setenv("MMKV_NATIVE", "0")
    assert engine_for("odd").decode_path == "torch: switched off by MMKV_NATIVE=0"
    assert "torch (switched off by MMKV_NATIVE=0)" in describe()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on PATH")
def test_a_machine_with_a_compiler_has_the_library() -> None:
    assert not isinstance(binding._load("baseline"), str), binding._load("baseline")
