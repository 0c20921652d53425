"""Attention under write gates (WG-KV), and what is refused; test_matrix has dialogues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.torch.admitted_attention import (
    SortedRows,
    admitted_attention,
    admitted_attention_reference,
)
from engine.errors import GateError, PolicyError
from engine.policies import HeadAllocation, Policy
from engine.policies.scoring import Recency
from engine.policies.write_gate import Admission
from engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.model_configs import Checkpoint
from tests.support.sessions import load, save_checkpoint


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers."""
    spec = Checkpoint("llama", 6, 2, 32, layers=2)
    return save_checkpoint(spec, tmp_path_factory.mktemp("admission") / "text")


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


def test_what_cannot_be_is_refused(text_model: Path) -> None:
    with pytest.raises(GateError, match="needs write gates; name them with gates=PATH"):
        Runtime.from_pretrained(text_model, policy="wgkv", device="cpu")
    with pytest.raises(GateError, match="holds retention gates"):
        Runtime.from_pretrained(bundled_model(), policy="wgkv", gates=bundled_model() / "gates")
    engine = Runtime.from_pretrained(text_model, policy="wgkv", gates="random", device="cpu")
    assert engine.policy.admission == Admission(256, 0.1)
    trained = "assets/gates/tiny-vlm-wgkv-0"
    engine = Runtime.from_pretrained(bundled_model(), policy="wgkv", gates=trained, device="cpu")
    assert engine.policy.admission == Admission(32, 0.1)
    both = Policy("mine", Recency(), HeadAllocation(), admission=Admission())
    with pytest.raises(PolicyError, match="beside an allocation"):
        load(text_model, policy=both)
