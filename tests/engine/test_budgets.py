"""One budget for several sequences: what is kept, beside a plain selection in numpy."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv.engine.budget import EVERY_STEP, Budget, Interval
from mmkv.engine.errors import BudgetError, PolicyError, SessionError
from mmkv.engine.model.gates import Gates
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.sessions import (
    LATER,
    PICTURES,
    load,
    qwen3_vl,
    save_checkpoint,
    text_ids,
    turn,
)

Key = tuple[int, int, int]  # position, layer, head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(qwen3_vl(), tmp_path_factory.mktemp("qwen"))


class Plain:
    """What each sequence should hold: lists of entries, one sort of all scores after each pass."""

    def __init__(self, budget: int, floor: int, lookahead: int = 2) -> None:
        self.budget, self.floor, self.lookahead = budget, floor, lookahead
        self.held: list[dict[Key, float]] = []
        self.seen: list[int] = []
        self.weight: list[float] = []
        self.recent = 0
        self.forgotten: list[float] | None = None  # weight, where that decides

    def open(self, weight: float = 1.0) -> int:
        self.held.append({})
        self.seen.append(0)
        self.weight.append(weight)
        return len(self.held) - 1

    def score(self, at: int, key: Key) -> float:
        """DBTrimKV, equation 9, times the weight: sum over n of exp(age * log beta)."""
        age = self.seen[at] - key[0]
        if age <= self.recent:
            return math.inf
        beta = self.held[at][key]
        gained = [np.exp((age + n) * np.float64(beta)) for n in range(self.lookahead)]
        return float(np.log(np.sum(gained)) + np.log(self.weight[at]))

    def cut(self, slack: int) -> None:
        total = sum(map(len, self.held))
        if total <= self.budget + slack:
            return
        there = [at for at in range(len(self.held)) if self.held[at]]
        order = {
            at: sorted(self.held[at], key=lambda key, at=at: (self.score(at, key), key))
            for at in there
        }
        floor = min(self.floor, self.budget // len(there))
        ranked = []
        for at in there:
            guarded = order[at][max(len(order[at]) - floor, 0) :]
            lost = self.forgotten[at] if self.forgotten else 0.0
            every = lost + self.weight_of(at, self.held[at])
            for key in order[at]:
                value = self.score(at, key)
                lost += self.weight_of(at, {key: self.held[at][key]})
                if self.forgotten and math.isfinite(value):
                    value = lost / every * self.weight[at]
                ranked.append((key in guarded, value, key, at))
        for _, _, key, at in sorted(ranked)[: total - self.budget]:
            del self.held[at][key]

    def weight_of(self, at: int, entries: dict[Key, float]) -> float:
        """What entries weigh as their gates predict it: exp(age * log beta)."""
        return sum(math.exp((self.seen[at] - key[0]) * beta) for key, beta in entries.items())


def entries_of(session: CachedSequence) -> dict[Key, float]:
    view, heads = session.view(), session.engine.spec.num_kv_heads
    rows, positions, betas = view.row.tolist(), view.position.tolist(), view.log_beta.tolist()
    return {
        (position, row // heads, row % heads): beta
        for row, position, beta in zip(rows, positions, betas, strict=True)
    }


class Both:
    """An engine and the plain selection, which gets each new entry's gate from the engine."""

    def __init__(self, engine: Runtime, plain: Plain) -> None:
        self.engine, self.plain = engine, plain
        self.sessions: list[CachedSequence] = []
        self.new: dict[Key, float] = {}
        assert engine.shared is not None
        cut, by_risk = engine.shared.cut, engine.shared.by_risk

        def watched(sessions: Any, interval: Any = EVERY_STEP, refused_by: Any = None) -> None:
            self.feed()
            if by_risk:
                risks = [one.risk() for one in self.sessions]
                plain.forgotten = [0.0 if one is None else one.forgotten for one in risks]
            cut(sessions, interval, refused_by)
            plain.cut((interval.steps - 1) * engine.spec.rows)
            self.compare()

        engine.shared.cut = watched  # type: ignore[method-assign]

    def open(self, weight: float = 1.0) -> CachedSequence:
        session = self.engine.session()
        assert self.engine.shared is not None
        self.engine.shared.join(session, weight)
        self.sessions.append(session)
        self.plain.open(weight)
        return session

    def feed(self) -> None:
        """Take over what was appended since the last cut."""
        for at, session in enumerate(self.sessions):
            for key, beta in entries_of(session).items():
                if key[0] >= self.plain.seen[at]:
                    self.plain.held[at][key] = beta
            self.plain.seen[at] = session.seen

    def compare(self) -> None:
        for at, session in enumerate(self.sessions):
            assert set(entries_of(session)) == set(self.plain.held[at]), f"sequence {at}"
            assert session.entries == len(self.plain.held[at])


