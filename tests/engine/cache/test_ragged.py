"""The ragged cache under random operations; pages that are given back or left."""

from __future__ import annotations

import functools
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from mmkv.engine.cache import KVForm, PagePool, RaggedCache
from mmkv.engine.cache.forms import FORMS
from mmkv.engine.errors import BudgetError
from mmkv.engine.policies import Budget
from mmkv.engine.prefill import Prefill
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.steps import decode_burst
from tests.support.bursts import Bursts
from tests.support.policies import STATIC
from tests.support.sessions import PICTURES, assert_same_rows, load, run, text_ids, turn
from tests.support.tiers import one_in, slow_but

Rows = list[list[int]]  # [layers * heads] -> serial numbers
EXAMPLES = int(os.environ.get("MMKV_CACHE_EXAMPLES", "100"))
FEW = 8
STEPS = 60


def key_value(serial: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    ramp = torch.arange(head_dim, dtype=torch.float32)
    return serial[..., None].float() + ramp / 64, -serial[..., None].float() - ramp / 64


def columns(serial: Tensor, pool: PagePool) -> dict[str, Tensor]:
    """What an entry with this serial number holds; every column tells entries apart."""
    key, value = map(pool.form.rotate, key_value(serial, pool.head_dim))
    keys, values = pool.form.key.encode(key), pool.form.value.encode(value)
    return {
        **{"keys": keys[0], "key_scale": keys[1], "values": values[0], "value_scale": values[1]},
        "log_beta": -serial.float() / 8,
        "position": serial.int(),
        "modality": (serial % 3).to(torch.uint8),
    }


class CacheMachine(RuleBasedStateMachine):
    """Open, append (to one or more sequences), evict, fork, export, import, close, grow, trim.

    In every form: codes and scales are compared bit by bit, and what is read back is off by half a
    step at most. ``budgets`` has the bytes that a sequence was cut to, until it grows.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 8, 16, 64]),
        layers=st.integers(1, 4),
        heads=st.integers(1, 4),
        head_dim=st.sampled_from([2, 5]),
        pages=st.integers(0, 40),
        form=st.sampled_from(list(FORMS.values())),
        state=st.sampled_from([0, 7, 500]),
    )
    def start(
        self,
        page_size: int,
        layers: int,
        heads: int,
        head_dim: int,
        pages: int,
        form: KVForm,
        state: int,
    ) -> None:
        if 4 in (form.key.bits, form.value.bits):
            head_dim *= 2  # codes of 4 bits come in pairs
        self.pool = PagePool(page_size, head_dim, pages, form=form)
        kept = {"m": ((3, 2), torch.float32)}
        states = {"s": ((state,), torch.float64)} if state else {}
        self.cache = RaggedCache(self.pool, layers, heads, kept, states)
        self.state_pages = math.ceil(8 * state / self.pool.page_bytes)
        self.model: dict[int, Rows] = {}
        self.beside: dict[int, float] = {}  # what memory and states hold
        self.opened = 0  # sequences that stand in tensors
        self.saved: list[tuple[dict[str, Tensor], Rows, int | None, float]] = []
        self.budgets: dict[int, int] = {}
        self.serial = 0

    @rule()
    @precondition(lambda self: len(self.model) < 6)
    def open(self) -> None:
        seq = self.cache.open()
        assert seq not in self.model, "an open slot was handed out again"
        self.model[seq] = [[] for _ in range(self.cache.rows)]
        self.beside[seq] = 0.0

    @rule(data=st.data(), count=st.one_of(st.just(1), st.integers(1, 40)))
    @precondition(lambda self: self.model)
    def append(self, data: st.DataObject, count: int) -> None:
        some = st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True)
        seqs = data.draw(some)
        slots = self.cache.append(torch.tensor(seqs), count)
        assert slots.shape == (len(seqs), self.cache.layers, self.cache.kv_heads, count)
        assert slots.unique().numel() == slots.numel(), "two new entries share a slot"
        serial = self.serial + torch.arange(slots.numel()).view(slots.shape)
        self.serial += slots.numel()
        self.pool.store(slots, *key_value(serial, self.pool.head_dim))
        for name in ("log_beta", "position", "modality"):
            getattr(self.pool, name).flatten(0, 1)[slots] = columns(serial, self.pool)[name]
        for seq, mine in zip(seqs, serial.flatten(1, 2).tolist(), strict=True):
            self.budgets.pop(seq, None)
            for row, new in zip(self.model[seq], mine, strict=True):
                row.extend(new)
            self.beside[seq] = float(self.serial)
            for _, kept in self.cache._beside():
                kept[seq] = self.serial

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]), given_=st.booleans())
    @precondition(lambda self: self.model)
    def evict(self, data: st.DataObject, share: float, given_: bool) -> None:
        """Drop a random share of all entries of some sequences, unevenly over their rows."""
        some = data.draw(
            st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=3, unique=True)
        )
        seq = some[0] if len(some) == 1 else some
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        entries = self.cache.entries(seq)
        serials = self.pool.position.view(-1)[entries.slot]
        tilt = torch.rand(self.cache.rows * len(some), generator=generator)[entries.row]
        chance = torch.rand(entries.row.numel(), generator=generator)
        victims = (chance < share * (1 if share == 1.0 else 2 * tilt)).nonzero().flatten()
        victims = victims[torch.randperm(victims.numel(), generator=generator)]
        # A fork holds the serial numbers of what it was made from.
        of = entries.row[victims] // self.cache.rows
        gone = set(zip(of.tolist(), serials[victims].tolist(), strict=True))
        self.cache.drop(seq, victims, entries if given_ else None)
        for at, one in enumerate(some):
            self.model[one] = [[s for s in row if (at, s) not in gone] for row in self.model[one]]

    @rule(data=st.data(), pages=st.floats(1, 4))
    @precondition(lambda self: self.model)
    def cut_to_bytes(self, data: st.DataObject, pages: float) -> None:
        """What a budget in bytes lets stay takes no more bytes, wherever it lies.

        The invariants see to it, now and until the sequence grows.
        """
        seq = data.draw(st.sampled_from(sorted(self.model)))
        budget = int(pages * self.cache.rows * self.pool.page_bytes)
        size, rows = self.pool.page_size, self.cache.rows
        allowed = Budget.bytes(budget).entries(rows, 0, size, self.pool.page_bytes)
        entries = self.cache.entries(seq)
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        order = torch.randperm(entries.row.numel(), generator=generator)
        victims = order[: max(order.numel() - allowed, 0)]
        gone = set(self.pool.position.view(-1)[entries.slot[victims]].tolist())
        self.cache.drop(seq, victims, entries)
        self.model[seq] = [[s for s in row if s not in gone] for row in self.model[seq]]
        self.budgets[seq] = budget

    @rule(data=st.data())
    @precondition(lambda self: self.model and len(self.model) < 6)
    def fork(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        order = self._stored(seq)
        other = self.cache.fork(seq)
        assert other not in self.model
        self.model[other] = [list(row) for row in self.model[seq]]
        self.beside[other] = self.beside[seq]
        if seq in self.budgets:
            self.budgets[other] = self.budgets[seq]
        assert self._stored(other) == order, "a fork keeps the storage order"

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def save(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        # The order in storage must survive too: a continued session is bit-identical.
        exported = self.cache.export(seq)
        self.saved.append((exported, self._stored(seq), self.budgets.get(seq), self.beside[seq]))

    @rule(data=st.data())
    @precondition(lambda self: self.saved and len(self.model) < 6)
    def load(self, data: st.DataObject) -> None:
        tensors, order, budget, beside = data.draw(st.sampled_from(self.saved))
        assert tensors["length"].flatten().tolist() == [len(row) for row in order]
        with pytest.raises(KeyError):  # no page is held then
            self.cache.import_({k: x for k, x in tensors.items() if k != "memory.m"})
        self.cache.check()
        seq = self.cache.import_(tensors)
        self.beside[seq] = beside
        assert seq not in self.model
        assert self._stored(seq) == order
        self.model[seq] = [list(row) for row in order]
        if budget is not None:
            self.budgets[seq] = budget

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def close(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.model)))
        free, held = self.pool.free_pages, self.cache.held_pages(seq) - self.state_pages
        self.cache.close(seq)
        assert self.pool.free_pages == free + held, "closing returns every page"
        del self.model[seq], self.beside[seq]
        self.budgets.pop(seq, None)

    @rule(extra=st.integers(1, 20))
    def grow(self, extra: int) -> None:
        assume(self.pool.num_pages < 2000)
        self.pool.grow(self.pool.num_pages + extra)

    @rule()
    def trim(self) -> None:
        """Only held pages are left, in memory, too, and every row keeps its order."""
        order = {seq: self._stored(seq) for seq in self.model}
        unused, total = self.pool.free_pages, self.pool.num_pages
        gone = self.opened - max(self.model, default=-1) - 1
        freed = unused * self.pool.page_bytes + gone * self.cache.state_bytes
        assert self.cache.trim() == freed
        self.opened -= gone if self.cache.states else 0
        assert (self.pool.free_pages, self.pool.num_pages) == (0, total - unused)
        tensors = [*self.pool.columns(), self.cache.table, *self.cache.states.values()]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors if unused or gone)
        assert {column.shape[0] for column in self.pool.columns()} == {total - unused}
        assert {seq: self._stored(seq) for seq in self.model} == order

    @rule(
        data=st.data(), count=st.integers(1, 40), what=st.sampled_from(["append", "open", "fork"])
    )
    @precondition(lambda self: self.model and len(self.model) < 6)
    def refused(self, data: st.DataObject, count: int, what: str) -> None:
        """A page less than is needed changes nothing (the invariants then see to it)."""
        cache, pool, size = self.cache, self.pool, self.pool.page_size
        seq = data.draw(st.sampled_from(sorted(self.model)))
        lengths = [len(row) for row in self.model[seq]]
        need = sum(math.ceil((n + count) / size) - math.ceil(n / size) for n in lengths)
        call: Callable[[], Any] = functools.partial(cache.append, torch.tensor([seq]), count)
        if what != "append":
            need = self.state_pages
            need += sum(math.ceil(n / size) for n in lengths) if what == "fork" else 0
            call = cache.open if what == "open" else functools.partial(cache.fork, seq)
        used = pool.num_pages - pool.free_pages + self.state_pages * len(self.model)
        assume(self.state_pages or (need > pool.free_pages and what != "open"))
        pool.limit = used + need - 1
        with pytest.raises(BudgetError):
            call()
        pool.limit = None
        self.pages(), self.contents()
        pool.limit = used + need
        if what == "append":
            pool.require(need)
            with pytest.raises(BudgetError):
                pool.require(need + 1)
        elif used + need >= pool.num_pages:
            other = call()
            cache.close(other)
            self.opened = max(self.opened, other + 1)
        pool.limit = None

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for seq in list(self.model):
            self.cache.close(seq)
        assert self.pool.free_pages == self.pool.num_pages, "pages were lost"
        self.cache.check()

    @invariant()
    def pages(self) -> None:
        """Every page is free or in exactly one row; a row holds ceil(len / P) pages."""
        cache, size = self.cache, self.pool.page_size
        cache.check()
        self.opened = max([self.opened, *(seq + 1 for seq in self.model)])
        assert self.pool.beside == self.state_pages * len(self.model)
        assert cache.memory_bytes() == (24 if len(cache.memory["m"]) else 0)
        held: list[int] = []
        for seq, rows in self.model.items():
            lengths = cache.length[seq].flatten().tolist()
            assert lengths == [len(row) for row in rows]
            mine = []
            for table, length in zip(cache.table[seq].flatten(0, 1).tolist(), lengths, strict=True):
                mine += table[: math.ceil(length / size)]
            assert cache.held_pages(seq) == len(mine) + self.state_pages
            assert all(bool((kept[seq] == self.beside[seq]).all()) for _, kept in cache._beside())
            held += mine
        free = self.pool.free_list().tolist()
        assert len(free) == self.pool.free_pages
        assert sorted(held + free) == list(range(self.pool.num_pages))

    @invariant()
    def contents(self) -> None:
        """Each row holds exactly its entries, in every column, in some order."""
        for seq, rows in self.model.items():
            entries = self.cache.entries(seq)
            expected = torch.tensor([r for r, row in enumerate(rows) for _ in row]).long()
            assert torch.equal(entries.row, expected), "entries are row-major"
            assert [sorted(row) for row in self._stored(seq)] == [sorted(row) for row in rows]
            serial = self.pool.position.view(-1)[entries.slot]
            for name, column in columns(serial, self.pool).items():
                stored = getattr(self.pool, name).flatten(0, 1)[entries.slot]
                assert torch.equal(stored, column), f"{name} no longer belongs to its position"
            self._close_to_what_was_stored(entries.slot, serial)

    def _close_to_what_was_stored(self, slot: Tensor, serial: Tensor) -> None:
        """What attention reads is off by half a step, and by what float32 itself rounds."""
        pool = self.pool
        given = key_value(serial, pool.head_dim)
        read = (pool.stored_keys, pool.stored_values)
        codecs = (pool.form.key, pool.form.value)
        scales = (pool.key_scale, pool.value_scale)
        for x, stored, codec, scale in zip(given, read, codecs, scales, strict=True):
            x = pool.form.rotate(x)
            size = x.abs().amax(-1, keepdim=True)
            step = 2**-7 * size  # of bfloat16, at most
            if codec.bits in (4, 8):
                step = scale.flatten(0, 1)[slot][..., :1].float()
            error = (stored.flatten(0, 1)[slot] - x).abs()
            exact = codec.bits == 0
            assert bool((error <= (0 if exact else 0.5 * step + 1e-6 * size)).all())

    @invariant()
    def bytes(self) -> None:
        """The pages of a sequence that was cut to a budget take no more, all columns counted."""
        for seq, budget in self.budgets.items():
            held = self.cache._pages(seq)
            assert sum(column[held].nbytes for column in self.pool.columns()) <= budget

    def _stored(self, seq: int) -> Rows:
        """Serial numbers per row, in storage order."""
        entries = self.cache.entries(seq)
        serial = self.pool.position.view(-1)[entries.slot]
        rows: Rows = [[] for _ in range(self.cache.rows)]
        for row, value in zip(entries.row.tolist(), serial.tolist(), strict=True):
            rows[row].append(value)
        return rows


@pytest.mark.parametrize(
    "examples",
    [FEW, pytest.param(EXAMPLES, marks=pytest.mark.long(reason="thousands of operations"))],
)
def test_cache_state_machine(examples: int) -> None:
    """About examples x STEPS operations on random shapes, all invariants after each."""
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=examples == FEW,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_check_names_the_broken_invariant() -> None:
    """The invariant checker itself can fail."""
    cache = RaggedCache(PagePool(4, 2, 8), 1, 2)
    seq = cache.open()
    cache.append(torch.tensor([seq]), 5)
    cache.check()
    good = cache.table.clone()
    cache.table[seq, 0, 0, 0] = cache.table[seq, 0, 1, 0]
    with pytest.raises(AssertionError, match="twice"):
        cache.check()
    cache.table.copy_(good)
    cache.length[seq, 0, 0] = 1
    with pytest.raises(AssertionError, match="free or held"):
        cache.check()
    cache.length[seq, 0, 0] = 5
    cache.check()


def test_a_pool_promises_and_hands_out_no_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = PagePool(4, 2, 3, limit=10)
    held = [pool.take(2)]
    assert (pool.num_pages, pool.free_pages) == (3, 1)
    for asked in (pool.require, pool.reserve, pool.take):
        with pytest.raises(BudgetError, match=r"11 pages of .* are needed, the limit is 10"):
            asked(9)
        assert (pool.num_pages, pool.free_pages) == (3, 1)
    pool.require(8)
    assert pool.num_pages == 3  # only a question
    pool.reserve(5)
    assert pool.free_pages == 5 and pool.num_pages == 7
    held.append(pool.take(8))
    assert (pool.num_pages, pool.free_pages) == (10, 0)
    assert sorted(torch.cat(held).tolist()) == list(range(10))
    # By an eighth at least, but never past the limit.
    pool = PagePool(4, 2, 64, limit=70)
    pool.take(65)
    assert pool.num_pages == 70
    pool = PagePool(4, 2, 64)
    pool.take(65)
    assert pool.num_pages == 72
    # On a GPU by as many as there are, whoever asks.
    for ask in ("take", "reserve", "prepare"):
        pool = PagePool(4, 2, 72)
        pool.doubles = True
        getattr(pool, ask)(73)
        assert pool.num_pages == 144
    # And no more than the memory: 90 pages of a mebibyte more, and the largest column once more.
    pool = PagePool(2**11, 64, 10)
    largest = max(column.nbytes for column in pool.columns())
    needed = 100 * pool.page_bytes + largest
    assert pool.page_bytes >= 2**20
    monkeypatch.setattr("mmkv.engine.cache.pool.free_bytes", lambda _: needed - 1)
    with pytest.raises(BudgetError, match="GiB more for 100 pages"):
        pool.require(100)
    monkeypatch.setattr("mmkv.engine.cache.pool.free_bytes", lambda _: needed)
    pool.require(100)
    assert pool.num_pages == 10
    # What is taken beyond is a quarter of what is left of it.
    pool = PagePool(4, 2, 64)
    needed = pool.page_bytes + max(column.nbytes for column in pool.columns())
    pool.free_pages = 0
    left = 4 * 3 * pool.page_bytes + 1
    monkeypatch.setattr("mmkv.engine.cache.pool.SMALL", 0)
    monkeypatch.setattr("mmkv.engine.cache.pool.free_bytes", lambda _: needed + left)
    pool.take(1)
    assert pool.num_pages == 64 + 1 + 3


def test_state_of_an_entry_begins_at_0_where_another_stood() -> None:
    """What a policy left in a slot is not the next entry's."""
    cache = RaggedCache(PagePool(4, 2, 0, state_size=2), 1, 2)
    seq = cache.open()
    slots = cache.append(torch.tensor([seq]), 6)
    cache.pool.state.flatten(0, 1)[slots.flatten()] = 7.0
    cache.drop(seq, torch.tensor([1, 2, 8]))  # three of them, from both rows
    added = cache.append(torch.tensor([seq]), 5).flatten()
    state = cache.pool.state.flatten(0, 1)
    assert not state[added].any()
    assert len(set(added.tolist())) == 10
    entries = cache.entries(seq)
    assert entries.row.numel() == 2 * 11 - 3
    kept = state[entries.slot]
    assert int((kept == 7.0).all(-1).sum()) == 12 - 3


# The pool gives back what a prefill's peak took, and every backend goes on with what is left.


PATHS = [
    (path, policy)
    for path in ("native", "torch", "static")
    for policy in ("dbtrimkv", "snapkv", "full")
    if path != "static" or policy in STATIC
]


@one_in(3)
@pytest.mark.parametrize(
    ("path", "policy"),
    slow_but([path for path in PATHS if "dbtrimkv" in path], PATHS, "the other policies"),
)
def test_a_trimmed_pool_changes_no_bit(path: str, policy: str, folders: dict[str, Path]) -> None:
    """Between steps of two sessions and after a third was closed; the pool ends up smaller."""
    engine, plain = (load(folders["vl"], policy=policy) for _ in range(2))
    both = []
    for each in (engine, plain):
        if path != "native":
            each.backends.cpu.switch_off()
        sessions = [each.session(), each.session(), each.session()]
        for index, session in enumerate(sessions):
            session.prefill(turn(70 + index, seed=index))
        sessions.pop(0).close()
        both.append(sessions)
    runner, other = Bursts(engine), Bursts(plain)
    pool = engine.cache.pool
    for number in range(2):
        unused, before = pool.free_pages, pool.num_pages
        outgrown = weakref.ref(pool.keys)
        assert engine.trim() == unused * pool.page_bytes
        assert pool.num_pages == before - unused > 0 and pool.free_pages == 0
        engine.cache.check()
        runner._steps.clear()  # graphs of the old pool, which Runtime.trim drops with its runner
        gc.collect()
        assert unused == 0 or outgrown() is None, "the old pool is still alive"
        assert engine.trim() == 0
        if path == "static":
            assert runner.decode(both[0], [3, 4], 5) == other.decode(both[1], [3, 4], 5)
        else:
            for token in text_ids(5, number).tolist():
                ours, theirs = (
                    each.decode(sessions, [token, token + 1])
                    for each, sessions in zip((engine, plain), both, strict=True)
                )
                assert torch.equal(ours, theirs)
        for ours, theirs in zip(*both, strict=True):
            assert_same_rows(ours, theirs)
            assert ours.state() == theirs.state()
    forked, saved = both[0][0].fork(), both[1][0].fork()
    assert torch.equal(forked.prefill(turn(9)), saved.prefill(turn(9)))


def live_bytes() -> int:
    """Bytes of all storages that a tensor refers to: a view counts the whole that it keeps."""
    gc.collect()
    held = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def read(session: CachedSequence, count: int = 300, chunks: int | None = None) -> Prefill:
    """Read a prompt, or some chunks of it."""
    prefill = session.begin_prefill({"input_ids": text_ids(count, count)[None]})
    while prefill.logits is None and chunks != 0:
        prefill.advance()
        chunks = None if chunks is None else chunks - 1
    return prefill


WAYS: dict[str, Callable[[CachedSequence], object]] = {
    "another is closed": lambda one: read(one.fork()),  # by its owner, who is gone
    "cut back": lambda one: (read(one), one.cut_back(20, 20, 20)),
    "forgotten": lambda one: (read(one), one.forget(20, 320)),
    "taken back": lambda one: read(one, chunks=3).roll_back(),
    "a smaller budget": lambda one: (read(one), one.set_budget(20)),
    "chunk after chunk": lambda one: (one.set_budget(20), read(one)),
}


NOT_UNDER = {"full": ("a smaller budget", "chunk after chunk"), "h2o": ("cut back",)}


@pytest.mark.parametrize("policy", ["full", "snapkv:window=6", "h2o"])
def test_what_is_given_back_is_held_by_nothing(policy: str, folders: dict[str, Path]) -> None:
    """Not by a view of it either: as many bytes as before the prompt, once the pool is trimmed."""
    engine = load(folders["vl"], policy=policy, budget=1000, prefill_chunk=50)
    with engine.session() as session:  # whose passes leave what the others compute in
        read(session)
        if engine.policy.evicts:
            WAYS["chunk after chunk"](session)
    for way, go in WAYS.items():
        if way not in NOT_UNDER.get(policy, ()):
            with engine.session() as session:
                read(session, 20)
                engine.trim()
                before = live_bytes()
                go(session)
                engine.trim()
                assert live_bytes() == before, way


def test_an_empty_pool_can_be_trimmed(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"])
    assert engine.trim() == 0
    session = engine.session()
    expected = load(folders["vl"]).session().prefill(PICTURES)
    session.prefill(PICTURES)
    session.close()
    assert engine.trim() > 0 and engine.cache.pool.num_pages == 0
    assert torch.equal(engine.session().prefill(PICTURES), expected)


def test_a_trim_drops_the_graphs(folders: dict[str, Path]) -> None:
    engine = load(folders["vl"])
    session = engine.session()
    session.prefill(turn(70))
    decode_burst(engine, engine.backends.cuda.decode_many, [session], [3], 2)
    assert engine.backends.cuda.runner is not None
    engine.trim()
    assert engine.backends.cuda.runner is None
    run(session, text_ids(3, 1))


# Nothing of a session is left for the next one, and no page is lost or beyond the limit.


def free(engine: Runtime) -> bool:
    """Whether every page is free, once somebody has taken the lock."""
    with engine.lock:
        engine.cache.check()
        pool = engine.cache.pool
        return pool.free_pages == pool.num_pages and engine.cache.open_count == 0


def test_a_pool_never_grows_beyond_its_limit(folders: dict[str, Path]) -> None:
    """Also where an eighth more would: many sessions, until one has no room."""
    engine = load(folders["vl"], policy="full", kv_limit=1_000_000, vision_cache=0, page_size=4)
    pool = engine.cache.pool
    assert pool.limit == 1_000_000 // pool.page_bytes
    sessions = []
    with pytest.raises(BudgetError):
        while len(sessions) < 1000:
            sessions.append(engine.session())
            sessions[-1].prefill(turn(20 + len(sessions) % 7))
            run(sessions[-1], text_ids(3, len(sessions)))
            assert pool.num_pages <= pool.limit
    assert len(sessions) > 5 and pool.num_pages <= pool.limit
    assert pool.num_pages * pool.page_bytes <= 1_000_000
    for session in sessions:
        session.close()
    assert free(engine)


def test_three_recorded_sessions_of_a_shared_budget_add_up(folders: dict[str, Path]) -> None:
    """Every entry that was born died once or is retained, in each of them."""
    engine = load(folders["vl"], policy="dbtrimkv", budget=24)
    engine.share(24)
    sessions = [engine.session() for _ in range(3)]
    recorders = [session.record() for session in sessions]
    for at, session in enumerate(sessions):
        session.prefill(turn(20 + at, seed=at))
    for token in text_ids(25, 5).tolist():
        engine.decode(sessions, [token, token + 1, token + 2])
    for session, recorder in zip(sessions, recorders, strict=True):
        record = recorder.read(session)
        born = {
            (row, position) for row in range(engine.spec.rows) for position in range(session.seen)
        }
        died = list(
            zip(record.deaths["row"].tolist(), record.deaths["position"].tolist(), strict=True)
        )
        heads = engine.spec.num_kv_heads
        held = {
            (layer * heads + head, position)
            for layer, rows in enumerate(session.retained())
            for head, row in enumerate(rows)
            for position in row.tolist()
        }
        assert len(died) == len(set(died)) > 0
        assert set(died) | held == born and not set(died) & held


def test_the_next_position_inside_a_picture_follows_its_highest(folders: dict[str, Path]) -> None:
    """M-RoPE: rows and columns of a picture are positions, too, and its last token is not last."""
    engine = load(folders["vl"], policy="full")
    positions = engine.family.turn(PICTURES, 0, engine.device).positions
    tokens, chunk = positions.shape[1], 3
    assert bool((positions.amax(0).diff() < 0).any()), "no picture is cut where it matters"
    with engine.session() as session:
        prefill = session.begin_prefill(PICTURES, chunk)
        while not prefill.advance():
            read = positions[:, : session.seen]
            assert session.next_position == int(read.max()) + 1
        assert session.seen == tokens and session.next_position == int(positions.max()) + 1


def forget_one(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(PICTURES)


def forget_half_a_prompt(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(PICTURES)
    prefill = session.begin_prefill(turn(20), 6)
    prefill.advance()  # holds a copy of the session to return to


def forget_in_a_thread(engine: Runtime) -> None:
    thread = threading.Thread(target=forget_one, args=(engine,))
    thread.start()
    thread.join()


def forget_in_a_ring(engine: Runtime) -> None:
    session: Any = engine.session()
    session.prefill(PICTURES)
    session.ring = session
    del session
    gc.collect()


@pytest.mark.parametrize(
    "forget", [forget_one, forget_half_a_prompt, forget_in_a_thread, forget_in_a_ring]
)
@pytest.mark.parametrize("shared", [False, True])
def test_what_nobody_refers_to_returns_its_pages(
    forget: Callable[[Runtime], None], shared: bool, folders: dict[str, Path]
) -> None:
    engine = load(folders["vl"], policy="dbtrimkv", budget=20)
    if shared:
        engine.share(20)
    forget(engine)
    assert free(engine)
    forget_one(engine)
    with engine.session() as session:  # an engine call is enough
        session.prefill(PICTURES)
        pool = engine.cache.pool
        assert pool.num_pages - pool.free_pages == engine.cache.held_pages(session.seq)


def test_pages_that_come_free_in_the_middle_of_a_call_wait_for_its_end(
    folders: dict[str, Path],
) -> None:
    """The collector may run anywhere: also between two steps that count pages."""
    engine = load(folders["vl"], policy="dbtrimkv", budget=20)
    lost: list[CachedSequence] = [engine.session()]
    lost[0].prefill(PICTURES)
    with engine.lock:
        before = engine.cache.pool.free_pages
        lost.clear()
        assert engine.cache.pool.free_pages == before and len(engine.cache.lost) == 1
        with engine.lock:  # of the same thread: still in the middle
            assert engine.cache.pool.free_pages == before
    assert free(engine)


def test_who_was_closed_before_it_was_lost_frees_nothing_of_the_next() -> None:
    cache = RaggedCache(PagePool(4, 2, 8), 1, 1)
    owner = cache.owner(cache.open())
    del owner
    cache.close(0)
    kept = cache.owner(cache.open())
    cache.free_lost()
    assert cache.open_count == 1 and kept.seq == 0


def test_what_a_policy_keeps_of_sessions_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of a hundred million queries, say."""
    kept = {"queries": ((2**24,), torch.float32)}
    states = {"s": ((9,), torch.float32)}
    cache = RaggedCache(PagePool(4, 2, 8), 1, 1, kept, states)
    monkeypatch.setattr("mmkv.engine.cache.ragged.free_bytes", lambda _: 4 * 2**26 - 1)
    with pytest.raises(BudgetError, match="4 sessions"):
        cache.open()
    assert not cache.open_count and cache.memory["queries"].shape[0] == 0
    cache.check()
    monkeypatch.setattr("mmkv.engine.cache.ragged.free_bytes", lambda _: 4 * 2**26)
    assert cache.open() == 0
