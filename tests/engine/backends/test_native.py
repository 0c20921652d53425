"""The decode step in C against its torch reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import mmkv
from mmkv.engine.backends.cpu import NativeDecoder
from mmkv.resources import bundled_model
from tests.support.native import (
    MODELS,
    POLICIES,
    assert_close,
    compare,
    engine_for,
    loaded,
    needs_native,
    prompt,
)
from tests.support.sessions import text_ids
from tests.support.tiers import slow_but

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
