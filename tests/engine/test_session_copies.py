"""Saving, loading and forking a session; files that must be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmkv.engine.session_file as session_file
from mmkv.engine.errors import SessionError
from mmkv.engine.model.gates import Gates
from mmkv.engine.policies import GlobalAllocation, HeadAllocation, Policy
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from tests.support.factories import checkpoint, make_turn
from tests.support.policies import ALL
from tests.support.sessions import LATER, PICTURES, assert_same_rows, load, run, text_ids, turn
from tests.support.tiers import slow_but


def later_life(session: CachedSequence) -> list[Tensor]:
    """What a session does next, turns and budgets included."""
    out = [run(session, text_ids(4, 11)), session.prefill(LATER)]
    if session.engine.policy.evicts:  # else there is none
        session.set_budget(17)
    return [*out, run(session, text_ids(6, 12)), session.prefill(turn(5, seed=4))]


@pytest.mark.parametrize("policy", slow_but(("dbtrimkv",), ALL, "the other policies"))
@pytest.mark.parametrize("how", ["save", "fork"])
def test_a_copy_continues_bit_identically(
    how: str, policy: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = load(folders["vl"], policy=policy, budget=18)
    session = engine.session(19 if engine.policy.evicts else None)
    session.prefill(PICTURES)
    run(session, text_ids(9, 10))
    if how == "fork":
        copy = session.fork()
    else:
        session.save(tmp_path / "s.mmkv", extra={"history": "[é]"})
        # A new engine, whose pool is laid out differently and busy with another session.
        engine = load(folders["vl"], policy=policy, budget=18)
        engine.session().prefill(turn(33))
        copy, extra = engine.load_session(tmp_path / "s.mmkv")
        assert extra == {"history": "[é]"}
    assert (copy.seen, copy.next_position) == (session.seen, session.next_position)
    assert copy.budget == session.budget
    a, b = session.memory(), copy.memory()
    assert (a.entries, a.evicted, a.pages, a.kv_bytes) == (
        b.entries,
        b.evicted,
        b.pages,
        b.kv_bytes,
    )
    assert_same_rows(session, copy)
    ours = later_life(session)
    for x, y in zip(ours, later_life(copy), strict=True):
        assert torch.equal(x, y)
    assert_same_rows(session, copy)


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


def test_a_fork_is_independent(engine: Runtime) -> None:
    session = engine.session()
    session.prefill(PICTURES)
    reference = session.fork()
    run(reference, text_ids(20, 1))
    before = session.memory()
    reference.set_budget(2)
    reference.close()
    assert session.memory() == before
    again = session.fork()
    assert torch.equal(run(session, text_ids(5, 2)), run(again, text_ids(5, 2)))


def test_an_empty_session_can_be_saved_and_forked(engine: Runtime, tmp_path: Path) -> None:
    session = engine.session()
    session.save(tmp_path / "empty")
    copies = [session.fork(), engine.load_session(tmp_path / "empty")[0]]
    expected = session.prefill(PICTURES)
    assert all(torch.equal(copy.prefill(PICTURES), expected) for copy in copies)


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
