"""Policies and allocations in isolation, against brute force; state of scorers, unread gates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.bench.methods import gate_bytes
from mmkv.engine.backends.cuda.static_step import StaticStep
from mmkv.engine.budget import Interval
from mmkv.engine.errors import BudgetError, PolicyError
from mmkv.engine.model.gates import Gates, LayerGate
from mmkv.engine.policies import PRESETS, Budget, CacheView, Needs, NewTokens, make_policy
from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import Allocation, Policy, WindowReduction
from mmkv.engine.policies.scoring import Recency, Retention, WindowAttention
from mmkv.engine.policies.selection import Shares
from mmkv.engine.policies.selection import lowest as select_lowest
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.sessions import PICTURES, advance, load, run, text_ids


@dataclass(frozen=True)
class Given:
    """A view's source that has nothing but the attention it was given."""

    values: Callable[[CacheView], Tensor]

    def attention(self, view: CacheView, reduction: WindowReduction) -> Tensor:
        return self.values(view)


def make_view(
    lengths: list[list[int]],
    seen: int = 50,
    seed: int = 0,
    attention: Callable[[CacheView], Tensor] | None = None,
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
        source=None if attention is None else Given(attention),  # type: ignore[arg-type]
    )


def lowest(scores: Tensor, view: CacheView, count: int, among: Tensor | None = None) -> set[int]:
    """The ``count`` first entries in the order (score, position, layer, head), NaN before all."""
    chosen = range(scores.numel()) if among is None else among.tolist()
    key = [
        (
            not math.isnan(scores[i]),
            float(scores[i].nan_to_num(0, math.inf, -math.inf)),
            int(view.position[i]),
            int(view.row[i]) // view.kv_heads,
            int(view.row[i]) % view.kv_heads,
            i,
        )
        for i in chosen
    ]
    return {item[-1] for item in sorted(key)[: max(count, 0)]}


def cut(allocation: Allocation, scores: Tensor, view: CacheView, budget: int) -> Tensor:
    """What goes of such scores under this allocation."""
    return select_lowest(scores, view, allocation.shares(budget, view.layers, view.kv_heads))


LENGTHS = st.lists(
    st.lists(st.integers(0, 12), min_size=2, max_size=2), min_size=1, max_size=3
).filter(lambda rows: sum(map(sum, rows)) > 0)


LEVELS = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e-30, math.inf, -math.inf, math.nan]),
    min_size=1,
    max_size=6,
)


def drawn(levels: list[float], view: CacheView, seed: int) -> Tensor:
    """Scores of few values, so that ties are everywhere."""
    chosen = torch.randint(
        len(levels), view.row.shape, generator=torch.Generator().manual_seed(seed)
    )
    return torch.tensor(levels)[chosen]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(0, 70), LEVELS, st.integers(0, 10**6))
def test_global_allocation(
    lengths: list[list[int]], budget: int, levels: list[float], seed: int
) -> None:
    """Equal to a full sort, with few distinct scores so that ties are everywhere."""
    view = make_view(lengths, seed=seed)
    scores = drawn(levels, view, seed)
    victims = cut(GlobalAllocation(), scores, view, budget).tolist()
    assert len(set(victims)) == len(victims)
    assert set(victims) == lowest(scores, view, view.row.numel() - budget)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(0, 60), LEVELS, st.integers(0, 10**6))
