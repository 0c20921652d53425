"""Scorers and allocations in isolation, against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import BudgetError, PolicyError, SessionError
from engine.policies import PRESETS, Budget, CacheView, Needs, make_policy
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import Policy
from engine.policies.scoring import Recency, Retention, WindowAttention
from engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.oracle import log_score


def no_attention(view: CacheView) -> Tensor:
    raise AssertionError("this scorer must not ask for attention")


def make_view(
    lengths: list[list[int]],
    seen: int = 50,
    seed: int = 0,
    attention: Callable[[CacheView], Tensor] = no_attention,
) -> CacheView:
    """Rows of the given lengths with random distinct positions, in random storage order."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor(lengths)
    rows = [torch.randperm(seen, generator=generator)[:n] for n in length.flatten().tolist()]
    position = torch.cat(rows)
    return CacheView(
        seen=seen,
        layers=length.shape[0],
        kv_heads=length.shape[1],
        row=torch.repeat_interleave(length.flatten()),
        length=length.flatten(),
        position=position,
        log_beta=-torch.rand(position.numel(), generator=generator) * 3,
        modality=torch.zeros(position.numel(), dtype=torch.uint8),
        attention=attention,
    )


def lowest(scores: Tensor, view: CacheView, count: int, among: Tensor | None = None) -> set[int]:
    """The ``count`` first entries in the order (score, position, layer, head)."""
    chosen = range(scores.numel()) if among is None else among.tolist()
    key = [
        (float(scores[i]), int(view.position[i]), int(view.row[i]) // view.kv_heads,
         int(view.row[i]) % view.kv_heads, i)
        for i in chosen
    ]  # fmt: skip
    return {item[-1] for item in sorted(key)[: max(count, 0)]}


LENGTHS = st.lists(
    st.lists(st.integers(0, 12), min_size=2, max_size=2), min_size=1, max_size=3
).filter(lambda rows: sum(map(sum, rows)) > 0)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(0, 70), st.integers(1, 12), st.integers(0, 10**6))
def test_global_allocation(lengths: list[list[int]], budget: int, levels: int, seed: int) -> None:
    """Equal to a full sort, with few distinct scores so that ties are everywhere."""
    view = make_view(lengths, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (view.row.numel(),), generator=generator).float()
    victims = GlobalAllocation().victims(scores, view, budget).tolist()
    assert len(set(victims)) == len(victims)
    assert set(victims) == lowest(scores, view, view.row.numel() - budget)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(0, 8), st.integers(1, 12), st.integers(0, 10**6))
def test_head_allocation(lengths: list[list[int]], share: int, levels: int, seed: int) -> None:
    """Each row is cut to its share, with the same order inside the row; rows below it are left."""
    view = make_view(lengths, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (view.row.numel(),), generator=generator).float()
    budget = share * view.rows + view.rows - 1  # the remainder of the division is not used
    victims = HeadAllocation().victims(scores, view, budget).tolist()
    assert len(set(victims)) == len(victims)
    expected: set[int] = set()
    for row in range(view.rows):
        mine = (view.row == row).nonzero().flatten()
        expected |= lowest(scores, view, mine.numel() - share, mine)
    assert set(victims) == expected


def test_infinite_scores_go_last_and_then_by_position() -> None:
    view = make_view([[6, 6]])
    scores = torch.full((12,), torch.inf)
    scores[3] = 0.0
    for allocation in (GlobalAllocation(), HeadAllocation()):
        assert 3 in allocation.victims(scores, view, 10).tolist()
    # All protected: the budget still holds, and the smallest positions go.
    victims = GlobalAllocation().victims(scores, view, 4)
    assert set(victims.tolist()) == lowest(scores, view, 8)


def test_ties_fall_on_position_then_layer_then_head() -> None:
    row = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    position = torch.tensor([5, 2, 2, 5, 5, 2, 2, 5])
    view = make_view([[2, 2], [2, 2]])
    view = CacheView(
        10, 2, 2, row, view.length, position, view.log_beta, view.modality, no_attention
    )
    order = []
    for budget in range(7, -1, -1):
        victims = set(GlobalAllocation().victims(torch.zeros(8), view, budget).tolist())
        order += list(victims - set(order))
    assert order == [1, 2, 5, 6, 0, 3, 4, 7]


@pytest.mark.parametrize("n", [1, 2, 5, math.inf])
def test_retention_scorer(n: float) -> None:
    view = make_view([[7, 0], [20, 3]])
    expected = log_score(view.log_beta, view.seen - view.position.long(), n)
    torch.testing.assert_close(Retention(n).score(view).double(), expected, rtol=1e-6, atol=1e-6)


def test_the_newest_entry_has_age_one() -> None:
    view = make_view([[50]])
    newest = int(view.position.argmax())
    assert Retention(1).score(view)[newest] == view.log_beta[newest]


