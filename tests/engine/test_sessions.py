"""Sessions: independence, budgets, memory; saving, loading and forking; failures inside a call."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mmkv.engine.session_file as session_file
from mmkv import Engine, bundled_model, resources
from mmkv.cli import arguments
from mmkv.engine.budgets import page_bound
from mmkv.engine.contents import MOST_PICTURES, with_pictures
from mmkv.engine.errors import BudgetError, ContextError, GateError, InputError, SessionError
from mmkv.engine.model.gates import Gates
from mmkv.engine.paths import DRAFT, open_regular, whole_file
from mmkv.engine.policies import Budget, GlobalAllocation, HeadAllocation, Policy
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.resources import asset
from mmkv.sampling import Sampling
from tests.support.factories import checkpoint, make_turn
from tests.support.policies import EVICTING_KINDS
from tests.support.sessions import (
    LATER,
    PICTURES,
    assert_same_rows,
    load,
    run,
    state,
    text_ids,
    turn,
)
from tests.support.tiers import one_in


@pytest.mark.parametrize("policy", ["dbtrimkv", "snapkv", "h2o"])
def test_a_batch_equals_its_sessions_alone(policy: str, folders: dict[str, Path]) -> None:
    """Different budgets, lengths and M-RoPE offsets in one step; sessions join and leave.

    Within 1e-5 of the largest logit, not bit-equal: a matrix product over B rows may sum in
    another order than one over a single row. The retained sets are equal.
    """
    engine = load(folders["vl"], policy=policy)
    budgets = [20, Budget.fraction(0.5), 25.5, Budget.bytes(120_000)]
    prompts = [PICTURES, turn(41, seed=5), LATER, turn(3, seed=6)]
    batch = [engine.session(budget) for budget in budgets]
    single = [engine.session(budget) for budget in budgets]
    for together, alone, prompt in zip(batch, single, prompts, strict=True):
        assert torch.equal(together.prefill(prompt), alone.prefill(prompt))
    tokens = text_ids(4 * 12, 7).view(12, 4)
    for step, row in enumerate(tokens.tolist()):
        # The second half of the steps runs a different mixture, in another order.
        members = [0, 1, 2, 3] if step < 6 else [3, 1]
        got = engine.decode([batch[i] for i in members], [row[i] for i in members])
        want = torch.stack([single[i].decode(row[i]) for i in members])
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
        for together, alone in zip(batch, single, strict=True):
            assert_same_rows(together, alone)
            assert together.memory() == alone.memory()


def test_a_batch_refuses_mistakes_before_anything_changes(
    engine: Runtime, folders: dict[str, Path]
) -> None:
    a, b = engine.session(), engine.session()
    a.prefill(PICTURES), b.prefill(PICTURES)
    before = (a.memory(), b.memory())
    stranger = load(folders["vl"]).session()
    for sessions, tokens, kind in (
        ([a, a], [5, 6], InputError),
        ([a, b], [5], InputError),
        ([], [], InputError),
        ([a, b], [5, 10_000], InputError),
        ([a, b], [5, -1], InputError),
        ([a, stranger], [5, 6], SessionError),
    ):
        with pytest.raises(kind):
            engine.decode(sessions, tokens)
    assert (a.memory(), b.memory()) == before
    b.close()
    with pytest.raises(SessionError, match="closed"):
        engine.decode([a, b], [5, 6])
    assert a.memory() == before[0]


def test_set_budget_acts_at_once_and_frees_pages(engine: Runtime) -> None:
    session, rows = engine.session(30), engine.spec.rows
    session.prefill(turn(60, seed=8))
    assert session.memory().entries == 30 * rows
    pages = session.memory().pages
    session.set_budget(5)
    assert session.memory().entries == 5 * rows and session.memory().pages < pages
    run(session, text_ids(3, 9))
    assert session.memory().entries == 5 * rows
    session.set_budget(9)
    assert session.memory().entries == 5 * rows, "what is gone stays gone"
    run(session, text_ids(10, 9))
    assert session.memory().entries == 9 * rows
    kept = session.memory()
    for bad in (0, -3, 0.4, math.nan, Budget.bytes(10), Budget.fraction(2)):
        with pytest.raises(BudgetError):
            session.set_budget(bad)
        with pytest.raises(BudgetError):
            engine.session(bad)
    assert session.memory() == kept and session.budget == Budget.of(9)


@pytest.mark.parametrize(
    ("policy", "given", "steps"),
    [
        ("gkv", None, {20: 5, 33: 8, 3: 1}),  # 128 in its paper, at most a quarter of the budget
        ("rkv:interval=6", None, {20: 5, 33: 6}),
        ("gkv:interval=6", 9, {20: 9, 3: 9}),  # what the engine is told goes before it
        ("snapkv", None, {20: Policy.interval}),
    ],
)
def test_a_policy_has_an_interval_of_its_own(
    policy: str, given: int | None, steps: dict[int, int], folders: dict[str, Path]
) -> None:
    engine = load(folders["vl"], policy=policy, evict_every=given)
    rows = engine.spec.rows
    for budget, every in steps.items():
        bound = page_bound(engine, Budget.of(budget), 40, 20)
        with engine.session(budget) as session:
            session.prefill(turn(40))
            stand = [session.entries]
            for token in text_ids(20, 3).tolist():
                session.decode(token)
                stand.append(session.entries)
            assert session.memory().pages <= bound.steady
        assert stand == [(budget + step % every) * rows for step in range(21)]
        # Within as many bytes, the slack between two evictions included.
        most_bytes = (bound.steady + 3) * engine.cache.pool.page_bytes
        with engine.session(Budget.bytes(most_bytes)) as session:
            session.prefill(turn(40))
            for token in text_ids(20, 3).tolist():
                session.decode(token)
                assert session.memory().pages * engine.cache.pool.page_bytes <= most_bytes
            assert session.evicted > 0
        # The most pages are taken where each row's last one holds a single entry.
        most = (budget + every) * rows + rows * (engine.cache.pool.page_size - 1)
        assert bound.steady == -(-most // engine.cache.pool.page_size)


def test_memory_equals_a_count_of_pages(engine: Runtime) -> None:
    other = engine.session(15)
    other.prefill(turn(50))
    session = engine.session()
    session.prefill(PICTURES)
    run(session, text_ids(5, 0))
    session.prefill(LATER)
    memory, cache, pool = session.memory(), engine.cache, engine.cache.pool
    lengths = [row.numel() for layer in session.retained() for row in layer]
    pages = sum(math.ceil(n / pool.page_size) for n in lengths)
    element = torch.empty((), dtype=engine.dtype).element_size()
    assert memory.pages == pages
    assert memory.kv_bytes == pages * pool.page_size * engine.spec.head_dim * 2 * element
    per_page = sum(getattr(pool, name)[0].nbytes for name in ("log_beta", "position", "modality"))
    tables = cache.length[session.seq].nbytes + cache.table[session.seq].nbytes
    assert memory.metadata_bytes == pages * per_page + tables
    assert pool.num_pages - pool.free_pages == pages + other.memory().pages
    tokens = sum(prompt["input_ids"].shape[1] for prompt in (PICTURES, LATER)) + 5
    assert memory.tokens_seen == tokens == session.seen
    assert memory.entries == sum(lengths) and sum(memory.by_modality.values()) == sum(lengths)
    assert memory.entries + memory.evicted == tokens * engine.spec.rows
    assert sum(session.entries_per_layer()) == memory.entries
    assert pool.keys.nbytes + pool.values.nbytes == pool.num_pages * pool.kv_page_bytes
    session.count_evicted(3, 2), session.count_evicted(2, 1)
    assert session.memory().evicted_nan == 3 and session.evicted == memory.evicted + 5
    session.count_evicted(-5, 0)


def test_closing_returns_every_page(engine: Runtime) -> None:
    pool = engine.cache.pool
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        session.prefill(PICTURES)
    sessions[1].close()
    sessions.append(engine.session())
    sessions[-1].prefill(turn(90))
    for session in sessions:
        session.close()
        session.close()
    assert pool.free_pages == pool.num_pages
    for action in (
        lambda: sessions[0].decode(5),
        lambda: sessions[0].prefill(PICTURES),
        sessions[0].retained,
        sessions[0].memory,
        sessions[0].fork,
        lambda: sessions[0].set_budget(5),
    ):
        with pytest.raises(SessionError, match="closed"):
            action()


@one_in(3)
@pytest.mark.slow(reason="long dialogues at several budgets")
@pytest.mark.parametrize("policy", EVICTING_KINDS)
def test_a_long_prompt_leaves_no_reference_cycles(policy: str, folders: dict[str, Path]) -> None:
    """Tensors caught in a reference cycle would pile up with the length of the prompt."""
    engine = load(folders["vl"], policy=policy, budget=20, prefill_chunk=16)
    session = engine.session()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        session.prefill(turn(64, seed=8))
        run(session, text_ids(3, 9))
        gc.collect()
        caught = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert not caught


# Saving, loading and forking a session; files that must be refused.


def test_where_nothing_is_evicted_a_file_s_own_budget_is_the_engine_s(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Older versions took any."""
    session = load(folders["vl"], policy="full", budget=18).session()
    session.prefill(PICTURES)
    session.save(tmp_path / "s.mmkv")
    engine = load(folders["vl"], policy="full", budget=30)
    copy, _ = engine.load_session(tmp_path / "s.mmkv")
    assert copy.budget == engine.budget
    assert torch.equal(run(session, text_ids(9, 10)), run(copy, text_ids(9, 10)))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_moe", "internvl"])
