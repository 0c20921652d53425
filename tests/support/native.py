"""Helpers of the tests of the decode step in C: both paths on the same small models."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import available, reason
from mmkv.engine.backends.cuda.kernels import product
from mmkv.engine.cache import COLUMNS, RaggedCache
from mmkv.engine.model.product import Product
from mmkv.engine.policies import make_policy
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import checkpoint, make_turn
from tests.support.model_configs import Checkpoint
from tests.support.sessions import load, save_checkpoint, state, text_ids

needs_native = pytest.mark.skipif(not available(), reason=f"native decode step: {reason()}")
# KV groups 1, 3, 4 and 8, head sizes 32, 64 and 128, normed q and k, biases, tied heads, pictures
# with and without M-RoPE, scaled, partial and long rope, sliding windows, linear layers, experts;
# and sizes that no vector divides.
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
    "qwen3_5",
    "gemma3_text",
    "qwen2_sliding",
    "glm4v",
    "qwen3_moe_mixed",
    "qwen3_5_moe",
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
    own = {"gates": disk._gates, "budget": 12, "prefill_chunk": 16, "page_size": 8, "kv": "auto"}
    options = own | options
    return Runtime(
        disk.family, disk.spec, disk.decoder.weights, policy=make_policy(policy, ahead), **options
    )


def rounded_engine(model: str, form: str, prefill_chunk: int = 16) -> Runtime:
    """An engine with weights in fewer bits that are multiplied as on a GPU, not in C."""
    disk = load(checkpoint(model), weights=form)
    weights = dataclasses.replace(disk.decoder.weights, product=product.product_for(form))
    parts, policy = (disk.family, disk.spec, weights, disk._gates), make_policy("dbtrimkv")
    return Runtime(*parts, policy, budget=12, prefill_chunk=prefill_chunk, page_size=8)


def open_both(model: str, *policy: Any, **options: Any) -> tuple[CachedSequence, CachedSequence]:
    """A native session and a torch session, one prompt in each."""
    ours, reference = (engine_for(model, *policy, **options) for _ in range(2))
    reference.backends.cpu.switch_off()
    both = ours.session(), reference.session()
    for session in both:
        session.prefill(prompt(model))
    return both


def prompt(model: str, seed: int = 0) -> dict[str, Tensor]:
    if model in ("qwen3_vl", "qwen3_vl_group8", "qwen3_5", "llava"):  # these see
        return make_turn(model, [9, ("image", 16, 24), 12], seed)
    return {"input_ids": text_ids(21, seed)[None]}


def assert_close(ours: Tensor, reference: Tensor, most: float = 1e-5) -> None:
    """Logits differ by so little, relative to the largest of them; NaN never does."""
    assert ours.shape == reference.shape and ours.dtype == torch.float32
    assert float((ours - reference).abs().max() / reference.abs().max()) <= most


def content(cache: RaggedCache, columns: tuple[str, ...] = ("position", "modality")) -> list[Any]:
    """Free pages in their order; per sequence its lengths, page tables and the named columns."""
    found = cache.pool.free_list().tolist()
    for seq in range(len(cache._open)):
        held = cache.export(seq)
        bits = {
            n: t[None].view(torch.uint8) if t.is_floating_point() else t for n, t in held.items()
        }
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
        if name.endswith("_scale"):  # of few entries: one may lie a step of float16 apart
            torch.testing.assert_close(mine[held], theirs[held], rtol=2e-3, atol=1e-6)
        else:
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
    if native.engine.cache.states:  # which carry their last bits from step to step
        most *= 3
    assert (native.decode_path, plain.decode_path) == ("native", "torch: switched off")
    assert (native.engine.backends.cpu.evictor is not None) == native.engine.policy.evicts
    for token in text_ids(18, 1)[: 12 if most < 1e-4 else 18].tolist():
        assert_close(native.decode(token), plain.decode(token), most)
        assert content(native.engine.cache) == content(plain.engine.cache)
        if not plain.engine.cache.pool.form.plain:
            equalise(native.engine.cache, plain.engine.cache)
    assert state(native) == state(plain)
    for name, kept in plain.engine.cache.states.items():
        assert_close(native.engine.cache.states[name], kept, most)
    assert (native.evicted > 0) == native.engine.policy.evicts
    torch.testing.assert_close(native.view().log_beta, plain.view().log_beta, rtol=1e-3, atol=0)
    return native.engine


@torch.inference_mode()
def assert_keeps_as_torch(model: str, weights: str, multiply: Product, close: float) -> None:
    """Decode in C and in torch by the reference ``multiply``; the same entries are kept.

    Each step begins with the same cache: a state may be rounded to the other neighbour, so logits
    are within ``close``, not equal.
    """
    ours, theirs = (load(checkpoint(model), weights=weights, fresh=True) for _ in range(2))
    theirs.backends.cpu.switch_off()
    theirs.decoder.weights.product = multiply
    with ours.session() as one, theirs.session() as two:
        prompt = {"input_ids": text_ids(21, 0)[None]}
        assert_close(one.prefill(prompt), two.prefill(prompt), close)
        for token in text_ids(18, 1)[:12].tolist():
            for mine, other in zip(*(e.cache.pool.columns() for e in (ours, theirs)), strict=True):
                mine.copy_(other)
            for name, states in theirs.cache.states.items():
                ours.cache.states[name].copy_(states)
            assert_close(one.decode(token), two.decode(token), close)
            assert content(ours.cache) == content(theirs.cache)
        assert (ours.decode_path, theirs.decode_path) == ("native", "torch: switched off")
        assert one.evicted > 0
