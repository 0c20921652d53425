"""Decoding under write gates (WG-KV), against a dense model that masks what was not admitted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.backends.torch.admitted_attention import (
    SortedRows,
    admitted_attention,
    admitted_attention_reference,
)
from engine.errors import GateError, PolicyError
from engine.model.gates import WriteGates, load_write_gates
from engine.policies import HeadAllocation, Policy
from engine.policies.scoring import Recency
from engine.policies.write_gate import Admission
from engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.factories import Checkpoint, make_model, make_turn
from tests.support.oracle import Oracle
from tests.support.sessions import load, save_checkpoint, text_ids

WINDOW = 6
POLICY = f"wgkv:window={WINDOW},threshold=0.3"


class Admitted(Oracle):
    """Every token sees the newest of WINDOW tokens and those with g of at least the threshold.

    Keys before RoPE are taken from transformers' own modules by hooks.
    """

    def listen(self, gates: WriteGates) -> None:
        self.write, self.log_g = gates, torch.zeros(self.layers, self.heads, 0)
        self.before: dict[int, Tensor] = {}
        for index, layer in enumerate(self.text.layers):
            attention = layer.self_attn
            source = getattr(attention, "k_norm", attention.k_proj)
            source.register_forward_hook(self._keep_key(index))

    def _keep_key(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.before[index] = out.reshape(-1, self.heads, self.dim)

        return hook

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        after = self.key[layer][:, -self.new :].transpose(0, 1)
        if self.log_g.shape[-1] < self.seen:
            grown = torch.zeros(self.layers, self.heads, self.new)
            self.log_g = torch.cat([self.log_g, grown], -1)
        new = self.write.log_g(layer, self.before[layer], after).T
        self.log_g[layer, :, -self.new :] = new
        back = at[:, None] - torch.arange(self.seen)
        sees = (back >= 0) & ((back < WINDOW) | (self.log_g[layer].exp()[:, None] >= 0.3))
        key = self.key[layer].repeat_interleave(self.group, 0)
        scores = query @ key.transpose(1, 2) * self.dim**-0.5
        sees = sees.repeat_interleave(self.group, 0)
        return scores.masked_fill(~sees, -torch.inf).softmax(-1)

    def admitted(self) -> list[list[Tensor]]:
        """Positions that the next token may see, per layer and head."""
        back = self.seen - torch.arange(self.seen)
        stays = (back < WINDOW) | (self.log_g.exp() >= 0.3)
        return [[row.nonzero().flatten() for row in layer] for layer in stays]


FAMILIES = {
    "qwen3_vl": Checkpoint("qwen3_vl", 4, 2, 32, layers=2),
    "llava": Checkpoint("llava", 4, 2, 32, layers=2, text_type="llama"),
    "text": Checkpoint("llama", 6, 2, 32, layers=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two layers."""
    root = tmp_path_factory.mktemp("admission")
    return {name: save_checkpoint(spec, root / name) for name, spec in FAMILIES.items()}


def turns(family: str) -> list[Mapping[str, Tensor]]:
    """Two turns; with pictures where the family has them."""
    if family == "text":
        return [{"input_ids": text_ids(n, n)[None]} for n in (23, 9)]
    return [
        make_turn(family, (5, ("image", 24, 32), 4), 1),
        make_turn(family, (2, ("image", 16, 24), 3), 2),
    ]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_is_that_of_a_masked_model(
    family: str, chunk: int, native: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    engine = load(models[family], policy=POLICY, prefill_chunk=chunk)
    if not native:
        engine.backends.cpu.switch_off()
    oracle = Admitted(make_model(FAMILIES[family]), None, "full", prefill_chunk=chunk)
    oracle.listen(load_write_gates("random", engine.spec))
    session, company = engine.session(), engine.session()
    company.prefill({"input_ids": text_ids(11, 2)[None]})
    for turn in turns(family):
        torch.testing.assert_close(
            session.prefill(turn), oracle.prefill(turn), rtol=1e-3, atol=1e-4
        )
        for token in text_ids(9, 5).tolist():
            got = engine.decode([company, session], [token, token])[1]
            torch.testing.assert_close(got, oracle.decode(token), rtol=1e-3, atol=1e-4)
        for mine, wanted in zip(session.retained(), oracle.admitted(), strict=True):
            for row, want in zip(mine, wanted, strict=True):
                assert torch.equal(row, want)
        session.save(tmp_path / "s")
        session.close()
        session = engine.load_session(tmp_path / "s")[0].fork()
    memory = session.memory()
    assert 0 < memory.evicted == session.seen * engine.spec.rows - memory.entries
    assert engine.evict_path.startswith("torch: ")
    engine.cache.check()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 300),
    st.sampled_from([1, 3, 64, 1000]),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_blocks_against_the_whole_mask(
    past: int, chunk: int, window: int, threshold: float, seed: int
) -> None:
    """Rows of unequal length, from which old entries that were not admitted are gone."""
    source = torch.Generator().manual_seed(seed)
    heads, dim, seen = 2, 8, past + chunk
    log_g = torch.rand(heads, seen, generator=source).log()
    rows = []
    for head in range(heads):
        stays = (torch.arange(seen) > past - window) | (log_g[head].exp() >= threshold)
        rows.append(stays.nonzero().flatten())
    longest = max(row.numel() for row in rows)
    last = torch.iinfo(torch.int64).max
    at = torch.full((heads, longest), last)
    for head, row in enumerate(rows):
        at[head, : len(row)] = row
    key, value = torch.randn(2, heads, longest, dim, generator=source)
    entries = SortedRows(key, value, at, log_g.gather(1, at.clamp(max=seen - 1)))
    query = torch.randn(heads, 3, chunk, dim, generator=source)
    position = torch.arange(past, seen)
    args = query, position, entries, window, threshold, dim**-0.5
    torch.testing.assert_close(
        admitted_attention(*args), admitted_attention_reference(*args), rtol=1e-4, atol=1e-5
    )


def test_what_cannot_be_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(GateError, match="needs write gates; name them with gates=PATH"):
        Runtime.from_pretrained(models["text"], policy="wgkv", device="cpu")
    with pytest.raises(GateError, match="holds retention gates"):
        Runtime.from_pretrained(bundled_model(), policy="wgkv", gates=bundled_model() / "gates")
    engine = Runtime.from_pretrained(models["text"], policy="wgkv", gates="random", device="cpu")
    assert engine.policy.admission == Admission(256, 0.1)
    trained = "assets/gates/tiny-vlm-wgkv-0"
    engine = Runtime.from_pretrained(bundled_model(), policy="wgkv", gates=trained, device="cpu")
    assert engine.policy.admission == Admission(32, 0.1)
    both = Policy("mine", Recency(), HeadAllocation(), admission=Admission())
    with pytest.raises(PolicyError, match="beside an allocation"):
        load(models["text"], policy=both)