def test_recency_scorer() -> None:
    view = make_view([[5, 9]])
    assert torch.equal(Recency().score(view).argsort(), view.position.argsort())


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 3, 5, 7]), st.integers(0, 10**6))
def test_window_attention_scorer(lengths: list[list[int]], kernel: int, seed: int) -> None:
    """Average pooling over neighbours in ascending position, zeros counted at the ends."""
    values = torch.rand(sum(map(sum, lengths)), generator=torch.Generator().manual_seed(seed))
    view = make_view(lengths, seed=seed, attention=lambda _: values)
    got = WindowAttention(window=16, kernel=kernel).score(view)
    expected = torch.zeros_like(got)
    for row in range(view.rows):
        mine = (view.row == row).nonzero().flatten().tolist()
        mine.sort(key=lambda i: int(view.position[i]))
        for place, i in enumerate(mine):
            near = mine[max(place - kernel // 2, 0) : place + kernel // 2 + 1]
            expected[i] = values[near].sum() / kernel
    torch.testing.assert_close(got, expected)


class MiddleFirst:
    """Prefers the middle of the sequence, so that neither end is kept by its score."""

    needs = Needs()

    def score(self, view: CacheView) -> Tensor:
        return -(view.position - view.seen / 2).abs()


def test_protection_outranks_scores() -> None:
    view = make_view([[30, 30]], seen=30)
    policy = Policy("t", MiddleFirst(), GlobalAllocation(), 4, 8)
    kept = torch.ones(60, dtype=torch.bool)
    kept[policy.victims(view, 30)] = False
    for row in (0, 1):
        held = sorted(view.position[kept & (view.row == row)].tolist())
        assert held == [*range(4), *held[4:-8], *range(22, 30)]
        assert set(held[4:-8]) <= set(range(13, 18))
    assert int(kept.sum()) == 30


def test_streamingllm_keeps_sinks_and_the_newest() -> None:
    view = make_view([[40, 40]], seen=40)
    kept = torch.ones(80, dtype=torch.bool)
    kept[make_policy("streamingllm").victims(view, 20)] = False
    for row in (0, 1):
        held = sorted(view.position[kept & (view.row == row)].tolist())
        assert held == [0, 1, 2, 3, *range(34, 40)]


def test_registry() -> None:
    assert {"full", "dbtrimkv", "trimkv", "streamingllm", "snapkv"} <= set(PRESETS)
    for name in PRESETS:
        policy = make_policy(name)
        assert policy.name == name and policy.source
        assert policy.evicts == (name != "full")
    assert make_policy("dbtrimkv", 5).scoring == Retention(5)
    assert make_policy("trimkv", 5).scoring == Retention(1)
    with pytest.raises(PolicyError) as error:
        make_policy("nonsense")
    assert all(name in str(error.value) for name in ("nonsense", *PRESETS))
    assert "\n" not in str(error.value)
    for bad in (0, -1, 1.5, -math.inf, math.nan):
        with pytest.raises(PolicyError):
            make_policy("dbtrimkv", bad)


def test_the_newest_tokens_can_be_kept_whatever_their_scores(tmp_path: Path) -> None:
    """As many as are asked for, in every row, where the gates alone would let some of them go."""
    assert make_policy("dbtrimkv", 5) == replace(
        make_policy("dbtrimkv+24", 5), name="dbtrimkv", protect_recent=0
    )
    newest = set(range(49, 55))
    for path in ("native", "torch"):
        kept = []
        for policy in ("dbtrimkv", "dbtrimkv+6"):
            engine = Runtime.from_pretrained(
                bundled_model(), policy=policy, budget=8, dtype="float32", device="cpu"
            )
            if path == "torch":
                engine.backends.cpu.switch_off()
            session = engine.session()
            session.prefill({"input_ids": torch.arange(3, 43)[None]})
            for token in range(50, 65):
                session.decode(token)
            assert session.seen == 55 and session.entries == 8 * engine.spec.rows
            rows = [set(row.tolist()) for layer in session.retained() for row in layer]
            kept.append(sum(newest <= row for row in rows) / len(rows))
        assert kept[0] < 0.5 and kept[1] == 1
    session.save(tmp_path / "kept.mmkv")
    other = Runtime.from_pretrained(bundled_model(), policy="dbtrimkv", dtype="float32")
    with pytest.raises(SessionError):
        other.load_session(tmp_path / "kept.mmkv")
    for bad in ("dbtrimkv+", "dbtrimkv+-1", "trimkv+2.5", "snapkv+4", "full+4"):
        with pytest.raises(PolicyError, match="only dbtrimkv and trimkv take") as error:
            make_policy(bad)
        assert "\n" not in str(error.value)


def test_budget_units() -> None:
    rows, page, page_bytes = 6, 16, 1000
    assert Budget.of(64).entries(rows, 10, page, page_bytes) == 384
    assert Budget.of(7.5).entries(rows, 10, page, page_bytes) == 45
    assert Budget.fraction(0.25).entries(rows, 100, page, page_bytes) == 150
    assert Budget.fraction(0.25).entries(rows, 1, page, page_bytes) == rows
    for count in (20_000, 123_456):
        entries = Budget.bytes(count).entries(rows, 10, page, page_bytes)
        # The worst split of that many entries over the rows still fits the bytes.
        worst = (entries + rows * (page - 1)) // page
        assert worst * page_bytes <= count < (worst + 2) * page_bytes
    too_small = (Budget.of(0.5), Budget.bytes(100))
    for budget in too_small:
        with pytest.raises(BudgetError, match="at least 1 entry per row"):
            budget.entries(rows, 10, page, page_bytes)
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(BudgetError):
            Budget.of(value)
    with pytest.raises(BudgetError):
        Budget.of(Budget.fraction(1.5))
