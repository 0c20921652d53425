"""The record of a session beside the oracle and the session itself, and what a record keeps."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from mmkv import Engine, Sampling
from mmkv.engine import trace as recording
from mmkv.engine.errors import InputError, SessionError
from mmkv.engine.policies import Policy
from mmkv.engine.policies.allocation import GlobalAllocation
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.trace import _BLOCK, DEATH, KINDS, PRUNED, REFUSED, Record, Recorder
from mmkv.explain import Trace
from mmkv.explain import snapshot as snapshots
from mmkv.explain.page import render
from mmkv.explain.snapshot import layout
from mmkv.explain.trace import texts_of
from mmkv.resources import asset
from tests.support.factories import checkpoint
from tests.support.policies import EVICTING_KINDS
from tests.support.recorded import DIALOGUES, bundled, clip, recorded, talk
from tests.support.sessions import LATER, PICTURES, load, text_ids
from tests.support.tiers import one_in

Sets = list[list[int]]


@pytest.fixture(scope="module")
def engine_of_pictures() -> Engine:
    return bundled()


def kept(session: CachedSequence) -> Sets:
    return [row.tolist() for layer in session.retained() for row in layer]


def known(record: Record, step: int) -> Sets:
    return [row.tolist() for layer in record.retained(step) for row in layer]


class Watched:
    """Does things to a recorded session and notes what it kept after each."""

    def __init__(self, session: CachedSequence, limit: int = 2**26) -> None:
        self.session, self.recorder = session, session.record(limit)
        self.noted: dict[int, Sets] = {}

    def note(self) -> None:
        record = self.record()
        self.noted[len(record.seen) - 1] = kept(self.session)

    def record(self) -> Record:
        assert self.session.recorder is not None
        return self.session.recorder.read(self.session)

    def decode(self, tokens: int, seed: int) -> None:
        for token in text_ids(tokens, seed).tolist():
            self.session.decode(token)
            self.note()

    def check(self) -> None:
        record = self.record()
        assert len(self.noted) > 2
        for step, sets in self.noted.items():
            assert known(record, step) == sets, f"step {step}"


@pytest.mark.parametrize("number", range(len(DIALOGUES)))
def test_kept_sets_are_the_oracles_at_20_random_steps(number: int) -> None:
    found = recorded(number)
    record = found.snapshot.record
    assert len(record.seen) == len(found.kept) + 1
    steps = range(1, len(record.seen))
    for step in random.Random(number).sample(steps, min(20, len(steps))):
        wanted = [row.tolist() for layer in found.kept[step - 1] for row in layer]
        assert known(record, step) == wanted, f"step {step}"
    assert len(record.deaths) > 50


@one_in(3)
@pytest.mark.parametrize(
    ("path", "policy"),
    [
        *(("native", policy) for policy in EVICTING_KINDS),
        *(("torch", policy) for policy in EVICTING_KINDS[::4]),
        ("hybrid", "dbtrimkv"),
    ],
)
def test_every_kind_of_policy_is_recorded(path: str, policy: str, folders: dict[str, Path]) -> None:
    engine = load(checkpoint("qwen3_5") if path == "hybrid" else folders["vl"], policy=policy)
    if path == "torch":
        engine.backends.cpu.switch_off()
    watched = Watched(engine.session())
    watched.session.prefill(PICTURES)
    watched.note()
    watched.decode(4, 1)
    watched.session.prefill(LATER)
    watched.note()
    watched.session.set_budget(6)
    watched.note()
    watched.decode(2, 2)
    watched.check()
    record = watched.record()
    assert len(record.deaths) == watched.session.memory().evicted
    assert [KINDS[kind] for kind in record.kind[-3:]] == ["budget", "reply", "reply"]
    assert record.allowed[-1] == watched.session.allowed_entries
    ids = [*PICTURES["input_ids"][0], *text_ids(4, 1), *LATER["input_ids"][0], *text_ids(2, 2)]
    assert record.token_ids.tolist() == ids
    live = watched.session.view()
    assert record.modality[live.position].tolist() == live.modality.tolist()


def test_scores_are_those_that_the_policy_computed(folders: dict[str, Path]) -> None:
    """C notes the same deaths with the same scores as torch, and both below what stayed."""
    records = []
    for native in (True, False):
        engine = load(folders["vl"])
        if not native:
            engine.backends.cpu.switch_off()
        trace = Trace(engine.session())
        session = trace._session
        session.prefill(PICTURES)
        for token in text_ids(8, 3).tolist():
            session.decode(token)
        records.append(trace.snapshot())
    ours, theirs = (snapshot.record for snapshot in records)
    for name in ("row", "position", "cause"):
        np.testing.assert_array_equal(ours.deaths[name], theirs.deaths[name])
    for name in ("log_beta", "score"):  # the gates are computed in C or in torch
        np.testing.assert_allclose(ours.deaths[name], theirs.deaths[name], rtol=1e-4)
    snapshot = records[0]
    for at in np.unique(ours.died_at):
        went = ours.deaths[ours.died_at == at]
        again = snapshot.scores(int(at), went["position"].astype(np.int64), went["log_beta"])
        assert again is not None
        np.testing.assert_allclose(again, went["score"], rtol=1e-5)
        above = snapshot.just_above(int(at), 0)
        assert above[0][2] >= went["score"].max() == snapshot.cuts()[0, at]


def test_scores_that_torch_computes_are_sampled(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long dialogue fewer, and what stood just above the cut is known from them."""
    monkeypatch.setattr(recording, "_MOST_STEPS", 60)  # of 80: the first are forgotten
    trace = Trace(load(folders["vl"], policy="snapkv:window=4", budget=12).session())
    trace._session.prefill(PICTURES)
    for token in text_ids(80, 3).tolist():
        trace._session.decode(token)
    snapshot = trace.snapshot()
    steps = [step for step, *_ in snapshot.record.samples]
    assert 12 <= len(steps) <= 32 and steps == sorted(steps)
    for step, rows, positions, scores in snapshot.record.samples:
        went = snapshot.record.deaths[(snapshot.record.died_at == step)]
        given = zip(rows.tolist(), positions.tolist(), scores.tolist(), strict=True)
        assert set(went[["row", "position", "score"]].tolist()) <= set(given)
    for row in range(snapshot.rows):
        cut = went["score"][went["row"] == row].max()
        above = snapshot.just_above(step, row)
        assert [one for one, *_ in above] == [row] * 5 and above[0][2] >= cut


def test_what_write_gates_refuse_and_pruners_drop_has_its_cause() -> None:
    for policy, cause, options in (
        ("fastv:layer=2", PRUNED, {}),
        ("wgkv:window=4", REFUSED, {"gates": "random"}),
    ):
        engine = bundled(policy=policy, **options)
        watched = Watched(engine.session())
        inputs = engine.inputs(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": str(asset("scene.png"))},
                        {"type": "text", "text": "what is this?"},
                    ],
                }
            ]
        )
        watched.session.prefill(inputs)
        watched.note()
        watched.decode(6, 1)
        watched.check()
        assert set(watched.record().deaths["cause"].tolist()) == {cause}, policy


def test_undo_forks_and_turns_taken_back_keep_the_record_right(engine_of_pictures: Engine) -> None:
    session = engine_of_pictures.session()
    session.undo_depth = 3
    watched, source = Watched(session), random.Random(5)
    short = Sampling(max_new_tokens=3)
    for turn in range(6):
        pictures = [asset("scene.png")] if turn % 2 else []
        for _ in session.send(f"what is {turn}?", images=pictures, sampling=short):
            watched.note()
        watched.note()
        media = len(session.recorder.media)  # type: ignore[union-attr]
        if source.random() < 0.5:
            before = {s: sets for s, sets in watched.noted.items()}
            list(session.send("forget this", images=[asset("scene.png")], sampling=short))
            assert session.undo()
            watched.noted = before
            assert len(session.recorder.media) == media  # type: ignore[union-attr]
            watched.check()
        fork = session.fork()
        list(fork.send("and this?", sampling=short))
        assert known(fork.recorder.read(fork), -1) == kept(fork)  # type: ignore[union-attr]
        fork.close()
        watched.check()
    assert len(watched.record().token_ids) == session.seen
    session.close()


def test_a_record_is_bounded_and_begins_later(folders: dict[str, Path]) -> None:
    """Of far more deaths than there is room for, the newest stay, and with them later steps."""
    engine = load(folders["vl"], budget=4)
    watched = Watched(engine.session(), limit=2 * _BLOCK * DEATH.itemsize)
    recorder = watched.recorder
    blocks = 0
    watched.session.prefill(PICTURES)
    for token in text_ids(120, 4).tolist():
        watched.session.decode(token)
        # As if each block held few.
        blocks = max(blocks, len(recorder._blocks))
        if recorder._used[-1] > 40:
            recorder._blocks.append(np.empty(_BLOCK, DEATH))
            recorder._used.append(0)
            if len(recorder._blocks) > 2:
                recorder._trim()
        watched.note()
    record = watched.record()
    assert record.seen[0] > 40 and blocks <= 3
    assert recorder.nbytes < 3 * _BLOCK * DEATH.itemsize + 10_000
    for back in range(1, len(record.seen)):
        wanted = kept(watched.session) if back == 1 else None
        got = known(record, len(record.seen) - back)
        assert wanted is None or got == wanted
        assert sum(map(len, got)) == engine.spec.rows * 4
    assert record.kind[0] == 0 and len(record.deaths) == record.died_at.shape[0]


def test_recording_may_begin_and_end_anywhere(engine_of_pictures: Engine) -> None:
    session = engine_of_pictures.session()
    list(
        session.send(
            "what is this?", images=[asset("scene.png")], sampling=Sampling(max_new_tokens=2)
        )
    )
    assert session.recorder is None
    before = kept(session)
    with session.trace() as trace:
        list(session.send("and this?", sampling=Sampling(max_new_tokens=4)))
        at_end = kept(session)
    assert session.recorder is None
    list(session.send("not recorded", sampling=Sampling(max_new_tokens=2)))
    record = trace.snapshot().record
    assert known(record, 0) == before and known(record, -1) == at_end != kept(session)
    assert [row.tolist() for layer in trace.retained(0) for row in layer] == before
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.trace()


def test_a_trace_ends_only_what_it_began(engine_of_pictures: Engine) -> None:
    session, short = engine_of_pictures.session(), Sampling(max_new_tokens=2)
    outer = session.trace()
    list(session.send("first", sampling=short))
    with session.trace() as inner:
        list(session.send("second", sampling=short))
    assert len(inner.snapshot().record.seen) == len(outer.snapshot().record.seen) > 4
    later = session.trace()
    outer.stop()
    for read in (later.snapshot, lambda: later.retained(-1), later.stop):
        with pytest.raises(SessionError, match="no longer recorded"):
            read()
    assert session.recorder is None
    session.close()


def test_undo_neither_ends_nor_begins_a_recording(engine_of_pictures: Engine) -> None:
    session, short = engine_of_pictures.session(), Sampling(max_new_tokens=2)
    session.undo_depth = 2
    list(session.send("before the recording", sampling=short))
    trace = session.trace()
    assert session.undo()
    assert session.seen == 0 and len(trace.snapshot().record.seen) == 1
    list(session.send("recorded", sampling=short))
    assert known(trace.snapshot().record, -1) == kept(session)
    trace.stop()
    assert session.undo() and session.recorder is None
    session.close()


def test_steps_are_forgotten_with_deaths_that_wait_on_a_device(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: Recorder, whole: Tensor, real: Tensor, cause: int) -> None:
        self._died[-1] += whole.shape[1]
        self._waiting.append((whole, real, cause))

    monkeypatch.setattr(Recorder, "_note", wait)
    monkeypatch.setattr(recording, "_MOST_STEPS", 8)
    engine = load(folders["vl"], budget=4)
    engine.backends.cpu.switch_off()
    session = engine.session()
    recorder = session.record()
    session.prefill(PICTURES)
    held = []
    for token in text_ids(12, 4).tolist():
        session.decode(token)
        held.append(kept(session))
    record = recorder.read(session)
    assert 4 < len(record.seen) <= 8 and record.seen[0] > 0
    for back in range(1, len(record.seen)):
        assert known(record, -back) == held[-back]