def test_each_family_goes_on_from_its_file(name: str, tmp_path: Path) -> None:
    """With a late picture; its positions follow those of the file's dialogue."""
    first = make_turn(name, [6, ("image", 16, 32), 4], seed=1)
    late = make_turn(name, [3, ("image", 32, 16), 2], seed=2)
    session = load(checkpoint(name), budget=9).session()
    session.prefill(first)
    run(session, text_ids(5, 10))
    session.save(tmp_path / "s.mmkv")
    copy, _ = load(checkpoint(name), budget=9).load_session(tmp_path / "s.mmkv")
    assert copy.evicted > 0 and copy.next_position == session.next_position
    for one, two in zip(*(later(each, late) for each in (session, copy)), strict=True):
        assert torch.equal(one, two)
    assert_same_rows(session, copy)


def later(session: CachedSequence, late: dict[str, Tensor]) -> list[Tensor]:
    return [session.prefill(late), run(session, text_ids(6, 12))]


@pytest.mark.slow(reason="makes several checkpoints")
def test_a_session_of_another_model_is_refused(
    engine: Runtime, folders: dict[str, Path], tmp_path: Path
) -> None:
    session = engine.session()
    session.prefill(PICTURES)
    session.save(tmp_path / "s")
    others = [
        load(folders["other weights"]),
        load(folders["other config"]),
        load(folders["text"]),
        load(folders["vl"], policy="snapkv"),
        load(folders["vl"], lookahead=5),
    ]
    for other in others:
        free = other.cache.pool.free_pages
        with pytest.raises(SessionError) as error:
            other.load_session(tmp_path / "s")
        assert "\n" not in str(error.value)
        assert other.cache.pool.free_pages == free
        other.cache.check()


