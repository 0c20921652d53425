"""A session under random calls beside a fresh one that made only the calls which were not taken
back: counters, contents, rings and windows, dial, risk and the next logits agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
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

from mmkv.engine.backends.torch.step import PrefillChunk
from mmkv.engine.cache.layout import COLUMNS
from mmkv.engine.errors import (
    BudgetError,
    ContextError,
    InputError,
    NotFiniteError,
    PolicyError,
    SessionError,
)
from mmkv.engine.policies import Budget
from mmkv.engine.prefill import ChunkPass
from mmkv.engine.read_ids import mask_of, with_ids
from mmkv.engine.runtime import Runtime
from mmkv.engine.scorer_state import GONE, POSITIONS, QUERIES, RINGS, window_positions
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import Piece, checkpoint
from tests.support.model_configs import Checkpoint
from tests.support.sessions import load, save_checkpoint, text_ids, turn
from tests.support.tiers import long_but

W = 6  # queries of a window; a picture has as many tokens or more
CONTEXT = 120  # of the model that sees: a session that evicts goes on behind it
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TURNS: list[tuple[Piece, ...]] = [
    (3,),
    (9,),
    (17,),
    (2, ("image", 16, 24), 3),
    (1, ("image", 24, 16), ("image", 16, 16)),
    (("video", 2, 16, 16), 4),
]


@dataclass(frozen=True)
class Call:
    """A call that stands, and where the session stood before it: as ``cut_back`` takes places."""

    make: Callable[[CachedSequence], Any]
    place: tuple[int, int, int]
    ids: tuple[int, ...] = ()
    plain: bool = False  # a prompt of text, which can be cut inside

    def first(self, count: int) -> Call:
        return _reading({"input_ids": torch.tensor([self.ids[:count]])}, self.place)


def _reading(inputs: dict[str, Tensor], place: tuple[int, int, int]) -> Call:
    ids = tuple(inputs["input_ids"][0].tolist())
    return Call(lambda one: one.prefill(inputs), place, ids, len(inputs) == 1)


def _decoding(token: int, place: tuple[int, int, int]) -> Call:
    return Call(lambda one: one.decode(token), place, (token,))


def _place(session: CachedSequence) -> tuple[int, int, int]:
    return session.seen, session.next_position, session.prompt_tokens


def _rows(retained: list[list[Tensor]]) -> list[list[int]]:
    return [row.tolist() for layer in retained for row in layer]


def _press(*_: object) -> Any:
    raise KeyboardInterrupt


def contents(session: CachedSequence) -> dict[str, Tensor]:
    """What the cache holds of a session, every row in the order of its tokens."""
    tensors = session.engine.cache.export(session.seq)
    row = torch.repeat_interleave(tensors["length"].flatten())
    order = (row * 10_000 + tensors["position"]).argsort()
    made = {name: x[order] if name in COLUMNS else x for name, x in tensors.items()}
    for name in RINGS & session.engine.cache.memory.keys():
        ring = made[f"memory.{name}"]
        at = window_positions(session.seen, W, torch.device("cpu"))
        made[f"memory.{name}"] = ring.movedim(-2 if name == QUERIES else -1, 0)[at >= 0]
    return made


def numbers(session: CachedSequence) -> dict[str, Any]:
    """Counters, and what is told of the session; a table's spare columns are the pool's."""
    memory = session.memory().__dict__ | {"metadata_bytes": 0, "vision_bytes": 0, "risk": None}
    return session.state() | memory | {"budget": session.budget}


def assert_same(ours: CachedSequence, theirs: CachedSequence) -> None:
    assert numbers(ours) == numbers(theirs)
    mine, wanted = contents(ours), contents(theirs)
    assert torch.equal(mine["position"], wanted["position"])
    torch.testing.assert_close(mine, wanted, **CLOSE)
    assert (ours.risk() is None) == (theirs.risk() is None)
    risks = [
        {} if one is None else vars(one) | one.by_modality for one in (ours.risk(), theirs.risk())
    ]
    mine, wanted = ({k: v for k, v in one.items() if k != "by_modality"} for one in risks)
    assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    with ours.fork() as left, theirs.fork() as right:
        torch.testing.assert_close(left.decode(7), right.decode(7), **CLOSE)
        assert numbers(left) == numbers(right)
        assert torch.equal(contents(left)["position"], contents(right)["position"])


class SessionMachine(RuleBasedStateMachine):
    """``session`` makes all calls; ``twin``, of another engine, those alone that stand."""

    engine: ClassVar[Runtime]
    fresh: ClassVar[Runtime]
    folder: ClassVar[Path]

    @initialize(tight=st.booleans())
    def start(self, tight: bool) -> None:
        """A budget that evicts from the first prompt on, or one that a later call makes small."""
        budget = None if tight else self.of(50)
        self.session, self.twin = self.engine.session(budget), self.fresh.session(budget)
        self.calls: list[Call] = []
        self.known = True  # the calls are all that made the session
        self.seed = 0

    def of(self, entries: int) -> Budget | None:
        """A budget, with a dial where the engine's has one; None: the policy evicts nothing."""
        own = self.engine.budget
        if not self.engine.policy.evicts:
            return None
        most = None if own.risk is None else Budget.of(90)
        return Budget("entries", entries, own.risk, most)

    def turn(self, pieces: tuple[Piece, ...]) -> dict[str, Tensor]:
        self.seed += 1
        return turn(*pieces, seed=self.seed)

    def stands(self, call: Call) -> None:
        """Make a call on both."""
        call.make(self.session), call.make(self.twin)
        self.calls.append(call)

    def has_room(self, tokens: int) -> bool:
        """Whether no position has to move for some tokens."""
        return self.session.next_position + tokens <= CONTEXT

    @rule(pieces=st.sampled_from(TURNS))
    def read(self, pieces: tuple[Piece, ...]) -> None:
        call = _reading(self.turn(pieces), _place(self.session))
        try:
            self.stands(call)
        except ContextError:
            policy = self.engine.policy
            assert not policy.evicts or policy.keeps_prompt

    @rule(count=st.sampled_from([1, 3, 2 * W]))
    @precondition(lambda self: self.session.seen)
    def decode(self, count: int) -> None:
        self.seed += 1
        for token in text_ids(count, self.seed).tolist():
            if self.session.has_room:
                self.stands(_decoding(token, _place(self.session)))

    @rule(entries=st.sampled_from([5, 30]))
    @precondition(lambda self: self.engine.policy.evicts)
    def set_budget(self, entries: int) -> None:
        budget = self.of(entries)
        self.stands(Call(lambda one: one.set_budget(budget), _place(self.session)))

    @rule(start=st.floats(0, 1), count=st.sampled_from([1, 5]))
    @precondition(lambda self: self.session.seen)
    def forget(self, start: float, count: int) -> None:
        begin, before = int(start * self.session.seen), _rows(self.session.retained())
        self.stands(Call(lambda one: one.forget(begin, begin + count), _place(self.session)))
        left = [[at for at in row if not begin <= at < begin + count] for row in before]
        assert _rows(self.session.retained()) == left

    @rule(how=st.sampled_from(["fork", "file", "the original"]))
    def copy(self, how: str) -> None:
        """Go on with a copy or beside one, which does something else meanwhile."""
        other = self.session.fork()
        if how == "file":
            other.close()
            self.session.save(self.folder / "saved")
            other, _ = self.engine.load_session(self.folder / "saved")
        if how != "the original":
            self.session, other = other, self.session
        if other.seen and other.has_room:
            other.decode(9), other.forget(0, other.seen // 2)
        other.close()

    @rule(chunks=st.integers(0, 2), pieces=st.sampled_from(TURNS[2:]))
    def take_back(self, chunks: int, pieces: tuple[Piece, ...]) -> None:
        """A prompt of which some chunks were read."""
        with suppress(ContextError):
            prefill = self.session.begin_prefill(self.turn(pieces), chunk=4)
            with suppress(ContextError):
                for _ in range(chunks):
                    prefill.advance()
            prefill.roll_back()

    @rule(pieces=st.sampled_from(TURNS))
    def rewind(self, pieces: tuple[Piece, ...]) -> None:
        """A prompt that is taken back where nothing else was lost by it."""
        session, cache = self.session, self.engine.cache
        before, call = session.state(), _reading(self.turn(pieces), _place(session))
        states = {name: kept[session.seq].clone() for name, kept in cache.states.items()}
        with suppress(ContextError):
            call.make(session)
            if not session.rewind(before, states):
                call.make(self.twin)
                self.calls.append(call)

    @rule()
    def leave_a_pass(self) -> None:
        """After a layer; it is taken back."""
        if self.has_room(4):
            part = ChunkPass([self.session.begin_prefill(self.turn((4,)))], by_layer=True)
            assert not part.run(0)
            for call in (lambda: self.session.decode(5), self.session.fork):
                with pytest.raises(SessionError, match="being read"):
                    call()
            part.abort()

    @rule(where=st.sampled_from(["chunk", "stored", "logits", "step", "end of a step"]))
    def interrupt(self, where: str) -> None:
        """Ctrl-C in a layer or where a chunk is stored, or logits that are no numbers."""
        session, engine, forward = self.session, self.engine, self.engine.decoder.forward
        if not self.has_room(4) or not session.seen:
            return

        def stop(hidden: Tensor, rope: Any, step: Any, *more: Any, **named: Any) -> Any:
            attend = step.attend
            step.attend = lambda at, *rest: _press() if at else attend(at, *rest)
            step.attend_last = _press
            return forward(hidden, rope, step, *more, **named)

        native = session.decode_path == "native"
        sums_up = bool(engine.cache.pool.state_size or engine.model.has_on_append)
        nothing = torch.full((1, engine.family.vocab_size), torch.nan)
        inputs, decoder = self.turn((4,)), engine.decoder
        patch, in_step, never = {
            "chunk": (mock.patch.object(decoder, "forward", stop), False, False),
            "stored": (mock.patch.object(PrefillChunk, "finish", _press), False, sums_up),
            "logits": (
                mock.patch.object(decoder, "logits", lambda _: nothing),
                False,
                sums_up or bool(engine.cache.memory),
            ),
            "step": (mock.patch.object(decoder, "forward", stop), True, native),
            "end of a step": (mock.patch.object(decoder, "logits", _press), True, native),
        }[where]
        if not never:
            with patch, pytest.raises((KeyboardInterrupt, NotFiniteError)):
                session.decode(5) if in_step else session.prefill(inputs)

    @rule()
    @torch.inference_mode()
    def refuse(self) -> None:
        session, engine, pool = self.session, self.engine, self.engine.cache.pool
        wrong = [[5, 10_000]], [[5, -2]], [[5, 6], [7, 8]], [[]]
        prompts = [{"input_ids": torch.tensor(ids, dtype=torch.int64)} for ids in wrong]
        risky = Budget("entries", 4, 0.1, Budget.bytes(1))
        for error, call in (
            *((InputError, partial(session.prefill, each)) for each in [*prompts, {}]),
            (InputError, lambda: session.decode(-1)),
            (InputError, lambda: engine.decode([session, session], [5, 5])),
            (BudgetError, lambda: session.set_budget(Budget.bytes(1))),
            # Under most policies a risk means nothing, under the others nothing fits in a byte.
            ((BudgetError, PolicyError), lambda: session.set_budget(risky)),
        ):
            with pytest.raises(error):
                call()
        if self.has_room(40):
            taken = pool.take(pool.free_pages)
            try:
                with mock.patch.object(pool, "limit", pool.num_pages), pytest.raises(BudgetError):
                    session.prefill({"input_ids": torch.full((1, 40), 5)})
            finally:
                pool.give(taken)

    @rule()
    def begin_again(self) -> None:
        self.session.cut_back(0, 0, 0)
        self.twin.close()
        self.twin, self.calls, self.known = self.fresh.session(self.session.budget), [], True

    @rule(share=st.floats(0, 1))
    @precondition(lambda self: self.session.seen and self.session.can_cut_back)
    def cut_back(self, share: float) -> None:
        """To where a call began, or inside a text."""
        session, kept = self.session, _rows(self.session.retained())
        before, lost = session.seen, session.evicted or session.compactions
        calls, place = _first_calls(self.calls, int(share * before), _place(session))
        if not place[0] or (not self.known and not calls):
            return
        session.evicted_nan = session.evicted  # as if no score had been a number
        session.cut_back(*place)
        assert session.evicted_nan == session.evicted
        # It is turned again where it was, or sooner.
        assert session.dial is None or session.dial[2] <= session.seen
        session.read_ids = with_ids(0, [token for one in calls for token in one.ids])
        assert session.seen == place[0]
        assert session.entries + session.evicted == session.seen * self.rows
        assert _rows(session.retained()) == [[at for at in row if at < place[0]] for row in kept]
        if self.known and not session.compactions:
            self._compare_counts(calls)
        self.twin.close()
        self.calls = calls
        if lost:  # what would have stayed otherwise is not known
            self.known = False
            session.save(self.folder / "cut")
            self.twin, _ = self.fresh.load_session(self.folder / "cut")
            self.twin.read_ids = session.read_ids
            return
        self.twin = self.fresh.session(self.of(50))
        for one in calls:
            one.make(self.twin)
        self._compare_rings(before)
        if not self.engine.policy.evicts:
            return
        for one in (session, self.twin):
            one.set_budget(self.of(90))
        for token in text_ids(W, 9).tolist():  # which stand in the place of those cut off
            self.stands(_decoding(token, _place(session)))

    def _compare_counts(self, calls: list[Call]) -> None:
        """With a session that has read the same, whatever is left of it."""
        with self.fresh.session(self.of(90)) as other:
            for one in calls:
                if one.ids:
                    one.make(other)
            for name in ("seen", "next_position", "prompt_tokens", "pictures", "runs", "read_ids"):
                assert getattr(self.session, name) == getattr(other, name), name

    @property
    def rows(self) -> int:
        return self.engine.spec.rows

    def _compare_rings(self, before: int) -> None:
        """Queries that were cut off are gone, those that they did not stand upon are there."""
        memory, seq, theirs = self.engine.cache.memory, self.session.seq, self.twin.seq
        if QUERIES not in memory:
            return
        stands = window_positions(before, W, torch.device("cpu"))
        gone = stands >= self.session.seen
        if POSITIONS in memory:
            wanted = self.fresh.cache.memory[POSITIONS][theirs].masked_fill(gone, GONE)
            assert torch.equal(memory[POSITIONS][seq], wanted)
        rings = memory[QUERIES][seq], self.fresh.cache.memory[QUERIES][theirs]
        ours, asked = (ring[..., ~gone & (stands >= 0), :] for ring in rings)
        torch.testing.assert_close(ours, asked, **CLOSE)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "session"):
            self.engine.cache.check()
            assert_same(self.session, self.twin)

    def teardown(self) -> None:
        for name in ("session", "twin"):
            if hasattr(self, name):
                getattr(self, name).close()