def test_head_allocation(
    lengths: list[list[int]], budget: int, levels: list[float], seed: int
) -> None:
    """Each row is cut to its share, with the same order inside the row; rows below it are left.

    The shares add up to the budget: the first rows get what the division leaves over.
    """
    view = make_view(lengths, seed=seed)
    scores = drawn(levels, view, seed)
    victims = cut(HeadAllocation(), scores, view, budget).tolist()
    assert len(set(victims)) == len(victims)
    shares = [budget // view.rows] * view.rows
    for row in range(budget - sum(shares)):
        shares[row] += 1
    expected: set[int] = set()
    for row in range(view.rows):
        mine = (view.row == row).nonzero().flatten()
        expected |= lowest(scores, view, mine.numel() - shares[row], mine)
    assert set(victims) == expected
    stated = HeadAllocation().shares(budget, view.layers, view.kv_heads)
    assert stated.share.tolist() == shares and int(stated.share.sum()) == budget
    assert stated.group.tolist() == list(range(view.rows))


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 20), min_size=3), LEVELS, st.integers(0, 10**6))
def test_the_lowest_of_groups_of_rows(
    lengths: list[list[int]], wanted: list[int], levels: list[float], seed: int
) -> None:
    """One group per layer, of two rows that compete: a full sort of each."""
    view = make_view(lengths, seed=seed)
    scores = drawn(levels, view, seed)
    layers = torch.arange(view.layers).repeat_interleave(view.kv_heads)
    shares = Shares(layers, torch.tensor(wanted[: view.layers]))
    victims = select_lowest(scores, view, shares).tolist()
    expected: set[int] = set()
    for layer in range(view.layers):
        mine = (view.row // view.kv_heads == layer).nonzero().flatten()
        expected |= lowest(scores, view, mine.numel() - wanted[layer], mine)
    assert len(set(victims)) == len(victims) and set(victims) == expected


@pytest.mark.parametrize(("slack", "exceeded"), [(0, True), (1, True), (2, False)])
def test_a_group_above_its_share_is_exceeded_below_the_budget(slack: int, exceeded: bool) -> None:
    shares = HeadAllocation().shares(42, 2, 2)  # 11, 11, 10, 10
    assert shares.exceeded(torch.tensor([3, 11, 12, 3]), slack) is exceeded
    assert not shares.exceeded(torch.tensor([11, 11, 10, 10]), 0)
    layers = Shares(torch.tensor([0, 0, 1, 1]), torch.tensor([30, 12]))
    assert layers.exceeded(torch.tensor([1, 2, 12, 3 + (slack < 2)]), slack) is (slack < 2)
    assert not GlobalAllocation().shares(42, 2, 2).exceeded(torch.tensor([42, 0, 0, 0]), 0)


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS, st.sampled_from([1, 3, 5, 7]), st.sampled_from(["avg", "max"]), st.integers(0, 10**6)
)
def test_window_attention_scorer(
    lengths: list[list[int]], kernel: int, pool: Any, seed: int
) -> None:
    """Pooling over the neighbours before the window, zeros counted at the ends."""
    values = torch.rand(sum(map(sum, lengths)), generator=torch.Generator().manual_seed(seed))
    view = make_view(lengths, seed=seed, attention=lambda _: values)
    got = WindowAttention(16, kernel, pool).score(view)
    expected = torch.full_like(got, torch.inf)  # the window itself always stays
    for row in range(view.rows):
        mine = (view.row == row).nonzero().flatten().tolist()
        prefix = [i for i in mine if int(view.position[i]) < 50 - 16]
        prefix.sort(key=lambda i: int(view.position[i]))
        for place, i in enumerate(prefix):
            near = prefix[max(place - kernel // 2, 0) : place + kernel // 2 + 1]
            pooled = {"avg": values[near].sum() / kernel, "max": values[near].max()}
            expected[i] = pooled[pool]
    torch.testing.assert_close(got, expected)


class MiddleFirst:
    """Prefers the middle of the sequence, so that neither end is kept by its score."""

    needs = Needs()

    def score(self, view: CacheView) -> Tensor:
        return -(view.position - view.seen / 2).abs()


@dataclass(frozen=True)
class Pyramid:
    """One group per layer; the first layer gets the most, the last one the least."""

    spare: int = 0

    def shares(self, budget: int, layers: int, kv_heads: int) -> Shares:
        share = budget * 2 * (layers - torch.arange(layers)) // (layers * (layers + 1))
        share[0] += budget - share.sum() + self.spare
        return Shares(torch.arange(layers).repeat_interleave(kv_heads), share)


@pytest.mark.parametrize("evict_every", [1, 4])
def test_a_layer_above_its_share_is_cut_while_the_total_is_below_the_budget(
    evict_every: int,
) -> None:
    policy = Policy("pyramid", Recency(), Pyramid())
    engine = Runtime.from_pretrained(
        bundled_model(), policy=policy, budget=8, evict_every=evict_every, device="cpu"
    )
    layers, heads = engine.spec.num_layers, engine.spec.num_kv_heads
    budget = 8 * engine.spec.rows
    share = Pyramid().shares(budget, layers, heads).share.tolist()
    session = engine.session()
    session.prefill({"input_ids": torch.arange(3, 9)[None]})
    assert session.entries_per_layer() == [min(n, 6 * heads) for n in share]
    assert session.entries < budget and session.evicted > 0
    for token in range(20, 40):
        session.decode(token)
        above = [n - m for n, m in zip(session.entries_per_layer(), share, strict=True)]
        assert max(above) <= (evict_every - 1) * heads
        assert session.entries == sum(session.entries_per_layer())
    other = session.fork()
    other.set_budget(5)
    less = Pyramid().shares(5 * engine.spec.rows, layers, heads).share.tolist()
    assert other.entries_per_layer() == less


def test_shares_above_the_budget_are_refused() -> None:
    policy = Policy("greedy", Recency(), Pyramid(spare=1))
    with pytest.raises(PolicyError, match=r"'greedy'.* 21 entries of a budget of 20"):
        policy.victims(make_view([[30, 30]], seen=30), 20)


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


def test_registry() -> None:
    for name in PRESETS:
        policy = make_policy(name)
        assert policy.name == name and policy.source
        never = name in ("full", "wgkv") or policy.pruner is not None
        assert policy.evicts is not never
    assert make_policy("dbtrimkv", 5).scoring == Retention(5)
    assert make_policy("trimkv", 5).scoring == Retention(1, newest_age=0)
    with pytest.raises(PolicyError) as error:
        make_policy("nonsense")
    assert all(name in str(error.value) for name in ("nonsense", *PRESETS))
    for bad in (0, -1, 1.5, -math.inf, math.nan):
        with pytest.raises(PolicyError):
            make_policy("dbtrimkv", bad)


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
        assert Budget.bytes(count).entries(rows, 10, page, page_bytes, Interval(8)) == entries - 42
    too_small = (Budget.of(0.5), Budget.bytes(100))
    for budget in too_small:
        with pytest.raises(BudgetError, match="at least 1 entry per row"):
            budget.entries(rows, 10, page, page_bytes)
    with pytest.raises(BudgetError, match=r"\(9,000 bytes of pages\)"):
        Budget.bytes(8_999).entries(rows, 10, page, page_bytes, Interval(8))  # 9 x 16 = 90 + 54
    assert Budget.bytes(9_000).entries(rows, 10, page, page_bytes, Interval(8)) == 12
    for steps in (1, 2, 9, 128):  # what stays in bytes is the most that leaves room for its slack
        for total in range(rows, 900, 5):
            stays = Interval(steps, 4).within(total, rows)

            def stands(entries: int, steps: int = steps) -> int:
                return entries + (max(min(steps, entries // rows // 4), 1) - 1) * rows

            assert stands(stays) <= total < stands(stays + rows)
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(BudgetError):
            Budget.of(value)
    with pytest.raises(BudgetError):
        Budget.of(Budget.fraction(1.001))
    assert Budget.of("100%") == Budget.fraction(1.0)


# State that scorers give new entries, beside the attention that passes add up.


@dataclass(frozen=True)
class Both:
    """Adds up attention, and notes the position and whether a token was in a prompt."""

    needs: ClassVar[Needs] = Needs(state=3, mass="mean")

    def on_append(self, new: NewTokens) -> Tensor:
        prompt = torch.full_like(new.position, int(new.prompt))
        return torch.stack([new.position, prompt], -1)[:, :, None, None].float()

    def score(self, view: CacheView) -> Tensor:
        return view.state()[:, 0]


@pytest.mark.parametrize("native", [True, False])
def test_mass_and_state_at_creation_do_not_meet(native: bool, folders: dict[str, Path]) -> None:
    """In prompts, steps and batches: no entry is dropped, so each query gives every row 1."""
    engine = load(folders["vl"], policy=Policy("both", Both(), HeadAllocation()), budget=200)
    if not native:
        engine.backends.cpu.switch_off()
    one, two = engine.session(), engine.session()
    advance(one, PICTURES)
    advance(one, text_ids(5, 1))
    prompt = one.seen - 5
    advance(two, text_ids(3, 2))
    engine.decode([one, two], [7, 8])
    for session in (one, two):
        view = session.view()
        mass, position, said = view.state().unbind(-1)
        total = torch.zeros(view.rows).index_add(0, view.row, mass)
        torch.testing.assert_close(total, torch.full_like(total, session.seen), rtol=1e-5, atol=0)
        assert (mass[view.position == session.seen - 1] > 0).all()
        assert torch.equal(position, view.position.float())
        start = prompt if session is one else 0
        assert torch.equal(said.bool(), view.position < start)


@dataclass(frozen=True)
class Taps:
    """Notes the size of the residual stream at depths that are not in order."""

    needs: ClassVar[Needs] = Needs(state=5, taps=(0.9, (0.0, 0.9), 0.0, 1.0))

    def on_append(self, new: NewTokens) -> Tensor:
        return new.taps.norm(dim=-1).permute(1, 2, 0)[:, :, None, None]

    def score(self, view: CacheView) -> Tensor:
        return view.state()[:, 0]


def test_taps_come_in_the_order_they_were_asked_for(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"], policy=Policy("taps", Taps(), HeadAllocation()), budget=200)
    session = engine.session()
    advance(session, PICTURES)
    advance(session, text_ids(2, 1))
    assert engine.decoder.taps == (1, 0, 1, 0, 1)
    upper, *more = session.view().state().unbind(-1)
    assert torch.equal(more[1], upper) and torch.equal(more[3], upper)
    assert torch.equal(more[0], more[2]) and not torch.equal(more[0], upper)


# Gates that a policy does not read are not computed; whoever asks for them still gets them.


@pytest.mark.parametrize("policy", ["full", "streamingllm", "snapkv", "dbtrimkv", "trimkv"])
def test_gates_are_computed_for_policies_that_read_them_only(
    policy: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch, in C and in the static step; ``log_beta`` of the entries is 0 without them."""
    reads = policy in ("dbtrimkv", "trimkv")
    engine = load(folders["vl"], policy=policy)
    asked = []
    logits = LayerGate.logits

    def counted(gate: LayerGate, hidden: Tensor) -> Tensor:
        asked.append(hidden.shape)
        return logits(gate, hidden)

    monkeypatch.setattr(LayerGate, "logits", counted)
    cpu = engine.backends.cpu
    session = engine.session(30 if engine.policy.evicts else None)
    session.prefill(PICTURES)
    run(session, text_ids(3, 1))
    native, cpu.decoder = cpu.decoder, None
    run(session, text_ids(3, 2))
    assert bool(asked) == reads
    assert bool(session.view().log_beta.any()) == reads
    assert native is None or (native._model.trunk > 0) == reads
    step = StaticStep(engine.model, engine.cache, 1, 4, 8, False, 1)
    assert (step._gates is not None) == reads
    assert (gate_bytes(engine) > 0) == reads


def test_gates_that_are_not_read_can_be_asked_for(folders: dict[str, Path]) -> None:
    """The same numbers as those of an engine that reads them."""
    ours, other = (load(folders["vl"], policy=policy) for policy in ("full", "dbtrimkv"))
    hidden = torch.randn(5, ours.spec.hidden_size)
    log_beta = ours.gates(1, hidden)
    assert log_beta.shape == (5, ours.spec.num_kv_heads) and bool((log_beta < 0).all())
    assert torch.equal(log_beta, other.gates(1, hidden))
    assert isinstance(ours._gates, Gates) and ours.decoder.gates is None


@pytest.mark.parametrize("weights", ["auto", "bf16", "int8"])
def test_trunks_are_rounded_beside_rounded_weights(weights: str, folders: dict[str, Path]) -> None:
    """To bfloat16, read by float32 states; files of sessions know the gates as they are stored."""
    engine = load(folders["vl"], policy="dbtrimkv", weights=weights, fresh=True)
    placed, stored = engine.decoder.gates, engine._gates
    assert placed is not None and stored is not None
    assert placed.fingerprint() == stored.fingerprint()
    (ours, _), (theirs, bias) = placed.layers[1].trunk[0], stored.layers[1].trunk[0]
    assert isinstance(theirs, Tensor)
    hidden = torch.randn(5, engine.spec.hidden_size)
    x, wanted = hidden.double(), stored.layers[1]
    for matrix, bias in wanted.trunk:
        assert isinstance(matrix, Tensor)
        held = matrix if weights == "auto" else matrix.bfloat16()
        x = torch.nn.functional.silu(x @ held.double().T + bias)
    z = x @ wanted.readout.double().T + wanted.bias
    torch.testing.assert_close(placed.logits(1, hidden).double(), z, rtol=1e-5, atol=1e-4)
    if weights == "auto":
        assert ours is theirs  # a change in place is seen
    else:
        assert (
            ours.dtype == torch.bfloat16
            if isinstance(ours, Tensor)
            else ours.nbytes < theirs.nbytes
        )
        again = placed.to(engine.device, engine.dtype)
        assert torch.equal(again.layers[1].trunk[0][0], theirs)