@pytest.mark.parametrize(
    ("budget", "floor", "evict_every", "policy", "by_risk"),
    [
        (12, 0, 1, "dbtrimkv", False),
        (12, 3, 1, "dbtrimkv:recent=2", False),
        (10, 4, 3, "dbtrimkv", False),
        (6, 1, 1, "dbtrimkv:recent=7", False),  # more is protected than fits: ties decide
        (12, 0, 1, "dbtrimkv", True),
        (12, 3, 3, "dbtrimkv:recent=2", True),
    ],
)
def test_what_is_kept_is_the_best_of_all(
    folder: Path, budget: int, floor: int, evict_every: int, policy: str, by_risk: bool
) -> None:
    engine = load(folder, policy=policy, evict_every=evict_every)
    engine.share(budget, floor, by_risk)
    rows = engine.spec.rows
    both = Both(engine, Plain(budget * rows, floor * rows))
    both.plain.recent = engine.policy.protect_recent
    first, second, third = both.open(), both.open(0.25), both.open(3.0)
    first.prefill(PICTURES)
    second.prefill(LATER)
    tokens = text_ids(8, seed=5).tolist()
    for token in tokens[:4]:
        engine.decode([first, second], [token, token + 1])
    third.prefill(PICTURES)
    for token in tokens[4:]:
        engine.decode([third, first, second], [token, token + 2, token + 3])
    assert sum(one.evicted for one in both.sessions) > 0
    lengths = [one.entries for one in both.sessions]
    assert len(set(lengths)) > 1, "no session had more than another"
    assert sum(lengths) <= budget * rows + (evict_every - 1) * rows
    if evict_every == 1:
        assert min(lengths) >= floor * rows
    second.close()
    assert engine.shared is not None and engine.shared.held == first.entries + third.entries
    both.sessions.remove(second)
    for column in (both.plain.held, both.plain.seen, both.plain.weight):
        del column[1]  # type: ignore[attr-defined]
    engine.decode([first], [7])
    for one in (first, third):
        one.close()


def test_a_session_at_risk_gets_room_that_another_gives_up(folder: Path) -> None:
    """One whose gates predict that all it read will matter, beside one that forgets anyway."""
    found, gate_logits = {}, Gates.logits
    for by_risk in (False, True):
        engine = load(folder)
        engine.share(24, floor=0 if by_risk else 12, by_risk=by_risk)
        shared, rows = engine.shared, engine.spec.rows
        assert shared is not None
        dense, plain = engine.session(), engine.session()
        for session, more in ((dense, 5.0), (plain, -8.0)):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Gates, "logits", lambda *a, by=more: gate_logits(*a) + by)
                for seed in range(3):
                    session.prefill(turn(20, seed=seed))
                    assert shared.held <= 24 * rows  # exact, whoever grows
        risks = [one.risk().total for one in (dense, plain)]  # type: ignore[union-attr]
        found[by_risk] = dense.entries, plain.entries, *risks
        assert shared.held == dense.entries + plain.entries <= 24 * rows
        for session in (dense, plain):
            session.close()
    equal, moved = found[False], found[True]
    assert moved[0] > equal[0] == 12 * 4 and moved[1] < equal[1]
    assert equal[3] < moved[3] < moved[2] + 0.05 and moved[2] < equal[2]