def test_a_mask_of_ids_ends_with_the_vocabulary() -> None:
    """Of ids behind the last one that has a logit, as well."""
    read = with_ids(0, [0, 3, 8, 20, 300])
    for vocabulary in (1, 8, 9, 16, 21, 301, 400):
        wanted = [at in (0, 3, 8, 20, 300) for at in range(vocabulary)]
        assert mask_of(read, vocabulary).tolist() == wanted


def _first_calls(
    calls: list[Call], count: int, end: tuple[int, int, int]
) -> tuple[list[Call], tuple[int, int, int]]:
    """The calls that read the first ``count`` tokens or fewer, and the place behind them."""
    kept: list[Call] = []
    for one in calls:
        inside = count - one.place[0]
        if not one.ids or inside >= len(one.ids):
            kept.append(one)
        elif one.plain and inside > 0:
            part = one.first(inside)
            seen, position, prompt = one.place
            return [*kept, part], (seen + inside, position + inside, prompt + inside)
        else:
            return kept, one.place
    return kept, end


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sees = Checkpoint("qwen3_vl", 4, 2, 32, text={"max_position_embeddings": CONTEXT})
    return {
        "vl": save_checkpoint(sees, tmp_path_factory.mktemp("sees")),
        "qwen3_5": checkpoint("qwen3_5"),
    }


CASES: dict[str, dict[str, Any]] = {
    "dial": {"policy": "dbtrimkv", "budget": 4, "risk": 0.1, "budget_max": 20},
    f"snapkv:window={W}": {},
    "linear layers": {"policy": "dbtrimkv"},
    "trimkv, native": {"policy": "trimkv"},
    f"expected-attention:window={W},sinks=1": {},
    "epikv:window=4": {},
    "h2o": {},
    "full": {},
    "streamingllm": {},
    f"triattention:window={W}": {},
}


@pytest.mark.parametrize("case", long_but(list(CASES)[:4], CASES, "the others are like these"))
def test_what_is_left_is_what_a_fresh_session_has(
    case: str, folders_of: dict[str, Path], tmp_path: Path
) -> None:
    class Machine(SessionMachine):
        pass

    folder = folders_of["qwen3_5" if case == "linear layers" else "vl"]
    for name in ("engine", "fresh"):
        options = {"policy": case, "budget": 8, "prefill_chunk": 10, "evict_every": 2}
        made = load(folder, **options | CASES[case])
        if "native" not in case:
            made.backends.cpu.switch_off()
        setattr(Machine, name, made)
    Machine.folder = tmp_path
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=4,
            stateful_step_count=25,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