def test_a_record_is_of_one_moment(
    engine_of_pictures: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other thread may take a step while the columns of a record are put together."""
    session = engine_of_pictures.session()
    free: list[bool] = []
    trace = session.trace()
    session.decode(5)

    def ask() -> None:
        lock = engine_of_pictures.lock._lock
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def asked(*columns: Any) -> Record:
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        return Record(*columns)

    monkeypatch.setattr(recording, "Record", asked)
    assert trace.retained(-1) and free == [False]
    session.close()


@pytest.mark.parametrize(
    ("path", "policy"), [("native", "dbtrimkv"), ("torch", "streamingllm"), ("torch", "snapkv")]
)
def test_sessions_of_a_batch_are_recorded_each_as_if_alone(
    path: str, policy: str, folders: dict[str, Path]
) -> None:
    """Three of four in one step, with budgets of their own; the first is not recorded."""
    budgets, seeds = (8, 5, 9, 13), (1, 2, 3, 4)

    def play(engine: Runtime, which: list[int]) -> list[CachedSequence]:
        sessions = [engine.session(budgets[at]) for at in which]
        for at, session in zip(which, sessions, strict=True):
            if at:
                session.record(2**26)
            session.prefill(PICTURES if at % 2 else LATER)
        # Those of later indices join the steps later.
        for step in range(9):
            now = [i for i, at in enumerate(which) if at <= step]
            tokens = [int(text_ids(9, seeds[which[i]])[step]) for i in now]
            if now:
                engine.decode([sessions[i] for i in now], tokens)
        return sessions

    def made() -> Runtime:
        engine = load(folders["vl"], policy=policy)
        if path == "torch":
            engine.backends.cpu.switch_off()
        return engine

    together = play(made(), [0, 1, 2, 3])
    assert together[0].recorder is None
    for at in (1, 2, 3):
        (alone,) = play(made(), [at])
        records = []
        for session in (together[at], alone):
            assert session.recorder is not None
            records.append(session.recorder.read(session))
        one, two = records
        for name in ("seen", "allowed", "kind", "token_ids", "modality", "died_at"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), (at, name)
        for name in ("row", "position", "cause"):
            assert np.array_equal(one.deaths[name], two.deaths[name]), (at, name)
        np.testing.assert_allclose(one.deaths["score"], two.deaths["score"], rtol=1e-4, atol=1e-5)
        rows = one.layers * one.kv_heads
        assert len(one.deaths) == together[at].memory().evicted > 20
        assert len(one.deaths) + len(one.position) == rows * len(one.token_ids)
        assert known(one, -1) == kept(together[at])


def test_sessions_that_share_a_budget_are_recorded(folders: dict[str, Path]) -> None:
    """What another one's tokens push out is a step of its own, with the right sets around it."""
    engine = load(folders["vl"])
    engine.share(12)
    one, other = Watched(engine.session()), engine.session()
    one.session.prefill(PICTURES)
    one.note()
    other.prefill(LATER)
    one.note()
    for token in text_ids(6, 1).tolist():
        other.decode(token)
        one.note()
    one.decode(3, 2)
    one.check()
    record = one.record()
    assert "shared" in {KINDS[kind] for kind in record.kind}
    assert set(record.allowed.tolist()) == {-1}  # no budget of its own
    assert Trace(one.session).snapshot().budget == "12 entries per head, shared by all sessions"
    assert len(record.deaths) == one.session.memory().evicted


def test_scores_under_a_shared_budget_are_those_that_were_computed(
    folders: dict[str, Path],
) -> None:
    """With the session's weight, and as many recent tokens protected as the shared budget says."""
    scoring = Retention(2, 0)
    policy = Policy("kept", scoring, GlobalAllocation(), recent_share=0.5)
    engine = load(folders["vl"], policy=policy)
    engine.share(12)
    one, other = engine.session(), engine.session()
    assert engine.shared is not None
    engine.shared.join(one, 0.25)
    recorder = one.record()
    one.prefill(PICTURES)
    other.prefill(LATER)
    for token in text_ids(6, 1).tolist():
        other.decode(token)
        one.decode(token)
    snapshot = Trace(one).snapshot()
    assert snapshot.rule.recent == 6
    record = recorder.read(one)
    assert len(record.deaths) > 20
    for step in np.unique(record.died_at):
        dead = record.deaths[record.died_at == step]
        found = snapshot.scores(int(step), dead["position"].astype(np.int64), dead["log_beta"])
        np.testing.assert_allclose(found, dead["score"], rtol=1e-5, atol=1e-6)
    assert '"shared":true,"bonus":-1.38' in render(snapshot).replace(" ", "")
    assert snapshot.rule.kernel == "retention"
    engine.shared.by_risk = True  # then scores alone do not decide
    assert Trace(one).snapshot().rule.kernel == "other"
    kept = load(folders["vl"], policy=replace(policy, keeps_prompt=True), budget=8).session()
    kept.prefill(LATER)
    assert Trace(kept).snapshot().rule.recent == 4  # half of the budget, whatever the prompt has


def test_bursts_on_a_gpu_are_recorded(
    engine_of_pictures: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where replies come in bursts, a recorded session keeps the same sets."""
    plain, trace = talk(engine_of_pictures)
    wanted = trace.snapshot().record
    plain.close()
    monkeypatch.setattr(type(engine_of_pictures), "many_path", "graph")
    session, trace = talk(engine_of_pictures)
    record = trace.snapshot().record
    for name in ("seen", "allowed", "kind", "token_ids", "row", "position"):
        np.testing.assert_array_equal(getattr(record, name), getattr(wanted, name))
    np.testing.assert_array_equal(record.deaths["position"], wanted.deaths["position"])
    session.close()


def test_a_file_that_cannot_be_written_is_refused(
    engine_of_pictures: Engine, tmp_path: Path
) -> None:
    session = engine_of_pictures.session()
    trace = session.trace()
    with pytest.raises(InputError, match="cannot write"):
        trace.report(tmp_path / "none" / "report.html")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make the folder"):
        trace.figures(tmp_path / "file")
    session.close()


@pytest.fixture(autouse=True)
def pools_stay_whole(engine_of_pictures: Engine) -> Iterator[None]:
    yield
    engine_of_pictures.cache.check()


# Which tokens stand for which part of a picture, and what a record keeps of pictures and texts.


def test_pictures_of_a_record_are_bounded_and_cannot_spoil_a_turn(
    engine_of_pictures: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, short = engine_of_pictures.session(), Sampling(max_new_tokens=2)
    recorder, picture = session.record(), asset("scene.png")
    bare = recorder.nbytes

    def fail(*_: object) -> bytes:
        raise OSError("no JPEG")

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "encoded", fail)
        with pytest.raises(OSError, match="no JPEG"):
            list(session.send("what?", images=[picture], sampling=short))
    assert session.seen == 0 and session.history == []
    monkeypatch.setattr(snapshots, "MOST_BYTES", 1)
    for _ in range(2):
        list(session.send("what?", images=[picture], videos=[clip()], sampling=short))
    assert [frame.caption for _, frame, _ in recorder.media] == ["picture 1"]
    assert recorder.nbytes - bare > len(recorder.media[0][1].jpeg) > 0
    session.close()


def test_frames_name_the_tokens_of_their_patches(engine_of_pictures: Engine) -> None:
    session, trace = talk(engine_of_pictures)
    snapshot = trace.snapshot()
    cells = [
        frame.start + y * frame.stride + x
        for frame in snapshot.frames
        for y in range(frame.high)
        for x in range(frame.wide)
    ]
    assert cells == np.flatnonzero(snapshot.record.modality).tolist()
    captions = [frame.caption for frame in snapshot.frames]
    assert captions == ["picture 1", *(f"video 1 at {s:.1f} s" for s in (0, 0.5, 1, 1.5))]
    assert [frame.media for frame in snapshot.frames] == [0, 1, 1, 1, 1]
    assert "".join(snapshot.texts).count('</script><b>bold</b><!-- $x^2$ & "quoted"') == 1
    session.close()


def test_shapes_of_pictures_without_a_grid() -> None:
    assert layout(576, 300, 200, 24) == [(0, 24, 24, 24)]
    # LLaVA-NeXT: a thumbnail of 24 x 24, then 24 rows of 36 and a row end each.
    assert layout(576 + 24 * 37, 600, 400, 24) == [(0, 24, 24, 24), (576, 24, 36, 37)]
    assert layout(577, 300, 200, 0) == layout(579, 300, 200, 25) == []
    # A thumbnail of 24 x 24, and 35 rows of 34 and a row end: a square number by chance.
    assert layout(576 + 35 * 35, 340, 350, 24) == [(0, 24, 24, 24), (576, 35, 34, 35)]
    # InternVL3: tiles of 16 x 16, one after the other.
    assert layout(256, 448, 448, 16, True) == [(0, 16, 16, 16)]
    assert layout(1024, 1344, 448, 16, True) == layout(1024, 1344, 448, 0, True) == []


def test_texts_join_to_the_whole_text(engine_of_pictures: Engine) -> None:
    tokenizer = engine_of_pictures.processor.tokenizer
    text = "what is at row 2, column 3? </script> naïve"
    ids = tokenizer(text)["input_ids"]
    assert "".join(texts_of(tokenizer, ids)).startswith("what is at row 2, column 3? </script> na")
    assert texts_of(None, [3, -1]) == ["3 ", "-1 "]
    words = SimpleNamespace(decode=lambda ids, **_: " ".join(f"w{one}" for one in ids))
    assert texts_of(words, [7, 7, 8, -1, 7]) == ["w7", " w7", " w8", "", "w7"]


def test_what_is_forgotten_is_the_risk_of_the_session() -> None:
    engine = bundled(budget=6)
    session, trace = talk(engine)
    snapshot, risk = trace.snapshot(), session.risk()
    regions = snapshot.regions()
    names = ["turn 1", "turn 2", "turn 3", *(frame.caption for frame in snapshot.frames)]
    assert [one.name for one in regions] == names and risk is not None
    gone = sum(one.forgotten for one in regions)
    assert gone / (gone + sum(one.held for one in regions)) == pytest.approx(
        risk.total, rel=0.02
    )  # which bins the betas
    page = render(snapshot).partition('id="data">')[2].partition("</script>")[0]
    shown = [[one.name, round(one.risk, 4)] for one in regions]
    assert json.loads(page)["forgotten"] == shown
    session.close()
    assert recorded(4).snapshot.regions() == [] and recorded(4).snapshot.forgetting() == ""
