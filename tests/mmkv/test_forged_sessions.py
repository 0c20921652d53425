"""Session files of others: forged, too large, or naming what would have to be fetched."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mmkv.api import Engine
from mmkv.chat.saved import chat_extra, chat_options, elsewhere
from mmkv.dialogue_schema import parse_held
from mmkv.engine import session_file
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError, SessionError
from mmkv.engine.strict import InvalidFile
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.target import failure_of
from mmkv.eval.fuzz.targets.model_files import POLICIES, SessionFileInputs

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Rewrite a session file after ``change(metadata, tensors)``, with a checksum that is right."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["digest"]
    change(metadata, tensors)
    metadata["digest"] = session_file._digest(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def with_options(path: Path, options: Any) -> None:
    """Put ``options`` where ``mmkv chat`` keeps its own."""

    def change(metadata: dict[str, Any], _: object) -> None:
        extra = json.loads(metadata["extra"]) | {"mmkv.chat": json.dumps(options)}
        metadata["extra"] = json.dumps(extra)

    forge(path, change)


def pages_held(engine: Engine) -> int:
    return engine.cache.pool.num_pages - engine.cache.pool.free_pages


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> SessionFileInputs:
    made = SessionFileInputs()
    made.prepare(tmp_path_factory.mktemp("sessions"))
    return made


@pytest.fixture
def engine(target: SessionFileInputs) -> Engine:
    return target.by_policy["segments-hs"]


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    with engine.session() as session:
        session.prefill({"input_ids": torch.arange(60)[None] + 3})
        session.save(tmp_path / "s.mmkv")
    return tmp_path / "s.mmkv"


def test_forged_files_are_refused_in_one_line_and_hold_nothing(target: SessionFileInputs) -> None:
    rng = Random(21)
    refused: dict[str, int] = dict.fromkeys(POLICIES, 0)
    for _ in range(240):
        case = target.make(rng)
        try:
            target.run(case)
        except Exception as error:
            assert failure_of(error) is None, f"{type(error).__name__}: {error}"
            lines = str(error)
            assert "\n" not in lines and lines.isprintable()
            assert "still be loaded" not in lines and "fetch the file" not in lines
            refused[case["policy"]] += 1
        assert target.leaked() is None
    assert min(refused.values()) > 50


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "negative length": lambda state, tensors: (
        tensors["length"].view(-1)[:2].add_(torch.tensor([-100, 100]))
    ),
    "lengths beyond the tokens": lambda state, tensors: (
        tensors["length"].view(-1)[:2].add_(torch.tensor([1, -1]) * tensors["length"].view(-1)[1])
    ),
    "a token twice": lambda state, tensors: tensors["position"][:2].fill_(3),
    "a token to come": lambda state, tensors: tensors["position"][:1].fill_(60),
    "a modality of its own": lambda state, tensors: tensors["modality"][:1].fill_(3),
    "NaN keys": lambda state, tensors: tensors["keys"][0].fill_(torch.nan),
    "log_beta above 0": lambda state, tensors: tensors["log_beta"][0].fill_(0.5),
    "long rope": lambda state, tensors: state.update(long_rope=True),
    "an end past the context": lambda state, tensors: state.update(next_position=2000),
    "more prompt than tokens": lambda state, tensors: state.update(prompt_tokens=61),
    "counts that do not add up": lambda state, tensors: state.update(evicted=1),
    "a budget of nothing": lambda state, tensors: state.update(budget=["entries", 0.1]),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_each_kind_of_forgery_is_refused(kind: str, engine: Engine, saved: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        state = json.loads(metadata["state"])
        FORGERIES[kind](state, tensors)
        metadata["state"] = json.dumps(state)

    engine.load_session(saved)[0].close()
    forge(saved, change)
    with pytest.raises(SessionError, match="use a copy, or begin a new session"):
        engine.load_session(saved)
    assert pages_held(engine) == 0
    engine.cache.check()


def test_a_scorer_survives_what_a_file_says_of_its_counts(engine: Engine, saved: Path) -> None:
    """What a scorer keeps is its own: any number is taken and leads to no index out of range."""

    def change(_: object, tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.startswith("memory.segment"):
                tensors[name] = torch.full_like(tensors[name], torch.nan)

    forge(saved, change)
    with engine.load_session(saved)[0] as session:
        session.decode(5)
    engine.cache.check()


def test_a_picture_token_that_was_generated_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Before any turn: it would stand before each later prompt, without a picture."""
    picture = engine.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    path = tmp_path / "s.mmkv"
    with engine.session() as session:
        session._unfed = [picture]
        session.save(path)
    with pytest.raises(SessionError, match="conversation in the session file is damaged"):
        engine.load_session(path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"ids": [3, 4]}, "do not add up"),
        ({"ids": [-1, 2, 3]}, "none of a text"),
        ({"ids": [10**9, 2, 3]}, "none of a text"),
        ({"end": [2, 3, 3, 0]}, "do not add up"),
        ({"end": [4, 4, 4, 0], "ids": [1, 2, 3, 4]}, "not as long as the session"),
        ({"text": None, "ids": None}, "do not add up"),
        ({"rule": "tiles"}, "pieces"),
        ({"more": 1}, "pieces"),
    ],
)
def test_what_a_file_says_was_read_has_to_add_up(change: dict[str, Any], cause: str) -> None:
    piece = {"text": "abc", "ids": [1, 2, 3], "end": [3, 3, 3, 0], "pictures": 0, "rule": None}
    given = {"pieces": [piece | {"reply": False}], "differs": None, "unread": True}
    held = parse_held(json.dumps(given), 3, 100, {7})
    assert held.pieces is not None and held.as_json() == given | {
        "pieces": [piece | {"reply": False, "ids": (1, 2, 3), "end": (3, 3, 3, 0)}]
    }
    assert held.unread is None  # pictures that no file has
    del given["unread"]  # there are none
    assert parse_held(json.dumps(given), 3, 100, {7}).unread == ((), ())
    given["pieces"] = [piece | {"reply": False} | change]
    with pytest.raises(InvalidFile, match=cause):
        parse_held(json.dumps(given), 3, 100, {7})
    assert parse_held("null", 3, 100, {7}).pieces is None  # of older files


