"""How long tokens are attended to, and how few a query reads: loops over the definitions."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import SHARES, alive, last_selected, read, sparsity
from mmkv.engine.runtime import Runtime
from tests.support.factories import checkpoint, make_turn


def test_survival_and_sparsity_are_what_the_papers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_BLOCK", 16), ("_NEWEST", 24), ("_LAST", 5)):
        monkeypatch.setattr(attention, name, size)
    generator = torch.Generator().manual_seed(0)
    tokens, top, scale = 60, 3, 0.7
    query, key = (torch.randn(n, tokens, 8, generator=generator) for n in (4, 2))
    last = last_selected(query, key, top, scale)
    weights = torch.zeros(4, tokens, tokens, dtype=torch.float64)
    for head in range(4):
        for at in range(tokens):
            logits = (key[head // 2, : at + 1].double() @ query[head, at].double()) * scale
            weights[head, at, : at + 1] = logits.softmax(0)
    wanted = torch.arange(tokens).repeat(4, 1)
    for head in range(4):
        for at in range(tokens):
            for token in weights[head, at, : at + 1].argsort(descending=True)[:top].tolist():
                wanted[head, token] = max(int(wanted[head, token]), at)
    assert torch.equal(last, wanted)

    of = torch.arange(tokens) % 3 > 0
    found = alive(last, of, (1, 20, tokens - 2, tokens))
    for head in range(4):
        for place, horizon in enumerate((1, 20, tokens - 2)):
            mine = [t for t in range(tokens - horizon) if of[t]]
            share = sum(int(wanted[head, t]) - t >= horizon for t in mine) / len(mine)
            assert math.isclose(float(found[head, place]), share)
    assert found[:, 3].isnan().all()

    below = torch.zeros(len(SHARES))
    count = 0
    for head in range(4):
        for at in range(tokens - 5, tokens):
            most = weights[head, at].max()
            for token in range(tokens - 24, at + 1):
                count += 1
                below += (weights[head, at, token] < torch.tensor(SHARES) * most).float()
    torch.testing.assert_close(sparsity(query, key, scale), below / count)


def test_a_document_is_read_layer_by_layer() -> None:
    engine = Runtime.from_pretrained(checkpoint("qwen3_vl"), policy="full", dtype="float32")
    found = read(engine, make_turn("qwen3_vl", [70, ("image", 32, 32), 7], 1), top=4)
    layers, heads = engine.spec.entry_layers, engine.spec.num_heads
    assert found["text"].shape == found["pictures"].shape == (layers, heads, 5)
    # Pictures have no query 256 tokens later; text has some 64 later.
    assert found["text"][..., 0].isfinite().all() and found["pictures"][..., 1:].isnan().all()
