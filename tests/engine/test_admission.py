"""Attention under write gates (WG-KV), and what is refused; test_matrix has dialogues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.engine.backends.torch.attention import (
    SortedRows,
    write_gated_attention,
    write_gated_attention_reference,
)
from mmkv.engine.errors import GateError, PolicyError, SessionError
from mmkv.engine.policies import Policy
from mmkv.engine.policies.attention import AttentionMass
from mmkv.engine.policies.base import Admission
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.model_configs import Checkpoint
from tests.support.sessions import load, save_checkpoint, text_ids


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
        write_gated_attention(*args), write_gated_attention_reference(*args), rtol=1e-4, atol=1e-5
    )


def test_blocks_read_no_number_each_from_the_device() -> None:
    """On a GPU each read makes the host wait; one for all blocks is enough."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    at = torch.arange(300)
    rows = SortedRows(*torch.randn(2, 2, 300, 8), at.expand(2, -1), torch.rand(2, 300).log())
    with Reads() as reads:
        write_gated_attention(torch.randn(2, 1, 300, 8), at, rows, 20, 0.5, 1.0)
    assert reads.count == 0


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
    with pytest.raises(PolicyError, match="give it a scorer without state"):
        load(text_model, policy=Policy("mine", AttentionMass(), None, admission=Admission()))


def test_a_budget_beside_write_gates_has_both_sets_of_gates(tmp_path: Path) -> None:
    """Retention gates as ever, write gates by the policy's parameter; files tell them apart."""

    def engine(policy: str, **options: Any) -> Runtime:
        return Runtime.from_pretrained(
            bundled_model(), policy=policy, budget=40, device="cpu", dtype="float32", **options
        )

    write = "assets/gates/tiny-vlm-wgkv-0"
    two = engine(f"wgkv+dbtrimkv:write_gates={write}")
    assert two.policy.name == "wgkv+dbtrimkv" and two.policy.protect_recent == 32
    assert two.evict_path == "native, write gates in torch"
    one = engine("wgkv+snapkv", gates=write)
    assert one.model.needs.queries == 32 == one.policy.protect_recent
    assert one.evict_path.startswith("native, write gates and scores in torch")
    with two.session() as session:
        session.prefill({"input_ids": text_ids(90, 1)[None]})
        assert session.memory().entries == 40 * two.spec.rows
        session.save(tmp_path / "two")
    two.load_session(tmp_path / "two")[0].close()
    with pytest.raises(SessionError, match="gates"):
        engine("wgkv+dbtrimkv:write_gates=random").load_session(tmp_path / "two")
    with pytest.raises(
        GateError, match=r"needs write gates beside .*: --policy 'wgkv\+dbtrimkv:wr"
    ):
        engine("wgkv+dbtrimkv")
    with pytest.raises(GateError, match="needs write gates; name them"):
        engine("wgkv+snapkv")
    with pytest.raises(GateError, match="holds write gates"):
        engine(f"wgkv+dbtrimkv:write_gates={write}", gates=write)
    with pytest.raises(GateError, match="holds retention gates"):
        engine(f"wgkv+dbtrimkv:write_gates={bundled_model() / 'gates'}")


def test_two_sets_of_gates_without_retention_gates(text_model: Path) -> None:
    with pytest.raises(GateError, match=r"needs retention gates and .* has none"):
        Runtime.from_pretrained(text_model, policy="wgkv+dbtrimkv:write_gates=random")
    with pytest.raises(GateError, match="needs write gates beside"):
        Runtime.from_pretrained(text_model, policy="wgkv+dbtrimkv", gates="random")