def test_copies_take_part_and_files_come_back(folder: Path, tmp_path: Path) -> None:
    engine = load(folder)
    engine.share(10)
    shared, rows = engine.shared, engine.spec.rows
    assert shared is not None
    one = engine.session()
    shared.join(one, 2.0)
    one.prefill(PICTURES)
    other = one.fork()
    assert shared.weight(other) == 2.0 and shared.held == 2 * one.entries
    before = entries_of(one)
    shared.leave(one)  # stands as it is while the other goes on
    other.decode(5)
    assert entries_of(one) == before
    one.save(tmp_path / "one.mmkv")
    again, _ = engine.load_session(tmp_path / "one.mmkv")
    assert shared.held == again.entries + other.entries <= 10 * rows
    for session in (one, other, again):
        session.close()
    assert shared.held == 0 and engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_no_more_pages_than_the_bound_says(folder: Path) -> None:
    engine = load(folder, evict_every=2)
    engine.share(10, floor=2)
    shared, pool, rows = engine.shared, engine.cache.pool, engine.spec.rows
    assert shared is not None
    sessions = [engine.session() for _ in range(4)]
    chunk = math.ceil(engine.prefill_chunk * rows / pool.page_size)
    pool.limit = shared.fixed_pages + len(sessions) * shared.pages_each + chunk
    for session in sessions:  # a BudgetError says that the bound is none
        session.prefill(PICTURES)
        session.prefill(LATER)
    for token in text_ids(24, seed=9).tolist():
        engine.decode(sessions, [token] * len(sessions))
        held = pool.num_pages - pool.free_pages
        assert held <= shared.fixed_pages + len(sessions) * shared.pages_each
    for session in sessions:
        session.close()


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_refusal_names_the_least_bytes(steps: int, page: int) -> None:
    given = 6, 0, page, 100, Interval(steps)
    with pytest.raises(BudgetError, match="at least 1 entry per row") as refused:
        Budget.bytes(1).entries(*given)
    least = int(re.findall(r"([\d,]+) bytes of pages", str(refused.value))[0].replace(",", ""))
    assert Budget.bytes(least).entries(*given) >= 6
    with pytest.raises(BudgetError):
        Budget.bytes(least - 1).entries(*given)


def test_what_cannot_share_is_refused(folder: Path) -> None:
    engine = load(folder)
    with pytest.raises(BudgetError, match="entries per row"):
        engine.share("64KiB")
    with pytest.raises(BudgetError, match="floor"):
        engine.share(8, floor=9)
    with engine.session(), pytest.raises(SessionError, match="open already"):
        engine.share(8)  # the session holds no page yet
    assert engine.shared is None
    engine.share(8)
    with engine.session() as session:
        with pytest.raises(BudgetError, match="none of its own"):
            session.set_budget(4)
        with pytest.raises(BudgetError, match="share a budget of 8"):
            engine.session(4)
        with pytest.raises(SessionError, match="open already"):
            engine.share(9)
        assert engine.shared is not None
        with pytest.raises(BudgetError, match="positive"):
            engine.shared.join(session, 0.0)
    for policy in ("trimkv", "balanced", "streamingllm"):
        with pytest.raises(PolicyError, match="across sessions"):
            load(folder, policy=policy).share(8)


def test_who_shares_changes_under_the_lock(folder: Path) -> None:
    engine = load(folder)
    engine.share(8)
    assert engine.shared is not None
    shared, held = engine.shared, []

    class Watched(dict[CachedSequence, float]):
        def __setitem__(self, session: CachedSequence, weight: float) -> None:
            held.append(engine.lock._lock._is_owned())  # type: ignore[attr-defined]
            super().__setitem__(session, weight)

        def pop(self, session: CachedSequence, *default: Any) -> Any:
            held.append(engine.lock._lock._is_owned())  # type: ignore[attr-defined]
            return super().pop(session, *default)

    shared._weights = Watched()
    with engine.session() as session:
        shared.join(session, 2.0)
        shared.leave(session)
    assert held == [True] * 4


def test_a_prompt_is_refused_before_a_chunk_has_no_page(folder: Path) -> None:
    """Nine more entries in a row that fills its page take two pages, in each of four rows."""
    engine = load(folder, page_size=8)
    engine.share(100)
    session, prompt = engine.session(), {"input_ids": text_ids(9, 2)[None]}
    session.prefill({"input_ids": text_ids(8, 1)[None]})
    engine.trim()
    pool = engine.cache.pool
    pool.limit = pool.num_pages + 7
    with pytest.raises(BudgetError):
        session.begin_prefill(prompt)
    pool.limit += 2  # and one that no rounding needs
    assert session.prefill(prompt).isfinite().all()