@pytest.mark.parametrize("entries", [2**26, 2**34])
def test_a_file_for_which_there_is_no_room_is_refused_before_it_is_read(
    entries: int, engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 GB and 1.3 TB, with a hole for most of them; the pool's limit and the kernel refuse."""
    monkeypatch.setattr(engine.cache.pool, "limit", 200)
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    state = json.loads(metadata["state"])
    state |= {"seen": entries // 4, "entries": entries, "evicted": 0}
    state |= {"prompt_tokens": 60, "next_position": 60}
    metadata["state"] = json.dumps(state)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (shape, dtype) in engine.cache.layout(entries).items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": session_file.NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    lengths = struct.pack("<4q", *[entries // 4] * 4)
    assert header["length"]["data_offsets"] == [0, len(lengths)]
    with saved.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + lengths)
        out.truncate(8 + len(text) + end)
    with pytest.raises(MmkvError, match=r"limit is 200|into memory|use a copy"):
        engine.load_session(saved)
    assert pages_held(engine) == 0


@pytest.mark.parametrize("how", ["load", "fork"])
def test_an_import_that_fails_is_taken_back(
    how: str, engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out while a column is written: every page and slot comes back."""
    session, _ = engine.load_session(saved)
    reference = session.fork()
    held = pages_held(engine)
    columns = type(engine.cache.pool).columns

    def broken(pool: Any) -> list[Any]:
        found = columns(pool)
        return [*found[:3], None, *found[4:]]

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.cache.pool), "columns", broken)
        with pytest.raises((TypeError, AttributeError)):
            if how == "load":
                engine.load_session(saved)
            else:
                session.fork()
    assert pages_held(engine) == held and sum(engine.cache._open) == 2
    engine.cache.check()
    with reference, session:
        assert torch.equal(session.decode(5), reference.decode(5))


# --- What a file names ---


def test_odd_options_in_a_file_are_refused_in_one_line(saved: Path) -> None:
    rng = Random(5)
    good = {"model": "m", "policy": "snapkv:window=8", "lookahead": 2, "evict_every": 1}
    taken = 0
    for _ in range(80):
        with_options(saved, mutate.edit(rng, good) if rng.random() < 0.8 else mutate.value(rng))
        try:
            options = chat_options(saved)
            elsewhere(options)
        except SessionError as error:
            assert "\n" not in str(error)
        else:
            taken += 1
            kinds = {"model": str, "policy": str, "lookahead": float, "evict_every": int}
            kinds["kv"] = str
            assert all(type(value) is kinds[name] for name, value in options.items())
    assert 5 < taken < 60


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("model", {"model": "somebody/model"}),
        ("gates", {"gates": "somebody/gates"}),
        ("policy", {"policy": "wgkv+dbtrimkv:write_gates=somebody/gates"}),
    ],
)
def test_a_file_does_not_decide_what_is_fetched(
    option: str,
    named: dict[str, str],
    mmkv: Callable[..., Ran],
    model: str,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    def fetch(config: Any, *_: Any, **__: Any) -> None:
        started.append(getattr(config, option))
        raise SessionError("fetched")

    monkeypatch.setattr(Engine, "from_config", fetch)
    with_options(saved, {"model": model} | named)
    line = mmkv("chat", "--load", str(saved), "-p", "hi").error_line()
    (value,) = named.values()
    wanted = (value,) if option == "model" else (f"--{option}", value)
    assert f"mmkv chat {' '.join(wanted)} --load {saved}" in line and not started
    # Named by the user, it is loaded.
    assert "fetched" in mmkv("chat", *wanted, "--load", str(saved), "-p", "hi").error_line()
    assert started == [value]
    # So is a folder that is here.
    with_options(saved, {"model": model})
    assert "fetched" in mmkv("chat", "--load", str(saved), "-p", "hi").error_line()


def test_relative_paths_of_gates_are_kept_whole(
    engine: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in one folder, opened in another."""
    (tmp_path / "here" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    policy = "wgkv+dbtrimkv:threshold=0.2,write_gates=mine"
    config = EngineConfig(model="m", policy=policy, gates="mine")
    held = json.loads(chat_extra(engine, config, "m")["mmkv.chat"])
    folder = tmp_path / "here" / "mine"
    assert held["policy"] == f"wgkv+dbtrimkv:threshold=0.2,write_gates={folder}"
    assert held["gates"] == str(folder)
    with_options(saved, held)
    monkeypatch.chdir(tmp_path)
    assert elsewhere(chat_options(saved)) == {"model": "m"}
    folder.rmdir()
    assert elsewhere(chat_options(saved)).keys() == {"model", "gates", "policy"}
