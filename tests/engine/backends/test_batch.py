"""A backend by itself: weights, a cache and a batch made by hand, without a runtime or session.

What it keeps and says is what sessions over the same weights keep and say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmkv.engine.backends.base import Backend, Batch, Burst, Counts, LoadedModel
from mmkv.engine.backends.cpu import CpuBackend
from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.torch.backend import TorchBackend
from mmkv.engine.budget import Interval
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.contents import retained_tokens
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates
from mmkv.engine.model.gates.module import LayerGate
from mmkv.engine.model.rope import Rope
from mmkv.engine.model.spec import DecoderSpec, RopeSpec
from mmkv.engine.model.weights import DecoderWeights, LayerWeights
from mmkv.engine.policies import make_policy
from mmkv.engine.runtime import Runtime
from tests.support.native import assert_close, loaded, needs_native

CPU = torch.device("cpu")
BUDGET, STEPS = 6, 20  # entries per row; tokens of each sequence
SPEC = DecoderSpec(
    vocab_size=31,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-6,
    max_position=64,
    sliding_window=(None, None),
    rope=RopeSpec("default", 10.0 ** -torch.arange(4.0)),
)
TOKENS = torch.randint(0, 31, (STEPS, 2), generator=torch.Generator().manual_seed(3)).tolist()


def parts() -> tuple[DecoderWeights, Gates]:
    """Weights and gates of two layers, a dozen tensors each."""
    source = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source) * shape[-1] ** -0.5

    def layer() -> LayerWeights:
        ones = torch.ones(24)
        qkv, out, wide, down = drawn(64, 24), drawn(24, 32), drawn(40, 24), drawn(24, 20)
        return LayerWeights(ones, qkv, None, None, out, None, ones.clone(), wide, None, down, None)

    embed = torch.randn(31, 24, generator=source)
    weights = DecoderWeights(embed, [layer(), layer()], torch.ones(24), embed)
    gates = [
        LayerGate([(drawn(6, 24), drawn(6))], 4 * drawn(2, 6), torch.zeros(2)) for _ in range(2)
    ]
    return weights, Gates("tied", gates, {})


def model_and_cache(policy: str) -> tuple[LoadedModel, RaggedCache]:
    weights, gates = parts()
    chosen = make_policy(policy)
    reads = gates if chosen.scoring.needs.gates else None
    model = LoadedModel(
        device=CPU,
        spec=SPEC,
        decoder=Decoder(SPEC, weights, reads),
        rope=Rope(SPEC.rope, CPU, torch.float32),
        policy=chosen,
        needs=chosen.scoring.needs,
        write_gates=None,
        interval=Interval(),
        never_chosen=torch.empty(0, dtype=torch.int64),
    )
    memory = {}
    if chosen.scoring.needs.queries:
        memory["queries"] = ((2, 4, chosen.scoring.needs.queries, 8), torch.float32)
    cache = RaggedCache(PagePool(4, 8, 0), 2, 2, memory)
    cache.open(), cache.open()
    return model, cache


def columns(seen: list[int], entries: list[int]) -> dict[str, Any]:
    return {
        "seqs": [0, 1],
        "seen": seen,
        "next_position": seen,
        "long_rope": [False, False],
        "entries": entries,
        "allowed": [BUDGET * SPEC.rows] * 2,
        "prompt_tokens": [0, 0],
    }


def through_sessions(policy: str) -> tuple[list[torch.Tensor], list[Any], list[Any]]:
    """Logits of each step; what is kept, and evicted, of each session."""
    weights, gates = parts()
    engine = Runtime(
        loaded("odd").family, SPEC, weights, gates, make_policy(policy), BUDGET, page_size=4
    )
    engine.backends.cpu.switch_off()
    sessions = [engine.session(), engine.session()]
    logits = [engine.decode(sessions, tokens) for tokens in TOKENS]
    kept = [[row.tolist() for layer in each.retained() for row in layer] for each in sessions]
    return logits, kept, [(each.entries, each.evicted) for each in sessions]


@pytest.mark.parametrize("policy", ["dbtrimkv", "streamingllm", "snapkv", "trimkv"])
@pytest.mark.parametrize(
    "kind", [TorchBackend, pytest.param(CpuBackend, marks=needs_native)], ids=["torch", "cpu"]
)
@torch.inference_mode()
def test_a_batch_made_by_hand_decodes_and_evicts_as_sessions_do(
    kind: Callable[..., Backend], policy: str
) -> None:
    logits, kept, counted = through_sessions(policy)
    model, cache = model_and_cache(policy)
    backend = kind(model, cache)
    assert backend.unsupported_reason() == "" and backend.no_eviction_reason() == ""
    entries, evicted = [0, 0], [0, 0]

    def apply(counts: Counts) -> None:
        for index, dropped in enumerate(counts.dropped):
            entries[index] -= dropped
            evicted[index] += dropped

    for step, tokens in enumerate(TOKENS):
        counts = Counts()
        batch = Batch(**columns([step, step], entries), tokens=tokens)
        assert backend.unsupported_reason(batch) == ""
        assert_close(backend.decode(batch, counts), logits[step])
        assert counts.appended == 1 and sum(counts.nan) == 0
        entries[:] = [count + SPEC.rows for count in entries]
        apply(counts)
        if counts.uncut and max(entries) > BUDGET * SPEC.rows:
            cut = Counts()
            backend.evict(Batch(**columns([step + 1] * 2, entries)), cut)
            assert not cut.uncut
            apply(cut)
    rows = [
        [row.tolist() for layer in retained_tokens(cache, seq) for row in layer] for seq in (0, 1)
    ]
    assert rows == kept
    assert list(zip(entries, evicted, strict=True)) == counted and min(evicted) > 0
    cache.check()


@pytest.mark.parametrize("policy", ["dbtrimkv", "streamingllm"])
@torch.inference_mode()
def test_a_burst_of_a_batch_made_by_hand_decodes_as_the_torch_backend_does(policy: str) -> None:
    """The static step, which a GPU captures as a graph; here it runs as it is."""
    model, cache = model_and_cache(policy)
    batch = Batch(**columns([0, 0], [0, 0]), tokens=TOKENS[0], share=[0, 0])
    burst = Burst.of(batch)
    GraphRunner(model, cache).decode(batch, burst, STEPS)
    other, plain = model_and_cache(policy)
    backend, tokens, entries = TorchBackend(other, plain), TOKENS[0], [0, 0]
    said: list[list[int]] = []
    for step in range(STEPS):
        tokens = (
            backend.decode(Batch(**columns([step, step], entries), tokens=tokens), Counts())
            .argmax(-1)
            .tolist()
        )
        said.append(tokens)
        entries, counts = [count + SPEC.rows for count in entries], Counts()
        if step >= BUDGET:
            backend.evict(Batch(**columns([step + 1] * 2, entries)), counts)
            entries = [count - gone for count, gone in zip(entries, counts.dropped, strict=True)]
    assert burst.generated == [list(row) for row in zip(*said, strict=True)]
    assert burst.appended == [STEPS, STEPS] and burst.entries == entries
    for seq in (0, 1):
        ours, theirs = retained_tokens(cache, seq), retained_tokens(plain, seq)
        assert [[row.tolist() for row in layer] for layer in ours] == [
            [row.tolist() for row in layer] for layer in theirs
        ]
    cache.check()


@torch.inference_mode()
def test_who_died_comes_back_where_it_is_recorded() -> None:
    model, cache = model_and_cache("dbtrimkv")
    backend, entries = TorchBackend(model, cache), [0, 0]
    for step in range(BUDGET + 2):
        backend.decode(Batch(**columns([step, step], entries), tokens=TOKENS[step]), Counts())
        entries = [count + SPEC.rows for count in entries]
    before = cache.entries(1)
    position = cache.pool.position.view(-1)[before.slot].clone()
    batch, counts = Batch(**columns([BUDGET + 2] * 2, entries), recorded=[1]), Counts()
    backend.evict(batch, counts)
    assert counts.scored is not None and list(counts.scored) == [1]
    view, scores, victims = counts.scored[1]
    assert victims is not None and victims.numel() == counts.dropped[1] == 2 * SPEC.rows
    died = {*zip(before.row[victims].tolist(), position[victims].tolist(), strict=True)}
    left = [row.tolist() for layer in retained_tokens(cache, 1) for row in layer]
    assert not any(at in left[row] for row, at in died)
    assert scores.shape == view.position.shape and view.seen == BUDGET + 2