@pytest.mark.parametrize("part", ["allocation", "protection", "bias", "scorer's setting"])
def test_a_session_of_another_policy_or_other_gates_is_refused(
    part: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Under the same policy name: only the part that is named differs."""
    engine = load(folders["vl"])
    policy, gates = engine.policy, engine.decoder.gates
    assert gates is not None and policy.allocation == GlobalAllocation()
    session = engine.session()
    session.prefill(PICTURES)
    session.save(tmp_path / "s")
    weights = engine.decoder.weights

    def other(policy: Policy, gates: Gates) -> Runtime:
        return Runtime(engine.family, engine.spec, weights, gates, policy, engine.budget)

    same, _ = other(policy, gates).load_session(tmp_path / "s")
    assert same.state() == session.state()
    if part == "allocation":
        policy = replace(policy, allocation=HeadAllocation())
    elif part == "protection":
        policy = replace(policy, protect_recent=4)
    elif part == "bias":
        layers = [replace(gate, bias=gate.bias + 0.5) for gate in gates.layers]
        gates = replace(gates, layers=layers)
    else:
        policy = replace(policy, scoring=Retention(3))
    with pytest.raises(SessionError, match=r"was saved with (gates|policy)") as error:
        other(policy, gates).load_session(tmp_path / "s")
    assert "\n" not in str(error.value)


def test_damaged_session_files_are_refused(engine: Runtime, tmp_path: Path) -> None:
    session = engine.session()
    session.prefill(PICTURES)
    path = tmp_path / "s"
    session.save(path)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-40] ^= 0xFF
    damages = {
        "empty": b"",
        "truncated": good[: len(good) * 2 // 3],
        "short header": good[:5],
        "noise": b"\x00\xff" * 500,
        "text": b"hello",
        "flipped bit": bytes(flipped),
        "appended": good + b"xx",
    }
    free = engine.cache.pool.free_pages
    for name, data in damages.items():
        path.write_bytes(data)
        with pytest.raises(SessionError) as error:
            engine.load_session(path)
        assert "\n" not in str(error.value), name
        assert str(path) in str(error.value), name
        assert engine.cache.pool.free_pages == free, name
        engine.cache.check()
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(SessionError):
            engine.load_session(missing)


def test_one_bit_of_any_tensor_of_a_session_file_is_noticed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """By its digest alone for what may hold any number, such as keys: no value is odd there."""
    engine = load(folders["vl"], policy="h2o", budget=20)
    session = engine.session()
    session.prefill(PICTURES)
    path = tmp_path / "s"
    session.save(path)
    good = path.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:begin])
    del header["__metadata__"]
    tried = []
    for name, tensor in header.items():
        first, end = tensor["data_offsets"]
        if end == first:
            continue
        for at in {first, (first + end) // 2, end - 1}:
            changed = bytearray(good)
            changed[begin + at] ^= 1
            path.write_bytes(changed)
            with pytest.raises(SessionError, match="damaged"):
                engine.load_session(path)
        tried.append(name)
    assert {"keys", "values", "position", "modality", "length", "state"} <= set(tried)
    path.write_bytes(good)
    engine.load_session(path)[0].close()


def test_a_file_without_a_needed_tensor_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valid safetensors file whose content is not what its metadata promises."""
    engine = load(folders["vl"], policy="snapkv", budget=20)
    session = engine.session()
    session.prefill(PICTURES)
    real = session_file.save_file
    for name in ("keys", "length", "memory.queries"):

        def without(tensors: dict[str, Tensor], *args: Any, missing: str = name, **kw: Any) -> None:
            real({k: v for k, v in tensors.items() if k != missing}, *args, **kw)

        monkeypatch.setattr(session_file, "save_file", without)
        session.save(tmp_path / "s")
        free = engine.cache.pool.free_pages
        with pytest.raises(SessionError):
            engine.load_session(tmp_path / "s")
        assert engine.cache.pool.free_pages == free, name
        engine.cache.check()


def test_saving_is_atomic(engine: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the middle of writing leaves the old file, and nothing beside it."""
    session = engine.session()
    session.prefill(PICTURES)
    path = tmp_path / "s"
    session.save(path)
    old = path.read_bytes()
    run(session, text_ids(3, 0))

    def disk_full(_: object, target: str, *args: object, **kw: object) -> None:
        Path(target).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_file, "save_file", disk_full)
    with pytest.raises(SessionError, match="untouched"):
        session.save(path)
    monkeypatch.setattr(
        session_file, "save_file", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        session.save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    monkeypatch.undo()
    session.save(path)
    loaded, _ = engine.load_session(path)
    assert torch.equal(run(loaded, text_ids(2, 1)), run(session, text_ids(2, 1)))
    with pytest.raises(SessionError):
        session.save(tmp_path / "no" / "such" / "folder")


# Failures in the middle of a call: nothing changes and no page is lost.


def test_a_prompt_over_the_context_changes_nothing(folders: dict[str, Path]) -> None:
    engine = load(folders["text"], endless=False)
    session = engine.session()
    with pytest.raises(ContextError, match="64"):
        session.prefill(turn(65))
    session.prefill(turn(60))
    before, free = state(session), engine.cache.pool.free_pages
    with pytest.raises(ContextError):
        session.prefill(turn(5))
    assert state(session) == before and engine.cache.pool.free_pages == free
    run(session, text_ids(4, 0))
    with pytest.raises(ContextError):
        session.decode(5)
    engine.cache.check()
    session.close()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000])
def test_a_name_that_no_file_can_have_opens_no_session(engine: Runtime, name: str) -> None:
    with pytest.raises(SessionError, match="too long"):
        engine.load_session(name)


@pytest.mark.slow(reason="interrupts each of three ways to run, layer by layer")
@pytest.mark.parametrize(
    ("where", "policy"),
    [(where, "dbtrimkv") for where in ("native", "batch", "native batch")],
)
def test_an_interrupted_pass_is_undone(
    where: str, policy: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside a layer: as if the call (or the chunk) had never been made.

    In the native step it is seen when C returns: then the step is whole, and so is its eviction.
    """
    engine = load(folders["vl"], policy=policy, budget=28)
    if where.startswith("native") and engine.decode_path != "native":
        pytest.skip(f"runs on {engine.decode_path}")
    session, reference, other = engine.session(), engine.session(), engine.session()
    for each in (session, reference, other):
        each.prefill(PICTURES)
        each.prefill(turn(40, seed=9))
    other.prefill(turn(10))  # tables do not grow below, which memory() would show
    before, kept = state(session), session.retained()
    forward = engine.decoder.forward

    def interrupted(hidden: Tensor, rope: Any, step: Any, *more: Any, **named: Any) -> Any:
        def stop(layer: int, *args: Any) -> Tensor:
            if layer == 1:
                raise KeyboardInterrupt
            return attend(layer, *args)

        attend = step.attend
        step.attend = step.attend_last = stop  # a prompt ends with the second
        return forward(hidden, rope, step, *more, **named)

    def interrupted_step(*args: Any) -> Tensor:
        native_step(*args)
        raise KeyboardInterrupt

    if where.startswith("native"):
        native_step = engine.backends.cpu.decoder.step
        monkeypatch.setattr(engine.backends.cpu.decoder, "step", interrupted_step)
    elif where == "batch":
        monkeypatch.setattr(engine.backends.cpu, "decoder", None)
    monkeypatch.setattr(engine.decoder, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if where == "native":
            session.decode(5)
        else:
            engine.decode([session, other], [5, 6])
    monkeypatch.undo()
    engine.cache.check()
    if where.startswith("native"):
        reference.decode(5)
        before, kept = state(reference), reference.retained()
    assert state(session) == before
    for left, right in zip(session.retained(), kept, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
    for token in text_ids(20, 3).tolist():
        assert torch.equal(session.decode(token), reference.decode(token))
        assert_same_rows(session, reference)


def test_an_interrupt_between_chunks_keeps_whole_chunks(engine: Runtime) -> None:
    """The progress callback raises after the second chunk: the session holds 2 x 12 tokens."""
    session = engine.session()

    def stop(done: int, total: int) -> None:
        assert total == 40
        if done >= 24:
            raise KeyboardInterrupt

    prompt = turn(40)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(prompt, stop)
    assert session.seen == session.next_position == session.memory().tokens_seen == 24
    rest = {"input_ids": prompt["input_ids"][:, 24:]}
    assert torch.equal(session.prefill(rest), engine.session().prefill(prompt))


# What a session knows of its pictures: how much of each is still held.


NAME = "qwen3_vl"
TOUCHING = "llava_onevision"  # the others have text around each
STAY = 16


def test_pictures_are_runs_of_visual_tokens_over_chunks() -> None:
    kinds = torch.tensor([0, 1, 1, 1, 0, 2, 2, 0, 2, 1], dtype=torch.uint8)
    whole = ((1, 4), (5, 7), (8, 9), (9, 10))
    assert with_pictures((), kinds, 0) == whole
    for cut in range(1, 10):  # 9 stands between a video and a picture that touch
        first = with_pictures((), kinds[:cut], 0)
        assert with_pictures(first, kinds[cut:], cut, int(kinds[cut - 1])) == whole
        assert cut == 9 or with_pictures(first, kinds[cut:], cut) == whole
    assert with_pictures(((3, 5),), kinds[:2], 7) == ((3, 5), (8, 9))
    many = with_pictures(whole, torch.tensor([0, 1] * MOST_PICTURES), 10)
    assert len(many) == MOST_PICTURES and many[0] == (11, 12), "the oldest go"


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_picture_that_a_video_follows_is_another_in_chunks_of_any_size(chunk: int) -> None:
    engine = Engine.from_pretrained(
        checkpoint(TOUCHING), dtype="float32", device="cpu", policy="full", prefill_chunk=chunk
    )
    turn = make_turn(TOUCHING, [3, ("image", 32, 32), ("video", 1, 32, 32), 4], seed=3)
    with engine.session() as session:
        session.prefill(turn)
        kinds = turn["input_ids"][0].unique_consecutive(return_counts=True)[1].tolist()
        image, video = kinds[3:5]
        assert session.pictures == ((3, 3 + image), (3 + image, 3 + image + video))


def test_the_share_of_each_picture_is_counted_from_what_is_retained(tmp_path: Path) -> None:
    """Right values by hand: the retained tokens inside of each picture's run."""
    engine = Engine.from_pretrained(
        checkpoint(NAME), dtype="float32", device="cpu", policy="streamingllm", prefill_chunk=7
    )
    turn = make_turn(NAME, [3, ("image", 32, 32), 4, ("image", 16, 32), 5], seed=3)
    with engine.session() as session:
        session.prefill(turn)
        assert session.memory().pictures == (1.0, 1.0) and session.memory().faded == ()
        session.set_budget(STAY)
        memory = session.memory()
        visual = engine.family.turn(turn, 0, engine.device).modality > 0
        edges = torch.diff(visual.int(), prepend=torch.zeros(1, dtype=torch.int32))
        starts, stops = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
        rows = [row for layer in session.retained() for row in layer]
        wanted = tuple(
            sum(int(((row >= a) & (row < b)).sum()) for row in rows) / ((b - a) * len(rows))
            for a, b in zip(starts, stops, strict=True)
        )
        assert memory.pictures == wanted and memory.faded == (0,) and wanted[0] < 0.5 <= wanted[1]
        with session.fork() as copy:
            assert copy.memory().pictures == wanted
        session.save(tmp_path / "s")
        opened, _ = engine.load_session(tmp_path / "s")
        assert opened.memory().pictures == wanted
        opened.pictures = ((4, 2),)
        opened.save(tmp_path / "t")
        with pytest.raises(SessionError, match="pictures do not follow"):
            engine.load_session(tmp_path / "t")
        opened.close()
        for seen, whole in ((stops[1], 2), (stops[1] - 1, 1), (stops[0], 1), (starts[0] + 1, 0)):
            session.cut_back(seen, seen, seen)
            assert session.pictures == tuple(zip(starts, stops, strict=True))[:whole]


# Files that are written whole: what others see while, after and instead of it.


@pytest.mark.parametrize("private", [False, True])
def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path, private: bool) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old")
    with whole_file(path, private=private, sync=True) as draft:
        assert draft.relative_to(tmp_path).parts[0].endswith(DRAFT if private else ".part")
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["kept.json"]
    allowed = stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    assert allowed == (0o600 if private else 0o666 & ~umask)
    with pytest.raises(KeyboardInterrupt), whole_file(path, private) as draft:
        draft.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["kept.json"]
    with whole_file(path, private=True) as one, whole_file(path, private=True) as two:
        one.write_text("one"), two.write_text("two")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["kept.json"]
    for nowhere in (tmp_path / "missing" / "a", tmp_path):
        with pytest.raises(OSError), whole_file(nowhere, private) as draft:
            draft.write_text("x")
    assert os.listdir(tmp_path) == ["kept.json"]


def test_what_killed_writers_left_goes_with_the_next_that_writes(tmp_path: Path) -> None:
    """In another process; drafts of this hour, and what others name so, stay."""
    (tmp_path / "a").mkdir()
    for name in (f".old{DRAFT}", f".new{DRAFT}", f"mine{DRAFT}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
        os.utime(tmp_path / name, (0, 0) if "new" not in name else None)
    (tmp_path / f".link{DRAFT}").symlink_to(tmp_path / "a")
    os.utime(tmp_path / f".link{DRAFT}", (0, 0), follow_symlinks=False)
    with whole_file(tmp_path / "kept", private=True) as draft:
        save_file({"a": torch.zeros(3)}, draft)  # which makes a draft of its own beside that
        assert draft.parent.parent == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {
        *("kept", "a", f".new{DRAFT}", f"mine{DRAFT}", f".link{DRAFT}")
    }


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe without a writer would be waited for; a link counts where it is allowed."""
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("text")
    link.symlink_to(file)
    os.mkfifo(pipe)
    with open_regular(file, follow=False) as one, open_regular(link) as two:
        assert one.read() == two.read() == b"text"
    for path in (pipe, tmp_path, Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises(OSError):
            open_regular(path)
    with pytest.raises(OSError):
        open_regular(link, follow=False)


def test_pipes_in_the_place_of_files_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(bundled_model(), budget=64)
    gates = Path(shutil.copytree(asset("tiny-vlm/gates"), tmp_path / "gates"))
    for path in (gates / "gates.json", tmp_path / "session.mmkv", tmp_path / "mmkv.toml"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.raises(SessionError, match="a pipe or a device"):
        engine.load_session(tmp_path / "session.mmkv")
    with pytest.raises(GateError, match="a pipe or a device"):
        Engine.from_pretrained(bundled_model(), gates=str(gates))
    monkeypatch.setattr(resources, "bundled_gates", lambda: {"x": gates})
    assert resources.gates_made_for(str(bundled_model())) == {}
    with pytest.raises(InputError, match="a pipe or a device"):
        arguments._read(tmp_path / "mmkv.toml")


def test_a_file_that_is_cut_short_while_it_is_read_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, it would (SIGBUS)."""
    engine = Engine.from_pretrained(bundled_model(), budget=64)
    path = tmp_path / "session.mmkv"
    with engine.session() as session:
        for _ in session.send("what is red?", sampling=Sampling.greedy(max_new_tokens=2)):
            pass
        session.save(path)
    check = session_file.check_state

    def cut(*given: Any) -> None:
        os.truncate(path, 4096)
        check(*given)

    monkeypatch.setattr(session_file, "check_state", cut)
    with pytest.raises(SessionError, match="damaged or not a session file"):
        engine.load_session(path)
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages
